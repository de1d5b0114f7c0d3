"""Group-relative policy-gradient losses, one short pure function each.

N answers ("trajectories") are rewarded at the end only. The G answers to one prompt are a group and
are compared with each other: A_i is the advantage of answer i. Every method turns the log-probs of
the sampled tokens into one scalar. What that scalar really does to a token is its coefficient
c = -N dLoss/dlogp. Answers share the prompt and often their first tokens; there the coefficients
of the group add up. They ought to add up to what the token earned, its credit, and to nothing
where all G answers share the token.

r is the token's ratio pi_theta / pi_old, and s the answer's geometric mean of r. "std" and "mean"
are the scales of the advantage. "answer", "budget" and "tokens" are the averages seq_mean,
budget_mean and token_mean. The last column says where a token that the whole group shares cancels.

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
    pos-only               std   r; losers 0       min, 0.2        answer   never
    nthr, nthr-random      std   r; losers softer  min, 0.2        answer   as grpo, if not softer
    advantage-reweighting  std   r; rare softer    min, 0.2/0.24   tokens   unclipped
    lopti, ar-lopti        std   r; two passes     min, 0.2/0.24   tokens   unclipped
    ibpo                   std   r; mask by sign   min, 0.2        answer   as grpo, if not masked

What is not known for certain, and where this file deviates from a paper. Grades: P stated by the
paper, S second-hand, D derived here.
  1. DFPO: its full text was not available. The weight transforms of Eq. 17 and 18 are second-hand.
     The loss around them is ours: score form, stop-gradient weight, no clip, budget mean.
  2. DFPO's sequence ratio is geometric by default. The plain product of its theory under- and
     overflows on long answers.
  3. grpo-symmetric: the paper's "GRPO-fix" is known by its purpose only. Clip without min is our
     reading of it.
  4. Advantage "std": the unbiased deviation + 1e-4, as in TRL. Equal rewards give exactly 0.
  5. GRPO's KL term is off by default (in the paper 0.04). Its estimator is k3, and it stands inside
     the average over each answer.
  6. The budget's normaliser is 1/(N L), with L the longest answer allowed. Dr. GRPO writes 1/G
     without L, which is a constant factor.
  7. DAPO: groups with equal rewards are left out of the mean. No other prompts replace them. The
     papers of DAPO and CISPO write a mean over the tokens of one group; here it is the batch's.
  8. GSPO and DFPO take an answer's mean per-token advantage. Without a credit rule that is A_i.
  9. CISPO: MiniMax-M1 tunes the upper bound alone and does not print it. r <= 5 is ScaleRL's bound
     (2510.13786), as TRL gives it.
 10. pos-only divides by the full group, as GRPO does, so that its step is comparable.
 11. NTHR's self term, its eta and the vocabulary of its score are ambiguous. They are arguments of
     `nthr`, with our choice as the default. Its random control takes the same eta here, so that
     the two differ in their tokens alone.
 12. Advantage Reweighting and Lopti follow the authors' code, without its KL term (0.001) and its
     dual clip (10). The defaults alpha 0.3 and eta 0.5 are those of both together (ar-lopti).
     Alone, the code takes alpha 0.2 or eta 0.4. It averages over the tokens of a micro-batch, we
     over the minibatch's.
 13. IBPO is second-hand throughout. Which tokens carry its credit is not known for certain; our
     reading, by the sign of the advantage (D), is explained at `ibpo`. Nor is it known how its two
     weights combine; here they multiply.

Papers: GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, CISPO (MiniMax-M1)
2506.13585, DFPO 2604.13088v1, NTHR 2505.18830, Advantage Reweighting and Lopti ("AR/Lopti")
2505.12929, IBPO 2605.16302.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

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
                shapes = f"{tuple(tensor.shape)}, logp has {tuple(self.logp.shape)}"
                raise ValueError(f"{name} has shape {shapes}")
        rows, size, kind = len(self.logp), self.group_size, self.mask.dtype
        if self.logp.dim() != 2 or kind != torch.bool:
            raise ValueError(
                f"logp must be (N, T) and mask bool, not {self.logp.dim()}-d and {kind}"
            )
        if size < 2 or rows % size or not self.logp.numel():
            raise ValueError(f"{rows} rows are not whole groups of group_size {size} (at least 2)")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")

    def __getitem__(self, rows) -> Batch:
        """The same batch restricted to some rows (an index or a slice of whole groups)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        part = {name: x[rows] for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **part)


# ---------------- advantages


def group_advantages(rewards: Tensor, group_size: int, scale: str = "std") -> Tensor:
    """Compare every answer with its group: A_i = R_i - mean(R); for "std" also / (std(R) + 1e-4).

    A group whose rewards are all equal gets exactly 0. The std is the unbiased one (G-1).
    GRPO sec. 4.1.2 (P); "mean": Dr. GRPO (P). (N,) floats -> (N,).
    Raises ValueError for G < 2, N not divisible by G, rewards that are no floats, another scale.
    """
    if group_size < 2:
        raise ValueError(
            f"group_size must be at least 2 (an answer and a sibling), not {group_size}"
        )
    if rewards.dim() != 1 or len(rewards) % group_size or not rewards.is_floating_point():
        given = f"{rewards.dtype} of shape {tuple(rewards.shape)}"
        raise ValueError(f"rewards: {given}, not whole groups of {group_size} floats")
    if scale not in ("std", "mean"):
        raise ValueError(f'scale must be "std" or "mean", not {scale!r}')
    groups = rewards.view(-1, group_size)  # (P, G)
    adv = groups - groups.mean(1, keepdim=True)
    if scale == "std":
        adv = adv / (groups.std(1, keepdim=True) + 1e-4)
    equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return adv.masked_fill(equal, 0.0).view(-1)


# ---------------- ratios and averages


def token_ratio(batch: Batch) -> Tensor:
    """r_{i,t} = pi_theta / pi_old of every taken token, 1 on padding. (N, T)."""
    # Masked before exp: afterwards a padded inf would still turn the gradient into 0 * inf = NaN.
    return (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).exp()


def sequence_ratio(batch: Batch, kind: str = "geometric") -> Tensor:
    """s_i, one ratio per answer. (N,). Raises ValueError for another kind.

    "geometric": (prod_t r_{i,t})^(1/T_i), GSPO Eq. 7 (P); "product": prod_t r_{i,t}, DFPO (S).
    """
    if kind not in ("geometric", "product"):
        raise ValueError(f'ratio must be "geometric" or "product", not {kind!r}')
    log_ratio = (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).sum(1)
    return (log_ratio / lengths(batch) if kind == "geometric" else log_ratio).exp()


def trajectory_advantage(batch: Batch) -> Tensor:
    """A_i, the mean of the answer's per-token advantages; 0 for an empty answer. (N,)."""
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
    """(1/(N L)) sum_i sum_t x_{i,t}: a token weighs the same in every answer. Dr. GRPO (P)."""
    return x.masked_fill(~batch.mask, 0.0).sum() / (len(x) * batch.max_tokens)


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """sum x / number of tokens, over the whole batch. DAPO (P)."""
    return x.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def clipped(batch: Batch, eps_low: float, eps_high: float) -> Tensor:
    """PPO's surrogate min(r A, clip(r, 1-eps_low, 1+eps_high) A). (N, T).

    The min makes the gate depend on the sign of A.
    """
    ratio = token_ratio(batch)
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


def reinforce(batch: Batch) -> Tensor:
    """Plain policy gradient with the group mean as baseline.

    J = A log pi, budget mean. Williams 1992; group baseline as in Dr. GRPO (P).
    Shared token: cancels always (it ignores the ratio).
    """
    return -budget_mean(masked_adv(batch) * batch.logp, batch)


def grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2, kl: float = 0.0) -> Tensor:
    """PPO's clipped surrogate, averaged per answer; kl weighs a k3 penalty to logp_ref.

    J = min(r A, clip(r, 1-e, 1+e) A) - kl k3, mean per answer. GRPO Eq. 3-4 (P).
    Shared token: sum A_i/T_i is left on-policy (C8); outside the clip range only losers or only
    winners act (C6).
    """
    surrogate = clipped(batch, eps_low, eps_high)
    if kl:
        surrogate = surrogate - kl * k3(batch)
    return -seq_mean(surrogate, batch)


def grpo_symmetric(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO without min and without 1/T_i: the gate is the same for winners and losers.

    J = clip(r, 1-e, 1+e) A, budget mean. DFPO's "GRPO-fix" (S; definition D).
    Shared token: cancels always (C7).
    """
    return -budget_mean(token_ratio(batch).clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch)


def dr_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO's surrogate with the budget as normaliser; METHODS leaves the std out of its advantage.

    J = min(r A, clip(r, 1-e, 1+e) A), budget mean. Dr. GRPO sec. 3.2 (P).
    Shared token: cancels inside the clip range only (C6).
    """
    return -budget_mean(clipped(batch, eps_low, eps_high), batch)


def dapo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.28) -> Tensor:
    """GRPO's surrogate with a wider upper clip, averaged over the tokens of groups that disagree.

    J = min(r A, clip(r, 1-e_low, 1+e_high) A), token mean of mixed groups. DAPO Eq. 8, 10-12 (P).
    Shared token: cancels inside the clip range only (C6).
    """
    groups = (masked_adv(batch) != 0).view(-1, batch.group_size, batch.adv.shape[1])  # (P, G, T)
    mixed = groups.flatten(1).any(1).repeat_interleave(batch.group_size)  # (N,)
    return -token_mean(clipped(batch, eps_low, eps_high), batch.mask & mixed[:, None])


def gspo(batch: Batch, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Tensor:
    """PPO's surrogate once per answer, on the geometric ratio. Tiny models want a wider clip.

    J = min(s A, clip(s, 1-e_low, 1+e_high) A), mean over answers. GSPO Eq. 5-7 (P).
    Shared token: sum A_i s_i/T_i is left (C4, C8).
    """
    ratio, adv = sequence_ratio(batch), trajectory_advantage(batch)  # (N,), (N,)
    return -torch.minimum(ratio * adv, ratio.clamp(1 - eps_low, 1 + eps_high) * adv).mean()


def cispo(batch: Batch, eps_low: float = 1.0, eps_high: float = 4.0) -> Tensor:
    """Clip the ratio as a detached weight: no token loses its gradient, none gets a huge one.

    J = sg[clip(r, 1-e_low, 1+e_high)] A log pi, token mean. MiniMax-M1 Eq. 4-5 (P).
    eps_low = 1 is no lower bound; r <= 5 is ScaleRL's upper one.
    Shared token: cancels always. Its weight is the same for all who share it.
    """
    weight = token_ratio(batch).clamp(1 - eps_low, 1 + eps_high).detach()
    return -token_mean(weight * masked_adv(batch) * batch.logp, batch.mask)


def min_replace(w: Tensor, adv: Tensor) -> Tensor:
    """w~_i = min_j w_j: one weight for the whole group, so that any zero-sum subset cancels.

    Detached. `adv` is not used; it keeps the two transforms interchangeable. DFPO Eq. 17 (S).
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
    With eps (ours) tokens whose ratio is outside 1 +- eps are clipped, whatever the sign of A.
    Shared token: cancels always, on every zero-sum subset too (C9).
    """
    return _dfpo(batch, ratio, min_replace, eps)


def dfpo_orthogonal(batch: Batch, ratio: str = "geometric", eps: float = float("inf")) -> Tensor:
    """REINFORCE under a sequence ratio that Adv-Orthogonal has made orthogonal to the advantages.

    J = sg[s - (A.s / ||A||^2) A] A log pi, budget mean. DFPO Eq. 18 (transform S, loss D).
    eps as in dfpo_min. Shared token: cancels where the whole group shares it, not on subsets (C10).
    """
    return _dfpo(batch, ratio, adv_orthogonal, eps)


def _dfpo(batch: Batch, ratio: str, transform: Callable, eps: float = float("inf")) -> Tensor:
    groups = (-1, batch.group_size)
    s, adv = sequence_ratio(batch, ratio).view(groups), trajectory_advantage(batch).view(groups)
    w = transform(s, adv).reshape(-1, 1)  # (N, 1)
    outside = (token_ratio(batch) - 1).abs() > eps
    return -budget_mean((w * masked_adv(batch) * batch.logp).masked_fill(outside, 0.0), batch)


def pos_only(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO that learns from the better-than-average answers only: NTHR's control.

    J = min(r A+, clip(r, 1-e, 1+e) A+) with A+ = max(A, 0), mean per answer. NTHR (P).
    Shared token: does not cancel; nothing stands against the winners.
    """
    return grpo(replace(batch, adv=batch.adv.clamp(min=0)), eps_low, eps_high)


def token_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.24) -> Tensor:
    """GRPO's surrogate averaged over all tokens: under Advantage Reweighting and Lopti.

    J = min(r A, clip(r, 1-e_low, 1+e_high) A), token mean. AR/Lopti's code (P).
    Shared token: cancels inside the clip range only (C6).
    """
    return -token_mean(clipped(batch, eps_low, eps_high), batch.mask)


def lopti_low(
    batch: Batch, eta: float = 0.5, eps_low: float = 0.2, eps_high: float = 0.24
) -> Tensor:
    """Lopti's first pass: the improbable tokens alone, divided by the number of all tokens.

    J = 1[pi_old < eta] min(r A, clip(r, 1-e_low, 1+e_high) A), token mean. AR/Lopti's code (P).
    Shared token: as token_grpo, in one of the passes, as all its visitors have the same pi_old.
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
    return -token_mean(clipped(batch, eps_low, eps_high).masked_fill(~chosen, 0.0), batch.mask)


# ---------------- credit rules: what the old policy knew -> (N, T) advantages


@dataclass
class OldPolicy:
    """What a credit rule knows of the old policy. The rule is applied once, then frozen.

    Raises ValueError for a shape that does not fit tokens', and for rows that are not whole groups
    of at least 2.
    """

    tokens: Tensor  # (N, T) ids
    mask: Tensor  # (N, T) bool
    logp: Tensor  # (N, T) log pi_old of the tokens, at the sampling temperature
    rewards: Tensor  # (N,) 1 = correct
    group_size: int  # G
    temperature: float = 1.0
    hidden: Tensor | None = None  # (N, T, d) last hidden states, which predict the tokens
    head: Tensor | None = None  # (V, d) output embeddings: logits = hidden @ head.T / temperature
    gen: torch.Generator | None = None  # on the CPU, for rules that draw at random
    kept_mask: Tensor | None = None  # (N, T) bool, tokens that a correction left as they were
    repaired: Tensor | None = None  # (N,) bool, wrong answers of which the correction is right

    def __post_init__(self):
        rows, size = len(self.tokens), self.group_size
        expected = {"mask": self.tokens.shape, "logp": self.tokens.shape, "rewards": (rows,)}
        if self.kept_mask is not None:
            expected["kept_mask"] = self.tokens.shape
        if self.repaired is not None:
            expected["repaired"] = (rows,)
        if self.hidden is not None and self.head is not None:
            expected["hidden"] = (*self.tokens.shape, self.head.shape[1])
        for name, shape in expected.items():
            given = tuple(getattr(self, name).shape)
            if given != tuple(shape):
                raise ValueError(f"{name} has shape {given}, not {tuple(shape)}")
        if size < 2 or rows % size:
            raise ValueError(f"{rows} rows are not whole groups of group_size {size} (at least 2)")


def advantage_reweighting(adv: Tensor, old: OldPolicy, alpha: float = 0.3) -> Tensor:
    """Shrink the advantage of improbable tokens, whose gradients are the largest.

    A_{i,t} = (alpha pi_old + 1 - alpha) A_i. AR/Lopti Eq. 4 (P; for maths alpha = 0.1).
    Shared token: one factor for all visitors, so what cancelled still does.
    (N, T), OldPolicy -> (N, T). Raises ValueError for an alpha outside 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie between 0 and 1, not {alpha}: more turns gradients round")
    return (alpha * old.logp.detach().exp() + 1 - alpha) * adv


def nthr(
    adv: Tensor,
    old: OldPolicy,
    beta: float = 1.0,
    eta: float = -1.0,
    self_term: bool = True,
    full_vocab: bool = False,
) -> Tensor:
    """Soften the penalty on the tokens of wrong answers that push the correct ones down.

    A_{j,k} = eta A_j where A_j < 0 and s_{j,k} > tau = beta min_i mean_k s_{i,k}. NTHR Eq. 7 (S).
    i: the correct answers; s: nthr_scores, with self_term and full_vocab as there. eta -1 stands
    for 2|0.5 - p| with p the group's share of correct answers; others are taken as they are.
    Shared token: a winner's counterweight is taken away, on purpose. (N, T), OldPolicy -> (N, T).
    """
    selected = nthr_selected(old, beta, self_term, full_vocab) & (adv < 0)
    return torch.where(selected, nthr_factor(old, eta) * adv, adv)


def nthr_random(
    adv: Tensor,
    old: OldPolicy,
    beta: float = 1.0,
    eta: float = -1.0,
    self_term: bool = True,
    full_vocab: bool = False,
) -> Tensor:
    """NTHR's control: soften as many tokens of each wrong answer as nthr selects, but any.

    A_{j,k} = eta A_j on tokens drawn at random among those of the answer. NTHR (P; eta ours).
    Arguments as for nthr. Shared token: as nthr. (N, T), OldPolicy -> (N, T).
    """
    selected = nthr_selected(old, beta, self_term, full_vocab) & (adv < 0)
    count = selected.sum(1, keepdim=True)  # (N, 1)
    draw = torch.rand(old.mask.shape, generator=old.gen).to(adv.device)  # (N, T)
    rank = draw.masked_fill(~old.mask, 2.0).argsort(1).argsort(1)  # padding comes last
    return torch.where(rank < count, nthr_factor(old, eta) * adv, adv)


def nthr_factor(old: OldPolicy, eta: float) -> Tensor:
    """eta of each answer; -1 stands for 2|0.5 - p|, p its group's share of correct ones. (N, 1)."""
    correct = (old.rewards == 1).to(old.logp.dtype).view(-1, old.group_size)  # (P, G)
    share = correct.mean(1).repeat_interleave(old.group_size)[:, None]  # (N, 1)
    return 2 * (0.5 - share).abs() if eta < 0 else torch.full_like(share, eta)


def nthr_selected(
    old: OldPolicy, beta: float = 1.0, self_term: bool = True, full_vocab: bool = False
) -> Tensor:
    """The tokens of wrong answers with a score above tau; none without a correct answer. (N, T)."""
    correct = old.rewards == 1
    scores = nthr_scores(old, self_term, full_vocab)
    means = scores.sum(1) / old.mask.sum(1)  # (N,), nan for an empty answer
    means = means.masked_fill(~correct | means.isnan(), torch.inf)
    lowest = means.view(-1, old.group_size).amin(1)  # (P,), inf without a correct answer
    tau = torch.where(lowest < torch.inf, beta * lowest, lowest)
    tau = tau.repeat_interleave(old.group_size)[:, None]  # (N, 1)
    return (scores > tau) & old.mask & ~correct[:, None]


@torch.no_grad()
def nthr_scores(old: OldPolicy, self_term: bool = True, full_vocab: bool = False) -> Tensor:
    """How much a token's push moves the group's correct answers: s = g^T M h.

    M = sum of g h^T over the tokens of correct answers. g = e_y - pi(.|h) is the prediction error,
    on the ids V* that occur in the group's answers (with the full softmax denominator), or with
    full_vocab on all ids; h is the last hidden state. One matrix M a group stands for the double
    sum of <g,g'> <h,h'> (N4, D). Without self_term a correct token does not count itself. 0 on
    padding and in groups without correct or without wrong answers. At least fp32; needs
    (G, T, |V*|) numbers at a time. NTHR Eq. 7 (S). OldPolicy -> (N, T).
    Raises ValueError without hidden or head.
    """
    if old.hidden is None or old.head is None:
        raise ValueError("nthr needs hidden states and output embeddings; hidden or head is None")
    dtype = torch.promote_types(old.hidden.dtype, torch.float32)
    scores = torch.zeros(old.mask.shape, dtype=dtype, device=old.mask.device)
    correct = old.rewards == 1
    for start in range(0, len(correct), old.group_size):
        rows = slice(start, start + old.group_size)
        right, mask, tokens = correct[rows], old.mask[rows], old.tokens[rows]
        if right.all() or not right.any() or not mask.any():
            continue
        h = old.hidden[rows].to(dtype)  # (G, T, d)
        ids = tokens[mask].unique()  # V*
        if full_vocab:
            ids = torch.arange(len(old.head), device=mask.device)
        place = torch.searchsorted(ids, tokens.contiguous()).clamp(max=len(ids) - 1)[..., None]
        g = (h @ old.head[ids].to(dtype).T).div_(old.temperature)  # (G, T, |V*|), large: in place
        g.sub_(g.gather(2, place)).add_(old.logp[rows, :, None])  # logp has the full denominator
        g.exp_().neg_()  # -pi
        g.scatter_add_(2, place, torch.ones_like(g[..., :1]))  # e_y - pi
        M = sum(g[i, mask[i]].T @ h[i, mask[i]] for i in right.nonzero().flatten())  # (|V*|, d)
        for i in range(old.group_size):
            scores[start + i] = ((g[i] @ M) * h[i]).sum(1)
        if not self_term:
            own = g.norm(dim=2).square() * h.norm(dim=2).square()  # (G, T)
            scores[rows] -= right[:, None] * own
    return scores.masked_fill(~old.mask, 0.0)


def ibpo(adv: Tensor, old: OldPolicy, reading: str = "sign") -> Tensor:
    """Blame a repaired answer for what its correction changed, or praise it for what was kept.

    A_{i,t} = m_{i,t} A'_i, m = 1[kept] if A'_i > 0, 1[changed] if A'_i < 0, 1 if not repaired.
    A' comes from shaped_rewards. IBPO (S) takes token-level credit from the correction. Its
    sources, an abstract and a caption, do not settle which tokens get it. This reading is ours (D),
    by a principle: a repaired answer never rewards what was changed or blames what was kept.
    "changed" is m = 1[changed] for both signs. Where A'_i > 0 it rewards the mistake (I2); it
    is here to show that. "none" is m = 1.
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
    silent_mask = old.kept_mask if reading == "changed" else old.kept_mask == (adv < 0)
    return adv.masked_fill(silent_mask & old.repaired[:, None], 0.0)


def shaped_rewards(
    rewards: Tensor, repaired: Tensor, bonus: float = 0.5, weight: float = 0.6
) -> Tensor:
    """R' = R + weight phi, phi = bonus 1[R = 0 and the correction is right]: near misses count.

    Whether the variance falls depends on how many answers are right (I1). IBPO (S).
    (N,), (N,) bool -> (N,). Raises ValueError if a near miss would count as much as a right answer.
    """
    if weight * bonus >= 1:
        raise ValueError(f"weight {weight} times bonus {bonus} must stay below the reward of 1")
    return rewards + weight * bonus * (repaired & (rewards == 0)).to(rewards.dtype)


def kept_tokens(tokens: Tensor, mask: Tensor, others: Tensor, others_mask: Tensor) -> Tensor:
    """The tokens of each row that stay when it is edited into the other row.

    The edit has the fewest insertions, deletions and substitutions (Levenshtein), and of several
    such edits it keeps the most tokens. (N, T), (N, T), (N, U), (N, U) -> (N, T) bool.
    """
    n, width = tokens.shape
    price = width + 1  # of an edit; a kept token earns 1, so that all of them earn less
    rows = torch.arange(n, device=tokens.device)
    same = tokens[:, :, None] == others[:, None]  # (N, T, U)
    inserts = price * torch.arange(others.shape[1] + 1, device=tokens.device)
    costs = inserts.repeat(n, width + 1, 1)  # (N, T+1, U+1): the first t tokens into the first u
    for t in range(width):
        deleted = costs[:, t] + price
        diagonal = costs[:, t, :-1] + torch.where(same[:, t], -1, price)
        best = torch.cat([deleted[:, :1], torch.minimum(diagonal, deleted[:, 1:])], 1)
        costs[:, t + 1] = (best - inserts).cummin(1).values + inserts
    kept = torch.zeros_like(mask)
    t, u = mask.sum(1), others_mask.sum(1)
    for _ in range(int((t + u).amax())):  # back from the end of each row
        both, here = (t > 0) & (u > 0), costs[rows, t, u]
        match = both & same[rows, t - 1, u - 1]
        substitute = both & ~match & (costs[rows, t - 1, u - 1] + price == here)
        delete = (t > 0) & ~match & ~substitute & (costs[rows, t - 1, u] + price == here)
        kept[rows[match], t[match] - 1] = True
        t, u = t - (match | substitute | delete).long(), u - ((u > 0) & ~delete).long()
    return kept


# ---------------- the meter: what a loss does to shared tokens


def token_coefficients(loss: Tensor, logp: Tensor) -> Tensor:
    """c = -N dLoss/dlogp: the ascent weight that every token really gets. Detached. (D)

    logp must be the tensor that the loss was computed from; the graph is kept.
    scalar, (N, T) -> (N, T).
    """
    return -len(logp) * torch.autograd.grad(loss, logp, retain_graph=True)[0]


def prefix_nodes(
    tokens: Tensor, mask: Tensor, group_size: int, context: int | None = None
) -> Tensor:
    """The node of the group's prefix tree that every token leads to, -1 on padding. (D)

    Two tokens have the same node iff their rows are of one group and agree up to and including
    them. With context: iff the rows agree in that many last tokens, wherever in the answers these
    stand (ours, claim C17g). (N, T), (N, T) -> (N, T) int64. Raises ValueError for a context < 1.
    """
    n, width = tokens.shape
    group = torch.arange(n, device=tokens.device) // group_size  # (N,)
    if context is not None:
        if context < 1:
            raise ValueError(f"context must be at least 1 token, the token itself, not {context}")
        size = min(context, width)
        before = torch.nn.functional.pad(tokens, (size - 1, 0), value=-1)  # -1: before the start
        windows = before.unfold(1, size, 1)[mask]  # (M, size)
        windows = torch.cat([group[:, None].expand(n, width)[mask][:, None], windows], 1)
        nodes = torch.full_like(tokens, -1)
        return nodes.masked_scatter(mask, windows.unique(dim=0, return_inverse=True)[1])
    groups = tokens.view(-1, group_size, width)  # (P, G, T)
    same = (groups[:, :, None] == groups[:, None]).to(torch.uint8)  # (P, G, G, T)
    same = same.cumprod(-1, dtype=torch.uint8)  # up to and including t
    first = same.argmax(2).view(n, width)  # the first row of the group with this prefix
    place = torch.arange(width, device=tokens.device)
    nodes = (group[:, None] * group_size + first) * width + place
    return nodes.masked_fill(~mask, -1)


def _visitors(advantages: Tensor, nodes: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The K tokens of answers with A_i != 0: a mask (N, T), their A_i (K,), their node (K,)."""
    adv = advantages[:, None].expand_as(mask)
    used = mask & (adv != 0)
    return used, adv[used], nodes[used].unique(return_inverse=True)[1]


def learning_tax(coefficients: Tensor, advantages: Tensor, nodes: Tensor, mask: Tensor) -> float:
    """What unequal weights add to a batch's push on shared tokens, relative to all of it there.

    With w = c/A and wbar its mean over S_v, the answers that visit node v, the node's tax is
    tax_v = sum_{S_v} (w_i - wbar) A_i. The result is sum_v |tax_v| / sum_v sum_{S_v} |c_i| over
    nodes with at least 2 visitors: 0 if all visitors of a node have one weight; it may exceed 1.
    Answers with A_i = 0 are left out. It speaks of this batch, not of the expected push. It does
    not see what single visitors pay, and it counts what cancels between sibling nodes. With n > 1
    of G answers at v, tax_v n (G - 1) / (G (n - 1)) estimates the expected tax without bias, under
    the condition of C17h.
    (N, T), (N,) trajectory advantages, (N, T), (N, T) -> float. Claim C15 (D).
    """
    used, adv, node = _visitors(advantages, nodes, mask)
    c = coefficients[used]
    terms = torch.stack([c, c / adv, adv, c.abs(), torch.ones_like(c)], 1)  # (K, 5)
    sums = terms.new_zeros(len(terms), 5).index_add_(0, node, terms)  # (K >= V, 5)
    total, weight, advantage, size, visitors = sums[sums[:, 4] > 1].unbind(1)
    tax = (total - weight / visitors * advantage).abs().sum()
    return float(tax / size.sum()) if size.sum() > 0 else 0.0


def project(loss: Tensor, logp: Tensor, advantages: Tensor, nodes: Tensor, mask: Tensor) -> Tensor:
    """Give each token of any loss the node mean of its weights: no batch has a tax then (C17a).

    w' = wbar, the mean of w = c/A over the answers that visit a token's node. Single visitors keep
    their w. In expectation a part of the tax stays where only a part of the group shares (C17h),
    because wbar depends on the visitors' rewards. project_unbiased leaves less of it.

    Returns the surrogate -(1/N) sum c' log pi with c' detached; its value means nothing. Answers
    with A_i = 0 keep their c. Meant for losses with c proportional to A_i: a KL term's c/A_i may be
    huge, so add such a term outside. What a method breaks on purpose (pos-only, nthr, the mask of
    ibpo) is averaged, too. Claim C17 (D, ours).
    scalar, (N, T), (N,) trajectory advantages, (N, T), (N, T) -> scalar to minimise.
    """
    c_mean, _ = _node_means(token_coefficients(loss, logp), advantages, nodes, mask)
    return _surrogate(c_mean, logp, mask)


def project_unbiased(loss: Tensor, batch: Batch, advantages: Tensor, nodes: Tensor) -> Tensor:
    """The projection's second kind: at nodes with several visitors the expected tax is 0.

    w' = wbar + (wbar - w)(1 - n/G)/(n - 1) at a node with n >= 2 of G visitors. That is the node
    mean where n = G. Where n < G, a single batch has a tax again. Single visitors keep their w, and
    the tax that they pay on average. Answers with A_i = 0 count neither in n nor in G. Exact for
    advantages R - mean R and weights that depend on the own answer only (C17i).

    Otherwise as project; for nodes without a context, which an answer visits once. (D, ours)
    scalar, Batch, (N,) trajectory advantages, (N, T) -> scalar to minimise.
    """
    c = token_coefficients(loss, batch.logp)
    c_mean, n = _node_means(c, advantages, nodes, batch.mask)
    G = (advantages != 0).view(-1, batch.group_size).sum(1).clamp(min=1)  # (P,)
    G = G.repeat_interleave(batch.group_size)[:, None]  # (N, 1)
    c = c_mean + (c_mean - c) * (1 - n / G) / (n - 1).clamp(min=1)
    return _surrogate(c, batch.logp, batch.mask)


def _node_means(
    c: Tensor, advantages: Tensor, nodes: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """c with the node mean of its weights, and how many answers visit a token's node. (N, T) both.

    Tokens of answers with A_i = 0 keep their c and count as alone.
    """
    used, adv, node = _visitors(advantages, nodes, mask)
    terms = torch.stack([c[used] / adv, torch.ones_like(adv)], 1)  # (K, 2)
    weight, visitors = terms.new_zeros(len(terms), 2).index_add_(0, node, terms).unbind(1)
    c_mean = c.masked_scatter(used, (weight / visitors)[node] * adv)
    return c_mean, torch.ones_like(c).masked_scatter(used, visitors[node])


def _surrogate(c: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """The loss whose token coefficients are c."""
    return -(c * logp).masked_fill(~mask, 0.0).sum() / len(logp)


# ---------------- a method = advantage scale + credit + passes


@dataclass
class Method:
    """The three independent choices that make a method, and what they need."""

    passes: tuple[Callable[..., Tensor], ...]  # Batch -> loss; each goes over all minibatches
    scale: str = "std"  # of group_advantages
    credit: Callable[..., Tensor] | None = (
        None  # (N, T) adv, OldPolicy -> (N, T) adv; once a rollout
    )
    needs_hidden: bool = False  # whether credit reads OldPolicy.hidden and OldPolicy.head
    repair: Callable[..., Tensor] | None = (
        None  # wrong answers are corrected: -> shaped rewards (N,)
    )


METHODS: dict[str, Method] = {
    "reinforce": Method((reinforce,)),
    "grpo": Method((grpo,)),
    "grpo-symmetric": Method((grpo_symmetric,)),
    "dr-grpo": Method((dr_grpo,), scale="mean"),
    "dapo": Method((dapo,)),
    "gspo": Method((gspo,)),
    "cispo": Method((cispo,)),
    "dfpo-min": Method((dfpo_min,)),
    "dfpo-orthogonal": Method((dfpo_orthogonal,)),
    "pos-only": Method((pos_only,)),
    "nthr": Method((grpo,), credit=nthr, needs_hidden=True),
    "nthr-random": Method((grpo,), credit=nthr_random, needs_hidden=True),
    "advantage-reweighting": Method((token_grpo,), credit=advantage_reweighting),
    "lopti": Method((lopti_low, lopti_high)),
    "ar-lopti": Method((lopti_low, lopti_high), credit=advantage_reweighting),
    "ibpo": Method((grpo,), credit=ibpo, repair=shaped_rewards),
}


if __name__ == "__main__":  # every method with its formulas, from the docstrings
    for name, method in METHODS.items():
        steps = "one optimiser step" if len(method.passes) == 1 else "two optimiser steps"
        print(f'{name}: advantage "{method.scale}", {steps} a minibatch')
        for function in filter(None, (method.repair, method.credit, *method.passes)):
            lines = [line.strip() for line in function.__doc__.splitlines()]
            formula = next(line for line in lines if line.startswith(("J = ", "A_", "R' = ")))
            print(f"    {function.__name__:22} {formula}")
