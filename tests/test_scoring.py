"""Log-probs, entropies, hidden states and gradients are those of whole unpadded forward passes.

Whatever makes scoring fast or small changes nothing: shared prompts, buckets, pieces, chunks.
"""

import itertools
import weakref
from types import SimpleNamespace

import naive
import pytest
import torch
from helpers import float64
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import train
from llm.policy import (
    CHUNK,
    PADDING,
    ChunkedLogProbs,
    Rows,
    length_buckets,
    token_log_probs,
)

PROMPTS = [[5, 60, 61, 62], [70], [80, 81, 82, 83, 84, 85, 86], [70]]


def sample(policy, copies=4, temperature=1.5):
    prompts = [prompt for prompt in PROMPTS for _ in range(copies)]
    return train.generate(policy, prompts, 12, temperature, train.rng(0))[0]


def gradient(policy, logp, weight):
    policy.model.zero_grad()
    (logp * weight).sum().backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def assert_same_gradient(ours, theirs, tolerance=1e-4):
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert (ours[name] - grad).norm() <= tolerance * grad.norm() + 1e-5, name


def test_scoring_is_the_plain_log_softmax_of_the_unpadded_sequence(policy, monkeypatch):
    rows = sample(policy)
    answers = [y[m].tolist() for y, m in zip(rows.tokens, rows.mask, strict=True)]
    mask, weight = rows.mask, torch.randn(rows.mask.shape, generator=train.rng("weight"))
    read = [naive.read(policy, *row, 0.8) for row in zip(rows.prompts, answers, strict=True)]
    full, hidden = (torch.cat(parts) for parts in zip(*read, strict=True))
    logp = full.gather(1, rows.tokens[mask][:, None]).squeeze(1)
    expected = gradient(policy, logp, weight[mask])
    for micro_rows, padding in itertools.product((1, 5, 100), (0, 10_000)):
        monkeypatch.setitem(PADDING, "cpu", padding)
        config = train.Config(temperature=0.8, micro_rows=micro_rows)
        ours = train.log_probs(policy, rows, config, keep_hidden=True)
        wanted = (logp, -(full.exp() * full).sum(-1), hidden)
        for got, x in zip(ours, wanted, strict=True):
            torch.testing.assert_close(got[mask], x, rtol=1e-4, atol=1e-4)
            assert (got[~mask] == 0).all()
        assert [x.requires_grad for x in ours] == [True, False, False]
        assert_same_gradient(gradient(policy, ours[0], weight), expected)
    assert train.log_probs(policy, rows, config)[2] is None


def test_buckets_hold_rows_of_like_length_and_each_row_once(monkeypatch):
    length = torch.randint(1, 13, (60,), generator=train.rng(0))
    mask = torch.arange(12) < length[:, None]
    for size, padding in itertools.product((1, 7, 60, 100), (0, 3, 40, 10_000)):
        monkeypatch.setitem(PADDING, "cpu", padding)
        buckets = length_buckets(mask, size)
        assert torch.cat(buckets).sort().values.tolist() == list(range(60))
        assert (length[torch.cat(buckets)].diff() <= 0).all()  # longest first
        for bucket, following in itertools.zip_longest(buckets, buckets[1:]):
            assert len(bucket) <= size and (length[bucket[0]] - length[bucket]).sum() <= padding
            if following is not None:  # it ends because one row more was too many
                more = torch.cat([bucket, following[:1]])
                assert len(more) > size or (length[bucket[0]] - length[more]).sum() > padding


def test_each_prompt_goes_through_the_model_once(policy):
    rows, calls = sample(policy), []
    hook = policy.model.base_model.register_forward_pre_hook(
        lambda _, args: calls.append(tuple(args[0].shape))
    )
    with torch.no_grad():
        train.log_probs(policy, rows, train.Config(micro_rows=14))
    hook.remove()
    length = rows.mask.sum(1).sort(descending=True).values.tolist()
    assert calls == [(3, 7), (14, length[0] - 1), (2, length[14] - 1)] and length[14] < length[0]


def test_rows_can_be_indexed_together():
    tokens = torch.arange(6).view(3, 2)
    rows = Rows([[1], [2], [3]], tokens, tokens > 1)[torch.tensor([2, 0])]
    assert rows.prompts == [[3], [1]]
    assert torch.equal(rows.tokens, tokens[[2, 0]]) and torch.equal(rows.mask, tokens[[2, 0]] > 1)


# ---------------- memory


def test_the_chunked_output_layer_has_the_gradient_of_the_plain_one(monkeypatch):
    monkeypatch.setitem(CHUNK, "cpu", 1)  # then 512 rows a chunk
    g, n = torch.Generator().manual_seed(0), 1300
    with float64():
        inputs = [torch.randn(*shape, generator=g) for shape in ((n, 4), (7, 4), (7,))]
        grad, targets = torch.randn(n, generator=g), torch.randint(7, (n,), generator=g)
        for bias, temperature in itertools.product((True, False), (1.0, 0.7)):
            ours, plain = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
            head = ours[1], ours[2] if bias else None
            logp, entropy = token_log_probs(ours[0], *head, targets, temperature)
            assert isinstance(logp.grad_fn, ChunkedLogProbs._backward_cls)
            full = F.linear(*plain[:2], plain[2] if bias else None) / temperature
            full = full.log_softmax(-1)
            torch.testing.assert_close(logp, full[range(n), targets])
            torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1))
            assert not entropy.requires_grad
            logp.backward(grad)
            full[range(n), targets].backward(grad)
            for a, b in zip(ours[: 2 + bias], plain, strict=False):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


class LiveNumbers(TorchDispatchMode):
    """Counts the numbers in large new tensors that are alive at a time."""

    def __init__(self, least):
        super().__init__()
        self.least, self.now, self.most = least, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() >= self.least and not is_old(out, args):
            self.now += out.numel()
            self.most = max(self.most, self.now)
            weakref.finalize(out.untyped_storage(), self.end, out.numel())
        return out

    def end(self, size):
        self.now -= size


def is_old(out, args):
    """Whether a tensor shares its numbers with an argument: views and in-place results do."""
    return any(isinstance(x, torch.Tensor) and x.data_ptr() == out.data_ptr() for x in args)


def test_the_chunked_output_layer_holds_two_chunks_of_logits(monkeypatch):
    monkeypatch.setitem(CHUNK, "cpu", 1)
    V, n = 50, 2000
    hidden, weight = torch.randn(n, 3, requires_grad=True), torch.randn(V, 3, requires_grad=True)
    with LiveNumbers(400 * V) as live:  # the last chunk is 464 rows
        logp, _ = token_log_probs(hidden, weight, None, torch.zeros(n, dtype=torch.long), 0.7)
        forward = live.most
        logp.sum().backward()
    assert forward == live.most == 2 * 512 * V


def most_activations(policy, rows, micro_rows):
    """Gradient, and the most numbers that one layer's outputs held at a time on the way there."""
    count = SimpleNamespace(now=0, most=0)

    def born(_, __, output):
        size = output.numel()
        count.now += size
        count.most = max(count.most, count.now)
        weakref.finalize(output, lambda: setattr(count, "now", count.now - size))

    layers = [m for name, m in policy.model.named_modules() if name.endswith(("c_fc", "up_proj"))]
    hooks = [layer.register_forward_hook(born) for layer in layers]
    logp, _, _ = train.log_probs(policy, rows, train.Config(micro_rows=micro_rows))
    found = gradient(policy, logp, torch.ones_like(logp))
    for hook in hooks:
        hook.remove()
    assert len(hooks) == 2 and count.now == 0
    return found, count.most


@pytest.fixture
def bf16(monkeypatch):
    """What a GPU does: the code's own bf16 autocast, on the CPU."""
    real = torch.autocast

    def autocast(device_type, dtype=None, enabled=True, cache_enabled=None):
        enabled = enabled or dtype == torch.bfloat16
        return real(device_type, dtype, enabled=enabled, cache_enabled=cache_enabled)

    monkeypatch.setattr(torch, "autocast", autocast)


def test_more_rows_than_micro_rows_need_no_more_memory_and_have_the_same_gradient(policy):
    rows = sample(policy, copies=10)
    expected, most = most_activations(policy, rows, 40)
    got, least = most_activations(policy, rows, 4)
    assert_same_gradient(got, expected)
    assert least < most / 4


def test_nor_are_more_prompts_than_micro_rows_read_at_once(policy):
    prompts = [[3 + i] * (1 + i % 5) for i in range(20) for _ in range(2)]
    rows, _ = train.generate(policy, prompts, 12, 1.0, train.rng(0))
    sizes, results = [], []
    for micro_rows in (40, 3):
        sizes.clear()
        hook = policy.model.base_model.register_forward_pre_hook(
            lambda _, args: sizes.append(len(args[0]))
        )
        logp, _, _ = train.log_probs(policy, rows, train.Config(micro_rows=micro_rows))
        hook.remove()
        results.append((logp, gradient(policy, logp, torch.ones_like(logp))))
    assert max(sizes) <= 3
    (logp, expected), (got, grad) = results
    torch.testing.assert_close(got, logp, rtol=1e-4, atol=1e-4)
    assert_same_gradient(grad, expected)


def test_so_it_is_in_bf16(policy, bf16):
    rows = sample(policy, copies=10)
    expected, most = most_activations(policy, rows, 40)
    got, least = most_activations(policy, rows, 4)
    assert_same_gradient(got, expected, tolerance=0.05)
    assert least < most / 4


def test_a_graph_keeps_one_bf16_copy_of_the_weights_however_many_buckets(policy, bf16, monkeypatch):
    sizes = {tuple(p.shape) for p in policy.model.parameters() if p.dim() == 2}
    sizes |= {shape[::-1] for shape in sizes}
    copies = []
    for padding in (10_000, 0):
        monkeypatch.setitem(PADDING, "cpu", padding)
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.setdefault(x.data_ptr(), x), lambda x: x
        ):
            logp, _, _ = train.log_probs(policy, sample(policy), train.Config())
        bf16_saved = [x for x in saved.values() if x.dtype == torch.bfloat16]
        copies.append(sum(tuple(x.shape) in sizes for x in bf16_saved))
    assert copies[0] == copies[1] > 0


def test_the_gap_between_sampler_and_scorer_is_that_of_the_worst_token(scratch):
    task, config = train.load_task(train.Config()), train.Config(group_size=2)
    answers = train.sample(scratch, task, task.train[:1], 1, config)
    assert 0 < train.score(scratch, None, answers, config).max_logp_gap < 1e-5
    answers.logp[0, 0] -= 0.01  # a single token
    gap = train.score(scratch, None, answers, config).max_logp_gap
    assert gap == pytest.approx(0.01, abs=1e-4)
