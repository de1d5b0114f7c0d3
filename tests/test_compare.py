"""To whoever compares methods: runs become the numbers that a hand computes, trained only once."""

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TINY, metrics, refused, run

import train
from experiments import compare


def make_run(folder: Path, rewards, seed=0, method="grpo", **settings) -> Path:
    folder.mkdir()
    flags = dict(method=method, seed=seed, cancel=False, steps=len(rewards), lr=1e-3, out="")
    flags |= {key: "" for key in compare.INCIDENTAL if key not in flags}
    (folder / "config.json").write_text(json.dumps(flags | settings))
    lines = [{"step": 0, "greedy": 0.1, "opener so": 0.5, "opener ok": 0.5, "opener other": 0.0}]
    for t, reward in enumerate(rewards, 1):
        lines.append({"step": t, "reward": reward, "tax": 0.25, "clip_share": 0.5, "entropy": t})
    lines[-1] |= {"greedy": 0.75, "opener so": 0.75, "opener ok": 0.15, "opener other": 0.1}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def tables(folders) -> list[list[str]]:
    text = compare.make_tables(compare.compute_outcomes(compare.read_runs(folders)))
    return [line.split(maxsplit=1) for line in text.splitlines()]


def test_what_runs_come_to_by_hand(tmp_path):
    folder = make_run(tmp_path / "r", [0.25] * 11 + [1.0] * 9)
    expected = dict(reward=0.5875, final=0.925, greedy=0.75, jitter=1.5 / 18, drift=0.35, tax=0.25)
    expected |= {"Steps(0.8)": 15, "clipped": 0.5}  # (0.25 + 4) / 5
    outcomes = compare.compute_outcomes(compare.read_runs([folder]))
    assert outcomes.loc["grpo", 0].to_dict() == pytest.approx(expected)
    assert refused(compare.read_runs, []) and refused(
        compare.read_runs, [folder, make_run(tmp_path / "again", [0.5] * 20)]
    )


def test_tables_have_students_interval_and_differences_paired_by_seed(tmp_path):
    """Of 5 seeds: the 97.5 % quantile with 4 degrees of freedom is 2.776."""
    more, folders = [0.1, 0.11, 0.09, 0.08, 0.12], []
    for seed in range(5):
        folders.append(make_run(tmp_path / f"a{seed}", [seed / 10] * 6, seed))
        two = dict(method="gspo", lr=0.1)
        rewards = [seed / 10 + more[seed]] * 6
        folders.append(make_run(tmp_path / f"b{4 - seed}", rewards, seed, **two))
    folders.append(make_run(tmp_path / "c", [1.0] * 6, 7, **two))  # has no pair
    rows = tables(folders)
    assert rows[0][1].split("  ")[-1].strip() == "gspo, lr 0.1" and "grpo, lr 0.001" in rows[0][1]
    cells = {row[0]: row[1] for row in rows[:11] if len(row) > 1}
    gaps = {row[0]: row[1] for row in rows[11:] if len(row) > 1}
    assert cells["seeds"].split() == ["5", "6"]
    assert cells["final"].startswith(f"0.200 +- {2.776 * 0.158114 / 5**0.5:.3f} ")
    assert cells["Steps(0.8)"].split("  ") == ["never", "never in 5 of 6"]
    assert gaps["final"] == f"0.100 +- {2.776 * 0.0158114 / 5**0.5:.3f}"
    assert gaps["seeds"] == "5" and gaps["Steps(0.8)"] == "never"


def test_pictures_show_smoothed_means_and_their_interval(tmp_path):
    one, two = [0.0, 0.1, 0.2, 0.4, 0.8, 0.9], [0.5, 0.1, 0.6, 0.4, 0.8, 0.7]
    runs = [make_run(tmp_path / "s0", one), make_run(tmp_path / "s1", two, seed=1)]
    figure = compare.draw(compare.read_runs(runs))
    a, b = sum(one[1:]) / 5, sum(two[1:]) / 5
    axis = figure.axes[0]
    assert axis.get_lines()[0].get_xydata()[-1].tolist() == pytest.approx([6, (a + b) / 2])
    ends = [y for x, y in axis.collections[0].get_paths()[0].vertices if x == 6]
    assert max(ends) - min(ends) == pytest.approx(12.706 * abs(a - b))  # se: half their distance
    assert figure.axes[1].get_lines()[0].get_xydata().tolist() == [[0, 0.1], [6, 0.75]]


def test_a_comparison_trains_what_is_missing_and_nothing_twice(tmp_path, easy, monkeypatch, capsys):
    def process(command, **_):  # the real trainer, in this process
        train.main(command[2:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(compare.subprocess, "run", process)
    argv = [*TINY, "--method", "grpo,gspo+cancel:eps_low=0.2,minibatches=1", "--lrs", "1e-3,0.1"]
    argv += ["--seeds", "2", "--at-once", "1", "--out", f"{tmp_path}/a"]
    compare.main(argv)
    said = capsys.readouterr().out
    assert "8 runs to do" in said and "4 runs to do" in said and "seeds 2 and 3" in said
    assert "gspo+cancel, hyper eps_low=0.2, minibatches 1" in said and "minus grpo" in said

    reward = {lr: [] for lr in ("1e-3", "0.1")}  # the better one is chosen
    for lr, seed in itertools.product(reward, (2, 3)):
        lines = metrics(tmp_path / "a" / f"grpo,lr={lr}-s{seed}")[1:]
        reward[lr] += [line["reward"] for line in lines]
    chosen = max(reward, key=lambda lr: sum(reward[lr]))
    folder = tmp_path / "a" / f"grpo,lr={chosen}-s1"
    before = metrics(run(tmp_path / "alone", "--method", "grpo", "--lr", chosen, "--seed", "1"))
    assert before == metrics(folder)

    shutil.rmtree(folder / "checkpoints")  # a kill in the first steps
    (folder / "metrics.jsonl").write_text("")
    compare.main(argv)
    assert "1 runs to do" in capsys.readouterr().out and metrics(folder) == before
    assert "made with group_size 3, not 4" in refused(compare.main, [*argv, "--group-size", "4"])
    for mistake in ("grpo+proj", "gspo:eps=1"):
        with pytest.raises(SystemExit):
            compare.main([*argv, "--method", mistake])
    assert capsys.readouterr().out == ""  # before anything ran
