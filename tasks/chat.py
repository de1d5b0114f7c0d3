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
    in whatever order they come. Raises ValueError for a prompt with two answers, and if fewer than
    two differ.
    """

    prompts: Iterable[str | tuple[str, str]] = ()

    def __init__(self):
        if isinstance(self.prompts, str):  # each letter would be a prompt
            raise ValueError("`prompts` is a text; wanted: a list of texts")
        pairs = [(x, "") if isinstance(x, str) else x for x in self.prompts]
        self.hold_out(unique((f"prompt {n}", Item(*pair, "")) for n, pair in enumerate(pairs, 1)))

    def hold_out(self, items: list[Item]):
        if len(items) < 2:
            raise ValueError(f"wanted: two or more different prompts, not {len(items)}")
        items, held_out = shuffled(items), max(1, len(items) // 5)
        self.test, self.train = items[:held_out], items[held_out:]


def shuffled(items: list[Item]) -> list[Item]:
    """In an order that does not depend on theirs: a set has another one in each process."""
    return random.Random(0).sample(sorted(items, key=repr), len(items))


def unique(rows: Iterable[tuple[str, Item]]) -> list[Item]:
    """The different items of rows. A row is where it stands, for a message, and an item."""
    items = {}
    for where, item in rows:
        if items.setdefault((item.before, item.prompt), item).answer != item.answer:
            raise ValueError(f"{where}: {item.prompt!r} has a second answer, {item.answer!r}")
    return [*items.values()]
