"""A task of your own for a chat model: prompts and a reward. llm/five_words.py is an example."""

from __future__ import annotations

import random
from collections.abc import Sequence

from toy.arithmetic import BaseTask, Item


class ChatTask(BaseTask):
    """A task with `prompts`, each what a user says, and `reward`.

        class Task(ChatTask):
            prompts = ["Name a colour.", "Name an animal."]

            def reward(self, text, item):
                return float(len(text.split()) == 1)

    A prompt may also be a pair of what the user says and an answer, which the reward finds as
    item.answer. One prompt of five, chosen at random, is held out for evaluation. Raises ValueError
    if the prompts are something else, fewer than two are different, or one has two answers.
    """

    prompts: Sequence[str | tuple[str, str]] = ()

    def __init__(self):
        # Of a text, the letters would be prompts, and of a dict only the keys.
        prompts = self.prompts if isinstance(self.prompts, list | tuple) else []
        pairs = [tuple(x) if isinstance(x, list | tuple) else (x, "") for x in prompts]
        right = all(len(x) == 2 and all(isinstance(text, str) for text in x) for x in pairs)
        answers = dict(pairs) if right else {}  # each prompt once
        if len(answers) < 2 or len(answers) < len(set(pairs)):
            raise ValueError(
                "a ChatTask needs `prompts`, a list of two or more different texts, "
                "or of pairs of a text and its answer"
            )
        items = [Item(prompt, answer, "") for prompt, answer in answers.items()]
        random.Random(0).shuffle(items)
        held_out = max(1, len(items) // 5)
        self.test, self.train = items[:held_out], items[held_out:]
