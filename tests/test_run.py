"""Whole runs: what they do, what they leave behind, what they repeat."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import naive
import pytest
import torch
from conftest import load
from helpers import TINY, metrics, run, spy

import train

ROOT = Path(train.__file__).parent


def test_the_steps_of_a_run(tmp_path, monkeypatch, easy):
    """Each step has its own prompts, and compares the policy with the frozen one that it began
    from. What was evaluated is what the checkpoint holds."""
    samples = spy(monkeypatch, "sample", lambda policy, task, items, step, config: (items, step))
    weights = spy(monkeypatch, "score", lambda policy, reference, *_: reference.model.state_dict())
    saves = spy(monkeypatch, "save", lambda policy, optimizer, step, folder: step)
    folder = run(tmp_path / "run", "--eval-every", "3")
    config = train.Config(**json.loads((folder / "config.json").read_text())["config"])
    task = train.load_task(config)
    batches = train.prompt_batches(task, config)
    assert samples == list(zip(batches[:4], [1, 2, 3, 4], strict=True)) and saves == [3, 4]
    start = load(folder / "start")
    for state in weights:
        assert all(torch.equal(x, state[key]) for key, x in start.model.state_dict().items())
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert ["greedy" in line for line in lines] == [True, False, False, True, True]
    assert lines[1]["kl_start"] < 1e-9 < lines[2]["kl_start"] < lines[4]["kl_start"]
    for line, place in ((lines[0], "start"), (lines[4], "checkpoints/step-000004")):
        evaluation = train.evaluate(load(folder / place), task, config)
        assert evaluation == {key: line[key] for key in evaluation}


def test_a_run_leaves_what_it_promises(tmp_path, monkeypatch, capsys, easy):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scored = spy(monkeypatch, "save_batch", lambda policy, scored, config, folder: scored)
    folder = run(tmp_path / "run", "--temperature", "0.7")
    about = json.loads((folder / "config.json").read_text())
    assert about["config"]["method"] == "grpo" and about["versions"]["torch"] == torch.__version__
    assert about["config"]["out"] == str(folder)
    names = {"config.json", "metrics.jsonl", "start", "checkpoints", "batches"}
    assert {path.name for path in folder.iterdir()} - {"lock"} == names
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    seconds = last["rollout_s"] + last["score_s"] + last["update_s"]
    assert last["tokens_per_s"] == pytest.approx(last["generated"] / seconds, rel=1e-6)
    (checkpoint,) = (folder / "checkpoints").iterdir()  # the newest one
    assert checkpoint.name == "step-000004"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model(torch.tensor([tokenizer.encode("37+48=")])).logits.isfinite().all()
    told = capsys.readouterr().out
    assert told.count("\nstep ") == 3 and str(folder) in told
    assert all(f"\n{name}" in told for name in ("reward", "greedy", "opener so", "form direct"))

    names = [path.name for path in sorted((folder / "batches").iterdir())]
    assert names == ["step-000002.pt", "step-000004.pt"]
    batch = torch.load(folder / "batches" / names[1], weights_only=True)
    answers = scored[1].answers
    for key in ("tokens", "mask", "rewards"):
        assert torch.equal(batch[key], getattr(answers, key))
    assert batch["texts"] == answers.texts
    assert batch["prompts"] == [item.prompt for item in answers.items[::3]]
    facts = dict(step=4, method="grpo", group_size=3, max_tokens=12)
    assert facts.items() <= batch.items()
    advantages = naive.advantages(batch["rewards"].tolist(), 3, "std")
    assert batch["advantages"].tolist() == pytest.approx(advantages, rel=1e-5)
    after, prompts = load(checkpoint), answers.prompts.ids.tolist()  # the toy's need no padding
    for row, m, texts, ids in zip(
        batch["logp"], batch["mask"], batch["pieces"], batch["tokens"].tolist(), strict=True
    ):
        (expected,) = naive.log_probs(after, [prompts.pop(0)], [ids[: m.sum()]], 0.7)
        torch.testing.assert_close(row[m], expected, rtol=1e-3, atol=1e-4)
        assert texts == [tokenizer.decode([i]) for i in ids]
    assert torch.equal(batch["logp_old"], scored[1].batch.logp_old)
    gap = (batch["logp_old"] - answers.logp)[batch["mask"]].abs().max()
    assert last["max_logp_gap"] == pytest.approx(gap.item())


@pytest.mark.parametrize(
    "model, options",
    [("scratch", "--hyper kl=0.1"), ("qwen", "--method ibpo"), ("qwen", "--method nthr")],
)
def test_gsm8k_trains_from_local_files(tmp_path, small_gsm8k, qwen_path, model, options):
    """With a model from scratch, and with one whose generation config holds a sampler."""
    args = f"--task gsm8k --data {small_gsm8k} --threads 1 --max-tokens 20 --steps 2 {options}"
    args += f" --model {model if model == 'scratch' else qwen_path}"
    folder = run(tmp_path / "run", *args.split())
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2]
    assert json.loads((folder / "config.json").read_text())["config"]["fast"]


def test_no_steps_are_a_warm_start_and_an_evaluation(tmp_path):
    folder = run(tmp_path / "run", "--steps", "0")
    (line,) = metrics(folder)
    assert line["step"] == 0 and "greedy" in line and (folder / "start").is_dir()
    assert not (folder / "checkpoints").exists()


def test_equal_runs_have_equal_metrics_and_a_shared_start_changes_none(tmp_path, easy):
    made = run(tmp_path / "made")
    assert metrics(run(tmp_path / "again")) == metrics(made)
    assert metrics(run(tmp_path / "other", "--seed", "1"))[1:] != metrics(made)[1:]
    start = ["--model", made / "start", "--warm-steps", "0"]
    shared = run(tmp_path / "shared", *start)
    assert metrics(shared) == metrics(made) and not (shared / "start").exists()
    other = run(tmp_path / "gspo", *start, "--method", "gspo")
    assert metrics(other)[0] == metrics(made)[0] and metrics(other)[2:] != metrics(made)[2:]


def test_a_fast_run_has_the_plain_ones_numbers(tmp_path, easy):
    plain, quick = (run(tmp_path / f"run{flag}", flag) for flag in ("--no-fast", "--fast"))
    for a, b in zip(metrics(plain), metrics(quick), strict=True):
        assert a.pop("examples", 0) == b.pop("examples", 0)
        assert a.pop("max_logp_gap", 0) + b.pop("max_logp_gap", 0) < 1e-4
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)


def test_a_run_without_out_is_named_after_what_it_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    train.main([*TINY, "--steps", "0", "--seed", "3", "--warm-steps", "0"])
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("arithmetic-grpo-s3-20")


def test_three_files_are_all_that_the_default_command_needs(tmp_path):
    (tmp_path / "toy").mkdir()
    for name in ("train.py", "losses.py", "toy/arithmetic.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    code = "import sys, train; train.main(sys.argv[1:])\n"
    code += "ours = [x for x in sys.modules if x.split('.')[0] in ('llm', 'toy', 'claims')]\n"
    code += "print('used:', train.__file__, *sorted(ours))"
    env = {key: x for key, x in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, *TINY, "--out", "run"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"used: {tmp_path}/train.py toy toy.arithmetic\n")
    assert len(metrics(tmp_path / "run")) == 5


@pytest.mark.skipif(not os.environ.get("LONG"), reason="a minute or two: LONG=1")
def test_the_default_run_learns_to_add(tmp_path):
    train.main(["--out", str(tmp_path / "run")])
    lines = metrics(tmp_path / "run")
    assert lines[0]["greedy"] < 0.3 and lines[-1]["greedy"] > 0.95
    assert lines[1]["reward"] < 0.3 and lines[-1]["reward"] > 0.8
