"""Group-relative policy-gradient losses, one short pure function each.

N answers are rewarded at the end only. The G answers to one prompt are a group and are compared
with each other: A_i is the advantage of answer i. Every method turns the log-probs of the sampled
tokens into one scalar. What that scalar really does to a token is its coefficient
c = -N dLoss/dlogp. Answers share the prompt and often their first tokens; there the coefficients of
the group add up. A token that the whole group shares says nothing about which answer was better, so
they ought to add up to 0: they cancel.

`prefix_baseline` makes them add up to 0 for any loss. If a loss judges each answer by itself,
against a fixed baseline, its expected update stays where it was, and only the noise of an update
changes. What costs reward is a bias in a choice between tokens.

r is the token's ratio pi_theta / pi_old, and s the answer's geometric mean of r (of recentred: the
product). "std" and "mean" are the scales of the advantage. "answer", "budget" and "tokens" are the
averages seq_mean, budget_mean and token_mean; "signs" is a token mean of winners (A > 0) and one of
losers. The last column says where a token that the whole group shares cancels.

    method                 A     weight of A       clip            average  cancels
    reinforce              std   1                 none            budget   always
    grpo                   std   r                 min, 0.2        answer   equal lengths, unclipped
    grpo-symmetric         std   r                 no min, 0.2     budget   always
    dr-grpo                mean  r                 min, 0.2        budget   unclipped
    dapo                   std   r                 min, 0.2/0.28   tokens   unclipped
    gspo                   std   s                 min, 3e-4/4e-4  answer   equal lengths, on-policy
    cispo                  std   r, detached       no min, r <= 5  tokens   always
    dfpo-min               std   min of s          none            budget   always
    dfpo-orthogonal        std   s, not along A    none            budget   always
    recentred              mean  product of two s  none            budget   always
    sapo                   std   r, fading         soft, by signs  answer   equal lengths, on-policy
    dppo                   mean  r                 |p-p_old|, .2   tokens   unclipped
    symmetric-trust        mean  r                 no min, .1      tokens   always
    balanced               std   r                 min, 0.2        signs    equal mean T, unclipped
    off-policy-mask        std   r; far losers 0   min, 0.2        answer   as grpo, if none is far
    pos-only               std   r; losers 0       min, 0.2        tokens   never
    nthr, nthr-random      std   r; losers softer  min, 0.2        tokens   unclipped, unsoftened
    advantage-reweighting  std   r; rare softer    min, 0.2/0.24   tokens   unclipped
    lopti, ar-lopti        std   r; two passes     min, 0.2/0.24   tokens   unclipped
    ibpo                   std   r; mask by sign   min, 0.2        answer   as grpo, if not masked

Grades in the docstrings: P stated by the paper; S known only second-hand; D derived here. Where a
function deviates from its paper, its docstring says so. C8 and the like are claims: `python
verify.py --explain C8` proves it. `python losses.py` prints every formula.

Papers: GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, CISPO (MiniMax-M1)
2506.13585, DFPO 2604.13088v1, NTHR 2505.18830, Advantage Reweighting and Lopti ("AR/Lopti")
2505.12929, IBPO 2605.16302, Balanced Aggregation 2605.04077, DeepSeek-V3.2 2512.02556, SAPO
2511.20347, DPPO 2602.04879.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass
class Batch:
    """What a loss needs to know. N rows = prompts x group_size, T columns = longest answer.

    Raises ValueError for a tensor of another shape than logp's, and for rows that are not whole
    groups of at least 2.
    """

    logp: Tensor  # (N, T) log pi_theta of the taken tokens, differentiable
    logp_old: Tensor  # (N, T) log pi_old of the same tokens, no grad
    adv: Tensor  # (N, T) per-token advantage: A_i repeated along T unless a credit rule reshaped it
    mask: Tensor  # (N, T) bool, True up to and including the first EOS
    group_size: int  # G; the rows of a group are contiguous
    max_tokens: int  # L, the longest answer allowed: the budget
    logp_ref: Tensor | None = None  # (N, T) log pi_ref of a frozen reference, only for the KL term

    def __post_init__(self):
        for name in ("logp_old", "adv", "mask", "logp_ref"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != self.logp.shape:
                given, expected = tuple(tensor.shape), tuple(self.logp.shape)
                raise ValueError(f"{name} has shape {given}, logp has {expected}")
        if self.logp.dim() != 2 or self.mask.dtype != torch.bool or self.max_tokens < 1:
            raise ValueError("logp must be (N, T), mask bool, and max_tokens at least 1")
        check_groups(len(self.logp), self.group_size)


def check_groups(rows: int, group_size: int):
    """Raises ValueError unless the rows are whole groups: an answer needs a sibling."""
    if group_size < 2 or rows == 0 or rows % group_size:
        raise ValueError(f"{rows} rows are not whole groups of {group_size} (at least 2)")


# ---------------- advantages


SCALES = ("std", "mean", "batch", "maxrl")


def group_advantages(rewards: Tensor, group_size: int, scale: str = "std") -> Tensor:
    """Compare every answer with its group: A_i = R_i - mean(R), which is the scale "mean".

    "std": over the group's std + 1e-4. GRPO sec. 4.1.2 (P); "mean" is Dr. GRPO's (P).
    "batch": over the std of all rewards + 1e-4. TRL's "batch" (P), as in REINFORCE++-baseline (S).
    "maxrl": over the group's mean. MaxRL 2602.02710 (S). It needs a mean above 0 and no reward
    below 0: other groups count as equal.
    A group whose rewards are all equal gets exactly 0. Claim C29 says what each scale ascends.
    The papers leave two things open. Ours are TRL's: the unbiased std (N - 1), and the 1e-4.
    (N,) floats -> (N,).
    Raises ValueError for G < 2, N not divisible by G, rewards that are no floats, another scale.
    """
    check_groups(len(rewards), group_size)
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be (N,) floats, not {rewards.dtype} {rewards.shape}")
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, not {scale!r}")
    groups = rewards.view(-1, group_size)  # (P, G)
    mean = groups.mean(1, keepdim=True)
    equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    adv = groups - mean
    if scale == "std":
        adv = adv / (groups.std(1, keepdim=True) + 1e-4)
    elif scale == "batch":
        adv = adv / (rewards.std() + 1e-4)
    elif scale == "maxrl":
        equal = equal | (groups.amin(1, keepdim=True) < 0) | (mean <= 0)
        adv = adv / mean
    return adv.masked_fill(equal, 0.0).view(-1)


# ---------------- ratios and averages


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
    """A_i, the mean of the answer's per-token advantages; 0 for an empty answer. (N,).

    Losses with one ratio for an answer (GSPO, DFPO) take it. Without a credit rule it is A_i.
    """
    return masked_adv(batch).sum(1) / lengths(batch)


def masked_adv(batch: Batch) -> Tensor:
    """A_{i,t}, 0 on padding, where a nan would reach the gradient of a masked product. (N, T)."""
    return batch.adv.masked_fill(~batch.mask, 0.0)


def lengths(batch: Batch) -> Tensor:
    """T_i, at least 1 so that an empty answer divides by 1, not by 0. (N,)."""
    return batch.mask.sum(1).clamp(min=1)


def seq_mean(x: Tensor, batch: Batch) -> Tensor:
    """(1/N) sum_i (1/T_i) sum_t x_{i,t}: GRPO's average (P). The 1/T_i breaks cancellation (C8)."""
    return (x.masked_fill(~batch.mask, 0.0).sum(1) / lengths(batch)).mean()


def budget_mean(x: Tensor, batch: Batch) -> Tensor:
    """(1/(N L)) sum_i sum_t x_{i,t}: a token weighs the same in every answer. Dr. GRPO (P).

    The paper writes 1/G. Our further factor 1/L is a constant; L is the longest answer allowed.
    """
    return x.masked_fill(~batch.mask, 0.0).sum() / (len(x) * batch.max_tokens)


def token_mean(x: Tensor, batch: Batch) -> Tensor:
    """sum x / number of tokens. DAPO (P), which averages over one group; here over the batch."""
    return x.masked_fill(~batch.mask, 0.0).sum() / batch.mask.sum().clamp(min=1)


def clipped(batch: Batch, eps_low: float, eps_high: float, dual: float = float("inf")) -> Tensor:
    """PPO's surrogate min(r A, clip(r, 1-eps_low, 1+eps_high) A). (N, T).

    The min takes the gradient of winners (A > 0) above the range, and of losers below it. Dual clip
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


# ---------------- the losses: Batch -> scalar to minimise
#
# README's picture: four answers to one prompt, of at most L = 5 tokens. (Here a token is a word or
# a calculation.) Two answers are right, so with the scale "mean" A is 1/2 or -1/2. All ratios are
# 1. This is how hard two losses push "so", which all four share:
#
#     answer                            reward    A     T_i    reinforce: A / L    grpo: A / T_i
#     so  7+8=15  70+15=85  #85           1     +1/2     4          +0.100             +0.125
#     so  7+8=15  carry 1  30+40=70  #75  0     -1/2     5          -0.100             -0.100
#     so  #85                             1     +1/2     2          +0.100             +0.250
#     so  40+48=88  88-3=85  #84          0     -1/2     4          -0.100             -0.125
#                                                        sum         0.000             +0.150
#
# "so" earns nothing. Under reinforce its pushes cancel, under grpo they do not. A token that only a
# part of the group shares may keep a push, on purpose: if its answers earn more than the group
# does, equal weights leave it a push up. That is its credit.


def reinforce(batch: Batch) -> Tensor:
    """Plain policy gradient with the group mean as baseline.

    J = A log pi, budget mean. Williams 1992; group baseline as in Dr. GRPO (P).
    Shared token: cancels always (it ignores the ratio).
    """
    return -budget_mean(masked_adv(batch) * batch.logp, batch)


def grpo(
    batch: Batch,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    kl: float = 0.0,
    kl_ratio: bool = False,
    dual: float = float("inf"),
) -> Tensor:
    """PPO's clipped surrogate, averaged per answer; kl weighs a k3 penalty to logp_ref.

    J = min(r A, clip(r, 1-e, 1+e) A) - kl k3, mean per answer. GRPO Eq. 3-4 (P).
    The paper's kl is 0.04. Here it is off by default. The paper prints no e; 0.2 is PPO's.
    kl_ratio: kl r k3, TRL's since 1.10, after DeepSeek-V3.2 (S). Its gradient is another one (Q4).
    dual: dual clip, as in clipped; off by default.
    Shared token: sum A_i/T_i is left on-policy (C8); outside the clip range only losers or only
    winners act (C6).
    """
    surrogate = clipped(batch, eps_low, eps_high, dual)
    if kl:
        surrogate = surrogate - kl * k3(batch) * (token_ratio(batch) if kl_ratio else 1)
    return -seq_mean(surrogate, batch)


def grpo_symmetric(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO without min and without 1/T_i: the gate is the same for winners and losers.

    J = clip(r, 1-e, 1+e) A, budget mean. DFPO's "GRPO-fix" (S; definition D).
    Only the purpose of GRPO-fix is known. Clip without min is our reading of it.
    Shared token: cancels always (C7).
    """
    ratio = token_ratio(batch)  # 1 on padding
    return -budget_mean(ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch)


def dr_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO's surrogate with the budget as normaliser; METHODS leaves the std out of its advantage.

    J = min(r A, clip(r, 1-e, 1+e) A), budget mean. Dr. GRPO sec. 3.2 (P).
    Shared token: cancels inside the clip range only (C6).
    """
    return -budget_mean(clipped(batch, eps_low, eps_high), batch)


def dapo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.28) -> Tensor:
    """GRPO's surrogate with a wider upper clip, averaged over the tokens of groups that disagree.

    J = min(r A, clip(r, 1-e_low, 1+e_high) A), token mean of mixed groups. DAPO Eq. 8, 10-12 (P).
    The paper samples other prompts in place of groups with equal rewards. Here they are left out.
    Shared token: cancels inside the clip range only (C6).
    """
    # A group whose rewards are equal has no advantage but 0.
    groups = (masked_adv(batch) != 0).view(-1, batch.group_size, batch.adv.shape[1])  # (P, G, T)
    mixed = groups.flatten(1).any(1).repeat_interleave(batch.group_size)  # (N,)
    only_mixed = replace(batch, mask=batch.mask & mixed[:, None])
    return -token_mean(clipped(batch, eps_low, eps_high), only_mixed)


def gspo(batch: Batch, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Tensor:
    """PPO's surrogate once per answer, on the geometric ratio.

    J = min(s A, clip(s, 1-e_low, 1+e_high) A), mean over answers. GSPO Eq. 5-7 (P).
    The clip is made for long answers. ScaleRL (2510.13786) found this scale too small and 4e-3/5e-3
    working (P).
    Shared token: sum A_i s_i/T_i is left (C4, C8): ds_i/dlogp is s_i/T_i.
    """
    ratio, adv = sequence_ratio(batch), trajectory_advantage(batch)  # (N,), (N,)
    return -torch.minimum(ratio * adv, ratio.clamp(1 - eps_low, 1 + eps_high) * adv).mean()


def cispo(batch: Batch, eps_low: float = 1.0, eps_high: float = 4.0) -> Tensor:
    """Clip the ratio as a detached weight: no token loses its gradient, none gets a huge one.

    J = sg[clip(r, 1-e_low, 1+e_high)] A log pi, token mean. MiniMax-M1 Eq. 4-5 (P).
    eps_low = 1 is no lower bound. The paper does not print the upper one; r <= 5 is ScaleRL's
    (2510.13786, P), where 4, 5 and 8 did not differ. ScaleRL averages over the tokens of a prompt,
    then over prompts, divides by the batch's std, and drops prompts with equal rewards. Here the
    average is over the batch, the std is the group's, and groups with equal rewards stay in the
    number of tokens (dapo leaves them out).
    Shared token: cancels always. Its weight is the same for all who share it.
    """
    weight = token_ratio(batch).clamp(1 - eps_low, 1 + eps_high).detach()
    return -token_mean(weight * masked_adv(batch) * batch.logp, batch)


def min_replace(w: Tensor, adv: Tensor) -> Tensor:
    """w~_i = min_j w_j: one weight for the whole group.

    So any part of the group cancels whose advantages sum to 0. The expected update changes, and can
    favour one of two equal choices (tests/test_losses.py). Detached. `adv` is not used; it keeps
    the two transforms interchangeable. DFPO Eq. 17 (S).
    (P, G), (P, G) -> (P, G).
    """
    return w.detach().amin(1, keepdim=True).expand_as(w)


def adv_orthogonal(w: Tensor, adv: Tensor) -> Tensor:
    """w~ = w - (A.w / ||A||^2) A: takes from w what correlates with A, so that the group cancels.

    Detached; a group whose advantages are all 0 keeps its weights. Weights may become negative
    (C10). DFPO Eq. 18 (S). (P, G), (P, G) -> (P, G).
    """
    w = w.detach()
    norm = (adv * adv).sum(1, keepdim=True)
    projection = (adv * w).sum(1, keepdim=True) / norm.masked_fill(norm == 0, 1.0)
    return w - projection * adv


def dfpo_min(batch: Batch, ratio: str = "geometric", eps: float = float("inf")) -> Tensor:
    """REINFORCE under a sequence ratio that Min-Replace has made equal within the group.

    J = sg[min_j s_j] A log pi, budget mean. DFPO Eq. 17 (transform S, loss D).
    The paper's full text was not available to us. Notes on it have an objective with neither 1/T_i
    nor L, called clip-free, and the plain product in its theory (S). Ours are the score form around
    the detached weight, the budget mean, because a 1/T_i would undo the cancellation (C8), and the
    geometric s, because a product under- and overflows. Which ratio the authors' code has is not
    known. With eps (ours) tokens whose ratio is outside 1 +- eps are clipped for both signs of A.
    Shared token: cancels always, on every zero-sum subset too (C9).
    """
    groups = (-1, batch.group_size)  # (P, G)
    s, adv = sequence_ratio(batch, ratio).view(groups), trajectory_advantage(batch).view(groups)
    w = min_replace(s, adv).reshape(-1, 1)  # (N, 1)
    outside = (token_ratio(batch) - 1).abs() > eps
    return -budget_mean((w * masked_adv(batch) * batch.logp).masked_fill(outside, 0.0), batch)


def dfpo_orthogonal(batch: Batch, ratio: str = "geometric", eps: float = float("inf")) -> Tensor:
    """REINFORCE under a sequence ratio that Adv-Orthogonal has made orthogonal to the advantages.

    J = sg[s - (A.s / ||A||^2) A] A log pi, budget mean. DFPO Eq. 18 (transform S, loss D).
    What is ours, and eps: as in dfpo_min.
    Shared token: cancels where the whole group shares it, not on subsets (C10).
    """
    groups = (-1, batch.group_size)  # (P, G)
    s, adv = sequence_ratio(batch, ratio).view(groups), trajectory_advantage(batch).view(groups)
    w = adv_orthogonal(s, adv).reshape(-1, 1)  # (N, 1)
    outside = (token_ratio(batch) - 1).abs() > eps
    return -budget_mean((w * masked_adv(batch) * batch.logp).masked_fill(outside, 0.0), batch)


def recentred(batch: Batch, ratio: str = "product") -> Tensor:
    """REINFORCE that compares every two answers of a group, weighted by both ratios.

    J = sg[mean_j s_i s_j (A_i - A_j)] log pi, budget mean. Ours (D).
    The weight in brackets is s_i mean(s) (A_i - Ahat), Ahat = sum_j s_j A_j / sum_j s_j.
    With the plain product and the scale "mean" it is unbiased, also off-policy. The price is
    variance (C21). "geometric" has less of it and is biased. A_i is trajectory_advantage.
    Shared token: cancels always. On parts of a group the pairs inside the part cancel.
    """
    groups = (-1, batch.group_size)
    s = sequence_ratio(batch, ratio).detach().clamp(max=1e9)  # s_i s_j stays finite in float32
    s, adv = s.view(groups), trajectory_advantage(batch).view(groups)
    pairs = s[:, :, None] * s[:, None] * (adv[:, :, None] - adv[:, None])  # (P, G, G)
    return -budget_mean(pairs.mean(2).view(-1, 1) * batch.logp, batch)


def balanced(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO's surrogate, averaged over the tokens of winners and over those of losers, apart.

    J = sum over both signs of A of (n/G) mean over their tokens of min(r A, clip(r, 1-e, 1+e) A).
    n is how many answers of the group, empty ones left out, have that sign; then a mean over
    groups. Balanced Aggregation (words P: its abstract; formula S).
    Shared token: sum_{A>0} A_i (1/mean T of winners - 1/mean T of losers) is left on-policy.
    """
    surrogate, adv = clipped(batch, eps_low, eps_high), trajectory_advantage(batch)  # (N, T), (N,)
    total = 0.0
    for side in (adv > 0, adv < 0):  # (N,)
        counted = (batch.mask & side[:, None]).view(-1, batch.group_size, surrogate.shape[1])
        sums = surrogate.view(counted.shape).masked_fill(~counted, 0.0).sum((1, 2))  # (P,)
        answers = side.view(-1, batch.group_size).sum(1)  # (P,)
        total = total + (answers * sums / counted.sum((1, 2)).clamp(min=1)).sum()
    return -total / len(adv)


def off_policy_mask(
    batch: Batch, delta: float = 0.1, eps_low: float = 0.2, eps_high: float = 0.2
) -> Tensor:
    """GRPO without the losers that the policy has moved away from.

    J = min(r A, clip(r, 1-e, 1+e) A) unless A_i < 0 and d_i > delta, mean per answer.
    d_i is the answer's mean log(pi_old / pi_theta). DeepSeek-V3.2 Eq. 9 (S: as theirs is
    transcribed by the libraries that have it).
    The paper prints no delta. With an eps of inf only the mask is left. The KL term is left out.
    Shared token: as grpo. Where losers are masked, their share of the winners' push is left.
    """
    far = sequence_ratio(batch).log() < -delta  # (N,) the geometric mean, so a mean of logs
    masked = far & (trajectory_advantage(batch) < 0)
    return -seq_mean(clipped(batch, eps_low, eps_high).masked_fill(masked[:, None], 0.0), batch)


def pos_only(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO that learns from the better-than-average answers only: NTHR's control.

    J = min(r A+, clip(r, 1-e, 1+e) A+) with A+ = max(A, 0), token mean. NTHR sec. 2.2 (P).
    It divides by all tokens, as nthr_grpo does, so that its step is comparable.
    Shared token: does not cancel; nothing stands against the winners.
    """
    return nthr_grpo(replace(batch, adv=batch.adv.clamp(min=0)), eps_low, eps_high)


def nthr_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO's surrogate averaged over all tokens, as NTHR has it: the loss under its credit rules.

    J = min(r A, clip(r, 1-e, 1+e) A), token mean. NTHR sec. 2.2 (P).
    The paper divides by the tokens of a group, 1 / sum_i |y_i|, we by those of the minibatch. Left
    out is its KL term (1e-4).
    Shared token: cancels inside the clip range (C6), where the credit rule softens nothing.
    """
    return -token_mean(clipped(batch, eps_low, eps_high), batch)


def token_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.24) -> Tensor:
    """GRPO's surrogate averaged over all tokens: under Advantage Reweighting and Lopti.

    J = min(r A, clip(r, 1-e_low, 1+e_high) A), token mean. AR/Lopti's code (P).
    Left out are its KL term (0.001) and its dual clip (10). It averages over the tokens of a
    micro-batch, we over the minibatch's.
    Shared token: cancels inside the clip range only (C6).
    """
    return -token_mean(clipped(batch, eps_low, eps_high), batch)


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


def sapo(batch: Batch, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """A soft clip: a sigmoid of the ratio, whose slope fades as r leaves 1, for losers sooner.

    J = (4/tau) sigmoid(tau (r - 1)) A, tau by the sign of A, mean per answer. SAPO 2511.20347 (S:
    as TRL 1.16.0 and verl 0.9.1 have it). At r = 1 its slope is A, whatever tau is.
    Shared token: sum A_i/T_i is left on-policy (C8); off-policy a little more, by the two taus.
    """
    ratio = token_ratio(batch)
    soft = [torch.sigmoid(tau * (ratio - 1)) * 4 / tau for tau in (tau_pos, tau_neg)]
    return -seq_mean(torch.where(batch.adv > 0, *soft) * masked_adv(batch), batch)


def dppo(batch: Batch, delta: float = 0.2) -> Tensor:
    """A clip by probabilities in place of ratios, which looks at the sign of A.

    J = r A, but 0 if A > 0 and p - p_old > delta, or if A < 0 and p_old - p > delta; token mean.
    DPPO 2602.04879, "binary TV" (S: as in verl 0.9.1's dppo_tv and prime-rl's default loss).
    Left out: verl's largest weight r <= 3, prime-rl's penalty of 0.001 log(r)^2.
    Shared token: cancels while p is within delta of p_old; beyond, only one side acts (C6).
    """
    moved = (batch.logp.exp() - batch.logp_old.exp()).detach()  # (N, T)
    outside = torch.where(batch.adv > 0, moved > delta, moved < -delta)
    return -token_mean((token_ratio(batch) * masked_adv(batch)).masked_fill(outside, 0.0), batch)


def symmetric_trust(batch: Batch, delta: float = 0.1) -> Tensor:
    """dppo without the sign: a clip that is blind to it.

    J = r A, but 0 if |p - p_old| > delta; token mean. prime-rl's loss of type "ipo", there called
    "a symmetric trust region" (P: its source; its penalty of 0.001 log(r)^2 is left out).
    Shared token: cancels always (C7).
    """
    outside = (batch.logp.exp() - batch.logp_old.exp()).detach().abs() > delta  # (N, T)
    return -token_mean((token_ratio(batch) * masked_adv(batch)).masked_fill(outside, 0.0), batch)


# ---------------- credit rules: what the old policy knew -> (N, T) advantages


@dataclass
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

    A_{i,t} = (alpha pi_old + 1 - alpha) A_i. AR/Lopti Eq. 4 (P).
    alpha 0.3 is that of ar-lopti. Alone, the code's scripts take 0.2, the paper 0.1 for maths.
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

    A_{j,k} = eta A_j where A_j < 0 and s_{j,k} > tau = beta min_i mean_k s_{i,k}. NTHR 5.2 (P).
    i runs over the correct answers. s is the score of llm/neighbours.nthr_scores. For a correct
    token the paper's prose sums over the *other* correct answers, so with a single one tau is 0.
    Two reimplementations count the own answer, too: self_term.
    eta -1 stands for 2|0.5 - p| (App. 7.3, P), p the group's share of correct answers; others are
    taken as they are.
    Shared token: a winner's counterweight is taken away, on purpose. (N, T), OldPolicy -> (N, T).
    Raises ValueError without scores.
    """
    selected = nthr_selected(old, beta, self_term) & (adv < 0)
    return torch.where(selected, nthr_factor(old, eta) * adv, adv)


def nthr_random(
    adv: Tensor, old: OldPolicy, beta: float = 1.0, eta: float = -1.0, self_term: bool = False
) -> Tensor:
    """NTHR's control: soften as many tokens of each wrong answer as nthr selects, but any.

    A_{j,k} = eta A_j on tokens drawn at random among those of the answer. NTHR (P).
    The paper's one-step study has eta = 0 for both. Ours is nthr's eta: only the tokens differ.
    Arguments as for nthr. Shared token: as nthr. (N, T), OldPolicy -> (N, T).
    """
    selected = nthr_selected(old, beta, self_term) & (adv < 0)
    count = selected.sum(1, keepdim=True)  # (N, 1)
    draw = torch.rand(old.mask.shape, generator=old.gen).to(adv.device)  # (N, T)
    rank = draw.masked_fill(~old.mask, 2.0).argsort(1).argsort(1)  # padding comes last
    return torch.where(rank < count, nthr_factor(old, eta) * adv, adv)


def nthr_factor(old: OldPolicy, eta: float) -> Tensor:
    """eta of each answer; -1 stands for 2|0.5 - p|, p its group's share of correct ones. (N, 1)."""
    correct = (old.rewards == 1).to(old.logp.dtype).view(-1, old.group_size)  # (P, G)
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
    lowest = means.view(-1, old.group_size).amin(1)  # (P,), inf without a correct answer
    tau = torch.where(lowest < torch.inf, beta * lowest, lowest)  # 0 * inf would be nan
    tau = tau.repeat_interleave(old.group_size)[:, None]  # (N, 1)
    return (old.scores > tau) & old.mask & ~correct[:, None]


def ibpo(adv: Tensor, old: OldPolicy, reading: str = "sign") -> Tensor:
    """Blame a repaired answer for what its correction changed, or praise it for what was kept.

    A_{i,t} = m_{i,t} A'_i, m = 1[kept] if A'_i > 0, 1[changed] if A'_i < 0, 1 if not repaired.
    A' comes from shaped_rewards. IBPO (S): the full text was not available to us, and this reading,
    "sign", is in no source that we know. It is ours (D), by a principle: a repaired answer never
    rewards what its correction changed, or blames what it kept. "changed", m = 1[changed] for both
    signs, is the literal reading of what the best source calls a variant of the method. Where
    A'_i > 0 it rewards the mistake (I3), so it is not the default. "none", m = 1, is the method
    without that variant. The source shows all siblings, right ones first. train.py shows one by
    default (repair_references).
    Shared token: by the sign of A', a repaired answer drops out of the sum, which then does not
    cancel, on purpose.
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


# ---------------- the meter: what a loss does to shared tokens


def token_coefficients(loss: Tensor, logp: Tensor) -> Tensor:
    """c = -N dLoss/dlogp: the ascent weight that every token really gets. Detached. (D)

    logp must be the tensor that the loss was computed from; the graph is kept.
    scalar, (N, T) -> (N, T).
    """
    return -len(logp) * torch.autograd.grad(loss, logp, retain_graph=True)[0]


def prefix_nodes(tokens: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """The node of the group's prefix tree that every token leads to, -1 on padding. (D)

    Two tokens have the same node iff their rows are of one group and agree up to and including
    them. TEMPO (2509.18314) builds the same tree, for values of its nodes.
    (N, T), (N, T) -> (N, T) int64. Raises ValueError for rows that are not whole groups.
    """
    n, width = tokens.shape
    check_groups(n, group_size)
    groups = tokens.view(-1, group_size, width)  # (P, G, T)
    same = (groups[:, :, None] == groups[:, None]).to(torch.uint8)  # (P, G, G, T)
    same = same.cumprod(-1, dtype=torch.uint8)  # up to and including t
    first = same.argmax(2).view(n, width)  # the first row of the group with this prefix
    group = torch.arange(n, device=tokens.device)[:, None] // group_size  # (N, 1)
    place = torch.arange(width, device=tokens.device)
    return ((group * group_size + first) * width + place).masked_fill(~mask, -1)


def histories(nodes: Tensor, group_size: int) -> Tensor:
    """What was said before each token: the node of the token before, or the group's prompt. (D)

    nodes are prefix_nodes, at least 0, and -1 on padding; so prompts are -2, -3, ...
    (N, T) -> (N, T) int64.
    """
    group = torch.arange(len(nodes), device=nodes.device)[:, None] // group_size  # (N, 1)
    return torch.cat([-2 - group, nodes[:, :-1]], 1)


@torch.no_grad()
def decided(rewards: Tensor, nodes: Tensor, mask: Tensor, group_size: int) -> dict[str, float]:
    """How much of the reward is decided before a token is taken: rho^2 of claim C27.

    rho^2 = 1 - Var(R | history) / Var(R). Both variances are leave-one-out means of
    R_i (R_i - mean of the others): those at the token's history, and those of its group. The mean
    is over all tokens at whose history another answer of the group takes one, too: over visitors,
    of whom a history has `visitors` on average. Against the group's mean, a baseline at every
    history lowers the noise of tokens that earn nothing about where `decided` is above
    `break_even`, (G - n) / (n (G - 1)) for n visitors. (D, ours)
    It is negative by chance where rewards have little to do with the history. The variance at a
    history has no bias. That of a group has one as far as a group with more shared tokens has
    rewards that differ more.
    (N,), (N, T) prefix_nodes, (N, T) bool -> the three numbers, or {} if nothing is shared, or all
    rewards of each group are equal.
    """
    ids, history = histories(nodes, group_size)[mask].unique(return_inverse=True)  # (K,) tokens
    R = rewards.double()[:, None].expand(mask.shape)[mask]  # (K,)
    n = torch.bincount(history)[history].double()  # (K,) visitors
    others = (R.new_zeros(len(ids)).index_add_(0, history, R)[history] - R) / (n - 1)
    groups = rewards.double().view(-1, group_size)  # (P, G)
    of_group = groups.var(1).repeat_interleave(group_size)[:, None].expand(mask.shape)[mask]
    shared = n > 1
    total = of_group[shared].sum()
    if not total > 0:
        return {}
    within = (R * (R - others))[shared].sum()
    n = n[shared].mean().item()
    break_even = (group_size - n) / (n * (group_size - 1))
    return {"decided": float(1 - within / total), "visitors": n, "break_even": break_even}


def learning_tax(coefficients: Tensor, advantages: Tensor, nodes: Tensor, mask: Tensor) -> float:
    """What unequal weights add to a batch's push on shared tokens, relative to all of it there.

    With w = c/A and wbar its mean over S_v, the answers that visit node v, the node's tax is
    tax_v = sum_{S_v} (w_i - wbar) A_i. The result is sum_v |tax_v| / sum_v sum_{S_v} |c_i| over
    nodes with at least 2 visitors: 0 if all visitors of a node have one weight; it may exceed 1.
    Answers with A_i = 0 are left out.

    It speaks of this batch, not of the expected push. Under `prefix_baseline` it says nothing,
    because c is no longer in proportion to A. (N, T), (N,) trajectory advantages, (N, T), (N, T) ->
    float. Claim C15 (D); the paper has no such number.
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


def prefix_baseline(loss: Tensor, batch: Batch, nodes: Tensor) -> Tensor:
    """Any loss, with coefficients that add up to 0 where all with one history take one token.

    A token's history is its prompt and the tokens before it. The answers of a group that take a
    token there visit it. c'_{i,t} = c_{i,t} - r_{i,t} mean_j (c_{j,t} / r_{j,t}), over the other
    visitors j; where there is none, c stays. This is a leave-one-out baseline at every history, a
    control variate: given the history and the others, E[r grad log pi] is 0.

    So the *expected* update does not move, if
    - c_i depends on answer i alone: reinforce, grpo, grpo-symmetric, dr-grpo, gspo,
      off-policy-mask; with a constant divisor also cispo, pos-only and advantage-reweighting,
    - A_i = R_i - b with a fixed b,
    - answers are independent draws from pi_old, which can draw all that pi can,
    - theta does not depend on the batch: no earlier update has used it.
    In a run b is the group's mean, which holds the own reward, and the update does move (C22c).
    Nothing is promised for dfpo-min (off-policy), dfpo-orthogonal, recentred, balanced, dapo, nthr,
    lopti and ibpo.

    Off-policy it divides by the ratios of others, which are noisy, and gives a clipped token a push
    again. What that costs: python -m toy.reuse.

    Returns a scalar with the loss's value and the gradient -(1/N) sum c' grad log pi. batch.logp is
    what the loss was computed from; nodes are prefix_nodes, (N, T). Claim C22 (D, ours).
    Raises ValueError for nodes of another shape.
    """
    if nodes.shape != batch.logp.shape:
        raise ValueError(f"nodes has shape {tuple(nodes.shape)}, logp {tuple(batch.logp.shape)}")
    c, r = token_coefficients(loss, batch.logp), token_ratio(batch).detach()
    ids, history = histories(nodes, batch.group_size)[batch.mask].unique(return_inverse=True)
    unit = (c / r.clamp(min=torch.finfo(r.dtype).tiny))[batch.mask]  # (K,); not 0/0 = nan
    sums = unit.new_zeros(len(ids)).index_add_(0, history, unit)
    others = torch.bincount(history)[history] - 1  # (K,) visitors besides oneself
    mean = ((sums[history] - unit) / others.clamp(min=1)).masked_fill(others == 0, 0.0)
    c = c.masked_scatter(batch.mask, c[batch.mask] - r[batch.mask] * mean)
    surrogate = -(c * batch.logp).masked_fill(~batch.mask, 0.0).sum() / len(c)
    return loss.detach() + surrogate - surrogate.detach()


# ---------------- a method = advantage scale + credit + passes


@dataclass
class Method:
    """The three independent choices that make a method, and what they need."""

    passes: tuple[Callable[..., Tensor], ...]  # Batch -> loss; each goes over all minibatches
    scale: str = "std"  # of group_advantages
    credit: Callable[..., Tensor] | None = None  # (N, T) adv, OldPolicy -> (N, T), once a rollout
    repair: Callable[..., Tensor] | None = None  # wrong answers are corrected -> rewards (N,)
    needs_scores: bool = False  # whether credit reads OldPolicy.scores
    clips: Callable[[Batch], Tensor] = token_ratio  # (N, T) or (N, 1): the ratio that it clips
    hyper: dict[str, object] = field(default_factory=dict)  # filled in by train.bind


METHODS: dict[str, Method] = {
    "reinforce": Method((reinforce,)),
    "grpo": Method((grpo,)),
    "grpo-symmetric": Method((grpo_symmetric,)),
    "dr-grpo": Method((dr_grpo,), scale="mean"),
    "dapo": Method((dapo,)),
    "gspo": Method((gspo,), clips=lambda batch: sequence_ratio(batch)[:, None]),
    "cispo": Method((cispo,)),
    "dfpo-min": Method((dfpo_min,)),
    "dfpo-orthogonal": Method((dfpo_orthogonal,)),
    "recentred": Method((recentred,), scale="mean"),
    "balanced": Method((balanced,)),
    "off-policy-mask": Method((off_policy_mask,)),
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


LEGEND = """\
r, s  r = pi_theta / pi_old of a token; s: its geometric mean over the answer (recentred: product)
A     the answer's advantage: reward - group mean, for "std" also / the group's deviation
sg    stop-gradient: what is in brackets counts as a constant
clip  clip(r, low, high): r, but at least low and at most high
(P)   stated by the paper; (S) known only second-hand; (D) derived here
"""

if __name__ == "__main__":  # every method with its formulas, from the docstrings
    print(LEGEND)
    for name, method in METHODS.items():
        steps = len(method.passes)
        several = f", {steps} passes over the minibatches" if steps > 1 else ""
        print(f'{name}: advantage "{method.scale}"{several}')
        for function in filter(None, (method.repair, method.credit, *method.passes)):
            lines = [line.strip() for line in function.__doc__.splitlines()]
            formula = next(line for line in lines if line.startswith(("J = ", "A_", "R' = ")))
            print(f"    {function.__name__:22} {formula}")
