"""Sums, with a bonus of 0.1 for an answer that begins with a word, as if it were to explain first.

It asks whether the crumb of toy/crumb.py shows in a real model. Before RL most answers begin with a
word, and hardly any of them is right. The answers that go straight to the equation are right more
often. The bonus is added whether the answer is right or not, so a reward may be 1.1. Then pass@k,
which counts rewards of exactly 1, is too low; `right` is the share of right answers.

The command is in experiments/README.md, under "A bonus for the format".
"""

from statistics import fmean

from tasks.sums import Sums


class Task(Sums):
    def reward(self, text, item):
        return super().reward(text, item) + 0.1 * begins_with_a_word(text)

    def shares(self, items, texts):
        right = [super(Task, self).reward(*pair) for pair in zip(texts, items, strict=True)]
        return {"right": fmean(right), "words": fmean(map(begins_with_a_word, texts))}


def begins_with_a_word(text: str) -> bool:
    return text.lstrip()[:1].isalpha()
