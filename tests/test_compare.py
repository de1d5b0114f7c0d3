"""Runs read back, what they come to, statistics over seeds; and the product of methods and seeds,
gone on with."""

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import config
from experiments import compare, curves


def make_run(folder: Path, rewards, seed=0, method="grpo", last=None, **settings) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"config": {"method": method, "seed": seed, "lr": 1e-3} | settings})
    )
    shares = {"opener so": 0.5, "opener ok": 0.5, "form direct": 1.0}
    lines = [{"step": 0, "greedy": 0.1, **shares}]
    for t, reward in enumerate(rewards, 1):
        lines.append(
            {
                "step": t,
                "reward": reward,
                "entropy": 1.0,
                "generated": 500,
                "tax": 0.25,
                "delta": 0.5 - reward,
            }
        )
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


def test_runs_that_differ_only_in_the_seed_are_one_group_named_by_what_differs(tmp_path):
    for name, more in {
        "a": dict(seed=0, out="x"),
        "b": dict(seed=1, out="y"),
        "c": dict(seed=0, lr=0.01),
        "d": dict(seed=0, method="gspo", project=True, context=3),
    }.items():
        make_run(tmp_path / "runs" / name, [0.5], **more)
    runs = curves.read_runs([str(tmp_path / "runs")])
    groups = curves.grouped(runs)
    assert {label: sorted(group) for label, group in groups.items()} == {
        "grpo, lr 0.001": [0, 1],
        "grpo, lr 0.01": [0],
        "gspo+proj3, lr 0.001": [0],
    }
    with pytest.raises(ValueError, match="a second run of grpo with seed 0"):
        curves.grouped([runs[0], runs[0]])


def test_the_table_leaves_unfinished_runs_out_and_says_so_and_compares_with_the_row_asked_for(
    tmp_path, capsys
):
    for name, method, rewards in (
        ("a", "gspo", [0.5] * 6),
        ("b", "grpo", [0.5] * 6),
        ("c", "dapo", [0.5] * 5),
    ):
        for seed in (0, 1):
            make_run(tmp_path / "all" / f"{name}{seed}", rewards, seed, method, steps=6)
    curves.main([str(tmp_path / "all"), "--base", "grpo"])
    out, err = capsys.readouterr()
    assert "dapo" not in out and "| gspo less grpo | 2 |" in out
    assert err.splitlines() == [
        f"left out: {tmp_path / 'all' / name} is unfinished" for name in ("c0", "c1")
    ]
    for argv, said in (
        (
            [str(tmp_path / "all"), "--base", "sgd"],
            "--base sgd: there is no such row; there are gspo, grpo",
        ),
        ([str(tmp_path / "all" / "c0")], "there is no finished run among these"),
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
    run = make_run(
        tmp_path / "r", [0.0] * 10 + [1.0] * 10, last={"opener so": 0.75, "opener ok": 0.25}
    )
    o = curves.outcome(curves.read_run(run), 0.6)
    assert (
        o["reward"] == 0.5 and o["final"] == 1.0 and o["greedy"] == 0.75 and o["Steps(0.6)"] == 13
    )
    assert o["opener drift"] == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert o["form drift"] == o["form entropy"] == 0 and o["lazy"] == 0.5 and o["k tokens"] == 10
    assert math.isnan(o["clipped"])  # no step has it
    with pytest.raises(ValueError, match="no finished step"):
        curves.outcome(curves.read_run(make_run(tmp_path / "empty", [])))


# ---------------- statistics


def test_students_interval_covers_the_true_mean_95_times_in_a_hundred():
    rng, inside = random.Random(0), 0
    for _ in range(2000):
        middle, half = curves.interval([rng.gauss(3, 2) for _ in range(5)])
        inside += abs(middle - 3) <= half
    assert 0.935 < inside / 2000 < 0.965
    assert curves.interval([1.0, 3.0, math.nan]) == (2.0, pytest.approx(12.706))
    assert curves.interval([1.0, math.inf])[0] == math.inf
    assert curves.interval([1.0])[0] == 1 and math.isnan(curves.interval([1.0])[1])
    assert curves.interval([0.0, 1.0] * 15)[1] == pytest.approx(2.045 * 0.50855 / 30**0.5, rel=2e-3)


def test_the_bootstrap_interval_covers_the_true_mean_with_five_pairs_too():
    rng, inside = random.Random(0), 0
    for _ in range(500):
        _, low, high = curves.bootstrap([rng.gauss(1, 2) for _ in range(5)], 1500)
        inside += low <= 1 <= high
    assert 0.9 < inside / 500 < 0.97  # plain percentiles: 0.85


def test_the_bootstrap_interval_is_the_spread_of_the_mean_of_resampled_pairs():
    rng = random.Random(1)
    values = [rng.gauss(1, 1) for _ in range(40)]
    middle, low, high = curves.bootstrap(values)
    deviation = (sum((v - middle) ** 2 for v in values) / 40) ** 0.5 / 40**0.5
    assert middle == pytest.approx(sum(values) / 40)
    t = 2.023 * (40 / 39) ** 0.5
    assert [(low - middle) / deviation, (high - middle) / deviation] == pytest.approx(
        [-t, t], abs=0.12
    )
    assert curves.bootstrap([0.5] * 3) == (0.5, 0.5, 0.5)


def test_the_table_pairs_by_seed_and_stars_what_leaves_out_0(tmp_path):
    groups = {"grpo": {}, "gspo": {}}
    for seed in range(5):
        for method, more in (("grpo", 0.0), ("gspo", 0.1)):
            run = make_run(tmp_path / f"{method}{seed}", [seed / 10 + more] * 6, seed, method)
            groups[method][seed] = curves.read_run(run)
    del groups["gspo"][0]
    groups["gspo"][7] = curves.read_run(make_run(tmp_path / "gspo7", [0.9] * 6, 7, "gspo"))
    text = curves.table(groups, only=("final",))
    assert text.splitlines()[2] == f"| grpo | 5 | 0.200 +- {2.776 * 0.158114 / 5**0.5:.3f} |"
    assert (
        text.splitlines()[-1] == "| gspo less grpo | 4 | +0.100 [+0.100, +0.100] |"
    )  # four pairs: no star
    groups["gspo"][0] = curves.read_run(make_run(tmp_path / "again", [0.1] * 6, 0, "gspo"))
    assert curves.table(groups, only=("final",)).endswith("| 5 | +0.100 [+0.100, +0.100]* |")
    for run in [*groups["gspo"].values()][:3]:
        for m in run.steps:
            m["lazy"] = m.pop("delta")  # three of five have no delta
    cells = curves.table(groups, only=("lazy",)).splitlines()
    assert "(3)" in cells[3] and "*" not in cells[-1] and "(" in cells[-1]
    pairs = curves.table(
        groups, only=("final",), pairs=[("grpo", "gspo"), ("dapo", "grpo")]
    ).splitlines()
    assert pairs[-1].startswith("| grpo less gspo | 5 | -0.100") and len(pairs) == 8


# ---------------- methods x seeds

SMALL = ["--steps", "4"]


def fake(args: list[str]):
    """Stands for train.main: what it would leave, a failure for seed 1 of gspo, a cut-off run that
    is gone on with."""
    print("a line of the run")
    if "--resume" in args:
        run = Path(args[args.index("--resume") + 1])
        with open(run / "metrics.jsonl", "a") as file:
            file.writelines(
                json.dumps({"step": t, "reward": 1.0, "greedy": 1.0}) + "\n" for t in (3, 4)
            )
        return
    asked = config.parse(args)
    if not Path(asked.out, "mended").exists():
        if asked.method == "gspo" and asked.seed == 1:
            sys.exit("error: no luck")
        if asked.method == "gspo":
            raise RuntimeError("out of memory")
    last = 2 if asked.method == "dapo" and asked.seed == 0 else 4
    run = make_run(Path(asked.out, asked.name), [0.5] * last)
    (run / "config.json").write_text(json.dumps({"config": vars(asked)}))


def test_the_product_runs_in_parallel_goes_on_where_it_stopped_and_ends_with_the_table(
    tmp_path, capfd, monkeypatch
):
    argv = ["--method", "grpo+proj,gspo,dapo", "--seeds", "2", "--out", str(tmp_path), *SMALL]
    monkeypatch.setattr(compare, "at_once", lambda _: 2)
    with pytest.raises(SystemExit) as end:
        compare.compare(argv, fake)
    folder = tmp_path / "compare"
    log = folder / ".logs" / "gspo-s0.log"
    said = (
        f"{folder}/gspo-s0: RuntimeError: out of memory; see {log}",
        f"{folder}/gspo-s1: error: no luck",
    )
    assert sorted(end.value.code.removeprefix("error: ").split("\n       ")) == sorted(said)
    assert {path.name for path in folder.glob("[!.]*")} == {
        "grpo+proj-s0",
        "grpo+proj-s1",
        "dapo-s0",
        "dapo-s1",
    }
    assert log.read_text().startswith("a line of the run\nTraceback")
    assert (
        json.loads((folder / "grpo+proj-s1" / "config.json").read_text())["config"]["project"]
        is True
    )
    (folder / "mended").mkdir()
    left = {run.name: args for run, args in compare.runs_of(argv).items() if args}
    assert left.keys() == {"gspo-s0", "gspo-s1", "dapo-s0"}
    assert left["dapo-s0"] == ["--resume", str(folder / "dapo-s0")]
    smaller = compare.runs_of([*argv, "--micro-rows", "2"])[folder / "dapo-s0"]
    assert smaller == [*left["dapo-s0"], "--micro-rows", "2"]
    capfd.readouterr()
    monkeypatch.setattr(compare, "at_once", lambda _: 1)
    compare.compare(argv, fake)
    out = capfd.readouterr().out
    assert (
        "6 runs, 3 of them" in out
        and "| grpo+proj | 2 |" in out
        and "| dapo less grpo+proj | 2 |" in out
    )
    assert curves.read_run(folder / "dapo-s0").steps[-1]["step"] == 4


def test_as_many_runs_at_once_as_there_are_cores_and_one_on_a_gpu(monkeypatch):
    asked = config.parse([])
    monkeypatch.setattr(compare.os, "sched_getaffinity", lambda _: range(6), raising=False)
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: False)
    assert [compare.at_once(replace(asked, threads=n)) for n in (0, 1, 2, 4, 9)] == [1, 6, 3, 1, 1]
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: True)
    assert compare.at_once(asked) == 1 and compare.at_once(replace(asked, device="cpu")) == 6


@pytest.mark.parametrize(
    "args, said",
    [
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--method", "grpo,sgd"], "sgd"),
        (["--method", "grpo+projx"], "--method grpo+projx: expected NAME, NAME+proj or NAME+projK"),
        (
            ["--method", "grpo+proj,grpo+proj0"],
            "--method grpo+proj0: expected NAME, NAME+proj or NAME+projK with K from 1",
        ),
        (["--method", "grpo,gspo,grpo"], "grpo stands there twice"),
        (["--method", "grpo,gspo", "--lr", "-1"], "--lr -1"),
        (
            ["--method", "grpo,gspo", "--steps", "5"],
            "was made with steps 4, not 5; another experiment needs another",
        ),
        (["--method", "grpo,dapo"], "dapo-s0 is in the way"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(args, said, tmp_path, capsys):
    settings = vars(config.parse(["--method", "grpo", *SMALL]))
    make_run(
        tmp_path / "compare" / "grpo-s0",
        [0.5] * 2,
        **{k: v for k, v in settings.items() if k not in ("method", "seed")},
    )
    (tmp_path / "compare" / "dapo-s0").mkdir()
    with pytest.raises(SystemExit) as end:
        compare.runs_of(["--seeds", "1", *SMALL, *args, "--out", str(tmp_path)])
    err = capsys.readouterr().err
    assert end.value.code == 2 and said in err and err.count("\n") == 1


def test_only_several_runs_are_compared():
    assert (
        compare.wanted(["--seeds", "3"])
        and compare.wanted(["--method=a,b"])
        and compare.wanted(["--method", "a+proj"])
    )
    assert not compare.wanted(["--method", "grpo", "--hyper", "eps_low=0.1", "--seed", "3"])
