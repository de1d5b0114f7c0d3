"""The trainer a second time, as plainly as possible: a second opinion that shares no code with it.

One answer at a time: no cache, no padding, no batches, no buckets. A row is a list of tokens, its
log-probs are a tensor (T_i,), and gradients are autograd's, through whole forward passes. Only the
random numbers are the trainer's own, so that both see the same draws.
"""

import math
from collections import defaultdict

import torch

CLIP = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1, 4)}  # others: (0.2, 0.2)
CLIP |= dict.fromkeys(("token_grpo", "lopti_low", "lopti_high"), (0.2, 0.24))
SEQ_MEAN = ("grpo", "gspo", "pos_only")
BUDGET_MEAN = ("reinforce", "grpo_symmetric", "dr_grpo", "dfpo_min", "dfpo_orthogonal")


# ---------------- sample


@torch.no_grad()
def rollout(policy, prompts, max_tokens, temperature, gen):
    """An answer to each prompt, with its EOS; temperature 0 is greedy."""
    uniform = torch.rand(len(prompts), max_tokens, generator=gen, dtype=torch.float64).tolist()
    answers = []
    for prompt, draws in zip(prompts, uniform, strict=True):
        answer = []
        while len(answer) < max_tokens and not (answer and answer[-1] in policy.eos):
            logits = policy.model(torch.tensor([prompt + answer])).logits[0, -1]
            if temperature:
                sums = (logits / temperature).double().softmax(-1).cumsum(-1)
                answer.append(int((sums <= draws[len(answer)] * sums[-1]).sum()))
            else:
                answer.append(int(logits.argmax()))
        answers.append(answer)
    return answers


def decode(policy, answer):
    return policy.tokenizer.decode([token for token in answer if token not in policy.eos])


# ---------------- score


def read(policy, prompt, answer, temperature):
    """log pi of every id of the vocabulary after each prefix (T_i, V), hidden states (T_i, d)."""
    hidden = policy.model.base_model(torch.tensor([prompt + answer])).last_hidden_state
    hidden = hidden[0, len(prompt) - 1 : -1]
    logits = policy.model.get_output_embeddings()(hidden)
    return (logits / temperature).log_softmax(-1), hidden


def log_probs(policy, prompts, answers, temperature):
    """log pi of the rows' tokens: tensors (T_i,), differentiable."""
    full = [read(policy, *row, temperature)[0] for row in zip(prompts, answers, strict=True)]
    return [x[range(len(y)), y] for x, y in zip(full, answers, strict=True)]


def advantages(rewards, G, scale):
    found = []
    for i in range(len(rewards)):
        group = torch.tensor(rewards[i - i % G : i - i % G + G], dtype=torch.float64)
        deviation = group.std() + 1e-4 if scale == "std" else 1.0
        equal = len(set(group.tolist())) == 1
        found.append(0.0 if equal else float((rewards[i] - group.mean()) / deviation))
    return found


def nthr_scores(rows, rewards, G, self_term=True):
    """rows: for each answer its g (T_i, V*) and h (T_i, d). Lists of s, 0 outside mixed groups."""
    scores = [[0.0] * len(g) for g, _ in rows]
    for i, (g, h) in enumerate(rows):
        group = range(i - i % G, i - i % G + G)
        right = [j for j in group if rewards[j] == 1]
        if 0 < len(right) < G:
            for t in range(len(g)):
                for j in right:
                    product = (rows[j][0] @ g[t]) * (rows[j][1] @ h[t])  # (T_j,)
                    own = 0.0 if self_term or i != j else float(product[t])
                    scores[i][t] += float(product.sum()) - own
    return scores


def nthr_selected(scores, rewards, G, beta=1.0):
    """Lists of bool: a wrong answer's token with s > beta min over right answers of their mean."""
    means = [sum(s) / len(s) if s else math.inf for s in scores]
    chosen = []
    for i, row in enumerate(scores):
        right = [j for j in range(i - i % G, i - i % G + G) if rewards[j] == 1 and scores[j]]
        lowest = min((means[j] for j in right), default=math.inf)
        tau = beta * lowest if lowest < math.inf else lowest
        chosen.append([rewards[i] != 1 and s > tau for s in row])
    return chosen


def prediction_errors(policy, prompts, answers, temperature, G):
    """g = e_y - pi on the ids of the group's answers (T_i, V*), and h (T_i, d), of each answer."""
    found = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = sorted({token for row in answers[i - i % G : i - i % G + G] for token in row})
        logp, hidden = read(policy, prompt, answer, temperature)
        g = -logp[:, ids].exp()
        g[range(len(answer)), [ids.index(token) for token in answer]] += 1
        found.append((g, hidden))
    return found


# ---------------- the losses


def loss(name, now, old, adv, ref, G, L, eps_low=None, eps_high=None, kl=0.0, **hyper):
    """A loss of losses.py by name. now, old, adv, ref: for each answer a tensor (T_i,)."""
    n = len(now)
    T = [len(row) for row in now]
    low, high = CLIP.get(name, (0.2, 0.2)) if eps_low is None else (eps_low, eps_high)
    A = [row.sum() / max(1, len(row)) for row in adv]
    s = [(x - y).sum() for x, y in zip(now, old, strict=True)]
    if hyper.get("ratio") != "product":
        s = [x / max(1, t) for x, t in zip(s, T, strict=True)]
    s = [x.exp() for x in s]
    groups = [range(i - i % G, i - i % G + G) for i in range(n)]
    mixed = [any(adv[j].any() for j in group) for group in groups]
    counted = sum(T[i] for i in range(n) if mixed[i] or name != "dapo")

    def ppo(r, a):  # (T_i,), (T_i,)
        return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)

    total = 0.0 * sum(row.sum() for row in now)
    for i in range(n):
        r = (now[i] - old[i]).exp()
        if name == "cispo":
            J = r.detach().clamp(1 - low, 1 + high) * adv[i] * now[i]
        elif name == "grpo_symmetric":
            J = r.clamp(1 - low, 1 + high) * adv[i]
        elif name == "gspo":
            J = ppo(s[i], A[i]).expand(T[i])
        elif name in ("reinforce", "dfpo_min", "dfpo_orthogonal"):
            w, ratios = 1.0, [x.item() for x in s]
            if name == "dfpo_min":
                w = min(ratios[j] for j in groups[i])
            if name == "dfpo_orthogonal" and mixed[i]:
                norm = sum(A[j] ** 2 for j in groups[i])
                w = ratios[i] - A[i] * sum(A[j] * ratios[j] for j in groups[i]) / norm
            J = w * adv[i] * now[i] * ((r - 1).abs() <= hyper.get("eps", math.inf))
        else:
            J = ppo(r, adv[i].clamp(min=0) if name == "pos_only" else adv[i])
        if name in ("lopti_low", "lopti_high"):
            J = J * ((old[i].exp() < hyper.get("eta", 0.5)) == (name == "lopti_low"))
        if kl:
            J = J - kl * ((ref[i] - now[i]).exp() - (ref[i] - now[i]) - 1)
        if name in SEQ_MEAN:
            J = J / (n * max(1, T[i]))
        elif name in BUDGET_MEAN:
            J = J / (n * L)
        else:
            J = J / max(1, counted) * (mixed[i] or name != "dapo")
        total = total - J.sum()
    return total


def visits(answers, A, G):
    """(i, t) of the answers with A_i != 0, by group and prefix."""
    nodes = defaultdict(list)
    for i, answer in enumerate(answers):
        for t in range(len(answer) if A[i] else 0):
            nodes[(i // G, *answer[: t + 1])].append((i, t))
    return list(nodes.values())


def project(c, answers, A, G):
    """Coefficients after the projection: c / A is replaced by its mean over a node's visits."""
    new = [row.clone() for row in c]
    for members in visits(answers, A, G):
        mean = sum(float(c[i][t]) / A[i] for i, t in members) / len(members)
        for i, t in members:
            new[i][t] = mean * A[i]
    return new


def tax(c, answers, A, G):
    """sum over shared nodes of |sum (w - wbar) A| over the sum of all |c| there."""
    found = total = 0.0
    for members in visits(answers, A, G):
        if len(members) > 1:
            mean = sum(float(c[i][t]) / A[i] for i, t in members) / len(members)
            found += abs(sum((float(c[i][t]) / A[i] - mean) * A[i] for i, t in members))
            total += sum(abs(float(c[i][t])) for i, t in members)
    return found / total if total else 0.0


# ---------------- the optimiser


class Adam:
    """AdamW without weight decay, written out, behind a clip of the gradient's norm."""

    def __init__(self, model, grad_clip):
        self.weights, self.grad_clip, self.steps = [*model.parameters()], grad_clip, 0
        self.m, self.v = ([torch.zeros_like(w) for w in self.weights] for _ in range(2))

    def gradient(self, loss):
        """The unclipped gradient's norm; the clipped one is kept for `step`."""
        grads = torch.autograd.grad(loss, self.weights, materialize_grads=True)
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads))
        self.grads = [g * min(1.0, self.grad_clip / (norm + 1e-6)) for g in grads]
        return norm

    @torch.no_grad()
    def step(self, lr):
        self.steps += 1
        for w, g, m, v in zip(self.weights, self.grads, self.m, self.v, strict=True):
            m += 0.1 * (g - m)
            v += 0.05 * (g * g - v)
            m_hat, v_hat = m / (1 - 0.9**self.steps), v / (1 - 0.95**self.steps)
            w -= lr * m_hat / (v_hat.sqrt() + 1e-8)
