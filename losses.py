"""Group-relative policy-gradient losses, one short pure function each.

N answers ("trajectories") to a few prompts are rewarded at the end only; the G answers to one prompt are one group and
are compared with each other. Every method below turns the log-probabilities of the sampled tokens into one scalar.
What a loss really does to a token is its coefficient c = -N dLoss/dlogp. The prompt and the first tokens are shared by
several answers: there the coefficients of the group add up, and ought to add up to nothing but credit.

Unknowns, and where this file deviates from a paper (grades: P stated by the paper, S second-hand, D derived here):
  1. DFPO (arXiv 2604.13088v1): its full text was not available. Eq. 17 and 18 (the weight transforms) are second-hand;
     the loss around them is ours: score form, stop-gradient weight, no clip, constant length normaliser.
  2. DFPO's sequence ratio: geometric by default (the plain product of its theory under- and overflows on long answers).
  3. grpo-symmetric: the paper's "GRPO-fix" is known by its purpose only; "clip without min" is our reading of it.
  4. Advantage "std": unbiased (G-1) standard deviation + 1e-4, as TRL does; equal rewards give exactly 0.
  5. GRPO's KL term is off by default (the paper: 0.04); the estimator is k3 and sits inside the sequence mean.
  6. Constant normaliser: 1/(N L) with L the generation budget (Dr. GRPO writes 1/G and no L: a constant factor).
  7. DAPO: equal-reward groups are left out of the mean; they are not replaced by sampling more prompts.
  8. GSPO and DFPO's transforms take an answer's mean per-token advantage; without a credit rule that is A_i itself.
  9. pos-only divides by the full group, as GRPO does, so that its step is comparable.
 10. NTHR's self term, eta and the vocabulary of its score are ambiguous: arguments of `nthr`, with our choice.
 11. Advantage Reweighting and Lopti stand on GRPO's surrogate averaged over tokens (S), without the KL term.
 12. IBPO is second-hand throughout (S). Which sequence carries its mask (here the wrong answer, not its correction),
     and how its two weights combine (here as a product), is not known for certain.

Papers: GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, DFPO 2604.13088v1, NTHR 2505.18830,
Advantage Reweighting and Lopti ("AR/Lopti") 2505.12929, IBPO 2605.16302.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass
class Batch:
    """What a loss needs to know. N rows = prompts x group_size, T columns = longest answer, EOS
    included.

    Raises ValueError when a tensor's shape differs from logp's, or the rows are not whole groups of
    at least 2.
    """

    logp: Tensor  # (N, T) log pi_theta of the taken tokens, differentiable
    logp_old: Tensor  # (N, T) log pi_old of the same tokens, no grad
    adv: Tensor  # (N, T) per-token advantage: A_i repeated along T unless a credit rule reshaped it
    mask: Tensor  # (N, T) bool, True up to and including the first EOS
    group_size: int  # G; the rows of a group are contiguous
    max_tokens: int  # L, the generation budget: the constant length normaliser
    logp_ref: Tensor | None = None  # (N, T) log pi_ref of a frozen reference, only for the KL term

    def __post_init__(self):
        for name in ("logp_old", "adv", "mask", "logp_ref"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != self.logp.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, logp has {tuple(self.logp.shape)}"
                )
        if self.logp.dim() != 2 or self.mask.dtype != torch.bool:
            raise ValueError(
                f"logp must be (N, T) and mask bool, not {self.logp.dim()}-d and {self.mask.dtype}"
            )
        if self.group_size < 2 or len(self.logp) % self.group_size or not self.logp.numel():
            raise ValueError(
                f"{len(self.logp)} rows are not whole groups of group_size {self.group_size} (at least 2)"
            )
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")

    def __getitem__(self, rows) -> Batch:
        """The same batch restricted to some rows (an index or a slice of whole groups)."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self, **{name: x[rows] for name, x in tensors.items() if isinstance(x, Tensor)}
        )


# ---------------- advantages


def group_advantages(rewards: Tensor, group_size: int, scale: str = "std") -> Tensor:
    """Compare every answer with its group: A_i = R_i - mean(R), for scale "std" also / (std(R) +
    1e-4).

    (N,) -> (N,). A group whose rewards are all equal gets exactly 0. The std is the unbiased one
    (G-1). Raises ValueError for G < 2, N not divisible by G, or another scale. GRPO sec. 4.1.2 (P);
    "mean": Dr. GRPO (P).
    """
    if group_size < 2:
        raise ValueError(
            f"group_size must be at least 2 (an answer is compared with its siblings), not {group_size}"
        )
    if rewards.dim() != 1 or len(rewards) % group_size or not rewards.is_floating_point():
        raise ValueError(
            f"rewards: {rewards.dtype} of shape {tuple(rewards.shape)}, not whole groups of {group_size} floats"
        )
    if scale not in ("std", "mean"):
        raise ValueError(f'scale must be "std" or "mean", not {scale!r}')
    groups = rewards.view(-1, group_size)  # (P, G)
    adv = groups - groups.mean(1, keepdim=True)
    if scale == "std":
        adv = adv / (groups.std(1, keepdim=True) + 1e-4)
    equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return adv.masked_fill(equal, 0.0).view(-1)


# ---------------- ratios and aggregation


def token_ratio(batch: Batch) -> Tensor:
    """r_{i,t} = pi_theta / pi_old of every taken token, 1 on padding. (N, T)."""
    # Masked before exp: afterwards a padded inf would still turn the gradient into 0 * inf = NaN.
    return (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).exp()


def sequence_ratio(batch: Batch, kind: str = "geometric") -> Tensor:
    """s_i = (prod_t r_{i,t})^(1/T_i) for "geometric" (GSPO Eq. 7, P), prod_t r_{i,t} for "product"
    (DFPO, S). (N,)."""
    if kind not in ("geometric", "product"):
        raise ValueError(f'ratio must be "geometric" or "product", not {kind!r}')
    log_ratio = (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).sum(1)
    return (log_ratio / lengths(batch) if kind == "geometric" else log_ratio).exp()


def trajectory_advantage(batch: Batch) -> Tensor:
    """A_i, one number per answer: the mean of its per-token advantages; 0 for an empty answer.
    (N,)."""
    return masked_adv(batch).sum(1) / lengths(batch)


def masked_adv(batch: Batch) -> Tensor:
    """A_{i,t}, 0 on padding: a nan there would reach the gradient of A log pi, though the product
    is masked. (N, T)."""
    return batch.adv.masked_fill(~batch.mask, 0.0)


def lengths(batch: Batch) -> Tensor:
    """T_i, at least 1 so that an empty answer divides by 1, not by 0. (N,)."""
    return batch.mask.sum(1).clamp(min=1)


def seq_mean(x: Tensor, batch: Batch) -> Tensor:
    """(1/N) sum_i (1/T_i) sum_t x_{i,t}: GRPO's average. The 1/T_i alone breaks cancellation (claim
    C8, D)."""
    return (x.masked_fill(~batch.mask, 0.0).sum(1) / lengths(batch)).mean()


def budget_mean(x: Tensor, batch: Batch) -> Tensor:
    """(1/(N L)) sum_i sum_t x_{i,t}: every token weighs the same, whatever the length of its answer
    (Dr. GRPO, P)."""
    return x.masked_fill(~batch.mask, 0.0).sum() / (len(x) * batch.max_tokens)


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """sum x / number of tokens, over the whole batch (DAPO, P)."""
    return x.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def clipped(batch: Batch, eps_low: float, eps_high: float) -> Tensor:
    """PPO's surrogate min(r A, clip(r, 1-eps_low, 1+eps_high) A). (N, T). The min makes the gate
    depend on sign(A)."""
    ratio = token_ratio(batch)
    return torch.minimum(ratio * batch.adv, ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv)


def k3(batch: Batch) -> Tensor:
    """Schulman's k3 estimate of KL(pi_theta || pi_ref), per token: q - log q - 1 with q = pi_ref /
    pi_theta. (N, T)."""
    if batch.logp_ref is None:
        raise ValueError(
            "the KL term needs logp_ref, the log-probs of a frozen reference; it is None"
        )
    log_q = (batch.logp_ref - batch.logp).masked_fill(~batch.mask, 0.0)
    return log_q.exp() - log_q - 1


# ---------------- the losses: Batch -> scalar to minimise


def reinforce(batch: Batch) -> Tensor:
    """Plain policy gradient with the group mean as baseline.

    J = A log pi, constant. Williams 1992; group baseline as in Dr. GRPO (P).
    Shared token: cancels always (it ignores the ratio).
    """
    return -budget_mean(masked_adv(batch) * batch.logp, batch)


def grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2, kl: float = 0.0) -> Tensor:
    """PPO's clipped surrogate, averaged per answer; kl weighs a k3 penalty to logp_ref.

    J = min(r A, clip(r, 1-e, 1+e) A) - kl k3, seq-mean. GRPO Eq. 3-4 (P). Shared token: is left sum
    A_i/T_i on-policy (C8); outside the clip range only losers or only winners act (C6).
    """
    surrogate = clipped(batch, eps_low, eps_high)
    if kl:
        surrogate = surrogate - kl * k3(batch)
    return -seq_mean(surrogate, batch)


def grpo_symmetric(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO without the min and without 1/T_i: the gate opens and closes for winners and losers
    alike.

    J = clip(r, 1-e, 1+e) A, constant. DFPO's "GRPO-fix" (S; definition D).
    Shared token: cancels always (C7).
    """
    return -budget_mean(token_ratio(batch).clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch)


def dr_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO's surrogate with a constant length normaliser; its advantage is not divided by the std
    (see METHODS).

    J = min(r A, clip(r, 1-e, 1+e) A), constant. Dr. GRPO sec. 3.2 (P).
    Shared token: cancels inside the clip range only (C6).
    """
    return -budget_mean(clipped(batch, eps_low, eps_high), batch)


def dapo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.28) -> Tensor:
    """GRPO's surrogate with a wider upper clip, averaged over the tokens of the groups that
    disagree.

    J = min(r A, clip(r, 1-e_low, 1+e_high) A), token-mean without equal-reward groups. DAPO Eq. 8,
    10-12 (P). Shared token: cancels inside the clip range only (C6). A part of a batch weighs by
    its tokens in mixed groups.
    """
    groups = (masked_adv(batch) != 0).view(-1, batch.group_size, batch.adv.shape[1])  # (P, G, T)
    mixed = groups.flatten(1).any(1).repeat_interleave(batch.group_size)  # (N,)
    return -token_mean(clipped(batch, eps_low, eps_high), batch.mask & mixed[:, None])


def gspo(batch: Batch, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Tensor:
    """PPO's surrogate once per answer, on the geometric sequence ratio. Tiny models want a wider
    clip.

    J = min(s A, clip(s, 1-e_low, 1+e_high) A), mean over answers. GSPO Eq. 5-7 (P).
    Shared token: is left sum A_i s_i/T_i (C4, C8).
    """
    ratio, adv = sequence_ratio(batch), trajectory_advantage(batch)  # (N,), (N,)
    return -torch.minimum(ratio * adv, ratio.clamp(1 - eps_low, 1 + eps_high) * adv).mean()


def min_replace(w: Tensor, adv: Tensor) -> Tensor:
    """w~_i = min_j w_j: one weight for the whole group, so any zero-sum subset cancels. (P, G), (P,
    G) -> (P, G).

    Detached. DFPO Eq. 17 (S). `adv` is not used; it keeps the two transforms interchangeable.
    """
    return w.detach().amin(1, keepdim=True).expand_as(w)


def adv_orthogonal(w: Tensor, adv: Tensor) -> Tensor:
    """w~ = w - (A.w / ||A||^2) A: remove from w what correlates with A, so the group sum cancels.
    (P, G)^2 -> (P, G).

    Detached; a group whose advantages are all 0 keeps its weights. DFPO Eq. 18 (S). Weights may
    become negative (C10).
    """
    w, norm = w.detach(), (adv * adv).sum(1, keepdim=True)
    projection = (adv * w).sum(1, keepdim=True) / norm.masked_fill(norm == 0, 1.0)
    return w - projection * adv


def dfpo_min(batch: Batch, ratio: str = "geometric", eps: float = float("inf")) -> Tensor:
    """REINFORCE under a sequence ratio that Min-Replace has made equal within the group.

    J = sg[min_j s_j] A log pi, constant. DFPO Eq. 17 (transform S, loss D). With eps (ours) tokens
    with a ratio outside 1 +- eps rest, whatever the sign of A: a trust region, and as the visitors
    of a node share it, no tax. Shared token: cancels always, on every zero-sum subset too (C9).
    """
    return _dfpo(batch, ratio, min_replace, eps)


def dfpo_orthogonal(batch: Batch, ratio: str = "geometric", eps: float = float("inf")) -> Tensor:
    """REINFORCE under a sequence ratio that Adv-Orthogonal has made orthogonal to the advantages.

    J = sg[s - (A.s / ||A||^2) A] A log pi, constant. DFPO Eq. 18 (transform S, loss D); eps as in
    dfpo_min. Shared token: cancels where the whole group shares it, not on subsets (C10).
    """
    return _dfpo(batch, ratio, adv_orthogonal, eps)


def _dfpo(batch: Batch, ratio: str, transform: Callable, eps: float = float("inf")) -> Tensor:
    by_group = (-1, batch.group_size)
    w = transform(
        sequence_ratio(batch, ratio).view(by_group), trajectory_advantage(batch).view(by_group)
    )  # (P, G)
    resting = (token_ratio(batch) - 1).abs() > eps
    return -budget_mean(
        (w.reshape(-1, 1) * masked_adv(batch) * batch.logp).masked_fill(resting, 0.0), batch
    )


def pos_only(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO that learns from the better-than-average answers only: NTHR's control.

    J = min(r A+, clip(r, 1-e, 1+e) A+) with A+ = max(A, 0), seq-mean. NTHR (P). Shared token: does
    not cancel (nothing stands against the winners), save where the clip stops them all.
    """
    return grpo(replace(batch, adv=batch.adv.clamp(min=0)), eps_low, eps_high)


def token_grpo(batch: Batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """GRPO's surrogate averaged over all tokens of the batch: what Advantage Reweighting and Lopti
    stand on.

    J = min(r A, clip(r, 1-e, 1+e) A), token-mean. AR/Lopti (S).
    Shared token: cancels inside the clip range only (C6).
    """
    return -token_mean(clipped(batch, eps_low, eps_high), batch.mask)


def lopti_low(
    batch: Batch, eta: float = 0.5, eps_low: float = 0.2, eps_high: float = 0.2
) -> Tensor:
    """Lopti's first pass: the improbable tokens alone, pi_old <= eta; the denominator stays all
    tokens.

    J = 1[pi_old <= eta] min(r A, clip(r, 1-e, 1+e) A), token-mean. AR/Lopti (two passes P,
    token-mean S). Shared token: as token_grpo, in the one pass it belongs to (all visitors have the
    same pi_old).
    """
    return _lopti(batch, batch.logp_old.exp() <= eta, eps_low, eps_high)


def lopti_high(
    batch: Batch, eta: float = 0.5, eps_low: float = 0.2, eps_high: float = 0.2
) -> Tensor:
    """Lopti's second pass: the other tokens, pi_old > eta, from the parameters that the first pass
    has left.

    J = 1[pi_old > eta] min(r A, clip(r, 1-e, 1+e) A), token-mean. AR/Lopti (two passes P,
    token-mean S). Shared token: as lopti_low. The clip is live here even on-policy: r has moved
    since pi_old.
    """
    return _lopti(batch, batch.logp_old.exp() > eta, eps_low, eps_high)


def _lopti(batch: Batch, kept: Tensor, eps_low: float, eps_high: float) -> Tensor:
    return -token_mean(clipped(batch, eps_low, eps_high).masked_fill(~kept, 0.0), batch.mask)


# ---------------- credit rules: what the old policy knew -> (N, T) adv


@dataclass
class OldPolicy:
    """What the old policy's pass over a rollout batch leaves to a credit rule, which is applied
    once, then frozen.

    Raises ValueError when a shape does not fit tokens', or the rows are not whole groups of at
    least 2.
    """

    tokens: Tensor  # (N, T) ids
    mask: Tensor  # (N, T) bool
    logp: Tensor  # (N, T) log pi_old of the tokens, at the sampling temperature
    rewards: Tensor  # (N,) 1 = correct
    group_size: int  # G
    temperature: float = 1.0
    hidden: Tensor | None = (
        None  # (N, T, d) last hidden state, after the final norm, that predicts each token
    )
    head: Tensor | None = None  # (V, d) output embeddings: logits = hidden @ head.T / temperature
    gen: torch.Generator | None = None  # on the CPU, for rules that draw at random
    kept_mask: Tensor | None = (
        None  # (N, T) bool, tokens that a successful correction of the answer left as they were
    )

    def __post_init__(self):
        n = len(self.tokens)
        wanted = {"mask": self.tokens.shape, "logp": self.tokens.shape, "rewards": (n,)}
        if self.kept_mask is not None:
            wanted["kept_mask"] = self.tokens.shape
        if self.hidden is not None and self.head is not None:
            wanted["hidden"] = (*self.tokens.shape, self.head.shape[1])
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"{name} has shape {tuple(getattr(self, name).shape)}, not {tuple(shape)}"
                )
        if self.group_size < 2 or n % self.group_size:
            raise ValueError(
                f"{n} rows are not whole groups of group_size {self.group_size} (at least 2)"
            )


def advantage_reweighting(adv: Tensor, old: OldPolicy, alpha: float = 0.3) -> Tensor:
    """Shrink the advantage of improbable tokens, whose gradients are the largest. (N, T), OldPolicy
    -> (N, T).

    A_{i,t} = (alpha pi_old + 1 - alpha) A_i, both signs; the paper takes alpha = 0.1 for maths.
    AR/Lopti Eq. 4 (P). Shared token: one factor for all visitors, so what cancelled still does.
    Raises ValueError for another alpha.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(
            f"alpha must lie between 0 and 1, not {alpha}: a larger one turns gradients round"
        )
    return (alpha * old.logp.detach().exp() + 1 - alpha) * adv


def nthr(
    adv: Tensor,
    old: OldPolicy,
    beta: float = 1.0,
    eta: float = -1.0,
    self_term: bool = True,
    full_vocab: bool = False,
) -> Tensor:
    """Soften the penalty on the tokens of wrong answers that push the correct ones down. (N, T),
    OldPolicy -> (N, T).

    A_{j,k} = eta A_j where A_j < 0 and s_{j,k} > tau = beta min_{correct i} mean_k s_{i,k}. NTHR
    Eq. 7 (S; rule P). Open readings: eta -1 stands for 2|0.5 - p|, p the group's share of correct
    answers, or give a constant; self_term: whether a correct token's score, in tau, counts its
    product with itself; full_vocab: see nthr_scores, s is there. Shared token: a winner's
    counterweight is taken away, on purpose.
    """
    share = (
        (old.rewards == 1)
        .to(adv.dtype)
        .view(-1, old.group_size)
        .mean(1)
        .repeat_interleave(old.group_size)
    )  # (N,)
    factor = 2 * (0.5 - share).abs() if eta < 0 else torch.full_like(share, eta)
    selected = nthr_selected(old, beta, self_term, full_vocab) & (adv < 0)
    return torch.where(selected, factor[:, None] * adv, adv)


def nthr_random(
    adv: Tensor, old: OldPolicy, beta: float = 1.0, self_term: bool = True, full_vocab: bool = False
) -> Tensor:
    """NTHR's control: no penalty on as many tokens of each wrong answer as nthr selects. (N, T),
    OldPolicy -> (N, T).

    A_{j,k} = 0 on tokens drawn at random among those of the answer. NTHR (P).
    Shared token: as nthr.
    """
    count = (nthr_selected(old, beta, self_term, full_vocab) & (adv < 0)).sum(
        1, keepdim=True
    )  # (N, 1)
    draw = (
        torch.rand(old.mask.shape, generator=old.gen).to(adv.device).masked_fill(~old.mask, 2.0)
    )  # padding last
    return adv.masked_fill(draw.argsort(1).argsort(1) < count, 0.0)


def nthr_selected(
    old: OldPolicy, beta: float = 1.0, self_term: bool = True, full_vocab: bool = False
) -> Tensor:
    """The tokens of wrong answers whose score exceeds tau; none in a group without correct answers.
    (N, T) bool."""
    correct, scores = old.rewards == 1, nthr_scores(old, self_term, full_vocab)
    means = scores.sum(1) / old.mask.sum(1)  # (N,), nan for an empty answer
    lowest = (
        means.masked_fill(~correct | means.isnan(), torch.inf).view(-1, old.group_size).amin(1)
    )  # (P,)
    tau = torch.where(lowest < torch.inf, beta * lowest, lowest).repeat_interleave(old.group_size)[
        :, None
    ]  # (N, 1)
    return (scores > tau) & old.mask & ~correct[:, None]


@torch.no_grad()
def nthr_scores(old: OldPolicy, self_term: bool = True, full_vocab: bool = False) -> Tensor:
    """How much a token's push moves the group's correct answers: s = g^T M h, M = sum of g h^T over
    their tokens.

    g = e_y - pi(.|h), the prediction error, on the ids that occur in the group's answers (full
    softmax denominator), or with full_vocab on all; h the last hidden state. One matrix a group
    stands for the double sum of <g,g'> <h,h'> (N4, D). Without self_term a correct token does not
    count itself. At least fp32; 0 on padding and in groups without correct or without wrong
    answers. Needs (G, T, |V*|) numbers at a time. OldPolicy -> (N, T). NTHR Eq. 7 (S).
    """
    if old.hidden is None or old.head is None:
        raise ValueError(
            "nthr needs the last hidden states and the output embeddings; hidden or head is None"
        )
    dtype = torch.promote_types(old.hidden.dtype, torch.float32)
    scores, correct = (
        torch.zeros(old.mask.shape, dtype=dtype, device=old.mask.device),
        old.rewards == 1,
    )
    for start in range(0, len(correct), old.group_size):
        rows = slice(start, start + old.group_size)
        right, mask, tokens, h = (
            correct[rows],
            old.mask[rows],
            old.tokens[rows],
            old.hidden[rows].to(dtype),
        )
        if right.all() or not right.any() or not mask.any():
            continue
        ids = (
            torch.arange(len(old.head), device=mask.device) if full_vocab else tokens[mask].unique()
        )  # V*
        where = torch.searchsorted(ids, tokens.contiguous()).clamp(max=len(ids) - 1)[
            ..., None
        ]  # (G, T, 1) place in V*
        g = (h @ old.head[ids].to(dtype).T).div_(
            old.temperature
        )  # (G, T, |V*|) logits; all in place, it is large
        g.sub_(g.gather(2, where)).add_(
            old.logp[rows, :, None]
        ).exp_().neg_()  # -pi: logp has the full denominator
        g.scatter_add_(2, where, torch.ones_like(g[..., :1]))
        M = sum(g[i, mask[i]].T @ h[i, mask[i]] for i in right.nonzero().flatten())  # (|V*|, d)
        scores[rows] = torch.stack(
            [((g_i @ M) * h_i).sum(1) for g_i, h_i in zip(g, h, strict=True)]
        )
        if not self_term:
            scores[rows] -= right[:, None] * g.norm(dim=2).square() * h.norm(dim=2).square()
    return scores.masked_fill(~old.mask, 0.0)


def ibpo(adv: Tensor, old: OldPolicy) -> Tensor:
    """Blame a wrong answer that its author could repair for the tokens that the repair changed
    only. (N, T) -> (N, T).

    A_{i,t} = m_{i,t} A'_i with A' from shaped_rewards, m = 0 on the tokens in kept_mask, else 1.
    IBPO (S). Shared token: repaired answers that kept it leave the sum, so it does not cancel, on
    purpose.
    """
    if old.kept_mask is None:
        raise ValueError("ibpo needs the corrections: kept_mask is None")
    return adv.masked_fill(old.kept_mask, 0.0)


def shaped_rewards(
    rewards: Tensor, repaired: Tensor, bonus: float = 0.5, weight: float = 0.6
) -> Tensor:
    """R' = R + weight phi, phi = bonus 1[R = 0 and the correction is right]: a near miss counts a
    little. IBPO (S).

    (N,), (N,) bool -> (N,). Whether the variance falls depends on how many answers are right (claim
    I1).
    """
    return rewards + weight * bonus * (repaired & (rewards == 0)).to(rewards.dtype)


def kept_tokens(tokens: Tensor, mask: Tensor, others: Tensor, others_mask: Tensor) -> Tensor:
    """Tokens that stay when each row is turned into the other by the fewest insertions, deletions
    and substitutions.

    Levenshtein; of several shortest ways the one that matches latest. (N, T), (N, T), (N, U), (N,
    U) -> (N, T) bool.
    """
    n, width, steps = (
        len(tokens),
        tokens.shape[1],
        torch.arange(others.shape[1] + 1, device=tokens.device),
    )
    same = tokens[:, :, None] == others[:, None]  # (N, T, U)
    edits = steps.repeat(n, width + 1, 1)  # (N, T+1, U+1): the first t tokens into the first u
    for t in range(width):
        substituted, deleted = edits[:, t, :-1] + ~same[:, t], edits[:, t] + 1
        best = torch.cat([deleted[:, :1], torch.minimum(substituted, deleted[:, 1:])], 1)
        edits[:, t + 1] = (best - steps).cummin(
            1
        ).values + steps  # or inserted: one more for every step to the right
    kept, rows, t, u = (
        torch.zeros_like(mask),
        torch.arange(n, device=tokens.device),
        mask.sum(1),
        others_mask.sum(1),
    )
    for _ in range(int((t + u).amax())):  # back from the end of each row
        both, here = (t > 0) & (u > 0), edits[rows, t, u]
        match = both & same[rows, t - 1, u - 1]
        substitute = both & ~match & (edits[rows, t - 1, u - 1] + 1 == here)
        delete = (t > 0) & ~match & ~substitute & (edits[rows, t - 1, u] + 1 == here)
        kept[rows[match], t[match] - 1] = True
        t, u = t - (match | substitute | delete).long(), u - ((u > 0) & ~delete).long()
    return kept


# ---------------- the meter: what a loss does to shared tokens


def token_coefficients(loss: Tensor, logp: Tensor) -> Tensor:
    """c = -N dLoss/dlogp: the ascent weight that every token really gets. scalar, (N, T) -> (N, T),
    detached. (D)

    `logp` must be the tensor that the loss was computed from; the graph is kept.
    """
    return -len(logp) * torch.autograd.grad(loss, logp, retain_graph=True)[0]


def prefix_nodes(
    tokens: Tensor, mask: Tensor, group_size: int, context: int | None = None
) -> Tensor:
    """Node of the group's prefix tree that every token leads to. (N, T), (N, T), G -> (N, T) int64,
    -1 on padding. (D)

    Two ids are equal iff the rows are of one group and agree up to and including that token; with
    `context` iff they agree in the last so many tokens, itself included, wherever in the answers
    these stand (ours: shared tokens off the common prefix). Raises ValueError for a context below
    1.
    """
    n, width = tokens.shape
    if context is not None:
        if context < 1:
            raise ValueError(f"context must be at least 1 token, the token itself, not {context}")
        # -1: before the start
        before = torch.nn.functional.pad(tokens, (min(context, width) - 1, 0), value=-1)
        windows = before.unfold(1, min(context, width), 1)[mask]  # (M, context)
        group = torch.arange(n, device=tokens.device) // group_size
        windows = torch.cat([group[:, None].expand(n, width)[mask][:, None], windows], 1)
        nodes = torch.full_like(tokens, -1)
        return nodes.masked_scatter(mask, windows.unique(dim=0, return_inverse=True)[1])
    groups = tokens.view(-1, group_size, width)  # (P, G, T)
    same = (
        (groups[:, :, None] == groups[:, None]).to(torch.uint8).cumprod(-1, dtype=torch.uint8)
    )  # (P, G, G, T)
    first = same.argmax(2).view(
        n, width
    )  # the first row of the group with this prefix stands for all of them
    offset = torch.arange(n, device=tokens.device) // group_size * group_size
    nodes = (offset[:, None] + first) * width + torch.arange(width, device=tokens.device)
    return nodes.masked_fill(~mask, -1)


def _visitors(
    advantages: Tensor, nodes: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The K tokens whose A_i is not 0, in a row: (N, T) selector, (K,) A_i, (K,) node index, (V,)
    visitors per node."""
    adv = advantages[:, None].expand_as(mask)
    used = mask & (adv != 0)
    _, node, count = torch.unique(nodes[used], return_inverse=True, return_counts=True)
    return used, adv[used], node, count


def learning_tax(coefficients: Tensor, advantages: Tensor, nodes: Tensor, mask: Tensor) -> float:
    """Reward-irrelevant gradient on shared tokens, relative to all of it there: 0 = they get their
    credit only.

    With w = c/A and wbar its mean over the visitors S_v of node v: tax_v = sum_{S_v} (w_i - wbar)
    A_i, and the result is sum_v |tax_v| / sum_v sum_{S_v} |c_i| over nodes with at least 2
    visitors; answers with A_i = 0 are left out. (N, T), (N,) trajectory advantages, (N, T), (N, T)
    -> float >= 0, and it may exceed 1. Claim C15 (D).
    """
    used, adv, node, count = _visitors(advantages, nodes, mask)
    c = coefficients[used]

    def per_node(x: Tensor) -> Tensor:  # (K,) -> (V,)
        return x.new_zeros(len(count)).index_add_(0, node, x)

    tax = (per_node(c) - per_node(c / adv) / count * per_node(adv)).abs()
    total = per_node(c.abs())[count > 1].sum()
    return float(tax[count > 1].sum() / total) if total > 0 else 0.0


def project(loss: Tensor, logp: Tensor, advantages: Tensor, nodes: Tensor, mask: Tensor) -> Tensor:
    """Any loss with its tax removed: each token's weight w = c/A is replaced by its mean over the
    node's visitors.

    Returns the surrogate -(1/N) sum c' log pi, c' detached; answers with A_i = 0 keep their c.
    Claim C17 (D, ours). Meant for losses with c proportional to A_i; a KL term's c / A_i may be
    huge, so add such a term outside. scalar, (N, T), (N,) trajectory advantages, (N, T), (N, T) ->
    scalar to minimise (its value means nothing).
    """
    used, adv, node, count = _visitors(advantages, nodes, mask)
    c = token_coefficients(loss, logp)
    mean = c.new_zeros(len(count)).index_add_(0, node, c[used] / adv) / count  # (V,)
    c = c.masked_scatter(used, mean[node] * adv)
    return -(c * logp).masked_fill(~mask, 0.0).sum() / len(logp)


# ---------------- a method = advantage scale + credit + passes


@dataclass
class Method:
    """The three independent choices that make a method."""

    passes: tuple[Callable[..., Tensor], ...]  # Batch -> loss; one optimiser step each
    scale: str = "std"  # of group_advantages
    credit: Callable[..., Tensor] | None = (
        None  # (N, T) advantages, OldPolicy -> (N, T) advantages; once per rollout batch
    )
    needs_hidden: bool = False  # whether credit reads OldPolicy.hidden and OldPolicy.head
    # (N,) rewards, (N,) bool repaired -> (N,) shaped rewards; wrong answers are then corrected in a
    # second rollout, which also fills OldPolicy.kept_mask
    repair: Callable[..., Tensor] | None = None


METHODS: dict[str, Method] = {
    "reinforce": Method((reinforce,)),
    "grpo": Method((grpo,)),
    "grpo-symmetric": Method((grpo_symmetric,)),
    "dr-grpo": Method((dr_grpo,), scale="mean"),
    "dapo": Method((dapo,)),
    "gspo": Method((gspo,)),
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


if __name__ == "__main__":  # the table of methods, from the docstrings
    for name, method in METHODS.items():
        print(
            f'{name}: advantages "{method.scale}", {len(method.passes)} optimiser step(s) a minibatch'
        )
        for function in filter(None, (method.credit, *method.passes)):
            formula = next(
                x.strip() for x in function.__doc__.splitlines() if x.strip()[:2] in ("J ", "A_")
            )
            print(f"    {function.__name__:22} {formula}")
