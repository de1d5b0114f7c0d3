"""A run of TRL with a method of ours is losses.py on whole batches: for those who train with TRL.

A run is TRL's own `train()`: its generation, rewards, accumulation and processes. What it leaves in
param.grad before each optimiser step must be the gradient of losses.py on all answers of that step,
scored by naive.py, and what it logs must be what naive.py finds. As a script (`torchrun
--nproc-per-node 2 tests/test_trl.py MODEL`) this file is one process of a run of several.
"""

import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import naive
import pytest
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, TrainerCallback

import losses
from losses import METHODS, Batch, OldPolicy, group_advantages
from train import Config, bind, load_policy

pytest.importorskip("trl", minversion="1.16", reason="TRL is an extra: pip install -e '.[trl]'")
from accelerate.utils import gather_object  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from engines import example, siblings  # noqa: E402
from engines.trl import Trainer, log_learning_tax  # noqa: E402

G, L, LONGEST = 4, 12, 8  # no answer is as long as the budget L
TEMPERATURE = 0.5  # so cold that some answers begin alike
PROMPTS = [{"prompt": text} for text in ("1+1=", "12+3=", "7=", "40+2=", "5+", "six", "7+70=", "8")]
# After one step of the optimiser, tokens lie on both sides of these. Others keep their defaults.
HYPER = {"grpo": {"eps_low": 0.15, "eps_high": 0.2}, "gspo": {"eps_low": 0.5, "eps_high": 0.6}}


# Rewards are of the ids alone, and equal within some groups. Some answers have only one of them.
WEIGHTS = [0.75, 0.5]


def by_sum(completion_ids, **_):
    return [float(sum(ids) % 3) if ids[0] % 4 else 0.1 for ids in completion_ids]


def by_length(completion_ids, **_):
    return [len(ids) % 2 * 1.0 if ids[0] % 4 == 1 else None for ids in completion_ids]


def total(answers):
    pairs = zip(by_sum(answers), by_length(answers), strict=True)
    return torch.tensor([WEIGHTS[0] * a + WEIGHTS[1] * (b or 0.0) for a, b in pairs])


def sampled(token):
    """log pi of an engine with other numerics, which cannot score every token."""
    return None if token % 5 == 0 else math.sin(token) - 2


class Record(TrainerCallback):
    """Before each optimiser step: parameters, gradients, and all processes' prompts and answers."""

    def __init__(self, trainer):
        self.steps, self.prompts, self.answers = [], [], []
        self.take_loss, trainer._compute_loss = trainer._compute_loss, self.note
        trainer.add_callback(self)

    def note(self, model, inputs):
        for part, rows in (("prompt", self.prompts), ("completion", self.answers)):
            pairs = zip(inputs[f"{part}_ids"], inputs[f"{part}_mask"].bool(), strict=True)
            rows += [row[mask].tolist() for row, mask in pairs]
        return self.take_loss(model, inputs)

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        grads = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        self.steps.append(
            (weights, grads, gather_object(self.prompts), gather_object(self.answers))
        )
        self.prompts, self.answers = [], []


def make(model, method=None, hyper=None, prefix_baseline=False, **options):
    """Our trainer of a model or the one at a path; TRL's own without a method."""
    config = dict(
        output_dir=tempfile.gettempdir(),
        save_strategy="no",
        report_to=[],
        seed=1,
        use_cpu=True,
        bf16=False,
        max_steps=2,
        num_iterations=2,
        learning_rate=1e-3,
        max_grad_norm=0.0,
        logging_steps=1,
        temperature=TEMPERATURE,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=G,
        max_completion_length=L,
        generation_kwargs={"max_new_tokens": LONGEST},
        reward_weights=WEIGHTS,
        scale_rewards="none" if method and METHODS[method].scale == "mean" else "group",
        gradient_checkpointing=False,
    )
    if isinstance(model, str):
        model = AutoModelForCausalLM.from_pretrained(model)
    ours = {"method": method, "hyper": hyper, "prefix_baseline": prefix_baseline} if method else {}
    config, data = GRPOConfig(**config | options), Dataset.from_list(PROMPTS)
    trainer = Trainer if method else GRPOTrainer
    return trainer(model, [by_sum, by_length], config, data, **ours)


def hand_on(generate, *args):
    """TRL's answers, with the log-probs that another sampler would hand on, as vLLM does."""
    answers, _ = generate(*args)
    return answers, [list(map(sampled, y)) for y in answers]


def again(
    path, steps, method, prefix_baseline=False, sampler=False, num_iterations=2, beta=0.0, **_
):
    """The same optimiser steps by losses.py and naive.py: gradients, and what is to be logged."""
    hyper = HYPER.get(method, {}) | ({"kl": beta} if beta else {})
    rule, policy = bind(method, hyper), load_policy(Config(), None, path)
    start = deepcopy(policy.model.state_dict())
    for k, (weights, _, prompts, answers) in enumerate(steps):

        def score(weights, prompts=prompts, answers=answers):
            policy.model.load_state_dict(weights, strict=False)
            policy.model.zero_grad()
            return padded(naive.log_probs(policy, prompts, answers, TEMPERATURE))

        assert all(prompts[i] == prompts[i - i % G] for i in range(len(prompts)))
        ref, logp = score(start).detach(), score(weights)
        # With one iteration each step has answers of its own, else all are of the start.
        old = logp.detach() if num_iterations == 1 else ref
        if sampler and method == "recentred":
            known = padded([torch.tensor([sampled(i) or 0.0 for i in x]) for x in answers])
            old = torch.where(known == 0, old, known)
        tokens = padded([torch.tensor(x) for x in answers])
        mask = padded([torch.ones(len(x), dtype=torch.bool) for x in answers])
        rewards = total(answers)
        A = group_advantages(rewards, G, rule.scale)
        adv = A[:, None].expand_as(logp)
        if rule.credit:
            adv = rule.credit(adv, OldPolicy(tokens, mask, old, rewards, G))
        batch = Batch(logp, old, adv, mask, G, L, ref)
        loss = rule.passes[k % len(rule.passes)](batch)
        if prefix_baseline:
            loss = losses.prefix_baseline(loss, batch, losses.prefix_nodes(tokens, mask, G))
        c = losses.token_coefficients(loss, logp).tolist()
        loss.backward()
        log = {
            "loss": loss.item(),
            "learning_tax": naive.tax(c, answers, A.tolist(), G),
            "sibling_share": sibling_share(answers),
        }
        yield {name: weight.grad for name, weight in policy.model.named_parameters()}, log


def sibling_share(answers):
    """The share of tokens at whose history another answer of the group takes one, too."""
    histories = ((i // G, *x[:t]) for i, x in enumerate(answers) for t in range(len(x)))
    visits = Counter(histories)
    return sum(n for n in visits.values() if n > 1) / visits.total()


def padded(rows):
    return pad_sequence(rows, batch_first=True)


def check_run(path, method, sampler=False, **options):
    """Train. Value, gradient and numbers of each step are those of losses.py and naive.py."""
    trainer = make(path, method, hyper=HYPER.get(method), **options)
    if sampler:
        trainer._generate_single_turn = partial(hand_on, trainer._generate_single_turn)
    steps = Record(trainer).steps
    trainer.train()
    found = again(path, steps, method, sampler=sampler, **options)
    for step, line, (ours, log) in zip(steps, trainer.state.log_history[:2], found, strict=True):
        assert {key: line[key] for key in log} == pytest.approx(log, rel=1e-4, abs=1e-6)
        assert line["loss"] == pytest.approx(log["loss"], rel=1e-5, abs=1e-6)
        assert 0.1 < line["entropy"] < 5  # nats; the model has 100 ids
        pair = step[1], ours
        a, b = (torch.cat([g[name].flatten() for name in sorted(ours)]).double() for g in pair)
        assert b.norm() > 1e-4
        assert (a - b).norm() <= 1e-5 * b.norm(), ((a - b).norm() / b.norm()).item()


def split(micro, accumulate, pieces, **options):
    """pieces > accumulate: several optimiser steps on one generation."""
    return options | dict(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=pieces,
    )


SETTINGS = {  # micro-batches of 2 rows tear groups of 4
    "grpo": split(2, 4, 4, beta=0.3, num_iterations=1),  # so that old is not the reference
    "dapo": split(2, 2, 4),
    "gspo": split(4, 1, 2, prefix_baseline=True),
    "cispo": split(2, 4, 4, prefix_baseline=True),
    "reinforce": dict(num_iterations=1),
    "dr-grpo": dict(sampler=True),  # which it does not look at; L is in its average
    "recentred": dict(sampler=True),
}
NOT_HERE = ("nthr", "nthr-random", "ibpo")


@pytest.mark.parametrize("method", [name for name in METHODS if name not in NOT_HERE])
def test_a_run_is_losses_py_on_whole_batches(qwen_path, method):
    check_run(qwen_path, method, **SETTINGS.get(method, {}))


def test_trls_own_run_is_measured_and_stays(qwen_path):
    """TRL's grpo logs what ours does. Its weights are those of a run without, to the last bit."""
    theirs = dict(loss_type="grpo", epsilon=0.15, epsilon_high=0.2)
    weights, logs = [], []
    for options in (theirs, theirs, dict(method="grpo", hyper=HYPER["grpo"])):
        trainer = make(qwen_path, **options)
        if len(logs) == 1:
            log_learning_tax(trainer)
        trainer.train()
        trainer.evaluate(Dataset.from_list(PROMPTS[:2]))
        weights.append(trainer.model.state_dict())
        logs.append(trainer.state.log_history)
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    _, measured, ours = logs
    for name in ("loss", "learning_tax", "sibling_share"):
        pair = ([line[name] for line in log[:2]] for log in (measured, ours))
        assert next(pair) == pytest.approx(next(pair), rel=1e-4, abs=1e-6)
    assert measured[1]["learning_tax"] > 0.01


REFUSED = [  # what a user gets wrong, and what the line names
    (dict(method="nthr"), "--method nthr"),
    (dict(method="dr-grpo", scale_rewards="group"), "--scale_rewards none"),
    (dict(loss_type="dr_grpo"), "--loss_type dr_grpo"),  # the loss is the method's
    (dict(method="lopti", num_iterations=1), "--num_iterations 2"),
    (dict(method="gspo", beta=0.1), "--beta 0.1"),
    (dict(hyper={"kl": 0.1}), "--beta"),  # TRL's flag would be left at 0
    (dict(per_device_train_batch_size=3, steps_per_generation=4), "--steps_per_generation"),
    (dict(attention_dropout=0.1), "dropout"),
]


@pytest.mark.parametrize("options, said", REFUSED, ids=str)
def test_a_wrong_setting_is_refused_in_one_line(qwen_path, options, said):
    options = {"method": "grpo", "attention_dropout": 0.0} | options
    dropout = options.pop("attention_dropout")
    model = AutoModelForCausalLM.from_pretrained(qwen_path, attention_dropout=dropout)
    with pytest.raises(ValueError) as error:
        make(model, **options)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_an_answer_without_a_reward_is_refused(qwen_path):
    trainer = make(qwen_path, "grpo")
    trainer.reward_funcs = [lambda completion_ids, **_: [None] * len(completion_ids)] * 2
    with pytest.raises(ValueError, match="needs a number"):
        trainer.train()


def test_the_example_learns_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert example.reward(["3", "34", "43"], ["3"] * 3) == [1.0, 0.5, 0.0]
    flags = ["--method", "dfpo-min", "--hyper", "eps=.1", "--prefix-baseline"]
    trainer = example.make_trainer(*example.parse(flags))
    assert trainer.method.hyper["eps"] == 0.1 and trainer.prefix_baseline
    for flags in ([], ["--method", "trl", "--max_steps", "10"]):
        example.main(flags)
        said = capsys.readouterr().out
        rewards = [float(x) for x in re.findall(r"reward ([\d.]+), learning_tax", said)]
        assert rewards[-1] > rewards[0] + 0.02
    assert AutoModelForCausalLM.from_pretrained("out").num_parameters() > 1000


def test_siblings_share_all_words_before(monkeypatch, capsys):
    """Answers 5 6 end, 5 6 7 8 and 5 9 9 3: who takes a token after the same words?"""
    tokens = torch.tensor([[5, 6, 2, 0], [5, 6, 7, 8], [5, 9, 9, 3]])
    answers = SimpleNamespace(tokens=tokens, mask=tokens > 0)
    monkeypatch.setattr(siblings.train, "sample", lambda *_: answers)
    siblings.main(["--group-size", "3", "--max-tokens", "4"])
    said = capsys.readouterr().out
    assert "3 tokens of an answer, 0.889 have" in said  # 3 + 3 + 2 of 9
    assert "4 tokens of an answer, 0.727 have" in said  # and of 11


@pytest.mark.skipif(not os.environ.get("LONG"), reason="several processes: LONG=1")
def test_two_processes(qwen_path):
    """Groups torn over processes and micro-batches. Each process checks the whole."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*launch, __file__, qwen_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    for accumulate in (1, 2):  # 6 rows a process, groups of 4
        options = split(6 // accumulate, accumulate, accumulate)
        check_run(sys.argv[1], "ar-lopti", prefix_baseline=True, **options)
        check_run(sys.argv[1], "grpo", **options)
