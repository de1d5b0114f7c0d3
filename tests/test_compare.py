"""To whoever compares methods: runs become the numbers that a hand computes, trained only once."""

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TINY, metrics, refused

import train
from experiments import compare


def make_run(folder: Path, rewards, seed=0, method="grpo", **settings) -> Path:
    folder.mkdir()
    flags = dict.fromkeys(compare.INCIDENTAL, "") | dict(method=method, seed=seed, cancel=False)
    flags |= dict(steps=len(rewards)) | settings
    (folder / "config.json").write_text(json.dumps(flags))
    lines = [{"step": 0, "greedy": 0.1, "opener so": 0.5, "opener ok": 0.5, "opener other": 0.0}]
    for t, reward in enumerate(rewards, 1):
        lines.append({"step": t, "reward": reward, "tax": 0.25, "clip_share": 0.5, "entropy": t})
    lines[-1] |= {"greedy": 0.75, "opener so": 0.75, "opener ok": 0.15, "opener other": 0.1}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_runs_come_to_by_hand(tmp_path):
    folder = make_run(tmp_path / "r", [0.25] * 11 + [1.0] * 9)
    expected = dict(reward=0.5875, final=0.925, greedy=0.75, jitter=1.5 / 18, drift=0.35, tax=0.25)
    expected |= {"Steps(0.8)": 15, "clipped": 0.5}  # (0.25 + 4) / 5
    outcomes = compare.compute_outcomes(compare.read_runs([folder]))
    assert outcomes.loc["grpo", 0].to_dict() == pytest.approx(expected)
    twin = make_run(tmp_path / "again", [1.0] * 20)
    assert "a second run of grpo with seed 0" in refused(compare.read_runs, [folder, twin])


def test_tables_have_students_interval_and_differences_paired_by_seed(tmp_path, capsys):
    """Of 5 seeds: the 97.5 % quantile with 4 degrees of freedom is 2.776."""
    more, folders = [0.1, 0.11, 0.09, 0.08, 0.12, 0.5], []
    for seed in range(6):
        two = dict(method="gspo", lr=0.1)
        rewards = [seed / 10 + more[seed]] * 6
        folders.append(make_run(tmp_path / f"b{seed}", rewards, seed, **two))
        if seed < 5:  # the last run of the other method has no pair
            folders.insert(seed, make_run(tmp_path / f"a{seed}", [seed / 10] * 6, seed, lr=1e-3))
    folders.append(make_run(tmp_path / "cut-off", [0.1], steps=2))
    compare.main(["--runs", *map(str, folders)])
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"left out: {folders[-1]} ")
    methods, gaps = said.split("minus grpo, lr 0.001, paired by seed: ")
    assert "grpo, lr 0.001 gspo, lr 0.1 seeds 5 6 " in methods
    assert f"final 0.200 +- {2.776 * 0.158114 / 5**0.5:.3f} " in methods
    assert "Steps(0.8) never never in 5 of 6" in methods
    assert f"final 0.100 +- {2.776 * 0.0158114 / 5**0.5:.3f} " in gaps
    assert "seeds 5 " in gaps and "Steps(0.8) never " in gaps


def test_the_picture_tells_methods_apart_and_has_bands_from_three_seeds_on(tmp_path):
    variants = [("grpo", 0.1), ("cispo", 0.1), ("cispo", 1)]
    for seeds in (2, 3):
        folders = []
        for seed, (k, (method, lr)) in itertools.product(range(seeds), enumerate(variants)):
            folder = tmp_path / f"{seeds}-{seed}-{k}"
            folders.append(make_run(folder, [0.5 + k / 10] * 9, seed, method, lr=lr))
        figure = compare.draw(compare.read_runs(folders))
        reward = figure.axes[0]
        assert [len(band.get_paths()) for band in reward.collections] == [seeds == 3] * 3
    styles = {(line.get_color(), line.get_linestyle()) for line in reward.get_lines()}
    assert len(styles) == 3 and reward.get_ylim() == (0, 1)
    assert figure.get_suptitle().startswith("cispo, lr 1 has the highest reward: 0.700")


def test_a_comparison_trains_what_is_missing_and_nothing_twice(tmp_path, easy, monkeypatch, capsys):
    def process(command, **_):  # the real trainer, in this process
        train.main(command[2:])

    # Its own name alone: matplotlib, too, runs processes when it looks for fonts.
    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=process, STDOUT=None))
    argv = [*TINY, "--method", "grpo,gspo+cancel:eps_low=0.2,minibatches=1"]
    argv += ["--seeds", "2", "--at-once", "1", "--out", f"{tmp_path}/a"]
    compare.main([*argv, "--plot", f"{tmp_path}/curves.png"])
    said = capsys.readouterr().out
    assert "4 runs to do" in said
    assert "gspo+cancel, hyper eps_low=0.2, minibatches 1" in said and "minus grpo" in said
    assert (tmp_path / "curves.png").stat().st_size > 10_000

    folder = tmp_path / "a/grpo-s1"
    before = metrics(folder)
    shutil.rmtree(folder / "checkpoints")  # a kill in the first steps
    (folder / "metrics.jsonl").write_text("")
    compare.main(argv)
    assert "1 runs to do" in capsys.readouterr().out and metrics(folder) == before
    assert "made with group_size 3, not 4" in refused(compare.main, [*argv, "--group-size", "4"])
    with pytest.raises(SystemExit):
        compare.main([*argv, "--method", "gspo:eps=1"])
    assert capsys.readouterr().out == ""  # before anything ran
