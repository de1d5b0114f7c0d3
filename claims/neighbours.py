"""What NTHR, Advantage Reweighting, Lopti and IBPO claim about the same gradients: N1..N7, A1..A5, I1..I3, M6..M8.

A claim is written as in claims.py. What is new here is the hidden state h in R^d that predicts a token, and the
prediction error g = e_y - pi(.|h): in the output embeddings W, log pi(y|h) has the gradient g h^T. So two tokens help
or hurt each other by <g, g'> <h, h'>. Correct means reward 1; p is the group's share of correct answers.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from functools import lru_cache

import torch
from torch import Tensor

from claims.trees import Draw, ascent, coefficients
from toy.policy import Policy, pad

GROUPS = 200  # sampled ones, for the claims that are about shares


class Readout:
    """The answers of a draw, as a policy with dense features read them, at temperature 0.7. Padding holds garbage."""

    def __init__(self, d: Draw):
        features = defaultdict(lambda: d.randn(4))
        self.d, self.head = (
            d,
            d.randn(d.vocabulary + 5, 4),
        )  # (V, 4), five ids that occur in no answer
        policy = Policy(self.head, features.__getitem__, d.longest)
        logp, _ = policy.log_probs(d.prompts, d.answers)
        self.logp = torch.full(d.mask.shape, 1e4, dtype=torch.float64)
        self.hidden = torch.full((*d.mask.shape, 4), math.nan, dtype=torch.float64)
        self.g, self.h = {}, {}  # (i, t) -> prediction error (V,), hidden state (4,)
        for i, (x, y) in enumerate(zip(d.prompts, d.answers, strict=True)):
            for t, token in enumerate(y):
                self.h[i, t] = self.hidden[i, t] = policy.phi(x + y[:t])
                self.g[i, t], self.logp[i, t] = -policy.probs(x + y[:t]), logp[i, t]
                self.g[i, t][token] += 1
        R = (d.randn(d.N) > 0).double().tolist()
        R[:3] = [1.0, 0.0, 0.5][: d.G]
        if d.N > d.G:
            R[d.G : 2 * d.G] = [R[d.G]] * d.G if d.equal_lengths else [0.5, *R[d.G + 1 : 2 * d.G]]
        self.R = R

    def old(self, L, seed: int = 0):
        d, rewards = self.d, torch.tensor(self.R, dtype=torch.float64)
        generator = torch.Generator().manual_seed(d.seed + seed)
        return L.OldPolicy(
            d.tokens, d.mask, self.logp, rewards, d.G, 0.7, self.hidden, 0.7 * self.head, generator
        )

    def groups(self):
        """(rows, correct rows, wrong rows) of every group."""
        for start in range(0, self.d.N, self.d.G):
            rows = range(start, start + self.d.G)
            yield rows, [i for i in rows if self.R[i] == 1], [i for i in rows if self.R[i] != 1]

    def mixed(self):
        """The groups with correct and with wrong answers."""
        return (group for group in self.groups() if group[1] and group[2])

    def visits(self, rows) -> list[tuple[int, int]]:
        return [(i, t) for i in rows for t in range(self.d.T[i])]

    def sums(self, rows, winners, ids, self_term: bool = True) -> Tensor:
        """sum of <g, g'> <h, h'> over the winners' tokens, for each of the rows' tokens; g on the ids given. (K,)"""
        g, h = (torch.stack([x[at] for at in self.visits(rows)]) for x in (self.g, self.h))
        g = g[:, sorted(ids)]
        pairs = (g @ g.T) * (h @ h.T)  # (K, K), one pair of tokens after another, no matrix M
        if not self_term:
            pairs.fill_diagonal_(0)
        return pairs[:, [i in winners for i, _ in self.visits(rows)]].sum(1)

    def ids(self, rows) -> set[int]:
        return {a for i in rows for a in self.d.answers[i]}


def scores_by_pairs(r: Readout, full_vocab: bool, self_term: bool = True) -> dict:
    """(i, t) -> score, mixed groups only."""
    found = {}
    for rows, winners, _ in r.mixed():
        ids = range(len(r.head)) if full_vocab else r.ids(rows)
        found |= zip(r.visits(rows), r.sums(rows, winners, ids, self_term).tolist(), strict=True)
    return found


def selected_by_pairs(
    r: Readout, beta: float = 1.0, self_term: bool = True, full_vocab: bool = False
) -> set:
    scores, chosen = scores_by_pairs(r, full_vocab, self_term), set()
    for _, winners, losers in r.mixed():
        tau = beta * min(sum(scores[at] for at in r.visits([i])) / r.d.T[i] for i in winners)
        chosen |= {at for at in r.visits(losers) if scores[at] > tau}
    return chosen


def small(draws: list[Draw]) -> list[Draw]:
    """Loops over pairs of a group's tokens are slow: the half of the draws with the smaller groups."""
    return sorted(draws, key=lambda d: sum(d.T) * d.G / d.N)[: (len(draws) + 1) // 2]


# ---------------- M: each function is what its paper writes


def m6(L, name, draws, e):
    """NTHR multiplies by eta the negative advantages of wrong tokens scoring above tau; its control as many, by chance.
    NTHR Eq. 7 (S; rule P)

    s = sum over the tokens of correct answers of <g, g'> <h, h'>, here pair by pair; tau = beta
    times the smallest mean score of a correct answer; eta = 2|0.5 - p| by default. With the self
    term counted or not, g on the ids that occur or on all, beta and eta their defaults or not.
    Right answers, groups all right or all wrong, and padding keep what they had.
    """
    options = [{}, {"beta": 0.0, "eta": 0.0}, {"self_term": False, "eta": 0.3}, {"beta": -1.0}]
    options += [{"beta": 0.5, "full_vocab": True}]
    moved = []
    for d, hyper in itertools.product(small(draws), options):
        r = Readout(d)
        adv = torch.where(d.mask, d.randn(*d.mask.shape), -1)
        eta, reading = hyper.get("eta"), {k: v for k, v in hyper.items() if k != "eta"}
        predicted, chosen = adv.clone(), selected_by_pairs(r, **reading)
        if name == "nthr_random":
            measured = L.nthr_random(adv, r.old(L), **reading)
            counts = [sum(i == j and adv[j, t] < 0 for j, t in chosen) for i in range(d.N)]
            e.equal(torch.tensor(counts), (measured != adv).sum(1))
            e.equal(False, bool(((measured != adv) & ~d.mask).any()))
            e.equal(
                measured, L.nthr_random(adv, r.old(L), **reading)
            )  # the same generator, the same draw
            others = [L.nthr_random(adv, r.old(L, seed), **reading) for seed in range(1, 9)]
            moved.append(any(bool((x != measured).any()) for x in others))
            e.equal(True, bool(((measured == adv) | (measured == 0)).all()))
            continue
        for rows, winners, _ in r.groups():
            for i, t in r.visits(rows):
                factor = 2 * abs(0.5 - len(winners) / d.G) if eta is None else eta
                predicted[i, t] *= factor if (i, t) in chosen and adv[i, t] < 0 else 1
        e.equal(predicted, L.nthr(adv, r.old(L), **hyper))
    e.equal(True, any(moved) or not moved)


def m7(L, name, draws, e):
    """METHODS puts the neighbours together: NTHR's credit rules on grpo, the others on grpo's token mean, Lopti twice.
    theory, sections 4 and 5 (P, S)

    All of them divide the advantages by the deviation. Lopti's first pass is the improbable
    tokens'; nthr needs the hidden states.
    """
    lopti, token = (L.lopti_low, L.lopti_high), (L.token_grpo,)
    made_of = {
        "nthr": ((L.grpo,), L.nthr, True),
        "nthr-random": ((L.grpo,), L.nthr_random, True),
        "advantage-reweighting": (token, L.advantage_reweighting, False),
        "lopti": (lopti, None, False),
        "ar-lopti": (lopti, L.advantage_reweighting, False),
    }
    for key, (passes, credit, needs_hidden) in made_of.items():
        method = L.METHODS[key]
        e.equal(True, method.passes == passes and method.credit is credit and method.scale == "std")
        e.equal(needs_hidden, method.needs_hidden)


# ---------------- N: negative gradients


def n1(L, name, draws, e):
    """Binary rewards have two advantages: (1-p)/sqrt(p(1-p)) for the right, -p/sqrt(p(1-p)) for the wrong.
    NTHR Lemma 4.2 (P); unbiased deviation (D)

    The population variance of a binary reward is p(1-p). The unbiased deviation is larger by
    sqrt(G/(G-1)), so both advantages shrink by sqrt((G-1)/G); the epsilon of 1e-4 is what is left.
    """
    for G in range(2, 17):
        for right in range(1, G):
            rewards = torch.tensor([1.0] * right + [0.0] * (G - right), dtype=torch.float64)
            p, sd = right / G, math.sqrt(right / G * (1 - right / G))
            both = [(1 - p) / sd] * right + [-p / sd] * (G - right)
            e.equal(both, L.group_advantages(rewards, G, "mean") / sd)
            unbiased = sd * math.sqrt(G / (G - 1))
            shrunk = [a * math.sqrt((G - 1) / G) * unbiased / (unbiased + 1e-4) for a in both]
            e.equal(shrunk, L.group_advantages(rewards, G, "std"))


def n2(L, name, draws, e):
    """Right and wrong answers weigh the same: p+ N+ = p- N-. That is per answer; per token the longer side weighs more.
    NTHR (P); per token (D)

    sum_i A_i = 0 is just that. With a constant normaliser each token brings A_i / L, so a side
    weighs by its tokens, sum T_i A_i ("left", relative to sum T_i |A_i|).
    """
    for d in draws:
        R = [1.0, 0.0, *(d.randn(d.G - 2) > 0).double().tolist()]
        A = L.group_advantages(torch.tensor(R, dtype=torch.float64), d.G, "std").tolist()
        winners, losers = (
            [a for a, reward in zip(A, R, strict=True) if reward == side] for side in (1, 0)
        )
        e.equal(max(winners) * len(winners), -min(losers) * len(losers))
        weights = [T * a for T, a in zip(d.T, A, strict=False)]
        e.left(sum(weights) / sum(map(abs, weights)))


def terms(
    g: Tensor, h: Tensor, W: Tensor, place: list, R: list[float], plus: float, minus: float
) -> list[list[float]]:
    """The four terms of N3 for every correct answer; place[k] = (i, t) of token k. g (K, V), h (K, d), W (V, d)."""
    gg, hh, ww = (x @ x.T for x in (g, h, g @ W))
    found = []
    for i in (i for i, reward in enumerate(R) if reward == 1):
        one = two = three = four = 0.0
        for k, (a, t) in enumerate(place):
            if a != i:
                continue
            for m, (b, u) in enumerate(place):
                both = float(gg[k, m] * hh[k, m])
                one, two = (one + plus * both, two) if R[b] == 1 else (one, two + minus * both)
                if t == u == 0 and R[b] == 1 or k == m and t > 0:
                    three += plus * float(ww[k, m])
                elif t == u == 0:
                    four += minus * float(ww[k, m])
        found.append([one, two, three, four])
    return found


def n3(L, name, draws, e):
    """A step changes the log-likelihood of a correct answer by (I) - (II) + (III) - (IV), exactly to first order.
    NTHR Theorem 4.4 (P; terms D)

    Every hidden state and W are free parameters; only h_x, which predicts all first tokens, is
    shared. The gradient of log pi(y_k) is g h^T in W and W^T g in h. The flow ascends sum_j A_j log
    pi(y_j), so d/dt ln pi(y_i) is the inner product of its gradient with that of y_i. W's part
    gives <g, g'> <h, h'> over all pairs, with +p+ for correct partners (I) and -p- for wrong ones
    (II). The hidden states' part gives ||W^T g||^2 for the token itself and, at h_x, the pairs of
    first tokens, again p+ with correct (III), p- with wrong ones (IV). GWHES = (II) - (I) says how
    lazy the likelihood is; its mean stands in the table below.
    """
    rows = []
    for d in draws:
        G, width, R = d.G, d.mask.shape[1], [1.0, 0.0, *(d.randn(d.G - 2) > 0).double().tolist()]
        tokens, mask, p = d.tokens[:G], d.mask[:G], sum(R) / G
        plus, minus = (1 - p) / math.sqrt(p * (1 - p)), p / math.sqrt(p * (1 - p))
        W, h_x, h_rest = (
            d.randn(*n).requires_grad_() for n in ((d.vocabulary, 3), (1, 1, 3), (G, width - 1, 3))
        )
        hidden = torch.cat([h_x.expand(G, 1, 3), h_rest], 1)
        logp = (hidden @ W.T).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        A = torch.tensor([plus if reward else -minus for reward in R], dtype=torch.float64)
        batch = L.Batch(logp, logp.detach(), A[:, None].expand(G, width), mask, G, d.max_tokens)
        free = (W, h_x, h_rest)
        flow = [G * d.max_tokens * ascent(L.reinforce(batch), x) for x in free]
        measured = [
            sum(
                (ascent(-logp[i][mask[i]].sum(), x) * v).sum()
                for x, v in zip(free, flow, strict=True)
            )
            for i in range(G)
            if R[i]
        ]
        place = [(i, t) for i in range(G) for t in range(d.T[i])]
        at = tuple(zip(*place, strict=True))
        g = torch.eye(d.vocabulary, dtype=torch.float64)[tokens[at]] - (hidden[at] @ W.T).softmax(
            -1
        )
        found = terms(g.detach(), hidden[at].detach(), W.detach(), place, R, plus, minus)
        e.equal(
            [one - two + three - four for one, two, three, four in found], torch.stack(measured)
        )
        rows += [[*four_terms, four_terms[1] - four_terms[0]] for four_terms in found]
    e.cells = torch.tensor(rows).mean(0).tolist()


def n4(L, name, draws, e):
    """One matrix a group replaces the double sum: sum_{i,k''} <g, g'> <h, h'> = g^T M h with M = sum of g' h'^T.
    NTHR Eq. 7 (S), matrix (D)

    <g, g'> <h, h'> = g^T (g' h'^T) h, and the middle adds up once for all tokens. For G answers of
    T tokens that is G T (|V*| d) products in place of (G T)^2 (|V*| + d).
    """
    for d, full_vocab, self_term in zip(
        small(draws),
        itertools.cycle((True, False)),
        itertools.cycle((True, True, False)),
        strict=False,
    ):
        r = Readout(d)
        predicted = torch.zeros(d.mask.shape, dtype=torch.float64)
        for at, s in scores_by_pairs(r, full_vocab, self_term).items():
            predicted[at] = s
        e.equal(predicted, L.nthr_scores(r.old(L), self_term, full_vocab))
        old = r.old(L)
        old.hidden = old.hidden.bfloat16().requires_grad_()
        scores = L.nthr_scores(old)
        e.equal(True, scores.dtype == torch.float32 and not scores.requires_grad)


def n5(L, name, draws, e):
    """Summed over the correct answers, (II) is p- times the summed scores of the wrong tokens: 0 is a natural boundary.
    NTHR Theorem 4.4 and Eq. 7 (D)

    Both are the sum over pairs of one correct and one wrong token. A wrong token with s > 0 pushes
    the correct answers down, one with s < 0 lifts them.
    """
    for d in small(draws):
        r = Readout(d)
        scores = L.nthr_scores(r.old(L), True, True)
        for rows, winners, losers in r.mixed():
            p = len(winners) / d.G
            minus, place = p / math.sqrt(p * (1 - p)), r.visits(rows)
            g, h = (torch.stack([x[at] for at in place]) for x in (r.g, r.h))
            place = [(i - rows[0], t) for i, t in place]
            found = terms(g, h, r.head, place, [r.R[i] for i in rows], 0.0, minus)
            total = sum(float(scores[i, : d.T[i]].sum()) for i in losers)
            e.equal(sum(two for _, two, _, _ in found), minus * total)


def n6(L, name, draws, e):
    """Keeping g on the ids V* that occur takes pi.pi' over the others off each <g, g'>: it can only lower it.
    NTHR, cost (D)

    e_y lies in V*, so outside of it g = -pi and the product is positive. The score changes by that
    times <h, h'>, which has either sign. The softmax keeps its full denominator; renormalised on V*
    it would be another policy's.
    """
    for d in small(draws):
        r = Readout(d)
        change = L.nthr_scores(r.old(L), True, False) - L.nthr_scores(r.old(L), True, True)
        for rows, winners, _ in r.mixed():
            lost = r.sums(rows, winners, set(range(len(r.head))) - r.ids(rows))
            e.equal(-lost, torch.stack([change[at] for at in r.visits(rows)]))


class Sampled:
    """A group of 8 answers that a random policy with dense features gave, some right and some wrong."""

    G, V = 8, 8

    def __init__(self, generator: torch.Generator):
        def randn(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        common, features = randn(6), {}

        def phi(h):  # hidden states of a language model have much in common
            return features.setdefault(h, common + randn(6))

        self.policy = Policy((0.5 * randn(self.V, 6)).requires_grad_(), phi, 6)
        while True:
            self.answers = self.policy.sample((0,), self.G, generator)
            self.R = [float(sum(y) % 3 == 0) for y in self.answers]
            if 0 < sum(self.R) < self.G:
                break
        tokens, self.mask = pad(self.answers)
        prompts = [(0,)] * self.G
        self.logp, _ = self.policy.log_probs(prompts, self.answers)
        self.probs = self.logp.detach().exp()
        hidden, self.norms = (
            torch.zeros(*tokens.shape, 6, dtype=torch.float64),
            torch.zeros(tokens.shape).double(),
        )
        for i, y in enumerate(self.answers):
            for t, token in enumerate(y):
                hidden[i, t] = phi((0, *y[:t]))
                self.norms[i, t] = self.policy.grad_log_prob(
                    (0, *y[:t]), token
                ).norm()  # ||g|| ||h||
        rewards, head = torch.tensor(self.R, dtype=torch.float64), self.policy.W.detach()
        self.readout = (tokens, self.mask, self.logp.detach(), rewards, self.G, 1.0, hidden, head)

    def old(self, L):
        return L.OldPolicy(
            *self.readout, gen=torch.Generator().manual_seed(int(self.readout[0].sum()))
        )

    def adv(self, L) -> Tensor:
        A = L.group_advantages(torch.tensor(self.R, dtype=torch.float64), self.G, "std")
        return A[:, None] * self.mask

    def batch(self, L, adv: Tensor):
        return L.Batch(self.logp, self.logp.detach(), adv, self.mask, self.G, 6)

    def winners_likelihood(self, policy: Policy) -> Tensor:
        """Mean log-likelihood of the correct answers."""
        right = [y for y, reward in zip(self.answers, self.R, strict=True) if reward]
        return policy.log_probs([(0,)] * len(right), right)[0].sum() / len(right)


@lru_cache(1)
def sampled(seed: int) -> list[Sampled]:
    generator = torch.Generator().manual_seed(seed)
    return [Sampled(generator) for _ in range(GROUPS)]


def n7(L, name, draws, e):
    """Where NTHR selects anything, its step (eta = 0) mostly leaves the right answers likelier than grpo's or random's.
    NTHR (P); formula (D)

    Delta(x) is the change of the correct answers' mean log-likelihood by one step on the group.
    On-policy, grpo gives wrong token k of answer j the coefficient A_j / T_j. Without it the slope
    of Delta grows by |A_j| s / (G N+ T_j), s its score. The formula is checked on every group; the
    table has the shares of 200 sampled groups, to first order and after a step of size 1. They are
    shares of a toy, not a law: a tau below 0 selects tokens that help, and a long step also moves
    what the first order leaves out.
    """
    lazy, wins = [], []
    for group in sampled(draws[0].seed):
        adv, old = group.adv(L), group.old(L)
        slopes, deltas = {}, {}
        before = group.winners_likelihood(group.policy)
        rise = ascent(-before, group.policy.W)
        rules = {"grpo": adv, "nthr": L.nthr(adv, old, eta=0.0), "random": L.nthr_random(adv, old)}
        for rule, reshaped in rules.items():
            g = ascent(L.grpo(group.batch(L, reshaped)), group.policy.W)
            slopes[rule] = float((rise * g).sum())
            deltas[rule] = (group.winners_likelihood(group.policy.step(g, 1.0)) - before).item()
        scores, gain = L.nthr_scores(old, True, True), 0.0
        for i, t in ((adv != rules["nthr"]).nonzero()).tolist():
            gain -= float(adv[i, t] * scores[i, t]) / group.G / len(group.answers[i]) / sum(group.R)
        e.equal(gain, slopes["nthr"] - slopes["grpo"])
        lazy.append(deltas["grpo"] < 0)
        if (adv != rules["nthr"]).any():
            wins.append(
                [x["nthr"] > x[rule] for x in (slopes, deltas) for rule in ("grpo", "random")]
            )
    shares = torch.tensor(wins).double().mean(0).tolist()
    e.cells = [sum(lazy) / GROUPS, len(wins) / GROUPS, *shares]
    e.equal(True, min(shares) > 0.5)


# ---------------- A: low-probability tokens


def a1(L, name, draws, e):
    """In the logits a token's gradient is between sqrt(V/(V-1)) and sqrt(2) times 1 - pi, V the size of the vocabulary.
    AR/Lopti Prop. 4.2, softmax part (P)

    ||e_o - pi||^2 = (1 - pi_o)^2 + sum_{v != o} pi_v^2. The others sum to 1 - pi_o, so their
    squares sum to at least (1 - pi_o)^2/(V - 1), when they are equal, and at most (1 - pi_o)^2,
    when one has it all. Both ends are reached.
    """
    for d in draws:
        V = d.vocabulary
        sharp, flat = torch.zeros(2, V, dtype=torch.float64)
        sharp[1], sharp[2:], flat[0] = d.randn(1), -800.0, d.randn(1)
        for case, z in (("", d.randn(V)), ("flat", flat), ("sharp", sharp)):
            z.requires_grad_()
            logp = z.log_softmax(-1)[:1].expand(2, 1)  # two answers that are the same token
            batch = L.Batch(
                logp,
                logp.detach(),
                torch.tensor([[1.5], [0.0]]).double(),
                logp < 1,
                2,
                d.max_tokens,
            )
            norm = float(ascent(L.reinforce(batch), z).norm()) * 2 * d.max_tokens / 1.5
            rest = 1 - math.exp(logp[0].item())
            low, high = math.sqrt(V / (V - 1)) * rest, math.sqrt(2) * rest
            e.equal(min(max(norm, low), high), norm)
            if case:
                e.equal({"flat": low, "sharp": high}[case], norm)


def a2(L, name, draws, e):
    """Advantage Reweighting: A_{i,t} = [alpha pi_old + 1 - alpha] A_i, whatever the sign of A_i.
    AR/Lopti Eq. 4 (P)

    A token at pi = 0.1 has 9 times the gradient of one at 0.9 (A1, equal shapes); with alpha = 0.1,
    0.2, 0.3 that is 8.3, 7.5 and 6.8 (D). The probability is the old policy's and carries no
    gradient.
    """
    for d, alpha in itertools.product(draws, (None, 0.0, 0.1, 1.0)):
        r = Readout(d)
        hyper, a = ({}, 0.3) if alpha is None else ({"alpha": alpha}, alpha)
        adv = d.fill(d.rows(d.adv) * (1 + 0.5 * d.noise), 0.0)
        predicted = [(a * math.exp(float(r.logp[i, t])) + 1 - a) * float(adv[i, t]) for i, t in r.h]
        measured = L.advantage_reweighting(adv, r.old(L), **hyper)
        e.equal(predicted, measured[tuple(zip(*r.h, strict=True))])
        logp = r.logp.clone().requires_grad_()
        frozen = L.OldPolicy(d.tokens, d.mask, logp, torch.tensor(r.R), d.G)
        e.equal(False, L.advantage_reweighting(adv, frozen, **hyper).requires_grad)
    e.raises(L.advantage_reweighting, adv, frozen, 1.5)
    pair = torch.tensor([[0.1, 0.9]] * 2, dtype=torch.float64)
    old = L.OldPolicy(torch.ones(2, 2).long(), pair > 0, pair.log(), torch.tensor([1.0, 0.0]), 2)
    for alpha, ratio in ((0.0, 9.0), (0.1, 8.3), (0.2, 7.5), (0.3, 6.8)):
        norms = L.advantage_reweighting(torch.ones_like(pair), old, alpha)[0] * (1 - pair[0])
        e.equal(ratio, round(float(norms[0] / norms[1]), 1))


def a3(L, name, draws, e):
    """Low-probability tokens carry more of the gradient than their number says; Advantage Reweighting takes some of it.
    AR/Lopti (P)

    The gradient of one token in W has the norm |c| ||e_o - pi|| ||h||: compared token by token with
    autograd's. The table has the share of their sum by the token's probability, on 200 sampled
    groups, before and after A2.
    """
    by_decile = torch.zeros(3, 10, dtype=torch.float64)  # tokens, gradient before, gradient after
    for number, group in enumerate(sampled(draws[0].seed)):
        adv, mask = group.adv(L), group.mask
        decile = (10 * group.probs[mask]).long().clamp(max=9)
        by_decile[0] += decile.bincount(minlength=10)
        for row, a in ((1, adv), (2, L.advantage_reweighting(adv, group.old(L)))):
            sizes = a.abs() * group.norms * group.G / mask.sum()  # (G, T)
            by_decile[row] += decile.bincount(sizes[mask], minlength=10)
            if number < 5:
                batch = group.batch(L, a)
                c = coefficients(L.token_grpo(batch), batch)
                for i, t in mask.nonzero().tolist():
                    e.equal(
                        sizes[i, t], (c[i, t] * ascent(-group.logp[i, t], group.policy.W)).norm()
                    )
    shares = by_decile / by_decile.sum(1, keepdim=True)
    e.cells = shares.tolist()
    tokens, before, after = shares[:, :3].sum(1).tolist()  # pi < 0.3
    e.equal(True, before > tokens and after < before)


def a4(L, name, draws, e):
    """Lopti's two passes part the tokens at pi_old = eta; at equal parameters their gradients add up to the joint one.
    AR/Lopti (P)

    The parts are disjoint and cover everything, each divided by the number of all tokens. What
    decides is pi_old, also when pi_theta has moved across eta since; a token exactly at eta belongs
    to the first.
    """
    for d, spread, eta in itertools.product(draws, (0.0, 0.9), (0.5, 0.3)):
        batch = d.batch(L, spread)
        joint = coefficients(L.token_grpo(batch), batch)
        low, high = (coefficients(f(batch, eta=eta), batch) for f in (L.lopti_low, L.lopti_high))
        p_old = d.logp.detach().exp() * (-d.log_ratio(spread)).exp()
        e.equal(torch.where(d.mask & (p_old <= eta), joint, 0), low)
        e.equal(torch.where(d.mask & (p_old > eta), joint, 0), high)
        e.equal(joint, low + high)
    half = torch.full((2, 1), 0.5, dtype=torch.float64).log()
    batch = L.Batch(
        half.clone().requires_grad_(), half, torch.tensor([[1.0], [-2.0]]).double(), half < 0, 2, 1
    )
    e.equal([[1], [-2]], coefficients(L.lopti_low(batch), batch))
    e.equal([[0], [0]], coefficients(L.lopti_high(batch), batch))


def a5(L, name, draws, e):
    """By plain ascent Lopti's two steps end where one joint step does, to first order; the second sees what moved.
    AR/Lopti (P); limit and control (D)

    r has moved since pi_old when the second pass begins, by what the first did to shared
    parameters, so its gradient is r times the on-policy one and may be clipped: its coefficients
    are compared with r A / (number of tokens) at its own ratio. The end points differ by a share of
    the way that is proportional to the step: halving it halves the share ("left": the share at size
    4). AdamW, which train.py uses, makes each step equally long whatever the gradient, so two go
    further than one at any learning rate: compare Lopti with a method that makes two steps as well.
    """
    prompts, eta, shares = [(0,)] * Sampled.G, 0.5, defaultdict(float)
    for group, size in itertools.product(sampled(draws[0].seed)[:20], (4.0, 0.02, 0.01)):
        adv, (first, second) = group.adv(L), L.METHODS["lopti"].passes
        joint = group.policy.step(ascent(L.token_grpo(group.batch(L, adv)), group.policy.W), size)
        middle = group.policy.step(ascent(first(group.batch(L, adv)), group.policy.W), size)
        middle.W.requires_grad_()
        logp, _ = middle.log_probs(prompts, group.answers)
        batch = L.Batch(logp, group.logp.detach(), adv, group.mask, group.G, 6)
        c, n = coefficients(second(batch), batch), sum(map(len, group.answers))
        for i, t in group.mask.nonzero().tolist():
            r, a = math.exp((logp[i, t] - group.logp[i, t]).item()), float(adv[i, t])
            active = float(group.probs[i, t]) > eta and not (r > 1.2 and a > 0 or r < 0.8 and a < 0)
            e.equal(r * a * group.G / n if active else 0, c[i, t])
        end = middle.step(ascent(second(batch), middle.W), size)
        shares[size] += ((end.W - joint.W).norm() / (joint.W - group.policy.W).norm()).item() / 20
    e.left(shares[4.0])
    e.equal(2, round(shares[0.02] / shares[0.01], 1))


# ---------------- I: comparing and correcting


def m8(L, name, draws, e):
    """The kept tokens are those of a shortest edit: keeping just them costs no more than the Levenshtein distance.
    Levenshtein alignment (D)

    `cost` is the textbook table. With no wish it is the distance; with a set of tokens to keep,
    these must meet an equal one for nothing and every other token has to be changed or to go.
    Several alignments can be shortest, so the sets are not compared, their costs are.
    """

    def cost(a, b, keep=None):
        table = [[u for u in range(len(b) + 1)]]
        for t, x in enumerate(a):
            row = [math.inf if keep and t in keep else table[t][0] + 1]
            for u, y in enumerate(b):
                kept = x == y if keep is None else t in keep
                stay = table[t][u] if kept and x == y else math.inf
                go = (
                    min(table[t][u], table[t][u + 1]) + 1
                    if keep is None or t not in keep
                    else math.inf
                )
                row.append(min(stay, go, row[u] + 1))
            table.append(row)
        return table[-1][-1]

    for d in draws:
        order = torch.randperm(d.N, generator=d.generator)
        kept = L.kept_tokens(d.tokens, d.mask, d.tokens[order], d.mask[order])
        e.equal(False, bool((kept & ~d.mask).any()))
        for i, j in enumerate(order.tolist()):
            a, b = d.answers[i], d.answers[j]
            e.equal(cost(a, b), cost(a, b, set(kept[i].nonzero().flatten().tolist())))


def i1(L, name, draws, e):
    """A reward for near misses lowers the variance iff Cov(R, phi) < -(weight/2) Var(phi): not on hard prompts.
    IBPO (S); condition for binary rewards (D)

    Var(R + l phi) - Var(R) = 2 l Cov(R, phi) + l^2 Var(phi). For P(R = 1) = p and repair rate q,
    phi = rho with probability (1-p) q, only where R = 0: Cov = -p (1-p) q rho and Var(phi) = rho^2
    (1-p) q (1 - (1-p) q), so the variance falls iff p > (l rho / 2)(1 - (1-p) q). With l = 0.6, rho
    = 0.5, q = 0.2 it rises at p = 0.05 and 0.10 and falls from 0.15 on ("left": how much it rises
    there, relative). Compared with the variance of three outcomes, and with 200 000 sampled ones.
    """
    bonus, weight = 0.5, 0.6
    R, fixed = (
        torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64),
        torch.tensor([False, True, False]),
    )
    shaped = L.shaped_rewards(R, fixed)

    def variance(x, odds):
        return float((odds * x * x).sum() - (odds * x).sum() ** 2)

    for p, q in itertools.product((0.05, 0.1, 0.15, 0.3, 0.5, 0.9), (0.05, 0.2, 0.8)):
        odds = torch.tensor([p, (1 - p) * q, (1 - p) * (1 - q)], dtype=torch.float64)
        cov, var = -p * (1 - p) * q * bonus, bonus**2 * (1 - p) * q * (1 - (1 - p) * q)
        change = variance(shaped, odds) - variance(R, odds)
        e.equal(2 * weight * cov + weight**2 * var, change)
        e.equal(p > weight * bonus / 2 * (1 - (1 - p) * q), change < 0)
        sample = torch.multinomial(odds, 200_000, replacement=True, generator=draws[0].generator)
        both = [x.var().item() for x in (L.shaped_rewards(R[sample], fixed[sample]), R[sample])]
        e.equal(variance(shaped, odds), both[0], tolerance=5e-3)
        e.equal(variance(R, odds), both[1], tolerance=5e-3)
        if change > 0:
            e.left(change / variance(R, odds))
    a, b = torch.tensor([0.0, 1.0, 0.5, 0.0]).double(), torch.tensor([True, True, True, False])
    e.equal([0.2 * 0.7, 1, 0.5, 0], L.shaped_rewards(a, b, 0.2, 0.7))


def i2(L, name, draws, e):
    """An all-wrong group learns something as soon as one correction succeeds; an all-correct group still nothing.
    IBPO (S)

    In an all-wrong group R' is l rho for the repaired and 0 for the others, so A' is not 0; where
    all are right there is nothing to repair. "Something" is the coefficient of grpo, masked: A'_i /
    T_i on changed tokens.
    """
    for d in draws:
        for right in (False, True):
            R = torch.full((d.N,), float(right), dtype=torch.float64)
            repaired = torch.zeros(d.N, dtype=torch.bool)
            repaired[:: d.G] = not right
            A = L.group_advantages(L.shaped_rewards(R, repaired), d.G, "mean")
            kept = d.mask & repaired[:, None] & (d.noise > 0)
            old = L.OldPolicy(d.tokens, d.mask, d.logp.detach(), R, d.G, kept_mask=kept)
            batch = d.batch(L, adv=L.ibpo(d.rows(A), old))
            c = coefficients(L.grpo(batch), batch)
            bonus = [0.3 * (i % d.G == 0) - 0.3 / d.G if not right else 0 for i in range(d.N)]
            predicted = torch.tensor(
                [[b / T] for b, T in zip(bonus, d.T, strict=True)], dtype=torch.float64
            )
            e.equal(torch.where(d.mask & ~kept, predicted, 0), c)


def i3(L, name, draws, e):
    """Tokens that a successful correction kept get coefficient 0; without any correction the method is grpo.
    IBPO (S)

    The mask multiplies the advantage, so what it leaves out has no gradient, whatever the ratio and
    the clip. Nothing kept and nothing repaired leave advantages and rewards as they were.
    """
    for d in draws:
        method = L.METHODS["ibpo"]
        kept = d.mask & (d.noise > 0.3)
        for keep in (kept, kept & False):
            old = L.OldPolicy(
                d.tokens, d.mask, d.logp.detach(), torch.zeros(d.N).double(), d.G, kept_mask=keep
            )
            plain, batch = d.batch(L, 0.6), d.batch(L, 0.6, adv=method.credit(d.rows(d.adv), old))
            grpo = coefficients(L.grpo(plain), plain)
            e.equal(torch.where(keep, 0, grpo), coefficients(method.passes[0](batch), batch))
        e.raises(
            method.credit, d.rows(d.adv), L.OldPolicy(d.tokens, d.mask, d.logp, d.noise[:, 0], d.G)
        )
        e.equal(True, len(method.passes) == 1 and method.repair and method.scale == "std")
        e.equal(
            torch.tensor(d.adv).double(),
            L.shaped_rewards(torch.tensor(d.adv).double(), torch.zeros(d.N).bool()),
        )
