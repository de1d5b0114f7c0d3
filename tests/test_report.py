"""To whoever asks what a loss of her own does: the page's numbers are those of the claims and of
the small worlds, and planted mistakes are seen.

Run: python -m pytest -q tests/test_report.py
"""

import math
from dataclasses import replace

import pytest
import torch
from conftest import TINY

import losses
import train
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


@pytest.fixture
def page(monkeypatch):
    """The page on a method, but for its slow parts."""
    monkeypatch.setattr(report, "worlds", lambda row: [])
    monkeypatch.setattr(report, "twins", lambda loss, hyper: [])
    return lambda name: lines(report.report(name, losses.bind(name, {})))


def test_pushes_on_the_word_so_are_those_of_the_head_of_losses(page):
    shown = page("grpo")
    assert shown["PUSHES on the word so, in the four answers of losses.py"] == near(
        [0.125, -0.1, 0.25, -0.125]
    )
    assert shown["their sum, which is 0 if they cancel"] == near([0.15])
    assert shown["on-policy, unequal T_i"] == near([0.0748], abs=1e-4)  # as in AUDIT's table
    assert shown["on-policy. Unbiased: 1"] == near([0.983], abs=1e-3)


ALL = [1.05, 1.25, 2, 10], [0.1, 0.5, 0.75, 0.95]  # every ratio is a weight
S = 3**0.25  # of an answer with one ratio of 3 and three of 1
WEIGHTS = {  # at large ratios, at small ones, by length; and what a ratio of 3 or of 1/3 multiplies
    "grpo": ([1.05, 0, 0, 0], [0, 0, 0, 0.95], [8, 4, 2, 1], [0, 1, 1], [1 / 3, 1, 1]),
    "cispo": ([1.05, 1.25, 2, 5], ALL[1], [32 / 15] * 4, [3, 1, 1], [1 / 3, 1, 1]),
    "gspo": ([0] * 4, [0] * 4, [8, 4, 2, 1], [0, 0, 1], [1 / S, 1 / S, 1]),
    "dfpo-min": (*ALL, [1] * 4, [1] * 3, [1 / S] * 3),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_those_of_a_hand(name, page):
    shown, (large, small, by_length, tripled, third) = page(name), WEIGHTS[name]
    assert shown["a winner's. PPO's clip: 0 from 1.25 on"][5:] == near(large)
    assert shown["a loser's. PPO's clip: 0 up to 0.75"][:4] == near(small)
    assert shown["winners. 1 1 1 1: one divisor, 8 4 2 1: own length"] == near(by_length)
    assert shown["losers"] == near(by_length)
    assert shown["its ratio is 3"] == near(tripled) and shown["its ratio is 1/3"] == near(third)


@pytest.mark.parametrize("name, column", [("grpo", 0), ("dr-grpo", 1)])
def test_the_worlds_end_where_the_page_says(name, column):
    method = losses.bind(name, {})
    page = lines(report.worlds(Row(*method.passes, method.scale)))
    assert page.pop("EXPECTED REWARD at the end") == ["this", "grpo", "dr-grpo", "best"]
    assert [x[0] for x in page.values()] == near([x[1 + column] for x in page.values()], abs=6e-4)


def test_a_loss_written_anew_is_recognised_and_one_that_is_nearly_another_is_not():
    def anew(batch, eps, winners=1.0):
        r = (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0).exp()
        A = batch.adv * torch.where(batch.adv > 0, winners, 1.0)
        J = torch.minimum(r * A, r.clamp(1 - eps, 1 + eps) * A) * batch.mask
        return -3 * J.sum() / len(r) / batch.max_tokens

    _, [always], [on_policy] = report.twins(lambda batch: anew(batch, 0.3), {"eps": 0.3})
    assert always == "  always: dr_grpo, dapo, nthr_grpo, token_grpo"
    assert "reinforce" in on_policy and "gspo" not in on_policy
    _, [always], _ = report.twins(lambda batch: anew(batch, 0.3, 1.01), {"eps": 0.3})
    assert always == "  always: none"


# ---------------- planted mistakes

SURROGATE = "x = clipped_surrogate(batch, 0.2, 0.2) * batch.mask; T = batch.mask.sum(1); "
MISTAKES = {  # the label that shows it, and what the line says
    "return -(x.sum(1) / T).mean()": ("no answer has tokens", math.nan),
    "return -x.mean()": ("padding is wider", 5 / 6),
    "return -x.sum()": ("there are twice as many. 2: a sum, not a mean", 2),
    "return -divide_by_tokens(x, batch)": (
        "a group is alone. Not 1: a token mean, or mixed groups",
        77 / 81,
    ),
    "return -(x * batch.logp).mean()": (
        "log-probs are lower, ratios not. !: a forgotten detach?",
        "other",
    ),
    "batch.adv.mul_(2); return reinforce(batch)": ("it is called again on its batch", 2),
    "A = x / x.std(); return -divide_by_constant(A, batch)": (
        "all are 0, as with equal rewards",
        math.nan,
    ),
    "return dr_grpo(batch) - batch.logp[0].mean()": ("answers have another order", "other"),
    "r = (batch.logp - batch.logp_old).exp(); return -(r * batch.adv).mean()": (
        "padding has log-probs of 10000",
        math.nan,
    ),
    "x = batch.adv.tanh() * batch.logp; return -divide_by_constant(x, batch)": (
        "advantages are doubled, over 2",
        "other",
    ),
}


@pytest.mark.parametrize("body", MISTAKES)
def test_a_planted_mistake_is_seen(body, tmp_path):
    [loss] = losses.bind(write(tmp_path, f"def loss(batch):\n    {SURROGATE}{body}\n"), {}).passes
    label, factor = MISTAKES[body]
    page = lines(report.bites(loss))
    assert page[label][0] == (factor if factor == "other" else near(factor, nan_ok=True))
    assert page[label][1:] == ["!"]


def largest_ratio(batch):
    """Learns from one answer of a group; of equal answers torch would take either."""
    s = losses.sequence_ratio(batch).detach().view(-1, batch.group_size)
    best = torch.zeros_like(s).scatter(1, s.argmax(1, keepdim=True), 1.0)
    return losses.reinforce(replace(batch, adv=best.view(-1, 1) * batch.adv))


def test_no_line_of_ours_is_a_surprise():
    names = ("grpo", "gspo", "dfpo-min", "dfpo-orthogonal", "reinforce")
    for loss in (largest_ratio, *(losses.bind(name, {}).passes[0] for name in names)):
        _, *page = report.bites(loss)
        assert [x[1:] for x in page] == [(near(1),)] * 10, loss


# ---------------- the door

KL = """
def other(batch, eps=0.2, kl=0.04):
    J = clipped_surrogate(batch, eps, eps) - (kl * k3(batch) if kl else 0)
    return -divide_by_length(J, batch)
scale = "mean"
"""


def test_a_file_is_bound_wherever_a_name_is(tmp_path, monkeypatch, capsys, easy):
    """On the page, and in a run, which keeps a copy of the file."""
    path = write(tmp_path, KL) + ":other"
    monkeypatch.setattr(report, "worlds", lambda row: [])
    assert verify.main([path, "eps=0.3"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"{path}, scale mean") and "eps=0.3 kl=0.04\n" in page
    assert "  always: grpo\n" in page  # with kl=0.04, too
    train.main([*TINY, "--out", str(tmp_path / "run"), "--method", path, "--hyper", "kl=0"])
    assert (tmp_path / "run" / "method.py").read_text() == (tmp_path / "mine.py").read_text()


@pytest.mark.parametrize("name", ["lopti", "nthr"])
def test_what_is_more_than_one_loss_is_refused(name):
    with pytest.raises(ValueError):
        verify.main([name])
