"""Whole runs: what they leave behind, what they repeat, and how they are resumed or shared."""

import json
import math
import os
import re
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import naive
import pytest
import torch
from conftest import load
from helpers import TINY, metrics, run

import train
from losses import METHODS


def spy(monkeypatch, name: str, look=lambda *args: args) -> list:
    """The calls of a function of train.py from now on."""
    calls, real = [], getattr(train, name)
    monkeypatch.setattr(train, name, lambda *args: calls.append(look(*args)) or real(*args))
    return calls


def refused(capsys, *args) -> str:
    with pytest.raises(SystemExit) as stopped:
        train.main([*map(str, args)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


# ---------------- what a run does and leaves


def test_the_steps_of_a_run(tmp_path, monkeypatch, easy):
    """Each step has its own prompts, and compares the policy with the frozen one that it began
    from. What was evaluated is what the checkpoint holds."""
    samples = spy(monkeypatch, "sample", lambda policy, task, items, step, config: (items, step))
    weights = spy(monkeypatch, "score", lambda policy, reference, *_: reference.model.state_dict())
    saves = spy(monkeypatch, "save", lambda run, step: step)
    folder = run(tmp_path / "run", "--eval-every", "3")
    config = train.Config(**json.loads((folder / "config.json").read_text())["config"])
    task = train.load_task(config)
    batches = train.prompt_batches(task, config)
    assert samples == list(zip(batches[:4], [1, 2, 3, 4], strict=True)) and saves == [3, 4]
    start = load(str(folder / "start"))
    for state in weights:
        assert all(torch.equal(x, state[key]) for key, x in start.model.state_dict().items())
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line.get("lr") for line in lines] == [None, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3]
    assert ["greedy" in line for line in lines] == [True, False, False, True, True]
    assert lines[1]["kl_start"] < 1e-9 < lines[2]["kl_start"] < lines[4]["kl_start"]
    for line, place in ((lines[0], "start"), (lines[3], "step-000003"), (lines[4], "step-000004")):
        found = folder / place if place == "start" else folder / "checkpoints" / place
        evaluation, shown = train.evaluate(load(str(found)), task, config)
        assert evaluation == {key: line[key] for key in evaluation}
        assert "\n  ".join([f"step {line['step']}", *shown]) in (folder / "samples.txt").read_text()


def test_a_run_leaves_what_it_promises(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run(tmp_path / "run", "--eval-every", "1")
    about = json.loads((folder / "config.json").read_text())
    assert about["config"]["method"] == "grpo" and about["versions"]["torch"] == torch.__version__
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    seconds = last["rollout_s"] + last["score_s"] + last["update_s"]
    assert last["tokens_per_s"] == pytest.approx(last["generated"] / seconds, rel=1e-6)
    assert about["device"] == "cpu" and about["config"]["out"] == str(folder)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000004"]  # the newest two
    last = folder / "checkpoints" / "step-000004"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(last),
        AutoTokenizer.from_pretrained(last),
    )
    assert model(torch.tensor([tokenizer.encode("37+48=")])).logits.isfinite().all()
    told = capsys.readouterr().out
    assert told.count("\nstep ") == 5 and f"everything is in {folder}" in told
    assert "try next: python -m toy.tax" in told  # README.md has this command, so it exists
    for kind, names in (("opener", ("so", "ok", "hm")), ("form", ("direct", "ones f", "tens f"))):
        rows = [re.search(rf"\n{kind} {name}\D+(\S+) +(\S+)", told) for name in (*names, "other")]
        for side in (1, 2):
            assert sum(float(row[side]) for row in rows) == pytest.approx(1, abs=2.1e-3)
    assert "before   after" in told and "4 steps of 4 prompts x 3 answers, 2 update(s)" in told


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_the_toy(tmp_path, method, easy):
    folder = run(tmp_path / "run", "--method", method, "--steps", "1")
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [0, 1] and lines[1]["grad_norm"] > 0
    for key in ("greedy", "sampled", "pass@4", "opener so", "form direct"):
        assert 0 <= lines[1][key] <= 1
    assert lines[1]["generated"] > lines[1]["tokens"] or method != "ibpo"


@pytest.mark.parametrize(
    "model, options",
    [("scratch", "--hyper kl=0.1"), ("qwen", "--method ibpo"), ("qwen", "--method nthr")],
)
def test_gsm8k_trains_from_local_files(tmp_path, small_gsm8k, qwen_path, model, options):
    args = f"--task gsm8k --data {small_gsm8k} --threads 1 --max-tokens 20 --steps 2 {options}"
    args += f" --model {model if model == 'scratch' else qwen_path}"
    assert [line["step"] for line in metrics(run(tmp_path / "run", *args.split()))] == [0, 1, 2]


def test_no_steps_are_a_warm_start_and_an_evaluation(tmp_path, capsys):
    folder = run(tmp_path / "run", "--steps", "0")
    (line,) = metrics(folder)
    assert line["step"] == 0 and "greedy" in line and (folder / "start").is_dir()
    assert not (folder / "checkpoints").exists() and "greedy" in capsys.readouterr().out


def test_a_shared_start_gives_the_metrics_of_the_run_that_made_it(tmp_path, easy):
    made = run(tmp_path / "made")
    shared = run(tmp_path / "shared", "--model", made / "start", "--warm-steps", "0")
    assert metrics(shared) == metrics(made) and not (shared / "start").exists()
    other = run(
        tmp_path / "other", "--model", made / "start", "--method", "gspo", "--warm-steps", "0"
    )
    assert metrics(other)[0] == metrics(made)[0] and metrics(other)[2:] != metrics(made)[2:]


def test_same_seed_same_metrics_other_seed_others(tmp_path, easy):
    first, second, other = (run(tmp_path / f"run{i}", "--seed", i % 2) for i in range(3, 0, -1))
    assert metrics(first) == metrics(other) and metrics(first)[1:] != metrics(second)[1:]
    assert (first / "samples.txt").read_text() == (other / "samples.txt").read_text()


def test_a_run_without_out_is_named_after_what_it_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    train.main([*TINY, "--steps", "0", "--seed", "3", "--warm-steps", "0"])
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("arithmetic-grpo-s3-20")


def test_weights_that_are_no_numbers_stop_the_run_in_one_line(tmp_path, easy):
    args = "--lr 1e30 --minibatches 1 --no-reference --schedule constant"
    with pytest.raises(SystemExit, match="error: step 2: .*nan"):
        run(tmp_path / "run", *args.split())


def test_groups_that_share_most_are_kept_with_what_the_step_did_to_them(
    tmp_path, monkeypatch, easy
):
    steps = spy(monkeypatch, "score", lambda policy, reference, answers, config: answers)
    args = "--eval-every 1 --prompts 8 --temperature 0.5 --lr 0.01"
    folder = run(tmp_path / "run", *args.split())
    lines = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    kept = []
    for answers in steps:
        ids = [y[m].tolist() for y, m in zip(answers.rows.tokens, answers.rows.mask, strict=True)]
        shared = Counter()  # by group: tokens that lead where one with another reward leads
        for members in naive.visits(ids, [1] * 24, 3):
            if len({answers.rewards[i].item() for i, _ in members}) > 1:
                shared[members[0][0] // 3] += len(members)
        for group, _ in sorted(shared.items(), key=lambda item: (-item[1], item[0]))[:3]:
            texts = answers.texts[3 * group : 3 * group + 3]
            kept.append((answers.step, answers.items[3 * group].prompt, texts))
    assert kept == [(x["step"], x["prompt"], [y["text"] for y in x["answers"]]) for x in lines]
    before, after = (load(str(folder / "checkpoints" / f"step-00000{n}")) for n in (3, 4))
    for line in (line for line in lines if line["step"] == 4):
        prompt = before.tokenizer(line["prompt"])["input_ids"]
        for x in line["answers"]:
            assert before.tokenizer.convert_tokens_to_ids(x["tokens"]) == x["ids"]
            for policy, key in ((before, "logp_old"), (after, "logp")):
                (logp,) = naive.log_probs(policy, [prompt], [x["ids"]], 0.5)
                assert x[key] == pytest.approx(logp.tolist(), rel=1e-3, abs=1e-4)
        rewards = [x["reward"] for x in line["answers"]]
        advantages = naive.advantages(rewards, 3, "std")
        assert [x["advantage"] for x in line["answers"]] == pytest.approx(advantages, rel=1e-5)
    assert lines[-1]["step"] == 4 and lines[-1]["max_tokens"] == 12


def test_a_log_that_cannot_be_written_ends_the_run_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match="error: .*gone cannot be written .*--resume .*gone"):
        train.record(tmp_path / "gone", {"step": 1})


# ---------------- resuming


def test_ctrl_c_saves_and_resume_is_bit_for_bit(tmp_path, monkeypatch, capsys, easy):
    whole = run(tmp_path / "whole")

    def interrupt(policy, task, items, step, config):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        spy(patch, "sample", interrupt)
        cut = run(tmp_path / "cut")
    assert "stopped after step 3; resume with: python" in capsys.readouterr().out
    assert [line["step"] for line in metrics(cut)] == [0, 1, 2, 3]
    (cut / "metrics.jsonl").open("a").write('{"step": 4, "torn')
    train.main(["--resume", str(cut)])
    assert metrics(cut) == metrics(whole)
    last = Path("checkpoints") / "step-000004"
    model = last / "model.safetensors"
    assert (whole / model).read_bytes() == (cut / model).read_bytes()
    a, b = (torch.load(x / last / "trainer.pt", weights_only=True) for x in (whole, cut))
    a, b = (x["optimizer"]["state"] for x in (a, b))
    assert a and all(torch.equal(a[i][k], b[i][k]) for i in a for k in a[i])


def test_ctrl_c_before_the_first_step_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "warm_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_constant_schedule_can_be_extended_and_a_linear_one_cannot(tmp_path, capsys, easy):
    whole = run(tmp_path / "whole", "--schedule", "constant")
    half = run(tmp_path / "half", "--schedule", "constant", "--steps", "2")
    train.main(["--resume", str(half), "--steps", "4"])
    assert metrics(half) == metrics(whole)
    assert json.loads((half / "config.json").read_text())["config"]["steps"] == 4
    linear = run(tmp_path / "linear", "--steps", "2")
    capsys.readouterr()
    for steps in ("1", "4"):
        said = refused(capsys, "--resume", linear, "--steps", steps)
        assert "the linear schedule was laid out for 2 steps; --steps cannot change" in said
    assert "has already made 2 of 2 steps" in refused(capsys, "--resume", linear)
    about = (half / "config.json").read_text()
    assert "has already made 4 of 3 steps" in refused(capsys, "--resume", half, "--steps", "3")
    assert (half / "config.json").read_text() == about  # refused before anything is written


def test_a_run_can_be_resumed_with_fewer_micro_rows(tmp_path, easy):
    whole = run(tmp_path / "whole", "--schedule", "constant")
    half = run(tmp_path / "half", "--schedule", "constant", "--steps", "2")
    train.main(["--resume", str(half), "--steps", "4", "--micro-rows", "1"])
    assert json.loads((half / "config.json").read_text())["config"]["micro_rows"] == 1
    for got, expected in zip(metrics(half), metrics(whole), strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_run_without_a_checkpoint_begins_anew(tmp_path, capsys, easy):
    whole = run(tmp_path / "whole")
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "config.json").write_bytes((whole / "config.json").read_bytes())
    (tmp_path / "early" / "metrics.jsonl").write_text('{"step": 0, "gre')
    train.main(["--resume", str(tmp_path / "early")])
    assert "holds no complete checkpoint: it begins anew" in capsys.readouterr().out
    assert metrics(tmp_path / "early") == metrics(whole)


def test_changed_logs_are_noticed_on_resume(tmp_path, capsys):
    folder = run(tmp_path / "run", "--schedule", "constant", "--steps", "2")
    (folder / "metrics.jsonl").write_text("")
    capsys.readouterr()
    said = refused(capsys, "--resume", folder, "--steps", "4")
    assert "metrics.jsonl is not what it was at step 2" in said


@pytest.mark.parametrize("gap", [0.002, math.nan])
def test_where_sampler_and_scorer_disagree_the_run_is_saved_and_ends(tmp_path, monkeypatch, gap):
    args = [*TINY, "--eval-every", "9", "--eval-items", "2"]
    train.main([*args, "--out", str(tmp_path / "whole")])
    real, run = train.score, tmp_path / "run"

    def score(policy, reference, answers, config):
        scored = real(policy, reference, answers, config)
        return replace(scored, max_logp_gap=gap) if answers.step == 3 else scored

    with monkeypatch.context() as broken, pytest.raises(SystemExit) as stopped:
        broken.setattr(train, "score", score)
        train.main([*args, "--out", str(run)])
    said = f"error: step 3: scored and sampled log-probs differ by {gap} nats, .* step 2 in {run}$"
    assert re.match(said, stopped.value.code)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    train.main(["--resume", str(run)])
    assert metrics(run) == metrics(tmp_path / "whole")
