"""The toy policy's closed forms against autograd and against brute force."""

import itertools
import math

import pytest
import torch

from toy.policy import EOS, Policy, all_histories, kl, pad, tabular

V, HORIZON, PROMPT = 3, 3, (7,)


def make(kind: str, seed: int = 0) -> Policy:
    """A policy with one-hot features, or with dense features that all histories share."""
    g = torch.Generator().manual_seed(seed)
    histories = all_histories(PROMPT, V, HORIZON)
    if kind == "tabular":
        phi, d = tabular(histories), len(histories)
    else:
        d = 4
        phi = {h: torch.randn(d, generator=g, dtype=torch.float64) for h in histories}.__getitem__
    return Policy(torch.randn(V, d, generator=g, dtype=torch.float64), phi, HORIZON)


def log_pi(policy: Policy, W: torch.Tensor, h: tuple, a: int) -> torch.Tensor:
    return torch.log_softmax(W @ policy.phi(h), 0)[a]


def brute_force_answers() -> list[tuple]:
    """All sequences of length 1..HORIZON that stop at their first EOS and nowhere else."""
    lengths = range(1, HORIZON + 1)
    sequences = [y for n in lengths for y in itertools.product(range(V), repeat=n)]
    return [y for y in sequences if EOS not in y[:-1] and (y[-1] == EOS or len(y) == HORIZON)]


both = pytest.mark.parametrize("kind", ["tabular", "dense"])


@both
def test_grad_log_prob_is_autograds(kind):
    policy = make(kind)
    W = policy.W.clone().requires_grad_()
    for h, a in itertools.product(all_histories(PROMPT, V, HORIZON), range(V)):
        (expected,) = torch.autograd.grad(log_pi(policy, W, h, a), W)
        torch.testing.assert_close(policy.grad_log_prob(h, a), expected, atol=1e-14, rtol=0)


@both
def test_fisher_is_the_mean_outer_product_and_the_curvature_of_kl(kind):
    policy = make(kind)
    for h in all_histories(PROMPT, V, HORIZON)[:4]:
        outer = torch.zeros_like(policy.fisher(h))
        for a, p in enumerate(policy.probs(h).tolist()):
            g = policy.grad_log_prob(h, a).flatten()
            outer += p * torch.outer(g, g)
        torch.testing.assert_close(policy.fisher(h), outer, atol=1e-14, rtol=0)

        def divergence(w, h=h):
            new, old = torch.log_softmax(w.view(V, -1) @ policy.phi(h), 0), policy.probs(h).log()
            return (new.exp() * (new - old)).sum()

        hessian = torch.autograd.functional.hessian(divergence, policy.W.flatten())
        torch.testing.assert_close(policy.fisher(h), hessian, atol=1e-13, rtol=0)


@both
def test_answers_are_all_sequences_and_their_probabilities_sum_to_one(kind):
    policy = make(kind)
    answers = dict(policy.answers(PROMPT))
    assert sorted(answers) == sorted(brute_force_answers()) and len(answers) == 1 + 2 + 4 * 3
    assert sum(answers.values()) == pytest.approx(1, abs=1e-14)
    for y, p in answers.items():
        product = math.prod(float(policy.probs(PROMPT + y[:t])[a]) for t, a in enumerate(y))
        assert p == pytest.approx(product, abs=1e-15)


@both
def test_gradient_of_the_expected_reward_is_autograds(kind):
    policy = make(kind)
    W = policy.W.clone().requires_grad_()
    rewards = {y: (len(y) + 3 * y[0]) % 4 - 1.0 for y in brute_force_answers()}
    J = 0.0
    for y, reward in rewards.items():
        J += reward * sum(log_pi(policy, W, PROMPT + y[:t], a) for t, a in enumerate(y)).exp()
    (expected,) = torch.autograd.grad(J, W)
    reward_of = rewards.__getitem__
    assert policy.expected_reward(PROMPT, reward_of) == pytest.approx(J.item(), abs=1e-14)
    gradient = policy.grad_expected_reward(PROMPT, reward_of)
    torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=0)


@both
def test_log_probs_are_the_logs_of_probs_and_differentiate_to_grad_log_prob(kind):
    policy = make(kind)
    policy.W.requires_grad_()
    answers = [(1, 2, 0), (EOS,), (2, 2, 1), (1, EOS)]
    logp, mask = policy.log_probs([PROMPT] * 4, answers)
    assert logp.shape == mask.shape == (4, 3) and mask.sum(1).tolist() == [3, 1, 3, 2]
    for i, y in enumerate(answers):
        for t, a in enumerate(y):
            p = policy.probs(PROMPT + y[:t])[a].item()
            assert logp[i, t].item() == pytest.approx(math.log(p), abs=1e-14)
        (gradient,) = torch.autograd.grad(logp[i].sum(), policy.W, retain_graph=True)
        expected = policy.grad_log_prob_answer(PROMPT, y)
        torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=0)
    assert (logp[~mask] == 0).all()


def test_pad_is_a_rectangle_with_a_mask():
    tokens, mask = pad([(1, 2, EOS), (EOS,)])
    assert tokens.tolist() == [[1, 2, 0], [0, 0, 0]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]


def test_samples_follow_the_exact_distribution():
    policy, n = make("tabular"), 4000
    exact = dict(policy.answers(PROMPT))
    drawn = policy.sample(PROMPT, n, torch.Generator().manual_seed(1))
    assert set(drawn) <= set(exact)
    for y, p in exact.items():
        assert abs(drawn.count(y) / n - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_kl_is_zero_at_the_same_parameters_positive_elsewhere_and_first_order_flat():
    policy = make("dense")
    h, g = PROMPT, make("dense", seed=3).W
    assert kl(policy, policy, h) == 0
    p, q = policy.step(g, 0.5).probs(h), policy.probs(h)
    by_hand = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    found = [kl(policy.step(g, eta), policy, h) for eta in (0.5, 1e-3, 5e-4)]
    assert found[0] == pytest.approx(by_hand, abs=1e-15) and by_hand > 0.01
    assert found[1] / found[2] == pytest.approx(4, abs=0.01)


def test_tabular_features_are_one_hot_in_the_order_given_and_ignore_repeats():
    phi = tabular([(1,), (2,), (1,), (3,)])
    features = torch.stack([phi((1,)), phi((2,)), phi((3,))])
    assert torch.equal(features, torch.eye(3, dtype=torch.float64))
    assert len(all_histories(PROMPT, V, HORIZON)) == 1 + 2 + 4
