"""A table of questions and answers as a task: a file, or a data set of the hub.

python train.py --task questions.csv --model DIR    one row in five is held out
python train.py --task questions.csv --data held_out.csv --model DIR
python train.py --task NAME:CONFIG:SPLIT --model DIR    of the hub; CONFIG and SPLIT may be left out
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tasks.chat import ChatTask
from tasks.gsm8k import extract, is_same_number
from tasks.task import Item, after_thought

# The usual names of columns, in small letters. Of several in one line, the first counts.
NAMES = """messages
passage context
question prompt problem query instruction input
input
options choices
answer answers solution output response completion target label ground_truth"""
COLUMNS = [line.split() for line in NAMES.splitlines()]
NUMBER = re.compile(r"[-+]?[^\w\s.,-]?[0-9][0-9,.]*%?")  # -$1,234.50
# What ends every message.
WANTED = (
    "a table is .csv, .tsv, .txt, .json, .jsonl, .parquet, or --task NAME:CONFIG:SPLIT of the hub; "
    "its columns are question and answer, or have other names of tasks/table.py"
)


class Table(ChatTask):
    """A row is an item: what a user says, and the answer.

    A user says the passage, the question, its input and its options, a line each. A prompt may be a
    chat, and `messages` is one that ends with the answer. An answer may be a list, of which any is
    right. Among options it is the text of one, its letter, or its index from 0.

    A text earns 1.0 for the same number, read as GSM8K's answers are, or, if the answer is no
    number, for the same text, whatever its case and whatever white space, quotes, brackets and full
    stop are around it. Raises ValueError for a row that cannot be used, with its place.
    """

    path: str  # a file, or NAME:CONFIG:SPLIT; train.find_task sets it

    def __init__(self, held_out: str = ""):
        self.unread = set()
        items = self.read(self.path)
        self.hold_out(items, self.read(held_out) if held_out else ())
        used = f"{len(self.train)} of {len(items)} rows are trained on, {len(self.test)} held out"
        print(f"{self.path}: {used}; columns not read: {', '.join(sorted(self.unread)) or 'none'}")

    def read(self, path: str) -> list[Item]:
        """The items of a table's rows."""
        items, n = [], 1
        try:
            for row in READERS.get(Path(path).suffix.lower(), read_others)(path):
                if row:
                    row = {name.strip().lower(): cell for name, cell in row.items()}
                    names = [next((x for x in usual if x in row), None) for usual in COLUMNS]
                    self.unread |= row.keys() - {*names}
                    items.append(to_item(*map(row.get, names)))
                n += 1
            if not items:
                raise ValueError("there are no rows")
        except Exception as error:
            raise ValueError(f"{path}, row {n}: {error} ({WANTED})") from error
        return items

    def reward(self, text, item):
        return float(any(is_right(text, gold) for gold in (item.answer, *item.others)))


def is_right(text: str, gold: str) -> float:
    is_number = NUMBER.fullmatch(gold) and extract(f"#### {gold}")
    return is_same_number(text, gold) if is_number else trim(text) == trim(gold)


def trim(text: str) -> str:
    return after_thought(text).casefold().strip(" \n\t.\"'`*()") or text


# ---------------- a row


def to_item(messages, passage, question, more, options, answer) -> Item:
    """The item of a row's cells."""
    if messages:
        *question, last = messages
        answer = last["content"]
    answers = [to_gold(x) for x in (answer if isinstance(answer, list) else [answer])]
    if not isinstance(question, list):
        question = [{"role": "user", "content": question}]
    *before, (asker, prompt) = [(turn["role"], turn["content"]) for turn in question]
    if asker != "user":
        raise ValueError(f"it is not a user who asks {prompt!r}, but: {asker}")
    if isinstance(options, list):
        options, answers = choose(options, answers)
    # The question itself may be called input.
    lines = dict.fromkeys(to_text(x) for x in (passage, prompt, more, options) if x)
    return Item(to_text("\n".join(lines)), answers[0], "", tuple(before), tuple(answers[1:]))


def to_text(cell) -> str:
    if isinstance(cell, dict | list | bytes | None) or not str(cell).strip():
        raise ValueError(f"{cell!r} is no text")
    return str(cell)


def to_gold(cell) -> str:
    """An answer. That of a worked solution is the number at its end."""
    text = after_thought(to_text(cell)).strip()
    return to_text(extract(text) if "####" in text or r"\boxed" in text else text)


def choose(options: list, answers: list[str]) -> tuple[str, list[str]]:
    """Options with their letters, and what is right: the letter of one, its text, or both."""
    rows = [(chr(65 + k), str(text), f"{chr(65 + k)}. {text}") for k, text in enumerate(options)]
    right = [row for k, row in enumerate(rows) if {*row, str(k)} & {*answers}]
    if len(right) != len(answers):
        raise ValueError(f"{answers} is none, or more than one, of the options {options}")
    return "\n".join(line for _, _, line in rows), sum(right, ())


# ---------------- files


def read_cells(path: str) -> Iterator[dict]:
    """Cells between commas, semicolons or tabs, whichever the first line has most of."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        mark = max(",;\t", key=file.readline().count)
        file.seek(0)
        table = csv.reader(file, delimiter=mark, strict=True)
        head = next(table, [])
        yield {}  # the head is row 1, as in a spreadsheet
        for cells in table:
            if any(cells) and len(cells) != len(head):
                raise ValueError(f"{len(cells)} cells under {len(head)} columns: {cells}")
            yield dict(zip(head, cells, strict=True)) if any(cells) else {}


def read_json(path: str) -> Iterable[dict]:
    """A list of objects, or one object a line. Numbers stay as they are written."""
    decode = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant={}.get).decode
    text = Path(path).read_text("utf-8-sig")
    if text.lstrip().startswith("["):
        return decode(text)
    return (decode(line) if line.strip() else {} for line in text.split("\n"))


def read_others(path: str) -> list[dict]:
    """Rows of a file of parquet, or of the hub."""
    from datasets import Dataset, Value, load_dataset  # takes a second, and most runs need none

    if Path(path).is_file():
        data = Dataset.from_parquet(path)
    else:
        name, config, split = f"{path}::".split(":")[:3]
        data = load_dataset(name, config or None, split=split or "train")
    for name, kind in data.features.items():
        if kind == Value("float32"):  # 0.1 would become 0.10000000149011612
            data = data.cast_column(name, Value("string"))
    return data.to_list()


READERS = {".csv": read_cells, ".tsv": read_cells, ".txt": read_cells}
READERS |= {".json": read_json, ".jsonl": read_json}
