r"""The GSM8K task (Cobbe et al. 2021): word problems, their prompt, and a verifier.

The verifier reads one number. The first of these places that a text has decides:

1. the last '####' that a number follows; headings such as '#### Step 2' and '#### 2. Add' do not
   count,
2. the last \boxed{...} with a number,
3. what follows the last 'answer is' or 'answer:', if it begins with a number,
4. at the end, the last number of all.

In the first three the first number is the answer, and of an equation its result. A number may have
a sign, a currency, thousands groups, decimals, and behind it any unit. If it is part of something
else ('3/4', '10 - 7', '72 000', '1,2', '10^2'), there is no answer.

What was only thought does not count (tasks/task.py), and neither does a next problem, with which a
base model may go on: a line that begins with 'Question:', 'Q:', 'Human:' or 'User:'.
"""

import json
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

from tasks.task import BaseTask, Item, after_thought

DASHES = re.compile("[\u2010-\u2015\u2212]")  # hyphens, dashes and the minus sign
COMMAS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!])(?=[0-9]{3})")  # LaTeX's, in thousands
NEXT = re.compile(r"(?<=[0-9])([^0-9]*?)\n[^\w\n]*(?:Question|Q|Human|User)\W*:.*", re.DOTALL)
MARKS = (
    r"####+\s*(?![^\w\n]*[0-9]+[.)] +\S)((?:\\[a-z]+\{)?[^\w\n]*[0-9].*)",
    r"\\boxed *\{((?:[^{}]|\{[^{}]*\})*[0-9](?:[^{}]|\{[^{}]*\})*)\}",
    r"(?i:answer)\W*(?: is|:)([^\w\n]*[0-9].*)",
)
# A sign with a currency, and digits with all that may make another number of them.
RUN = re.compile(
    r"(?:(-)(?<![\w)]-)(?:[^\w\s>-]+ ?)?)?"
    r"(?<![A-Za-z0-9_.^])(?<!\^\{)"
    r"(\.?[0-9](?:(?:[0-9.,/^{}]|[^\S\n]?(?:[-+*/×÷^]|\\[a-z]+)[^\S\n]*| (?=[0-9]{3}\b))*[0-9])?)"
)
NUMBER = re.compile(r"([1-9][0-9]{0,2}(,[0-9]{3})+|[0-9]*)(\.[0-9]+)?")


def extract(text: str) -> str | None:
    """The text's answer as sign and digits, "-1234.50"; None if there is no clear one."""
    text = COMMAS.sub(",", DASHES.sub("-", NEXT.sub(r"\1", after_thought(text))))
    which = -1  # of all numbers the last
    for mark in MARKS:
        if places := re.findall(mark, text):
            text, which = places[-1].rpartition("=")[2], 0
            break
    if found := RUN.findall(text):
        sign, number = found[which]
        if NUMBER.fullmatch(number):
            return sign + number.replace(",", "")
    return None


def is_same_number(text: str, gold: str) -> float:
    """1.0 if the text's answer equals the gold one exactly, else 0.0."""
    answer = extract(text)
    return float(answer is not None and Decimal(answer) == Decimal(extract(f"####{gold}")))


def to_item(row: dict) -> Item:
    """A GSM8K record. Its solution loses calculator marks such as <<48/2=24>>, and "#### 24" at its
    end becomes the box that the prompt asks for."""
    solution, mark, answer = re.sub("<<[^<>]*>>", "", row["answer"]).rpartition("####")
    if not mark or extract(f"####{answer}") is None:
        raise ValueError(f"no number behind a '####' ends the answer to {row['question']!r}")
    return Item(row["question"], answer.strip(), f"{solution}\\boxed{{{answer.strip()}}}")


def read_rows(path: Path) -> list[dict]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8-sig").split("\n") if line.strip()]


class GSM8K(BaseTask):
    """Problems from the hub (data=None) or from DIR/train.jsonl and DIR/test.jsonl.

    An item's prompt is the question, its answer the gold number as written ("1,234"), and its demo
    the worked solution, up to "\\boxed{1,234}".
    """

    wish = "\nReason step by step, and put your final answer within \\boxed{}."

    settings = dict(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        steps=200,
        prompts=16,
        max_tokens=512,
        micro_rows=4,
        lr=1e-6,
        eval_items=200,
    )

    def __init__(self, data: str | None = None):
        if data:
            rows = {split: read_rows(Path(data, f"{split}.jsonl")) for split in ("train", "test")}
        else:
            from datasets import load_dataset  # takes a second, and other tasks need none

            rows = load_dataset("openai/gsm8k", "main")
        self.train, self.test = ([*map(to_item, rows[split])] for split in ("train", "test"))

    def reward(self, text: str, item: Item) -> float:
        """1.0 if the text's answer equals the gold one exactly, else 0.0."""
        return is_same_number(text, item.answer)

    def encode(self, tokenizer, items: Iterable[Item]) -> list[list[int]]:
        """Prompt token ids of each item, through the tokenizer's chat template if it has one."""
        if tokenizer.chat_template:
            return super().encode(tokenizer, items)
        # No token straddles the end of the last line.
        texts = [f"Question: {item.prompt}\nAnswer:\n" for item in items]
        return self.encode_texts(tokenizer, texts)

    def repair(self, item: Item, answer: str, siblings: list[str]) -> Item:
        """The problem of correcting an answer, given siblings' answers, in plain language."""
        others = "".join(f"\n\nAnother answer to compare it with:\n{text}" for text in siblings)
        wish = "Find the mistake in the first answer. "
        wish += "Write that answer again, corrected, changing as little as you can."
        prompt = f"{item.prompt}\n\nA first answer:\n{answer}{others}\n\n{wish}"
        return Item(prompt, item.answer, "")


Task = GSM8K
