"""The toy policy's closed forms against autograd and against brute force."""

import itertools
import math

import pytest
import torch

from toy.policy import EOS, Policy, all_histories, kl, pad, tabular

V, HORIZON, PROMPT = 3, 3, (7,)
HISTORIES = all_histories(PROMPT, V, HORIZON)


@pytest.fixture(params=["one feature a history", "dense features"])
def policy(request):
    g = torch.Generator().manual_seed(0)
    if request.param == "dense features":
        phi = {h: torch.randn(4, generator=g, dtype=torch.float64) for h in HISTORIES}.__getitem__
        return Policy(torch.randn(V, 4, generator=g, dtype=torch.float64), phi, HORIZON)
    W = torch.randn(V, len(HISTORIES), generator=g, dtype=torch.float64)
    return Policy(W, tabular([HISTORIES[0], *HISTORIES]), HORIZON)


def brute_force_answers() -> list[tuple]:
    """All sequences of length 1..HORIZON that stop at their first EOS and nowhere else."""
    lengths = range(1, HORIZON + 1)
    sequences = [y for n in lengths for y in itertools.product(range(V), repeat=n)]
    return [y for y in sequences if EOS not in y[:-1] and (y[-1] == EOS or len(y) == HORIZON)]


def test_fisher_is_the_curvature_of_kl_and_the_mean_outer_product(policy):
    for h in HISTORIES[:4]:
        old = policy.probs(h)

        def divergence(w, h=h, old=old):
            new = torch.log_softmax(w.view(V, -1) @ policy.phi(h), 0)
            return (new.exp() * (new - old.log())).sum()

        hessian = torch.autograd.functional.hessian(divergence, policy.W.flatten())
        torch.testing.assert_close(policy.fisher(h), hessian, atol=1e-13, rtol=0)
        outer = [
            torch.outer(g, g) for g in (policy.grad_log_prob(h, a).flatten() for a in range(V))
        ]
        mean = sum(p * x for p, x in zip(old, outer, strict=True))
        torch.testing.assert_close(policy.fisher(h), mean, atol=1e-14, rtol=0)
        direction = torch.ones_like(policy.W).triu()
        expected = float(divergence((policy.W + 0.5 * direction).flatten()))
        assert kl(policy.step(direction, 0.5), policy, h) == pytest.approx(expected, abs=1e-14)


def test_answers_are_all_sequences_and_their_probabilities_sum_to_one(policy):
    answers = dict(policy.answers(PROMPT))
    assert sorted(answers) == sorted(brute_force_answers()) and len(answers) == 1 + 2 + 4 * 3
    assert sum(answers.values()) == pytest.approx(1, abs=1e-14)
    for y, p in answers.items():
        product = math.prod(float(policy.probs(PROMPT + y[:t])[a]) for t, a in enumerate(y))
        assert p == pytest.approx(product, abs=1e-15)


def test_the_expected_reward_and_its_gradient_are_autograds(policy):
    W = policy.W.clone().requires_grad_()
    rewards = {y: (len(y) + 3 * y[0]) % 4 - 1.0 for y in brute_force_answers()}
    J = 0.0
    for y, reward in rewards.items():
        logps = [(W @ policy.phi(PROMPT + y[:t])).log_softmax(0)[a] for t, a in enumerate(y)]
        J += reward * sum(logps).exp()
    (expected,) = torch.autograd.grad(J, W)
    found = policy.expected_reward(PROMPT, rewards.__getitem__)
    assert found == pytest.approx(J.item(), abs=1e-14)
    gradient = policy.grad_expected_reward(PROMPT, rewards.__getitem__)
    torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=0)


def test_log_probs_are_the_logs_of_probs_and_differentiate_to_grad_log_prob(policy):
    policy.W.requires_grad_()
    answers = [(1, 2, 0), (EOS,), (2, 2, 1), (1, EOS)]
    logp, mask = policy.log_probs([PROMPT] * 4, answers)
    assert mask.tolist() == [[True] * 3, [True, False, False], [True] * 3, [True, True, False]]
    assert pad(answers)[0].tolist() == [[1, 2, 0], [0, 0, 0], [2, 2, 1], [1, 0, 0]]
    for i, y in enumerate(answers):
        for t, a in enumerate(y):
            p = policy.probs(PROMPT + y[:t])[a].item()
            assert logp[i, t].item() == pytest.approx(math.log(p), abs=1e-14)
        (gradient,) = torch.autograd.grad(logp[i].sum(), policy.W, retain_graph=True)
        expected = policy.grad_log_prob_answer(PROMPT, y)
        torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=0)
    assert (logp[~mask] == 0).all()


def test_samples_follow_the_exact_distribution(policy):
    exact, n = dict(policy.answers(PROMPT)), 2000
    drawn = policy.sample(PROMPT, n, torch.Generator().manual_seed(1))
    assert set(drawn) <= set(exact)
    for y, p in exact.items():
        assert abs(drawn.count(y) / n - p) < 5 * math.sqrt(p * (1 - p) / n)
