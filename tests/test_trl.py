"""A run of TRL with a method of ours is losses.py on whole batches: for those who train with TRL.

A run is TRL's own `train()`: its generation, rewards, accumulation and processes. What it leaves in
param.grad before each optimiser step must be the gradient of losses.py on all answers of that step,
scored by naive.py, and what it logs must be what naive.py finds. As a script (`accelerate launch
tests/test_trl.py MODEL OUT`) this file is one process of a run of several.
"""

import itertools
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import naive
import pytest
import torch
from datasets import Dataset
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, TrainerCallback

import losses
from losses import METHODS, Batch, Method, OldPolicy, group_advantages
from train import Config, bind, load_policy

pytest.importorskip("trl", minversion="1.16", reason="TRL is an extra: pip install -e '.[trl]'")
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from engines import example, siblings  # noqa: E402
from engines.trl import Trainer, log_learning_tax  # noqa: E402

G, L, LONGEST = 4, 12, 8  # no answer is as long as the budget L
TEMPERATURE = 0.5  # so cold that some answers begin alike
PROMPTS = [{"prompt": text} for text in ("1+1=", "12+3=", "7=", "40+2=", "5+", "six", "7+70=", "8")]
# After one step of the optimiser, tokens lie on both sides of these. Others keep their defaults.
HYPER = {"grpo": {"eps_low": 0.15, "eps_high": 0.2}, "gspo": {"eps_low": 0.5, "eps_high": 0.6}}
# TRL's own loss is ours, but for a constant factor. The second step leaves its clip.
TRLS, NARROW = "TRL's grpo", 0.01
OWN = Method((partial(losses.grpo, eps_low=NARROW, eps_high=NARROW),))


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
    """Parameters, gradients and rows, as they are before each optimiser step.

    A row is the ids of a prompt, those of an answer, and its advantage by TRL.
    """

    def __init__(self, trainer):
        self.steps, self.seen, self.take_loss = [], [], trainer._compute_loss
        trainer._compute_loss = self.note
        trainer.add_callback(self)

    def note(self, model, inputs):
        self.seen.append(inputs)
        return self.take_loss(model, inputs)

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        parameters = {k: full(v) for k, v in model.named_parameters()}
        gradients = {k: full(v.grad) for k, v in model.named_parameters()}
        rows = []
        for piece in self.seen:
            parts = ids_of(piece, "prompt"), ids_of(piece, "completion"), piece["advantages"]
            rows += zip(*parts, strict=True)
        self.steps.append((parameters, gradients, rows))
        self.seen = []


def ids_of(piece, part):
    pairs = zip(piece[f"{part}_ids"], piece[f"{part}_mask"].bool(), strict=True)
    return [row[seen].tolist() for row, seen in pairs]


def full(x):
    """A copy; of a sharded tensor the whole one."""
    x = x.detach()
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).clone()


def make(model, method=None, hyper=None, cancel=False, **options):
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
        use_bias_correction_kl=False,
    )
    if isinstance(model, str):
        model = AutoModelForCausalLM.from_pretrained(model)
    ours = {"method": method, "hyper": hyper, "cancel": cancel} if method else {}
    config, data = GRPOConfig(**config | options), Dataset.from_list(PROMPTS)
    trainer = Trainer if method else GRPOTrainer
    return trainer(model, [by_sum, by_length], config, data, **ours)


def run(path, name, sampler=False, **options):
    """Train: a method, a method on a sharded model, or TRL's own. The steps, their log, model."""
    kind, _, method = name.rpartition(" ")
    if kind == "TRL's":
        trainer = make(path, loss_type=method, epsilon=NARROW, **options)
        log_learning_tax(trainer)
    else:
        model = shard(path) if kind else path
        trainer = make(model, method, hyper=HYPER.get(method), **options)
    if kind == "sharded":
        trainer.accelerator.prepare_model = lambda model, **_: model  # no DDP around it
    if sampler:
        trainer._generate_single_turn = partial(hand_on, trainer._generate_single_turn)
    record = Record(trainer)
    trainer.train()
    return record.steps, trainer.state.log_history[:-1]


def hand_on(generate, *args):
    """TRL's answers, with the log-probs that another sampler would hand on, as vLLM does."""
    answers, _ = generate(*args)
    return answers, [list(map(sampled, y)) for y in answers]


def shard(path):
    """By hand what accelerate's FSDP2 does on GPUs: it has none for CPUs."""
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    model = AutoModelForCausalLM.from_pretrained(path)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    tail = [model.model.norm, model.model.embed_tokens, model.lm_head]  # with tied weights
    fully_shard(tail, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def again(path, steps, name, options):
    """The same optimiser steps by losses.py and naive.py: gradients, and what is to be logged."""
    method = name.rpartition(" ")[2]
    hyper = HYPER.get(method, {}) | ({"kl": options["beta"]} if "beta" in options else {})
    rule = OWN if name == TRLS else bind(method, hyper)
    policy = load_policy(Config(), None, path)
    start = deepcopy(policy.model.state_dict())
    for k, (parameters, _, rows) in enumerate(steps):
        prompts, answers, A = zip(*rows, strict=True)

        def score(weights, prompts=prompts, answers=answers):
            policy.model.load_state_dict(weights, strict=False)
            policy.model.zero_grad()
            return padded(naive.log_probs(policy, prompts, answers, TEMPERATURE))

        ref, logp = score(start).detach(), score(parameters)
        # With one iteration each step has answers of its own, else all are of the start.
        old = logp.detach() if options.get("num_iterations") == 1 else ref
        if options.get("sampler") and method == "recentred":
            known = padded([torch.tensor([sampled(i) or 0.0 for i in x]) for x in answers])
            old = torch.where(known == 0, old, known)
        tokens = padded([torch.tensor(x) for x in answers])
        mask = padded([torch.ones(len(x), dtype=torch.bool) for x in answers])
        A, rewards = torch.stack(A), total(answers)
        if name != TRLS:  # TRL shuffles its rows, ours stay in their groups
            assert all(prompts[i] == prompts[i - i % G] for i in range(len(rows)))
            A = group_advantages(rewards, G, rule.scale)
        adv = A[:, None].expand_as(logp)
        if rule.credit:
            adv = rule.credit(adv, OldPolicy(tokens, mask, old, rewards, G))
        batch = Batch(logp, old, adv, mask, G, L, ref)
        loss = rule.passes[k % len(rule.passes)](batch)
        c = losses.token_coefficients(loss, logp)
        unit = (c / (logp - old).exp()).tolist()
        if options.get("cancel"):
            loss = losses.cancel(loss, batch, losses.prefix_nodes(tokens, mask, G))
            c = losses.token_coefficients(loss, logp)
        loss.backward()
        # In one group, because prompts tell groups apart; on prompts nothing pushes.
        pushes = [[0.0] * len(x) + row for x, row in zip(prompts, c.tolist(), strict=True)]
        whole = [x + y for x, y in zip(prompts, answers, strict=True)]
        log = {"learning_tax": naive.tax(pushes, whole, A.tolist(), len(rows))}
        log |= cancelling(unit, prompts, answers)
        if name != TRLS:
            log["loss"] = loss.item()
        yield {k: v.grad for k, v in policy.model.named_parameters()}, log


def cancelling(unit, prompts, answers):
    """engines.trl.what_cancelling_does, one history at a time."""
    visits = defaultdict(list)
    for prompt, answer, row in zip(prompts, answers, unit, strict=True):
        for t in range(len(answer)):
            visits[str(prompt), str(answer[:t])].append(row[t])
    shared = [u for u in visits.values() if len(u) > 1]
    squares = products = 0.0
    for pushes in shared:
        for push in pushes:
            others = (sum(pushes) - push) / (len(pushes) - 1)
            squares += push**2
            products += push * others
    share = sum(map(len, shared)) / sum(map(len, answers))
    return {"sibling_share": share, "cancelling_t": products / squares}


def padded(rows):
    return pad_sequence(rows, batch_first=True)


def assert_same(path, steps, history, name, **options):
    """Value, gradient and numbers of each step. Of TRL's own loss only the numbers."""
    for step, line, (ours, log) in zip(
        steps, history, again(path, steps, name, options), strict=True
    ):
        loss = log.pop("loss", None)
        assert {k: line[k] for k in log} == pytest.approx(log, rel=1e-4, abs=1e-6)
        assert 0.1 < line["entropy"] < 5  # nats; the model has 100 ids
        if name != TRLS:
            assert line["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
            pair = step[1], ours
            a, b = (torch.cat([g[k].flatten() for k in sorted(ours)]).double() for g in pair)
            assert b.norm() > 1e-4
            assert (a - b).norm() <= 1e-5 * b.norm(), ((a - b).norm() / b.norm()).item()
    assert len(steps) == 2


def split(micro, accumulate, pieces, **options):
    """pieces > accumulate: several optimiser steps on one generation."""
    return options | dict(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=pieces,
    )


# Its ratio looks at siblings, whole groups, two passes and a credit rule.
CASES = [(name, {}) for name in ("dfpo-min", "balanced", "ar-lopti")]
for pieces in ((2, 4, 4), (4, 1, 2), (2, 2, 4)):  # micro-batches of 2 rows tear groups of 4
    CASES.append(("gspo", split(*pieces, cancel=True)))
CASES += [("grpo", dict(beta=0.3, num_iterations=k, cancel=k == 2)) for k in (1, 2)]
CASES += [(name, dict(sampler=True)) for name in ("recentred", "dr-grpo")]  # L is in the latter
# A step on one generation, on half of one, and on two.
CASES += [(TRLS, split(4, 2, 2)), (TRLS, split(4, 2, 4)), (TRLS, split(4, 4, 2, num_iterations=1))]


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_a_run_is_losses_py_on_whole_batches(qwen_path, name, options):
    steps, history = run(qwen_path, name, **options)
    assert_same(qwen_path, steps, history, name, **options)
    assert name != TRLS or max(line["learning_tax"] for line in history) > 0.01


def test_the_measured_run_is_the_run_without(qwen_path):
    """Same answers, so same weights to the last bit; and evaluation still runs."""
    weights = []
    for measured in (False, True):
        trainer = make(qwen_path, loss_type="dapo")
        if measured:
            log_learning_tax(trainer)
        trainer.train()
        trainer.evaluate(Dataset.from_list(PROMPTS[:2]))
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def test_evaluation_is_of_groups_of_its_own_size(qwen_path):
    trainer = make(qwen_path, "reinforce", per_device_eval_batch_size=2, num_generations_eval=2)
    assert math.isfinite(trainer.evaluate(Dataset.from_list(PROMPTS[:4]))["eval_loss"])


REFUSED = [  # what a user gets wrong, and what the line names
    (dict(method="nthr"), "--method nthr"),
    (dict(method="ibpo"), "--method ibpo"),
    (dict(hyper={"eps": 0.1}), "eps"),
    (dict(hyper={"kl": 0.1}), "--beta"),  # TRL's flag would be left at 0
    (dict(method="dr-grpo", scale_rewards="group"), "--scale_rewards none"),
    (dict(epsilon=0.1), "--epsilon 0.1"),  # ours has its own, so this would have no effect
    (dict(steps_per_generation=3), "--steps_per_generation"),
    (dict(per_device_train_batch_size=3, steps_per_generation=4), "--num_generations 4"),
    (dict(method="lopti", num_iterations=1), "--num_iterations 2"),
    (dict(method="gspo", beta=0.1), "--beta 0.1"),
    (dict(beta=0.1, use_bias_correction_kl=True), "--use_bias_correction_kl False"),
    (dict(use_vllm=True), "--vllm_importance_sampling_correction False"),
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


@pytest.mark.parametrize("reward", (None, math.inf))
def test_an_answer_without_a_reward_is_refused(qwen_path, reward):
    trainer = make(qwen_path, "grpo")
    trainer.reward_funcs = [lambda completion_ids, **_: [reward] * len(completion_ids)] * 2
    with pytest.raises(ValueError, match="each answer needs a number"):
        trainer.train()


def test_the_example_learns_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert example.reward(["3", "34", "43"], ["3"] * 3) == [1.0, 0.5, 0.0]
    flags = ["--method", "dfpo-min", "--hyper", "eps=.1", "--cancel"]
    trainer = example.make_trainer(*example.parse(flags))
    assert trainer.method.hyper["eps"] == 0.1 and trainer.cancel
    for flags in ([], ["--method", "trl", "--max_steps", "10"]):
        example.main(flags)
        lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step ")]
        values = [[float(part.split()[-1]) for part in line.split(",")] for line in lines]
        assert len(lines) == (2 if flags else 12) and all(len(row) == 4 for row in values)
        assert 0 < values[-1][2] < 1 and values[-1][0] > values[0][0] + 0.02
    assert values[0][1] == 0 and AutoModelForCausalLM.from_pretrained("out").num_parameters() > 1000


def test_siblings_share_all_words_before(monkeypatch, capsys):
    """Answers 5 6 end, 5 6 7 8 and 5 9 9 3: who takes a token after the same words?"""
    tokens = torch.tensor([[5, 6, 2, 5], [5, 6, 7, 8], [5, 9, 9, 3]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    answers = SimpleNamespace(tokens=tokens, mask=mask)
    monkeypatch.setattr(siblings.train, "sample", lambda *_: answers)
    siblings.main(["--group-size", "3", "--max-tokens", "4"])
    said = capsys.readouterr().out
    assert "3 tokens of an answer, 0.889 have" in said  # 3 + 3 + 2 of 9
    assert "4 tokens of an answer, 0.727 have" in said  # and of 11


SHARDED = ["sharded grpo", "sharded pos-only"]  # L is in neither
RUNS = list(itertools.product(["grpo", "ar-lopti", "balanced", TRLS, *SHARDED], (1, 2)))


@pytest.mark.skipif(not os.environ.get("LONG"), reason="several processes: LONG=1")
def test_two_processes(qwen_path, tmp_path):
    """accelerate launch, gloo: groups torn over processes and micro-batches."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1"]
    # --multi_gpu means several processes; with --cpu accelerate starts one. The script itself asks
    # for CPUs.
    launch += ["--num_processes", "2", "--multi_gpu", "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", "--main_process_port", "0", __file__]
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, qwen_path, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, accumulate in RUNS:
        mine, theirs = (torch.load(tmp_path / f"{name}-{accumulate}-{k}.pt") for k in range(2))
        steps, history, options = mine
        for step, other in zip(steps, theirs[0], strict=True):
            assert all(torch.equal(step[1][k], other[1][k]) for k in step[1])
            step[2].extend(other[2])
        assert_same(qwen_path, steps, history, name, **options)


def one_process(path: str, out: Path):
    for name, accumulate in RUNS:
        options = split(6 // accumulate, accumulate, accumulate)  # 6 rows a process, groups of 4
        if name in SHARDED:  # few and long: one process has its last token long before the other
            size = 2 // accumulate
            options = split(size, accumulate, accumulate, max_completion_length=40)
            options["generation_kwargs"] = None
        result = run(path, name, **options)
        torch.save((*result, options), out / f"{name}-{accumulate}-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    one_process(sys.argv[1], Path(sys.argv[2]))
