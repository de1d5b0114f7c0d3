"""What toy/plain.py does not need, as plainly: temperature, train.py's sampler, edit distance.

The sampler takes the same random numbers as train.py, so that it can draw the same answers. The
edit distance is that of llm/neighbours.py.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import torch


class Tempered(torch.nn.Module):
    """A model whose logits are divided by a temperature."""

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, ids):
        return SimpleNamespace(logits=self.model(ids).logits / self.temperature)


def tempered(policy, temperature: float):
    """The policy that samples at this temperature, for toy/plain.py, which has none."""
    return replace(policy, model=Tempered(policy.model, temperature))


def all_log_probs(policy, prompt: list, answer: list):
    """log pi of every token of the vocabulary, at each place of the answer. (T, V)."""
    logits = policy.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


@torch.no_grad()
def rollout(policy, prompts: list, max_tokens: int, temperature: float, gen) -> list[list[int]]:
    """An answer to each prompt, to its end token or max_tokens; a temperature of 0 is greedy."""
    if temperature:
        uniform = torch.rand(len(prompts), max_tokens, generator=gen, dtype=torch.float64)
    answers = []
    for i, prompt in enumerate(prompts):
        answer = []
        while len(answer) < max_tokens and not (answer and answer[-1] in policy.eos):
            logits = policy.model(torch.tensor([prompt + answer])).logits[0, -1]
            if temperature:
                # The first id whose cumulative probability exceeds the random number. Every id
                # before it has at most that number, so counting those gives the id.
                cumulative = (logits / temperature).double().softmax(-1).cumsum(-1)
                number = uniform[i, len(answer)] * cumulative[-1]
                answer.append(int((cumulative <= number).sum()))
            else:
                answer.append(int(logits.argmax()))
        answers.append(answer)
    return answers


def kept(a, b):
    """Which tokens of a stay when it becomes b, by the fewest edits and then with the most kept."""

    @cache
    def best(t, u):  # of the first t tokens into the first u: edits, minus how many stay, which
        if not (t and u):
            return t + u, 0, (False,) * t
        same = a[t - 1] == b[u - 1]
        ways = [(best(t - 1, u - 1), (same,))]
        if not same:  # then it is substituted, deleted, or the other one inserted
            ways += [(best(t - 1, u), (False,)), (best(t, u - 1), ())]
        (edits, minus, stays), last = min(ways, key=lambda way: way[0][:2])
        return edits + 1 - same, minus - same, stays + last

    return best(len(a), len(b))[2]
