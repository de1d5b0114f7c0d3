"""What the exercises ask beyond the contract of losses.py: X2..X10, claims like those of
../claims.py.

`L` is the file under test. Measured is what the student wrote; predicted comes from autograd through losses.py.
"""

from __future__ import annotations

import torch

import losses
from claims.cancellation import UNCLIPPED, WIDER
from claims.trees import ascent, coefficients


def ask(condition: bool, message: str):
    if not condition:
        raise AssertionError(message)


def one_token(ratio: float, advantages: list[float], **named) -> losses.Batch:
    """G answers that are the same token, which has the ratio given."""
    logp = torch.full((len(advantages), 1), -1.0, dtype=torch.float64, requires_grad=True)
    adv = torch.tensor(advantages, dtype=torch.float64)[:, None]
    ratio = torch.tensor(ratio, dtype=torch.float64)
    return losses.Batch(
        logp, logp.detach() - ratio.log(), adv, logp < 0, len(advantages), 1, **named
    )


def x2(L, name, draws, e):
    """The shared token's gradient is (rho/G) sum_i A_i, which is 0 for centred advantages whatever
    rho is. exercise 2 (D)

    grad r = r grad log pi, r = rho for all visitors. Compared with autograd through dr_grpo without
    its clip.
    """
    for d in draws:
        for shift in (0.0, 0.7):
            adv, rho = [a + shift for a in d.adv[: d.G]], 0.5 + abs(float(d.randn(1)))
            batch = one_token(rho, adv)
            e.equal(
                coefficients(losses.dr_grpo(batch, **UNCLIPPED), batch).sum() / d.G,
                L.shared_token_gradient(rho, adv),
            )


def x3(L, name, draws, e):
    """The gate is shut for winners above the range and for losers below it; so one side of a shared
    token is left. exercise 3 (D)

    Compared with autograd through dr_grpo. The sum at a shared token is claim C6.
    """
    for d in draws:
        for ratio in (0.5, 0.75, 0.85, 1.0, 1.15, 1.3, 2.0):
            adv, bounds = d.adv[: d.G], {"eps_low": 0.2, "eps_high": 0.25}
            batch = one_token(ratio, adv)
            c = coefficients(losses.dr_grpo(batch, **bounds), batch)[:, 0].tolist()
            if name == "gate_is_open":
                for a, x in zip(adv, c, strict=True):
                    said = bool(L.gate_is_open(ratio, a, **bounds))
                    ask(
                        not a or said == (x != 0),
                        f"r = {ratio}, A = {a:.2f}, range 0.8 to 1.25: you say {said}",
                    )
                    e.equal(0, 0)
            else:
                e.equal(sum(c), L.left_at_a_shared_token(ratio, adv, **bounds))


def x5(L, name, draws, e):
    """The mean over each answer's tokens leaves (1/G) sum_i A_i / T_i, which is 0 only by accident
    if lengths differ. exercise 5 (D)

    Claim C8. The accident: A_i/T_i must sum to zero although A_i already does; lengths know nothing
    of rewards.
    """
    if name == "an_accident":
        lengths, adv = L.an_accident()
        ask(len(lengths) == len(adv) == 4, "four lengths and four advantages are asked for")
        ask(
            len(set(lengths)) > 1 and min(lengths) >= 1,
            "the lengths must be at least 1, and not all equal",
        )
        ask(all(abs(a) > 1e-3 for a in adv), "no advantage may be 0")
        ask(abs(sum(adv)) < 1e-9, f"the advantages sum to {sum(adv):g}, not to 0")
        left = sum(a / T for a, T in zip(adv, lengths, strict=True))
        e.equal(0, left)
        return ask(abs(left) < 1e-9, f"sum A/T is {left:g}, not 0")
    for d in draws:
        batch = d.batch(losses)
        c = coefficients(losses.grpo(batch), batch)
        rows = range(d.G)
        e.equal(
            c[rows, 0].sum() / d.G,
            L.left_by_the_length([d.T[i] for i in rows], [d.adv[i] for i in rows]),
        )


def x7(L, name, draws, e):
    """Adv-Orthogonal cancels on the whole group only: a pair with A_i + A_j = 0 can be left with
    w~_i A_i + w~_j A_j. exercise 7 (D)

    Claim C10: w~_i - w~_j is not 0 in general, since the projection subtracts 2 kappa A_i between
    the two.
    """
    w, adv, (i, j) = L.blind_spot()
    ask(
        len(w) == len(adv) == 4 and i != j,
        "four weights, four advantages and two places are asked for",
    )
    ask(abs(sum(adv)) < 1e-9, f"the advantages sum to {sum(adv):g}, not to 0")
    ask(abs(adv[i] + adv[j]) < 1e-9, f"the pair's advantages sum to {adv[i] + adv[j]:g}, not to 0")
    new = losses.adv_orthogonal(torch.tensor([w]).double(), torch.tensor([adv]).double())[
        0
    ].tolist()
    left = new[i] * adv[i] + new[j] * adv[j]
    ask(abs(left) > 0.1, f"the pair is left with {left:.3g}: it cancels, or nearly")
    e.equal(0, 0)


def x9(L, name, draws, e):
    """Equal weights k do not leave the odds of equal-reward answers alone: k_a n_a - k_b n_b + (k_b
    - k_a) x does. exercise 9 (D)

    Claim C14. Eq. 5 is right if n_a = n_b. Compared with autograd in one softmax.
    """

    def slope(z, k_a, k_b):
        logp = z.log_softmax(-1)
        g = ascent(-(k_a * logp[0] + k_b * logp[1]), z)
        return (ascent(-(logp[0] - logp[1]), z) * g).sum()

    if name == "counterexample":
        p = torch.tensor(L.counterexample(), dtype=torch.float64)
        ask(len(p) == 3 and bool((p > 0).all()), "three positive probabilities are asked for")
        e.equal(1, p.sum())
        change = slope(p.log().requires_grad_(), 0.5, 0.5).item()
        return ask(
            abs(change) > 0.1,
            f"with these the log-odds change by {change:.3g} per eta: more than 0.1 is asked for",
        )
    for d in draws:
        z, (k_a, k_b) = d.randn(4).requires_grad_(), d.randn(2).tolist()
        a, b = (ascent(-z.log_softmax(-1)[i], z) for i in (0, 1))
        products = [float(x) for x in (a @ a, b @ b, a @ b)]
        e.equal(slope(z, k_a, k_b), L.change_of_log_odds(k_a, k_b, *products))


def x10(L, name, draws, e):
    """Your weights have no tax at any node, and the expected update is nearer to the gradient than
    Min-Replace's. exercise 10 (open)

    A weight that is constant within a group has no tax (C15). Which constant, decides the bias
    (C16).
    """

    def yours(s, adv):
        return L.weight(s, adv).detach()

    entries = {
        "yours": lambda batch: losses._dfpo(batch, "geometric", yours),
        "reinforce": losses.reinforce,
        "min_replace": losses.dfpo_min,
        "adv_orthogonal": losses.dfpo_orthogonal,
        "gspo": lambda batch: losses.gspo(batch, **WIDER["gspo"]),
    }
    found = {}
    for key, loss in entries.items():
        taxes, cosines = [], []
        for d in draws:
            batch = d.batch(losses, 0.6)
            A = torch.tensor(d.adv, dtype=torch.float64)
            taxes.append(losses.learning_tax(coefficients(loss(batch), batch), A, d.nodes, d.mask))
        for world in (d.all_groups for d in draws[::4]):
            batch = world.batch(losses, off_policy=True)
            g = ascent(loss(batch), world.policy.W)
            cosines.append(float((g * world.exact).sum() / g.norm() / world.exact.norm()))
        found[key] = [sum(taxes) / len(taxes), sum(cosines) / len(cosines)]
    e.cells = [[key, *values] for key, values in found.items()]
    (tax, cosine), theirs = found["yours"], found["min_replace"][1]
    e.equal(0, tax)
    ask(
        tax < 1e-9,
        f"your weights have a tax of {tax:.3g}: what is your weight at a node that only some answers visit?",
    )
    ask(cosine > theirs, f"no tax, but your cosine is {cosine:.4f} and Min-Replace's {theirs:.4f}")
