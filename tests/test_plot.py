"""plot.py: what is drawn is what was logged, averaged over seeds; what is missing leaves a gap."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.image import imread

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
        config = {"method": method, "seed": seed, "out": name, "project": False} | config
        (folder / "config.json").write_text(json.dumps({"config": config}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(folder)

    return make


def training(values, **last):
    """Step 0 and a step a value, every metric of which is that value; an evaluation at the end."""
    steps = [{"step": t, **dict.fromkeys(FIELDS, v)} for t, v in enumerate(values, 1)]
    steps[-1] |= START | last
    return [{"step": 0, **START}, *steps]


def read(folders):
    groups = curves.group_runs([curves.read_run(folder) for folder in folders])
    return groups, {panel.title: panel for panel in plot.find_panels(groups)}


def test_lines_are_means_over_seeds_and_bands_their_students_interval(make_run):
    one = [0.0, 0.1, 0.2, 0.4, 0.8, 0.9, 1.0]
    two = [0.5, 0.1, 0.6, 0.4, 0.8, 0.7, 0.2]
    folders = [make_run("s0", training(one, greedy=0.5), seed=0)]
    folders += [make_run("s1", training(two, greedy=0.75), seed=1)]
    _, panels = read(folders)
    assert list(panels) == [
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
    assert {title for title, panel in panels.items() if panel.is_share} == {
        *(title for title in panels if "'" in title),
        "reward on training prompts",
        "greedy accuracy, held-out",
    }
    for title, smooth in (
        ("entropy of the next token", 1),
        ("reward on training prompts", 5),
        ("learning tax", 5),
    ):
        points = panels[title].lines["grpo"]
        assert [step for step, _, _ in points] == [1, 2, 3, 4, 5, 6, 7]
        assert ("mean of 5 steps" in panels[title].unit) == (smooth == 5)
        for step, middle, half in points:
            a, b = (sum(v[max(0, step - smooth) : step]) / min(step, smooth) for v in (one, two))
            assert middle == pytest.approx((a + b) / 2)
            # The standard error of two values is half their distance.
            assert half == pytest.approx(12.706 * abs(a - b) / 2)
    expected = [pytest.approx((0, 0.25, 0.0)), pytest.approx((7, 0.625, 12.706 * 0.125))]
    assert panels["greedy accuracy, held-out"].lines["grpo"] == expected


def test_drift_is_the_kl_from_each_runs_own_start(make_run):
    last = {"opener so": 0.3, "opener ok": 0.1, "form direct": 0.0, "form tens first": 0.5}
    _, panels = read([make_run("a", training([0.5, 0.5], **last))])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)  # 0.3 and 0.1, scaled to 1
    points = [point[:2] for point in panels["drift of the opener"].lines["grpo"]]
    assert points == [(0, 0.0), pytest.approx((2, expected))]
    assert panels["drift of the form"].lines["grpo"][1][1] == pytest.approx(math.log(1 / 0.25))
    assert [p[1] for p in panels["opener 'so'"].lines["grpo"]] == [0.5, 0.3]  # as logged
    assert math.isnan(panels["opener 'so'"].lines["grpo"][0][2])  # a single seed has no band
    assert math.isnan(curves.drift(START, {"opener so": 1.0}, "opener"))
    assert math.isnan(curves.drift(START, {"opener so": 1.0, "opener ok": math.nan}, "opener"))
    assert curves.drift(START | {"opener so": 0.0}, START, "opener") == math.inf


def test_missing_fields_leave_out_the_panel_and_nan_the_point(make_run):
    lines = [{"step": t, "reward": t / 10, "entropy": t / 5} for t in range(1, 5)]
    lines[1]["entropy"] = math.nan
    lines[2]["length"] = 7
    lines = [{"step": 0, "greedy": 0.0}, *lines]
    _, panels = read([make_run("a", lines)])
    assert list(panels) == [
        "reward on training prompts",
        "greedy accuracy, held-out",
        "entropy of the next token",
        "length of an answer",
    ]
    entropy = [p[:2] for p in panels["entropy of the next token"].lines["grpo"]]
    assert entropy == [(1, 0.2), (3, 0.6), (4, 0.8)]
    assert [p[:2] for p in panels["length of an answer"].lines["grpo"]] == [(3, 7)]
    other = make_run("b", training([math.nan, 0.5]), method="gspo", seed=1)
    _, panels = read([other, make_run("c", lines)])
    assert [p[:2] for p in panels["reward on training prompts"].lines["gspo"]] == [(2, 0.5)]
    assert panels["learning tax"].lines["grpo"] == []  # there is a panel, but no line


def test_a_panel_needs_three_points_of_one_run(make_run, capsys, monkeypatch):
    titles = []

    def draw(panels, _):
        titles.extend(panel.title for panel in panels)
        return SimpleNamespace(savefig=lambda file: None)

    monkeypatch.setattr(plot, "draw", draw)
    lines = training([0.5] * 4)
    folders = [make_run("a", lines), make_run("b", training([0.5] * 6), seed=1)]
    plot.main(folders)  # evaluations at steps 0, 4 and 6, but no run has more than two
    assert titles == [
        "reward on training prompts",
        "learning tax",
        "entropy of the next token",
        "length of an answer",
        "KL to the start",
    ]
    assert "greedy accuracy" in capsys.readouterr().out  # the terminal shows all
    lines[2] |= START
    plot.main([make_run("c", lines, seed=2)])
    assert len(titles) == 5 + 12
    with pytest.raises(SystemExit) as end:
        plot.main([make_run("d", training([0.5, 0.5]))])
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: nothing to draw: no curve has 3 points yet\n"


def test_a_seed_that_ended_early_is_said_and_a_cut_off_last_line_left_out(make_run):
    lengths = (3, 5, 2)
    folders = [make_run(f"s{s}", training([s / 4] * n), seed=s) for s, n in enumerate(lengths)]
    with open(folders[1] + "/metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rew')
    groups, panels = read(folders)
    points = panels["entropy of the next token"].lines["grpo"]
    means = [(step, middle) for step, middle, _ in points]
    assert means == [(1, 0.25), (2, 0.25), (3, 0.125), (4, 0.25), (5, 0.25)]
    assert [math.isfinite(half) for _, _, half in points] == [True, True, True, False, False]
    last = plot.summarise(list(panels.values()), groups).splitlines()[-1]
    assert last == "grpo: its seeds end at steps 2 to 5; the line continues with those left"


def test_bars_are_means_of_equal_stretches_on_one_scale():
    points = [(t, value, math.nan) for t, value in enumerate([0.0, 0.25, 0.5, 1.0])]
    assert plot.bars(points, 0.0, 1.0, 6) == "\u2581\u2583\u2585\u2588  "
    assert plot.bars(points, 0.0, 1.0, 2) == "\u2582\u2587"  # 0.125, 0.75
    assert plot.bars(points[:1], 0.0, 0.0, 2) == "\u2581 "


def test_the_summary_compares_first_and_last_values(make_run):
    groups, panels = read([make_run(f"s{s}", training([0.5, 0.5 + s]), seed=s) for s in (0, 1)])
    lines = plot.summarise(list(panels.values()), groups).splitlines()
    assert len(lines) == 8 and not any("opener 'so'" in line for line in lines)
    (row,) = [line for line in lines if line.startswith("entropy")]
    assert row.endswith(f"0.500 -> 1.000 +- {12.706 * 0.5:.3f}") and "grpo  \u2581\u2588 " in row


def test_the_figure_shows_these_lines_and_bands_in_styles_that_grey_print_tells_apart(make_run):
    def lines(seed):
        return [
            {"step": t, "reward": 0.1 * seed + 0.05 * t, "tax": 9.0 * t + seed} for t in range(1, 9)
        ]

    methods = ("grpo", "gspo", "dfpo-min")
    folders = [make_run(f"{m}{s}", lines(s), m, s) for m in methods for s in (0, 1)]
    folders.append(make_run("projected", lines(0), project=True))
    groups, panels = read(folders)
    figure = plot.draw(list(panels.values()), groups)
    assert [axis.get_title() for axis in figure.axes] == list(panels)
    for axis, panel in zip(figure.axes, panels.values(), strict=True):
        assert axis.get_ylabel() == panel.unit
        drawn = zip(axis.get_lines(), axis.collections, panel.lines.values(), strict=True)
        for line, band, points in drawn:
            steps, values, halves = zip(*points, strict=True)
            assert (tuple(line.get_xdata()), tuple(line.get_ydata())) == (steps, values)
            assert all(axis.get_ylim()[0] < value < axis.get_ylim()[1] for value in values)
            if math.isfinite(halves[-1]):
                ends = [y for x, y in band.get_paths()[0].vertices if x == steps[-1]]
                expected = (values[-1] - halves[-1], values[-1] + halves[-1])
                assert (min(ends), max(ends)) == pytest.approx(expected)
    lines = dict(zip(groups, figure.axes[0].get_lines(), strict=True))
    assert [lines[m].get_color() for m in methods] == ["#E69F00", "#D55E00", "#0072B2"]
    projected = lines["grpo+proj"]
    assert projected.get_color() == "#E69F00" and projected.get_markerfacecolor() == "white"
    assert {name for name, line in lines.items() if line.get_linestyle() == "--"} == {"grpo+proj"}
    for look in ("get_marker", "get_linestyle"):
        assert len({getattr(line, look)() for line in lines.values()}) == 4
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [*(f"{m} (seeds: 2)" for m in methods), "grpo+proj (seeds: 1)"]


def test_every_method_has_a_colour_and_an_unknown_one_is_grey(make_run):
    assert METHODS.keys() == curves.COLOURS.keys()
    groups, _ = read([make_run("mine", training([0.5]), "my-method")])
    assert plot.choose_styles(groups)["my-method"]["color"] == "#999999"


def test_the_command_writes_both_files_or_the_one_asked_for(
    make_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    lines = [{"step": t, "reward": t / 9, "tax": t / 9} for t in (1, 2, 3)]
    folders = [make_run("a", lines), make_run("b", lines[:1], seed=1)]
    plot.main(folders)
    said = ["picture: curves.png", "picture: curves.svg"]
    assert capsys.readouterr().out.splitlines()[-2:] == said
    svg = Path("curves.svg").read_text()
    assert "learning tax" in svg and "grpo (seeds: 2)" in svg
    pixels = imread("curves.png")
    assert pixels.shape[1] > 800 and pixels.std() > 0.05
    Path("curves.png").unlink()
    plot.main([str(tmp_path), "--out", "again.svg"])  # all the runs in there
    assert "learning tax" in Path("again.svg").read_text() and not Path("curves.png").exists()


def test_without_matplotlib_there_are_bars_and_one_line_that_says_what_to_install(
    make_run, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stopped:
        plot.main([make_run("a", training([0.5, 0.5, 0.5]))])
    assert stopped.value.code == "error: pictures need matplotlib; pip install -e '.[plot]'"
    assert "learning tax" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = make_run("good", [{"step": t, "tax": 0.5} for t in (1, 2, 3)])
    empty = make_run("warming up", [])
    (tmp_path / "warming up" / "metrics.jsonl").unlink()
    for argv, said in [
        ([], "RUN"),
        (["nowhere"], "nowhere is not a run; expected run directories, such as runs/*"),
        ([good, str(tmp_path / "good" / "x")], "x is not a run"),
        ([good, good], "second run of grpo with seed 0"),
        ([good, "--out", "x.pdf"], "--out x.pdf: a name that ends in .png or .svg is expected"),
        ([good, "--out", ""], "a name that ends in"),
        ([good, "--out", "no/where.png"], "no/where.png cannot be written: No such file"),
        ([good, "--out", "no/where.svg"], "no/where.svg cannot be written: No such file"),
        ([good, "--uot", "x.png"], "unrecognized arguments: --uot"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            plot.main(argv)
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1 and said in error, (argv, error)
    # Two runs of seed 0, but one of them has nothing yet that could be confused with the other.
    plot.main([good, empty, "--out", "good.svg"])
    assert capsys.readouterr().err == f"left out: {empty} has no metrics yet\n"
    with pytest.raises(SystemExit):
        plot.main([empty])
    error = capsys.readouterr().err.splitlines()[1]
    assert error == "error: nothing to draw: these runs have no metrics yet"


def test_curves_and_pictures_start_without_torch_and_without_matplotlib():
    heavy = {"torch", "transformers", "matplotlib", "numpy"}
    code = f"from experiments import plot, tokens; import sys; print({heavy} & sys.modules.keys())"
    root = Path(plot.__file__).parents[1]
    process = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert process.stdout == "set()\n"
