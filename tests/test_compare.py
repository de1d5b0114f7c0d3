"""Runs read back, what they come to, statistics over seeds; and comparisons: several runs made."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments import compare, curves, tokens
from toy import figure


def make_run(folder: Path, rewards, seed=0, method="grpo", last=None, **settings) -> Path:
    folder.mkdir(parents=True)
    config = {"method": method, "seed": seed, "lr": 1e-3} | settings
    (folder / "config.json").write_text(json.dumps({"config": config}))
    shares = {"opener so": 0.5, "opener ok": 0.5, "form direct": 1.0}
    every = {"entropy": 1.0, "generated": 500, "tax": 0.25}
    lines = [{"step": 0, "greedy": 0.1, **shares}]
    for t, reward in enumerate(rewards, 1):
        lines.append({"step": t, "reward": reward, "delta": 0.5 - reward, **every})
    lines[-1] |= {"greedy": 0.75, **shares, **(last or {})}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


# ---------------- reading


def test_a_cut_off_last_line_is_left_out_and_a_broken_one_before_it_is_named(tmp_path):
    run = make_run(tmp_path / "run", [0.25, 0.5])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
    assert [m["reward"] for m in curves.read_run(run).steps] == [0.25, 0.5]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('\n{"step": 3, "reward": NaN}\n')
    with pytest.raises(ValueError, match="line 4 of metrics.jsonl is not a step's metrics"):
        curves.read_run(run)
    with pytest.raises(ValueError, match="nowhere is not a run; expected run directories"):
        curves.read_run(tmp_path / "nowhere")


def test_what_is_no_number_is_a_missing_field_and_a_run_in_its_warm_start_has_no_line(tmp_path):
    run = make_run(tmp_path / "run", [0.5], last={"entropy": None, "length": "long"})
    assert {"entropy", "length"}.isdisjoint(curves.read_run(run).lines[1])
    (run / "metrics.jsonl").unlink()
    assert curves.read_run(run).lines == []


def test_runs_that_differ_only_in_the_seed_are_one_group_named_by_what_differs(tmp_path):
    for name, more in {
        "a": dict(seed=0, out="x"),
        "b": dict(seed=1, out="y"),
        "c": dict(seed=0, lr=0.01),
        "d": dict(seed=0, method="gspo", project=True),
        "start-s0": dict(seed=0, steps=0),
    }.items():
        make_run(tmp_path / "runs" / name, [0.5], **more)
    runs = curves.read_runs([str(tmp_path / "runs")])
    groups = curves.group_runs(runs)
    assert {label: sorted(group) for label, group in groups.items()} == {
        "grpo, lr 0.001": [0, 1],
        "grpo, lr 0.01": [0],
        "gspo+proj, lr 0.001": [0],
    }
    with pytest.raises(ValueError, match="a second run of grpo with seed 0"):
        curves.group_runs([runs[0], runs[0]])


def test_a_label_names_a_shared_start_without_its_seed_and_no_empty_setting(tmp_path):
    for method, start, hyper in (("grpo", "start", []), ("ibpo", "start-repair", ["bonus=0.4"])):
        for seed in (0, 1):
            model = f"/there/compare/{start}-s{seed}/start"
            settings = dict(model=model, hyper=hyper, steps=1)
            make_run(tmp_path / f"{method}{seed}", [0.5], seed, method, **settings)
    groups = curves.group_runs(curves.read_runs([str(tmp_path)]))
    assert list(groups) == [
        "grpo, model compare/start",
        "ibpo, hyper bonus=0.4, model compare/start-repair",
    ]


def test_the_table_names_runs_left_out_and_compares_with_the_row_asked_for(tmp_path, capsys):
    folder = tmp_path / "all"
    for name, method, steps in (("a", "gspo", 6), ("b", "grpo", 6), ("c", "dapo", 5)):
        for seed in (0, 1):
            make_run(folder / f"{name}{seed}", [0.5] * steps, seed, method, steps=6)
    curves.main([str(folder), "--base", "grpo"])
    out, err = capsys.readouterr()
    assert "dapo" not in out and "| gspo minus grpo | 2 |" in out
    assert err == "".join(f"left out: {folder}/c{seed} is unfinished\n" for seed in (0, 1))
    for argv, said in (
        ([str(folder), "--base", "sgd"], "--base sgd: there is no such row; there are gspo, grpo"),
        ([str(folder / "c0")], "there is no finished run among these"),
        ([str(tmp_path / "no")], "is not a run"),
    ):
        with pytest.raises(SystemExit) as end:
            curves.main(argv)
        assert end.value.code == 2 and said in capsys.readouterr().err


# ---------------- what a run comes to


def test_steps_to_a_score_is_the_first_mean_of_five_that_reaches_it_or_one_more_than_there_are():
    assert curves.steps_to([0, 0, 1, 1, 1, 1, 1, 0], 0.8) == 6
    assert curves.steps_to([1, 1, 1, 1], 0.5) == 5  # never five steps
    assert curves.steps_to([0.5] * 9, 0.8) == 10


def test_jitter_is_the_mean_size_of_second_differences():
    assert curves.jitter([0.0, 1.0, 0.0, 0.0]) == pytest.approx((2 + 1) / 2)
    assert curves.jitter([0.1, 0.2, 0.3, 0.4]) == pytest.approx(0, abs=1e-12)
    assert math.isnan(curves.jitter([0.1, 0.2]))


def test_outcomes_by_hand(tmp_path):
    last = {"opener so": 0.75, "opener ok": 0.25}
    run = make_run(tmp_path / "r", [0.0] * 10 + [1.0] * 10, last=last)
    o = curves.outcome(curves.read_run(run), 0.6)
    assert (o["reward"], o["final"], o["greedy"], o["Steps(0.6)"]) == (0.5, 1.0, 0.75, 13)
    assert o["opener drift"] == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert o["form drift"] == o["form entropy"] == 0 and o["lazy"] == 0.5 and o["k tokens"] == 10
    assert math.isnan(o["clipped"])  # no step has it
    with pytest.raises(ValueError, match="no finished step"):
        curves.outcome(curves.read_run(make_run(tmp_path / "empty", [])))


# ---------------- statistics


@pytest.mark.parametrize("n", [2, 5, 10, 20])
def test_students_interval_covers_the_true_mean_95_times_in_a_hundred(n):
    rng = random.Random(n)
    inside = 0
    for _ in range(3000):
        middle, half = curves.interval([rng.gauss(3, 2) for _ in range(n)])
        inside += abs(middle - 3) <= half
    assert inside / 3000 == pytest.approx(0.95, abs=0.012)  # three standard errors


def test_students_quantiles_are_those_of_the_tables_and_intervals_know_what_is_no_number():
    for freedom, value in ((1, 12.706), (4, 2.776), (13, 2.160), (20, 2.086), (60, 2.000)):
        assert figure.quantile(freedom) == pytest.approx(value, abs=5e-4)
    assert curves.interval([1.0, 3.0, math.nan]) == (2.0, pytest.approx(12.706))
    assert curves.interval([1.0, math.inf])[0] == math.inf
    assert curves.interval([1.0])[0] == 1 and math.isnan(curves.interval([1.0])[1])


def test_the_table_pairs_by_seed_and_stars_what_leaves_out_0(tmp_path):
    def read(name, rewards, seed, method):
        return curves.read_run(make_run(tmp_path / name, rewards, seed, method))

    groups = {"grpo": {}, "gspo": {}}
    more = [0.1, 0.11, 0.09, 0.08, 0.12]
    for seed in range(5):
        groups["grpo"][seed] = read(f"a{seed}", [seed / 10] * 6, seed, "grpo")
        groups["gspo"][seed] = read(f"b{seed}", [seed / 10 + more[seed]] * 6, seed, "gspo")
    first = groups["gspo"].pop(0)
    groups["gspo"][7] = read("other", [0.9] * 6, 7, "gspo")
    lines = curves.format_table(groups, only=("final",)).splitlines()
    assert lines[2] == f"| grpo | 5 | 0.200 +- {2.776 * 0.158114 / 5**0.5:.3f} |"
    assert lines[-1].startswith("| gspo minus grpo | 4 | +0.100 [") and "*" not in lines[-1]
    groups["gspo"][0] = first
    half = 2.776 * 0.0158114 / 5**0.5  # of the differences, five of them
    cell = f"+0.100 [+{0.1 - half:.3f}, +{0.1 + half:.3f}]*"
    assert curves.format_table(groups, only=("final",)).endswith(f"| 5 | {cell} |")
    for run in [*groups["gspo"].values()][:3]:
        for m in run.steps:
            m["lazy"] = m.pop("delta")  # three of six have no delta
    cells = curves.format_table(groups, only=("lazy",)).splitlines()
    assert "(3)" in cells[3] and "*" not in cells[-1] and "(" in cells[-1]
    pairs = [("grpo", "gspo"), ("dapo", "grpo")]
    lines = curves.format_table(groups, only=("final",), pairs=pairs).splitlines()
    assert lines[-1].startswith("| grpo minus gspo | 5 | -0.100") and len(lines) == 8


def test_rewards_are_read_at_equal_tokens_with_students_interval(tmp_path, capsys):
    def run(name, method, generated, seed=0):
        rewards = [k / 10 + seed / 100 for k in range(11)]
        folder = make_run(tmp_path / name, rewards, seed, method)
        metrics = folder / "metrics.jsonl"
        text = metrics.read_text().replace('"generated": 500', f'"generated": {generated}')
        metrics.write_text(text)
        return str(folder)

    cheap = run("a", "grpo", 1000)  # the middle of the k-th step: k + 0.5 thousand
    dear = [run(f"b{seed}", "ibpo", 2000, seed) for seed in (-1, 1)]
    tokens.main("5,10", cheap, *dear)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == ["grpo", "ibpo"]
    assert [float(row[3].split("+-")[0]) for row in rows] == pytest.approx([0.45, 0.2], abs=0.051)
    assert rows[1][3].split("+-")[1].strip() == f"{12.706 * 0.0141421 / 2**0.5:.3f}"
    twins = [run(f"c{seed}", "grpo", 1000, seed) for seed in (-1, 1)]
    tokens.main("5", *twins, *dear)
    difference = capsys.readouterr().out.splitlines()[-1].split("|")
    assert difference[1] == " ibpo minus grpo " and difference[3].endswith("+- 0.000 ")
    for argv, said in (
        (("20", cheap), "fewer than 20 thousand"),
        (("5", "nowhere"), "nowhere is not a run"),
        (("x", cheap), "budgets x: expected thousands of tokens, such as 50,100,200"),
        (("5", cheap, cheap), "is a second run of grpo with seed 0"),
    ):
        with pytest.raises(SystemExit) as end:
            tokens.main(*argv)
        error = capsys.readouterr().err
        assert end.value.code == 2 and said in error and error.count("\n") == 1


# ---------------- methods x seeds

# Stands for train.py: what that would leave, a failure of gspo, a cut-off of dapo until "mended".
FAKE = """
import json, signal, sys, time
from pathlib import Path
config, argv = json.loads({config!r}), sys.argv[1:]
values = dict(zip(argv[::2], argv[1::2]))
print("a line of the run")
run = Path(values.get("--resume") or values["--out"])
mended = (run.parent / "mended").exists()
if "--resume" in values:
    config = json.loads((run / "config.json").read_text())["config"]
for flag, value in values.items():
    key = flag[2:].replace("-", "_")
    if key not in ("out", "resume"):
        config[key] = type(config[key])(value)
if config["method"] == "gspo" and config["steps"] and not mended:
    sys.exit("error: no luck")
if config["model"] != "scratch":
    assert Path(config["model"], "weights").read_text() == str(config["seed"])
run.mkdir(parents=True, exist_ok=True)
(run / "config.json").write_text(json.dumps(dict(config=config)))
begun = (run / "metrics.jsonl").exists()
last = 2 if config["method"] == "dapo" and not mended else config["steps"]
stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
with open(run / "metrics.jsonl", "a") as file:
    for step in range(3 if begun else 0, last + 1):
        line = dict(step=step, reward=0.5, greedy=0.5)
        print(json.dumps(line), file=file, flush=True)
        time.sleep({seconds})
        if stop:
            break
if config["steps"] == 0:
    (run / "start").mkdir()
    (run / "start" / "weights").write_text(str(config["seed"]))
"""


def write_fake(folder: Path, seconds: float = 0) -> Path:
    script = folder / "fake_train.py"
    text = FAKE.replace("{config!r}", repr(json.dumps(asdict(compare.parse([])))))
    script.write_text(text.replace("{seconds}", str(seconds)))
    return script


def test_a_comparison_runs_in_parallel_is_resumed_and_ends_with_the_table(
    tmp_path, capfd, monkeypatch
):
    argv = ["--method", "grpo,gspo,dapo", "--seeds", "2", "--steps", "4", "--out", str(tmp_path)]
    monkeypatch.setattr(compare, "TRAIN", write_fake(tmp_path))
    monkeypatch.setattr(compare, "count_at_once", lambda _: 2)
    with pytest.raises(SystemExit) as end:
        compare.main(argv)
    logs = [tmp_path / ".logs" / f"gspo-s{seed}.log" for seed in (0, 1)]
    said = [f"{tmp_path}/gspo-s{s}: error: no luck; its log is {logs[s]}" for s in (0, 1)]
    assert sorted(end.value.code.removeprefix("error: ").split("\n       ")) == said
    lines = logs[0].read_text().splitlines()
    assert lines[0].startswith("$ ") and lines[1:] == ["a line of the run", "error: no luck"]
    assert "6 run(s); to do: 2 warm start(s), 6 run(s)" in capfd.readouterr().out
    (tmp_path / "mended").mkdir()
    left = {job.folder.name: job.args for job in compare.plan(argv).values() if job.args}
    assert left.keys() == {"gspo-s0", "gspo-s1", "dapo-s0", "dapo-s1"}
    resume = ["--resume", str(tmp_path / "dapo-s0"), "--micro-rows"]
    assert left["dapo-s0"] == [*resume, "64"]
    smaller = compare.plan([*argv, "--micro-rows", "2"])[tmp_path / "dapo-s0"]
    assert smaller.args == [*resume, "2"]
    compare.main(argv)
    out = capfd.readouterr().out
    assert "6 run(s); to do: 0 warm start(s), 4 run(s)" in out
    assert "| grpo | 2 |" in out and "| dapo minus grpo | 2 |" in out
    assert [m["step"] for m in curves.read_run(tmp_path / "dapo-s0").lines] == [0, 1, 2, 3, 4]


def test_runs_of_one_seed_share_their_warm_start_and_repairing_methods_have_another(tmp_path):
    def parsed(job):
        return compare.parse(job.args)

    argv = ["--method", "grpo,gspo+proj,ibpo", "--seeds", "2", "--warm-steps", "9"]
    jobs = compare.plan([*argv, "--out", str(tmp_path)])
    starts = {path.name: job for path, job in jobs.items() if not job.config.steps}
    assert starts.keys() == {f"start{x}-s{s}" for x in ("", "-repair") for s in (0, 1)}
    assert {name: parsed(job).method for name, job in starts.items()}["start-repair-s1"] == "ibpo"
    assert all(job.config.warm_steps == 9 and job.start is None for job in starts.values())
    for path, job in jobs.items():
        if path.name not in starts:
            name = "start-repair" if "ibpo" in path.name else "start"
            assert job.start == tmp_path / f"{name}-s{path.name[-1]}"
            assert parsed(job).model == str(job.start / "start") and parsed(job).warm_steps == 0
            assert parsed(job).project == ("+proj" in path.name)
    for flags in (["--warm-steps", "0"], ["--model", "mine"]):
        jobs = compare.plan(["--method", "grpo,gspo", *flags, "--out", str(tmp_path)])
        assert [job.start for job in jobs.values()] == [None, None]


def test_a_run_from_a_warm_start_keeps_the_preset_of_the_model_it_is_of(tmp_path):
    flags = ["--task", "gsm8k", "--model", "scratch", "--lr", "1e-4"]
    jobs = compare.plan(["--method", "ibpo", *flags, "--out", str(tmp_path)])
    start, run = jobs.values()
    assert start.folder == tmp_path / "start-s0"  # GSM8K's demonstrations contain no corrections
    asked = compare.parse(["--method", "ibpo", *flags])
    assert replace(asked, model=run.config.model, warm_steps=0) == run.config
    assert asked.lr == 1e-4 and asked.train_items == 32 and asked.minibatches == 1
    assert start.config == replace(asked, steps=0)


def test_a_start_that_fails_is_one_line_and_the_runs_of_other_starts_are_made(
    tmp_path, monkeypatch
):
    script = write_fake(tmp_path)
    bad = (
        'if config["seed"] == 1:\n    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n'
    )
    script.write_text(script.read_text().replace("if config", bad + "if config", 1))
    monkeypatch.setattr(compare, "TRAIN", script)
    with pytest.raises(SystemExit) as end:
        compare.main(["--seeds", "2", "--steps", "1", "--out", str(tmp_path)])
    start = f"{tmp_path}/start-s1: killed by SIGKILL, perhaps for memory; its log is"
    assert end.value.code == f"error: {start} {tmp_path}/.logs/start-s1.log"
    assert curves.read_run(tmp_path / "grpo-s0").finished and not (tmp_path / "grpo-s1").exists()


def test_ctrl_c_reaches_the_runs_which_finish_their_step(tmp_path):
    config = asdict(replace(compare.parse([]), warm_steps=0, steps=50))
    lines = [
        "import signal",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",  # ignored under nohup
        "from pathlib import Path",
        "from types import SimpleNamespace",
        "from experiments import compare",
        f"compare.TRAIN = Path({str(write_fake(tmp_path, seconds=0.2))!r})",
        f"compare.parse = lambda _: SimpleNamespace(**{config})",  # train.py's would import much
        "compare.count_at_once = lambda _: 2",
        "compare.main()",
    ]
    argv = ["--method", "grpo,dapo", "--steps", "50", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines), *argv],
        cwd=Path(curves.__file__).parents[1],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    runs = [tmp_path / "grpo-s0" / "metrics.jsonl", tmp_path / "dapo-s0" / "metrics.jsonl"]
    while not all(run.exists() and run.read_text() for run in runs):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 1 and error == "stopped; the same command resumes\n"
    for run in runs:
        assert 1 <= run.read_text().count("\n") < 20 and run.read_text().endswith("\n")


def test_as_many_runs_at_once_as_there_are_cores_and_one_on_a_gpu(monkeypatch):
    asked = compare.parse([])
    monkeypatch.setattr(compare.os, "sched_getaffinity", lambda _: range(6), raising=False)
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: False)
    counts = [compare.count_at_once(replace(asked, threads=n)) for n in (0, 1, 2, 4, 9)]
    assert counts == [1, 6, 3, 1, 1]
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: True)
    assert compare.count_at_once(asked) == 1
    assert compare.count_at_once(replace(asked, device="cpu")) == 6


@pytest.mark.parametrize(
    "args, said",
    [
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--method", "grpo,sgd"], "sgd"),
        (["--method", "grpo+projx"], "--method grpo+projx: expected NAME or NAME+proj"),
        (["--method", "grpo,gspo,grpo"], "grpo stands there twice"),
        (["--method", "grpo,gspo", "--lr", "-1"], "--lr -1"),
        (["--lr", "0.5"], "grpo-s0 was made with lr 0.001, not 0.5; another experiment needs"),
        (["--warm-lr", "0.5"], "start-s0 was made with warm_lr 0.006, not 0.5; another experiment"),
        (["--method", "grpo,dapo"], "dapo-s0 is in the way"),
        (["--sneeds", "2"], "--sneeds"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(args, said, tmp_path, capsys):
    jobs = compare.plan(["--steps", "4", "--out", str(tmp_path)])
    for job in jobs.values():
        settings = asdict(job.config)
        make_run(job.folder, [0.5] * 2, settings.pop("seed"), settings.pop("method"), **settings)
    (tmp_path / "dapo-s0").mkdir()
    with pytest.raises(SystemExit) as end:
        compare.plan(["--steps", "4", *args, "--out", str(tmp_path)])
    error = capsys.readouterr().err
    assert end.value.code == 2 and said in error and error.count("\n") == 1
