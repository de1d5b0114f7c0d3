"""To whoever changes train.py: a whole run gives the numbers and the weights of the naive trainer.

The toy's in float64, so that "equal" means equal. That each loss is its formula is claim M1.
"""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace

import naive
import pytest
import torch
from conftest import Letters, build, float64, load, metrics
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import AttentionInterface

import losses
import train
from llm import credit, models
from tasks.task import Item

BASE = "--steps 2 --prompts 2 --group-size 4 --max-tokens 7 --temperature 0.7 --eval-items 4"
BASE += " --eval-samples 3 --warm-steps 0 --width 8 --lr 0.05 --grad-clip 0.51 --seed 5"
RUNS = [
    "--minibatches 2 --epochs 3 --micro-rows 3 --hyper kl=0.1",
    "--minibatches 1 --scale mean --micro-rows 5",  # learned from once, and not read apart
    "--method dr-grpo --minibatches 2 --prefix-baseline --max-tokens 40",  # no answer is so long
    "--method ar-lopti --minibatches 1",  # two losses, and a credit rule
    "--method nthr --minibatches 1 --offload --steps 3",  # the split begins anew
    "--method ibpo --scale mean --minibatches 2 --warm-steps 5 --warm-rows 6 --seed 6 "
    "--repair-references 2",
    "--method dfpo-min --minibatches 1 --epochs 2 --warm-steps 5 --warm-rows 6",
    "--model qwen2 --lr 1e-6 --seed 6",
    "--model mistral --lr 1e-6 --seed 6",
    "--model phi --lr 1e-6 --seed 6",
    "--model gemma2 --lr 1e-6",
]
FAMILIES = {  # A text is longer than a sliding window. Phi's output layer has a bias.
    "qwen2": {},  # its own generation config has top_k = 1, which must not be used
    "mistral": {"sliding_window": 4},
    "phi": {},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 8, "query_pre_attn_scalar": 8},
}
GAP = 1e-4  # what `generate` is made to say too much, so that logp_old is known to be read anew


@pytest.fixture(scope="module")
def met():
    """The lines of all runs: a test refuses to have compared runs in which little happens."""
    return []


@pytest.mark.parametrize("flags", RUNS)
def test_a_run_is_the_naive_run(flags, tmp_path, monkeypatch, met):
    task, argv = Letters(), [*BASE.split(), *flags.split(), "--out", str(tmp_path / "run")]
    config, _ = train.parse(argv, task)
    kind, is_exact = config.model, config.model == "scratch"
    path = kind if is_exact else build(kind, tmp_path / kind, **FAMILIES[kind])
    policy = train.load_policy(config, task, path)
    if is_exact:
        policy.model.double().get_input_embeddings().weight.data *= 1.5  # it repeats itself
    policy.eos = torch.tensor([1, 0, 8, 16, 17])
    twin, generate = copy.deepcopy(policy), train.generate
    method = losses.bind(config.method, dict(x.split("=") for x in config.hyper.split()))
    gap = 0.0 if method.needs_scores else GAP  # scores would see it

    def generate_with_a_gap(*args):
        tokens, mask, logp, entropy = generate(*args)
        return tokens, mask, logp + gap * mask, entropy

    monkeypatch.setattr(train, "PIECE", 3)  # several pieces of logits
    monkeypatch.setattr(train, "generate", generate_with_a_gap)
    # The reference of a KL term is the policy after the warm start, which is not made here.
    monkeypatch.setattr(train, "load_policy", lambda *_: copy.deepcopy(twin))
    with float64() if is_exact else nullcontext():
        train.train(policy, task, method, config)
        expected = naive.train(twin, task, method, config)

    rtol, lines = 1e-7 if is_exact else 1e-4, metrics(tmp_path / "run")

    def same(found, wanted, what: str):
        found, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (found, wanted))
        assert_close(found, wanted, rtol=rtol, atol=rtol / 10, msg=lambda m: f"{what}: {m}")

    for number, (line, wanted) in enumerate(zip(lines, expected, strict=True)):
        assert line.pop("examples", 0) == wanted.pop("examples", 0), f"step {number}: examples"
        wanted |= {"max_logp_gap": gap} if number else {}
        for key, x in wanted.items():
            same(line[key], x, f"step {number}: {key}")
    pairs = zip(policy.model.named_parameters(), twin.model.parameters(), strict=True)
    for (name, weight), other in pairs:
        same(weight.detach(), other.detach(), f"weights in the end: {name}")
    met += lines


def test_these_runs_met_what_can_go_wrong(met):
    """Gradients on both sides of the clip, groups of equal rewards and others, answers that were
    cut off and others, and corrections that failed."""
    norms = [line["grad_norm"] for line in met if "grad_norm" in line]
    assert min(norms) < 0.51 < max(norms)
    for key in ("equal_groups", "truncated", "repair_rate", "clip_share"):
        assert any(0 < line.get(key, 0) < 1 for line in met), key


def test_a_draw_is_exact_in_a_large_vocabulary():
    """The numbers lie just above the edges of the tokens. Sums in fp32 would take others."""
    p = torch.randn(1, 150_000, generator=train.rng(0)).softmax(-1)
    tokens = torch.arange(5000, 150_000, 5000)
    cdf = p[0].double().cumsum(0)
    uniform = (cdf[tokens - 1] / cdf[-1] + 1e-11)[:, None]
    assert torch.equal(train.sample_token(p.expand(len(tokens), -1), uniform), tokens)


def test_a_model_that_is_read_wrongly_is_refused(tmp_path, monkeypatch):
    """As one would be that changes its logits behind the output layer, or that gives a nan."""
    path = build("gemma2", tmp_path, **FAMILIES["gemma2"])
    real = train.output_logits
    for wrong in (lambda logits: logits * 1.01, lambda logits: logits * torch.nan):
        monkeypatch.setattr(train, "output_logits", lambda *x, f=wrong: f(real(*x)))
        with pytest.raises(ValueError, match="train.py reads this model wrongly"):
            load(path)


def test_attention_by_products_is_torchs_own_or_is_not_taken(tmp_path, monkeypatch):
    """Six heads of the query share two of the keys; a row is padded. If the numbers moved, the
    model would keep torch's."""
    q, k, v = (torch.randn(2, heads, 5, 4, generator=train.rng(heads)) for heads in (6, 2, 3))
    v = v[:, :2]
    mask = torch.ones(5, 5).tril().expand(2, 1, 5, 5).clone()
    mask[0, :, 1:, 0] = 0
    wide = (x.repeat_interleave(3, 1) for x in (k, v))
    wanted = scaled_dot_product_attention(q, *wide, mask > 0, scale=0.3).transpose(1, 2)
    for limit in (models.LONG, 0):
        monkeypatch.setattr(models, "LONG", limit)
        assert_close(models.attend(None, q, k, v, (1 - mask) * -1e9, 0.3)[0], wanted)
    AttentionInterface.register("grouped", lambda *x, **y: (models.attend(*x, **y)[0] * 1.1, None))
    try:
        policy = load(build("qwen2", tmp_path))
    finally:
        AttentionInterface.register("grouped", models.attend)
    assert not policy.quick and policy.model.config._attn_implementation == "sdpa"


def test_a_correction_keeps_what_it_does_not_change():
    """difflib would take a token that is frequent in a long answer for junk."""
    kept = credit.kept_tokens([5, 6, 7, 7, 1], [5, 9, 7, 8, 7, 1])
    assert kept == [True, False, True, True, True]
    assert all(credit.kept_tokens([1] * 200, [2] + [1] * 200))


# ---------------- where a wrong number would look right


def test_a_sampler_that_is_not_the_scorer_ends_a_run():
    """On a CPU above a thousandth of a nat; above ten of them at a temperature of 0.1."""
    config, low = train.Config(), train.Config(temperature=0.1)
    for gap, settings in ((5e-4, config), (5e-3, low)):
        assert train.check_gap(torch.tensor([0.0, -gap]), settings) == pytest.approx(gap)
    for gap, settings in ((2e-3, config), (2e-2, low), (math.nan, config)):
        with pytest.raises(ValueError, match="no update was made"):
            train.check_gap(torch.tensor([0.0, -gap]), settings)


def test_a_wrong_number_makes_no_update(scratch):
    """A loss that is a nan; a log-prob of one answer that was sampled otherwise than it is scored,
    even one that nothing would push."""
    task, config = Letters(), train.Config(group_size=2, minibatches=1, max_tokens=5)
    policy, method = copy.deepcopy(scratch), losses.bind("grpo", {})
    rollout = train.sample(policy, task, task.train[:2], 1, config)
    train.assess(policy, None, rollout, method, config)
    method.passes = (lambda batch: batch.logp.sum() * math.nan,)
    with pytest.raises(ValueError, match="step 1"):
        train.learn(policy, train.adamw(policy.model), rollout, method, 1, config)
    assert torch.equal(*(x.model.lm_head.weight for x in (policy, scratch)))
    rollout.logp_sampled[3, 0] += 0.01
    with pytest.raises(ValueError, match="no update was made"):
        train.assess(policy, None, rollout, method, replace(config, epochs=2))


def test_no_prompt_is_too_long_for_the_model(scratch):
    long = [Item("1" * 1000, "", "")]
    assert train.encode(scratch, Letters(), long, train.Config(max_tokens=23)).shape == (1, 1001)
    with pytest.raises(ValueError, match="context of 1024"):
        train.encode(scratch, Letters(), long, train.Config(max_tokens=24))
