"""To whoever changes train.py: a whole run gives the numbers and the weights of the naive trainer.

In float64, so that "equal" means equal. That each loss is its formula is claim M1.
"""

import copy
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import naive
import pytest
import torch
from conftest import Letters, build, float64, load
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
    "--method nthr --minibatches 1 --offload",
    "--method ibpo --scale mean --minibatches 2 --warm-steps 5 --warm-rows 6 --seed 6 "
    "--repair-references 2",
    "--method dfpo-min --minibatches 1 --epochs 2 --warm-steps 5 --warm-rows 6",
]
GAP = 1e-4  # what `generate` is made to say too much, so that logp_old is known to be read anew


@pytest.fixture(scope="module")
def met():
    """What the runs have met: a test refuses to have compared runs in which little happens."""
    lists = {name: [] for name in ("norms", "truncated", "repair_rate", "clip_share")}
    return lists | {name: set() for name in ("widths", "credit", "right")}


@pytest.mark.parametrize("flags", RUNS)
def test_a_run_is_the_naive_run(flags, tmp_path, monkeypatch, met):
    with float64():
        monkeypatch.setattr(train, "PIECE", 3)  # several pieces of logits
        task, argv = Letters(), [*BASE.split(), *flags.split(), "--out", str(tmp_path / "run")]
        config, _ = train.parse(argv, task)
        policy = train.load_policy(config, task, "scratch")
        policy.model.get_input_embeddings().weight.data *= 1.5  # it repeats itself
        policy.eos = torch.tensor([1, 0, 8, 16, 17])
        twin = copy.deepcopy(policy)
        method = losses.bind(config.method, dict(x.split("=") for x in config.hyper.split()))
        gap = 0.0 if method.needs_scores else GAP  # scores would see it
        is_copied = config.epochs * config.minibatches * len(method.passes) == 1
        # The reference of a KL term is the policy after the warm start, which is not made here.
        monkeypatch.setattr(train, "load_policy", lambda *_: copy.deepcopy(twin))
        found, generate, learn = [], train.generate, train.learn

        def spy(policy, optimizer, rollout, *more):
            found.append((rollout, learn(policy, optimizer, rollout, *more)))
            return found[-1][1]

        def generate_with_a_gap(*args):
            tokens, mask, logp, entropy = generate(*args)
            return tokens, mask, logp + gap * mask, entropy

        monkeypatch.setattr(train, "learn", spy)
        monkeypatch.setattr(train, "generate", generate_with_a_gap)
        train.train(policy, task, method, config)
        steps, expected = naive.train(twin, task, method, config)

        for number, ((rollout, updates), step) in enumerate(zip(found, steps, strict=True), 1):
            rows = zip(rollout.tokens, rollout.mask, strict=True)
            answers = [tokens[mask].tolist() for tokens, mask in rows]
            assert answers == step["answers"], f"step {number}: tokens"
            assert rollout.texts == step["texts"], f"step {number}: texts"
            width = rollout.mask.shape[1]
            assert width == max(map(len, answers)), f"step {number}: columns of padding"
            step["logp_old"] += gap * is_copied * rollout.mask
            for name in ("rewards", "logp_old", "adv"):
                x = getattr(rollout, name)
                x = x * rollout.mask if x.dim() > 1 else x
                close(x, step[name], f"step {number}: {name}")
            tokens_differ = any(
                x[m].unique().numel() > 1 for x, m in zip(x, rollout.mask, strict=True)
            )
            met["credit"] |= {config.method} if tokens_differ else set()
            if (rollout.rewards == 1).any() and expected[number].get("repair_rate"):
                met["right"] |= {config.method}
            close([x["loss"] for x in updates], step["losses"], f"step {number}: losses")
            close([x["grad_norm"] for x in updates], step["norms"], f"step {number}: norms")
            met["norms"] += step["norms"]
            met["widths"] |= {tuple((rollout.prompt_ids >= 0).sum(1).tolist())}
        text = (tmp_path / "run" / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        for number, (line, wanted) in enumerate(zip(lines, expected, strict=True)):
            for key, x in wanted.items():
                if key == "examples":
                    assert line[key] == x, f"step {number}: examples"
                else:
                    close(line[key], x, f"step {number}: {key}")
            if number:
                close(line["max_logp_gap"], gap, f"step {number}: max_logp_gap")
            for key in ("truncated", "repair_rate", "clip_share"):
                met[key] += [line[key]] if key in line else []
        pairs = zip(policy.model.named_parameters(), twin.model.parameters(), strict=True)
        for (name, weight), other in pairs:
            close(weight.detach(), other.detach(), f"weights in the end: {name}")


def close(found, wanted, what: str):
    found, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (found, wanted))
    assert_close(found, wanted, rtol=1e-7, atol=1e-9, msg=lambda m: f"{what}: {m}")


def test_these_runs_met_what_can_go_wrong(met):
    """An update without any push, gradients on both sides of the clip, answers that were cut off
    and some that were not, corrections that failed, prompts of different widths, right answers to
    correct others by, and each credit rule at work."""
    assert 0 in met["norms"] and min(x for x in met["norms"] if x) < 0.51 < max(met["norms"])
    for key in ("truncated", "repair_rate", "clip_share"):
        assert any(0 < x < 1 for x in met[key]), key
    assert any(len(set(widths)) > 1 for widths in met["widths"])
    assert met["credit"] == {"ar-lopti", "nthr", "ibpo"} and "ibpo" in met["right"]


# ---------------- models that have more than the toy's

PROMPTS = [[5, 6, 7], [2], [1, 0, *range(2, 9)], [2], [3, 0, 3]] * 2
FAMILIES = {  # A text is longer than a sliding window. Phi's output layer has a bias.
    "qwen2": {},  # its own generation config has top_k = 1, which must not be used
    "mistral": {"sliding_window": 4},
    "phi": {},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 8, "query_pre_attn_scalar": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_and_scores_what_its_forward_pass_says(family, tmp_path):
    policy, config = load(build(family, tmp_path, **FAMILIES[family])), train.Config(max_tokens=16)
    task = SimpleNamespace(encode=lambda _, items: [x.prompt for x in items])
    task.reward, task.rewards = lambda *_: 0.0, lambda texts, _: [0.0] * len(texts)
    items = [SimpleNamespace(prompt=ids) for ids in PROMPTS]
    rollout = train.ask(policy, task, items, config, 1.5, train.rng(1))
    rows = naive.ask(policy, task, items, config, 1.5, train.rng(1))
    pairs = zip(rollout.tokens, rollout.mask, strict=True)
    assert [tokens[mask].tolist() for tokens, mask in pairs] == [x.answer for x in rows]
    wanted, scored = naive.log_probs(policy, rows, 1.5), train.log_probs(policy, rollout, 1.5)
    for found in (rollout.logp_sampled, scored):
        assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    weight, grads = torch.randn(wanted.shape, generator=train.rng("weight")), []
    for found in (scored, wanted):
        grads.append(torch.autograd.grad((weight * found).sum(), policy.model.parameters()))
    for found, expected in zip(*grads, strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm() + 1e-5


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
    """Six heads of the query share two of the keys; a row is padded. If the numbers moved, both
    model and torch's products would stay as they are."""
    torch.set_float32_matmul_precision("highest")
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
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_long_answer_keeps_its_tokens():
    """difflib would take a token that is frequent in a long answer for junk."""
    assert all(credit.kept_tokens([1] * 200, [2] + [1] * 200))


def test_nthr_reads_the_states_that_predict_the_tokens(scratch, monkeypatch):
    """With the output layer they give the log-probs, at the temperature of sampling."""
    task, given = Letters(), {}
    config = train.Config(group_size=2, max_tokens=5, temperature=0.7, micro_rows=3)
    rollout = train.sample(scratch, task, task.train[:2], 1, config)
    old = losses.OldPolicy(rollout.tokens, rollout.mask, rollout.logp_sampled, rollout.rewards, 2)
    monkeypatch.setattr(credit, "nthr_scores", lambda **x: given.update(x) or (None, None))
    credit.add_scores(old, scratch, rollout, config, train.read_answers)
    logp = (given["hidden"] @ given["head"].T / given["temperature"]).log_softmax(-1)
    logp = logp.gather(2, rollout.tokens[..., None]).squeeze(2) * rollout.mask
    assert_close(logp, rollout.logp_sampled, rtol=1e-4, atol=1e-5)


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
    policy = copy.deepcopy(scratch)
    rollout = train.sample(policy, task, task.train[:2], 1, config)
    method = losses.bind("grpo", {})
    train.assess(policy, None, rollout, method, config)
    nan = replace(method, passes=(lambda batch: batch.logp.sum() * math.nan,))
    with pytest.raises(ValueError, match="step 1"):
        train.learn(policy, train.adamw(policy.model), rollout, nan, 1, config)
    pairs = zip(policy.model.parameters(), scratch.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    rollout.logp_sampled[3, 0] += 0.01
    with pytest.raises(ValueError, match="no update was made"):
        train.assess(policy, None, rollout, method, replace(config, epochs=2))


def test_a_reward_that_is_no_number_is_named(scratch):
    task = Letters()
    task.rewards = lambda texts, items: [0.5, math.nan]
    with pytest.raises(ValueError, match=r"to '23=' is nan"):
        train.ask(scratch, task, task.train[:2], train.Config(), 1.0, train.rng(0))


def test_prompts_walk_through_the_split_and_none_is_too_long(scratch):
    """Each step has the next items of a permutation, and each pass has another one."""
    task, config = Letters(), train.Config(steps=6, prompts=2)
    batches = train.prompt_batches(task, config)
    items = [item for batch in batches for item in batch]
    assert [len(batch) for batch in batches] == [2] * 6
    passes = [items[i : i + 4] for i in (0, 4, 8)]
    assert all(sorted(map(id, x)) == sorted(map(id, task.train)) for x in passes)
    assert len({tuple(map(id, x)) for x in passes}) > 1
    long = [Item("1" * 1000, "", "")]
    assert train.encode(scratch, task, long, replace(config, max_tokens=23)).shape == (1, 1001)
    with pytest.raises(ValueError, match="context of 1024"):
        train.encode(scratch, task, long, replace(config, max_tokens=24))
