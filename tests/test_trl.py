"""engines/trl.py against losses.py: real training runs, with gradients computed once more here.

A run is TRL's own `train()`: its generation, scoring, accumulation and processes. What it leaves in
param.grad before each optimiser step must be the gradient of losses.py on all answers of that step,
scored by train.py. As a script (`accelerate launch tests/test_trl.py MODEL OUT`) this file is one
process of a run of several.
"""

import itertools
import os
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import naive
import pytest
import torch
import torch.distributed.checkpoint
from datasets import Dataset
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import losses
from llm.gsm8k import GSM8K
from losses import METHODS, Batch, OldPolicy, group_advantages, prefix_nodes, project
from train import Answers, Config, Prompts, load_policy, log_probs

pytest.importorskip("trl", minversion="1.16", reason="TRL is an extra: pip install -e '.[trl]'")
from accelerate.utils import merge_fsdp_weights  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from engines import gsm8k_trl  # noqa: E402
from engines.trl import Trainer, log_learning_tax, method_for  # noqa: E402

G, L, TEMPERATURE = 4, 8, 0.5  # so cold that some answers begin alike
PROMPTS = [{"prompt": text} for text in ("1+1=", "12+3=", "7=", "40+2=", "5+", "six", "7+70=", "8")]
HONOURED = [name for name, m in METHODS.items() if not m.needs_scores and not m.repair]
# After one step of the optimiser, tokens lie on both sides of these.
CLIPS = {"eps_low": 0.15, "eps_high": 0.2}
HYPER = {"gspo": {"eps_low": 0.5, "eps_high": 0.6}, "advantage-reweighting": CLIPS | {"alpha": 0.7}}
HYPER |= dict.fromkeys(("dfpo-min", "dfpo-orthogonal", "recentred", "reinforce"), {})
# TRL's own losses and ours, but for a constant factor. With group means and the std all three.
OWN = {"grpo": losses.grpo, "dapo": losses.token_grpo, "luspo": losses.dr_grpo}
NARROW = 0.01  # their clip: the second step leaves it at shared tokens, too
LONG = pytest.mark.skipif(not os.environ.get("LONG"), reason="the full grid: LONG=1")


def reward(completion_ids, **_):
    """Of the ids alone, and equal within some groups: no answer is right, but they differ."""
    return [float(sum(ids) % 3) if ids[0] % 4 else 0.1 for ids in completion_ids]


class Record(TrainerCallback):
    """Parameters, gradients, loss and rows, as they are before each optimiser step.

    A row is its prompt's ids, its answer's, and whether it takes part in this step: an optimiser
    step may be on a part of what was generated.
    """

    def __init__(self):
        self.steps, self.seen = [], []  # seen: generations, and their pieces of this step

    def on_substep_end(self, args, state, control, **_):
        """After a micro-batch, but for the last one."""
        generation = self.trainer._buffered_inputs
        if not self.seen or self.seen[-1][0] is not generation:
            self.seen.append((generation, set()))
        self.seen[-1][1].add((self.trainer._step - 1) % args.steps_per_generation)

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.on_substep_end(args, state, control)
        parameters = {k: full(v) for k, v in model.named_parameters()}
        gradients = {k: full(v.grad) for k, v in model.named_parameters()}
        rows = []
        for generation, taken in self.seen:
            for k, piece in enumerate(generation):
                prompts, answers = ids_of(piece, "prompt"), ids_of(piece, "completion")
                rows += [(*pair, k in taken) for pair in zip(prompts, answers, strict=True)]
        self.steps.append((parameters, gradients, getattr(self.trainer, "value", None), rows))
        self.seen = []


def ids_of(piece, part):
    pairs = zip(piece[f"{part}_ids"], piece[f"{part}_mask"].bool(), strict=True)
    return [row[seen].tolist() for row, seen in pairs]


def full(x):
    """A copy; of a sharded tensor the whole one."""
    x = x.detach()
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).clone()


def make(path, method=None, record=None, hyper=None, project=False, tools=None, **options):
    """Our trainer; TRL's own without a method."""
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
    model = path
    if isinstance(path, str):
        model = AutoModelForCausalLM.from_pretrained(path, attention_dropout=dropout)
    ours = {"method": method, "hyper": hyper, "project": project} if method else {}
    trainer = (Trainer if method else GRPOTrainer)(
        model,
        reward,
        GRPOConfig(**config | options),
        Dataset.from_list(PROMPTS),
        tools=tools,
        callbacks=[record] if record else None,
        **ours,
    )
    if record:
        record.trainer = trainer
    return trainer


def run(path, method, **options):
    record = Record()
    trainer = make(path, method, record, HYPER.get(method, CLIPS), **options)
    trainer.train()
    return record.steps, trainer.state.log_history


def run_sharded(path, method, **options):
    """By hand what accelerate's FSDP2 does on GPUs: it has none for CPUs."""
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    model = AutoModelForCausalLM.from_pretrained(path)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    tail = [model.model.norm, model.model.embed_tokens, model.lm_head]  # with tied weights
    fully_shard(tail, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    record = Record()
    trainer = make(model, method, record, HYPER.get(method, CLIPS), **options)
    trainer.accelerator.prepare_model = lambda model, **_: model  # no DDP around it
    trainer.train()
    return record.steps, model


def run_trls_own(path, loss_type, **options):
    record = Record()
    trainer = make(path, record=record, loss_type=loss_type, epsilon=NARROW, **options)
    log_learning_tax(trainer)
    trainer.train()
    return record.steps, [line["learning_tax"] for line in trainer.state.log_history[:-1]]


def as_answers(rows) -> Answers:
    """Rows of ids as train.py has them: prompts padded on the left, answers on the right."""
    prompts, answers = [row[0] for row in rows], [row[1] for row in rows]
    left, right = max(map(len, prompts)), max(map(len, answers))
    ids = torch.tensor([[-1] * (left - len(x)) + x for x in prompts])
    tokens = torch.tensor([x + [-1] * (right - len(x)) for x in answers])
    return Answers(
        items=[],
        prompts=Prompts(ids.clamp(min=0), ids >= 0),
        texts=[],
        tokens=tokens.clamp(min=0),
        mask=tokens >= 0,
        logp=torch.zeros(tokens.shape),
        rewards=torch.tensor(reward(answers)),
        generated=0,
    )


def score_again(path, steps, on_policy=False):
    """For each step the model, its rows, and their log-probs now, before and at the start."""
    config = Config(temperature=TEMPERATURE)
    policy = load_policy(config, None, path)
    start = deepcopy(policy.model.state_dict())
    for parameters, _, _, rows in steps:
        answers = as_answers(rows)
        groups = answers.prompts.ids.view(len(rows) // G, G, -1)
        assert (groups == groups[:, :1]).all()  # G answers to a prompt stand in a row
        policy.model.load_state_dict(start)
        ref = log_probs(policy, answers, config)[0].detach()
        policy.model.load_state_dict(parameters, strict=False)
        policy.model.zero_grad()
        logp = log_probs(policy, answers, config)[0]
        # on_policy: each step has answers of its own, else all are of the policy at the start.
        yield policy.model, answers, logp, logp.detach() if on_policy else ref, ref


def again(path, steps, method, projected=False, kl=0.0, on_policy=False):
    """The same optimiser steps by losses.py and train.py: a loss and a gradient each."""
    hyper = HYPER.get(method, CLIPS) | ({"kl": kl} if kl else {})
    credit_hyper = {k: v for k, v in hyper.items() if k == "alpha"}
    loss_hyper = {k: v for k, v in hyper.items() if k != "alpha"}
    rule, pairs = METHODS[method], []
    taken = [(*step[:3], [row for row in step[3] if row[2]]) for step in steps]
    for k, (model, answers, logp, old, ref) in enumerate(score_again(path, taken, on_policy)):
        tokens, mask = answers.tokens, answers.mask
        advantages = group_advantages(answers.rewards, G, rule.scale)
        adv = advantages[:, None].expand_as(logp)
        if rule.credit:
            facts = OldPolicy(tokens, mask, old, answers.rewards, G)
            adv = rule.credit(adv, facts, **credit_hyper)
        batch = Batch(logp, old, adv, mask, G, L, ref)
        loss = value = rule.passes[k % len(rule.passes)](batch, **loss_hyper)
        if projected:
            loss = project(loss, logp, advantages, prefix_nodes(tokens, mask, G), mask)
        loss.backward()
        pairs.append((value.item(), {k: v.grad for k, v in model.named_parameters()}))
    return pairs


def assert_same(path, steps, method, **options):
    assert len(steps) == 2
    pairs = zip(steps, again(path, steps, method, **options), strict=True)
    for (_, gradients, value, _), (expected, ours) in pairs:
        assert abs(value.item() - expected) <= 1e-6 * max(1.0, abs(expected))
        a, b = (
            torch.cat([g[k].flatten() for k in sorted(ours)]).double() for g in (gradients, ours)
        )
        assert b.norm() > 1e-4
        assert (a - b).norm() <= 1e-5 * b.norm(), ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("method", HONOURED)
def test_two_iterations(qwen_path, method):
    assert_same(qwen_path, run(qwen_path, method)[0], method)


def split(micro, accumulate, pieces):
    """pieces > accumulate: several optimiser steps on one generation."""
    return dict(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=pieces,
    )


@pytest.mark.parametrize("projected", [False, True], ids=["plain", "projected"])
@pytest.mark.parametrize("pieces", [(2, 4, 4), (4, 1, 2), (2, 2, 4)])
def test_any_split_is_the_unsplit_batch(qwen_path, pieces, projected):
    """Micro-batches of 2 rows tear groups of 4."""
    method = "pos-only" if projected else "dfpo-orthogonal"
    steps, history = run(qwen_path, method, project=projected, **split(*pieces))
    assert_same(qwen_path, steps, method, projected=projected)
    for line, (_, _, value, _) in zip(history, steps, strict=False):
        # What is logged is what was optimised.
        assert line["loss"] == pytest.approx(value.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("iterations", [1, 2])
def test_beta_weighs_the_k3_term(qwen_path, iterations):
    steps, _ = run(qwen_path, "grpo", beta=0.3, num_iterations=iterations)
    assert_same(qwen_path, steps, "grpo", kl=0.3, on_policy=iterations == 1)


def test_the_tax_is_logged_and_the_projection_removes_it(qwen_path):
    plain, projected = (run(qwen_path, "pos-only", project=flag)[1] for flag in (False, True))
    assert plain[0]["learning_tax"] > 0.1
    assert projected[0]["learning_tax"] < 1e-6
    assert plain[0]["entropy"] > 0.1


def assert_tax(path, steps, taxes, loss_type, on_policy=False):
    """The tax by naive.py, which walks the tree, of our loss on rows in the order of groups."""
    in_groups = [(*step[:3], sorted(step[3])) for step in steps]  # TRL shuffles
    again = score_again(path, in_groups, on_policy)
    for step, tax, (_, answers, logp, old, _) in zip(in_groups, taxes, again, strict=True):
        rows = step[3]
        A = group_advantages(answers.rewards, G) * torch.tensor([row[2] for row in rows])
        adv = A[:, None].expand_as(logp)
        loss = OWN[loss_type](Batch(logp, old, adv, answers.mask, G, L), NARROW, NARROW)
        c = losses.token_coefficients(loss, logp).tolist()
        expected = naive.tax(c, [row[1] for row in rows], A.tolist(), G)
        assert tax == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("pieces", [(4, 2, 2), (4, 2, 4), (4, 4, 2)])
@pytest.mark.parametrize("loss_type", OWN)
def test_the_tax_of_trls_own_loss(qwen_path, loss_type, pieces):
    """An optimiser step on one generation, on half of one, and on two (on-policy)."""
    on_policy = pieces == (4, 4, 2)
    options = split(*pieces) | {"num_iterations": 1 if on_policy else 2}
    steps, taxes = run_trls_own(qwen_path, loss_type, **options)
    assert_tax(qwen_path, steps, taxes, loss_type, on_policy)
    assert max(taxes) > 0.01 or on_policy and loss_type != "grpo"


def test_the_measured_run_is_the_run_without(qwen_path):
    """Same answers, same weights to the last bit, same log but for one more entry."""
    ends = []
    for measured in (False, True):
        trainer = make(qwen_path, loss_type="dapo")
        if measured:
            log_learning_tax(trainer)
        trainer.train()
        lines = [{k: v for k, v in x.items() if "time" not in k} for x in trainer.state.log_history]
        ends.append((trainer.model.state_dict(), lines[:-1]))
    (weights, plain), (same, logged) = ends
    assert all(torch.equal(weights[k], same[k]) for k in weights)
    assert len(plain) == 2 and all(line.pop("learning_tax") >= 0 for line in logged)
    assert plain == logged


def test_evaluation_is_the_loss_of_losses(qwen_path):
    trainer = make(qwen_path, "reinforce", per_device_eval_batch_size=8, num_generations_eval=4)
    seen = []
    trainer._loss = lambda *x: seen.append(x) or Trainer._loss(trainer, *x)
    eval_loss = trainer.evaluate(Dataset.from_list(PROMPTS[:2]))["eval_loss"]
    ((logp, (rows,), group_size),) = seen
    mask, rewards = rows["completion_mask"].bool(), rows["rewards"]
    adv = group_advantages(rewards, group_size)[:, None].expand_as(logp)
    expected = METHODS["reinforce"].passes[0](Batch(logp, logp, adv, mask, group_size, L))
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
    "beta, projected": dict(beta=0.1, project=True),
    "another KL": dict(beta=0.1, use_bias_correction_kl=True),
    "vLLM's correction": dict(use_vllm=True),
    "dropout": dict(dropout=0.1),
    "tools": dict(tools=[print]),
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_refused_at_start_in_one_line(qwen_path, options):
    with pytest.raises(ValueError) as error:
        make(qwen_path, **{"method": "grpo"} | options)
    # By us: the last frame is ours.
    assert error.traceback[-1].path.parent.name == "engines" or "hyper" in str(error.value)
    assert "\n" not in str(error.value)


def test_processes_that_train_alone_are_refused(qwen_path, monkeypatch):
    config = make(qwen_path, "grpo").args
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started"):
        method_for(config, "grpo", {}, False)


def test_fsdp_that_would_not_shard_is_refused(qwen_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP is asked for"):
        make(qwen_path, "grpo")


def test_an_answer_without_a_reward_is_refused(qwen_path):
    trainer = make(qwen_path, "grpo")
    trainer.reward_funcs = [lambda completions, **_: [None] * len(completions)]
    with pytest.raises(ValueError, match="returned None for an answer"):
        trainer.train()


GSM8K_FLAGS = """--use_cpu --bf16 False --report_to none --save_strategy no --max_steps 1
    --num_generations 4 --per_device_train_batch_size 4 --max_completion_length 4
    --gradient_checkpointing False""".split()


def test_gsm8k_has_train_pys_prompts_and_verifier(qwen_path, small_gsm8k, tmp_path):
    where = ["--model", qwen_path, "--data", small_gsm8k, "--output_dir", str(tmp_path)]
    flags = [*GSM8K_FLAGS, *where, "--hyper", "eps_high=0.3", "--projection", "True"]
    config = gsm8k_trl.parse(flags)
    trainer = gsm8k_trl.make_trainer(*config)
    assert trainer.method.passes[0].keywords == {"eps_high": 0.3} and trainer.project
    task, tokenizer = GSM8K(small_gsm8k), AutoTokenizer.from_pretrained(qwen_path)
    ids = [tokenizer(x)["input_ids"] for x in trainer.train_dataset["prompt"]]
    assert ids == task.encode(tokenizer, task.train)
    item = task.train[0]
    texts = [f"#### {item.answer}", f"#### {item.answer}9"]
    answers = [tokenizer(x)["input_ids"] + [tokenizer.eos_token_id] for x in texts]
    assert trainer.reward_funcs[0](answers, [item.answer] * 2) == [1.0, 0.0]
    gsm8k_trl.main([*GSM8K_FLAGS, *where, "--method", "dfpo-orthogonal"])
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 1000


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--method ibpo", "second rollout"),
        ("--hyper eps", "NAME=VALUE"),
        ("--hyper eps=1", "no hyperparameter 'eps'"),
        ("--data /no", "not a file"),
        ("--data DATA --model /no", "/no"),
        ("--num_generations 8", "8"),
        ("--num_generations 0", ""),
        ("--max_step 2", "--max_step"),
        ("--learning_rate high", "--learning_rate"),
    ],
)
def test_a_wrong_flag_ends_in_one_line(small_gsm8k, capsys, flags, reason):
    with pytest.raises(SystemExit) as stop:
        gsm8k_trl.main([*GSM8K_FLAGS, *flags.replace("DATA", small_gsm8k).split()])
    line = capsys.readouterr().err.splitlines()[-1] if stop.value.code == 2 else stop.value.code
    assert "error: " in line and reason in line and "\n" not in line


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
        ranks = [torch.load(tmp_path / f"{name}-{accumulate}-{rank}.pt") for rank in range(2)]
        (steps, taxes), (others, same_taxes) = ranks
        merged = []
        for mine, theirs in zip(steps, others, strict=True):
            assert all(torch.equal(mine[1][k], theirs[1][k]) for k in mine[1])
            merged.append((*mine[:3], mine[3] + theirs[3]))
        method = name.split()[-1]
        if name in OWN_RUNS:
            assert taxes == same_taxes and max(taxes) > 0.01
            assert_tax(qwen_path, merged, taxes, method)
        else:
            assert_same(qwen_path, merged, method)
    # What each process wrote of its own shards opens in one.
    merge_fsdp_weights(str(tmp_path / "shards"), str(tmp_path))
    opened = load_file(tmp_path / "model.safetensors")
    expected = torch.load(tmp_path / "whole.pt")
    assert expected and all(torch.equal(opened[k], expected[k]) for k in expected)


OWN_RUNS = [f"TRL's {name}" for name in OWN]
SHARDED_RUNS = ["sharded grpo", "sharded pos-only"]  # L is in neither
RUNS = list(itertools.product([*HONOURED, *OWN_RUNS, *SHARDED_RUNS], (1, 2)))


def one_process(path: str, out: Path):
    for name, accumulate in RUNS:
        pieces = split(6 // accumulate, accumulate, accumulate)  # 6 rows a process, groups of 4
        method = name.split()[-1]
        if name in OWN_RUNS:
            result = run_trls_own(path, method, **pieces)
        elif name in SHARDED_RUNS:
            # Few and long answers: one process has its last token long before the other.
            pieces = split(2 // accumulate, accumulate, accumulate)
            steps, model = run_sharded(path, method, max_completion_length=40, **pieces)
            result = steps, None
        else:
            result = run(path, method, **pieces)[0], None
        torch.save(result, out / f"{name}-{accumulate}-{os.environ['RANK']}.pt")
    torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=out / "shards")
    torch.save({k: full(v) for k, v in model.named_parameters()}, out / "whole.pt")


if __name__ == "__main__":
    one_process(sys.argv[1], Path(sys.argv[2]))
