"""Group-relative policy-gradient losses, one short function each. `python losses.py` lists them.

Four answers to one prompt, `37+48=`. R is the reward, given at the end only, and A = R - mean(R)
the advantage. T_i is the length of an answer, and L = 5 the longest that is allowed. (A token of
this table is a whole line of the sum, such as `7+8=15`, and the end is not counted.) The last two
columns are how hard two losses push the token "so" in the first update, when all ratios are 1:

    answer                                   R    A    T_i   reinforce     grpo
                                                               A / L      A / T_i
    so | 7+8=15 | 70+15=85 | #85             1  +1/2    4     +0.100      +0.125
    so | 7+8=15 | carry 1 | 30+40=70 | #75   0  -1/2    5     -0.100      -0.100
    so | #85                                 1  +1/2    2     +0.100      +0.250
    so | 40+48=88 | 88-3=85 | #84            0  -1/2    4     -0.100      -0.125
                                                       sum     0.000      +0.150

A *push* is what a loss does to a token: c = -N dLoss/dlogp, where logp is the token's
log-probability and N the number of answers. It is row.push of toy/plain.py. A positive push makes
the token likelier.

All four answers begin with "so". Hence their pushes move the same probability, and only the sum of
the pushes counts. And hence "so" cannot explain which of the four won. Its pushes should sum to 0:
they should *cancel*. Under reinforce they do, because the advantages sum to 0 and one number
divides them all. Under grpo they do not, because grpo divides each by the answer's own length, and
short answers push harder. (By default both losses also divide A by the group's standard deviation.
That changes all four alike, and the table leaves it out.)

What is left on "so" is noise as long as "so" changes nothing that follows. Say that an answer may
begin with "so", "ok" or "hm", and that all three lead to the same rewards at the same lengths. Then
all three get the same push k on average. To push all choices alike moves nothing: the expected
gradient is k sum pi grad log pi = k grad(sum pi) = k grad 1 = 0.

But if the first token changes the reward or the length of what follows, the division by T_i is a
bias. A right answer then counts more if it is short, and a wrong one less if it is long. Which
answers the policy comes to prefer may change (claim C18).

This file has the parts that all losses are made of, the losses that people use, and those of the
paper on cancellation. Below the double line stand a baseline that makes the pushes of any loss
cancel, the losses of neighbouring papers, what measures a batch, and METHODS, the table of all.

In comments, DFPO is the paper on cancellation, arXiv 2604.13088. We have read its abstract and its
introduction, and know the rest from notes of others. TRL and verl are trainers that people use. (P)
means that a paper or a trainer's source states something, (S) that others report it, and (D) that
it is derived here. (C18) and the like are claims: `python verify.py --explain C18` shows the proof.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args, get_type_hints

import torch
from torch import Tensor


@dataclass(eq=False)  # == would compare tensors
class Batch:
    """What a loss needs to know. N rows = prompts x group_size, T columns = the longest answer's.

    Raises ValueError for a tensor of another shape than logp's, and for rows that are not whole
    groups of at least 2.
    """

    logp: Tensor  # (N, T) log pi_theta of the taken tokens, differentiable
    logp_old: Tensor  # (N, T) log pi_old of the same tokens: of the policy that sampled them
    adv: Tensor  # (N, T) A_i at each token of answer i; 0 on padding
    mask: Tensor  # (N, T) bool, True up to and including the first EOS
    group_size: int  # G; the rows of a group are contiguous
    max_tokens: int  # L, the longest answer allowed
    logp_ref: Tensor | None = None  # (N, T) log pi_ref of a frozen reference, only for a KL term

    def __post_init__(self):
        check_batch(self)
        # With a nan here on padding, backward would compute 0 * nan, although losses are masked.
        self.adv = self.adv.masked_fill(~self.mask, 0.0)


# ---------------- how to read what follows
#
# Losses differ in what weighs A, in whether a clip stops a push, and in the divisor. Their
# docstrings have
#
#     J              what is maximised, so the loss is -J. It says what a token adds, and after the
#                    slash how the sum is averaged:
#                        x / T_i       seq_mean      each answer by its own length
#                        x / L         budget_mean   one divisor
#                        x / tokens    token_mean    one divisor within a batch. In a batch of few
#                                                    answers a long one changes it for all (C18)
#     Shared token   whether pushes cancel on a token that the whole group shares, like "so". Its
#                    ratio r is the same in all answers, because they took it after the same words
#     Source         PAPERS.md lists where a loss is not quite its paper's
#
# r is a token's ratio, s an answer's; clip(r) keeps r between 1 - eps_low and 1 + eps_high; sg[x]
# is x without its gradient.


# ---------------- parts: advantages, ratios, averages, the clip

SCALES = ("std", "mean", "batch", "maxrl")


def group_advantages(rewards: Tensor, group_size: int, scale: str = "std") -> Tensor:
    """Compare every answer with its group: A_i = R_i - mean(R), divided by a scale.

    scale     divides by                      source
    "std"     the group's std + 1e-4          GRPO sec. 4.1.2 (P)
    "mean"    nothing                         Dr. GRPO (P)
    "batch"   the std of all rewards + 1e-4   TRL (P)
    "maxrl"   the group's mean                MaxRL 2602.02710 (S)

    A std is the unbiased one, and has 1e-4 added, as in TRL. C29 says which objective each scale
    ascends, if any. A group whose rewards are all equal gets exactly 0; under "maxrl" so does a
    group with a reward below 0. (N,) floats -> (N,). Raises ValueError for what is not whole groups
    of floats, or for another scale.
    """
    check_groups(len(rewards), group_size)
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be (N,) floats, not {rewards.dtype} {rewards.shape}")
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, not {scale!r}")
    groups = rewards.view(-1, group_size)  # (groups, G)
    mean, low = groups.mean(1, keepdim=True), groups.amin(1, keepdim=True)  # (groups, 1)
    adv = groups - mean  # (groups, G)
    # Where all rewards are equal, adv is 0 except for rounding, which a tiny std would make large.
    silent = groups.amax(1, keepdim=True) == low
    if scale == "std":
        adv = adv / (groups.std(1, keepdim=True) + 1e-4)
    elif scale == "batch":
        adv = adv / (rewards.std() + 1e-4)
    elif scale == "maxrl":
        adv, silent = adv / mean, silent | (low < 0)
    return adv.masked_fill(silent, 0.0).view(-1)


def token_ratio(batch: Batch) -> Tensor:
    """r_{i,t} = pi_theta / pi_old of every taken token, 1 on padding. (N, T)."""
    # If it were masked after exp, an inf on padding would come back as a gradient of 0 * inf = nan.
    return (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).exp()


Ratio = Literal["geometric", "product"]


def sequence_ratio(batch: Batch, ratio: Ratio = "geometric") -> Tensor:
    """s_i, one ratio per answer. (N,). Raises ValueError for another kind of ratio.

    "geometric": (prod_t r_{i,t})^(1/T_i), GSPO Eq. 7 (P). "product": prod_t r_{i,t}, of DFPO's
    theory (S); on long answers it under- and overflows.
    """
    if ratio not in get_args(Ratio):
        raise ValueError(f'ratio must be "geometric" or "product", not {ratio!r}')
    log_ratio = (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).sum(1)
    return (log_ratio / lengths(batch) if ratio == "geometric" else log_ratio).exp()


def trajectory_advantage(batch: Batch) -> Tensor:
    """One advantage for an answer, for losses with one ratio for an answer (GSPO, DFPO). (N,).

    It is the mean over the answer's tokens, which is A_i if all of them have A_i.
    """
    return batch.adv.sum(1) / lengths(batch)


def lengths(batch: Batch) -> Tensor:
    """T_i, at least 1 so that an empty answer divides by 1, not by 0. (N,)."""
    return batch.mask.sum(1).clamp(min=1)


def seq_mean(x: Tensor, batch: Batch) -> Tensor:
    """x / T_i: (1/N) sum_i (1/T_i) sum_t x_{i,t}. GRPO's average (P), which has a bias (C18)."""
    return (x.masked_fill(~batch.mask, 0.0).sum(1) / lengths(batch)).mean()


def budget_mean(x: Tensor, batch: Batch) -> Tensor:
    """x / L: (1/(N L)) sum_i sum_t x_{i,t}. One divisor. Dr. GRPO's sum (P), divided by L."""
    return x.masked_fill(~batch.mask, 0.0).sum() / (len(x) * batch.max_tokens)


def token_mean(x: Tensor, batch: Batch) -> Tensor:
    """x / tokens: sum x / number of tokens. DAPO's (P) over one group; here over the batch."""
    return x.masked_fill(~batch.mask, 0.0).sum() / batch.mask.sum().clamp(min=1)


def clipped(batch: Batch, eps_low: float, eps_high: float) -> Tensor:
    """PPO's surrogate min(r A, clip(r) A). (N, T).

    Above the clip range a winner (A > 0) has no push any more, and below it a loser has none.
    """
    ratio = token_ratio(batch)
    return torch.minimum(ratio * batch.adv, ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv)


# ---------------- the losses that people use, and DFPO: Batch -> scalar to minimise


def reinforce(batch: Batch) -> Tensor:
    """Plain policy gradient.

    J = A log pi / L.
    Shared token: cancels at any ratio. The ratio does not matter.
    Source: Williams 1992 (P). METHODS gives it GRPO's advantage.
    """
    return -budget_mean(batch.adv * batch.logp, batch)


def grpo(
    batch: Batch,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    kl: float = 0.0,
    kl_ratio: bool = False,
) -> Tensor:
    """PPO's clipped surrogate, averaged per answer.

    J = (min(r A, clip(r) A) - kl k3) / T_i. k3 estimates the KL to a reference policy.
    Shared token: cancels at equal lengths inside the clip range. At other lengths r sum A_i/T_i is
    left (C8). Above the range only losers push, below it only winners (C6).
    Source: GRPO Eq. 3-4 (P; its kl is 0.04, its eps is not printed, 0.2 is PPO's). kl_ratio, an
    addition of trainers, weighs k3 by r.
    """
    surrogate = clipped(batch, eps_low, eps_high)
    if kl:
        surrogate = surrogate - kl * k3(batch, kl_ratio)
    return -seq_mean(surrogate, batch)


def dr_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO's surrogate over one divisor. METHODS also leaves the std out of its advantage.

    J = min(r A, clip(r) A) / L.
    Shared token: cancels inside the clip range. Outside it one side pushes alone (C6).
    Source: Dr. GRPO sec. 3.2 (P).
    """
    return -budget_mean(clipped(batch, eps_low, eps_high), batch)


def dapo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.28) -> Tensor:
    """GRPO's surrogate with a wider upper clip, averaged over the tokens of mixed groups.

    J = min(r A, clip(r) A) / tokens of mixed groups. In a mixed group rewards differ.
    Shared token: cancels inside the clip range. Outside it one side pushes alone (C6).
    Source: DAPO Eq. 8, 10-12 (P; where a group is not mixed it samples another prompt, and here
    the group is left out).
    """
    # A group with equal rewards pushes nothing, because all its advantages are 0. So that it does
    # not enlarge the divisor, its tokens are not counted.
    groups = (batch.adv != 0).view(-1, batch.group_size, batch.adv.shape[1])  # (groups, G, T)
    mixed = groups.flatten(1).any(1).repeat_interleave(batch.group_size)  # (N,)
    only_mixed = replace(batch, mask=batch.mask & mixed[:, None])
    return -token_mean(clipped(batch, eps_low, eps_high), only_mixed)


def gspo(batch: Batch, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Tensor:
    """PPO's surrogate once per answer, on the geometric ratio.

    J = min(s A, clip(s) A), once per answer. Then the mean over answers.
    Shared token: cancels at equal lengths and ratios of 1. s_i is a geometric mean of T_i ratios,
    so ds_i/dlogp is s_i/T_i, and sum A_i s_i/T_i is left (C4, C8).
    Source: GSPO Eq. 5-7 (P). ScaleRL (2510.13786, P) found 4e-3/5e-3 to work better.
    """
    ratio, adv = sequence_ratio(batch), trajectory_advantage(batch)  # (N,), (N,)
    return -torch.minimum(ratio * adv, ratio.clamp(1 - eps_low, 1 + eps_high) * adv).mean()


def cispo(batch: Batch, eps_low: float = 1.0, eps_high: float = 4.0) -> Tensor:
    """Clip the ratio as a detached weight: no token loses its gradient, none gets a huge one.

    J = sg[clip(r)] A log pi / tokens. With eps_low = 1 there is no lower bound.
    Shared token: cancels at any ratio. All who share it have the same weight.
    Source: MiniMax-M1 Eq. 4-5 (P). It does not print the upper bound; r <= 5 is ScaleRL's (P).
    """
    weight = token_ratio(batch).clamp(1 - eps_low, 1 + eps_high).detach()
    return -token_mean(weight * batch.adv * batch.logp, batch)


def grpo_symmetric(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO with one divisor, and with a clip blind to the sign of A: there is no min.

    J = clip(r) A / L.
    Shared token: cancels at any ratio. Inside the clip range that is the divisor's doing, and
    outside it nobody pushes (C7).
    Source: ours, after DFPO's "GRPO-fix" (D; of that only the purpose is known, S).
    """
    ratio = token_ratio(batch)  # 1 on padding
    return -budget_mean(ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch)


# ---------------- DFPO: an answer is weighed by its ratio s, and two repairs make pushes cancel
#
# DFPO weighs A by w = s, which differs within a group, so pushes on a shared token do not cancel. A
# transform makes new weights w~ of a group's w. They enter as J = sg[w~] A log pi / L, for which
# the reasons are
#
#     sg        w~ is a constant. If it were not, its own gradient would be left over (C9)
#     log pi    a sum of constants w~ A has no gradient. With log pi the push is w~ A
#     / L       one divisor for all answers. With 1/T_i a short answer would push harder (C8)
#
# So the pushes on a token that the whole group shares are w~_i A_i / L, and they cancel if
# sum_i w~_i A_i = 0. This form is ours; PAPERS.md derives it from the paper's objective.


def _dfpo(transform: Callable, batch: Batch, ratio: str, eps: float) -> Tensor:
    """dfpo_min and dfpo_orthogonal: a transform makes new weights of a group's s and A."""
    s, A = sequence_ratio(batch, ratio), trajectory_advantage(batch)  # (N,), (N,)
    G = batch.group_size
    w = transform(s.view(-1, G), A.view(-1, G)).reshape(-1, 1)  # (N, 1)
    outside = (token_ratio(batch) - 1).abs() > eps  # (N, T)
    return -budget_mean((w * batch.adv * batch.logp).masked_fill(outside, 0.0), batch)


def min_replace(w: Tensor, adv: Tensor) -> Tensor:
    """w~_i = min_j w_j: one weight for the whole group. DFPO Eq. 17 (S). Detached.

    Pushes fail to cancel where answers have unequal weights, so all answers of a group get the
    smallest one: 0.5 and 2 become 0.5 and 0.5. Then pushes cancel over the group, and over all
    answers that share a longer prefix if their advantages sum to 0 (C9). The price is a bias: an
    answer's own ratio corrects for the policy that sampled it, and this is lost (C16).
    (groups, G), (groups, G) -> (groups, G). adv is not read, but adv_orthogonal needs it.
    """
    return w.detach().amin(1, keepdim=True).expand_as(w)


def adv_orthogonal(w: Tensor, adv: Tensor) -> Tensor:
    """w~ = w - (A.w / ||A||^2) A: takes from w what correlates with A. DFPO Eq. 18 (S). Detached.

    So the pushes on a token that the whole group shares cancel. But a weight may become negative,
    and then a winner is pushed down. Say that four answers have A = 1 and four A = -1, and that w
    is 3 for the first winner and 0.1 for all others. Then w~ is 2.6375 for the first winner,
    -0.2625 for the other three and 0.4625 for the losers (C10). A group whose advantages are all 0
    keeps its weights. (groups, G), (groups, G) -> (groups, G).
    """
    w = w.detach()
    norm = (adv * adv).sum(1, keepdim=True)
    projection = (adv * w).sum(1, keepdim=True) / norm.masked_fill(norm == 0, 1.0)
    return w - projection * adv


def dfpo_min(batch: Batch, ratio: Ratio = "geometric", eps: float = float("inf")) -> Tensor:
    """dfpo-min (our reconstruction): a sequence ratio that Min-Replace has made equal in a group.

    J = sg[the group's smallest s] A log pi / L. At ratios of 1 this is reinforce (C11), otherwise
    reinforce with each group scaled by its smallest s. With eps (ours), tokens whose ratio is
    outside 1 +- eps have no push. Without it the reward falls 0.240 +- 0.031 below GRPO's if a
    batch serves 16 updates at a high rate (experiments/README.md).
    Shared token: cancels at any ratio. If only some answers share a token, the pushes on it cancel
    where the advantages of these answers sum to 0 (C9).
    Source: ours, after DFPO Eq. 17 (transform S; log pi, L and the geometric s D).
    """
    return _dfpo(min_replace, batch, ratio, eps)


def dfpo_orthogonal(batch: Batch, ratio: Ratio = "geometric", eps: float = float("inf")) -> Tensor:
    """dfpo-orthogonal (our reconstruction): the same under Adv-Orthogonal.

    J = sg[s without its part along A] A log pi / L.
    Shared token: cancels at any ratio. If only some answers share a token, the pushes on it do not
    cancel in general (C10).
    Source: ours, after DFPO Eq. 18 (transform S, loss D, as for dfpo-min).
    """
    return _dfpo(adv_orthogonal, batch, ratio, eps)


# =================================================================================================
# What people seldom use: a baseline at every prefix, a KL term, the losses of neighbouring papers;
# what measures a batch; and at the end METHODS, the table of all methods
# =================================================================================================


# ---------------- the push


def token_coefficients(loss: Tensor, logp: Tensor) -> Tensor:
    """The pushes c = -N dLoss/dlogp, detached. train.py reads them off logp.grad. (D)

    logp must be the tensor that the loss was computed from; the graph is kept.
    scalar, (N, T) -> (N, T).
    """
    return -len(logp) * torch.autograd.grad(loss, logp, retain_graph=True)[0]


# ---------------- a baseline at every prefix
#
# One divisor is enough for a token that the whole group shares. Where only some answers share one
# it is not. Suppose three of four answers are right, and look at "70+15=85" under reinforce, L = 5:
#
#     answer                                  R    A     A / L   with the baseline
#     so | 7+8=15 | 70+15=85 | #85            1  +1/4   +0.05      +0.05 - 0.05 = 0
#     so | 7+8=15 | 70+15=85 | 85 | #85       1  +1/4   +0.05      +0.05 - 0.05 = 0
#     so | #85                                1  +1/4
#     so | #84                                0  -3/4
#                                                  sum  +0.10                     0
#
# Both answers that have come as far as "7+8=15" go on with "70+15=85", so it explains nothing
# either. But +0.10 is left, because they are compared with the whole group, and what they earn is
# owed to their prefix. The *prefix* of a token is the prompt and all tokens before it. So compare
# an answer with those of the same prefix: subtract from its push the mean push of the others.


def prefix_nodes(tokens: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """A number for every token: equal where two answers of a group agree up to and including it.

    These are the nodes of the group's prefix tree, as in TEMPO (2509.18314); -1 on padding. mask:
    all tokens that a policy has read, whichever of them a loss may leave out. (D)
    (N, T), (N, T) -> (N, T) int64. Raises ValueError for rows that are not whole groups.
    """
    n, width = tokens.shape
    check_groups(n, group_size)
    groups = tokens.view(-1, group_size, width)  # (groups, G, T)
    same = (groups[:, :, None] == groups[:, None]).to(torch.uint8)  # (groups, G, G, T)
    same = same.cumprod(-1, dtype=torch.uint8)  # whether rows i and j agree up to token t
    first = same.argmax(2).view(n, width)  # the first row of the group that agrees with row i
    group = torch.arange(n, device=tokens.device)[:, None] // group_size  # (N, 1)
    place = torch.arange(width, device=tokens.device)
    # The number is (that row, counted in the whole batch) * T + t. A group of three:
    #     tokens 5 6 2      first row 0 0 0      node 0 1 2
    #            5 6 7                0 0 1           0 1 5
    #            5 9 9                0 2 2           0 7 8
    return ((group * group_size + first) * width + place).masked_fill(~mask, -1)


def prefixes(nodes: Tensor, group_size: int) -> Tensor:
    """A number for the prefix of every token: the node of the token before. (D)

    A first token has the prompt for its prefix, whose number is -2 in the first group, -3 in the
    next one, and so on: other numbers than the nodes', which are at least 0, and than padding's -1.
    (N, T) -> (N, T) int64.
    """
    group = torch.arange(len(nodes), device=nodes.device)[:, None] // group_size  # (N, 1)
    return torch.cat([-2 - group, nodes[:, :-1]], 1)


def prefix_baseline(loss: Tensor, batch: Batch, nodes: Tensor) -> Tensor:
    """Any loss with a leave-one-out baseline at every prefix. Claim C22 (D, ours).

    c'_{i,t} = c_{i,t} - r_{i,t} mean_j (c_{j,t} / r_{j,t}), over the other answers j of the group
    that take a token after the same prefix; where there is none, c stays. So if all of them take
    the same token, its pushes cancel.

    Like any baseline it changes the noise: at tokens that earn nothing it is less where prefixes
    already decide much of the reward, else more (C27). The *expected* update stays the same if
    1. a push is made of its own answer alone: not so for dfpo-min, which compares weights, nor for
       a token mean over few answers;
    2. A is the reward minus a fixed number. In a run it is the reward minus the group's mean, and
       then the expected update moves: without a std by a part of the true gradient (C22c);
    3. no earlier update has used the batch.

    Returns the loss's value, with the gradient -(1/N) sum c' grad log pi. batch.logp is what the
    loss was computed from; nodes are prefix_nodes, (N, T). Raises ValueError for another shape.
    """
    if nodes.shape != batch.logp.shape:
        raise ValueError(f"nodes has shape {tuple(nodes.shape)}, logp {tuple(batch.logp.shape)}")
    c, r = token_coefficients(loss, batch.logp), token_ratio(batch).detach()
    c_over_r = c / r.clamp(min=torch.finfo(r.dtype).tiny)  # not 0/0 = nan
    # toy/plain.py does this with loops. Here all K tokens are handled at once: first the sum of
    # c / r over each prefix, then for each token the mean of the others.
    _, prefix = prefixes(nodes, batch.group_size)[batch.mask].unique(return_inverse=True)  # (K,)
    c_over_r = c_over_r[batch.mask]  # (K,)
    sums = torch.zeros_like(c_over_r).index_add_(0, prefix, c_over_r)[prefix]
    n_others = torch.bincount(prefix)[prefix] - 1
    mean_of_others = (sums - c_over_r) / n_others.clamp(min=1)  # 0 / 1 where there is no other
    c = c.masked_scatter(batch.mask, c[batch.mask] - r[batch.mask] * mean_of_others)
    # A function whose pushes are c. Its value means nothing, so the loss's own is put in its place.
    surrogate = -(c * batch.logp).masked_fill(~batch.mask, 0.0).sum() / len(c)
    return loss.detach() + surrogate - surrogate.detach()


# ---------------- a KL term


def k3(batch: Batch, times_ratio: bool = False) -> Tensor:
    """Schulman's k3 estimate of KL(pi_theta || pi_ref): q - log q - 1 with q = pi_ref / pi_theta.

    times_ratio (TRL's since 1.10, after DeepSeek-V3.2, S) weighs it by r, which changes its
    gradient (Q4). (N, T). Raises ValueError without logp_ref.
    """
    if batch.logp_ref is None:
        raise ValueError("the KL term needs logp_ref, log-probs of a frozen reference; it is None")
    log_q = (batch.logp_ref - batch.logp).masked_fill(~batch.mask, 0.0)
    return (log_q.exp() - log_q - 1) * (token_ratio(batch) if times_ratio else 1)


def sapo(batch: Batch, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """A soft clip: a sigmoid of the ratio, whose slope fades as r leaves 1, for losers sooner.

    J = (4/tau) sigmoid(tau (r - 1)) A / T_i. tau goes by the sign of A. At r = 1 the slope is A,
    whatever tau is.
    Shared token: cancels at equal lengths and ratios of 1. Else sum A_i/T_i is left (C8), and away
    from 1 a little more, by the two taus.
    Source: SAPO 2511.20347 (S: as TRL 1.16.0 and verl 0.9.1 have it).
    """
    ratio = token_ratio(batch)
    soft = [torch.sigmoid(tau * (ratio - 1)) * 4 / tau for tau in (tau_pos, tau_neg)]
    return -seq_mean(torch.where(batch.adv > 0, *soft) * batch.adv, batch)


def dppo(batch: Batch, delta: float = 0.2) -> Tensor:
    """A clip by probabilities in place of ratios, which looks at the sign of A.

    J = r A / tokens, but 0 where p has moved too far in the direction of A. That is, where A > 0
    and p - p_old > delta, or where A < 0 and p_old - p > delta.
    Shared token: cancels while p is within delta of p_old. Beyond, only one side acts (C6).
    Source: DPPO 2602.04879 (S: "binary TV", as in verl 0.9.1's dppo_tv and prime-rl's default loss;
    left out are verl's largest weight r <= 3 and prime-rl's penalty of 0.001 log(r)^2).
    """
    moved = (batch.logp.exp() - batch.logp_old.exp()).detach()  # (N, T)
    outside = torch.where(batch.adv > 0, moved > delta, moved < -delta)
    return -token_mean((token_ratio(batch) * batch.adv).masked_fill(outside, 0.0), batch)


def symmetric_trust(batch: Batch, delta: float = 0.1) -> Tensor:
    """dppo without the sign: a clip that is blind to it.

    J = r A / tokens, but 0 where p is further than delta from p_old.
    Shared token: cancels at any ratio. The clip is blind to the sign of A (C7).
    Source: prime-rl (P: its loss of type "ipo", there "a symmetric trust region"; left out is
    its penalty of 0.001 log(r)^2).
    """
    outside = (batch.logp.exp() - batch.logp_old.exp()).detach().abs() > delta  # (N, T)
    return -token_mean((token_ratio(batch) * batch.adv).masked_fill(outside, 0.0), batch)


# ---------------- NTHR, Advantage Reweighting and Lopti: GRPO's surrogate, averaged over all tokens


def token_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.24) -> Tensor:
    """GRPO's surrogate averaged over all tokens: under Advantage Reweighting and Lopti.

    J = min(r A, clip(r) A) / tokens.
    Shared token: cancels inside the clip range. Outside it one side pushes alone (C6).
    Source: AR/Lopti's code (P).
    """
    return -token_mean(clipped(batch, eps_low, eps_high), batch)


def nthr_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """The same with NTHR's clip: the loss under its credit rules.

    J = min(r A, clip(r) A) / tokens.
    Shared token: cancels inside the clip range. Not where the credit rule has softened a loser.
    Source: NTHR sec. 2.2 (P; there over a group's tokens).
    """
    return token_grpo(batch, eps_low, eps_high)


def pos_only(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO that learns from the better-than-average answers only: NTHR's control.

    J = min(r A+, clip(r) A+) / tokens. A+ = max(A, 0).
    Shared token: never cancels. Nothing stands against the winners.
    Source: NTHR sec. 2.2 (P).
    """
    return token_grpo(replace(batch, adv=batch.adv.clamp(min=0)), eps_low, eps_high)


def lopti_low(
    batch: Batch, eta: float = 0.5, eps_low: float = 0.2, eps_high: float = 0.24
) -> Tensor:
    """Lopti's first pass: the improbable tokens alone, divided by the number of all tokens.

    J = min(r A, clip(r) A) / tokens where pi_old < eta.
    Shared token: cancels inside the clip range. All its visitors have one pi_old, so they are in
    the same pass.
    Source: AR/Lopti's code (P; eta 0.5 is that of ar-lopti; alone, its scripts take 0.4).
    """
    return _lopti(batch, batch.logp_old.exp() < eta, eps_low, eps_high)


def lopti_high(
    batch: Batch, eta: float = 0.5, eps_low: float = 0.2, eps_high: float = 0.24
) -> Tensor:
    """Lopti's second pass: the other tokens, from the parameters that the first pass has left.

    J = min(r A, clip(r) A) / tokens where pi_old >= eta.
    Shared token: cancels inside the clip range. It can be left in every update, because r has moved
    since pi_old.
    Source: AR/Lopti's code (P).
    """
    return _lopti(batch, batch.logp_old.exp() >= eta, eps_low, eps_high)


def _lopti(batch: Batch, chosen: Tensor, eps_low: float, eps_high: float) -> Tensor:
    return -token_mean(clipped(batch, eps_low, eps_high).masked_fill(~chosen, 0.0), batch)


# ---------------- credit rules: what the old policy knew -> (N, T) advantages


@dataclass(eq=False)
class OldPolicy:
    """What a credit rule knows of the old policy. The rule is applied once, then frozen.

    Raises ValueError for a shape that does not fit, and for rows that are not whole groups of at
    least 2.
    """

    tokens: Tensor  # (N, T) ids
    mask: Tensor  # (N, T) bool
    logp: Tensor  # (N, T) log pi_old of the tokens, at the sampling temperature
    rewards: Tensor  # (N,) 1 = correct
    group_size: int  # G
    gen: torch.Generator | None = None  # on the CPU, for rules that draw at random
    scores: Tensor | None = None  # (N, T) NTHR's, from llm/neighbours.nthr_scores
    own_scores: Tensor | None = None  # (N, T) its own answer's part in a token's score, likewise
    kept_mask: Tensor | None = None  # (N, T) bool, tokens that a correction left (IBPO)
    repaired: Tensor | None = None  # (N,) bool, wrong answers whose correction is right (IBPO)

    def __post_init__(self):
        check_groups(len(self.tokens), self.group_size)
        for name in ("mask", "logp", "rewards", "scores", "own_scores", "kept_mask", "repaired"):
            tensor = getattr(self, name)
            shape = self.tokens.shape[:1] if name in ("rewards", "repaired") else self.tokens.shape
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}")


def advantage_reweighting(adv: Tensor, old: OldPolicy, alpha: float = 0.3) -> Tensor:
    """Shrink the advantage of improbable tokens, whose gradients are the largest.

    A_{i,t} = (alpha pi_old + 1 - alpha) A_i. alpha 0.3 is that of ar-lopti.
    Shared token: one factor for all who share it. So what cancelled still does.
    Source: AR/Lopti Eq. 4 (P).
    (N, T), OldPolicy -> (N, T). Raises ValueError for an alpha outside 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie between 0 and 1, not {alpha}: more turns gradients round")
    return (alpha * old.logp.detach().exp() + 1 - alpha) * adv


def nthr(
    adv: Tensor,
    old: OldPolicy,
    beta: float = 1.0,
    eta: float | None = None,
    self_term: bool = False,
) -> Tensor:
    """Soften the penalty on the tokens of wrong answers that push the correct ones down.

    A_{j,k} = eta A_j where A_j < 0 and s_{j,k} > tau = beta min_i mean_k s_{i,k}, i over the
    correct answers. s is llm/neighbours.nthr_scores; of a correct answer it leaves out that answer
    itself, unless self_term. If eta is not given, it is 2|0.5 - p| (App. 7.3, P), p the share of
    correct answers in the group.
    Shared token: does not cancel where losers are softened.
    Source: NTHR sec. 5.2 (P).
    (N, T), OldPolicy -> (N, T). Raises ValueError without scores.
    """
    selected = nthr_selected(old, beta, self_term) & (adv < 0)
    return torch.where(selected, nthr_factor(old, eta) * adv, adv)


def nthr_random(
    adv: Tensor,
    old: OldPolicy,
    beta: float = 1.0,
    eta: float | None = None,
    self_term: bool = False,
) -> Tensor:
    """NTHR's control: soften as many tokens of each wrong answer as nthr selects, but any.

    A_{j,k} = eta A_j on tokens drawn at random among those of the answer. Arguments as for nthr.
    Shared token: does not cancel where losers are softened.
    Source: NTHR (P; the same eta as nthr's is ours).
    (N, T), OldPolicy -> (N, T).
    """
    selected = nthr_selected(old, beta, self_term) & (adv < 0)
    count = selected.sum(1, keepdim=True)  # (N, 1)
    draw = torch.rand(old.mask.shape, generator=old.gen).to(adv.device)  # (N, T)
    rank = draw.masked_fill(~old.mask, 2.0).argsort(1).argsort(1)  # padding comes last
    return torch.where(rank < count, nthr_factor(old, eta) * adv, adv)


def nthr_factor(old: OldPolicy, eta: float | None) -> Tensor:
    """eta of each answer; if None it is 2|0.5 - p|, p its group's share of correct ones. (N, 1)."""
    correct = (old.rewards == 1).to(old.logp.dtype).view(-1, old.group_size)  # (groups, G)
    share = correct.mean(1).repeat_interleave(old.group_size)[:, None]  # (N, 1)
    return 2 * (0.5 - share).abs() if eta is None else torch.full_like(share, eta)


def nthr_selected(old: OldPolicy, beta: float = 1.0, self_term: bool = False) -> Tensor:
    """The tokens of wrong answers with a score above tau; none without a correct answer. (N, T)."""
    if old.scores is None or old.own_scores is None:
        raise ValueError("nthr needs the token scores: scores or own_scores is None")
    correct = old.rewards == 1
    of_correct = old.scores if self_term else old.scores - old.own_scores  # (N, T)
    means = of_correct.masked_fill(~old.mask, 0.0).sum(1) / old.mask.sum(1)  # nan if empty
    means = means.masked_fill(~correct | means.isnan(), torch.inf)
    lowest = means.view(-1, old.group_size).amin(1)  # (groups,), inf without a correct answer
    tau = torch.where(lowest < torch.inf, beta * lowest, lowest)  # 0 * inf would be nan
    tau = tau.repeat_interleave(old.group_size)[:, None]  # (N, 1)
    return (old.scores > tau) & old.mask & ~correct[:, None]


Reading = Literal["sign", "changed", "none"]


def ibpo(adv: Tensor, old: OldPolicy, reading: Reading = "sign") -> Tensor:
    """Blame a repaired answer for what its correction changed, or praise it for what was kept.

    A_{i,t} = m_{i,t} A'_i, m = 1[kept] if A'_i > 0, 1[changed] if A'_i < 0, 1 if not repaired.
    A' comes from shaped_rewards. This reading, "sign", is ours (D): a repaired answer never rewards
    what its correction changed, or blames what it kept. "changed", 1[changed] for both signs, is
    the literal reading of the best source, and can reward the mistake (I3).
    Shared token: a repaired answer may drop out of the sum. That is the purpose.
    Source: IBPO (S).
    (N, T), OldPolicy -> (N, T). Raises ValueError for another reading, and without corrections.
    """
    if reading not in get_args(Reading):
        raise ValueError(f'reading must be "sign", "changed" or "none", not {reading!r}')
    if old.kept_mask is None or old.repaired is None:
        raise ValueError("ibpo needs the corrections: kept_mask or repaired is None")
    if reading == "none":
        return adv
    # "sign": silent are tokens that were kept and blamed, or changed and praised.
    silent_mask = old.kept_mask if reading == "changed" else old.kept_mask == (adv < 0)
    return adv.masked_fill(silent_mask & old.repaired[:, None], 0.0)


def shaped_rewards(
    rewards: Tensor, repaired: Tensor, bonus: float = 0.5, weight: float = 0.6
) -> Tensor:
    """R' = R + weight phi, phi = bonus 1[R = 0 and the correction is right]: near misses count.

    Whether the variance falls depends on how many answers are right (I1). IBPO (S); how its two
    numbers combine is not known, here they multiply.
    (N,), (N,) bool -> (N,). Raises ValueError if a near miss would count as much as a right answer.
    """
    if weight * bonus >= 1:
        raise ValueError(f"weight {weight} times bonus {bonus} must stay below the reward of 1")
    return rewards + weight * bonus * (repaired & (rewards == 0)).to(rewards.dtype)


# ---------------- what measures a batch


def learning_tax(coefficients: Tensor, advantages: Tensor, nodes: Tensor, mask: Tensor) -> float:
    """What unequal weights add to a batch's push on shared tokens, relative to all of it there.

    tax_v = sum_{S_v} (w_i - wbar) A_i, with w = c/A and wbar its mean over S_v, the answers that
    visit node v. The result is sum_v |tax_v| / sum_v sum_{S_v} |c_i| over nodes with at least 2
    visitors, without answers with A_i = 0: 0 if all visitors of a node have one weight; it may
    exceed 1. It speaks of this batch, not of the expected push, and not of what it costs (C18).
    Under `prefix_baseline` it says nothing, because c is no longer in proportion to A.
    (N, T), (N,) trajectory advantages, (N, T), (N, T) -> float. Claim C15 (D).
    """
    adv = advantages[:, None].expand_as(mask)
    used = mask & (adv != 0)
    c, adv = coefficients[used], adv[used]  # (K,) each: the tokens that count
    ids, node = nodes[used].unique(return_inverse=True)

    def sum_at_nodes(x: Tensor) -> Tensor:  # (K,) -> (V,)
        return x.new_zeros(len(ids)).index_add_(0, node, x)

    visitors = sum_at_nodes(torch.ones_like(c))
    mean_weight = sum_at_nodes(c / adv) / visitors
    tax = sum_at_nodes(c) - mean_weight * sum_at_nodes(adv)
    shared = visitors > 1
    size = sum_at_nodes(c.abs())[shared].sum()
    return float(tax[shared].abs().sum() / size) if size > 0 else 0.0


# ---------------- checks of what a loss is given


def check_batch(batch: Batch):
    """Raises ValueError for shapes that differ, a mask that is not bool, and no whole groups."""
    for name in ("logp_old", "adv", "mask", "logp_ref"):
        tensor = getattr(batch, name)
        if tensor is not None and tensor.shape != batch.logp.shape:
            given, expected = tuple(tensor.shape), tuple(batch.logp.shape)
            raise ValueError(f"{name} has shape {given}, logp has {expected}")
    if batch.logp.dim() != 2 or batch.mask.dtype != torch.bool or batch.max_tokens < 1:
        raise ValueError("logp must be (N, T), mask bool, and max_tokens at least 1")
    check_groups(len(batch.logp), batch.group_size)


def check_groups(rows: int, group_size: int):
    """Raises ValueError unless the rows are whole groups: an answer needs a sibling."""
    if group_size < 2 or rows == 0 or rows % group_size:
        raise ValueError(f"{rows} rows are not whole groups of {group_size} (at least 2)")


# ---------------- METHODS: a loss, the scale of its advantage, and perhaps a credit rule


@dataclass
class Method:
    """What METHODS names, and train.py --method takes."""

    passes: tuple[Callable[..., Tensor], ...]  # Batch -> loss; one, except for Lopti
    scale: str = "std"  # of group_advantages
    credit: Callable[..., Tensor] | None = None  # (N, T) adv, OldPolicy -> (N, T) adv
    needs_scores: bool = False  # whether credit reads OldPolicy.scores
    repair: Callable[..., Tensor] | None = None  # rewards after wrong answers were corrected
    hyper: dict[str, object] = field(default_factory=dict)  # all hyperparameters, by `bind`

    @property
    def formula(self) -> str:
        """J, from the docstrings of the passes."""
        return "; then ".join(said(loss, "J = ") for loss in self.passes)

    @property
    def source(self) -> str:
        """The paper or the trainer, from a docstring."""
        return said(self.credit or self.passes[0], "Source: ", end=" (")

    @property
    def cancels(self) -> str:
        """Whether pushes on a token that the whole group shares cancel, from the docstrings."""
        made_of = [self.passes[0], self.credit] if self.credit else [self.passes[0]]
        return "; ".join(said(function, "Shared token: ") for function in made_of)


def said(function: Callable, start: str, end: str = ". ") -> str:
    """What a docstring says between `start` and `end`."""
    function = getattr(function, "func", function)  # of a partial, which `bind` makes
    text = " ".join(inspect.getdoc(function).split()) + " "
    return text.partition(start)[2].partition(end)[0]


METHODS: dict[str, Method] = {
    "reinforce": Method((reinforce,)),
    "grpo": Method((grpo,)),
    "dr-grpo": Method((dr_grpo,), scale="mean"),
    "dapo": Method((dapo,)),
    "gspo": Method((gspo,)),
    "cispo": Method((cispo,)),
    "grpo-symmetric": Method((grpo_symmetric,)),
    "dfpo-min": Method((dfpo_min,)),
    "dfpo-orthogonal": Method((dfpo_orthogonal,)),
    "sapo": Method((sapo,)),
    "dppo": Method((dppo,), scale="mean"),
    "symmetric-trust": Method((symmetric_trust,), scale="mean"),
    "pos-only": Method((pos_only,)),
    "nthr": Method((nthr_grpo,), credit=nthr, needs_scores=True),
    "nthr-random": Method((nthr_grpo,), credit=nthr_random, needs_scores=True),
    "advantage-reweighting": Method((token_grpo,), credit=advantage_reweighting),
    "lopti": Method((lopti_low, lopti_high)),
    "ar-lopti": Method((lopti_low, lopti_high), credit=advantage_reweighting),
    "ibpo": Method((grpo,), credit=ibpo, repair=shaped_rewards),
}


def functions(method: Method) -> list[Callable]:
    """All that a method is made of."""
    return [x for x in (*method.passes, method.credit, method.repair) if x]


def defaults(function: Callable) -> dict[str, object]:
    """The hyperparameters of a loss, a credit rule or a repair, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def bind(name: str, hyper: dict[str, object]) -> Method:
    """METHODS[name] with its hyperparameters filled in, as in bind("grpo", {"kl": "0.04"}).

    Method.hyper has all of them. Values may be text, as on a command line. Raises ValueError, in
    one line, for an unknown method or name, for a value of another type, for a negative number and
    for a choice that is none. What else a function does not take, it refuses itself.
    """
    if name not in METHODS:
        raise ValueError(f"method {name!r} does not exist; accepted: {', '.join(METHODS)}")
    method, known, kinds = METHODS[name], {}, {}
    for function in functions(method):
        known |= defaults(function)
        kinds |= get_type_hints(function)
    for key, given in hyper.items():
        if key not in known:
            accepted = ", ".join(f"{k}={v}" for k, v in known.items()) or "none"
            raise ValueError(f"{name} has no hyperparameter {key!r}; accepted: {accepted}")
        known[key] = parse_as(kinds[key], key, str(given))

    def fill(function):
        return partial(function, **{key: known[key] for key in defaults(function)})

    return replace(
        method,
        passes=tuple(map(fill, method.passes)),
        credit=method.credit and fill(method.credit),
        repair=method.repair and fill(method.repair),
        hyper=known,
    )


def parse_as(kind: type, key: str, text: str) -> object:
    """The text as what a hyperparameter is declared to be: a choice, true or false, or a number."""
    choices = get_args(kind) if str in map(type, get_args(kind)) else ()
    truth = {"true": True, "1": True, "false": False, "0": False}
    if kind is bool:
        value, wanted = truth.get(text.lower()), "true or false"
    elif choices:
        value, wanted = text if text in choices else None, " or ".join(choices)
    else:
        wanted = "a number, at least 0"
        try:
            value = float(text) if float(text) >= 0 else None  # a nan is not, either
        except ValueError:
            value = None
    if value is None:
        raise ValueError(f"{key}={text}: must be {wanted}")
    return value


LEGEND = """\
J is what a method maximises, so its loss is -J. J says what a token adds, and after the slash by
what that is divided: L, the longest answer allowed, is one divisor for all; T_i is the answer's
own length; tokens is the number of tokens in the batch.

A     reward - group mean; where the table says std, also divided by the group's standard deviation;
      then changed by the credit rule that stands behind a +
r, s  r = pi / pi_old of a token; s: its geometric mean over the answer
clip  clip(r): r, but at least 1 - eps_low and at most 1 + eps_high
sg    stop-gradient: what is in brackets counts as a constant

The fourth column says when the pushes on a token that the whole group shares cancel.
"""


def table() -> str:
    """METHODS as a table in Markdown, which README.md shows."""
    lines = ["| method | A | J | pushes on a shared token | source |", "|---|---|---|---|---|"]
    for name, method in METHODS.items():
        adv = method.scale + (f" + {method.credit.__name__}" if method.credit else "")
        lines.append(f"| {name} | {adv} | {method.formula} | {method.cancels} | {method.source} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{LEGEND}\n{table()}")
