"""A table of questions and answers as a task: a file, or a data set of the hub.

python train.py --task questions.csv --model DIR    one row in five is held out
python train.py --task questions.csv --data held_out.csv --model DIR
"""

from __future__ import annotations

import glob
import re
from pathlib import Path

from tasks.chat import ChatTask, to_items
from tasks.gsm8k import extract, is_same_number

KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
# The usual names of the two columns. Of several, the first counts.
QUESTIONS = ("question", "prompt", "problem", "query", "instruction", "input")
ANSWERS = ("answer", "solution", "output", "response", "completion", "target", "label")
NUMBER = re.compile(r"[-+]?[^\w\s.,-]?[0-9][0-9,.]*%?")  # -$1,234.50


class Table(ChatTask):
    """A row is an item: what a user says, and the answer.

    The columns are called as in QUESTIONS and ANSWERS, or `messages` has a user's message and an
    assistant's. Where the answer is a number, a text that gives the same number earns 1.0, and is
    read as GSM8K's answers are. Elsewhere the same text does, whatever its case and whatever white
    space, quotes and full stop are around it. Raises ValueError for a column that is missing, and
    for a row that cannot be used, with its number.
    """

    path: str  # a file, or the name of a data set; train.find_task sets it

    def __init__(self, held_out: str = ""):
        splits = read(self.path)
        test = read(held_out)["train"] if held_out else splits.get("test", [])
        self.prompts = read_pairs(splits["train"], self.path)
        super().__init__()
        if test:  # a split of its own, so no row of the others need be held out
            self.train = self.train + self.test
            self.test = to_items(read_pairs(test, held_out or self.path))
        numbers = sum(is_number(item.answer) for item in self.train + self.test)
        kinds = f"1.0 for the same number ({numbers} items) or text"
        print(f"{self.path}: {len(self.train)} items, {len(self.test)} held out; {kinds}")

    def reward(self, text, item):
        if is_number(item.answer):
            return is_same_number(text, item.answer)
        return float(trim(text) == trim(item.answer))


def is_number(answer: str) -> bool:
    return bool(NUMBER.fullmatch(answer) and extract(f"#### {answer}"))


def trim(text: str) -> str:
    return text.casefold().strip(" \n\t.\"'`*")


def read(path: str):
    """The splits of a data set. A file has one, train."""
    from datasets import load_dataset  # takes a second, and most runs need none

    if kind := KINDS.get(Path(path).suffix):
        # By default pandas reads an answer "None" or "NA" as an empty cell.
        more = {"keep_default_na": False} if kind == "csv" else {}
        # For datasets 5 a path is a pattern: without escape, a[1].csv is another file, a1.csv.
        return load_dataset(kind, data_files=glob.escape(path), **more)
    return load_dataset(path)


def read_pairs(rows, path: str) -> list[tuple[str, str]]:
    """The question and the answer of each row."""
    names = {name.lower(): name for name in rows.column_names}
    if "messages" in names:
        chats = rows[names["messages"]]
        wrong = [
            n for n, x in enumerate(chats, 1) if [m["role"] for m in x] != ["user", "assistant"]
        ]
        if wrong:
            raise ValueError(
                f"{path}, row {wrong[0]}: wanted a message of user and one of assistant"
            )
        return [(said["content"], answer["content"]) for said, answer in chats]
    asked, answered = (
        next((names[x] for x in usual if x in names), None) for usual in (QUESTIONS, ANSWERS)
    )
    if not asked or not answered:
        wanted = f"one of {', '.join(QUESTIONS)} and one of {', '.join(ANSWERS)}, or messages"
        raise ValueError(f"{path} has the columns {', '.join(names)}; wanted: {wanted}")
    columns = ([to_text(cell) for cell in rows[name]] for name in (asked, answered))
    pairs = [*zip(*columns, strict=True)]
    for number, pair in enumerate(pairs, 1):
        if not all(pair):
            raise ValueError(f"{path}, row {number}: {pair} lacks a question or an answer")
    return pairs


def to_text(cell) -> str:
    """A column of whole numbers in which one is missing holds floats."""
    if isinstance(cell, float):
        return f"{cell:.15g}"
    return "" if cell is None else str(cell).strip()
