"""Runs read back, what they come to, statistics over seeds; and comparisons: several runs made."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments import compare, curves
from toy import figure

SHARES = {"opener so": 0.5, "opener ok": 0.5, "opener other": 0.0, "form direct": 1.0}
SHARES |= {"form ones first": 0.0, "form other": 0.0}


def make_run(folder: Path, rewards, seed=0, method="grpo", last=None, **settings) -> Path:
    """A run's folder; last: of its last line."""
    folder.mkdir(parents=True)
    config = {"method": method, "seed": seed, "project": False, "steps": len(rewards), "lr": 1e-3}
    (folder / "config.json").write_text(json.dumps({"config": config | settings}))
    every = {"entropy": 1.0, "generated": 500, "tax": 0.25, "clip_share": 0.5}
    lines = [{"step": 0, "greedy": 0.1, **SHARES}]
    lines += [{"step": t, "reward": reward, **every} for t, reward in enumerate(rewards, 1)]
    lines[-1] |= {"greedy": 0.75, **SHARES, **(last or {})}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def says(capsys, main, *argv) -> str:
    """What a command ends with: one line, no traceback."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, argv)])
    error = capsys.readouterr().err + (end.value.code if isinstance(end.value.code, str) else "")
    assert error.strip().splitlines()[-1].count("error: ") == 1
    return error


# ---------------- curves


def test_a_cut_off_last_line_is_left_out_and_a_run_in_its_warm_start_has_no_line(tmp_path):
    run = make_run(tmp_path / "run", [0.25, 0.5])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
    assert [line["reward"] for line in curves.read_run(run).steps] == [0.25, 0.5]
    (run / "metrics.jsonl").unlink()
    assert curves.read_run(run).lines == [] and not curves.read_run(run).finished
    (run / "config.json").write_text("{")
    for folder in (run, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=f"{folder} is not a run"):
            curves.read_run(folder)


def test_runs_that_differ_only_in_the_seed_are_one_group_named_by_what_differs(tmp_path):
    for name, more in {
        "a": dict(seed=0, out="x"),
        "b": dict(seed=1, out="y"),
        "c": dict(seed=0, lr=0.01),
        "d": dict(seed=0, method="gspo", project=True),
        "start-s0": dict(seed=0, steps=0),
    }.items():
        make_run(tmp_path / "runs" / name, [0.5], **more)
    runs = curves.read_runs([tmp_path / "runs"])
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
            make_run(tmp_path / f"{method}{seed}", [0.5], seed, method, model=model, hyper=hyper)
    assert list(curves.group_runs(curves.read_runs([tmp_path]))) == [
        "grpo, model compare/start",
        "ibpo, hyper bonus=0.4, model compare/start-repair",
    ]


def test_the_table_names_runs_left_out_and_compares_with_the_row_asked_for(tmp_path, capsys):
    folder = tmp_path / "all"
    for name, method, steps in (("a", "gspo", 6), ("b", "grpo", 6), ("c", "dapo", 7)):
        for seed in (0, 1):
            make_run(folder / f"{name}{seed}", [0.5] * 6, seed, method, steps=steps)
    curves.main([str(folder), "--base", "grpo"])
    out, err = capsys.readouterr()
    assert "dapo" not in out and "| gspo minus grpo | 2 |" in out
    assert err.count("\n") == 2 and f"{folder}/c1 is unfinished" in err
    assert "accepted: gspo, grpo" in says(capsys, curves.main, folder, "--base", "sgd")
    assert "no run to show" in says(capsys, curves.main, folder / "c0")
    assert "is not a run" in says(capsys, curves.main, tmp_path / "no")


def test_outcomes_by_hand(tmp_path):
    last = {"opener so": 0.75, "opener ok": 0.15, "opener other": 0.1}
    run = make_run(tmp_path / "r", [0.0] * 11 + [1.0] * 9, last=last)
    o = curves.outcome(curves.read_run(run))
    assert (o["reward"], o["final"], o["greedy"]) == (0.45, 0.9, 0.75)
    assert o["Steps(0.8)"] == 15  # 4 of steps 11 to 15
    assert o["drift opener"] == pytest.approx(0.35) and o["drift form"] == 0
    assert (o["entropy"], o["tax"], o["clipped"], o["k tokens"]) == (1, 0.25, 0.5, 10)
    assert o["jitter"] == pytest.approx(2 / 18)
    no_toy = curves.read_run(run)
    for line in no_toy.lines:  # GSM8K's runs have no shares
        line.pop("drift opener", None)
    assert math.isnan(curves.outcome(no_toy)["drift opener"])


def test_steps_to_a_score_and_jitter():
    assert curves.steps_to([0, 0, 1, 1, 1, 1, 1, 0], 0.8) == 6
    assert curves.steps_to([1, 1, 1, 1], 0.5) == 5  # never five steps
    assert curves.steps_to([0.5] * 9, 0.8) == 10
    assert curves.jitter([0.0, 1.0, 0.0, 0.0]) == pytest.approx((2 + 1) / 2)
    assert curves.jitter([0.1, 0.2, 0.3, 0.4]) == pytest.approx(0, abs=1e-12)
    assert math.isnan(curves.jitter([0.1, 0.2]))


def test_students_quantiles_are_those_of_the_tables_and_intervals_know_what_is_no_number():
    for freedom, value in ((1, 12.706), (4, 2.776), (13, 2.160), (20, 2.086), (60, 2.000)):
        assert figure.quantile(freedom) == pytest.approx(value, abs=5e-4)
    assert curves.interval([1.0, 3.0, math.nan]) == (2.0, pytest.approx(12.706))
    assert curves.interval([1.0])[0] == 1 and math.isnan(curves.interval([1.0])[1])


def test_the_table_pairs_by_seed_and_stars_what_leaves_out_0(tmp_path):
    def read(name, rewards, seed, method):
        return curves.read_run(make_run(tmp_path / name, rewards, seed, method))

    def cell(table: str, line: int) -> str:  # of the column "final"
        return table.splitlines()[line].split("|")[4].strip()

    groups, more = {"grpo": {}, "gspo": {}}, [0.1, 0.11, 0.09, 0.08, 0.12]
    for seed in reversed(range(5)):
        groups["grpo"][seed] = read(f"a{seed}", [seed / 10] * 6, seed, "grpo")
    for seed in range(5):
        groups["gspo"][seed] = read(f"b{seed}", [seed / 10 + more[seed]] * 6, seed, "gspo")
    table, half = curves.format_table(groups), 2.776 * 0.0158114 / 5**0.5
    assert cell(table, 2) == f"0.200 +- {2.776 * 0.158114 / 5**0.5:.3f}"
    assert cell(table, -1) == f"+0.100 [+{0.1 - half:.3f}, +{0.1 + half:.3f}]*"
    groups["gspo"][7] = groups["gspo"].pop(0)  # nobody's pair
    table = curves.format_table(groups)
    assert table.splitlines()[-1].startswith("| gspo minus grpo | 4 |")
    assert cell(table, -1).startswith("+0.100 [+0.") and "*" not in table  # four pairs are few
    for line in groups["gspo"][1].steps:
        line["reward"] = math.nan
    assert "(4)" in cell(curves.format_table(groups), 3)


# ---------------- methods x seeds

# Stands for train.py: what that would leave, a failure of gspo, a cut-off of dapo until "mended".
FAKE = """
import json, os, signal, sys, time
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
if config["seed"] == 9:
    os.kill(os.getpid(), signal.SIGKILL)
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
        line = dict(step=step, greedy=0.5, entropy=1, tax=0, clip_share=0, generated=9)
        line |= dict(reward=0.5) if step else dict()
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


def plan(*argv) -> dict[str, compare.Job]:
    return {job.folder.name: job for job in compare.plan([*map(str, argv)])}


def test_a_comparison_shares_starts_is_resumed_and_ends_with_the_table(
    tmp_path, capfd, monkeypatch
):
    argv = ["--method", "grpo,gspo,dapo", "--seeds", "2", "--steps", "4", "--out", str(tmp_path)]
    monkeypatch.setattr(compare, "TRAIN", write_fake(tmp_path))
    with pytest.raises(SystemExit) as end:
        compare.main(argv)
    log = tmp_path / ".logs" / "gspo-s1.log"
    assert f"{tmp_path}/gspo-s1: error: no luck; its log is {log}" in end.value.code
    assert log.read_text().splitlines()[1:] == ["a line of the run", "error: no luck"]
    assert "6 runs, 6 of them to do, from 2 warm starts" in capfd.readouterr().out
    (tmp_path / "mended").mkdir()
    left = {name: job.args for name, job in plan(*argv).items() if job.args}
    assert left.keys() == {"gspo-s0", "gspo-s1", "dapo-s0", "dapo-s1"}
    assert left["dapo-s0"] == ["--resume", str(tmp_path / "dapo-s0"), "--micro-rows", "64"]
    assert plan(*argv, "--micro-rows", "2")["dapo-s0"].args[-1] == "2"
    compare.main(argv)
    out = capfd.readouterr().out
    assert "6 runs, 4 of them to do, from 0 warm starts" in out
    assert "| grpo | 2 |" in out and "| dapo minus grpo | 2 |" in out
    assert [line["step"] for line in curves.read_run(tmp_path / "dapo-s0").lines] == [0, 1, 2, 3, 4]


def test_runs_of_one_seed_share_their_warm_start_and_repairing_methods_have_another(tmp_path):
    argv = ["--method", "grpo,gspo+proj,ibpo", "--seeds", "2", "--warm-steps", "9"]
    jobs = plan(*argv, "--out", tmp_path)
    configs = {name: compare.parse(job.args) for name, job in jobs.items()}
    starts = {name for name, job in jobs.items() if not job.config.steps}
    assert starts == {f"start{x}-s{s}" for x in ("", "-repair") for s in (0, 1)}
    assert configs["start-repair-s1"].method == "ibpo" and configs["start-s1"].seed == 1
    for name, job in jobs.items():
        if name in starts:
            assert job.start is None and configs[name].warm_steps == 9
        else:
            kind = "start-repair" if "ibpo" in name else "start"
            assert job.start == tmp_path / f"{kind}-s{name[-1]}"
            assert configs[name].model == str(job.start / "start")
            assert configs[name].warm_steps == 0
            assert configs[name].project == ("+proj" in name)
    for flags in (["--warm-steps", "0"], ["--model", "mine"]):
        jobs = plan("--method", "grpo,gspo", *flags, "--out", tmp_path)
        assert [job.start for job in jobs.values()] == [None, None]


def test_a_run_from_a_warm_start_keeps_the_preset_of_the_model_it_is_of(tmp_path):
    flags = ["--method", "ibpo", "--task", "gsm8k", "--model", "scratch", "--lr", "1e-4"]
    start, run = plan(*flags, "--out", tmp_path).values()
    assert start.folder == tmp_path / "start-s0"  # GSM8K's demonstrations contain no corrections
    asked = compare.parse(flags)
    assert replace(asked, model=run.config.model, warm_steps=0, out=run.config.out) == run.config
    assert asked.lr == 1e-4 and asked.train_items == 32 and asked.minibatches == 1


def test_a_start_that_is_killed_is_one_line_and_the_runs_of_other_starts_are_made(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(compare, "TRAIN", write_fake(tmp_path))
    with pytest.raises(SystemExit) as end:
        compare.main(["--seed", "8", "--seeds", "2", "--steps", "1", "--out", str(tmp_path)])
    start = f"{tmp_path}/start-s9: killed by SIGKILL, perhaps for memory; its log is"
    assert end.value.code == f"error: {start} {tmp_path}/.logs/start-s9.log"
    assert curves.read_run(tmp_path / "grpo-s8").finished and not (tmp_path / "grpo-s9").exists()


def test_ctrl_c_reaches_the_runs_which_finish_their_step(tmp_path):
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from pathlib import Path; from experiments import compare\n"
    code += f"compare.TRAIN = Path({str(write_fake(tmp_path, seconds=0.2))!r})\n"
    code += "compare.count_at_once = lambda _: 2\ncompare.main()"
    argv = ["--method", "grpo,dapo", "--warm-steps", "0", "--steps", "50", "--out", str(tmp_path)]
    argv += ["--model", str(tmp_path)]
    (tmp_path / "weights").write_text("0")
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv],
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
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and error == "stopped; the same command resumes\n"
    for run in runs:
        assert 1 <= run.read_text().count("\n") < 40 and run.read_text().endswith("\n")


def test_as_many_runs_at_once_as_there_are_cores_and_one_on_a_gpu(monkeypatch):
    asked = compare.parse([])
    monkeypatch.setattr(compare.os, "sched_getaffinity", lambda _: range(6), raising=False)
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: False)
    counts = [compare.count_at_once(replace(asked, threads=n)) for n in (0, 1, 2, 4, 9)]
    assert counts == [1, 6, 3, 1, 1]
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: True)
    assert compare.count_at_once(asked) == 1


def test_a_mistake_is_one_line_before_anything_runs(tmp_path, capsys):
    for job in compare.plan(["--steps", "4", "--out", str(tmp_path)]):
        settings = asdict(job.config)
        make_run(job.folder, [0.5] * 2, settings.pop("seed"), settings.pop("method"), **settings)
    for argv, said in (
        (["--seeds", "0"], "--seeds 0"),
        (["--method", "grpo,sgd"], "sgd"),
        (["--method", "grpo+projx"], "expected NAME or NAME+proj"),
        (["--method", "grpo,gspo,grpo"], "grpo stands there twice"),
        (["--method", "grpo,gspo", "--lr", "-1"], "--lr -1"),
        (["--lr", "0.5"], "grpo-s0 was made with lr 0.001, not 0.5"),
        (["--warm-lr", "0.5"], "start-s0 was made with warm_lr 0.006, not 0.5"),
        (["--sneeds", "2"], "--sneeds"),
    ):
        assert said in says(capsys, compare.plan, "--steps", "4", *argv, "--out", tmp_path)


def test_a_method_has_settings_of_its_own_in_its_runs_its_folder_and_its_row(tmp_path, capsys):
    method = "grpo,gspo+proj:eps_low=0.2,lr=3e-4,dapo"
    jobs = plan("--method", method, "--out", tmp_path, "--hyper", "eps_low=0.1", "eps_high=0.3")
    found = {}
    for name, job in jobs.items():
        settings = asdict(compare.parse(job.args))
        found[name] = [settings[key] for key in ("method", "project", "lr", "hyper")]
        seed, method = settings.pop("seed"), settings.pop("method")
        make_run(job.folder, [0.5] * settings["steps"], seed, method, **settings)
    del found["start-s0"]
    assert found == {
        "grpo-s0": ["grpo", False, 1e-3, ["eps_low=0.1", "eps_high=0.3"]],
        "gspo+proj,eps_low=0.2,lr=3e-4-s0": ["gspo", True, 3e-4, ["eps_low=0.2", "eps_high=0.3"]],
        "dapo-s0": ["dapo", False, 1e-3, ["eps_low=0.1", "eps_high=0.3"]],
    }
    rows = curves.group_runs(curves.read_runs([tmp_path]))
    assert "gspo+proj, hyper eps_low=0.2 eps_high=0.3, lr 0.0003" in rows
    for method, said in (
        ("grpo,lr=3e-4", "expected NAME"),  # whose rate?
        ("grpo:lr=1e-3,lr=3e-4", "expected NAME"),
        ("grpo:lr", "expected NAME"),
        ("grpo:lr=", "expected NAME"),
        ("grpo:", "expected NAME"),
        ("grpo:group_size=4", "no hyperparameter 'group_size'"),
        ("gspo:eps_low=0.2:lr=3e-4", "eps_low=0.2:lr=3e-4"),
        ("grpo:lr=-1", "--lr -1"),
        ("grpo,grpo:lr=1e-3", "stands there twice"),  # it is the default
    ):
        assert said in says(capsys, compare.plan, "--method", method, "--out", tmp_path / "new")
