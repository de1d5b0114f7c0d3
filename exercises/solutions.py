"""The answer key: one right answer for every function. Look here last.

    python -m exercises.grader 8 exercises/solutions.py

The mistakes in lessons.json are edits of these functions' text, so after a change of one, run
python -m exercises.teacher. The students' copy does not have this file.
"""
# ruff: noqa: B905

import torch


def group_advantages(rewards, group_size, scale):
    groups = rewards.view(-1, group_size)
    dim, std_dim = 1, 1
    adv = groups - groups.mean(dim, keepdim=True)
    if scale == "std":
        std = groups.std(std_dim, keepdim=True)
        adv = adv / (std + 1e-4)
    equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return adv.masked_fill(equal, 0.0).view(-1)


def net_push(rho, advantages):
    return rho * sum(advantages)


def net_push_by_length(lengths, advantages):
    return sum(A / T for A, T in zip(advantages, lengths))


def still_pushes(r, A, eps_low=0.2, eps_high=0.2):
    low, high = 1 - eps_low, 1 + eps_high
    return r < high if A > 0 else r > low


def net_push_with_clip(rho, advantages, eps_low, eps_high):
    low, high = 1 - eps_low, 1 + eps_high
    factor = rho
    return factor * sum(A for A in advantages if (rho < high if A > 0 else rho > low))


def prediction():
    return 0.2, 0.6


def loss(log_pi, A, T, method):
    L = 24
    c = A / T if method == "grpo" else A / L
    return -(c * log_pi).mean()


def lone_advantage(reward, bonus, group_size):
    G, rewards = group_size, [reward] + [bonus] * (group_size - 1)
    mean = sum(rewards) / G
    variance = sum((R - mean) ** 2 for R in rewards) / (G - 1)
    return (reward - mean) / variance**0.5 if reward != bonus else 0.0


def mean_advantages(chance, bonus, group_size):
    G, miss = group_size, 1 - chance
    std = (chance - miss) * (G - 1) / G**0.5
    mean = (chance - bonus) * (1 - 1 / G)
    return std, mean


def opposite_signs():
    return 0.01, 0.45


def prefix_baseline(c):
    n, new = len(c), []
    if n == 1:
        return c
    for i in range(n):
        others = [c[j] for j in range(n) if j != i]
        new.append(c[i] - sum(others) / len(others))
    return new


def over_all_pairs(pi, c):
    K = len(pi)
    push, left = [0.0] * K, 0.0
    for a, b in [(a, b) for a in range(K) for b in range(K)]:
        x, y = c[a] - c[b], c[b] - c[a]
        chance = pi[a] * pi[b]
        if a == b:
            left = max(left, abs(x + y))
        for k in range(K):
            push[k] += chance * (x * ((k == a) - pi[k]) + y * ((k == b) - pi[k]))
    return push, left


def grpo_symmetric(batch, eps_low, eps_high):
    low, high, L = 1 - eps_low, 1 + eps_high, batch.max_tokens
    log_ratio = batch.logp - batch.logp_old
    r = log_ratio.masked_fill(~batch.mask, 0.0).exp()
    A = batch.adv  # 0 on padding
    x = r.clamp(low, high) * A
    return -x.sum() / (len(x) * L)


def dr_grpo(batch, eps):
    log_ratio = batch.logp - batch.logp_old
    r = log_ratio.masked_fill(~batch.mask, 0.0).exp()
    x = torch.minimum(r * batch.adv, r.clamp(1 - eps, 1 + eps) * batch.adv)
    return -x.sum() / (len(x) * batch.max_tokens)


def kl_penalty(batch, beta):
    log_q = (batch.logp_ref - batch.logp).masked_fill(~batch.mask, 0.0)
    k3 = log_q.exp() - 1 - log_q
    return beta * k3.sum() / (len(k3) * batch.max_tokens)


def score(logits, tokens, temperature):
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, tokens[:, None]).squeeze(1)


def adv_orthogonal(w, adv):
    w = w.detach()
    dim = 1
    norm = (adv * adv).sum(dim, keepdim=True)
    norm = norm.masked_fill(norm == 0, 1.0)
    return w - (adv * w).sum(dim, keepdim=True) / norm * adv


def blind_spot():
    return [3, 0.1, 0.1, 0.1]


def learning_tax(pushes, advantages, nodes, mask):
    top = bottom = 0.0
    used = mask & (advantages != 0)[:, None]
    weights = pushes / advantages[:, None]
    for node in set(nodes[used].tolist()):
        here = used & (nodes == node)
        c, w, A = pushes[here], weights[here], advantages[here.nonzero()[:, 0]]
        if len(c) > 1:
            wbar = w.mean()
            tax = ((w - wbar) * A).sum()
            size = c.abs().sum()
            top += abs(tax)
            bottom += size
    return float(top / bottom) if bottom else 0.0


def grpo_on_policy(advantages, lengths):
    rows = list(zip(advantages, lengths))
    value = sum(A for A, T in rows)
    c = sum(A / T for A, T in rows)
    loss = -value / len(rows)
    return loss, c


def dr_grpo_on_policy(advantages, lengths, budget):
    L, rows = budget, list(zip(advantages, lengths))
    value = sum(A * T for A, T in rows) / L
    c = sum(A for A, T in rows) / L
    loss = -value / len(rows)
    return loss, c
