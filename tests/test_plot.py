"""plot.py: what is drawn is what was logged, averaged over seeds; what is missing leaves a gap,
never a traceback."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from experiments import curves, plot
from losses import METHODS

FIELDS = ("reward", "tax", "entropy", "length", "kl_start")
START = {
    "greedy": 0.25,
    "opener so": 0.5,
    "opener ok": 0.5,
    "form direct": 0.75,
    "form tens first": 0.25,
}


@pytest.fixture
def make_run(tmp_path):
    def make(name, lines, method="grpo", seed=0, **config):
        folder = tmp_path / name
        folder.mkdir()
        config = {"method": method, "seed": seed, "name": name, "project": False} | config
        (folder / "config.json").write_text(json.dumps({"config": config}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(folder)

    return make


def training(values, **last):
    """Step 0 and a step a value, every metric of which is that value; an evaluation at the end."""
    lines = [{"step": 0} | START] + [
        {"step": t, **dict.fromkeys(FIELDS, v)} for t, v in enumerate(values, 1)
    ]
    lines[-1] |= START | last
    return lines


def drawn(folders):
    groups = curves.grouped([curves.read_run(folder) for folder in folders])
    return groups, {panel.title: panel for panel in plot.panels(groups)}


def test_lines_are_means_over_seeds_and_bands_their_students_interval(make_run):
    one = [0.0, 0.1, 0.2, 0.4, 0.8, 0.9, 1.0]
    two = [0.5, 0.1, 0.6, 0.4, 0.8, 0.7, 0.2]
    folders = [
        make_run(f"s{s}", training(v, greedy=0.5 + s / 4), seed=s) for s, v in enumerate((one, two))
    ]
    _, found = drawn(folders)
    assert list(found) == [
        "reward on training prompts",
        "greedy accuracy, held-out",
        "learning tax",
        "entropy of the next token",
        "drift of the opener",
        "opener 'so'",
        "opener 'ok'",
        "drift of the form",
        "form 'direct'",
        "form 'tens first'",
        "length of an answer",
        "KL to the start",
    ]
    for title, smooth in (
        ("entropy of the next token", 1),
        ("reward on training prompts", 5),
        ("learning tax", 5),
    ):
        points = found[title].lines["grpo"]
        assert [step for step, _, _ in points] == [1, 2, 3, 4, 5, 6, 7]
        assert ("mean of 5 steps" in found[title].unit) == (smooth == 5)
        for step, middle, half in points:
            a, b = (sum(v[max(0, step - smooth) : step]) / min(step, smooth) for v in (one, two))
            assert middle == pytest.approx((a + b) / 2)
            assert half == pytest.approx(
                12.706 * abs(a - b) / 2
            )  # the standard error of two is half their distance
    assert found["greedy accuracy, held-out"].lines["grpo"] == [
        pytest.approx((0, 0.25, 0.0)),
        pytest.approx((7, 0.625, 12.706 * 0.125)),
    ]


def test_drift_is_the_kl_from_each_runs_own_start(make_run):
    lines = training(
        [0.5, 0.5],
        **{"opener so": 0.3, "opener ok": 0.1, "form direct": 0.0, "form tens first": 0.5},
    )
    _, found = drawn([make_run("a", lines)])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(
        0.25 / 0.5
    )  # of 0.3 and 0.1, made to add up to 1
    assert [p[:2] for p in found["drift of the opener"].lines["grpo"]] == [
        (0, 0.0),
        pytest.approx((2, expected)),
    ]
    assert found["drift of the form"].lines["grpo"][1][1] == pytest.approx(math.log(1 / 0.25))
    assert [p[1] for p in found["opener 'so'"].lines["grpo"]] == [0.5, 0.3]  # as logged
    assert math.isnan(found["opener 'so'"].lines["grpo"][0][2])  # a single seed has no band
    assert math.isnan(curves.moved(START, {"opener so": 1.0}, "opener"))
    assert math.isnan(curves.moved(START, {"opener so": 1.0, "opener ok": math.nan}, "opener"))
    assert curves.moved(START | {"opener so": 0.0}, START, "opener") == math.inf


def test_missing_fields_leave_out_the_panel_and_nan_the_point(make_run):
    lines = [{"step": 0, "greedy": 0.0}] + [
        {"step": t, "reward": t / 10, "entropy": t / 5} for t in range(1, 5)
    ]
    lines[2]["entropy"], lines[3]["length"] = math.nan, 7
    groups, found = drawn([make_run("a", lines)])
    assert list(found) == [
        "reward on training prompts",
        "greedy accuracy, held-out",
        "entropy of the next token",
        "length of an answer",
    ]
    assert [p[:2] for p in found["entropy of the next token"].lines["grpo"]] == [
        (1, 0.2),
        (3, 0.6),
        (4, 0.8),
    ]
    assert [p[:2] for p in found["length of an answer"].lines["grpo"]] == [(3, 7)]
    other = make_run("b", training([math.nan, 0.5]), method="gspo", seed=1)
    _, found = drawn([other, make_run("c", lines)])
    assert [p[:2] for p in found["reward on training prompts"].lines["gspo"]] == [(2, 0.5)]
    assert found["learning tax"].lines["grpo"] == []  # in the panel of those that have it, no line


def test_a_seed_that_ended_early_is_said_and_a_cut_off_last_line_left_out(make_run, capsys):
    folders = [
        make_run(f"s{s}", training([s / 4] * n), seed=s) for s, n in ((0, 3), (1, 5), (2, 2))
    ]
    with open(folders[1] + "/metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rew')
    groups, found = drawn(folders)
    points = found["entropy of the next token"].lines["grpo"]
    assert [(step, middle) for step, middle, _ in points] == [
        (1, 0.25),
        (2, 0.25),
        (3, 0.125),
        (4, 0.25),
        (5, 0.25),
    ]
    assert [math.isfinite(half) for _, _, half in points] == [True, True, True, False, False]
    text = plot.summary(list(found.values()), groups)
    assert (
        text.splitlines()[-1]
        == "grpo: its seeds end at steps 2 to 5; the line goes on with those left"
    )


def test_bars_are_means_of_equal_stretches_on_one_scale():
    points = [(t, value, math.nan) for t, value in enumerate([0.0, 0.25, 0.5, 1.0])]
    assert plot.bars(points, 0.0, 1.0, 6) == "\u2581\u2583\u2585\u2588  "
    assert plot.bars(points, 0.0, 1.0, 2) == "\u2582\u2587"  # 0.125, 0.75
    assert plot.bars(points[:1], 0.0, 0.0, 2) == "\u2581 "


def test_the_summary_compares_first_and_last_values(make_run, capsys, monkeypatch):
    groups, found = drawn([make_run(f"s{s}", training([0.5, 0.5 + s]), seed=s) for s in (0, 1)])
    lines = plot.summary(list(found.values()), groups).splitlines()
    assert len(lines) == 8 and not any("opener 'so'" in line for line in lines)
    row = lines[[line.startswith("entropy") for line in lines].index(True)]
    assert row.endswith(f"0.500 -> 1.000 +- {12.706 * 0.5:.3f}") and "grpo  \u2581\u2588 " in row


def test_the_figure_shows_these_lines_and_bands_in_styles_that_grey_print_tells_apart(make_run):
    def lines(seed):
        return [
            {"step": t, "reward": 0.1 * seed + 0.05 * t, "tax": 9.0 * t + seed} for t in range(1, 9)
        ]

    methods, seeds = ("grpo", "gspo", "dfpo-min"), (0, 1)
    folders = [
        make_run(f"{method}{seed}", lines(seed), method, seed)
        for method in methods
        for seed in seeds
    ]
    folders.append(make_run("ex", lines(0), project=True))
    groups, found = drawn(folders)
    figure = plot.draw(list(found.values()), groups)
    assert [axis.get_title() for axis in figure.axes] == list(found)
    for axis, panel in zip(figure.axes, found.values(), strict=True):
        assert axis.get_ylabel() == panel.unit
        for line, band, points in zip(
            axis.get_lines(), axis.collections, panel.lines.values(), strict=True
        ):
            steps, values, halves = zip(*points, strict=True)
            assert (tuple(line.get_xdata()), tuple(line.get_ydata())) == (steps, values)
            assert all(axis.get_ylim()[0] < value < axis.get_ylim()[1] for value in values)
            if math.isfinite(halves[-1]):
                ends = [y for x, y in band.get_paths()[0].vertices if x == steps[-1]]
                assert (min(ends), max(ends)) == pytest.approx(
                    (values[-1] - halves[-1], values[-1] + halves[-1])
                )
    lines = dict(zip(groups, figure.axes[0].get_lines(), strict=True))
    assert [lines[m].get_color() for m in ("grpo", "gspo", "dfpo-min")] == [
        "#E69F00",
        "#D55E00",
        "#0072B2",
    ]
    assert (
        lines["grpo+proj"].get_color() == "#E69F00"
        and lines["grpo+proj"].get_markerfacecolor() == "white"
    )
    assert {name for name, line in lines.items() if line.get_linestyle() == "--"} == {"grpo+proj"}
    for look in ("get_marker", "get_linestyle"):
        assert len({getattr(line, look)() for line in lines.values()}) == 4
    assert not isinstance(
        figure.get_layout_engine(), ConstrainedLayoutEngine
    )  # or each file would be laid out anew
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [
        "grpo (seeds: 2)",
        "gspo (seeds: 2)",
        "dfpo-min (seeds: 2)",
        "grpo+proj (seeds: 1)",
    ]


def test_every_method_has_a_colour_and_an_unknown_one_is_grey(make_run):
    assert METHODS.keys() == curves.COLOURS.keys()
    groups, _ = drawn([make_run("mine", training([0.5]), "my-method")])
    assert plot.styles(groups)["my-method"]["color"] == "#999999"


def test_the_command_writes_both_files_or_the_one_asked_for_the_same_bytes_each_time(
    make_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    lines = [{"step": t, **dict.fromkeys(FIELDS, t / 9)} for t in (1, 2)]
    folders = [make_run("a", lines), make_run("b", lines[:1], seed=1)]
    plot.main(folders)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "picture: curves.png",
        "picture: curves.svg",
    ]
    image, svg = tmp_path / "curves.png", (tmp_path / "curves.svg").read_text()
    assert (
        "learning tax" in svg
        and "grpo (seeds: 2)" in svg
        and len(Image.open(image).getcolors()) > 20
    )
    image.unlink()
    plot.main([*folders, "--out", "again.svg"])
    assert (tmp_path / "again.svg").read_text() == svg and not image.exists()


def test_a_picture_of_three_methods_and_five_seeds_is_small(make_run, tmp_path, capsys):
    folders = [
        make_run(f"{m}{s}", training([((7 * t + 3 * s) % 11) / 11 for t in range(60)]), m, s)
        for m in ("grpo", "gspo", "dfpo-min")
        for s in range(5)
    ]
    plot.main([*folders, "--out", str(tmp_path / "all.png")])
    assert (tmp_path / "all.png").stat().st_size < 150_000 and Image.open(
        tmp_path / "all.png"
    ).size[0] > 1200


def test_one_step_is_enough_for_a_picture(make_run, tmp_path, capsys):
    start = make_run("a", [{"step": 0, "greedy": 0.5}])
    groups, found = drawn([start])
    assert plot.draw(list(found.values()), groups).axes[0].get_xlim()[1] > 1
    plot.main(
        [
            start,
            make_run("b", [{"step": 1, "reward": 0.0}], seed=1),
            "--out",
            str(tmp_path / "one.png"),
        ]
    )
    assert len(Image.open(tmp_path / "one.png").getcolors()) > 20
    plot.main([str(tmp_path), "--out", str(tmp_path / "folder.png")])  # all the runs in there
    assert (tmp_path / "folder.png").read_bytes() == (tmp_path / "one.png").read_bytes()


def test_without_matplotlib_there_are_bars_and_one_line_that_says_what_to_install(
    make_run, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stopped:
        plot.main([make_run("a", training([0.5, 0.5]))])
    assert stopped.value.code == "error: pictures need matplotlib; pip install -e '.[plot]'"
    assert "learning tax" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = make_run("good", [{"step": 1, "tax": 0.5}])
    empty = make_run("warming up", [])
    (tmp_path / "warming up" / "metrics.jsonl").unlink()
    for argv, said in [
        ([], "RUN"),
        (["nowhere"], "nowhere is not a run; expected run directories, such as runs/*"),
        ([good, str(tmp_path / "good" / "x")], "x is not a run"),
        ([good, good], "second run of grpo with seed 0"),
        ([good, "--out", "x.pdf"], "--out x.pdf: a name that ends in .png or .svg is expected"),
        ([good, "--out", ""], "a name that ends in"),
        (
            [good, "--out", "no/where.png"],
            "no/where.png cannot be written: No such file or directory",
        ),
        (
            [good, "--out", "no/where.svg"],
            "no/where.svg cannot be written: No such file or directory",
        ),
        ([good, "--uot", "x.png"], "unrecognized arguments: --uot"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            plot.main(argv)
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1 and said in error, (argv, error)
    plot.main(
        [good, empty, "--out", "good.svg"]
    )  # of the same seed, but there is nothing to confuse it with
    assert capsys.readouterr().err == f"left out: {empty} has no metrics yet\n"
    with pytest.raises(SystemExit):
        plot.main([empty])
    error = capsys.readouterr().err.splitlines()
    assert error == [
        f"left out: {empty} has no metrics yet",
        "error: nothing to draw: these runs have no metrics yet",
    ]


def test_a_broken_line_is_named_and_what_is_no_number_is_a_missing_field(make_run):
    folder = make_run("a", [{"step": 1, "reward": 0.5, "entropy": None, "length": "long"}])
    assert curves.read_run(folder).lines == [{"step": 1, "reward": 0.5}]
    (run := Path(folder) / "metrics.jsonl").write_text('{"step": 1, \n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 1 of metrics.jsonl"):
        curves.read_run(folder)
    run.unlink()
    assert curves.read_run(folder).lines == []


def test_a_label_names_what_differs_and_no_empty_setting(make_run):
    wide = {"hyper": ["eps_low=0.2", "eps_high=0.28"]}
    folders = [make_run("a", [], lr=0.1, hyper=[]), make_run("b", [], "gspo", lr=0.1, **wide)]
    assert list(drawn(folders)[0]) == ["grpo", "gspo, hyper eps_low=0.2 eps_high=0.28"]
    assert list(drawn([*folders, make_run("c", [], lr=0.2, hyper=[])])[0])[::2] == [
        "grpo, lr 0.1",
        "grpo, lr 0.2",
    ]


def test_it_starts_without_torch_and_without_matplotlib():
    code = "from experiments import plot; import sys; print({'torch', 'transformers', 'matplotlib', 'numpy', 'PIL'} & sys.modules.keys())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(plot.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert found.stdout == "set()\n"
