"""Group-relative policy-gradient losses, one short function each. `python losses.py` lists them.

Four answers to one prompt, `37+48=`, of at most L = 5 tokens. Here a token is a line of the sum,
such as `7+8=15`, and the end of an answer is left out. R is the reward, given at the end only, and
A = R - mean(R) the advantage. How hard does a loss push "so", which all four share? Three ways, at
the first update on a rollout batch:

    answer                                   R    A    T_i   reinforce     grpo   grpo, baseline at
                                                               A / L     A / T_i   every history
    so | 7+8=15 | 70+15=85 | #85             1  +1/2    4     +0.100     +0.125       +0.117
    so | 7+8=15 | carry 1 | 30+40=70 | #75   0  -1/2    5     -0.100     -0.100       -0.183
    so | #85                                 1  +1/2    2     +0.100     +0.250       +0.283
    so | 40+48=88 | 88-3=85 | #84            0  -1/2    4     -0.100     -0.125       -0.217
                                                       sum     0.000     +0.150        0.000

A *push* is a number that every loss gives to every token: c = -N dLoss/dlogp, with the token's
log-probability logp and N answers. A positive push makes the token likelier. All four say "so"
after the same words, so they push one probability, and only the sum counts. Right and wrong answers
have said it, so it cannot explain who won. Under reinforce its pushes cancel. Under grpo they do
not, because grpo divides them by T_i, the answer's own length. (By default both also divide A by
the group's deviation, which changes all four alike, so it is left out here.)

The third column takes from each push the mean push of the other answers with the same *history*,
which is the prompt and all that was said before the token. For tokens that all answers share, one
divisor is enough, because the advantages of the whole group sum to 0. Where only some answers have
one history, and all of these go on with the same token, it is not: had rows 1 and 2 been right, row
3 wrong, and had 1 and 2 both said "carry 1", +0.200 would be left on that under reinforce, and
nothing with a baseline at every history. `prefix_baseline` gives it to any loss.

Does it matter? Like any baseline it changes the noise of an update, and under conditions that
`prefix_baseline` names it leaves the expected update alone. What costs reward is the division by
T_i itself. It makes short mistakes count more than long ones, and so it can change which answers
win (C18).

This file has the parts that all losses are made of, the losses that people use and those of the
paper on cancellation (DFPO, arXiv 2604.13088), the table METHODS, and the baseline. Below the ruled
line stand the losses of neighbouring papers, and what measures a batch.

How to read a loss's docstring, here that of grpo:

    J = min(r A, clip(r, 1-e, 1+e) A)   what a token adds to J; the loss is -J. The ratio r is the
                                        token's probability now over that when it was sampled, and
                                        clip(r, a, b) keeps it between a and b
    mean per answer                     by what J is divided, in words
    Shared token: ...                   what becomes of the pushes on a token like "so"
    (C8)                                a claim: `python verify.py --explain C8` shows its proof
    Source: GRPO Eq. 3-4 (P)            P: the paper states it; S: known second-hand; D: derived
                                        here. claims/README.md lists deviations

sg[x] is x without its gradient. *On-policy*: no optimiser step has been made since the rollout, so
every ratio is 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor


@dataclass(eq=False)  # tensors have no single truth of being equal
class Batch:
    """What a loss needs to know. N rows = prompts x group_size, T columns = longest answer.

    Raises ValueError for a tensor of another shape than logp's, and for rows that are not whole
    groups of at least 2.
    """

    logp: Tensor  # (N, T) log pi_theta of the taken tokens, differentiable
    logp_old: Tensor  # (N, T) log pi_old of the same tokens: of the policy that sampled them
    adv: Tensor  # (N, T) A_i at each of its tokens, or what a credit rule made of it; 0 on padding
    mask: Tensor  # (N, T) bool, True up to and including the first EOS
    group_size: int  # G; the rows of a group are contiguous
    max_tokens: int  # L, the longest answer allowed: the budget
    logp_ref: Tensor | None = None  # (N, T) log pi_ref of a frozen reference, only for the KL term

    def __post_init__(self):
        check_batch(self)
        # A nan on padding would reach the gradient, even of a product that is masked afterwards.
        self.adv = self.adv.masked_fill(~self.mask, 0.0)


# ---------------- the push


def token_coefficients(loss: Tensor, logp: Tensor) -> Tensor:
    """The push c = -N dLoss/dlogp: the ascent weight that every token really gets. Detached. (D)

    logp must be the tensor that the loss was computed from; the graph is kept.
    scalar, (N, T) -> (N, T).
    """
    return -len(logp) * torch.autograd.grad(loss, logp, retain_graph=True)[0]


# ---------------- parts: advantages, ratios, averages, the clip

SCALES = ("std", "mean", "batch", "maxrl")


def group_advantages(rewards: Tensor, group_size: int, scale: str = "std") -> Tensor:
    """Compare every answer with its group: A_i = R_i - mean(R), or that divided by a scale.

    "mean": that is all, Dr. GRPO (P). "std": divided by the group's std + 1e-4, GRPO sec. 4.1.2
    (P). "batch": by the std of all rewards + 1e-4, TRL's "batch" (P). "maxrl": by the group's mean,
    MaxRL 2602.02710 (S). C29 says what each of them ascends. The unbiased std (G - 1) and the 1e-4
    are TRL's. A group whose rewards are all equal gets exactly 0, as does one that "maxrl" cannot
    divide: a reward below 0, or a mean of 0. (N,) floats -> (N,). Raises ValueError for what is not
    whole groups of floats, or for another scale.
    """
    check_groups(len(rewards), group_size)
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be (N,) floats, not {rewards.dtype} {rewards.shape}")
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, not {scale!r}")
    groups = rewards.view(-1, group_size)  # (groups, G)
    mean, low = groups.mean(1, keepdim=True), groups.amin(1, keepdim=True)  # (groups, 1)
    adv = groups - mean  # (groups, G)
    silent = groups.amax(1, keepdim=True) == low  # all equal: rounding must not become a push
    if scale == "std":
        adv = adv / (groups.std(1, keepdim=True) + 1e-4)
    elif scale == "batch":
        adv = adv / (rewards.std() + 1e-4)
    elif scale == "maxrl":
        adv, silent = adv / mean, silent | (low < 0) | (mean <= 0)
    return adv.masked_fill(silent, 0.0).view(-1)


def token_ratio(batch: Batch) -> Tensor:
    """r_{i,t} = pi_theta / pi_old of every taken token, 1 on padding. (N, T)."""
    # Masked before exp: afterwards a padded inf would still turn the gradient into 0 * inf = NaN.
    return (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).exp()


def sequence_ratio(batch: Batch, ratio: str = "geometric") -> Tensor:
    """s_i, one ratio per answer. (N,). Raises ValueError for another kind of ratio.

    "geometric": (prod_t r_{i,t})^(1/T_i), GSPO Eq. 7 (P). "product": prod_t r_{i,t}, of DFPO's
    theory (S). It under- and overflows on long answers, so only recentred has it by default.
    """
    if ratio not in ("geometric", "product"):
        raise ValueError(f'ratio must be "geometric" or "product", not {ratio!r}')
    log_ratio = (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).sum(1)
    return (log_ratio / lengths(batch) if ratio == "geometric" else log_ratio).exp()


def trajectory_advantage(batch: Batch) -> Tensor:
    """One advantage for an answer, for losses with one ratio for an answer (GSPO, DFPO). (N,).

    The mean over its tokens: that is A_i, unless a credit rule gave tokens advantages of their own.
    """
    return batch.adv.sum(1) / lengths(batch)


def lengths(batch: Batch) -> Tensor:
    """T_i, at least 1 so that an empty answer divides by 1, not by 0. (N,)."""
    return batch.mask.sum(1).clamp(min=1)


def seq_mean(x: Tensor, batch: Batch) -> Tensor:
    """(1/N) sum_i (1/T_i) sum_t x_{i,t}: GRPO's average (P), which has a bias (C8, C18)."""
    return (x.masked_fill(~batch.mask, 0.0).sum(1) / lengths(batch)).mean()


def budget_mean(x: Tensor, batch: Batch) -> Tensor:
    """(1/(N L)) sum_i sum_t x_{i,t}: one divisor for all. Dr. GRPO's sum (P), divided by L, too."""
    return x.masked_fill(~batch.mask, 0.0).sum() / (len(x) * batch.max_tokens)


def token_mean(x: Tensor, batch: Batch) -> Tensor:
    """sum x / number of tokens. DAPO (P), which averages over one group; here over the batch."""
    return x.masked_fill(~batch.mask, 0.0).sum() / batch.mask.sum().clamp(min=1)


def clipped(batch: Batch, eps_low: float, eps_high: float, dual: float = float("inf")) -> Tensor:
    """PPO's surrogate min(r A, clip(r, 1-eps_low, 1+eps_high) A). (N, T).

    The min takes the push from winners (A > 0) above the range, and from losers below it. Dual clip
    (1912.09729) also takes that of losers above `dual`; verl has it by default, with 3.
    """
    ratio = token_ratio(batch)
    ratio = torch.where(batch.adv < 0, ratio.clamp(max=dual), ratio)
    return torch.minimum(ratio * batch.adv, ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv)


def k3(batch: Batch) -> Tensor:
    """Schulman's k3 estimate of KL(pi_theta || pi_ref): q - log q - 1 with q = pi_ref / pi_theta.

    (N, T). Raises ValueError without logp_ref.
    """
    if batch.logp_ref is None:
        raise ValueError("the KL term needs logp_ref, log-probs of a frozen reference; it is None")
    log_q = (batch.logp_ref - batch.logp).masked_fill(~batch.mask, 0.0)
    return log_q.exp() - log_q - 1


# ---------------- the losses that people use, and DFPO: Batch -> scalar to minimise, -J
#
# They differ in what weighs A, in whether a clip stops a push, and in the average. Where two of
# them differ in one line, it is that line.


def reinforce(batch: Batch) -> Tensor:
    """Plain policy gradient. METHODS gives it grpo's advantage, with the std.

    J = A log pi, budget mean.
    Shared token: cancels always (it ignores the ratio).
    Source: Williams 1992; the group's mean as in Dr. GRPO (P).
    """
    return -budget_mean(batch.adv * batch.logp, batch)


def grpo(
    batch: Batch,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    kl: float = 0.0,
    kl_ratio: bool = False,
    dual: float = float("inf"),
) -> Tensor:
    """PPO's clipped surrogate, averaged per answer.

    J = min(r A, clip(r, 1-e, 1+e) A) - kl k3, mean per answer.
    Shared token: on-policy sum A_i/T_i remains (C8); above the clip range only losers act, below it
    only winners (C6).
    Source: GRPO Eq. 3-4 (P; kl 0.04 there, off here; it prints no e, 0.2 is PPO's). Trainers add:
    kl_ratio weighs k3 by r, TRL's since 1.10, after DeepSeek-V3.2 (S), which changes its gradient
    (Q4); dual is verl's dual clip, see `clipped`.
    """
    surrogate = clipped(batch, eps_low, eps_high, dual)
    if kl:
        surrogate = surrogate - kl * k3(batch) * (token_ratio(batch) if kl_ratio else 1)
    return -seq_mean(surrogate, batch)


def dr_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO's surrogate over one divisor; METHODS leaves the std out of its advantage.

    J = min(r A, clip(r, 1-e, 1+e) A), budget mean.
    Shared token: cancels inside the clip range only (C6).
    Source: Dr. GRPO sec. 3.2 (P).
    """
    return -budget_mean(clipped(batch, eps_low, eps_high), batch)


def dapo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.28) -> Tensor:
    """GRPO's surrogate with a wider upper clip, averaged over the tokens of groups that disagree.

    J = min(r A, clip(r, 1-e_low, 1+e_high) A), token mean of mixed groups.
    Shared token: cancels inside the clip range only (C6).
    Source: DAPO Eq. 8, 10-12 (P; there other prompts are sampled in place of groups with equal
    rewards, here they are left out).
    """
    # Only the divisor changes: groups with equal rewards have no advantage but 0, push nothing, and
    # are not counted.
    groups = (batch.adv != 0).view(-1, batch.group_size, batch.adv.shape[1])  # (groups, G, T)
    mixed = groups.flatten(1).any(1).repeat_interleave(batch.group_size)  # (N,)
    only_mixed = replace(batch, mask=batch.mask & mixed[:, None])
    return -token_mean(clipped(batch, eps_low, eps_high), only_mixed)


def gspo(batch: Batch, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Tensor:
    """PPO's surrogate once per answer, on the geometric ratio.

    J = min(s A, clip(s, 1-e_low, 1+e_high) A), mean over answers.
    Shared token: the slope of s_i in a logp is s_i/T_i, so sum A_i s_i/T_i remains (C4, C8).
    Source: GSPO Eq. 5-7 (P). ScaleRL (2510.13786, P) found this clip too narrow and 4e-3/5e-3
    working.
    """
    ratio, adv = sequence_ratio(batch), trajectory_advantage(batch)  # (N,), (N,)
    return -torch.minimum(ratio * adv, ratio.clamp(1 - eps_low, 1 + eps_high) * adv).mean()


def cispo(batch: Batch, eps_low: float = 1.0, eps_high: float = 4.0) -> Tensor:
    """Clip the ratio as a detached weight: no token loses its gradient, none gets a huge one.

    J = sg[clip(r, 1-e_low, 1+e_high)] A log pi, token mean. eps_low = 1 is no lower bound.
    Shared token: cancels always. Its weight is the same for all who share it.
    Source: MiniMax-M1 Eq. 4-5 (P; the upper bound is not printed, r <= 5 is ScaleRL's, 2510.13786,
    P).
    """
    weight = token_ratio(batch).clamp(1 - eps_low, 1 + eps_high).detach()
    return -token_mean(weight * batch.adv * batch.logp, batch)


def grpo_symmetric(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO with a clip blind to the sign (no min) and one divisor in place of 1/T_i.

    J = clip(r, 1-e, 1+e) A, budget mean.
    Shared token: cancels always (C7).
    Source: DFPO's "GRPO-fix", of which only the purpose is known (S); clip without min is our
    reading (D).
    """
    ratio = token_ratio(batch)  # 1 on padding
    return -budget_mean(ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch)


def min_replace(w: Tensor, adv: Tensor) -> Tensor:
    """w~_i = min_j w_j: one weight for the whole group. DFPO Eq. 17 (S). Detached.

    Pushes fail to cancel where the answers of a group have unequal weights, so here they get equal
    ones: any part of the group cancels whose advantages sum to 0 (C9). The price is a bias, which
    can favour one of two equal choices. `adv` is there so that the two transforms can be swapped.
    (groups, G), (groups, G) -> (groups, G).
    """
    return w.detach().amin(1, keepdim=True).expand_as(w)


def adv_orthogonal(w: Tensor, adv: Tensor) -> Tensor:
    """w~ = w - (A.w / ||A||^2) A: takes from w what correlates with A. DFPO Eq. 18 (S). Detached.

    So the whole group cancels; weights may become negative (C10). A group whose advantages are all
    0 keeps its weights. (groups, G), (groups, G) -> (groups, G).
    """
    w = w.detach()
    norm = (adv * adv).sum(1, keepdim=True)
    projection = (adv * w).sum(1, keepdim=True) / norm.masked_fill(norm == 0, 1.0)
    return w - projection * adv


def dfpo_min(batch: Batch, ratio: str = "geometric", eps: float = float("inf")) -> Tensor:
    """dfpo-min (our reconstruction): a sequence ratio that Min-Replace has made equal in a group.

    J = sg[min_j s_j] A log pi, budget mean. With eps (ours) tokens whose ratio is outside 1 +- eps
    are clipped for both signs of A.
    Shared token: cancels always, on every zero-sum subset too (C9).
    Source: DFPO Eq. 17 (transform S, loss D: the score form, the divisor and the geometric s are
    ours).
    """
    return _dfpo(min_replace, batch, ratio, eps)


def dfpo_orthogonal(batch: Batch, ratio: str = "geometric", eps: float = float("inf")) -> Tensor:
    """dfpo-orthogonal (our reconstruction): the same under Adv-Orthogonal.

    J = sg[s - (A.s / ||A||^2) A] A log pi, budget mean.
    Shared token: cancels where the whole group shares it, not on subsets (C10).
    Source: DFPO Eq. 18 (transform S, loss D).
    """
    return _dfpo(adv_orthogonal, batch, ratio, eps)


def _dfpo(transform: Callable, batch: Batch, ratio: str, eps: float) -> Tensor:
    groups = (-1, batch.group_size)  # (groups, G)
    s, adv = sequence_ratio(batch, ratio).view(groups), trajectory_advantage(batch).view(groups)
    w = transform(s, adv).reshape(-1, 1)  # (N, 1)
    outside = (token_ratio(batch) - 1).abs() > eps
    return -budget_mean((w * batch.adv * batch.logp).masked_fill(outside, 0.0), batch)


# ---------------- a method = advantage scale + credit + passes


@dataclass
class Method:
    """The losses, the scale of the advantage, and a credit rule if there is one.

    A credit rule gives the tokens of an answer advantages of their own. Only neighbouring papers
    have one.
    """

    passes: tuple[Callable[..., Tensor], ...]  # Batch -> loss; each goes over all minibatches
    formula: str = ""  # J, which is maximised: what a token adds, and its divisor
    cancels: str = ""  # when pushes on a token that the whole group shares cancel
    scale: str = "std"  # of group_advantages
    # Only for the losses below the ruled line:
    credit: Callable[..., Tensor] | None = None  # (N, T) adv, OldPolicy -> (N, T), once a rollout
    repair: Callable[..., Tensor] | None = None  # wrong answers are corrected -> rewards (N,)
    needs_scores: bool = False  # whether credit reads OldPolicy.scores
    # For the metric clip_share, and filled in by `bind`:
    clips: Callable[[Batch], Tensor] = token_ratio  # (N, T) or (N, 1): the ratio that it clips
    hyper: dict[str, object] = field(default_factory=dict)  # all hyperparameters


METHODS: dict[str, Method] = {
    "reinforce": Method((reinforce,), "A log pi / L", "always"),
    "grpo": Method((grpo,), "min(r A, clip(r) A) / T", "equal lengths, inside the clip"),
    "dr-grpo": Method((dr_grpo,), "min(r A, clip(r) A) / L", "inside the clip", scale="mean"),
    "dapo": Method((dapo,), "min(r A, clip(r) A) / tokens of mixed groups", "inside the clip"),
    "gspo": Method(
        (gspo,),
        "min(s A, clip(s) A), once per answer",
        "equal lengths, on-policy",
        clips=lambda batch: sequence_ratio(batch)[:, None],
    ),
    "cispo": Method((cispo,), "sg[min(r, 5)] A log pi / tokens", "always"),
    "grpo-symmetric": Method((grpo_symmetric,), "clip(r) A / L", "always"),
    "dfpo-min": Method((dfpo_min,), "sg[the group's smallest s] A log pi / L", "always"),
    "dfpo-orthogonal": Method(
        (dfpo_orthogonal,), "sg[s without its part along A] A log pi / L", "always"
    ),
}


# ---------------- a baseline at every history


def prefix_nodes(tokens: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """The node of the group's prefix tree that every token leads to, -1 on padding. (D)

    Two tokens have the same node iff their rows are of one group and agree up to and including
    them, so a node is the history of the tokens that come next. TEMPO (2509.18314) builds the same
    tree, for values of its nodes. mask: all tokens, those of an environment too; a loss may leave
    these out by a mask of its own.
    (N, T), (N, T) -> (N, T) int64. Raises ValueError for rows that are not whole groups.
    """
    n, width = tokens.shape
    check_groups(n, group_size)
    # Row i, token t: the first row of the group that says the same up to t. With the tokens 5 6 2,
    # 5 6 7 and 5 9 9 that is 0 0 0, 0 0 1 and 0 2 2; the nodes are 0 1 2, 0 1 5 and 0 7 8.
    groups = tokens.view(-1, group_size, width)  # (groups, G, T)
    same = (groups[:, :, None] == groups[:, None]).to(torch.uint8)  # (groups, G, G, T)
    same = same.cumprod(-1, dtype=torch.uint8)  # up to and including t
    first = same.argmax(2).view(n, width)  # the first row of the group with this prefix
    group = torch.arange(n, device=tokens.device)[:, None] // group_size  # (N, 1)
    place = torch.arange(width, device=tokens.device)
    # The number of that row in the whole batch and the place make it unique.
    return ((group * group_size + first) * width + place).masked_fill(~mask, -1)


def histories(nodes: Tensor, group_size: int) -> Tensor:
    """What was said before each token: the node of the token before, or the group's prompt. (D)

    nodes are prefix_nodes, at least 0, and -1 on padding; so prompts are -2, -3, ...
    (N, T) -> (N, T) int64.
    """
    group = torch.arange(len(nodes), device=nodes.device)[:, None] // group_size  # (N, 1)
    return torch.cat([-2 - group, nodes[:, :-1]], 1)


def prefix_baseline(loss: Tensor, batch: Batch, nodes: Tensor) -> Tensor:
    """Any loss with a leave-one-out baseline at every history.

    c'_{i,t} = c_{i,t} - r_{i,t} mean_j (c_{j,t} / r_{j,t}), over the other answers j of the group
    that take a token after the same words; where there is none, c stays. So over the answers with
    one history c'/r sums to 0: a token that all of them take gets no push. Claim C22 (D, ours):
    this is the state-dependent baseline of the literature, applied to the push after the clip.
    The *expected* update stays if a push is made of its own answer alone, if A is the reward minus
    a fixed number, and if no earlier update has used the batch (C22b). In a run A is the reward
    minus the group's mean, so the expected update moves, too (C22c). The noise may fall or rise
    (C27).
    Returns the loss's value with the gradient -(1/N) sum c' grad log pi. batch.logp is what the
    loss was computed from; nodes are prefix_nodes, (N, T). Raises ValueError for another shape.
    """
    if nodes.shape != batch.logp.shape:
        raise ValueError(f"nodes has shape {tuple(nodes.shape)}, logp {tuple(batch.logp.shape)}")
    c, r = token_coefficients(loss, batch.logp), token_ratio(batch).detach()
    # toy/plain.py's subtract_baseline without its loops: of all K tokens at once. First which
    # tokens have one history, then the sum of c / r over each history, then the mean of the others.
    ids, history = histories(nodes, batch.group_size)[batch.mask].unique(return_inverse=True)
    unit = (c / r.clamp(min=torch.finfo(r.dtype).tiny))[batch.mask]  # (K,); not 0/0 = nan
    sums = unit.new_zeros(len(ids)).index_add_(0, history, unit)
    others = torch.bincount(history)[history] - 1  # (K,) visitors besides oneself
    mean = ((sums[history] - unit) / others.clamp(min=1)).masked_fill(others == 0, 0.0)
    c = c.masked_scatter(batch.mask, c[batch.mask] - r[batch.mask] * mean)
    # A function whose pushes are c, and whose value does not matter: the loss's own is put back.
    surrogate = -(c * batch.logp).masked_fill(~batch.mask, 0.0).sum() / len(c)
    return loss.detach() + surrogate - surrogate.detach()


# =================================================================================================
# The losses of neighbouring papers, and what measures a batch. Each stands by itself.
# =================================================================================================


def recentred(batch: Batch, ratio: str = "product") -> Tensor:
    """REINFORCE that compares every two answers of a group, weighted by both ratios. Ours (D).

    J = sg[mean_j s_i s_j (A_i - A_j)] log pi, budget mean. The weight is s_i mean(s) (A_i - Ahat),
    Ahat = sum_j s_j A_j / sum_j s_j. With the plain product and the scale "mean" it is unbiased,
    also off-policy. The price is variance (C21). A_i is trajectory_advantage.
    Shared token: cancels always. On parts of a group the pairs inside the part cancel.
    """
    groups = (-1, batch.group_size)
    s = sequence_ratio(batch, ratio).detach().clamp(max=1e9)  # s_i s_j stays finite in float32
    s, adv = s.view(groups), trajectory_advantage(batch).view(groups)
    pairs = s[:, :, None] * s[:, None] * (adv[:, :, None] - adv[:, None])  # (groups, G, G)
    return -budget_mean(pairs.mean(2).view(-1, 1) * batch.logp, batch)


def balanced(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO's surrogate, averaged over the tokens of winners and over those of losers, apart.

    J = sum over both signs of A of (n/G) mean over their tokens of min(r A, clip(r, 1-e, 1+e) A).
    n is how many answers of the group, empty ones left out, have that sign; then a mean over
    groups. Balanced Aggregation 2605.04077 (words P: its abstract; formula S).
    Shared token: sum_{A>0} A_i (1/mean T of winners - 1/mean T of losers) is left on-policy.
    """
    surrogate, adv = clipped(batch, eps_low, eps_high), trajectory_advantage(batch)  # (N, T), (N,)
    total = 0.0
    for side in (adv > 0, adv < 0):  # (N,)
        counted = (batch.mask & side[:, None]).view(-1, batch.group_size, surrogate.shape[1])
        sums = surrogate.view(counted.shape).masked_fill(~counted, 0.0).sum((1, 2))  # (groups,)
        answers = side.view(-1, batch.group_size).sum(1)  # (groups,)
        total = total + (answers * sums / counted.sum((1, 2)).clamp(min=1)).sum()
    return -total / len(adv)


def sapo(batch: Batch, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """A soft clip: a sigmoid of the ratio, whose slope fades as r leaves 1, for losers sooner.

    J = (4/tau) sigmoid(tau (r - 1)) A, tau by the sign of A, mean per answer. SAPO 2511.20347 (S:
    as TRL 1.16.0 and verl 0.9.1 have it). At r = 1 its slope is A, whatever tau is.
    Shared token: sum A_i/T_i is left on-policy (C8); off-policy a little more, by the two taus.
    """
    ratio = token_ratio(batch)
    soft = [torch.sigmoid(tau * (ratio - 1)) * 4 / tau for tau in (tau_pos, tau_neg)]
    return -seq_mean(torch.where(batch.adv > 0, *soft) * batch.adv, batch)


def dppo(batch: Batch, delta: float = 0.2) -> Tensor:
    """A clip by probabilities in place of ratios, which looks at the sign of A.

    J = r A, but 0 if A > 0 and p - p_old > delta, or if A < 0 and p_old - p > delta; token mean.
    DPPO 2602.04879, "binary TV" (S: as in verl 0.9.1's dppo_tv and prime-rl's default loss).
    Left out: verl's largest weight r <= 3, prime-rl's penalty of 0.001 log(r)^2.
    Shared token: cancels while p is within delta of p_old; beyond, only one side acts (C6).
    """
    moved = (batch.logp.exp() - batch.logp_old.exp()).detach()  # (N, T)
    outside = torch.where(batch.adv > 0, moved > delta, moved < -delta)
    return -token_mean((token_ratio(batch) * batch.adv).masked_fill(outside, 0.0), batch)


def symmetric_trust(batch: Batch, delta: float = 0.1) -> Tensor:
    """dppo without the sign: a clip that is blind to it.

    J = r A, but 0 if |p - p_old| > delta; token mean. prime-rl's loss of type "ipo", there called
    "a symmetric trust region" (P: its source; its penalty of 0.001 log(r)^2 is left out).
    Shared token: cancels always (C7).
    """
    outside = (batch.logp.exp() - batch.logp_old.exp()).detach().abs() > delta  # (N, T)
    return -token_mean((token_ratio(batch) * batch.adv).masked_fill(outside, 0.0), batch)


# ---------------- NTHR, Advantage Reweighting and Lopti: GRPO's surrogate, averaged over all tokens


def token_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.24) -> Tensor:
    """GRPO's surrogate averaged over all tokens: under Advantage Reweighting and Lopti.

    J = min(r A, clip(r, 1-e_low, 1+e_high) A), token mean. AR/Lopti's code (P).
    Shared token: cancels inside the clip range only (C6).
    """
    return -token_mean(clipped(batch, eps_low, eps_high), batch)


def nthr_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """The same with NTHR's clip: the loss under its credit rules.

    J = min(r A, clip(r, 1-e, 1+e) A), token mean. NTHR sec. 2.2 (P; there over a group's tokens).
    Shared token: cancels inside the clip range (C6), where the credit rule softens nothing.
    """
    return token_grpo(batch, eps_low, eps_high)


def pos_only(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO that learns from the better-than-average answers only: NTHR's control.

    J = min(r A+, clip(r, 1-e, 1+e) A+) with A+ = max(A, 0), token mean. NTHR sec. 2.2 (P).
    Shared token: does not cancel; nothing stands against the winners.
    """
    return token_grpo(replace(batch, adv=batch.adv.clamp(min=0)), eps_low, eps_high)


def lopti_low(
    batch: Batch, eta: float = 0.5, eps_low: float = 0.2, eps_high: float = 0.24
) -> Tensor:
    """Lopti's first pass: the improbable tokens alone, divided by the number of all tokens.

    J = 1[pi_old < eta] min(r A, clip(r, 1-e_low, 1+e_high) A), token mean. AR/Lopti's code (P).
    eta 0.5 is that of ar-lopti. Alone, the code's scripts take 0.4.
    Shared token: as token_grpo. All its visitors have one pi_old, so they are in the same pass.
    """
    return _lopti(batch, batch.logp_old.exp() < eta, eps_low, eps_high)


def lopti_high(
    batch: Batch, eta: float = 0.5, eps_low: float = 0.2, eps_high: float = 0.24
) -> Tensor:
    """Lopti's second pass: the other tokens, from the parameters that the first pass has left.

    J = 1[pi_old >= eta] min(r A, clip(r, 1-e_low, 1+e_high) A), token mean. AR/Lopti's code (P).
    Shared token: as lopti_low. The clip acts here even on-policy: r has moved since pi_old.
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

    A_{i,t} = (alpha pi_old + 1 - alpha) A_i. AR/Lopti Eq. 4 (P). alpha 0.3 is that of ar-lopti.
    Shared token: one factor for all visitors, so what cancelled still does.
    (N, T), OldPolicy -> (N, T). Raises ValueError for an alpha outside 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie between 0 and 1, not {alpha}: more turns gradients round")
    return (alpha * old.logp.detach().exp() + 1 - alpha) * adv


def nthr(
    adv: Tensor, old: OldPolicy, beta: float = 1.0, eta: float = -1.0, self_term: bool = False
) -> Tensor:
    """Soften the penalty on the tokens of wrong answers that push the correct ones down.

    A_{j,k} = eta A_j where A_j < 0 and s_{j,k} > tau = beta min_i mean_k s_{i,k}, i over the
    correct answers. NTHR 5.2 (P). s is llm/neighbours.nthr_scores; of a correct answer it leaves
    out that answer itself, unless self_term. eta -1 stands for 2|0.5 - p| (App. 7.3, P), p the
    group's share of correct answers.
    Shared token: a winner's counterweight is taken away, on purpose. (N, T), OldPolicy -> (N, T).
    Raises ValueError without scores.
    """
    selected = nthr_selected(old, beta, self_term) & (adv < 0)
    return torch.where(selected, nthr_factor(old, eta) * adv, adv)


def nthr_random(
    adv: Tensor, old: OldPolicy, beta: float = 1.0, eta: float = -1.0, self_term: bool = False
) -> Tensor:
    """NTHR's control: soften as many tokens of each wrong answer as nthr selects, but any.

    A_{j,k} = eta A_j on tokens drawn at random among those of the answer. NTHR (P); the same eta as
    nthr's is ours. Arguments as for nthr. Shared token: as nthr. (N, T), OldPolicy -> (N, T).
    """
    selected = nthr_selected(old, beta, self_term) & (adv < 0)
    count = selected.sum(1, keepdim=True)  # (N, 1)
    draw = torch.rand(old.mask.shape, generator=old.gen).to(adv.device)  # (N, T)
    rank = draw.masked_fill(~old.mask, 2.0).argsort(1).argsort(1)  # padding comes last
    return torch.where(rank < count, nthr_factor(old, eta) * adv, adv)


def nthr_factor(old: OldPolicy, eta: float) -> Tensor:
    """eta of each answer; -1 stands for 2|0.5 - p|, p its group's share of correct ones. (N, 1)."""
    correct = (old.rewards == 1).to(old.logp.dtype).view(-1, old.group_size)  # (groups, G)
    share = correct.mean(1).repeat_interleave(old.group_size)[:, None]  # (N, 1)
    return 2 * (0.5 - share).abs() if eta < 0 else torch.full_like(share, eta)


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


def ibpo(adv: Tensor, old: OldPolicy, reading: str = "sign") -> Tensor:
    """Blame a repaired answer for what its correction changed, or praise it for what was kept.

    A_{i,t} = m_{i,t} A'_i, m = 1[kept] if A'_i > 0, 1[changed] if A'_i < 0, 1 if not repaired.
    A' comes from shaped_rewards. IBPO (S). This reading, "sign", is ours (D): a repaired answer
    never rewards what its correction changed, or blames what it kept. "changed", 1[changed] for
    both signs, is the literal reading of the best source, and can reward the mistake (I3).
    Shared token: by the sign of A' a repaired answer drops out of the sum, on purpose.
    (N, T), OldPolicy -> (N, T). Raises ValueError for another reading, and without corrections.
    """
    if reading not in ("sign", "changed", "none"):
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


_SURROGATE, _INSIDE = "min(r A, clip(r) A) / tokens", "inside the clip"
METHODS |= {
    "recentred": Method(
        (recentred,), "sg[mean_j s_i s_j (A_i - A_j)] log pi / L", "always", scale="mean"
    ),
    "balanced": Method(
        (balanced,), "min(r A, clip(r) A) / tokens of that sign", "equal mean T, inside the clip"
    ),
    "sapo": Method((sapo,), "(4/tau) sigmoid(tau (r - 1)) A / T", "equal lengths, on-policy"),
    "dppo": Method(
        (dppo,), "r A / tokens, 0 where p left p_old the way A says", _INSIDE, scale="mean"
    ),
    "symmetric-trust": Method(
        (symmetric_trust,), "r A / tokens, 0 where p left p_old", "always", scale="mean"
    ),
    "pos-only": Method((pos_only,), "min(r A+, clip(r) A+) / tokens", "never"),
    "nthr": Method(
        (nthr_grpo,),
        f"{_SURROGATE}; some losers' tokens softer",
        f"{_INSIDE}, unsoftened",
        credit=nthr,
        needs_scores=True,
    ),
    "nthr-random": Method(
        (nthr_grpo,),
        f"{_SURROGATE}; any tokens of losers softer",
        f"{_INSIDE}, unsoftened",
        credit=nthr_random,
        needs_scores=True,
    ),
    "advantage-reweighting": Method(
        (token_grpo,), f"{_SURROGATE}; rare tokens softer", _INSIDE, credit=advantage_reweighting
    ),
    "lopti": Method((lopti_low, lopti_high), f"{_SURROGATE}; rare tokens first", _INSIDE),
    "ar-lopti": Method(
        (lopti_low, lopti_high),
        f"{_SURROGATE}; rare tokens first, softer",
        _INSIDE,
        credit=advantage_reweighting,
    ),
    "ibpo": Method(
        (grpo,),
        "grpo's; of repaired answers only tokens that the sign fits",
        "as grpo, if no answer is repaired",
        credit=ibpo,
        repair=shaped_rewards,
    ),
}


# ---------------- what measures a batch


@torch.no_grad()
def decided(
    rewards: Tensor, nodes: Tensor, mask: Tensor, group_size: int, logp: Tensor | None = None
) -> dict[str, float]:
    """Would a baseline at every history lower the noise? How much earlier tokens decide (C27).

    decided = rho^2 = 1 - Var(R | history) / Var(R) over the tokens whose history has n >= 2
    visitors; visitors = mean n; break_even = (G - n) / (n (G - 1)), or its like for the mean of
    n / (n - 1): in place of the group's mean it pays about where decided is above that, for tokens
    that earn nothing. With logp a token counts 1 - pi, because what was sure to be taken has no
    gradient; else all count alike, and Var(R | history) has no bias (C27b). (D, ours)
    (N,), (N, T) prefix_nodes, (N, T), G, (N, T) -> the three, by name; none where nothing is shared
    or no reward differs.
    """
    weight = mask.double() if logp is None else -torch.expm1(logp.double())
    weight, R = weight[mask], rewards.double()[:, None].expand(mask.shape)[mask]  # (K,) tokens
    of_group = rewards.double().view(-1, group_size).var(1).repeat_interleave(group_size)  # (N,)
    ids, history = histories(nodes, group_size)[mask].unique(return_inverse=True)
    n = torch.bincount(history)[history].double()  # (K,) visitors of the token's history
    others = (R.new_zeros(len(ids)).index_add_(0, history, R)[history] - R) / (n - 1)
    # The variance of n visitors is the mean of R (R - mean of the others).
    within, total = R * (R - others), of_group[:, None].expand(mask.shape)[mask]
    within, total, n, weight = (x[n > 1] for x in (within, total, n, weight))
    if not weight @ total > 0:
        return {}
    weight = weight / weight.sum()
    price = (group_size - 1) / group_size * (weight @ (n / (n - 1)))  # of not knowing the mean
    numbers = 1 - weight @ within / (weight @ total), weight @ n, 1 - 1 / price
    return dict(zip(("decided", "visitors", "break_even"), map(float, numbers), strict=True))


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


# ---------------- a method by name: its hyperparameters are filled in before a run


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
    one line, for an unknown method or name, and for a value that the method does not take.
    """
    if name not in METHODS:
        raise ValueError(f"method {name!r} does not exist; accepted: {', '.join(METHODS)}")
    method, known = METHODS[name], {}
    for function in functions(method):
        known |= defaults(function)
    for key, text in hyper.items():
        if key not in known:
            accepted = ", ".join(f"{k}={v}" for k, v in known.items()) or "none"
            raise ValueError(f"{name} has no hyperparameter {key!r}; accepted: {accepted}")
        kind = type(known[key])
        try:
            value = bool(int(text)) if kind is bool else kind(text)
        except ValueError:
            raise ValueError(f"{key}={text}: a {kind.__name__} is expected") from None
        # The only negative value is a default: nthr's eta -1 stands for a formula.
        if kind is float and not value >= 0 and value != known[key]:
            raise ValueError(f"{key}={text}: must be at least 0")
        known[key] = value

    def fill(function):
        return partial(function, **{key: known[key] for key in defaults(function)})

    bound = replace(
        method,
        passes=tuple(map(fill, method.passes)),
        credit=method.credit and fill(method.credit),
        repair=method.repair and fill(method.repair),
        hyper=known,
    )
    # Once on zeros: what only the functions can judge is refused now, not after a warm start.
    zeros = torch.zeros(2, 1)
    mask, rewards, repaired = zeros == 0, zeros[:, 0], zeros[:, 0] > 0
    for loss_fn in bound.passes:
        loss_fn(Batch(zeros, zeros, zeros, mask, group_size=2, max_tokens=1, logp_ref=zeros))
    if bound.repair:
        bound.repair(rewards, repaired)
    if bound.credit:
        facts = dict(scores=zeros, own_scores=zeros, kept_mask=mask, repaired=repaired)
        bound.credit(zeros, OldPolicy(mask.long(), mask, zeros, rewards, group_size=2, **facts))
    return bound


LEGEND = """\
J is what a method maximises: what a token adds to it, and by what it is divided. The loss is -J.

A     reward - group mean; where the table says std, also divided by the group's deviation
r, s  r = pi_theta / pi_old of a token; s: its geometric mean over the answer (recentred: product)
clip  clip(r): r, but at least 1 - eps_low and at most 1 + eps_high
L, T  the longest answer allowed: one divisor for all; T: the answer's own length
sg    stop-gradient: what is in brackets counts as a constant

The last column says when the pushes on a token cancel that a whole group shares.
"""

if __name__ == "__main__":
    print(LEGEND)
    print(f"{'--method':22} {'A':5} {'J':60} cancels")
    for name, method in METHODS.items():
        print(f"{name:22} {method.scale:5} {method.formula:60} {method.cancels}")
