"""The toy task: add two 2-digit numbers, out loud or not.

A prompt is "37+48=". An answer opens with a filler that means nothing ("so ", "ok " or "hm "). Then
it says the sum directly, or works it out column by column in either order. It ends with "#" and the
sum:

    so #85                           direct
    ok 7+8=15,30+40=70,#85           worked, ones first
    hm 30+40=70,7+8=15,#85           worked, tens first

So it has what the papers speak of: shared tokens that carry no credit (the opener), two solutions
of equal reward, and answers of different lengths. A policy can discover that working it out pays.
The demonstrations of the warm start are imperfect on purpose: mostly direct, and then mostly wrong.

A correction problem (for IBPO) is "37+48=", an answer, "=", and siblings' answers, each with its
"=". Its demonstration keeps the first answer's opener and form and fixes the numbers. On purpose,
some demonstrations leave the numbers as they were.
"""

from __future__ import annotations

import random

from tasks.task import BaseTask, Item

OPENERS = ("so ", "ok ", "hm ")
DIRECT_SHARE, DIRECT_RIGHT = 0.75, 0.05  # of the demonstrations; of the direct ones
SLIPS = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)  # of a wrong sum
REPAIR_RIGHT = 0.6  # of the demonstrated corrections
SIBLING_RIGHT = 0.75  # of the first siblings shown in them
TEST_SIZE = 500


def solutions(a: int, b: int) -> dict[str, str]:
    """The three solution forms of a+b without their opener, all right: name -> text."""
    ones = f"{a % 10}+{b % 10}={a % 10 + b % 10},"
    tens = f"{a - a % 10}+{b - b % 10}={a - a % 10 + b - b % 10},"
    end = f"#{a + b}"
    return {"direct": end, "ones first": ones + tens + end, "tens first": tens + ones + end}


def demonstration(a: int, b: int, rng: random.Random) -> str:
    """What a hasty pupil would write: usually just a guess near the sum."""
    forms = solutions(a, b)
    if rng.random() > DIRECT_SHARE:
        return rng.choice(OPENERS) + forms[rng.choice(("ones first", "tens first"))]
    if rng.random() < DIRECT_RIGHT:
        return rng.choice(OPENERS) + forms["direct"]
    return rng.choice(OPENERS) + f"#{a + b + rng.choice(SLIPS)}"


class Arithmetic(BaseTask):
    """Task object: .train and .test split all 8,100 sums of two 2-digit numbers, as Items."""

    symbols = "0123456789+=,#sokhm "

    def __init__(self):
        rng = random.Random(0)
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        rng.shuffle(pairs)
        items = [Item(f"{a}+{b}=", str(a + b), demonstration(a, b, rng)) for a, b in pairs]
        self.test, self.train = items[:TEST_SIZE], items[TEST_SIZE:]

    def reward(self, text: str, item: Item) -> float:
        """1.0 if what follows the last "#" is exactly the sum, else 0.0."""
        _, mark, final = text.rpartition("#")
        return float(bool(mark) and final == item.answer)

    def correction(self, item: Item, siblings: int = 1) -> Item:
        """A correction problem about an item, for the warm start; an item has always the same."""
        rng, (a, b) = random.Random(item.prompt), map(int, item.prompt[:-1].split("+"))
        opener, form = rng.choice(OPENERS), rng.choice(("direct", "ones first", "tens first"))
        right = opener + solutions(a, b)[form]
        wrong = f"{right.partition('#')[0]}#{a + b + rng.choice(SLIPS)}"
        if form != "direct" and rng.random() < 0.5:  # a slip in a column, carried into the sum
            wrong = opener + solutions(a, b + rng.choice((-10, -1, 1, 10)))[form]
        shown = [demonstration(a, b, rng) for _ in range(siblings)]
        if rng.random() < SIBLING_RIGHT:  # in a rollout, too, a right one comes first
            shown[0] = rng.choice(OPENERS) + rng.choice(list(solutions(a, b).values()))
        return self.repair(item, wrong, shown, demo=right if rng.random() < REPAIR_RIGHT else wrong)


Task = Arithmetic  # what train.py looks for
