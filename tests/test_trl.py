"""engines/trl.py against losses.py: real training runs, with gradients computed once more here.

A run is TRL's own `train()`: its generation, scoring, accumulation and processes. What it leaves in
param.grad before each optimiser step must be the gradient of losses.py on all answers of that step,
scored by naive.py. As a script (`accelerate launch tests/test_trl.py MODEL OUT`) this file is one
process of a run of several.
"""

import itertools
import os
import subprocess
import sys
import tempfile
from copy import deepcopy
from functools import partial
from pathlib import Path

import naive
import pytest
import torch
import torch.distributed.checkpoint
from datasets import Dataset
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, TrainerCallback

import losses
from losses import METHODS, Batch, Method, OldPolicy, group_advantages
from train import Config, bind, load_policy

pytest.importorskip("trl", minversion="1.16", reason="TRL is an extra: pip install -e '.[trl]'")
from accelerate.utils import merge_fsdp_weights  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from engines.trl import Trainer, log_learning_tax, method_for  # noqa: E402

G, L, TEMPERATURE = 4, 8, 0.5  # so cold that some answers begin alike
PROMPTS = [{"prompt": text} for text in ("1+1=", "12+3=", "7=", "40+2=", "5+", "six", "7+70=", "8")]
HONOURED = [name for name, m in METHODS.items() if not m.needs_scores and not m.repair]
# After one step of the optimiser, tokens lie on both sides of these.
CLIPS = {"eps_low": 0.15, "eps_high": 0.2}
HYPER = {"gspo": {"eps_low": 0.5, "eps_high": 0.6}, "advantage-reweighting": CLIPS | {"alpha": 0.7}}
HYPER |= dict.fromkeys(("dfpo-min", "dfpo-orthogonal", "recentred", "reinforce"), {})
# TRL's own losses and ours, but for a constant factor. With group means and the std all three. The
# second step leaves their clip at shared tokens, too.
NARROW = {"eps_low": 0.01, "eps_high": 0.01}
TWINS = {"grpo": losses.grpo, "dapo": losses.token_grpo, "luspo": losses.dr_grpo}
OWN = {f"TRL's {name}": Method((partial(loss, **NARROW),)) for name, loss in TWINS.items()}
NEAR = dict(rtol=1e-5, atol=1e-4)  # a group of equal rewards is 0 here, and nearly so in TRL
LONG = pytest.mark.skipif(not os.environ.get("LONG"), reason="the full grid: LONG=1")


def reward(completion_ids, **_):
    """Of the ids alone, and equal within some groups: no answer is right, but they differ."""
    return [float(sum(ids) % 3) if ids[0] % 4 else 0.1 for ids in completion_ids]


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


def make(model, method=None, tools=None, hyper=None, cancel=False, **options):
    """Our trainer of a model or the one at a path; TRL's own without a method."""
    config = dict(
        output_dir=tempfile.gettempdir(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        seed=1,
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
        scale_rewards="none" if method and METHODS[method].scale == "mean" else "group",
        gradient_checkpointing=False,
        use_bias_correction_kl=False,
    )
    dropout = options.pop("dropout", 0.0)
    if isinstance(model, str):
        model = AutoModelForCausalLM.from_pretrained(model, attention_dropout=dropout)
    ours = {"method": method, "hyper": hyper, "cancel": cancel} if method else {}
    config = GRPOConfig(**config | options)
    data = Dataset.from_list(PROMPTS)
    return (Trainer if method else GRPOTrainer)(model, reward, config, data, tools=tools, **ours)


def run(path, name, **options):
    """Train: a method, a method on a sharded model, or TRL's own. The steps, their log, model."""
    kind, _, method = name.rpartition(" ")
    if kind == "TRL's":
        trainer = make(path, loss_type=method, epsilon=NARROW["eps_low"], **options)
        log_learning_tax(trainer)
    else:
        model = shard(path) if kind else path
        trainer = make(model, method, hyper=HYPER.get(method, CLIPS), **options)
    if kind == "sharded":
        trainer.accelerator.prepare_model = lambda model, **_: model  # no DDP around it
    record = Record(trainer)
    trainer.train()
    return record.steps, trainer.state.log_history[:-1], trainer.model


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
    hyper = HYPER.get(method, CLIPS) | ({"kl": options["beta"]} if "beta" in options else {})
    rule = OWN.get(name) or bind(method, hyper)
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
        tokens = padded([torch.tensor(x) for x in answers])
        mask = padded([torch.ones(len(x), dtype=torch.bool) for x in answers])
        A, rewards = torch.stack(A), torch.tensor(reward(answers))
        if name not in OWN:  # TRL shuffles its rows, ours stay in their groups
            assert all(prompts[i] == prompts[i - i % G] for i in range(len(rows)))
            by_trl, A = A, group_advantages(rewards, G, rule.scale)
            torch.testing.assert_close(by_trl, A, **NEAR)
        adv = A[:, None].expand_as(logp)
        if rule.credit:
            adv = rule.credit(adv, OldPolicy(tokens, mask, old, rewards, G))
        batch = Batch(logp, old, adv, mask, G, L, ref)
        loss = rule.passes[k % len(rule.passes)](batch)
        if options.get("cancel"):
            nodes = losses.prefix_nodes(tokens, mask, G)
            loss = losses.cancel(loss, batch, nodes)
        c = losses.token_coefficients(loss, logp).tolist()
        loss.backward()
        # In one group, because prompts tell groups apart; on prompts nothing pushes.
        pushes = [[0.0] * len(x) + row for x, row in zip(prompts, c, strict=True)]
        whole = [x + y for x, y in zip(prompts, answers, strict=True)]
        log = {"learning_tax": naive.tax(pushes, whole, A.tolist(), len(rows))}
        if name not in OWN:
            log["loss"] = loss.item()
        yield {k: v.grad for k, v in policy.model.named_parameters()}, log


def padded(rows):
    return pad_sequence(rows, batch_first=True)


def assert_same(path, steps, history, name, **options):
    """Value, gradient and tax of each step. Of TRL's own losses only the tax."""
    for step, line, (ours, log) in zip(
        steps, history, again(path, steps, name, options), strict=True
    ):
        assert {k: line[k] for k in log} == pytest.approx(log, rel=1e-5, abs=1e-6)
        assert line["entropy"] > 0.1
        if name not in OWN:
            pair = step[1], ours
            a, b = (torch.cat([g[k].flatten() for k in sorted(ours)]).double() for g in pair)
            assert b.norm() > 1e-4
            assert (a - b).norm() <= 1e-5 * b.norm(), ((a - b).norm() / b.norm()).item()
    assert len(steps) == 2
    if name in OWN:
        constant = options.get("num_iterations") == 1 and name != "TRL's grpo"
        assert max(line["learning_tax"] for line in history) > 0.01 or constant


def split(micro, accumulate, pieces, **options):
    """pieces > accumulate: several optimiser steps on one generation."""
    return options | dict(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=pieces,
    )


CASES = [(name, {}) for name in HONOURED]
for pieces in ((2, 4, 4), (4, 1, 2), (2, 2, 4)):  # micro-batches of 2 rows tear groups of 4
    CASES.append(("dfpo-orthogonal", split(*pieces)))
    CASES.append(("pos-only", split(*pieces, cancel=True)))
CASES += [("grpo", dict(beta=0.3, num_iterations=k)) for k in (1, 2)]
for name in OWN:  # a step on one generation, on half of one, and on two
    CASES += [(name, split(4, 2, 2)), (name, split(4, 2, 4))]
    CASES.append((name, split(4, 4, 2, num_iterations=1)))


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_a_run_is_losses_py_on_whole_batches(qwen_path, name, options):
    steps, history, _ = run(qwen_path, name, **options)
    assert_same(qwen_path, steps, history, name, **options)


def test_the_measured_run_is_the_run_without(qwen_path):
    """Same answers, same weights to the last bit, same log but for one more entry."""
    ends = []
    for measured in (False, True):
        trainer = make(qwen_path, loss_type="dapo")
        if measured:
            log_learning_tax(trainer)
        trainer.train()
        trainer.evaluate(Dataset.from_list(PROMPTS[:2]))
        lines = [{k: v for k, v in x.items() if "time" not in k} for x in trainer.state.log_history]
        ends.append((trainer.model.state_dict(), lines[:2]))
    (weights, plain), (same, logged) = ends
    assert all(torch.equal(weights[k], same[k]) for k in weights)
    assert all(line.pop("learning_tax") >= 0 for line in logged)
    assert plain == logged


def test_evaluation_is_the_loss_of_losses(qwen_path):
    trainer = make(qwen_path, "reinforce", per_device_eval_batch_size=8, num_generations_eval=2)
    seen = []
    trainer._loss = lambda *x: seen.append(x) or Trainer._loss(trainer, *x)
    eval_loss = trainer.evaluate(Dataset.from_list(PROMPTS[:4]))["eval_loss"]
    ((logp, (rows,), _),) = seen
    mask, rewards = rows["completion_mask"].bool(), rows["rewards"]
    adv = group_advantages(rewards, 2)[:, None].expand_as(logp)
    expected = losses.reinforce(Batch(logp, logp, adv, mask, 2, L))
    assert eval_loss == pytest.approx(expected.item(), rel=1e-6) and abs(eval_loss) > 1e-3


REFUSED = {
    "no hidden states": dict(method="nthr"),
    "no second rollout": dict(method="ibpo"),
    "hyperparameter": dict(hyper={"eps": 0.1}),
    "TRL's clip": dict(epsilon=0.1),
    "TRL's loss": dict(loss_type="grpo"),
    "TRL's advantages": dict(method="dr-grpo", scale_rewards="group"),
    "step of two generations": dict(steps_per_generation=3),
    "torn groups": dict(per_device_train_batch_size=3, steps_per_generation=4),
    "half of two passes": dict(method="lopti", num_iterations=1),
    "beta without a KL term": dict(method="gspo", beta=0.1),
    "the KL's weight": dict(hyper={"kl": 0.1}),
    "another KL": dict(beta=0.1, use_bias_correction_kl=True),
    "vLLM's correction": dict(use_vllm=True),
    "dropout": dict(dropout=0.1),
    "tools": dict(tools=[print]),
    "FSDP that would not shard": dict(fsdp="true"),
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_refused_at_start_in_one_line(qwen_path, options, monkeypatch):
    options = {"method": "grpo", "fsdp": "false"} | options
    monkeypatch.setenv("ACCELERATE_USE_FSDP", options.pop("fsdp"))
    with pytest.raises(ValueError) as error:
        make(qwen_path, **options)
    # By us: the last frame is ours.
    assert error.traceback[-1].path.parent.name == "engines" or "hyper" in str(error.value)
    assert "\n" not in str(error.value)


def test_processes_that_train_alone_are_refused(qwen_path, monkeypatch):
    config = make(qwen_path, "grpo").args
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started"):
        method_for(config, "grpo", {})


def test_an_answer_without_a_reward_is_refused(qwen_path):
    trainer = make(qwen_path, "grpo")
    trainer.reward_funcs = [lambda completions, **_: [None] * len(completions)]
    with pytest.raises(ValueError, match="returned None for an answer"):
        trainer.train()


SHARDED = ["sharded grpo", "sharded pos-only"]  # L is in neither
RUNS = list(itertools.product([*HONOURED, *OWN, *SHARDED], (1, 2)))


@LONG
def test_two_processes(qwen_path, tmp_path):
    """accelerate launch, gloo: groups torn over processes and micro-batches; every method."""
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
        steps, history = mine
        for step, other in zip(steps, theirs[0], strict=True):
            assert all(torch.equal(step[1][k], other[1][k]) for k in step[1])
            step[2].extend(other[2])
        assert_same(qwen_path, steps, history, name)
    # What each process wrote of its own shards opens in one.
    merge_fsdp_weights(str(tmp_path / "shards"), str(tmp_path))
    opened = load_file(tmp_path / "model.safetensors")
    expected = torch.load(tmp_path / "whole.pt")
    assert expected and all(torch.equal(opened[k], expected[k]) for k in expected)


def one_process(path: str, out: Path):
    for name, accumulate in RUNS:
        options = split(6 // accumulate, accumulate, accumulate)  # 6 rows a process, groups of 4
        if name in SHARDED:  # few and long: one process has its last token long before the other
            size = 2 // accumulate
            options = split(size, accumulate, accumulate, max_completion_length=40)
        *result, model = run(path, name, **options)
        torch.save(result, out / f"{name}-{accumulate}-{os.environ['RANK']}.pt")
    torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=out / "shards")
    torch.save({k: full(v) for k, v in model.named_parameters()}, out / "whole.pt")


if __name__ == "__main__":
    one_process(sys.argv[1], Path(sys.argv[2]))
