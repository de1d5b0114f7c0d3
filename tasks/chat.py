"""A task of your own for a chat model: prompts and a reward. tasks/five_words.py is an example."""

from __future__ import annotations

import random
from collections.abc import Iterable

from tasks.task import BaseTask, Item


class ChatTask(BaseTask):
    """A task with `prompts`, each what a user says, and `reward`.

        class Task(ChatTask):
            prompts = ["Name a colour.", "Name an animal."]

            def reward(self, text, item):
                return float(len(text.split()) == 1)

    A prompt may also be a pair of what the user says and an answer, which the reward finds as
    item.answer. One prompt of five is held out for evaluation, at random, but always the same one,
    in whatever order they come.
    """

    prompts: Iterable[str | tuple[str, str]] = ()

    def __init__(self):
        pairs = [(x, "") if isinstance(x, str) else x for x in self.prompts]
        self.hold_out([Item(*pair, "") for pair in pairs])

    def hold_out(self, items: list[Item], test: Iterable[Item] = ()):
        """Hold out `test`, or one item of five, and train on what these do not ask."""
        items = shuffled(items)
        self.test = shuffled(test) or items[: max(1, len(items) // 5)]
        asked = {(item.before, item.prompt) for item in self.test}
        self.train = [item for item in items if (item.before, item.prompt) not in asked]


def shuffled(items: Iterable[Item]) -> list[Item]:
    """In an order that does not depend on theirs: a set has another one in each process."""
    items = sorted(items, key=repr)
    random.Random(0).shuffle(items)
    return items
