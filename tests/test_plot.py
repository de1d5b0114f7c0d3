"""plot.py: what is drawn is what was logged, averaged over seeds."""

import math
from pathlib import Path

import pytest
from matplotlib.image import imread
from test_compare import make_run, says

from experiments import curves, plot


def read(folders):
    groups = curves.group_runs([curves.read_run(folder) for folder in folders])
    return groups, {panel.title: panel for panel in plot.find_panels(groups)}


def test_lines_are_smoothed_means_over_seeds_and_bands_their_students_interval(tmp_path):
    one = [0.0, 0.1, 0.2, 0.4, 0.8, 0.9, 1.0]
    two = [0.5, 0.1, 0.6, 0.4, 0.8, 0.7]
    last = {"greedy": 0.25, "entropy": 3.0, "form direct": 0.5, "form other": 0.5}
    folders = [make_run(tmp_path / "s0", one)]
    folders.append(make_run(tmp_path / "s1", two, seed=1, last=last, steps=7))  # unfinished
    _, panels = read(folders)
    points = panels["reward on training prompts"].lines["grpo"]
    assert [step for step, _, _ in points] == [1, 2, 3, 4, 5, 6, 7]
    for step, middle, half in points[:6]:
        a, b = (sum(v[max(0, step - 5) : step]) / min(step, 5) for v in (one, two))
        assert middle == pytest.approx((a + b) / 2)
        # The standard error of two values is half their distance.
        assert half == pytest.approx(12.706 * abs(a - b) / 2)
    assert points[6][1] == pytest.approx(3.3 / 5) and math.isnan(points[6][2])  # one seed is left
    entropy = [middle for _, middle, _ in panels["entropy of the next token"].lines["grpo"]]
    assert entropy == [1, 1, 1, 1, 1, 2, 1]  # not smoothed
    greedy = panels["greedy accuracy, held-out"].lines["grpo"]
    assert [p[:2] for p in greedy] == [(0, pytest.approx(0.1)), (6, 0.25), (7, 0.75)]
    assert panels["drift of the forms"].lines["grpo"][1][:2] == (6, 0.5)
    assert panels["form direct"].lines["grpo"][1][:2] == (6, 0.5)
    assert "KL to the start" not in panels  # nobody logged it
    assert panels["form direct"].is_share and not panels["learning tax"].is_share


def test_the_figure_shows_these_lines_and_bands_in_styles_that_grey_print_tells_apart(tmp_path):
    methods, folders = ("grpo", "gspo", "dfpo-min"), []
    for m in methods:
        for s in (0, 1):
            rewards = [0.1 * s + 0.05 * t for t in range(8)]
            folders.append(make_run(tmp_path / f"{m}{s}", rewards, s, m))
    folders.append(make_run(tmp_path / "projected", rewards, project=True))
    groups, panels = read(folders)
    figure = plot.draw(list(panels.values()), groups)
    assert [axis.get_title() for axis in figure.axes] == list(panels)
    for axis, panel in zip(figure.axes, panels.values(), strict=True):
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
    assert lines["grpo+proj"].get_color() == lines["grpo"].get_color()
    assert len({lines[m].get_color() for m in methods}) == 3
    assert {name for name, line in lines.items() if line.get_linestyle() == "--"} == {"grpo+proj"}
    for look in ("get_marker", "get_linestyle"):
        assert len({getattr(line, look)() for line in lines.values()}) == 4
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [*(f"{m} (seeds: 2)" for m in methods), "grpo+proj (seeds: 1)"]


def test_the_command_writes_the_file_asked_for_or_ends_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good = make_run(tmp_path / "runs" / "a", [0.1, 0.2, 0.3])
    empty = make_run(tmp_path / "runs" / "warming up", [])
    (empty / "metrics.jsonl").unlink()
    (empty / "config.json").write_text((good / "config.json").read_text())
    plot.main(["runs"])
    out, err = capsys.readouterr()
    assert out == "picture: curves.png\n" and "warming up has no metrics yet" in err
    pixels = imread("curves.png")
    assert pixels.shape[1] > 800 and pixels.std() > 0.05
    plot.main([str(good), "--out", "again.svg"])
    text = Path("again.svg").read_text()
    assert "learning tax" in text and "grpo (seeds: 1)" in text
    for argv, said in [
        (["nowhere"], "nowhere is not a run"),
        ([empty], "no run to show"),
        ([good, good], "second run of grpo with seed 0"),
        ([good, "--out", "x.pdf"], "--out x.pdf: a name that ends in .png or .svg"),
        ([good, "--out", "no/where.png"], "no/where.png cannot be written"),
    ]:
        assert said in says(capsys, plot.main, *argv)
    monkeypatch.setitem(plot.sys.modules, "matplotlib", None)
    assert "pip install" in says(capsys, plot.main, good)
