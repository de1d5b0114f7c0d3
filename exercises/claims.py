"""X2, X3, X5, X7, X9 and X10: what the exercises ask beyond the contract of losses.py.

These are claims like those of ../claims/. Measured is what the student wrote. Predicted comes from
autograd, through losses.py.
"""

from __future__ import annotations

import torch

import losses
from claims import Claim
from claims.formulas import UNCLIPPED, WIDER
from claims.trees import ascent, coefficients


def ask(condition: bool, message: str):
    if not condition:
        raise AssertionError(message)


def parts(answer, count: int, asked: str):
    """A tuple or list of so many parts."""
    ask(isinstance(answer, (tuple, list)) and len(answer) == count, asked)
    return answer


def one_token(ratio: float, advantages: list[float], **named) -> losses.Batch:
    """G answers that are the same token, which has the ratio given."""
    logp = torch.full((len(advantages), 1), -1.0, dtype=torch.float64, requires_grad=True)
    adv = torch.tensor(advantages, dtype=torch.float64)[:, None]
    logp_old = logp.detach() - torch.tensor(ratio, dtype=torch.float64).log()
    return losses.Batch(logp, logp_old, adv, logp < 0, len(advantages), 1, **named)


def x2(module, name, draws, evidence):
    """The shared token's gradient is (rho/G) sum_i A_i, which is 0 for centred advantages whatever
    rho is.

    Source: exercise 2 (D)

    Each answer adds (1/G) A_i grad r at the shared token, and grad r = r grad log pi with r = rho
    for all of them. The result is compared with autograd through dr_grpo without its clip.
    """
    for draw in draws:
        for shift in (0.0, 0.7):
            adv = [a + shift for a in draw.adv[: draw.G]]
            rho = 0.5 + abs(float(draw.randn(1)))
            batch = one_token(rho, adv)
            c = coefficients(losses.dr_grpo(batch, **UNCLIPPED), batch)
            evidence.equal(c.sum() / draw.G, module.shared_token_gradient(rho, adv))


def x3(module, name, draws, evidence):
    """The gate is shut for winners above the range and for losers below it; so one side of a shared
    token is left.

    Source: exercise 3 (D)

    Claim C6 derives the sum at a shared token. Both functions are compared with autograd through
    dr_grpo.
    """
    bounds = {"eps_low": 0.2, "eps_high": 0.25}
    for draw in draws:
        adv = draw.adv[: draw.G]
        for ratio in (0.5, 0.75, 0.85, 1.0, 1.15, 1.3, 2.0):
            batch = one_token(ratio, adv)
            c = coefficients(losses.dr_grpo(batch, **bounds), batch)[:, 0].tolist()
            if name == "left_at_a_shared_token":
                evidence.equal(sum(c), module.left_at_a_shared_token(ratio, adv, **bounds))
                continue
            for a, x in zip(adv, c, strict=True):
                said = bool(module.gate_is_open(ratio, a, **bounds))
                message = f"r = {ratio}, A = {a:.2f}, range 0.8 to 1.25: you say {said}"
                ask(not a or said == (x != 0), message)
                evidence.equal(0, 0)


def x5(module, name, draws, evidence):
    """The mean over each answer's tokens leaves (1/G) sum_i A_i / T_i, which is 0 only by accident
    if lengths differ.

    Source: exercise 5 (D)

    This is claim C8. It is an accident because the A_i / T_i must sum to zero although the A_i
    already do, and lengths know nothing of rewards.
    """
    if name == "an_accident":
        asked = "lists of four lengths and four advantages are asked for"
        lengths, adv = (parts(x, 4, asked) for x in parts(module.an_accident(), 2, asked))
        ask(min(lengths) >= 1, "a length is at least 1")
        ask(len(set(lengths)) > 1, "all lengths are equal: then sum A/T is 0 because sum A is")
        ask(all(abs(a) >= 0.1 for a in adv), "every |A| must be at least 0.1")
        ask(abs(sum(adv)) < 1e-9, f"the advantages sum to {sum(adv):g}, not to 0")
        left = sum(a / T_i for a, T_i in zip(adv, lengths, strict=True))
        evidence.equal(0, left)
        ask(abs(left) < 1e-9, f"what is left, sum A/T, is {left:g}, not 0")
        return
    for draw in draws:
        batch = draw.batch(losses)
        c = coefficients(losses.grpo(batch), batch)[: draw.G, 0]
        measured = module.left_by_the_length(draw.T[: draw.G], draw.adv[: draw.G])
        evidence.equal(c.sum() / draw.G, measured)


def x7(module, name, draws, evidence):
    """Adv-Orthogonal cancels on the whole group only: a pair with A_i + A_j = 0 can be left with
    w~_i A_i + w~_j A_j.

    Source: exercise 7 (D)

    This is claim C10. The pair is left with (w~_i - w~_j) A_i. With k = A.w / ||A||^2 the
    projection subtracts k A_i from w_i and k A_j = -k A_i from w_j. So it changes the difference of
    the two weights by 2 k A_i, and the result is not 0 in general.
    """
    asked = "lists of four weights, four advantages and two places, 0 to 3, are asked for"
    w, adv, places = parts(module.blind_spot(), 3, asked)
    w, adv = (parts(x, 4, asked) for x in (w, adv))
    i, j = parts(places, 2, asked)
    ask(i != j and {i, j} <= {0, 1, 2, 3}, "the two places are different, and from 0 to 3")
    ask(abs(sum(adv)) < 1e-9, f"the advantages sum to {sum(adv):g}, not to 0")
    ask(abs(adv[i] + adv[j]) < 1e-9, f"the pair's advantages sum to {adv[i] + adv[j]:g}, not to 0")
    weights, advantages = (torch.tensor([x], dtype=torch.float64) for x in (w, adv))
    transformed = losses.adv_orthogonal(weights, advantages)[0].tolist()
    left = transformed[i] * adv[i] + transformed[j] * adv[j]
    ask(abs(left) > 0.1, f"the pair is left with {left:.3g}: that is not more than 0.1")
    evidence.equal(0, 0)


def x9(module, name, draws, evidence):
    """Equal weights k do not leave the odds of equal-reward answers alone: k_a n_a - k_b n_b + (k_b
    - k_a) x does.

    Source: exercise 9 (D)

    This is claim C14. Eq. 5 is right if n_a = n_b. Both functions are compared with autograd in one
    softmax.
    """

    def slope(z, k_a, k_b):
        logp = z.log_softmax(-1)
        g = ascent(-(k_a * logp[0] + k_b * logp[1]), z)
        return (ascent(-(logp[0] - logp[1]), z) * g).sum()

    if name == "counterexample":
        asked = "a list of three positive probabilities is asked for"
        p = torch.tensor(parts(module.counterexample(), 3, asked), dtype=torch.float64)
        ask(bool((p > 0).all()), asked)
        ask(abs(float(p.sum()) - 1) < 1e-9, f"the probabilities sum to {float(p.sum()):g}, not 1")
        change = slope(p.log().requires_grad_(), 0.5, 0.5).item()
        message = f"with these probabilities the log-odds change by {change:.3g} per eta"
        ask(abs(change) > 0.1, f"{message}: more than 0.1 is asked for, up or down")
        evidence.equal(0, 0)
        return
    for draw in draws:
        z = draw.randn(4).requires_grad_()
        k_a, k_b = draw.randn(2).tolist()
        a, b = (ascent(-z.log_softmax(-1)[i], z) for i in (0, 1))
        products = [float(x) for x in (a @ a, b @ b, a @ b)]
        evidence.equal(slope(z, k_a, k_b), module.change_of_log_odds(k_a, k_b, *products))


def x10(module, name, draws, evidence):
    """Your weights have no tax at any node, and the expected update is nearer to the gradient than
    Min-Replace's.

    Source: exercise 10 (open)

    A weight that is constant within a group has no tax (C15). Which constant it is decides the bias
    (C16).
    """

    def yours(s, adv):
        w = module.weight(s, adv).detach()
        ask(w.shape == s.shape, f"your weights have shape {tuple(w.shape)}, and s {tuple(s.shape)}")
        return w

    entries = {
        "yours": lambda batch: losses._dfpo(batch, "geometric", yours),
        "reinforce": losses.reinforce,
        "min_replace": losses.dfpo_min,
        "adv_orthogonal": losses.dfpo_orthogonal,
        "gspo": lambda batch: losses.gspo(batch, **WIDER["gspo"]),
    }
    results = {}
    for key, loss in entries.items():
        tax = mean_tax(loss, draws)
        cosine = mean_cosine(loss, draws)
        results[key] = (tax, cosine)
        evidence.rows.append([key, f"{tax:.3f}", f"{cosine:.4f}"])
    tax, cosine = results["yours"]
    their_cosine = results["min_replace"][1]
    evidence.equal(0, tax)
    message = f"your weights have a tax of {tax:.3g}"
    ask(tax < 1e-9, f"{message}: are they equal at a node that only some answers visit?")
    message = f"there is no tax, but the cosine is {cosine:.4f}"
    larger = cosine > their_cosine + 1e-9
    ask(larger, f"{message}: it must be larger than Min-Replace's {their_cosine:.4f}")


def mean_tax(loss, draws) -> float:
    taxes = []
    for draw in draws:
        batch = draw.batch(losses, 0.6)
        A = torch.tensor(draw.adv, dtype=torch.float64)
        c = coefficients(loss(batch), batch)
        taxes.append(losses.learning_tax(c, A, draw.nodes, draw.mask))
    return sum(taxes) / len(taxes)


def mean_cosine(loss, draws) -> float:
    """Between the exact gradient and the expected off-policy update, over some toys."""
    cosines = []
    for world in (draw.all_groups for draw in draws[::4]):
        g = ascent(loss(world.batch(losses, off_policy=True)), world.policy.W)
        cosines.append(float((g * world.exact).sum() / g.norm() / world.exact.norm()))
    return sum(cosines) / len(cosines)


EXERCISES = (  # about functions that only exercises/ asks for
    Claim("X2", x2, ("shared_token_gradient",)),
    Claim("X3", x3, ("gate_is_open", "left_at_a_shared_token")),
    Claim("X5", x5, ("left_by_the_length", "an_accident")),
    Claim("X7", x7, ("blind_spot",)),
    Claim("X9", x9, ("counterexample", "change_of_log_odds")),
    Claim("X10", x10, ("weight",)),
)
