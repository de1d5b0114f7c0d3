"""The trainer a second time, as plainly as possible: a second opinion that shares no code with it.

One answer at a time: no cache, no padding, no batches. A row is a list of tokens, its log-probs are
a tensor (T_i,), and gradients are autograd's, through whole forward passes. Only the random numbers
are the trainer's own, so that both see the same draws. The twin of the losses is
claims.formulas.formula.
"""

import math
from collections import defaultdict

import torch

# ---------------- sample


@torch.no_grad()
def rollout(policy, prompts, max_tokens, temperature, gen):
    """An answer to each prompt, with its EOS; temperature 0 is greedy."""
    uniform = torch.zeros(len(prompts), max_tokens)
    if temperature:
        uniform = torch.rand(len(prompts), max_tokens, generator=gen, dtype=torch.float64)
    answers = []
    for prompt, draws in zip(prompts, uniform.tolist(), strict=True):
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
    """log pi of every id of the vocabulary after each prefix of the answer. (T_i, V)."""
    logits = policy.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def log_probs(policy, prompts, answers, temperature):
    """log pi of the rows' tokens: tensors (T_i,), differentiable."""
    full = [read(policy, *row, temperature) for row in zip(prompts, answers, strict=True)]
    return [x[range(len(y)), y] for x, y in zip(full, answers, strict=True)]


def advantages(rewards, G, scale):
    found = []
    for i in range(len(rewards)):
        group = torch.tensor(rewards[i - i % G : i - i % G + G], dtype=torch.float64)
        deviation = group.std() + 1e-4 if scale == "std" else 1.0
        equal = len(set(group.tolist())) == 1
        found.append(0.0 if equal else float((rewards[i] - group.mean()) / deviation))
    return found


def nthr_selected(policy, rows, rewards, G, self_term):
    """Lists of bool, for each answer: the tokens of wrong answers with a score above tau.

    rows: (prompt, answer, temperature). A score is the sum of <g, g'> <h, h'> over the tokens of
    the group's right answers; tau is the smallest mean score of a right answer.
    """
    known = []
    for prompt, answer, temperature in rows:
        h = policy.model.base_model(torch.tensor([prompt + answer])).last_hidden_state
        g = -read(policy, prompt, answer, temperature).exp()
        g[range(len(answer)), answer] += 1  # e_y - pi
        known.append((g, h[0, len(prompt) - 1 : -1]))
    chosen = [[False] * len(answer) for _, answer, _ in rows]
    for start in range(0, len(rows), G):
        group = range(start, start + G)
        ids = sorted({token for i in group for token in rows[i][1]})
        right = [i for i in group if rewards[i] == 1]

        def score(i, t, count_self=True, right=right, ids=ids):
            g, h, total = known[i][0][t, ids], known[i][1][t], 0.0
            for j in right if count_self else set(right) - {i}:
                total += float(((known[j][0][:, ids] @ g) * (known[j][1] @ h)).sum())
            return total

        means = []
        for i in right:
            T = len(rows[i][1])
            means.append(sum(score(i, t, self_term) for t in range(T)) / T)
        for i in group:
            if right and rewards[i] != 1:
                chosen[i] = [score(i, t) > min(means) for t in range(len(rows[i][1]))]
    return chosen


# ---------------- shared tokens


def visits(answers, A, G):
    """(i, t) of the answers with A_i != 0, by group and prefix."""
    nodes = defaultdict(list)
    for i, answer in enumerate(answers):
        for t in range(len(answer) if A[i] else 0):
            nodes[(i // G, *answer[: t + 1])].append((i, t))
    return list(nodes.values())


def cancel(c, r, answers, G):
    """Each push less r times the mean of c / r over the others that take a token at its history."""
    new = [list(row) for row in c]
    for i, answer in enumerate(answers):
        for t in range(len(answer)):
            group = range(i - i % G, i - i % G + G)
            others = [j for j in group if j != i and answers[j][:t] == answer[:t]]
            others = [j for j in others if len(answers[j]) > t]
            if others:
                new[i][t] -= r[i][t] * sum(c[j][t] / r[j][t] for j in others) / len(others)
    return new


def tax(c, answers, A, G):
    """sum over shared nodes of |sum (w - wbar) A| over the sum of all |c| there."""
    found = total = 0.0
    for members in visits(answers, A, G):
        if len(members) > 1:
            mean = sum(c[i][t] / A[i] for i, t in members) / len(members)
            found += abs(sum((c[i][t] / A[i] - mean) * A[i] for i, t in members))
            total += sum(abs(c[i][t]) for i, t in members)
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
