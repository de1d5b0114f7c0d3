"""What engines/README.md publishes is what TRL's losses do: for whoever chooses settings by it.

TRL's own trainers, called by engines/shipped.py, give the value and gradient of losses.py, and its
sampler weights are those whose bias engines/sampler.py measures. The audit, the table of defaults
and the sampler's table print what the README has.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import losses
from claims.evidence import Draw
from engines import audit, defaults, sampler
from engines.shipped import trl_loss, trl_rows

README = Path(audit.__file__).with_name("README.md").read_text()


@pytest.fixture(scope="module")
def rows():
    pytest.importorskip("trl")
    return {row.name: row for row in trl_rows()}


@pytest.mark.parametrize(
    "name",
    [
        "GRPO, loss_type grpo",
        "GRPO, loss_type cispo, epsilon_high 5.0",
        "GRPO, loss_type vespo",
        "GRPO, beta 0.04",
        "RLOO",
    ],
)
def test_the_audit_is_as_published(rows, name):
    row = rows[name]
    assert f"| {name} | {row.source} | {' | '.join(audit.cells(row.loss))} |" in README


def rloo(batch):
    """TRL's: plain product, one clip an answer, and A against the mean of the others."""
    s, adv = losses.sequence_ratio(batch, "product"), losses.trajectory_advantage(batch)
    adv = adv * batch.group_size / (batch.group_size - 1)
    return -torch.minimum(s * adv, s.clamp(0.8, 1.2) * adv).mean()


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
    ("RLOO", rloo, {}),
]


@pytest.mark.parametrize("settings, ours, hyper", TWINS, ids=[str(row[0]) for row in TWINS])
def test_value_and_gradient_are_those_of_losses(rows, settings, ours, hyper):
    kind, settings = ("RLOO", {}) if settings == "RLOO" else ("GRPO", settings)
    for draw in (Draw(0, k) for k in range(12)):  # TRL keeps sapo's 1.05 in float32
        case = audit.tree_case(draw, drift=2.5)
        pair = ours(case.batch, **hyper), trl_loss(kind, settings, case)
        grads = [torch.autograd.grad(loss, case.batch.logp)[0] for loss in pair]
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)
        assert grads[0].abs().max() > 1e-4


def test_trls_weights_are_those_of_the_sampler_table(rows):
    """TRL's gradient with vLLM, over that without, is the weight of the mode."""
    draw = Draw(0, 5)
    plain = audit.tree_case(draw, drift=0.0)
    b = plain.batch
    gap = (0.9 * torch.randn(b.mask.shape, generator=torch.Generator().manual_seed(1))).double()
    log_u = gap.masked_fill(~b.mask, 0.0)
    case = dataclasses.replace(plain, sampler=b.logp_old - log_u)
    (g,) = torch.autograd.grad(rows["GRPO"].loss(plain), b.logp)
    counts = b.mask & (g != 0)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        loss = trl_loss("GRPO", {"vllm_importance_sampling_mode": mode}, case)
        (weighed,) = torch.autograd.grad(loss, b.logp)
        weights = sampler.MODES[mode](log_u)
        torch.testing.assert_close((weighed / g)[counts], weights[counts], rtol=1e-5, atol=1e-9)
        assert (weights == (0 if "mask" in mode else sampler.CAP)).any()


def test_the_full_weight_alone_is_unbiased_and_the_advice_holds():
    found = {tau: sampler.measure(sampler.make_world(tau)) for tau in (0.3, 0.96)}
    for tau, measured in found.items():
        assert measured["the full weight"] == (pytest.approx(0, abs=1e-12), 1)
        cells = [f"{bias:.3f}, {noise:.2f}" for bias, noise in measured.values()]
        for mode, cell in zip(measured, cells, strict=True):
            assert re.search(rf"\| {mode} \|.*{re.escape(cell)}", README), (tau, mode, cell)
    low, middle = found.values()
    assert max(low["sequence_mask"][0], low["sequence_truncate"][0]) < 0.01
    assert 2 * low["token_truncate"][0] > low["none"][0]
    assert 1.5 * middle["sequence_truncate"][0] < middle["sequence_mask"][0]


def test_the_bias_is_that_of_a_plain_loop():
    """One world, answer by answer: the update of a logit is sum mu(y) w (R - mean R) (a - p)."""
    world = sampler.make_world(0.5)
    weights = sampler.MODES["sequence_mask"](world.log_u)
    mean, _ = world.update(weights, world.mu)
    mu, R, p = world.mu[0].tolist(), world.rewards[0].tolist(), world.logits[0].sigmoid().tolist()
    average = sum(m * r for m, r in zip(mu, R, strict=True))
    update = [0.0] * len(p)
    for y in range(2**sampler.T):
        bits = [int(x) for x in f"{y:0{sampler.T}b}"]
        u = world.log_u[0, y].sum().exp().item()
        for t, a in enumerate(bits):
            at = 2**t - 1 + int("0" + "".join(map(str, bits[:t])), 2)
            update[at] += mu[y] * (u if u <= 3 else 0.0) * (R[y] - average) * (a - p[at])
    torch.testing.assert_close(mean[0], torch.tensor(update, dtype=torch.float64))


def test_the_defaults_are_printed_and_are_trls(rows):
    """And each line that is named as their source says so."""
    assert defaults.table("is") in README
    import trl

    folder, (row, *_) = Path(trl.__file__).parents[1], defaults.ROWS
    assert f"{row['trainer']} {row['version']} (ran)" in defaults.table("source")
    named = {"divisor": "loss_type", "std": "scale_rewards", "clip": "epsilon", "KL": "beta"}
    named |= {"another sampler": "vllm_importance_", "updates a batch": "num_iterations"}
    for name, text in named.items():
        file, line = re.match(r"(.*?):(\d+)", row[name]["source"]).groups()
        assert text in (folder / file).read_text().splitlines()[int(line) - 1]

    given = trl.GRPOConfig(output_dir="", use_cpu=True, bf16=False)
    assert (given.loss_type, given.scale_rewards, given.epsilon) == ("dapo", "group", 0.2)
    assert (given.beta, given.use_bias_correction_kl, given.num_iterations) == (0.0, True, 1)
    assert given.vllm_importance_sampling_mode == "sequence_mask"
    assert given.vllm_importance_sampling_clip_max == sampler.CAP
