r"""The GSM8K task (Cobbe et al. 2021): word problems, their prompt, and an exact verifier.

The verifier reads one number. The first of these places that a text has decides:

1. behind the first '####' that a number follows; headings such as '#### Step 2' and '#### 2. Add'
   do not count,
2. behind the last \boxed that is not empty,
3. behind the last 'answer is' or 'answer:' that a number follows,
4. at the end, the last number of all.

Behind a mark the first number is the answer, and what follows it does not count. If that is no
plain number, there is no answer. Of an equation, the result is read.

- A number is ASCII digits with optional sign, thousands groups and decimals. Symbols may touch it
  ('-$1,234.00'), a unit may follow it in any script (42kg, 42元), and 50% is 50.
- What may be part of something else is no answer: '3/4', '10 - 7', '72 000', '1,2', '42e3', 'x42',
  '4½', '42k', '42nd', '42 million'. Neither is a number whose sign is unclear ('- 7', '-₹ 7').
- A base model may continue with the next problem. Nothing is read after a line that starts with
  'Question:', 'Q:', 'Human:' or 'User:', unless there is no number before it.
"""

import json
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

from tasks.task import BaseTask, Item

# Hyphens, dashes and minus signs of all kinds become one. Whether it is a sign is decided later.
DASHES = "\u00ad\u02d7\u2010\u2011\u2012\u2013\u2014\u2015\u2043\u207b\u208b\u2212\u2796"
DASHES = dict.fromkeys(map(ord, DASHES + "\ufe58\ufe63\uff0d"), "-")
# Between digits: LaTeX's {,} and \, and ,\! and the spaces that are no plain space.
THOUSANDS = r"(?<=[0-9]) ?(?:\{,\}|,?\\[,:;! ]|[~\u00a0\u2007-\u200a\u202f]) ?(?=[0-9])"
EXPONENT = r"(?<=[A-Za-z])\}?\^\{?[0-9]+\}?"  # of a unit: m^2
NEXT = r"\n[^\w\n]*(?:Question|Q|Human|User)\W*:"

# The marks, and which of several counts: the first (0) or the last (-1). Only symbols may stand
# between a mark and its number, and after '####' also a currency's code or \text{. A point, a
# bracket or a dash between the number and more text makes a heading of '####'; so does a colon.
HEADING = r".*:|[^\w\n]{0,9}[0-9]+(?:[.)] +\S| - *[^\W\d])"
MARKS = (
    (rf"(?<!#)####+(?!#|{HEADING})(?=\W{{0,9}}(?:(?:[A-Z]{{2,3}}|Rs|\\[a-z]+)\W+)?[0-9])", 0),
    (r"\\boxed(?!\{ *\})", -1),
    (r"(?i:answer)\**(?: is|:)(?=[^\w\n]{0,9}[0-9])(?!.*=)", -1),
)
# A number with all that may make another number of it.
OPERATOR = r"(?:[-+*/×÷^x]|\\times|\\cdot|\\div|(?i:plus|minus|negative|times))[^\S\n]+"
RUN = re.compile(
    rf"""(?:(?<![^\s=])|(?<=>>)(?!>))  # a word begins, or what an equation gives
    # an operator before the number, or a word that may hold its sign
    (?:{OPERATOR}|[^\w\s=>-]*-[^\s>]*[^\S\n]+)?
    [^\s=0-9]*[0-9]  # all that touches it, to its first digit
    # more digits in this word, or in the next one
    (?:[^\s=>]*[0-9]
      |(?:[-+*/×÷^,]|\\[a-z]+)*[^\S\n]+(?:{OPERATOR})?[^\w\s(=>]*[0-9])*
    (?:(?:st|nd|rd|th|[kKMB])\b|\W*(?:hundred|thousand|[mb]illion)|[万萬億亿千만억천]
      |\s*[\u00b2\u00b3\u00b9\u00bc-\u00be\u2150-\u215e])?""",
    re.VERBOSE,
)
# A run that is one number. Before its digits there is a sign among symbols, or anything without a
# dash that does not end in a Latin letter. [0-9] because \d takes any script's digits.
NUMBER = re.compile(
    r"(?:[^\w\s-]*(-(?:[A-Z]{2,3} ?)?|(?i:minus|negative) )[^\w\s.]*"
    r"|[^\s0-9-]*(?<![A-Za-z_.,^])(?<!sqrt\{))"
    r"((?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]+)?)"
)


def extract(text: str) -> str | None:
    """The text's answer as sign and digits, "-1234.50"; None if there is no clear one."""
    text = text.translate(DASHES)
    text = re.sub(EXPONENT, "", re.sub(THOUSANDS, ",", text))
    own = re.split(NEXT, text)[0]
    text = own if re.search("[0-9]", own) else text
    runs = [*RUN.finditer(text)][-1:]
    for mark, which in MARKS:
        if places := re.split(mark, text)[1:]:
            runs = RUN.finditer(places[which])
            break
    for run in runs:
        if number := NUMBER.fullmatch(run[0]):
            return "-" * bool(number[1]) + number[2].replace(",", "")
        if not run.string[run.end() :].lstrip().startswith("="):
            break  # an expression, and no equation
    return None


def is_same_number(text: str, gold: str) -> float:
    """1.0 if the text's answer equals the gold one exactly, else 0.0."""
    answer = extract(text)
    return float(answer is not None and Decimal(answer) == Decimal(extract(f"####{gold}")))


def to_item(row: dict) -> Item:
    """A GSM8K record, its solution without calculator marks such as <<48/2=24>>."""
    demo = re.sub("<<[^<>]*>>", "", row["answer"]).strip()
    _, mark, answer = demo.rpartition("####")
    if not mark or extract(f"####{answer}") is None:
        raise ValueError(f"no number behind a '####' ends the answer to {row['question']!r}")
    return Item(row["question"], answer.strip(), demo)


def read_rows(path: Path) -> list[dict]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8-sig").split("\n") if line.strip()]


class GSM8K(BaseTask):
    """Problems from the hub (data=None) or from DIR/train.jsonl and DIR/test.jsonl.

    An item's prompt is the question, its answer the gold number as written ("1,234"), and its demo
    the worked solution, up to "#### 1,234".
    """

    wish = "\nReason step by step; end with '#### ' and the number."  # what follows a question

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
        if not tokenizer.chat_template:  # no token straddles the end of the last line
            texts = [f"Question: {item.prompt}\nAnswer:\n" for item in items]
            return self.encode_texts(tokenizer, texts)
        return self.encode_chats(tokenizer, [item.prompt + self.wish for item in items])

    def repair(self, item: Item, answer: str, siblings: list[str]) -> Item:
        """The problem of correcting an answer, given siblings' answers, in plain language."""
        others = "".join(f"\n\nAnother answer to compare it with:\n{text}" for text in siblings)
        wish = "Find the mistake in the first answer. "
        wish += "Write that answer again, corrected, changing as little as you can."
        prompt = f"{item.prompt}\n\nA first answer:\n{answer}{others}\n\n{wish}"
        return Item(prompt, item.answer, "")


Task = GSM8K
