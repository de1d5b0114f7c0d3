"""C6, C8, C9, C10 and AUDIT: when do the pushes on a shared token cancel?

The push on a token is c_{i,t} = -N dLoss/dlogp_{i,t}. These losses reach the policy only through
the log-probs of the taken tokens (an entropy bonus would not). So by the chain rule

    -grad Loss = (1/N) sum_{i,t} c_{i,t} grad log pi(a_{i,t}|h_{i,t}).

A token that all answers of a group take after the same prefix is fully shared. It has one ratio rho
and one grad log pi, so its pushes add up to one net push. The token says nothing about the reward,
so its net push ought to be 0. AUDIT has one line for each loss. PROOFS.md proves why: C2 one
divisor, C4 one ratio for an answer, C7 a sign-blind clip, C11 DFPO on-policy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import losses
from claims.evidence import Tree, claim, equal, not_zero
from claims.formulas import FORMULAS, fitting, shares


def at_shared(name: str, tree: Tree, spread=0.0, offset=0.0) -> tuple[Tensor, Tensor, Tensor]:
    """At the K fully shared tokens: their ratio rho, (K,); each A_i over the method's divisor,
    (K, G); and the measured pushes, (K, G).
    """
    batch = tree.batch(spread, offset)
    rho = tree.at_shared(tree.log_ratio(spread, offset).exp())[:, 0]
    A = tree.at_shared(tree.adv * shares(name, batch))
    return rho, A, shared_pushes(fitting(name), tree, spread, offset)


def shared_pushes(loss: Callable, tree: Tree, spread=0.0, offset=0.0) -> Tensor:
    """(K, G)."""
    batch = tree.batch(spread, offset)
    return tree.at_shared(losses.token_pushes(loss(batch), batch.logp))


@claim("C6", "grpo", "dr_grpo", "dapo")
def c6(name, tree):
    """Outside its range, PPO's clip pushes a fully shared token back to pi_old: the net push is
    -rho P above the range and +rho P below it, where P is the sum of the positive advantages.

    Source: DFPO (words P, formula D)

    Proof: above the range the clip stops the winners, below it the losers (M1). The negative
    advantages sum to -P, and all answers have one ratio rho at a fully shared token. So the net
    push is rho (P - P) = 0 inside the range, -rho P above it and rho P below it. The clip thus does
    more than stop an update: it undoes it. All pushes also have the token's weight under the
    divisor, so for grpo the answers must have equal lengths (C8).
    """
    if name != "grpo" or tree.equal_lengths:
        rho, A, c = at_shared(name, tree, 0.6)
        bounds = losses.defaults(getattr(losses, name))
        above, below = rho > 1 + bounds["eps_high"], rho < 1 - bounds["eps_low"]
        P = A.clamp(min=0).sum(1)
        equal(rho * P * (0 + below - 1 * above), c.sum(1))


@claim("C8", "grpo", "gspo")
def c8(name, tree):
    """Dividing each answer by its own length gives a fully shared token the net push sum_i A_i /
    T_i, even on-policy. It is 0 for every A only if all T_i are equal.

    Source: the divisors of GRPO and GSPO (D)

    Proof: in (1/N) sum_i (1/T_i) sum_t the shared token has another weight in each answer. With A_1
    = -A_2 and all other A_i = 0 the sum is 0 only if T_1 = T_2. Off-policy grpo's is rho sum_i A_i
    / T_i inside the clip range, and GSPO's sum_i s_i A_i / T_i. The constant L (Dr. GRPO) and the
    number of tokens in the batch (DAPO) are common factors, so with them the token cancels.
    """
    _, _, c = at_shared(name, tree)
    equal(tree.at_shared(tree.adv / tree.T).sum(1), c.sum(1))


@claim("C9", "min_replace")
def c9(name, tree):
    """Min-Replace gives the whole group one weight, min_j s_j. So any part of the group whose
    advantages sum to 0 cancels.

    Source: DFPO Eq. 17, of dfpo-min (S)

    Proof: for every part S of the group, the sum of min_j s_j times A_i over S is min_j s_j times
    the sum of A_i over S. Any other constant would do; the minimum is the cautious one. The weight
    must be detached. Otherwise the slope of the one smallest s_j adds (1/G) (s_j / T_j) sum_i A_i
    l_i for the geometric mean, where l_i is the log-prob of answer i (derived, not measured).
    """
    w = tree.randn(3, tree.G).exp().requires_grad_()
    out = losses.min_replace(w)
    assert not out.requires_grad, "the weights must be detached"
    equal([[min(row)] * tree.G for row in w.tolist()], out)


@claim("C10", "adv_orthogonal")
def c10(name, tree):
    """Adv-Orthogonal cancels at fully shared tokens, but not on zero-sum parts of the group.

    Source: DFPO Eq. 18, of dfpo-orthogonal (S); limits (D)

    Proof: wtilde = w - (A.w / ||A||^2) A has A.wtilde = 0. It keeps the sum of the weights, because
    sum_i A_i = 0. On a zero-sum part S the net push is the sum of w_i A_i over S minus A.w /
    ||A||^2 times the sum of A_i^2 over S. Weights may turn negative and push winners down: A = (1,
    1, 1, 1, -1, -1, -1, -1) and w = (3, 0.1, ..., 0.1) give three winners the weight 0.1 - 0.3625.
    (Only fully shared tokens are measured.)
    """
    A = tree.adv.view(-1, tree.G)
    w = tree.randn(*A.shape).exp().requires_grad_()
    out = losses.adv_orthogonal(w, A)
    assert not out.requires_grad, "the weights must be detached"
    equal(w.sum(1), out.sum(1))
    equal(0 * A[:, 0], (out * A).sum(1))


# ---------------- AUDIT

REGIMES = {  # spread and offset of the ratios, and whether lengths are equal
    "on-policy, equal T_i": (0, 0, True),
    "on-policy, unequal T_i": (0, 0, False),
    "off-policy, ratios within 16%": (0.15, 0, True),
    "off-policy, ratios beyond 30%": (0.3, 0.35, True),
}
AUDIT = {  # the net push, regime by regime, as in NET_PUSH; x: not 0
    "reinforce": "0000",
    "grpo": "0T0P",
    "grpo_symmetric": "0000",
    "dr_grpo": "000P",
    "dapo": "000P",
    "gspo": "0Tsx",
    "cispo": "0000",
    "dfpo_min": "0000",
    "dfpo_orthogonal": "0000",
    "pos_only": "+++b",
    "nthr_grpo": "000P",
    "token_grpo": "000P",
    "lopti_low": "000P",
    "lopti_high": "000P",
}
NET_PUSH = {  # of rho (K,), s (K, G), and A over the divisor (K, G)
    "0": lambda rho, s, A: 0 * rho,  # pushes cancel (C2, C7, C9 to C11)
    "T": lambda rho, s, A: A.sum(1),  # unequal lengths (C8)
    "s": lambda rho, s, A: (s * A).sum(1),  # one ratio for an answer (C4)
    "P": lambda rho, s, A: -(rho - 1).sign() * rho * A.clamp(min=0).sum(1),  # PPO's clip (C6)
    "+": lambda rho, s, A: rho * A.clamp(min=0).sum(1),  # only winners push
    "b": lambda rho, s, A: rho * A.clamp(min=0).sum(1) * (rho < 1),  # only winners, PPO's clip
}


def net_share(c: Tensor) -> Tensor:
    """|sum_i c_i| / sum_i |c_i| at the shared tokens that are pushed at all. (K, G) -> (<= K,)."""
    size = c.abs().sum(1)
    return (c.sum(1).abs() / size)[size != 0]  # a nan is not left out


def net_push(loss: Callable, trees: list[Tree], spread, offset, equal_lengths) -> float:
    """The mean of net_share in a regime."""
    some = [x for x in trees if x.equal_lengths == equal_lengths and not x.kind]
    net = torch.cat([net_share(shared_pushes(loss, x, spread, offset)) for x in some])
    return float(net.sum() / max(1, len(net)))  # 0 if nobody is pushed


@claim("AUDIT", *FORMULAS)
def audit(name, tree):
    """The pushes of each loss cancel at a fully shared token in some of four regimes. In the others
    the net push is what C4, C6 and C8 say.

    Source: C2 to C11 together (D)

    Proof: reinforce, grpo-symmetric and cispo (C2, C7), dfpo-min and dfpo-orthogonal (C9, C10)
    always cancel. The others do not cancel outside the clip range, because their clips look at the
    sign of A (C6). With unequal lengths grpo and gspo do not cancel (C8). Off-policy gspo never
    cancels (C4). pos-only never cancels, because nothing opposes the winners.

    Conditions: clip ranges made for long answers are widened (gspo's to 0.2 and 0.28), and
    lopti_high takes every token (eta = 0). A group must be in one update, because the advantages of
    a part of it do not sum to 0.
    """
    for (spread, offset, equal_lengths), form in zip(REGIMES.values(), AUDIT[name], strict=True):
        if tree.equal_lengths == equal_lengths:
            rho, A, c = at_shared(name, tree, spread, offset)
            pushed = c.any(1)
            if form in NET_PUSH:
                s = tree.at_shared((tree.log_ratio(spread, offset).sum(1) / tree.T).exp())
                equal(NET_PUSH[form](rho, s, A)[pushed], c.sum(1)[pushed], f"{name}, the net push")
            elif not tree.kind and tree.G > 4 and pushed.any():
                not_zero(net_share(c), f"{name}: the net push")
