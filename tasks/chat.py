"""A task of your own for a chat model: prompts and a reward. tasks/five_words.py is an example."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tasks.task import BaseTask, Item


class ChatTask(BaseTask):
    """A task with `prompts`, each what a user says, and `reward`.

        class Task(ChatTask):
            prompts = ["Name a colour.", "Name an animal."]

            def reward(self, text, item):
                return float(len(text.split()) == 1)

    A prompt may also be a pair of what the user says and an answer, which the reward finds as
    item.answer. One prompt of five, chosen at random, is held out for evaluation. Raises ValueError
    for a prompt that is something else, for one with two answers, and if fewer than two differ.
    """

    prompts: Sequence[str | tuple[str, str]] = ()

    def __init__(self):
        items = to_items(self.prompts)
        if len(items) < 2:
            raise ValueError(f"a ChatTask needs two or more different `prompts`, not {len(items)}")
        random.Random(0).shuffle(items)
        held_out = max(1, len(items) // 5)
        self.test, self.train = items[:held_out], items[held_out:]


def to_items(prompts: Sequence[str | tuple[str, str]]) -> list[Item]:
    """The different prompts as items. A mistake is told with the prompt's number."""
    if not isinstance(prompts, list | tuple):  # of a text each letter would be a prompt
        raise ValueError(f"`prompts` is a {type(prompts).__name__}; wanted: a list")
    answers = {}
    for number, prompt in enumerate(prompts, 1):
        pair = prompt if isinstance(prompt, list | tuple) else (prompt, "")
        if len(pair) != 2 or not all(isinstance(x, str) for x in pair) or not pair[0]:
            raise ValueError(
                f"prompt {number} is {prompt!r}; wanted: a text, or two, with its answer"
            )
        if answers.setdefault(*pair) != pair[1]:
            raise ValueError(f"prompt {number}, {pair[0]!r}, has a second answer, {pair[1]!r}")
    return [Item(prompt, answer, "") for prompt, answer in answers.items()]
