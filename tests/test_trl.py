"""A run of TRL with a method of ours is losses.py on whole batches: for those who train with TRL.

A run is TRL's own `train()`: its generation, rewards, accumulation and processes. What it leaves in
param.grad before each optimiser step must be the gradient of losses.py on all answers of that step,
read one by one by naive.py, and so must what it logs. As a script (`torchrun --nproc-per-node 2
tests/test_trl.py MODEL`) this file is one process of a run of several.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import naive
import pytest
import torch
from datasets import Dataset
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, TrainerCallback

import losses
from losses import METHODS, Batch, OldPolicy, bind
from toy.arithmetic import Arithmetic
from toy.policy import pad
from train import Config, load_policy

pytest.importorskip("trl", minversion="1.16", reason="TRL is an extra: pip install -e '.[trl]'")
from accelerate.utils import gather_object  # noqa: E402
from trl import GRPOConfig  # noqa: E402

from engines import example  # noqa: E402
from engines.trl import Trainer  # noqa: E402

G, L, LONGEST = 6, 12, 8  # no answer is as long as the budget L
TEMPERATURE = 0.5  # so cold that some answers begin alike
PROMPTS = [{"prompt": text} for text in ("1+1=", "12+3=", "7=", "40+2=", "5+", "six", "7+70=", "8")]

# Rewards depend on the ids alone. In some groups all of them are 0.075, whose mean in floats is
# another number.
WEIGHTS = [0.75, 0.5]


def by_sum(completion_ids, **_):
    return [float(sum(ids) % 5) if ids[0] % 2 else 0.1 for ids in completion_ids]


def by_length(completion_ids, **_):
    return [len(ids) % 2 * 1.0 if ids[0] % 2 else 0.0 for ids in completion_ids]


def total(answers):
    return torch.tensor([by_sum(answers), by_length(answers)]).T @ torch.tensor(WEIGHTS)


class Record(TrainerCallback):
    """Before each optimiser step: weights, gradient, and all processes' prompts and answers."""

    def __init__(self, trainer):
        self.steps, self.rows = [], []
        self.take_loss, trainer._compute_loss = trainer._compute_loss, self.note
        trainer.add_callback(self)

    def note(self, model, inputs):
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        for x, seen, y, taken in zip(*(inputs[name] for name in names), strict=True):
            self.rows.append((x[seen > 0].tolist(), y[taken > 0].tolist()))
        return self.take_loss(model, inputs)

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        weights = parameters_to_vector(model.parameters()).detach()
        self.steps.append((weights, gradient(model), gather_object(self.rows)))
        self.rows = []


def gradient(model):
    return parameters_to_vector(x.grad for x in model.parameters())


def make(path, rewards=(by_sum, by_length), experts=None, **options):
    """A trainer of the model at a path. Options are the config's or its own."""
    config = dict(
        output_dir=tempfile.gettempdir(),
        seed=1,
        max_steps=3,  # with two iterations the third is of another generation
        num_iterations=2,
        learning_rate=1e-3,
        max_grad_norm=0.0,
        logging_steps=1,
        temperature=TEMPERATURE,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        num_generations=G,
        max_completion_length=L,
        generation_kwargs={"max_new_tokens": LONGEST},
        reward_weights=WEIGHTS,
        gradient_checkpointing=False,
    )
    own = {name: options.pop(name) for name in [*options] if not hasattr(GRPOConfig, name)}
    config = GRPOConfig(**example.CPU | example.ALWAYS | config | options)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.update(experts or {})
    return Trainer(model, list(rewards), config, Dataset.from_list(PROMPTS), **own)


def check_run(path, method, hyper=None, prefix_baseline=False, **options):
    """Train. Value, gradient and numbers of each step are those of losses.py."""
    trainer = make(path, method=method, hyper=hyper, prefix_baseline=prefix_baseline, **options)
    steps, policy = Record(trainer).steps, load_policy(Config(), Arithmetic(), path)
    trainer.train()
    config, logged = trainer.args, trainer.state.log_history
    kl = {"kl": config.beta, "kl_ratio": config.use_bias_correction_kl} if config.beta else {}
    rule = bind(method, (hyper or {}) | kl)
    scale = {"group": "std", "none": "mean", "batch": "batch"}[config.scale_rewards]
    pieces = config.steps_per_generation // config.gradient_accumulation_steps  # steps of one

    def read(weights, rows):
        """log pi of the taken tokens (N, T), and the entropies of all, in nats."""
        vector_to_parameters(weights, policy.model.parameters())
        cold = naive.tempered(policy, TEMPERATURE)
        full = [naive.all_log_probs(cold, *row) for row in rows]  # each (T_i, V)
        spread = torch.cat([-(x.exp() * x).sum(1).detach() for x in full])
        taken = [x[range(len(y)), y] for x, (_, y) in zip(full, rows, strict=True)]
        return pad_sequence(taken, batch_first=True), spread

    for k, (weights, grad, rows) in enumerate(steps):
        first = k - k % (pieces * config.num_iterations)  # the generation's first step
        answers = [y for _, y in rows]
        ref, old = (read(steps[at][0], rows)[0].detach() for at in (0, first))
        logp, spread = read(weights, rows)
        tokens, mask = pad(answers)
        adv = losses.group_advantages(total(answers), G, scale)[:, None].expand_as(logp)
        if rule.credit:
            adv = rule.credit(adv, OldPolicy(tokens, mask, old, total(answers), G))
        batch = Batch(logp, old, adv, mask, G, L, ref)
        loss = rule.passes[k // pieces % len(rule.passes)](batch)
        if prefix_baseline:
            loss = losses.prefix_baseline(loss, batch, losses.prefix_nodes(tokens, mask, G))
        policy.model.zero_grad()
        loss.backward()

        log, line = {"loss": loss.item(), "entropy": spread.mean().item()}, logged[k]
        assert {key: line[key] for key in log} == pytest.approx(log, rel=1e-4, abs=1e-6)
        expected = gradient(policy.model)
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


def test_kl_and_torn_groups(qwen_path):
    """Micro-batches of 4 rows tear groups of 6. The second generation's old policy is not the
    reference. After a step, tokens lie on both sides of these clips."""
    check_run(qwen_path, "grpo", {"eps_low": 0.15, "eps_high": 0.2}, beta=0.3)


def test_passes_credit_and_prefix_baseline(qwen_path, monkeypatch):
    """A method made of all that there is. dapo leaves groups of equal rewards out; dfpo-min has one
    ratio and one weight for an answer, and divides by L; the rule reads the old policy and the
    rewards. Two optimiser steps a pass."""
    mine = replace(
        METHODS["lopti"],
        passes=(losses.dapo, losses.dfpo_min),
        credit=lambda adv, old: adv * old.logp * old.rewards[:, None],
    )
    monkeypatch.setitem(METHODS, "mine", mine)
    options = split(4, 3, 6, scale_rewards="none", max_steps=5)
    check_run(qwen_path, "mine", {"eps": 0.6}, prefix_baseline=True, **options)


def test_an_evaluation_has_groups_of_its_own_size(qwen_path):
    """In the middle of a generation. Before: k3 without the ratio, and the std of the batch."""
    options = dict(num_generations_eval=2, scale_rewards="batch")
    trainer = check_run(qwen_path, "grpo", beta=0.3, use_bias_correction_kl=False, **options)
    seen = trainer.evaluate(Dataset.from_list(PROMPTS[:5]))
    assert 0 < seen["eval_reward"] < 4


def with_a_tool(prompts, trainer):
    """Of each answer the tool has written the last word."""
    n = len(prompts)
    answers = {"completion_ids": [[6, 7]] * n, "env_mask": [[1, 0]] * n}
    return answers | {"prompt_ids": [[5]] * n, "logprobs": None}


REFUSED = [  # what would train something else in silence, and what the line names
    (dict(method="dr-grpo"), "--scale_rewards none"),
    (dict(method="lopti", num_iterations=3), "--num_iterations 2"),
    (dict(loss_type="dr_grpo"), "--loss_type dr_grpo"),
    (split(3, 1, 2), "--steps_per_generation"),  # half a group in a step
    (dict(rewards=[lambda completion_ids, **_: [None] * len(completion_ids)] * 2), "a number"),
    (dict(rollout_func=with_a_tool), "tools"),
    (dict(experts={"output_router_logits": False, "router_aux_loss_coef": 0.1}), "--router_aux"),
]


@pytest.mark.parametrize("options, said", REFUSED)
def test_a_wrong_setting_is_refused(qwen_path, options, said):
    with pytest.raises(ValueError, match=said):
        make(qwen_path, **{"method": "grpo"} | options).train()


def test_the_example_learns_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example.main("--max_steps 20 --save_strategy steps --save_steps 15".split())
    example.main("--max_steps 20 --resume_from_checkpoint out/checkpoint-15".split())
    printed = re.findall(r"step (\d+): reward (\S+)", capsys.readouterr().out)
    steps, rewards = zip(*printed, strict=True)
    assert steps == ("5", "10", "15", "20", "20")
    assert float(rewards[3]) > float(rewards[0]) + 0.05


def test_the_example_pays_for_a_right_start_and_for_stopping_there():
    assert example.reward(["3", "34", [{"content": "43"}]], ["3"] * 3) == [1.0, 0.5, 0.0]


def test_the_example_refuses_too_few_rows():
    with pytest.raises(SystemExit, match="20 prompts, and ROWS only 10"):
        example.main(["--num_generations", "4"])


def test_the_examples_flags_reach_the_trainer(qwen_path):
    flags = ["--method", "dfpo-min", "--hyper", "eps=.1 ratio=product", "--prefix-baseline"]
    ours = example.make_trainer(*example.parse(flags))
    assert ours.method.hyper == {"eps": 0.1, "ratio": "product"} and ours.prefix_baseline
    assert ours.args.disable_dropout

    flags = f"--model_name_or_path {qwen_path} --dtype bfloat16 --model_revision v2".split()
    flags += ["--attn_implementation", "eager", "--model_init_kwargs", '{"use_safetensors": true}']
    args = example.make_trainer(*example.parse(flags)).args
    loading = {"dtype": "bfloat16", "attn_implementation": "eager", "revision": "v2"}
    assert args.model_init_kwargs == loading | {"device_map": None, "use_safetensors": True}
    assert args.max_steps == -1  # that of the tiny model is 60


@pytest.mark.skipif(not os.environ.get("LONG"), reason="two processes: LONG=1")
def test_two_processes(qwen_path):
    """Groups torn over processes and micro-batches."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = str(Path(losses.__file__).parent)  # ours, wherever another copy is installed
    env = os.environ | {"PYTHONPATH": root, "ACCELERATE_USE_CPU": "true"}
    command += [__file__, qwen_path]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    for accumulate in (1, 3):  # 9 rows a process, groups of 6
        options = split(9 // accumulate, accumulate, accumulate)
        check_run(sys.argv[1], "ar-lopti", prefix_baseline=True, **options)
        longest = LONGEST - 4 * int(os.environ["RANK"])  # one process's answers end first
        more = {"generation_kwargs": {"max_new_tokens": longest}}
        check_run(sys.argv[1], "grpo", beta=0.3, **options, **more)
