"""To whoever brings data, a task or a model of her own: it is read as she means it, or refused."""

import json
import string
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from conftest import TINY, build, metrics, run

import train
from tasks.arithmetic import Arithmetic
from tasks.chat import ChatTask
from tasks.task import BaseTask, Item


@pytest.fixture
def chat_model(tmp_path) -> str:
    """A tiny Qwen2 that knows all printable letters, with a chat template that wants parts."""
    letters, path = BaseTask(), build("qwen2", tmp_path / "model", vocab_size=128)
    letters.train, letters.test = [Item(string.printable, "", "")], []
    tokenizer = letters.make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m.content %}{% if part['type'] == 'text' %}"
        "<{{ part['text'] }}>{% endif %}{% endfor %}{% endfor %}{{ mood }}"
    )
    tokenizer.save_pretrained(path)
    return path


def table(folder: Path, name: str, *lines: str) -> str:
    (folder / name).write_text("\n".join(lines))
    return str(folder / name)


def test_a_table_is_a_task(tmp_path, chat_model):
    """Of numbers or of texts, with held-out rows of its own or one in five. None is an answer."""
    sums = [f'{i}+{i}=,"{1000 + i:,}"' for i in range(10)]
    path = table(tmp_path, "sums[1].csv", "Problem,Answer", *sums)
    flags = f"--task {path} --model {chat_model} --threads 1 --steps 1 --warm-steps 0 --lr 0.01"
    folder = run(tmp_path / "run", *flags.split())
    assert len(metrics(folder)) == 2
    assert (folder / "task.csv").read_text() == Path(path).read_text()
    Task = train.find_task(path)
    assert (len(Task().train), len(Task().test)) == (8, 2)
    held_out = Task(table(tmp_path, "more.csv", "prompt,output", "x,1"))
    assert len(held_out.train) == 10 and [x.answer for x in held_out.test] == ["1"]
    assert [Task().reward(x, Item("", "1,003", "")) for x in ("It is 1003.", "103")] == [1, 0]

    chats = [("Who?", "None"), ("Where?", "“In Bonn”"), ("When?", "May 3")]
    lines = [json.dumps({"messages": as_chat(*chat)}) for chat in chats]
    texts = train.find_task(table(tmp_path, "chats.jsonl", *lines))()
    assert {(x.prompt, x.answer) for x in texts.train + texts.test} == {*chats}
    assert [texts.reward(x, Item("", "May 3", "")) for x in (' "may 3."\n', "3")] == [1, 0]
    assert texts.reward("It is 12.", Item("", "12", "")) == 1  # each answer decides


def as_chat(said: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]


ROWS = {"question,label\na,b\nc,\n": "row 2", "question,label\na,b\nc,d\na,e\n": "prompt 3"}


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_that_cannot_be_used_is_named(rows, tmp_path):
    """One without an answer, and one with a second answer to the same question."""
    with pytest.raises(ValueError, match=ROWS[rows]):
        train.find_task(table(tmp_path, "t.csv", rows))()


def test_a_chat_task_is_prompts_and_a_reward(tmp_path, chat_model, small_gsm8k):
    """So is tasks/five_words.py; GSM8K trains from local files, whatever sampler a model has."""
    flags = f"--model {chat_model} --threads 1 --max-tokens 20 --steps 1 --warm-steps 0".split()
    gsm8k = f"--task gsm8k --data {small_gsm8k} --method ibpo".split()
    for k, more in enumerate((["--task", "tasks/five_words.py"], gsm8k)):
        assert len(metrics(run(tmp_path / str(k), *flags, *more))) == 2
    task = train.find_task("tasks/five_words.py")()
    said = {"A cat is an animal.": 1, "A cat is an animal that purrs.": 1 / 3, "": 1 / 6}
    assert {text: task.reward(text, task.train[0]) for text in said} == said
    assert not {x.prompt for x in task.train} & {x.prompt for x in task.test}
    with pytest.raises(ValueError):  # whose letters would be prompts
        type("Task", (ChatTask,), {"prompts": "one"})()


def test_a_template_must_show_the_prompt(tmp_path):
    """Whatever shape of a message it wants; and it takes a task's own arguments."""
    task = Arithmetic()
    tokenizer, items = task.make_tokenizer(), task.test[:2]
    parts = "{% for x in m.content %}{{ x.text }}{% endfor %}"
    tokenizer.chat_template = "{% for m in messages %}" + parts + "{% endfor %}{{ mood }}"
    task.template = {"mood": "so"}
    expected = [tokenizer(f"{item.prompt}so")["input_ids"] for item in items]
    assert task.encode(tokenizer, items) == expected
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(ValueError, match="the chat template loses the prompt '25"):
        task.encode(tokenizer, items)


def test_a_tasks_file_is_a_module_beside_its_neighbours(tmp_path, monkeypatch):
    """A worker process finds its functions, and `verify` is the one that lies beside it."""
    monkeypatch.delitem(sys.modules, "verify", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    table(tmp_path, "verify.py", "is_right = lambda text: 0.25")
    lines = (
        "from verify import is_right",
        "class Task:",
        "    right = is_right",
        "def f(x): return x",
    )
    task = train.find_task(table(tmp_path, "mine.py", *lines))
    assert task.right(3) == 0.25 and task.__module__ == "mine"
    with ProcessPoolExecutor(1) as pool:
        assert pool.submit(sys.modules["mine"].f, 0.5).result(60) == 0.5


class Judged(Arithmetic):
    """The longest of a group wins."""

    def rewards(self, texts, items):
        pairs, most = [*zip(map(len, texts), items, strict=True)], {}
        for length, item in pairs:
            most[item] = max(length, most.get(item, 0))
        return [float(length == most[item]) for length, item in pairs]


def test_a_task_from_a_cell_may_judge_whole_groups(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main([*TINY, "--warm-steps", "0"], Judged())
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("Judged-grpo-s0-") and metrics(folder)[1]["reward"] > 0.3
    train.main(["--resume", str(folder), "--steps", "5"], Judged())
    assert len(metrics(folder)) == 6
