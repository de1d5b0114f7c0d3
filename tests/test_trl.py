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

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from llm.gsm8k import GSM8K
from llm.policy import load_policy, make_rows
from losses import METHODS, Batch, OldPolicy, group_advantages, prefix_nodes, project
from train import Config, log_probs

pytest.importorskip("trl", minversion="1.16", reason="TRL is an extra: pip install -e '.[trl]'")
from trl import GRPOConfig  # noqa: E402

from engines import gsm8k_trl  # noqa: E402
from engines.trl import Trainer  # noqa: E402

G, L, TEMPERATURE = 4, 8, 0.5  # so cold that some answers begin alike
PROMPTS = [{"prompt": text} for text in ("1+1=", "12+3=", "7=", "40+2=", "5+", "six", "7+70=", "8")]
HONOURED = [name for name, m in METHODS.items() if not m.needs_hidden and not m.repair]
# After one step of the optimiser, tokens lie on both sides of these.
CLIPS = {"eps_low": 0.15, "eps_high": 0.2}
HYPER = {
    "advantage-reweighting": CLIPS | {"alpha": 0.7},
    "cispo": CLIPS,
    "dfpo-min": {},
    "dfpo-orthogonal": {},
    "gspo": {"eps_low": 0.5, "eps_high": 0.6},
    "reinforce": {},
}
LONG = pytest.mark.skipif(not os.environ.get("LONG"), reason="the full grid: LONG=1")


def reward(completion_ids, **_):
    """Of the ids alone, and equal within some groups: no answer is right, but they differ."""
    return [float(sum(ids) % 3) if ids[0] % 4 else 0.1 for ids in completion_ids]


class Record(TrainerCallback):
    """Parameters, gradients, loss and answers, as they are before each optimiser step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        parameters = {k: v.detach().clone() for k, v in model.named_parameters()}
        gradients = {k: v.grad.clone() for k, v in model.named_parameters()}
        end = (self.trainer._step - 1) % args.steps_per_generation + 1
        window = self.trainer._buffered_inputs[end - args.gradient_accumulation_steps : end]
        ids = [
            [
                row[m].tolist()
                for x in window
                for row, m in zip(x[f"{part}_ids"], x[f"{part}_mask"].bool(), strict=True)
            ]
            for part in ("prompt", "completion")
        ]
        self.steps.append((parameters, gradients, self.trainer.value, ids))


def make(path, method, record=None, hyper=None, project=False, tools=None, dropout=0.0, **options):
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
        scale_rewards="none" if method == "dr-grpo" else "group",
        gradient_checkpointing=False,
        use_bias_correction_kl=False,
    )
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(path, attention_dropout=dropout),
        reward,
        GRPOConfig(**config | options),
        Dataset.from_list(PROMPTS),
        method=method,
        hyper=hyper,
        project=project,
        tools=tools,
        callbacks=[record] if record else None,
    )
    if record:
        record.trainer = trainer
    return trainer


def run(path, method, **options):
    record = Record()
    trainer = make(path, method, record, HYPER.get(method, CLIPS), **options)
    trainer.train()
    return record.steps, trainer.state.log_history


def again(path, steps, method, projected=False, kl=0.0, on_policy=False):
    """The same optimiser steps by losses.py and train.py: a loss and a gradient each."""
    hyper = HYPER.get(method, CLIPS) | ({"kl": kl} if kl else {})
    credit_hyper = {k: v for k, v in hyper.items() if k == "alpha"}
    loss_hyper = {k: v for k, v in hyper.items() if k != "alpha"}
    rule, pairs = METHODS[method], []
    config = Config(temperature=TEMPERATURE, device="cpu")
    policy = load_policy(config, None, path)
    # The policy that answered, and the reference of the KL term.
    start = deepcopy(policy.model.state_dict())
    for k, (parameters, _, _, (prompts, answers)) in enumerate(steps):
        rows = make_rows(prompts, answers, torch.device("cpu"))
        policy.model.load_state_dict(start)
        old = ref = log_probs(policy, rows, config)[0].detach()
        policy.model.load_state_dict(parameters, strict=False)
        policy.model.zero_grad()
        logp = log_probs(policy, rows, config)[0]
        old = logp.detach() if on_policy else old  # each step has answers of its own
        rewards = torch.tensor(reward(answers))
        advantages = group_advantages(rewards, G, rule.scale)
        adv = advantages[:, None].expand_as(logp)
        if rule.credit:
            old_policy = OldPolicy(rows.tokens, rows.mask, old, rewards, G)
            adv = rule.credit(adv, old_policy, **credit_hyper)
        batch = Batch(logp, old, adv, rows.mask, G, L, ref)
        loss = value = rule.passes[k % len(rule.passes)](batch, **loss_hyper)
        if projected:
            nodes = prefix_nodes(rows.tokens, rows.mask, G)
            loss = project(loss, logp, advantages, nodes, rows.mask)
        loss.backward()
        pairs.append((value.item(), {k: v.grad for k, v in policy.model.named_parameters()}))
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


@pytest.mark.parametrize("accumulate", [2, pytest.param(1, marks=LONG)])
@pytest.mark.parametrize("method", HONOURED)
def test_two_iterations(qwen_path, method, accumulate):
    split = dict(
        per_device_train_batch_size=8 // accumulate, gradient_accumulation_steps=accumulate
    )
    assert_same(qwen_path, run(qwen_path, method, **split)[0], method)


@pytest.mark.parametrize("projected", [False, True], ids=["plain", "projected"])
@pytest.mark.parametrize("micro, accumulate, pieces", [(2, 4, 4), (4, 1, 2), (2, 2, 4)])
def test_any_split_is_the_unsplit_batch(qwen_path, micro, accumulate, pieces, projected):
    """Micro-batches of 2 rows tear groups of 4; pieces > accumulate: two steps a generation."""
    split = dict(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=pieces,
    )
    method = "pos-only" if projected else "dfpo-orthogonal"
    steps, history = run(qwen_path, method, project=projected, **split)
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


REFUSED = [
    (dict(method="nthr"), "reads the last hidden states"),
    (dict(method="ibpo"), "makes a second rollout"),
    (dict(method="ppo"), "does not exist; accepted: reinforce, "),
    (dict(hyper={"eps": 0.1}), "accepted, with defaults: eps_low=0.2, eps_high=0.2, kl=0.0"),
    (dict(method="dfpo-min", hyper={"ratio": "sum"}), "must be"),
    (dict(method="advantage-reweighting", hyper={"alpha": 2.0}), "between 0 and 1"),
    (dict(hyper={"kl": 0.1}), "the KL term needs logp_ref"),
    (dict(epsilon=0.1), "epsilon 0.1 has no effect here"),
    (dict(loss_type="grpo"), "loss_type grpo has no effect here"),
    (dict(method="dr-grpo", scale_rewards="group"), "must be 'none'"),
    (dict(steps_per_generation=3), "multiple of gradient_accumulation_steps"),
    (
        dict(per_device_train_batch_size=3, steps_per_generation=4),
        "6 rows an optimiser step and process are not whole groups",
    ),
    (dict(gradient_accumulation_steps=0), "at least 1 each"),
    (dict(method="lopti", num_iterations=1), "2 passes are 2 iterations"),
    (dict(method="gspo", beta=0.1), "needs a method whose pass is grpo"),
    (dict(beta=0.1, project=True), "not projected"),
    (dict(beta=0.1, use_bias_correction_kl=True), "plain k3"),
    (dict(use_vllm=True), "set it to False"),
    (dict(dropout=0.1), "drops out 0.1"),
    (dict(tools=[print]), "tools, environment_factory"),
]


@pytest.mark.parametrize("options, reason", REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_honoured_is_refused_at_start_in_one_line(qwen_path, options, reason):
    with pytest.raises(ValueError) as error:
        make(qwen_path, **{"method": "grpo"} | options)
    assert reason in str(error.value) and "\n" not in str(error.value)


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
    gsm8k_trl.main([*GSM8K_FLAGS, *where, "--method", "dfpo-orthogonal"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 1000
    task = GSM8K(small_gsm8k)
    rows = gsm8k_trl.prompts(task, tokenizer)
    assert [tokenizer(x)["input_ids"] for x in rows["prompt"]] == task.encode(tokenizer, task.train)


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--output_dir X --method ibpo", "second rollout"),
        ("--output_dir X --hyper eps", "NAME=VALUE"),
        ("--output_dir X --hyper eps=1", "no hyperparameter 'eps'"),
        ("--output_dir X --data /no", "not a file"),
        ("--output_dir X --data DATA --model /no", "--model /no cannot be loaded"),
        ("--output_dir X --num_generations 8", "divisible by num_generations (8)"),
        ("--output_dir X --num_generations 0", "TRL refuses these flags"),
        ("--output_dir X --max_step 2", "unknown argument --max_step; did you mean --max_steps?"),
        ("--output_dir X --learning_rate high", "invalid float value: 'high'"),
        ("", "required: --output_dir"),
    ],
)
def test_a_wrong_flag_is_one_line(small_gsm8k, capsys, flags, reason):
    with pytest.raises(SystemExit) as stop:
        gsm8k_trl.main([*GSM8K_FLAGS, *flags.replace("DATA", small_gsm8k).split()])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("error: ") and reason in lines[0]


@LONG
def test_two_processes(qwen_path, tmp_path):
    """accelerate launch, gloo: groups torn over processes and micro-batches; every method."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1"]
    # --multi_gpu means several processes; with --cpu accelerate starts one. The script itself asks
    # for CPUs.
    launch += ["--num_processes", "2", "--multi_gpu", "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", "--main_process_port", "0", __file__]
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*launch, qwen_path, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for method, accumulate in itertools.product(HONOURED, (1, 2)):
        ranks = [torch.load(tmp_path / f"{method}-{accumulate}-{rank}.pt") for rank in range(2)]
        merged = []
        for (parameters, gradients, value, ids), (_, others, _, their_ids) in zip(
            *ranks, strict=True
        ):
            assert all(torch.equal(gradients[k], others[k]) for k in gradients)
            all_ids = [mine + theirs for mine, theirs in zip(ids, their_ids, strict=True)]
            merged.append((parameters, gradients, value, all_ids))
        assert_same(qwen_path, merged, method)


if __name__ == "__main__":
    model_path, out = sys.argv[1:]
    for method, accumulate in itertools.product(HONOURED, (1, 2)):  # 6 rows a process, groups of 4
        split = dict(
            per_device_train_batch_size=6 // accumulate, gradient_accumulation_steps=accumulate
        )
        steps, _ = run(model_path, method, **split)
        torch.save(steps, Path(out) / f"{method}-{accumulate}-{os.environ['RANK']}.pt")
