"""M1 to M8: each function of losses.py is what its paper writes.

A loss that is identically 0 would pass every claim of the form "the sum is 0". So these claims come
first. They compare each function, number by number, with a twin in plain Python that is written
from the paper's definition and shares no code with losses.py.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import torch
from torch import Tensor

from claims.readout import Readout, selected_by_pairs, smaller_half
from claims.trees import Draw, coefficients

# What the papers say a method is. The predicted side of every claim stands on it.
NORMALISER = {
    "reinforce": "budget-mean",
    "grpo": "seq-mean",
    "grpo_symmetric": "budget-mean",
    "dr_grpo": "budget-mean",
    "dapo": "token-mean",
    "gspo": "seq-mean",
    "cispo": "token-mean",
    "dfpo_min": "budget-mean",
    "dfpo_orthogonal": "budget-mean",
    "pos_only": "seq-mean",
    "token_grpo": "token-mean",
    "lopti_low": "token-mean",
    "lopti_high": "token-mean",
}
NEIGHBOURS = ("token_grpo", "lopti_low", "lopti_high")  # of Advantage Reweighting and Lopti
ALL = tuple(name for name in NORMALISER if name not in NEIGHBOURS)
DFPO = ("dfpo_min", "dfpo_orthogonal")
CLIP = defaultdict(lambda: (0.2, 0.2), dapo=(0.2, 0.28), gspo=(3e-4, 4e-4), cispo=(1.0, 4.0))
CLIP |= dict.fromkeys(NEIGHBOURS, (0.2, 0.24))
UNCLIPPED = {"eps_low": math.inf, "eps_high": math.inf}
# Defaults that do not fit a small tree: gspo's clip range is made for long answers, and few shared
# tokens are likelier than lopti's 0.5.
WIDER = {"gspo": {"eps_low": 0.2, "eps_high": 0.28}, "lopti_high": {"eta": 0.0}}


# ---------------- the twin of losses.py


def share(name: str, draw: Draw, i: int) -> float:
    """N times the weight of one token of answer i in the average that the method takes."""
    if NORMALISER[name] == "seq-mean":
        return 1 / draw.T[i]
    if NORMALISER[name] == "budget-mean":
        return 1 / draw.max_tokens
    return draw.N / (draw.tokens_in_use if name == "dapo" else sum(draw.T))


def is_open(name: str, r: float, a: float, low: float, high: float) -> bool:
    """Whether a clipped surrogate lets the gradient through.

    With a min, that depends on the sign of the advantage.
    """
    above = r > 1 + high
    below = r < 1 - low
    if name == "grpo_symmetric":
        return not (above or below)
    return not (above and a > 0 or below and a < 0)


def clip_range(name: str, hyper: dict) -> tuple[float, float]:
    return hyper.get("eps_low", CLIP[name][0]), hyper.get("eps_high", CLIP[name][1])


def surrogate(name: str, r: float, a: float, hyper: dict) -> tuple[float, float]:
    """A clipped surrogate's value for one token, and its slope in log pi."""
    low, high = clip_range(name, hyper)
    if name == "pos_only":
        a = max(a, 0)
    if is_open(name, r, a, low, high):
        return r * a, r * a
    return min(max(r, 1 - low), 1 + high) * a, 0.0


def sequence_weight(name: str, rows: range, i: int, s: list[float], A: list[float]) -> float:
    """DFPO's weight w~_i of answer i, whose group is `rows`; 1 for every other method."""
    if name == "dfpo_min":
        return min(s[j] for j in rows)
    if name == "dfpo_orthogonal":
        norm = sum(A[j] ** 2 for j in rows)
        return s[i] - A[i] * sum(A[j] * s[j] for j in rows) / (norm or 1)
    return 1.0


def formula(name: str, draw: Draw, spread: float, adv: Tensor, hyper: dict) -> tuple[float, Tensor]:
    """Value and coefficients (N, T) of a loss, with two loops over plain numbers."""
    lists = (draw.log_ratio(spread), draw.logp, draw.logp_ref, adv)
    log_r, logp, ref, A = (x.tolist() for x in lists)
    s = draw.sequence_ratios(spread, hyper.get("ratio", "geometric"))
    mean = [sum(row[:T_i]) / T_i for row, T_i in zip(A, draw.T, strict=True)]
    kl = hyper.get("kl", 0.0)
    low, high = clip_range(name, hyper)
    value = 0.0
    c = [[0.0] * len(row) for row in A]
    for i in range(draw.N):
        group = draw.group(i)
        if name == "dapo" and not any(draw.adv[j] for j in group):
            continue
        weight = sequence_weight(name, group, i, s, mean)
        per_token = share(name, draw, i)
        for t in range(draw.T[i]):
            r = math.exp(log_r[i][t])
            if name in ("reinforce", *DFPO):
                slope = weight * A[i][t] if abs(r - 1) <= hyper.get("eps", math.inf) else 0.0
                term = slope * logp[i][t]
            elif name == "cispo":
                slope = min(max(r, 1 - low), 1 + high) * A[i][t]
                term = slope * logp[i][t]
            elif name == "gspo":
                term, slope = surrogate(name, s[i], mean[i], hyper)
            else:
                term, slope = surrogate(name, r, A[i][t], hyper)
            if name in ("lopti_low", "lopti_high"):
                is_low = math.exp(logp[i][t] - log_r[i][t]) < hyper.get("eta", 0.5)
                if is_low != (name == "lopti_low"):
                    term = slope = 0.0
            if kl:
                q = math.exp(ref[i][t] - logp[i][t])
                term -= kl * (q - math.log(q) - 1)
                slope -= kl * (1 - q)
            value -= per_token * term / draw.N
            c[i][t] = per_token * slope
    return value, torch.tensor(c, dtype=torch.float64)


# ---------------- the claims


def m1(module, name, draws, evidence):
    """Each loss, and every one of its token coefficients, is what the paper's formula gives.

    Source: each method's paper (P; dfpo and grpo-symmetric S)

    Every loss is -J, where J is an average over tokens (or answers) of the term in this table.

      method           term of J                                    average       grade
      reinforce        A log pi                                     budget mean   P
      grpo             min(r A, clip(r, 1-e, 1+e) A) - kl k3        seq mean      P
      grpo-symmetric   clip(r, 1-e, 1+e) A, without the min         budget mean   S, definition D
      dr-grpo          as grpo; A is not divided by the deviation   budget mean   P
      dapo             as grpo; e_low = 0.2, e_high = 0.28          token mean    P
      gspo             min(s A, clip(s, 1-e_low, 1+e_high) A)       over answers  P
      cispo            sg[clip(r, 1-e_low, 1+e_high)] A log pi      token mean    P
      dfpo-min         sg[min_j s_j] A log pi                       budget mean   S, loss D
      dfpo-orthogonal  sg[s - (A.s / ||A||^2) A] A log pi           budget mean   S, loss D
      pos-only         as grpo, with max(A, 0) for A                seq mean      P
      token-grpo       as grpo; e_high = 0.24; for AR and Lopti     token mean    P

    seq mean: (1/N) sum_i (1/T_i) sum_t. budget mean: (1/(N L)) sum_i sum_t. token mean: the sum
    over the number of tokens in the whole batch; DAPO leaves out the groups with equal rewards.
    e = 0.2 and kl = 0 unless the table says more. gspo takes the geometric s, e_low = 3e-4 and
    e_high = 4e-4. cispo takes e_low = 1 and e_high = 4, so that r is cut at 5. The KL estimator is
    k3 = q - log q - 1 with q = pi_ref/pi; its slope in log pi is 1 - q. A DFPO group whose
    advantages are all 0 contributes nothing.

    Two things about DFPO are not known: whether its authors take the geometric ratio or the plain
    product, and how they normalise by length. The geometric ratio is our default, because the
    product under- and overflows on long answers. The budget mean is ours, because a factor 1/T_i
    would undo the cancellation (C8).

    The predicted coefficients come from the definition, with two nested loops over plain numbers.
    The min becomes a gate: the slope of min(r A, clip(r) A) in log pi is r A, but it is 0 for a
    winner above 1 + e_high and for a loser below 1 - e_low. The claim is checked on-policy and
    off-policy, with default and with unequal clip ranges, and with advantages that differ from
    token to token. It is also checked with the KL term, with both ratios of DFPO, with two
    thresholds of Lopti, and on batches in which one group has no advantage at all.
    """
    cases = [(0.0, False, {}), (0.6, False, {}), (0.6, True, {})]
    if name not in ("reinforce", *DFPO):
        cases.append((0.6, True, {"eps_low": 0.1, "eps_high": 0.4}))
    if name == "grpo":
        cases.append((0.6, False, {"kl": 0.1}))
    if name == "gspo":
        cases.append((1.5e-3, False, {}))
    if name in DFPO:
        cases.append((0.6, True, {"ratio": "product"}))
    if name in ("lopti_low", "lopti_high"):
        cases.append((0.6, True, {"eta": 0.25}))
    for draw, (spread, reshaped, hyper) in itertools.product(draws, cases):
        adv = draw.rows(draw.adv) * (1 + 0.5 * draw.noise if reshaped else 1)
        batch = draw.batch(module, spread, adv=adv)
        loss = getattr(module, name)(batch, **hyper)
        value, c = formula(name, draw, spread, adv, hyper)
        evidence.equal(c, coefficients(loss, batch))
        evidence.equal(value, loss)


def m2(module, name, draws, evidence):
    """A batch without tokens, or without a difference in reward, gives loss 0 and gradient 0, never
    NaN.

    Source: pitfalls of public implementations (D)

    Two kinds of NaN wait here. 0/0 may come from a mean over no tokens, or from A / ||A||^2 where
    A = 0. inf - inf may come from an exp of a padded position. So two batches are tried. In the
    first all positions are masked and hold garbage. In the second all advantages are 0 while the
    ratios are not 1.
    """
    for draw in draws:
        empty = draw.batch(module, 0.6)
        empty.mask = torch.zeros_like(empty.mask)
        equal = draw.batch(module, 0.6, adv=[0.0] * draw.N)
        for batch in (empty, equal):
            loss = getattr(module, name)(batch)
            evidence.equal(torch.zeros(draw.mask.shape), coefficients(loss, batch))
            evidence.equal(0, loss)


def m3(module, name, draws, evidence):
    """Advantages are centred per group; "std" divides by the unbiased deviation + 1e-4; equal
    rewards give exactly 0.

    Source: GRPO sec. 4.1.2, Dr. GRPO (P)

    The advantage says how much better an answer is than its siblings. With scale "mean" it is
    A_i = R_i - mean(R). With scale "std" that is divided by the group's standard deviation,
    sqrt(sum_j (R_j - mean(R))^2 / (G - 1)) + 1e-4; the divisor G - 1 and the 1e-4 are TRL's. Both
    sum to 0 in each group.

    A group whose rewards are all equal must get exactly 0. Three rewards of 0.1 have a float mean
    that is not 0.1, and a deviation of 1e-17, so the epsilon of the division is not enough: the
    largest reward is compared with the smallest. A group of one answer, rows that are not whole
    groups, whole-number rewards and an unknown scale are refused with a ValueError.
    """
    for draw in draws:
        values = draw.randn(draw.N + 2 * draw.G).tolist()
        rewards = [round(x, 1) if draw.equal_lengths else float(x > 0) for x in values]
        if draw.kind:  # real-valued, and nearly equal where the advantages are small
            rewards = [0.7 + draw.size * x for x in values]
        rewards[: draw.G] = [0.1] * draw.G
        for scale in ("mean", "std"):
            predicted = []
            for i, reward in enumerate(rewards):
                R = [rewards[j] for j in draw.group(i)]
                mean = sum(R) / draw.G
                std = math.sqrt(sum((x - mean) ** 2 for x in R) / (draw.G - 1))
                divisor = std + 1e-4 if scale == "std" else 1
                predicted.append(0 if min(R) == max(R) else (reward - mean) / divisor)
            rewards_tensor = torch.tensor(rewards, dtype=torch.float64)
            measured = module.group_advantages(rewards_tensor, draw.G, scale)
            evidence.equal(predicted, measured)
            evidence.equal([0] * draw.G, measured[: draw.G], tolerance=1e-300)
    evidence.raises(module.group_advantages, torch.zeros(4), 1, "std")
    evidence.raises(module.group_advantages, torch.zeros(5), 2, "std")
    evidence.raises(module.group_advantages, torch.zeros(4), 2, "max")
    evidence.raises(module.group_advantages, torch.zeros(4).long(), 2, "std")


def m4(module, name, draws, evidence):
    """METHODS gives each loss the advantage scale of its paper: only Dr. GRPO leaves the standard
    deviation out.

    Source: each method's paper (P; dfpo and grpo-symmetric S)

    Three independent choices make a method. The first is the scale of its advantages, "mean" or
    "std". The second is its credit rule, if it has one: it reshapes the advantages token by token,
    once per rollout batch and from the old policy alone. The third is its loss functions, with one
    optimiser step each. The methods of M1 have no credit rule and one loss function; M7 has the
    others.
    """
    for key in ALL:
        method = module.METHODS[key.replace("_", "-")]
        scale = "mean" if key == "dr_grpo" else "std"
        evidence.equal(True, method.passes == (getattr(module, key),))
        evidence.equal(True, method.scale == scale and method.credit is None)


def m5(module, name, draws, evidence):
    """A Batch or an OldPolicy in which one tensor has another shape, or whose rows are not whole
    groups, is refused.

    Source: contract of losses.py (D)

    Without this check, PyTorch broadcasts. An (N, 1) advantage, or one column too few, becomes a
    product of another shape and a wrong loss, without a word. Half a group would be compared with
    strangers. A part of a batch, batch[rows], keeps every field, the reference included.
    """
    draw = draws[0]
    if name == "Batch":
        valid = dict(vars(draw.batch(module)))
        for field in ("logp_old", "adv", "mask", "logp_ref"):
            evidence.raises(module.Batch, **valid | {field: valid[field][:, 1:]})
        evidence.raises(module.Batch, **valid | {"group_size": 1})
        evidence.raises(module.Batch, **valid | {"group_size": draw.N + 1})
        evidence.raises(module.Batch, **valid | {"max_tokens": 0})
        evidence.raises(module.Batch, **valid | {"mask": valid["mask"].double()})
        empty = {key: x[:0] if isinstance(x, Tensor) else x for key, x in valid.items()}
        evidence.raises(module.Batch, **empty)
        first = slice(0, draw.G)
        evidence.equal(valid["logp_ref"][first], module.Batch(**valid)[first].logp_ref)
        return
    valid = {"tokens": draw.tokens, "mask": draw.mask, "logp": draw.logp}
    valid |= {"rewards": draw.noise[:, 0], "group_size": draw.G, "kept_mask": draw.mask}
    valid["repaired"] = draw.mask[:, 0]
    valid |= {"hidden": draw.noise[..., None], "head": draw.noise[:, :1]}
    for field in ("mask", "logp", "kept_mask", "hidden"):
        evidence.raises(module.OldPolicy, **valid | {field: valid[field][:, 1:]})
    evidence.raises(module.OldPolicy, **valid | {"rewards": draw.noise[1:, 0]})
    evidence.raises(module.OldPolicy, **valid | {"repaired": draw.mask[1:, 0]})
    evidence.raises(module.OldPolicy, **valid | {"head": draw.noise})
    evidence.raises(module.OldPolicy, **valid | {"group_size": 1})
    evidence.raises(module.OldPolicy, **valid | {"group_size": draw.N + 1})
    module.OldPolicy(**valid)


def m6(module, name, draws, evidence):
    """NTHR multiplies by eta the negative advantages of wrong tokens scoring above tau; its control
    as many, by chance.

    Source: NTHR Eq. 7 (S; rule P)

    The score of a token is s = sum <g, g'> <h, h'> over the tokens of the group's correct answers.
    Here h is the hidden state that predicts a token, and g = e_y - pi(.|h) is its prediction error;
    N3 derives why this product matters. A wrong token with a large s pushes the correct answers
    down. The rule selects the tokens of wrong answers with s > tau, where tau is beta times the
    smallest mean score of a correct answer. It multiplies their negative advantages by eta.

    The defaults are beta = 1 and eta = 2|0.5 - p|, where p is the group's share of correct answers.
    Everything is detached and computed from the old policy, in fp32 at least. It is frozen for all
    minibatches, and the loss's normaliser stays what it was. Right answers, groups all right or all
    wrong, and padding keep their advantages. The control nthr_random multiplies by the same eta as
    many tokens of each wrong answer, drawn at random.

    The paper leaves some choices open, so they are arguments: whether a correct token's score
    counts its product with itself, and whether g lives on the ids that occur in the group's answers
    or on the whole vocabulary. Every reading is compared with scores computed pair by pair.
    """
    options = [{}, {"beta": 0.0, "eta": 0.0}, {"self_term": False, "eta": 0.3}, {"beta": -1.0}]
    options += [{"beta": 0.5, "full_vocab": True}]
    other_draws_differ = []
    for draw, hyper in itertools.product(smaller_half(draws), options):
        readout = Readout(draw)
        adv = torch.where(draw.mask, draw.randn(*draw.mask.shape), -1)
        reading = {key: value for key, value in hyper.items() if key != "eta"}
        selected = selected_by_pairs(readout, **reading)
        if name == "nthr_random":
            measured = module.nthr_random(adv, readout.old(module), **hyper)
            counts = [sum(i == j and adv[j, t] < 0 for j, t in selected) for i in range(draw.N)]
            evidence.equal(torch.tensor(counts), (measured != adv).sum(1))
            evidence.equal(False, bool(((measured != adv) & ~draw.mask).any()))
            # the same generator gives the same tokens
            evidence.equal(measured, module.nthr_random(adv, readout.old(module), **hyper))
            others = [
                module.nthr_random(adv, readout.old(module, seed), **hyper) for seed in range(1, 9)
            ]
            other_draws_differ.append(any(bool((x != measured).any()) for x in others))
            softened = {(i, t) for i, t in (measured != adv).nonzero().tolist()}
        else:
            measured = module.nthr(adv, readout.old(module), **hyper)
            softened = {(i, t) for i, t in selected if adv[i, t] < 0}
        predicted = adv.clone()
        for rows, winners, _ in readout.groups():
            eta = hyper.get("eta", 2 * abs(0.5 - len(winners) / draw.G))
            for i, t in readout.visits(rows):
                predicted[i, t] *= eta if (i, t) in softened else 1
        evidence.equal(predicted, measured)
    evidence.equal(True, any(other_draws_differ) or not other_draws_differ)


def m7(module, name, draws, evidence):
    """METHODS puts the neighbours together: NTHR's credit rules on grpo, the others on grpo's token
    mean, Lopti twice.

    Source: NTHR and AR/Lopti (P)

      method                  credit rule             loss functions
      nthr                    nthr (M6)               grpo
      nthr-random             nthr_random (M6)        grpo
      advantage-reweighting   A2                      token_grpo
      lopti                   none                    lopti_low, then lopti_high (A4)
      ar-lopti                A2                      lopti_low, then lopti_high (A4)

    All of them divide the advantages by the standard deviation. The first pass of Lopti takes the
    improbable tokens. Only NTHR's rules read the hidden states.
    """
    lopti = (module.lopti_low, module.lopti_high)
    token_mean = (module.token_grpo,)
    made_of = {
        "nthr": ((module.grpo,), module.nthr, True),
        "nthr-random": ((module.grpo,), module.nthr_random, True),
        "advantage-reweighting": (token_mean, module.advantage_reweighting, False),
        "lopti": (lopti, None, False),
        "ar-lopti": (lopti, module.advantage_reweighting, False),
    }
    for key, (passes, credit, needs_hidden) in made_of.items():
        method = module.METHODS[key]
        is_right = method.passes == passes and method.credit is credit and method.scale == "std"
        evidence.equal(True, is_right)
        evidence.equal(needs_hidden, method.needs_hidden)


def edit_cost(a: tuple, b: tuple, kept: set[int] | None = None) -> float:
    """Fewest insertions, deletions and substitutions that turn a into b; the textbook's table.

    An edit costs more than all tokens of a together, and one that stays earns 1. With `kept`, the
    positions of a that must meet an equal token of b; all others must change or go.
    """
    price = len(a) + 1
    table = [[price * u for u in range(len(b) + 1)]]
    for t, x in enumerate(a):
        must_stay = kept is not None and t in kept
        may_stay = kept is None or t in kept
        row = [math.inf if must_stay else table[t][0] + price]
        for u, y in enumerate(b):
            stay = table[t][u] - 1 if may_stay and x == y else math.inf
            go = math.inf if must_stay else min(table[t][u], table[t][u + 1]) + price
            row.append(min(stay, go, row[u] + price))
        table.append(row)
    return table[-1][-1]


def m8(module, name, draws, evidence):
    """The kept tokens are those of a shortest edit (Levenshtein), and no shortest edit keeps more.

    Source: Levenshtein alignment (D)

    IBPO asks which tokens of a wrong answer its correction left as they were. The answer is an
    alignment with the fewest insertions, deletions and substitutions, and with the most kept tokens
    among those. The textbook's table of prefix distances gives both numbers. Filled once more under
    a condition, it gives those of an alignment in which a given set of tokens meets equal ones and
    every other token changes or goes. Several alignments can be the best, so their sets are not
    compared; their numbers are.
    """
    for draw in draws:
        order = torch.randperm(draw.N, generator=draw.generator)
        kept_mask = module.kept_tokens(draw.tokens, draw.mask, draw.tokens[order], draw.mask[order])
        evidence.equal(False, bool((kept_mask & ~draw.mask).any()))
        for i, j in enumerate(order.tolist()):
            a = draw.answers[i]
            b = draw.answers[j]
            kept = set(kept_mask[i].nonzero().flatten().tolist())
            evidence.equal(edit_cost(a, b), edit_cost(a, b, kept))
