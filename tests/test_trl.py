"""To whoever trains inside TRL: a run of our Trainer is losses.py on whole batches.

A run is TRL's own `train()`: its generation, rewards, accumulation and processes. What it leaves in
param.grad before each optimiser step must be the gradient of losses.py on all answers of that step,
read one by one. As a script (`torchrun --nproc-per-node 2
tests/test_trl.py MODEL`) this file is one process of a run of several.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import naive
import pytest
import torch
from conftest import build
from datasets import Dataset
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import AutoModelForCausalLM, TrainerCallback

import losses
from claims.evidence import Tree
from losses import METHODS, Batch, OldPolicy, bind
from toy.policy import pad

pytest.importorskip("trl", minversion="1.16", reason="TRL is an extra: pip install -e '.[trl]'")
from accelerate.utils import gather_object  # noqa: E402
from trl import GRPOConfig  # noqa: E402

from engines import example  # noqa: E402
from engines.trainer import Trainer  # noqa: E402

ROOT = Path(losses.__file__).parent  # ours, wherever another copy is installed
G, L, LONGEST = 6, 12, 8  # no answer is as long as the budget L
TEMPERATURE = 0.5  # so cold that some answers begin alike
PROMPTS = [{"prompt": text} for text in ("1+1=", "12+3=", "7=", "40+2=", "5+", "six", "7+70=", "8")]

WEIGHTS = [0.5, 0.25]  # of two reward functions


def by_sum(completion_ids, **_):
    """By the ids alone. In some groups all rewards are equal, and their mean in floats is not."""
    return [float(sum(ids) % 5) if ids[0] % 2 else 0.1 for ids in completion_ids]


class Record(TrainerCallback):
    """Before each optimiser step: weights, gradient, and all processes' prompts and answers."""

    def __init__(self, trainer):
        self.steps, self.rows = [], []
        self.take_loss, trainer._compute_loss = trainer._compute_loss, self.note
        trainer.add_callback(self)

    def note(self, model, inputs):
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        for x, seen, y, taken in zip(*(inputs[name] for name in names), strict=True):
            prompt, answer = x[seen > 0].tolist(), y[taken > 0].tolist()
            self.rows.append(SimpleNamespace(prompt=prompt, answer=answer))
        return self.take_loss(model, inputs)

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        weights = parameters_to_vector(model.parameters()).detach()
        self.steps.append((weights, gradient(model), gather_object(self.rows)))
        self.rows = []


def gradient(model):
    return parameters_to_vector(x.grad for x in model.parameters())


def make(path, rewards=(by_sum, by_sum), **options) -> Trainer:
    """Our Trainer of the model at a path. Options are the config's or the Trainer's."""
    config = dict(
        output_dir=tempfile.gettempdir(),
        seed=1,
        max_steps=3,  # with two iterations the third is of another generation
        num_iterations=2,
        learning_rate=1e-3,
        max_grad_norm=0.0,
        temperature=TEMPERATURE,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        num_generations=G,
        max_completion_length=L,
        generation_kwargs={"max_new_tokens": LONGEST},
        reward_weights=WEIGHTS if len(rewards) == 2 else None,
        gradient_checkpointing=False,
    )
    own = {name: options.pop(name) for name in [*options] if not hasattr(GRPOConfig, name)}
    config = GRPOConfig(**example.CPU | example.ALWAYS | config | options | {"logging_steps": 1})
    model = AutoModelForCausalLM.from_pretrained(path)
    own = {"method": "grpo"} | own
    return Trainer(model, list(rewards), config, Dataset.from_list(PROMPTS), **own)


def check_run(path, method, hyper=None, prefix_baseline=False, **options):
    """Train. Value and gradient of each step are those of losses.py."""
    trainer = make(path, method=method, hyper=hyper, prefix_baseline=prefix_baseline, **options)
    steps, model = Record(trainer).steps, AutoModelForCausalLM.from_pretrained(path)
    trainer.train()
    config, rule = trainer.args, trainer.method
    pieces = config.steps_per_generation // config.gradient_accumulation_steps  # steps of one

    def read(weights, rows):
        vector_to_parameters(weights, model.parameters())
        return naive.log_probs(SimpleNamespace(model=model), rows, TEMPERATURE)

    for k, (weights, grad, rows) in enumerate(steps):
        first = k - k % (pieces * config.num_iterations)  # the generation's first step
        answers = [x.answer for x in rows]
        tokens, mask = pad(answers)
        ref, old = (read(steps[at][0], rows).detach() for at in (0, first))
        logp = read(weights, rows)
        rewards = sum(w * torch.tensor(by_sum(answers)) for w in WEIGHTS)
        adv = losses.group_advantages(rewards, G, rule.scale)[:, None].expand_as(logp)
        if rule.credit:
            adv = rule.credit(adv, OldPolicy(tokens, mask, old, rewards, G))
        batch = Batch(logp, old, adv, mask, G, L, ref)
        loss = rule.passes[k // pieces % len(rule.passes)](batch)
        if prefix_baseline:
            loss = losses.prefix_baseline(loss, batch, losses.prefix_nodes(tokens, mask, G))
        model.zero_grad()
        loss.backward()

        logged = trainer.state.log_history[k]["loss"]
        assert logged == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        expected = gradient(model)
        assert expected.norm() > 1e-5
        assert (grad - expected).norm() <= 5e-5 * expected.norm()
    return trainer


def split(micro, accumulate, pieces, **options):
    """pieces > accumulate: several optimiser steps on one generation."""
    return options | dict(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=pieces,
    )


def test_torn_groups_and_a_kl_term(qwen_path):
    """Micro-batches of 4 rows tear groups of 6. The second generation's old policy is not the
    reference. After a step, tokens lie on both sides of these clips."""
    hyper = {"eps_low": 0.15, "eps_high": 0.2}
    trainer = check_run(qwen_path, "grpo", hyper, beta=0.3, seed=0, scale_rewards="batch")
    assert trainer.method.scale == "batch"


def test_passes_credit_and_prefix_baseline_without_dropout(tmp_path, monkeypatch):
    """A method made of all that there is. dapo leaves groups of equal rewards out; dfpo-min has one
    ratio and one weight for an answer, and divides by L; the rule reads the old policy and the
    rewards. Two optimiser steps a pass."""
    mine = replace(
        METHODS["lopti"],
        passes=(losses.dapo, losses.dfpo_min),
        credit=lambda adv, old: adv * old.logp * old.rewards[:, None],
    )
    monkeypatch.setitem(METHODS, "mine", mine)
    path = build("qwen2", tmp_path, attention_dropout=0.3)
    options = split(4, 3, 6, scale_rewards="none", max_steps=5)
    check_run(path, "mine", {"eps": 0.6}, prefix_baseline=True, **options)


REFUSED = [  # what would train something else in silence, and what the line names
    (dict(method="dr-grpo"), "--scale_rewards none"),
    (dict(method="lopti", num_iterations=3), "--num_iterations 2"),
    (dict(loss_type="dr_grpo"), "--loss_type dr_grpo"),
    (split(3, 1, 2), "--steps_per_generation"),  # half a group in a step
    (dict(rewards=[lambda completion_ids, **_: [None] * len(completion_ids)]), "a number"),
    (dict(generation_kwargs={"suppress_tokens": [*range(4, 12)]}), "nats"),
]


@pytest.mark.parametrize("options, said", REFUSED)
def test_a_wrong_setting_is_refused(qwen_path, options, said):
    with pytest.raises(ValueError, match=said):
        make(qwen_path, **options).train()


# ---------------- the example


def test_the_example_learns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example.main(["--max_steps", "20"])
    first, *_, last = re.findall(r"step \d+: reward (\S+)", capsys.readouterr().out)
    assert float(last) > float(first) + 0.05


def test_the_examples_flags_reach_the_trainer(qwen_path):
    flags = "--hyper eps_low=.1 --prefix_baseline --scale_rewards False --beta .04".split()
    flags += ["--model_name_or_path", qwen_path]
    trainer = example.make_trainer(*example.parse(flags))
    assert trainer.method.hyper == dict(eps_low=0.1, eps_high=0.2, kl=0.04, kl_ratio=True)
    assert trainer.prefix_baseline and trainer.method.scale == "mean"


# ---------------- other trainers' losses as losses of ours

CLIP = dict(eps_low=0.2, eps_high=0.2)  # TRL's default, and verl's
TWINS = [  # a setting of theirs, and its twin in losses.py with its hyperparameters
    ("trl", {}, losses.token_grpo, CLIP),
    ("trl", {"loss_type": "grpo", "kl": 0.04}, losses.grpo, {"kl": 0.04, "kl_ratio": True}),
    ("trl", {"loss_type": "grpo", "kl": 0.04, "kl_ratio": False}, losses.grpo, {"kl": 0.04}),
    ("trl", {"importance_sampling_level": "sequence", "loss_type": "grpo"}, losses.gspo, CLIP),
    ("trl", {"loss_type": "dr_grpo"}, losses.dr_grpo, {}),
    ("trl", {"loss_type": "cispo", "epsilon_high": 5.0}, losses.cispo, {}),
    ("verl", {"name": "grpo", "divisor": "own length"}, losses.grpo, {}),
]


def verls_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    """In place of verl, which is too large to install here. Its losses have these arguments."""
    assert loss_agg_mode == config.loss_agg_mode == "own length"
    G, L = config.rollout_n, response_mask.shape[1]
    return losses.grpo(Batch(log_prob, old_log_prob, advantages, response_mask > 0, G, L)), {}


@pytest.mark.parametrize("engine, settings, ours, hyper", TWINS, ids=[str(x[1]) for x in TWINS])
def test_value_and_gradient_are_those_of_losses(engine, settings, ours, hyper, monkeypatch):
    """Of answers of unequal lengths, with ratios on both sides of 5, where cispo clips."""
    core = SimpleNamespace(get_policy_loss_fn={"grpo": verls_loss}.get)
    config = SimpleNamespace(ActorConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", core)
    monkeypatch.setitem(sys.modules, "verl.workers.config", config)
    batch = Tree(0, 5).batch(2.0, garbage=0.0)
    [theirs] = bind(str(ROOT / "engines" / f"{engine}_loss.py"), settings).passes
    pair = ours(batch, **hyper), theirs(batch)
    pushes = [losses.token_pushes(loss, batch.logp) for loss in pair]
    torch.testing.assert_close((pair[1], pushes[1]), (pair[0], pushes[0]), rtol=1e-6, atol=1e-8)


# ---------------- two processes


@pytest.mark.skipif(not os.environ.get("LONG"), reason="two processes: LONG=1")
def test_two_processes(qwen_path):
    """Groups torn over processes and micro-batches."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command += [__file__, qwen_path]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    for accumulate in (1, 3):  # 9 rows a process, groups of 6
        options = split(9 // accumulate, accumulate, accumulate)
        longest = LONGEST - 4 * int(os.environ["RANK"])  # one process's answers end first
        options["generation_kwargs"] = {"max_new_tokens": longest}
        check_run(sys.argv[1], "grpo", prefix_baseline=True, beta=0.3, **options)
