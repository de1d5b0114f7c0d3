"""A task with a bonus for the format: sums, and 0.1 for an answer that is a sentence.

    python train.py --task experiments/format_reward.py --model DIR ...

It asks whether the crumb of toy/crumb.py shows in a real model. A right answer earns 1, whether it
is a sentence or not, and a sentence earns 0.1, whether it is right or not.
"""

import re
from statistics import fmean

from llm.sums import Sums


class Task(Sums):
    def reward(self, text, item):
        return super().reward(text, item) + 0.1 * is_sentence(text)

    def shares(self, items, texts):
        right = [super(Task, self).reward(*pair) for pair in zip(texts, items, strict=True)]
        return {"right": fmean(right), "sentences": fmean(map(is_sentence, texts))}


def is_sentence(text: str) -> bool:
    """It begins with a capital letter and a word, and ends with a full stop."""
    return bool(re.fullmatch(r"[A-Z][a-z]* .*\.", text.strip(), re.DOTALL))
