"""toy/reuse.py: many policies at once learn what each would learn alone, by plain arithmetic."""

import math

import pytest
import torch

from toy import reuse


def shares(world, w):
    """pi of each place, (3, 2) lists, from one policy's logits, (4, 2) lists."""
    rows = [
        [math.exp(x + world.shared * y) for x, y in zip(row, w[0], strict=True)] for row in w[1:]
    ]
    return [[x / sum(row) for x in row] for row in rows]


def learn_alone(world, w, tokens, rewards, updates, rate):
    """grpo with the baseline J and cancel, one answer after another."""
    w, old = [[*row] for row in w], shares(world, w)
    J = sum(old[0][o] * old[1 + o][a] * q for o in (0, 1) for a, q in ((0, 0.6), (1, 0.4)))
    n, G = len(tokens), world.G
    for _ in range(updates):
        p, push, c = shares(world, w), [[0.0, 0.0] for _ in w], {}
        visits = [(i, h, a) for i, (o, way) in enumerate(tokens) for h, a in ((0, o), (1 + o, way))]
        for i, h, a in visits:
            A, r = rewards[i] - J, p[h][a] / old[h][a]
            inside = r < 1.2 if A > 0 else r > 0.8
            c[i, h] = A * inside / world.lengths[rewards[i] == 0]  # over r
        for i, h, a in visits:
            others = [x for (j, g), x in c.items() if g == h and j // G == i // G and j != i]
            mine = c[i, h] - sum(others) / max(1, len(others))
            for b in (0, 1):
                slope = p[h][a] / old[h][a] * mine * ((a == b) - p[h][b]) / n
                push[1 + h][b] += slope
                push[0][b] += slope * world.shared
        w = [
            [x + rate * y for x, y in zip(*rows, strict=True)] for rows in zip(w, push, strict=True)
        ]
    return w


@pytest.mark.parametrize("world", reuse.WORLDS.values())
def test_many_policies_at_once_learn_what_each_learns_alone(world):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    uniform = torch.rand(3, 2 * world.G, 3, generator=generator, dtype=torch.float64)
    tokens, rewards = reuse.draw(world, weights, uniform)
    rates = torch.tensor([1.0, 4.0, 16.0])
    row = reuse.ROWS["grpo+cancel"]
    ends = reuse.learn(row, world, weights, (tokens, rewards), updates=4, rates=rates)
    for k in range(3):
        given = weights[k].tolist(), tokens[k].tolist(), rewards[k].tolist()
        alone = learn_alone(world, *given, updates=4, rate=float(rates[k]))
        torch.testing.assert_close(ends[k], torch.tensor(alone, dtype=torch.float64))


def test_drawn_answers_earn_the_expected_reward():
    generator = torch.Generator().manual_seed(0)
    for world in reuse.WORLDS.values():
        weights = 2 * torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
        uniform = torch.rand(3, 50000, 3, generator=generator, dtype=torch.float64)
        _, rewards = reuse.draw(world, weights, uniform)
        J = reuse.expected_reward(world, weights)
        torch.testing.assert_close(rewards.mean(1), J, atol=0.01, rtol=0)


@pytest.mark.parametrize(("title", "factor"), [*zip(reuse.WORLDS, (1.48, 0.84), strict=True)])
def test_cancelling_costs_noise_in_one_world_and_saves_it_in_the_other(title, factor):
    world = reuse.WORLDS[title]
    generator = torch.Generator().manual_seed(0)
    start = torch.zeros(4000, 4, 2, dtype=torch.float64)
    uniform = torch.rand(4000, 4 * world.G, 3, generator=generator, dtype=torch.float64)
    drawn, noises = reuse.draw(world, start, uniform), []
    for name in ("grpo", "grpo+cancel"):
        step = reuse.learn(reuse.ROWS[name], world, start, drawn, 1, torch.ones(4000))
        noises.append(reuse.noise(step.flatten(1) @ step.flatten(1).T))
    assert noises[1] / noises[0] == pytest.approx(factor, rel=0.05)


def test_noise_of_four_gradients():
    gradients = torch.tensor([[3.0, 1.0], [3.0, -1.0], [3.0, 1.0], [3.0, -1.0]])  # trace 4/3
    products = gradients @ gradients.T
    assert reuse.noise(products) == pytest.approx((4 / 3) / (9 - 1 / 3))
    assert reuse.format_factor(9 * products, products) == "1 +- 0"  # a length does not matter
