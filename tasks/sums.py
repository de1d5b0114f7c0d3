"""The sums task: a real chat model, small enough for a CPU, learns to add numbers below 30."""

from __future__ import annotations

import random

from tasks.gsm8k import GSM8K, Item


class Sums(GSM8K):
    """All 784 sums of two numbers from 2 to 29, of which 200 are held out.

    Their answers are read and judged as GSM8K's are.
    """

    wish = ""
    settings = dict(
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        steps=30,
        max_tokens=24,
        micro_rows=32,
        lr=1e-5,
        schedule="constant",
        eval_every=10,
        eval_samples=2,
    )

    def __init__(self):
        pairs = [(a, b) for a in range(2, 30) for b in range(2, 30)]
        random.Random(0).shuffle(pairs)
        items = [Item(f"What is {a} + {b}?", str(a + b), f"{a} + {b} = {a + b}") for a, b in pairs]
        self.test, self.train = items[:200], items[200:]


Task = Sums
