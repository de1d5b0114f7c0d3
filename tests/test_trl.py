"""engines/trl.py against losses.py: one real training run each, its gradients computed again from
the papers' side.

The run is TRL's own `train()`: generation, its scoring, its accumulation, its processes. What it leaves in param.grad
before each optimiser step must be the gradient of losses.py on all answers of that step, scored by model.py.
As a script (`accelerate launch tests/test_trl.py MODEL OUT`) this file is one process of a run of several.
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
from llm.policy import make_rows, score
from losses import METHODS, Batch, OldPolicy, group_advantages, prefix_nodes, project

pytest.importorskip("trl", minversion="1.16", reason="TRL is an extra: pip install -e '.[trl]'")
from trl import GRPOConfig  # noqa: E402

from engines import gsm8k_trl  # noqa: E402
from engines.trl import Trainer  # noqa: E402

G, L, TEMPERATURE = 4, 8, 0.5  # so cold that some answers begin alike
PROMPTS = [{"prompt": text} for text in ("1+1=", "12+3=", "7=", "40+2=", "5+", "six", "7+70=", "8")]
HONOURED = [name for name, m in METHODS.items() if not m.needs_hidden and not m.repair]
CLIPS = {
    "eps_low": 0.15,
    "eps_high": 0.2,
}  # after one step of the optimiser, tokens lie on both sides of them
HYPER = {"dfpo-min": {}, "advantage-reweighting": CLIPS | {"alpha": 0.7}, "reinforce": {}}
HYPER |= {"dfpo-orthogonal": {}, "gspo": {"eps_low": 0.5, "eps_high": 0.6}}
LONG = pytest.mark.skipif(not os.environ.get("LONG"), reason="the full grid: LONG=1")


def reward(completion_ids, **_):
    """Of the ids alone, and equal within some groups: no answer is right, but they differ."""
    return [float(sum(ids) % 3) if ids[0] % 4 else 0.1 for ids in completion_ids]


class Record(TrainerCallback):
    """What is there before each optimiser step: parameters, gradients, the loss, the rows that it
    was taken on."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        parameters = {k: v.detach().clone() for k, v in model.named_parameters()}
        gradients = {k: v.grad.clone() for k, v in model.named_parameters()}
        k = (
            (self.trainer._step - 1) % args.steps_per_generation
            + 1
            - args.gradient_accumulation_steps
        )
        window = deepcopy(self.trainer._buffered_inputs[k : k + args.gradient_accumulation_steps])
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
    model = AutoModelForCausalLM.from_pretrained(path, attention_dropout=dropout)
    trainer = Trainer(
        model,
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


def run(path, method, hyper=None, **options):
    record = Record()
    trainer = make(
        path, method, record, HYPER.get(method, CLIPS) if hyper is None else hyper, **options
    )
    trainer.train()
    return record.steps, trainer.state.log_history


def again(path, steps, method, hyper=None, projected=False, kl=0.0, on_policy=False):
    """The same optimiser steps by losses.py and model.py: a loss and a gradient each."""
    hyper = (HYPER.get(method, CLIPS) if hyper is None else hyper) | ({"kl": kl} if kl else {})
    rule, found = METHODS[method], []
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    start = deepcopy(
        model.state_dict()
    )  # the policy that answered, and the reference of the KL term
    for k, (parameters, _, _, (prompts, answers)) in enumerate(steps):
        rows = make_rows(prompts, answers, torch.device("cpu"))
        model.load_state_dict(start)
        old = ref = score(model, rows, TEMPERATURE)[0].detach()
        model.load_state_dict(parameters, strict=False)
        model.zero_grad()
        logp = score(model, rows, TEMPERATURE)[0]
        old = logp.detach() if on_policy else old  # each step has answers of its own
        rewards = torch.tensor(reward(answers))
        advantages = group_advantages(rewards, G, rule.scale)
        adv = advantages[:, None].expand_as(logp)
        if rule.credit:
            taken = {k: v for k, v in hyper.items() if k == "alpha"}
            adv = rule.credit(adv, OldPolicy(rows.tokens, rows.mask, old, rewards, G), **taken)
        batch = Batch(logp, old, adv, rows.mask, G, L, ref)
        taken = {k: v for k, v in hyper.items() if k != "alpha"}
        loss = value = rule.passes[k % len(rule.passes)](batch, **taken)
        if projected:
            loss = project(
                loss, logp, advantages, prefix_nodes(rows.tokens, rows.mask, G), rows.mask
            )
        loss.backward()
        found.append((value.item(), {k: v.grad for k, v in model.named_parameters()}))
    return found


def assert_same(path, steps, method, **options):
    assert len(steps) == 2
    for (_, gradients, value, _), (expected, ours) in zip(
        steps, again(path, steps, method, **options), strict=True
    ):
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
    """Groups torn over micro-batches (2 rows of 4); two optimiser steps from one generation (pieces
    > accumulate)."""
    split = dict(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=pieces,
    )
    method = "pos-only" if projected else "dfpo-orthogonal"
    steps, history = run(qwen_path, method, project=projected, **split)
    assert_same(qwen_path, steps, method, projected=projected)
    for line, (_, _, value, _) in zip(
        history, steps, strict=False
    ):  # what is logged is what was optimised
        assert line["loss"] == pytest.approx(value.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("iterations", [1, 2])
def test_beta_weighs_the_k3_term(qwen_path, iterations):
    steps, _ = run(qwen_path, "grpo", beta=0.3, num_iterations=iterations)
    assert_same(qwen_path, steps, "grpo", kl=0.3, on_policy=iterations == 1)


def test_the_tax_is_logged_and_the_projection_removes_it(qwen_path):
    plain, projected = (
        run(qwen_path, "pos-only", project=projected)[1] for projected in (False, True)
    )
    assert (
        plain[0]["learning_tax"] > 0.1
        and projected[0]["learning_tax"] < 1e-6
        and plain[0]["entropy"] > 0.1
    )


def test_evaluation_is_the_loss_of_losses(qwen_path):
    trainer = make(qwen_path, "reinforce", per_device_eval_batch_size=8, num_generations_eval=4)
    seen = []
    trainer._loss = lambda *x: seen.append(x) or Trainer._loss(trainer, *x)
    found = trainer.evaluate(Dataset.from_list(PROMPTS[:2]))["eval_loss"]
    ((logp, (rows,), group_size),) = seen
    mask, rewards = rows["completion_mask"].bool(), rows["rewards"]
    adv = group_advantages(rewards, group_size)[:, None].expand_as(logp)
    expected = METHODS["reinforce"].passes[0](Batch(logp, logp, adv, mask, group_size, L))
    assert found == pytest.approx(expected.item(), rel=1e-6) and abs(found) > 1e-3


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


def test_gsm8k_has_train_pys_prompts_and_verifier(
    qwen_path, small_gsm8k, tmp_path, monkeypatch, capsys
):
    flags = f"--model {qwen_path} --data {small_gsm8k} --output_dir {tmp_path} --method dfpo-orthogonal --max_steps 1"
    flags += " --use_cpu --bf16 False --report_to none --num_generations 4 --per_device_train_batch_size 4"
    flags += " --max_completion_length 4 --save_strategy no --gradient_checkpointing False"
    monkeypatch.setattr(sys, "argv", ["gsm8k_trl", *flags.split()])
    gsm8k_trl.main()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 1000
    task = GSM8K(small_gsm8k)
    rows = gsm8k_trl.prompts(task, tokenizer)
    assert [tokenizer(x)["input_ids"] for x in rows["prompt"]] == task.encode(tokenizer, task.train)
    for wrong, reason in (
        ("--method ibpo", "second rollout"),
        ("--hyper eps", "NAME=VALUE"),
        ("--data /no", "not a file"),
    ):
        monkeypatch.setattr(sys, "argv", ["gsm8k_trl", *flags.split(), *wrong.split()])
        with pytest.raises(SystemExit):
            gsm8k_trl.main()
        assert reason in capsys.readouterr().err


@LONG
def test_two_processes(qwen_path, tmp_path):
    """accelerate launch, gloo: groups torn over processes and micro-batches; every method."""
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += [
        "--multi_gpu"
    ]  # means several processes; with --cpu accelerate starts one. The script itself asks for CPUs
    launch += [
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "0",
        __file__,
    ]
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
        merged = [
            (
                parameters,
                gradients,
                value,
                [mine + theirs for mine, theirs in zip(ids, other[3], strict=True)],
            )
            for (parameters, gradients, value, ids), other in zip(*ranks, strict=True)
        ]
        assert_same(qwen_path, merged, method)
        for mine, theirs in zip(*ranks, strict=True):
            assert all(torch.equal(mine[1][k], theirs[1][k]) for k in mine[1])


if __name__ == "__main__":
    model_path, out = sys.argv[1:]
    for method, accumulate in itertools.product(HONOURED, (1, 2)):  # 6 rows a process, groups of 4
        split = dict(
            per_device_train_batch_size=6 // accumulate, gradient_accumulation_steps=accumulate
        )
        torch.save(
            run(model_path, method, **split)[0],
            Path(out) / f"{method}-{accumulate}-{os.environ['RANK']}.pt",
        )
