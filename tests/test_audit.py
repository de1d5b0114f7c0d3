"""What engines/README.md publishes is what TRL's losses do: for whoever chooses settings by it.

TRL's own trainers, called by engines/shipped.py, give the value and gradient of losses.py. The
audit and the table of defaults print what the README has.
"""

from pathlib import Path

import pytest
import torch

import losses
from claims.evidence import Draw
from engines import audit, defaults
from engines.shipped import trl_loss

trl = pytest.importorskip("trl", reason="TRL is an extra: pip install -e '.[trl]'")
README = Path(audit.__file__).with_name("README.md").read_text()


def test_the_audit_is_as_published(capsys):
    audit.main(["trl"])
    printed = capsys.readouterr().out
    assert printed.count("| GRPO, ") > 5 and printed.partition("\n\n")[2] in README


CLIP = dict(eps_low=0.2, eps_high=0.2)  # TRL's default
KL = {"loss_type": "grpo", "beta": 0.04}
TWINS = [
    ({"loss_type": "grpo"}, losses.grpo, {}),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, losses.gspo, CLIP),
    ({"loss_type": "dr_grpo"}, losses.dr_grpo, {}),
    ({}, losses.token_grpo, CLIP),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, losses.cispo, {}),
    ({"loss_type": "sapo"}, losses.sapo, {}),
    (KL, losses.grpo, {"kl": 0.04, "kl_ratio": True}),
    (KL | {"use_bias_correction_kl": False}, losses.grpo, {"kl": 0.04}),
]


@pytest.mark.parametrize("settings, ours, hyper", TWINS, ids=[str(row[0]) for row in TWINS])
def test_value_and_gradient_are_those_of_losses(settings, ours, hyper):
    for draw in (Draw(0, k) for k in range(12)):  # TRL keeps sapo's 1.05 in float32
        batch = audit.tree_batch(draw, drift=2.5)
        pair = ours(batch, **hyper), trl_loss("GRPO", settings, batch)
        grads = [torch.autograd.grad(loss, batch.logp)[0] for loss in pair]
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)
        assert grads[0].abs().max() > 1e-4


def test_the_defaults_are_printed_and_are_trls():
    assert defaults.table("is") in README
    expected = dict(
        loss_type="dapo",  # sums over tokens, divided by the tokens of the batch
        scale_rewards="group",
        epsilon=0.2,
        beta=0.0,
        use_bias_correction_kl=True,
        num_iterations=1,
        vllm_importance_sampling_mode="sequence_mask",
        vllm_importance_sampling_clip_max=3.0,
    )
    given = vars(trl.GRPOConfig(output_dir="", use_cpu=True, bf16=False))
    assert {name: given[name] for name in expected} == expected
