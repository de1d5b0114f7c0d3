"""To whoever compares methods: runs become the numbers that a hand computes, trained only once."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TINY

import train
from experiments import compare
from toy.figure import interval


def make_run(folder: Path, rewards: list[float], **flags) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(asdict(train.Config(steps=6, **flags))))
    lines = [dict(step=t, reward=x, greedy=t % 6, entropy=1) for t, x in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_what_runs_come_to_by_hand(tmp_path):
    folder = make_run(tmp_path / "r", [1.0] + [0.25] * 11 + [1.0] * 8)
    expected = dict(reward=0.5875, final=0.85, jitter=2.25 / 18, greedy=2)
    expected |= {"Steps(0.8)": 16}  # (0.25 + 4) / 5; not 1, since it takes five steps
    outcomes = compare.compute_outcomes(compare.read_runs([folder]), ["reward", "greedy"])
    assert outcomes.loc["grpo", 0].to_dict() == pytest.approx(expected)


def test_a_table_has_students_interval_and_differences_paired_by_seed(tmp_path, capsys):
    """Of 2 seeds: the 97.5 % quantile with 1 degree of freedom is 12.706, with 23 it is 2.0687."""
    assert interval(range(24))[1] == pytest.approx(2.0687 * 50**0.5 / 24**0.5, rel=1e-4)
    for seed in range(2):
        make_run(tmp_path / f"a{seed}", [seed / 2] * 6, seed=seed)
    for seed, reward in enumerate([0.1, 0.62, 9.0]):  # the last run has no pair
        last = make_run(tmp_path / f"b{seed}", [reward] * 6, seed=seed, lr=0.1)
    make_run(tmp_path / "cut-off", [0.1] * 2, lr=0.5)
    compare.main(["--runs", *map(str, sorted(tmp_path.iterdir()))])
    _, *rows = (" ".join(row.split()) for row in capsys.readouterr().out.splitlines())
    base, other, cut, gap, *_ = rows
    assert base.startswith(f"grpo, lr 0.001 2 0.250 +- {12.706 * 0.25:.3f} ")
    assert other.startswith("grpo, lr 0.1 3 ") and "none in 2 of 2" in base
    assert cut.startswith("grpo, lr 0.5, 2 of 6 steps 1 0.100 ")
    assert gap.startswith(f"grpo, lr 0.1 minus grpo, lr 0.001 2 0.110 +- {12.706 * 0.01:.3f} ")
    with pytest.raises(ValueError):  # two runs of one seed
        compare.read_runs([last, last])


def test_a_comparison_trains_what_is_missing_and_nothing_twice(tmp_path, easy, monkeypatch, capsys):
    trained = []

    def process(command, **_):  # the real trainer, in this process
        trained.append(command[2:])
        train.main(command[2:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=process, STDOUT=None))
    sizes = "--steps 2 --warm-steps 0 --seed 1 --seeds 1 --at-once 1".split()
    argv = [*TINY, *sizes, "--method", "grpo", "gspo --minibatches 1", "--out", str(tmp_path)]
    compare.main(argv)
    assert len(trained) == 2 and "gspo, minibatches 1 minus grpo" in capsys.readouterr().out
    folder = next(tmp_path.glob("grpo*s1"))
    shutil.rmtree(folder / "model")  # a kill right before the end
    compare.main(argv)
    assert trained[2:] == [["--resume", str(folder)]]
    compare.main([*argv, "--group-size", "4"])  # other runs
    assert len(trained) == 5
