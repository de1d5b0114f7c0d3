"""The scripts behind the README's figures."""

import json

import pytest

from bench import tokens


@pytest.fixture
def make_run(tmp_path):
    def make(name, method, rewards, generated, seed=0):
        folder = tmp_path / name
        folder.mkdir()
        config = {"method": method, "lr": 0.001, "seed": seed, "exchangeable": False}
        (folder / "config.json").write_text(json.dumps({"config": config}))
        lines = [{"step": t, "reward": reward, "generated": generated} for t, reward in enumerate(rewards, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(folder)

    return make


def test_rewards_are_read_at_equal_tokens_with_students_interval(make_run, capsys):
    cheap = make_run("a", "grpo", [k / 10 for k in range(11)], 1000)  # the k-th step's middle: k + 0.5 thousand
    dear = [make_run(f"b{s}", "ibpo", [k / 10 + s / 100 for k in range(11)], 2000, s) for s in (-1, 1)]
    tokens.main("5,10", cheap, *dear)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == ["grpo, lr 0.001", "ibpo, lr 0.001"]
    assert [float(row[3].split("+-")[0]) for row in rows] == pytest.approx([0.45, 0.2], abs=0.051)
    assert rows[1][3].split("+-")[1].strip() == f"{12.706 * 0.0141421 / 2**0.5:.3f}"
    twins = [make_run(f"c{s}", "grpo", [k / 10 + s / 100 for k in range(11)], 1000, s) for s in (-1, 1)]
    tokens.main("5", *twins, *dear)
    difference = capsys.readouterr().out.splitlines()[-1].split("|")
    assert difference[1].strip() == "ibpo, lr 0.001, less grpo, lr 0.001" and difference[3].strip()[-8:] == "+- 0.000"
    with pytest.raises(SystemExit, match="fewer than 20 thousand"):
        tokens.main("20", cheap)
    with pytest.raises(SystemExit, match="is not a run"):
        tokens.main("5", "nowhere")
