"""engines/audit.py and engines/shipped.py: the losses of the field, called on our tensors, are
those of losses.py; and the regimes tell known losses apart."""

import importlib.util

import pytest
import torch

import losses
from claims.evidence import Draw
from engines import audit
from engines.shipped import Row, trl_loss, trl_rows

DRAWS = [Draw(0, k) for k in range(12)]
CLIP = dict(eps_low=0.2, eps_high=0.2)  # the engines' default
KNOWN = {  # 0 cancels, x does not, in the first four regimes: theory's audit table
    "reinforce": "0000",
    "grpo": "0x0x",
    "token_grpo": "000x",
    "gspo": "0xxx",
    "dfpo_min": "0000",
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_regimes_tell_known_losses_apart(name):
    hyper = CLIP if name == "gspo" else {}
    row = Row(name, "losses.py", lambda part, whole: getattr(losses, name)(whole, **hyper))
    left = [audit.left_over(row, DRAWS, regime) for regime in audit.REGIMES[:4]]
    assert "".join("0" if x < 1e-9 else "x" for x in left) == KNOWN[name]
    assert all(x < 1e-9 or x > 1e-3 for x in left)


def test_torn_groups_show_a_normaliser_of_the_micro_batch():
    def summed(part, whole):
        return -((part.logp - part.logp_old).exp() * part.adv * part.mask).sum()

    def own_mean(part, whole):
        return summed(part, whole) / part.mask.sum()

    rows = [Row("", "", loss) for loss in (summed, own_mean)]
    several = [DRAWS[8], DRAWS[11]]  # halves of these would leave groups whole
    whole, torn = (
        [audit.left_over(row, several, audit.REGIMES[k]) for row in rows] for k in (1, 4)
    )
    assert max(whole) < 1e-9
    assert torn[0] < 1e-9 and torn[1] > 0.003


def trl(loss_type, low=0.2, high=0.2, level="token", **more):
    """TRL's own, with settings that trl_rows do not have."""
    clip = {"epsilon_low": low, "epsilon_high": high, "loss_type": loss_type}
    settings = clip | {"importance_sampling_level": level} | more
    return lambda part, whole: trl_loss(settings, part, whole)


# A loss of losses.py, and a row of an engine's table or a loss with other settings.
TWINS = {
    "trl": [
        (losses.grpo, {}, "grpo, token"),
        (losses.gspo, CLIP, "grpo, sequence"),
        (losses.dr_grpo, {}, "dr_grpo, token"),
        (losses.token_grpo, CLIP, "dapo, token"),
        (losses.cispo, {}, "cispo, token, epsilon_high 5"),
        (losses.grpo, {"eps_low": 0.1, "eps_high": 0.4}, trl("grpo", 0.1, 0.4)),
        (losses.grpo, {"kl": 0.04}, trl("grpo", beta=0.04, use_bias_correction_kl=False)),
        (losses.dapo, {}, trl("dapo", high=0.28)),
        (losses.gspo, {}, trl("grpo", 3e-4, 4e-4, "sequence")),
        # TRL's epsilon_high is the bound itself, and 0.2 is its default: no weight is above 0.2.
        (losses.cispo, {"eps_high": 0.2 - 1}, trl("cispo")),
    ],
}


@pytest.mark.parametrize("regime", [audit.REGIMES[1], audit.Regime("off-policy", spread=0.5)])
@pytest.mark.parametrize("engine", TWINS)
def test_value_and_gradient_are_those_of_losses(engine, regime):
    pytest.importorskip(engine, reason=f"{engine} is an extra")
    rows = {row.name: row for row in trl_rows()}
    assert all(":" in row.where for row in rows.values())
    for ours, hyper, name in TWINS[engine]:
        theirs = name if callable(name) else rows[name].loss
        for draw in DRAWS:
            b = audit.whole_batch(draw, regime)
            kept = 1.0
            if ours is losses.dapo:  # TRL's mean counts the tokens of groups without an advantage
                groups = torch.as_tensor(draw.adv).view(-1, draw.G)
                mixed = groups.any(1).repeat_interleave(draw.G)  # (N,)
                kept = b.mask[mixed].sum() / b.mask.sum()
            is_whole = callable(name) or draw.N % 2
            parts = [b] if is_whole else audit.micro_batches(b, 2)
            pair = kept * ours(b, **hyper), sum(theirs(part, b) for part in parts)
            grads = [torch.autograd.grad(loss, b.logp)[0] for loss in pair]
            torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)
            assert grads[0].abs().max() > 1e-4


@pytest.mark.parametrize("engine", ("trl", "verl"))
def test_a_missing_engine_is_named_with_its_extra(engine):
    if importlib.util.find_spec(engine):
        pytest.skip("it is installed")
    with pytest.raises(SystemExit) as stop:
        audit.main([engine])
    assert f"pip install {engine}" in stop.value.code
