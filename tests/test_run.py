"""Whole runs: what they do, what they leave behind, what they repeat."""

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import naive
import pytest
import torch
from conftest import load
from helpers import TINY, metrics, run, spy

import train
from toy.arithmetic import Arithmetic

ROOT = Path(train.__file__).parent


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, what its functions were given, and what it printed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as told:
        patch.setattr(Arithmetic, "reward", lambda self, text, item: text.count("1") % 2 * 1.0)
        made = SimpleNamespace(
            samples=spy(patch, "sample", lambda policy, task, items, step, config: (items, step)),
            references=spy(patch, "score", lambda policy, reference, *_: reference),
            scored=spy(patch, "save_batch", lambda policy, scored, *_: scored),
            threads=[],
            saves=spy(patch, "save", lambda policy, optimizer, step, folder: step),
        )
        patch.setattr(torch, "set_num_threads", made.threads.append)
        flags = ["--eval-every", "3", "--temperature", "0.7", "--threads", "3"]
        flags += ["--method", "advantage-reweighting"]
        made.folder = run(tmp_path_factory.mktemp("made") / "run", *flags)
    made.about = json.loads((made.folder / "config.json").read_text())
    made.config = train.Config(**made.about["config"])
    made.told = told.getvalue()
    return made


def test_each_step_has_its_own_prompts_and_the_policy_that_rl_began_from(made, easy):
    task, lines = train.load_task(made.config), metrics(made.folder)
    batches = train.prompt_batches(task, made.config)
    assert made.samples == list(zip(batches[:4], [1, 2, 3, 4], strict=True))
    start = load(made.folder / "start").model.state_dict()
    for reference in made.references:
        weights = reference.model.state_dict()
        assert all(torch.equal(x, weights[key]) for key, x in start.items())
    assert lines[1]["kl_start"] < 1e-9 < lines[2]["kl_start"] < lines[4]["kl_start"]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4] and made.saves == [3, 4]
    assert ["greedy" in line for line in lines] == [True, False, False, True, True]
    for line, place in ((lines[0], "start"), (lines[4], "checkpoints/step-000004")):
        evaluation = train.evaluate(load(made.folder / place), task, made.config)
        assert evaluation == {key: line[key] for key in evaluation}


def test_a_run_leaves_what_it_promises(made):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert made.config.method == "advantage-reweighting" and made.config.out == str(made.folder)
    assert made.about["versions"]["torch"] == torch.__version__ and made.threads == [3]
    names = {"config.json", "metrics.jsonl", "start", "checkpoints", "batches"}
    assert {path.name for path in made.folder.iterdir()} - {"lock"} == names
    lines = (made.folder / "metrics.jsonl").read_text().splitlines()
    evaluated, first, *_, last = map(json.loads, lines)
    seconds = last["rollout_s"] + last["score_s"] + last["update_s"]
    assert last["tokens_per_s"] == pytest.approx(last["generated"] / seconds, rel=1e-6)
    (checkpoint,) = (made.folder / "checkpoints").iterdir()  # the newest one
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model(torch.tensor([tokenizer.encode("37+48=")])).logits.isfinite().all()
    assert made.told.count("\nstep ") == 3 and str(made.folder) in made.told
    rows = [line.split()[-3:] for line in made.told.splitlines()]
    for key, before in (("reward", first), ("greedy", evaluated), ("opener so", evaluated)):
        assert [key.split()[-1], f"{before[key]:.3f}", f"{last[key]:.3f}"] in rows
    assert first["reward"] != last["reward"]


def test_a_saved_batch_is_the_steps_batch_and_its_log_probs_before_and_after(made):
    files = sorted((made.folder / "batches").iterdir())
    assert [file.name for file in files] == ["step-000003.pt", "step-000004.pt"]
    batch, scored = torch.load(files[1], weights_only=True), made.scored[1]
    answers, after = scored.answers, load(made.folder / "checkpoints" / "step-000004")
    for key in ("tokens", "mask", "rewards"):
        assert torch.equal(batch[key], getattr(answers, key))
    assert torch.equal(batch["logp_old"], scored.batch.logp_old)
    assert batch["texts"] == answers.texts
    assert batch["prompts"] == [item.prompt for item in answers.items[::3]]
    facts = dict(step=4, method=made.config.method, group_size=3, max_tokens=12)
    assert facts.items() <= batch.items()
    advantages = naive.advantages(batch["rewards"].tolist(), 3, "std")
    assert batch["advantages"].tolist() == pytest.approx(advantages, rel=1e-5)
    tokens = [row[mask].tolist() for row, mask in zip(batch["tokens"], batch["mask"], strict=True)]
    # The toy's prompts need no padding.
    logp = naive.log_probs(after, answers.prompts.ids.tolist(), tokens, 0.7)
    torch.testing.assert_close(batch["logp"][batch["mask"]], torch.cat(logp), rtol=1e-3, atol=1e-4)
    ids, pieces = batch["tokens"].flatten().tolist(), sum(batch["pieces"], [])
    assert pieces == [after.tokenizer.decode([i]) for i in ids]


@pytest.mark.parametrize(
    "model, options",
    [
        ("scratch", "--hyper kl=0.1"),
        ("qwen", "--method ibpo"),
        ("qwen", "--method nthr --no-reference"),
    ],
)
def test_gsm8k_trains_from_local_files(tmp_path, small_gsm8k, qwen_path, model, options):
    """With a model from scratch, and with one whose generation config holds a sampler."""
    args = f"--task gsm8k --data {small_gsm8k} --threads 1 --max-tokens 20 --steps 2 {options}"
    args += f" --model {model if model == 'scratch' else qwen_path}"
    folder = run(tmp_path / "run", *args.split())
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert ("kl_start" in lines[2]) == ("--no-reference" not in options)
    assert json.loads((folder / "config.json").read_text())["config"]["fast"]


def test_no_steps_are_a_warm_start_and_an_evaluation(tmp_path):
    folder = run(tmp_path / "run", "--steps", "0")
    (line,) = metrics(folder)
    assert line["step"] == 0 and "greedy" in line and (folder / "start").is_dir()
    assert not (folder / "checkpoints").exists()


def test_equal_runs_have_equal_metrics_and_a_shared_start_changes_none(tmp_path, easy):
    first, flags = run(tmp_path / "first"), ["--model", tmp_path / "first/start"]
    lines, flags = metrics(first), [*flags, "--warm-steps", "0"]
    assert metrics(run(tmp_path / "again")) == lines
    shared = run(tmp_path / "shared", *flags)
    assert metrics(shared) == lines and not (shared / "start").exists()
    gspo = metrics(run(tmp_path / "gspo", *flags, "--method", "gspo"))
    assert gspo[0] == lines[0] and gspo[2:] != lines[2:]


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
