"""To whoever compares methods: runs become the numbers that a hand computes, trained only once."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TINY, metrics, refused

import train
from experiments import compare
from toy.figure import interval


def make_run(folder: Path, rewards: list[float], **flags) -> Path:
    folder.mkdir()
    config = train.Config(**dict(steps=len(rewards)) | flags)
    (folder / "config.json").write_text(json.dumps(asdict(config)))
    lines = [{"step": 0, "greedy": 0.9, "opener so": 0.5, "opener ok": 0.5, "opener other": 0.0}]
    for t, reward in enumerate(rewards, 1):
        lines.append({"step": t, "reward": reward, "length": 9, "entropy": 1})
    lines[-1] |= {"greedy": 0.75, "opener so": 0.75, "opener ok": 0.15, "opener other": 0.1}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_runs_come_to_by_hand(tmp_path):
    folder = make_run(tmp_path / "r", [1.0] + [0.25] * 10 + [1.0] * 9)
    expected = dict(reward=0.625, final=0.925, greedy=0.75, jitter=2.25 / 18, drift=0.35)
    expected |= {"Steps(0.8)": 15}  # (0.25 + 4) / 5; not 1, since it takes five steps
    runs = compare.read_runs([folder])
    assert compare.compute_outcomes(runs).loc["grpo", 0].to_dict() == pytest.approx(expected)
    (line,) = compare.draw(runs).axes[0].get_lines()
    assert line.get_ydata()[[4, 5]].tolist() == [0.4, 0.25]  # means of 5 steps
    twin = make_run(tmp_path / "again", [1.0] * 20)
    assert "a second run of grpo with seed 0" in refused(compare.read_runs, [folder, twin])


def test_tables_and_picture_have_students_interval_and_differences_paired_by_seed(tmp_path, capsys):
    """Of 5 seeds: the 97.5 % quantile with 4 degrees of freedom is 2.776, with 23 it is 2.0687."""
    assert interval(range(24)) == pytest.approx((11.5, 2.0687 * 50**0.5 / 24**0.5), rel=1e-4)
    more, folders = [0.1, 0.11, 0.09, 0.08, 0.12, 0.5], []
    for seed in range(6):
        rewards = [seed / 10 + more[seed]] * 6
        folders.append(make_run(tmp_path / f"b{seed}", rewards, seed=seed, lr=0.1))
        if seed < 5:  # the last run with lr 0.1 has no pair
            folders.insert(seed, make_run(tmp_path / f"a{seed}", [seed / 10] * 6, seed=seed))
    folders.append(make_run(tmp_path / "cut-off", [0.1], steps=2))
    compare.main(["--runs", *map(str, folders)])
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"left out: {folders[-1]} ")
    methods, gaps = said.split("minus grpo, lr 0.001, paired by seed: ")
    half = 2.776 * 0.158114 / 5**0.5
    assert "grpo, lr 0.001 grpo, lr 0.1 seeds 5 6 " in methods
    assert f"final 0.200 +- {half:.3f} " in methods
    assert "Steps(0.8) never in 5 of 5 never in 5 of 6" in methods
    assert f"final 0.100 +- {2.776 * 0.0158114 / 5**0.5:.3f} " in gaps
    assert "seeds 5 " in gaps and "Steps(0.8) never " in gaps

    figure = compare.draw(compare.read_runs([folders[5], *folders[:5]]))
    assert figure.get_suptitle().startswith("grpo, lr 0.001 has the highest")
    reward = figure.axes[0]
    assert reward.get_lines()[1].get_ydata()[-1] == pytest.approx(0.2)
    (band,) = reward.collections  # one seed has none
    assert band.get_paths()[0].get_extents().ymax == pytest.approx(0.2 + half, abs=1e-3)


def test_a_comparison_trains_what_is_missing_and_nothing_twice(tmp_path, easy, monkeypatch, capsys):
    def process(command, **_):  # the real trainer, in this process
        train.main(command[2:])

    # Its own name alone: matplotlib, too, runs processes when it looks for fonts.
    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=process, STDOUT=None))
    monkeypatch.setattr(compare.os, "cpu_count", lambda: 1)
    argv = [*TINY, "--method", "grpo", "gspo --prefix-baseline --hyper eps_low=0.2 --minibatches 1"]
    argv += ["--seed", "1", "--seeds", "2", "--out", f"{tmp_path}/a"]
    compare.main(argv)
    said = capsys.readouterr().out
    assert "4 runs to do" in said and "minus grpo" in said
    assert "gspo, hyper eps_low=0.2, prefix_baseline True, minibatches 1" in said

    folder = tmp_path / "a/grpo-s2"
    before = metrics(folder)
    (folder / "checkpoint.pt").unlink()  # a kill in the first steps
    (folder / "metrics.jsonl").write_text("")
    compare.main(argv)
    assert "1 runs to do" in capsys.readouterr().out and metrics(folder) == before
    assert "made with group_size 3, not 4" in refused(compare.main, [*argv, "--group-size", "4"])
