"""To whoever compares methods: runs become the numbers that a hand computes, trained only once;
to whoever times them: all sides do the same work."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from conftest import TINY, metrics

import train
from experiments import compare
from toy.figure import interval


def make_run(folder: Path, rewards: list[float], resumed=(), **flags) -> Path:
    (folder / "model").mkdir(parents=True)
    config = asdict(train.Config(steps=6, **flags)) | {"resumed": resumed}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [dict(step=t, reward=x, greedy=t / 20, entropy=1) for t, x in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_what_runs_come_to_by_hand(tmp_path):
    folder = make_run(tmp_path / "r", [1.0] + [0.25] * 11 + [1.0] * 8)
    expected = dict(reward=0.5875, final=0.85, jitter=2.25 / 18, greedy=1)
    expected |= {"Steps(0.8)": 16}  # (0.25 + 4) / 5; not 1, since it takes five steps
    outcomes = compare.compute_outcomes(compare.read_runs([folder]), ["reward", "greedy"])
    assert outcomes.loc["grpo", 0].to_dict() == pytest.approx(expected)


def test_a_table_has_students_interval_and_differences_paired_by_seed(tmp_path, capsys):
    """Of 2 seeds: the 97.5 % quantile with 1 degree of freedom is 12.706, with 23 it is 2.0687."""
    assert interval(range(24))[1] == pytest.approx(2.0687 * 50**0.5 / 24**0.5, rel=1e-4)
    folders = [make_run(tmp_path / f"a{seed}", [seed / 2] * 6, seed=seed) for seed in range(2)]
    for seed, reward in enumerate([0.1, 0.62, 9.0]):  # the last run has no pair
        folders.append(make_run(tmp_path / f"b{seed}", [reward] * 6, seed=seed, lr=0.1))
    resumed = [{"after_step": 1, "lr": [0.001, 0.5]}]
    (make_run(tmp_path / "cut-off", [0.1] * 2, resumed, lr=0.5) / "model").rmdir()
    compare.main(["--runs", f"{tmp_path}/*"])  # a shell may leave the star as it is
    _, base, other, cut, gap, *_ = capsys.readouterr().out.splitlines()
    base, other, cut, gap = (" ".join(row.split()) for row in (base, other, cut, gap))
    assert base.startswith(f"grpo, lr 0.001 2 0.250 +- {12.706 * 0.25:.3f} ")
    assert other.startswith("grpo, lr 0.1 3 ") and "none in 2 of 2" in base
    assert "lr 0.001 -> 0.5 after step 1" in cut and "2 of 6 steps" in cut
    assert gap.startswith(f"grpo, lr 0.1 minus grpo, lr 0.001 2 0.110 +- {12.706 * 0.01:.3f} ")
    (picture,) = compare.draw(compare.read_runs(folders[:2]), ["reward"]).axes
    assert picture.get_lines()[-1].get_ydata()[-1] == 0.25  # the mean of 0 and 0.5
    assert picture.collections[0].get_paths()[0].get_extents().intervaly.tolist() == [0, 0.5]
    with pytest.raises(SystemExit):  # two runs of one seed
        compare.read_runs([folders[1], folders[1]])


def test_a_comparison_trains_what_is_missing_and_nothing_twice(tmp_path, easy, monkeypatch, capsys):
    trained = []

    def process(command, **_):  # the real trainer, in this process
        trained.append(command[2:])
        train.main(command[2:])

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=process, STDOUT=None))
    sizes = "--steps 2 --warm-steps 0 --seed 1 --seeds 1 --at-once 1".split()
    argv = [*TINY, *sizes, "--method", "grpo", "gspo --minibatches 1"]
    argv += ["--out", f"{tmp_path}/a", "--task", f"{tmp_path}/mine.py"]
    (tmp_path / "mine.py").write_text("from tasks.arithmetic import Arithmetic as Task")
    compare.main(argv)
    assert len(trained) == 2 and "gspo, minibatches 1 minus grpo" in capsys.readouterr().out

    folder, other = (next(tmp_path.glob(f"a/{name}*s1")) for name in ("grpo", "gspo"))
    before = metrics(folder)
    (folder / "checkpoint.pt").unlink()  # a kill in the first steps
    shutil.rmtree(folder / "model")
    (other / "task.py").write_text("as it was before an edit")
    compare.main(argv)
    assert len(trained) == 3 and metrics(folder) == before
    assert f"{other} was trained with a different" in capsys.readouterr().out
    monkeypatch.setattr(compare, "train_one", lambda folder, flags: trained.append(folder))
    with pytest.raises(SystemExit):  # other runs, which are not there
        compare.main([*argv, "--group-size", "4"])
    assert len(trained) == 5


def test_the_bench_gives_all_sides_the_same_work(monkeypatch, capsys):
    bench = pytest.importorskip("experiments.bench")
    monkeypatch.setattr(bench.logging, "disable", lambda level: None)
    load, ran_fast = train.load_policy, []
    monkeypatch.setattr(train, "load_policy", lambda *a: ran_fast.append(a[0].fast) or load(*a))
    bench.main([*TINY, "--prompts", "32", "--rounds", "1"])
    assert ran_fast == [False, False, True]  # the warm start, plain, fast
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = [map(float, row[1:]) for row in rows if len(row) == 3 and row[0] in bench.SIDES]
    seconds, letters = zip(*table, strict=True)
    assert letters == pytest.approx([fmean(letters)] * 3, rel=0.15)
    assert min(seconds) > 0.01  # a step, and not the rewards alone
