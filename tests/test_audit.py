"""engines/audit.py: the regimes tell known losses apart, and an engine's figures are those of the
same loss here."""

import importlib.util

import pytest

import losses
from claims.trees import Draw
from engines import audit
from engines.shipped import Row, trl_rows, verl_rows

DRAWS = [Draw(0, k) for k in range(12)]
GSPO = dict(eps_low=0.2, eps_high=0.2)  # the engines' default clip range
KNOWN = {  # 0 cancels, x does not, in the first four regimes: theory's audit table
    "reinforce": "0000",
    "grpo": "0x0x",
    "token_grpo": "000x",
    "gspo": "0xxx",
    "dfpo_min": "0000",
}
TWINS = {  # rows of the engines that are a loss of losses.py
    "trl": {
        "grpo, token": ("grpo", {}),
        "grpo, sequence": ("gspo", GSPO),
        "dr_grpo, token": ("dr_grpo", {}),
        "dapo, token": ("token_grpo", {}),
        "cispo, token, epsilon_high 5": ("cispo", {}),
    },
    "verl": {
        "vanilla, token-mean": ("token_grpo", {}),
        "vanilla, seq-mean-token-mean": ("grpo", {}),
        "gspo, seq-mean-token-mean": ("gspo", GSPO),
        "cispo, token-mean": ("cispo", GSPO),
        "gpg, token-mean": ("reinforce", {}),
    },
}


def ours(name, **hyper):
    return Row(name, "losses.py", lambda part, whole: getattr(losses, name)(whole, **hyper))


def cells(row):
    return [audit.left_over(row, DRAWS, regime) for regime in audit.REGIMES]


@pytest.mark.parametrize("name", KNOWN)
def test_the_regimes_tell_known_losses_apart(name):
    left = cells(ours(name, **(GSPO if name == "gspo" else {})))[:4]
    assert "".join("0" if x < 1e-9 else "x" for x in left) == KNOWN[name]
    assert all(x < 1e-9 or x > 1e-3 for x in left)


def test_torn_groups_show_a_normaliser_of_the_micro_batch():
    def summed(part, whole):
        return -((part.logp - part.logp_old).exp() * part.adv * part.mask).sum()

    def own_mean(part, whole):
        return summed(part, whole) / part.mask.sum()

    rows = [Row("", "", loss) for loss in (summed, own_mean)]
    whole, torn = ([audit.left_over(row, DRAWS, audit.REGIMES[k]) for row in rows] for k in (1, 4))
    assert max(whole) < 1e-9
    assert torn[0] < 1e-9 and torn[1] > 0.003


@pytest.mark.parametrize("engine", TWINS)
def test_an_engines_figures_are_those_of_the_same_loss_here(engine):
    pytest.importorskip(engine, reason=f"{engine} is an extra")
    rows = {row.name: row for row in {"trl": trl_rows, "verl": verl_rows}[engine]()}
    for name, (twin, hyper) in TWINS[engine].items():
        assert cells(rows[name]) == pytest.approx(cells(ours(twin, **hyper)), rel=1e-6, abs=1e-9)
    assert all(":" in row.where for row in rows.values())


def test_a_missing_engine_is_named_with_its_extra():
    missing = [name for name in TWINS if importlib.util.find_spec(name) is None]
    for name in [*missing, "openrlhf"]:
        with pytest.raises(SystemExit) as stop:
            audit.main([name])
        expected = f"pip install -e '.[{name}]'" if name in missing else "trl, verl"
        assert str(stop.value.code).startswith("error: ") and expected in stop.value.code
