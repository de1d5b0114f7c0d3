"""Runs read back: tables, statistics over seeds, pictures; and comparisons, which make the runs."""

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import TINY, refused

import train
from experiments import compare, curves, plot
from toy import figure

SHARES = {"opener so": 0.5, "opener ok": 0.5, "opener other": 0.0, "form direct": 1.0}
SHARES |= {"form ones first": 0.0, "form other": 0.0}


def make_run(folder: Path, rewards, seed=0, method="grpo", **settings) -> Path:
    """A run's folder. last: more of its last line."""
    folder.mkdir(parents=True)
    last = settings.pop("last", {})
    config = {"method": method, "seed": seed, "project": False, "steps": len(rewards), "lr": 1e-3}
    config |= {"hyper": [], "model": ""}
    (folder / "config.json").write_text(json.dumps({"config": config | settings}))
    every = {"generated": 500, "tax": 0.25, "clip_share": 0.5}
    lines = [{"step": 0, "greedy": 0.1, **SHARES}]
    lines += [
        {"step": t, "entropy": t, "reward": reward, **every} for t, reward in enumerate(rewards, 1)
    ]
    lines[-1] |= {"greedy": 0.75, **SHARES, **last}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


# ---------------- curves


def test_a_cut_off_last_line_is_left_out_and_what_is_no_run_is_refused(tmp_path):
    run = make_run(tmp_path / "run", [0.25, 0.5])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
    assert [line["reward"] for line in curves.read_run(run).steps] == [0.25, 0.5]
    (run / "metrics.jsonl").unlink()  # as in its warm start
    assert not curves.read_run(run).finished
    assert "no run to show" in refused(curves.main, [str(run)])
    (run / "config.json").write_text("{")
    for folder in (run, tmp_path / "nowhere"):
        assert f"{folder} is not a run" in refused(curves.main, [str(folder)])


def test_runs_that_differ_only_in_the_seed_are_one_group_named_by_what_differs(tmp_path):
    start = {seed: f"/there/compare/start-s{seed}/start" for seed in (0, 1)}
    for name, more in {
        "a": dict(seed=0, out="x", model=start[0]),
        "b": dict(seed=1, out="y", model=start[1]),
        "c": dict(seed=0, lr=0.01, model=start[0], hyper=["bonus=0.4"]),
        "d": dict(seed=0, method="gspo", project=True),
        "start-s0": dict(seed=0, steps=0),
    }.items():
        make_run(tmp_path / name, [0.5], **more)
    runs = curves.read_runs([tmp_path])
    assert {label: sorted(group) for label, group in curves.group_runs(runs).items()} == {
        "grpo, lr 0.001, model compare/start": [0, 1],
        "grpo, hyper bonus=0.4, lr 0.01, model compare/start": [0],
        "gspo+proj, lr 0.001": [0],
    }
    with pytest.raises(ValueError, match="a second run of grpo with seed 0"):
        curves.group_runs([runs[0], runs[0]])


def test_outcomes_by_hand(tmp_path):
    last = {"opener so": 0.75, "opener ok": 0.15, "opener other": 0.1}
    run = make_run(tmp_path / "r", [0.0] * 11 + [1.0] * 9, last=last)
    assert curves.outcome(curves.read_run(run)) == pytest.approx(
        {
            **{"reward": 0.45, "final": 0.9, "greedy": 0.75, "jitter": 2 / 18, "entropy": 15.5},
            "Steps(0.8)": 15,  # 4 of steps 11 to 15
            **{"drift opener": 0.35, "drift form": 0, "tax": 0.25, "clipped": 0.5, "k tokens": 10},
        }
    )
    assert curves.steps_to([1, 1, 1, 1], 0.5) == 5  # never five steps
    assert curves.steps_to([0.5] * 9, 0.8) == 10
    assert curves.jitter([0.0, 1.0, 0.0, 0.0]) == pytest.approx((2 + 1) / 2)


def test_students_quantiles_are_those_of_the_tables_and_a_nan_is_left_out():
    assert figure.interval([1.0, 3.0, math.nan]) == (2.0, pytest.approx(12.706))
    for freedom, value in ((1, 12.706), (4, 2.776), (13, 2.160), (60, 2.000)):
        assert figure.quantile(freedom) == pytest.approx(value, abs=5e-4)


def test_the_table_pairs_by_seed_and_stars_what_leaves_out_0(tmp_path, capsys):
    def table(*argv) -> tuple[list[list[str]], str]:
        curves.main([str(tmp_path), *argv])
        out, err = capsys.readouterr()
        return [[cell.strip() for cell in line.split("|")[1:]] for line in out.splitlines()], err

    more, half = [0.1, 0.11, 0.09, 0.08, 0.12], 2.776 * 0.0158114 / 5**0.5
    for seed in range(5):
        make_run(tmp_path / f"b{4 - seed}", [seed / 10] * 6, seed, "grpo")
        make_run(tmp_path / f"a{seed}", [seed / 10 + more[seed]] * 6, seed, "gspo")
    make_run(tmp_path / "c", [0.5] * 6, method="dapo", steps=7)
    rows, left_out = table("--base", "grpo")
    assert left_out == f"left out: {tmp_path}/c is unfinished\n" and rows[0][3] == "final"
    assert rows[2][0] == "grpo" and rows[2][3] == f"0.200 +- {2.776 * 0.158114 / 5**0.5:.3f}"
    assert rows[-1][:2] == ["gspo minus grpo", "5"]
    assert rows[-1][3] == f"+0.100 [+{0.1 - half:.3f}, +{0.1 + half:.3f}]*"
    make_run(tmp_path / "a7", [math.nan] * 6, 7, "gspo")  # nobody's pair, and no number
    (tmp_path / "b0" / "metrics.jsonl").unlink()
    rows, _ = table("--base", "grpo")
    assert rows[-1][1] == "4" and rows[-1][3].startswith("+0.095 [+0.")
    assert rows[-1][3].endswith("]") and rows[3][3].endswith(" (5)")  # four pairs are few
    assert "accepted: gspo, grpo" in refused(table, "--base", "sgd")


# ---------------- plot


def test_lines_are_smoothed_means_over_seeds_and_bands_their_students_interval(tmp_path):
    one, two = [0.0, 0.1, 0.2, 0.4, 0.8, 0.9, 1.0], [0.5, 0.1, 0.6, 0.4, 0.8, 0.7]
    make_run(tmp_path / "s0", one)
    last = {"greedy": 0.25, "form direct": 0.5, "form other": 0.5}
    make_run(tmp_path / "s1", two, seed=1, last=last, steps=7)  # unfinished
    groups = curves.group_runs(curves.read_runs([tmp_path]))
    panels = {panel.title: panel for panel in plot.find_panels(groups)}
    points = panels["reward on training prompts"].lines["grpo"]
    for step, middle, half in points[:6]:
        a, b = (sum(v[max(0, step - 5) : step]) / min(step, 5) for v in (one, two))
        # The standard error of two values is half their distance.
        assert (middle, half) == pytest.approx(((a + b) / 2, 12.706 * abs(a - b) / 2))
    assert points[6][:2] == (7, pytest.approx(3.3 / 5)) and math.isnan(points[6][2])  # of one seed
    for title, middle in (("drift of the forms", 0.5), ("greedy accuracy, held-out", 0.25)):
        assert panels[title].lines["grpo"][1][:2] == (6, middle)
    for title, values in (("learning tax", [0.25] * 7), ("entropy of the next token", range(1, 8))):
        assert [value for _, value, _ in panels[title].lines["grpo"]] == [*values]
    assert "KL to the start" not in panels  # nobody logged it
    axis = plot.draw(list(panels.values()), groups).axes[0]
    assert [(*place,) for place in axis.get_lines()[0].get_xydata()] == [x[:2] for x in points]
    ends = [y for x, y in axis.collections[0].get_paths()[0].vertices if x == 6]
    assert max(ends) - min(ends) == pytest.approx(2 * half)


def test_a_picture_is_written_or_one_line_says_why_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = make_run(tmp_path / "runs" / "a", [0.1, 0.2, 0.3])
    plot.main(["runs"])
    assert Path("curves.png").stat().st_size > 10_000
    for argv, said in [
        (["nowhere"], "nowhere is not a run"),
        ([good, "--out", "x.pdf"], "--out x.pdf: a name that ends in .png or .svg"),
        ([good, "--out", "no/where.png"], "no/where.png cannot be written"),
    ]:
        assert said in refused(plot.main, [*map(str, argv)])


# ---------------- methods x seeds


def plan(*argv) -> dict[str, compare.Job]:
    return {job.folder.name: job for job in compare.plan([*map(str, argv)])}


def test_a_comparison_shares_starts_keeps_what_is_done_and_ends_with_the_table(
    tmp_path, capsys, monkeypatch
):
    def launch(job):  # the real trainer, in this process
        train.main(job.args)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(compare, "launch", launch)
    flags = ["--seeds", "2", *TINY, "--steps", "2", "--out", str(tmp_path)]
    compare.main(["--method", "gspo", *flags])
    assert "2 runs, 2 of them to do, from 2 warm starts" in capsys.readouterr().out
    argv = ["--method", "gspo,grpo+proj", *flags]
    compare.main(argv)
    out = capsys.readouterr().out
    assert "4 runs, 2 of them to do, from 0 warm starts" in out and "| gspo | 2 |" in out
    assert "| grpo+proj minus gspo | 2 |" in out
    first = {path.name: curves.read_run(path).lines[0] for path in tmp_path.glob("g*")}
    assert first["gspo-s0"] == first["grpo+proj-s0"] != first["gspo-s1"]
    metrics = tmp_path / "gspo-s1" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(True)[:-1]))
    left = {name: job.args for name, job in plan(*argv, "--micro-rows", "2").items() if job.args}
    assert left == {"gspo-s1": ["--resume", str(tmp_path / "gspo-s1"), "--micro-rows", "2"]}


def test_runs_of_one_seed_share_their_warm_start_and_repairing_methods_have_another(tmp_path):
    argv = ["--method", "grpo,gspo+proj,ibpo", "--seeds", "2", "--warm-steps", "9"]
    jobs = plan(*argv, "--out", tmp_path)
    configs = {name: compare.parse(job.args) for name, job in jobs.items()}
    starts = {name for name, job in jobs.items() if not job.config.steps}
    assert starts == {f"start{x}-s{s}" for x in ("", "-repair") for s in (0, 1)}
    assert configs["start-repair-s1"].method == "ibpo" and configs["start-s1"].seed == 1
    assert all(configs[name].warm_steps == 9 for name in starts)
    for name in jobs.keys() - starts:
        start = tmp_path / f"start{'-repair' * ('ibpo' in name)}-s{name[-1]}"
        expected = (start, str(start / "start"), 0, "+proj" in name)
        config = configs[name]
        assert (jobs[name].start, config.model, config.warm_steps, config.project) == expected
    for flags in (["--warm-steps", "0"], ["--model", "mine"]):
        jobs = plan("--method", "grpo,gspo", *flags, "--out", tmp_path)
        assert [job.start for job in jobs.values()] == [None, None]


def test_a_run_from_a_warm_start_keeps_the_preset_of_the_model_it_is_of(tmp_path):
    flags = ["--method", "ibpo", "--task", "gsm8k", "--model", "scratch", "--lr", "1e-4"]
    start, run = plan(*flags, "--out", tmp_path).values()
    assert start.folder == tmp_path / "start-s0"  # GSM8K's demonstrations contain no corrections
    asked = compare.parse(flags)
    assert replace(asked, model=run.config.model, warm_steps=0, out=run.config.out) == run.config


def test_what_fails_is_named_with_its_log_and_what_it_would_have_started_is_left_out(
    tmp_path, monkeypatch
):
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nos.kill(os.getpid(), 9) if '9' in sys.argv else exit('oh')")
    monkeypatch.setattr(compare, "TRAIN", script)
    with pytest.raises(SystemExit) as end:
        compare.main(["--seed", "8", "--seeds", "2", "--out", str(tmp_path / "out")])
    first, second = end.value.code.splitlines()
    logs = tmp_path / "out" / ".logs"
    assert f"start-s8: oh; its log is {logs}/start-s8.log" in first
    assert "start-s9: killed by SIGKILL" in second and len([*logs.iterdir()]) == 2


def test_ctrl_c_waits_for_the_runs_to_finish_their_step(tmp_path, monkeypatch):
    done, script = tmp_path / "done", tmp_path / "train.py"
    script.write_text(f"import time; time.sleep(0.5); open({str(done)!r}, 'w')")
    monkeypatch.setattr(compare, "TRAIN", script)
    monkeypatch.setattr(compare.signal, "signal", lambda *_: None)
    monkeypatch.setattr(time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit, match="the same command resumes"):
        compare.main(["--warm-steps", "0", "--out", str(tmp_path / "out")])
    assert done.exists()


def test_as_many_runs_at_once_as_there_are_cores_and_one_on_a_gpu(monkeypatch):
    asked = compare.parse([])
    monkeypatch.setattr(compare.os, "sched_getaffinity", lambda _: range(6), raising=False)
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: False)
    counts = [compare.count_at_once(replace(asked, threads=n)) for n in (0, 1, 2, 4, 9)]
    assert counts == [1, 6, 3, 1, 1]
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: True)
    assert compare.count_at_once(asked) == 1


def test_a_mistake_is_one_line_before_anything_runs(tmp_path):
    for job in compare.plan(["--steps", "4", "--out", str(tmp_path)]):
        settings = asdict(job.config)
        make_run(job.folder, [0.5] * 2, settings.pop("seed"), settings.pop("method"), **settings)
    for argv, said in (
        (["--seeds", "0"], "--seeds 0"),
        (["--method", "grpo+projx"], "expected NAME or NAME+proj"),
        (["--method", "grpo,gspo,grpo"], "grpo stands there twice"),
        (["--lr", "0.5"], "grpo-s0 was made with lr 0.001, not 0.5"),
        (["--warm-lr", "0.5"], "start-s0 was made with warm_lr 0.006, not 0.5"),
    ):
        assert said in refused(plan, "--steps", "4", *argv, "--out", tmp_path)


def test_a_method_has_settings_of_its_own_in_its_runs_its_folder_and_its_row(tmp_path):
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
        assert said in refused(plan, "--method", method, "--out", tmp_path / "new")
