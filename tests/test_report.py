"""To whoever asks what a loss of her own does: the page's numbers are those of a hand and of the
small worlds, and planted mistakes are seen.

Run: python -m pytest -q tests/test_report.py
"""

import pytest
from conftest import metrics, run

import losses
import verify
from claims import report
from toy.worlds import Row

near = pytest.approx


def write(folder, text: str) -> str:
    path = folder / "mine.py"
    path.write_text("import torch\nfrom losses import *\n" + text)
    return str(path)


def lines(part) -> dict[str, list]:
    """The lines of a part of the page, by their labels."""
    return {
        label.strip(): [x if isinstance(x, str) else float(x) for x in xs] for label, *xs in part
    }


# ---------------- the numbers


LOW = [0.1, 0.45, 0.75, 0.95]
ROOTS = [r**0.25 for r in LOW]  # an answer's ratio if one token of four moves
HAND = {  # beyond 1, below 1; by length; a loser of 8; others' pushes beyond 1, below 1
    "grpo": ([1.05, 0, 0, 0, 0], [0, 0, 0, 0.95], [8, 4, 2, 1], 0.5, [1] * 5, [1] * 4),
    "cispo": ([1.05, 1.25, 2.1, 5, 5], LOW, [1] * 4, 1, [1] * 5, [1] * 4),
    "gspo": ([0] * 5, [0] * 4, [8, 4, 2, 1], 0.5, [0] * 5, ROOTS),
    "dfpo-min": ([1] * 5, ROOTS, [1] * 4, 1, [1] * 5, ROOTS),
}


@pytest.mark.parametrize("name", HAND)
def test_weights_are_those_of_a_hand(name):
    loss, (beyond, below, by_length, other, up, down) = losses.bind(name, {}).passes[0], HAND[name]
    shown = lines([*report.by_length(loss), *report.by_ratio(loss, [])])
    assert shown["a winner's. PPO's clip: 0 from 1.25 on"][5:] == near(beyond)
    assert shown["a loser's. PPO's clip: 0 up to 0.75"][:4] == near(below)
    assert shown["a winner's. Own length: 8 4 2 1"] == near(by_length)
    assert shown["a loser's"] == near(by_length)
    assert shown["a loser's of 8 tokens over a winner's of 4. One divisor: 1"] == near([other])
    assert shown["later tokens"] == near([*down, 1, *up])
    assert shown["other answers"][:4] == near(down if name == "dfpo-min" else [1] * 4)
    sentence = "Ratios at which winners push nothing: 1.25 2.1 9 12; losers: 0.1 0.45 0.75."
    assert any(sentence in label for label in shown) == (name == "grpo")


@pytest.mark.parametrize("name, column", [("grpo", 0), ("dr-grpo", 1)])
def test_the_worlds_end_where_the_page_says(name, column):
    method = losses.bind(name, {})
    _, *page = report.worlds(Row(*method.passes, method.scale))
    assert [float(end) for _, end, *_ in page] == near([x[2 + column] for x in page], abs=6e-4)


# ---------------- planted mistakes

SURROGATE = "x = clipped_surrogate(batch, 0.2, 0.2) * batch.mask; T = batch.mask.sum(1); "
MISTAKES = {  # the lines that show it
    "return -grpo(batch)": "winners are pushed down",
    "return grpo(batch, kl=-0.04)": "the pull is away from the reference",
    "return -(x.sum(1) / T).mean()": "no answer has tokens",
    "return -x.mean()": "padding is wider, of log-probs of 10000",
    "return -x.sum()": "there are twice as many (2: a sum)",
    "return -(x * batch.logp).mean()": "log-probs differ, ratios do not (a clip by probability?)",
    "batch.adv.mul_(2); return reinforce(batch)": "it is called again on its batch",
    "A = x / x.std(); return -divide_by_constant(A, batch)": report.ALONE,
    "return dr_grpo(batch) - batch.logp[0].mean()": "there are twice as many (2: a sum)",
    "r = (batch.logp - batch.logp_old).exp(); return -(r * batch.adv).mean()": (
        "padding is wider, of log-probs of 10000"
    ),
    "return reinforce(replace(batch, adv=batch.adv.tanh()))": "advantages are doubled",
    "return reinforce(batch) + batch.logp.masked_fill(~batch.mask, 0).mean()": (
        "all rewards are equal"
    ),
}


def what_stands_out(loss) -> list[str]:
    odd = []
    [*report.by_ratio(loss, odd), *report.pull(loss, odd), *report.changes(loss, odd)]
    return odd


@pytest.mark.parametrize("body", MISTAKES)
def test_a_planted_mistake_is_seen(body, tmp_path):
    [loss] = losses.bind(write(tmp_path, f"def loss(batch):\n    {SURROGATE}{body}\n"), {}).passes
    assert MISTAKES[body] in what_stands_out(loss)


def test_nothing_of_ours_stands_out():
    for name in [*losses.METHODS][:9]:  # the last ones clip by a probability
        for loss in losses.bind(name, {}).passes:
            assert what_stands_out(loss) == [], name


# ---------------- the door

KL = """
def other(batch, eps_low=0.2, kl=0.04):
    J = clipped_surrogate(batch, eps_low, 0.2) - (kl * k3(batch) if kl else 0)
    return -divide_by_length(J, batch)
def named(batch, beta=0.1):
    return other(batch, kl=beta)
scale = "mean"
"""


def test_a_file_is_bound_wherever_a_name_is(tmp_path, monkeypatch, capsys, easy):
    """On the page, and in a run, which keeps a copy of the file and has a reference for a KL term,
    whatever its weight is called."""
    file = write(tmp_path, KL)
    path = file + ":other"
    monkeypatch.setattr(report, "worlds", lambda row: [])
    assert verify.main([path, "eps_low=0.3"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"{path}, scale mean") and "eps_low=0.3 kl=0.04\n" in page
    assert "  off-policy: grpo\n" in page  # with kl=0.04, too
    out = run(tmp_path / "run", "--method", file + ":named")
    assert metrics(out)[-1]["kl"] > 0
    assert (tmp_path / "run" / "method.py").read_text() == (tmp_path / "mine.py").read_text()


@pytest.mark.parametrize("body", ["x", "x.sum().item()", "None", "x.sum().detach()"])
def test_what_is_no_loss_is_refused_with_one_message(body, tmp_path):
    path = write(tmp_path, f"def loss(batch):\n    {SURROGATE}\n    return {body}\n")
    with pytest.raises(ValueError, match="must return one number that depends on batch.logp"):
        verify.main([path])
