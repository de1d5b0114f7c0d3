"""A table of questions and answers as a task: a file, or a data set of the hub.

python train.py --task questions.csv --model DIR    one row in five is held out
python train.py --task questions.csv --data held_out.csv --model DIR
python train.py --task NAME:CONFIG:SPLIT --model DIR    of the hub; CONFIG and SPLIT may be left out
"""

from __future__ import annotations

import csv
import glob
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from tasks.chat import ChatTask, shuffled, unique
from tasks.gsm8k import extract, is_same_number
from tasks.task import Item, after_thought

# The usual names of columns, in small letters. Of several, the first counts.
QUESTIONS = ("question", "prompt", "problem", "query", "instruction", "input")
ANSWERS = ("answer", "solution", "output", "response", "completion", "target", "label")
PASSAGES, INPUTS, OPTIONS = ("context", "passage"), ("input",), ("options", "choices")
COLUMNS = (("messages",), PASSAGES, QUESTIONS, INPUTS, OPTIONS, ANSWERS)

NUMBER = re.compile(r"[-+]?[^\w\s.,-]?[0-9][0-9,.]*%?")  # -$1,234.50


class Table(ChatTask):
    """A row is an item: what a user says, and the answer.

    Its columns have the usual names (above). A user says the passage, the question, its input and
    its options, a line each. A prompt may be a chat, and `messages` is one that ends with the
    answer. An answer may be a list, of which any is right. Among options it is the text of one, its
    letter, or its index from 0.

    A text earns 1.0 for the same number, read as GSM8K's answers are, or, if the answer is no
    number, for the same text, whatever its case and whatever white space, quotes, brackets and full
    stop are around it. Raises ValueError for a row that cannot be used, with its place.
    """

    path: str  # a file, or NAME:CONFIG:SPLIT; train.find_task sets it

    def __init__(self, held_out: str = ""):
        self.unread, splits = set(), read(self.path)
        test = read(held_out)["train"] if held_out else splits.get("test", ())
        items = self.to_items(splits["train"], self.path)
        hint = "split test (another one as --task NAME:CONFIG:SPLIT)"
        self.test = self.to_items(test, held_out or f"{self.path}, {hint}")
        asked = {(item.before, item.prompt) for item in self.test}
        self.train = [item for item in items if (item.before, item.prompt) not in asked]
        both = len(items) - len(self.train)  # what is held out is not trained on
        if not asked:
            self.hold_out(items)
        numbers = sum(is_number(item.answer) for item in self.train + self.test)
        print(
            f"{self.path}: {len(self.train)} items, {len(self.test)} held out ({both} of the table)"
        )
        unread = ", ".join(sorted(self.unread)) or "none"
        print(f"1.0 for the same number ({numbers} items) or text; columns not read: {unread}")

    def to_items(self, rows: Iterable[dict], path: str) -> list[Item]:
        """The different items of rows, in a random order."""
        pairs, rows = [], iter(rows)
        for n in count(1):
            with at(where := f"{path}, row {n}"):
                row = next(rows, None)
                if row is None:
                    break
                if row:
                    row = {name.strip().lower(): cell for name, cell in row.items()}
                    names = [next((x for x in usual if x in row), None) for usual in COLUMNS]
                    pairs.append((where, to_item(row, *names)))
                    self.unread |= row.keys() - {*names}
        return shuffled(unique(pairs))

    def reward(self, text, item):
        return float(any(is_right(text, gold) for gold in (item.answer, *item.others)))


def is_right(text: str, gold: str) -> bool:
    return bool(is_same_number(text, gold)) if is_number(gold) else trim(text) == trim(gold)


def is_number(answer: str) -> bool:
    return bool(NUMBER.fullmatch(answer) and extract(f"#### {answer}"))


def trim(text: str) -> str:
    return after_thought(text).casefold().strip(" \n\t.\"'`*()") or text


# ---------------- a row


@contextmanager
def at(where):
    """A mistake is told with its place."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{where}: {error}") from error


def to_item(row: dict, messages, passage, asked, more, options, answered) -> Item:
    """The item of a row. The names are those of its columns, or None."""
    if messages:
        chat = row[messages]
    elif not asked or not answered:
        raise ValueError(f"no columns of {QUESTIONS} and of {ANSWERS}, but {[*row]}")
    else:
        chat = row[asked]
        if not isinstance(chat, list):
            names = [x for x in dict.fromkeys((passage, asked, more)) if x == asked or row.get(x)]
            chat = [{"role": "user", "content": "\n".join(to_text(row[x]) for x in names)}]
        chat = [*chat, {"role": "assistant", "content": row[answered]}]
    *before, (asker, prompt), (speaker, answer) = [(x["role"], x["content"]) for x in chat]
    if (asker, speaker) != ("user", "assistant"):
        raise ValueError(f"the chat ends with {asker} and {speaker}; wanted: user and assistant")
    answers = [to_gold(x) for x in (answer if isinstance(answer, list) else [answer])]
    if row.get(options):
        prompt, answers = choose(prompt, row[options], answers)
    return Item(to_text(prompt), answers[0], "", tuple(before), tuple(answers[1:]))


def to_text(cell) -> str:
    if isinstance(cell, dict | list | bytes) or cell is None or not str(cell).strip():
        raise ValueError(f"{cell!r} is no text")
    return str(cell)


def to_gold(cell) -> str:
    """An answer. That of a worked solution is the number at its end."""
    text = after_thought(to_text(cell)).strip()
    return to_text(extract(text) if "####" in text or r"\boxed" in text else text)


def choose(prompt: str, options, answers: list[str]) -> tuple[str, list[str]]:
    """A question with its options, and what is right: the letter of one, its text, or both."""
    if not isinstance(options, list):  # they are asked as they stand
        return f"{prompt}\n{to_text(options)}", answers
    rows = [(chr(65 + k), str(text), str(k)) for k, text in enumerate(options)]
    right = [row for row in rows if {*row} & {*answers}]
    if len(right) != len(answers):
        raise ValueError(f"{answers} is none, or more than one, of the options {options}")
    lines = [f"{letter}. {text}" for letter, text, _ in rows]
    names = [(letter, text, f"{letter}. {text}") for letter, text, _ in right]
    return "\n".join([prompt, *lines]), sum(names, ())


# ---------------- files


def read(path: str) -> dict[str, Iterable[dict]]:
    """The splits of a data set, each with its rows. A file has one, train."""
    file = Path(path)
    if file.suffix.lower() in READERS:
        with at(path):
            return {"train": READERS[file.suffix.lower()](file.read_text("utf-8-sig"))}
    from datasets import load_dataset  # takes a second, and most runs need none

    name, config, split = f"{path}::".split(":")[:3]
    options = {"path": name, "name": config or None, "split": split or None}
    if file.is_file():  # for datasets a path is a pattern
        options = {"path": "parquet", "data_files": glob.escape(path)}
    with at(f"{path}: not {', '.join(READERS)} or .parquet, so as --task NAME:CONFIG:SPLIT"):
        splits = load_dataset(**options)
        splits = {"train": splits} if split else splits
        splits["train"]
    return {key: read_arrow(splits[key].with_format("arrow")[:]) for key in splits}


def read_arrow(table) -> list[dict]:
    """Rows of pyarrow's table. A float's text is the shortest that gives it, also in float32."""
    for k, column in enumerate(table.columns):
        if column.type in ("float", "double"):
            table = table.set_column(k, table.column_names[k], column.cast("string"))
    return table.to_pylist()


def read_json(text: str) -> Iterable[dict]:
    """A list of objects, or one object a line. Numbers stay as they are written."""
    decode = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant={}.get).decode
    if text.lstrip().startswith("["):
        return decode(text)
    return (decode(line) if line.strip() else {} for line in text.split("\n"))


def read_cells(text: str) -> Iterator[dict]:
    """Cells between commas, semicolons or tabs, whichever the first line has most of."""
    mark = max(",;\t", key=text.partition("\n")[0].count)
    table = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
    head = next(table, [])
    yield {}  # the head is row 1, as in a spreadsheet
    for cells in table:
        if any(cells) and len(cells) != len(head):
            raise ValueError(f"{len(cells)} cells under {len(head)} columns: {cells}")
        yield dict(zip(head, cells, strict=True)) if any(cells) else {}


READERS = {".csv": read_cells, ".tsv": read_cells, ".txt": read_cells}
READERS |= {".json": read_json, ".jsonl": read_json}
