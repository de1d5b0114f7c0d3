"""To whoever brings data, a task or a model of her own: it is read as she means it, or refused."""

import json
import string
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import TINY, build, load, metrics, run

import train
from llm import runs
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


def test_a_table_is_a_task(tmp_path, chat_model, capsys):
    """Of numbers or of texts, with held-out rows of its own or one in five. None is an answer. A
    rate that would spoil a pretrained model is named."""
    sums = [f'{i}+{i}=,"{1000 + i:,}"' for i in range(10)]
    path = table(tmp_path, "sums[1].csv", "Problem,Answer", *sums)
    flags = f"--task {path} --model {chat_model} --threads 1 --steps 1 --warm-steps 0 --lr 0.01"
    folder = run(tmp_path / "run", *flags.split())
    assert len(metrics(folder)) == 2 and "--lr 0.01 is high" in capsys.readouterr().out
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


def test_files_beside_the_weights_stay_as_they_came(tmp_path):
    """A processor, not the names of shards that are no more. And transformers 4 reads them."""
    path, new = Path(build("qwen2", tmp_path / "m")), tmp_path / "new"
    came = json.loads((path / "tokenizer_config.json").read_text()) | {"note": "mine"}
    (path / "tokenizer_config.json").write_text(json.dumps(came))
    (path / "processor_config.json").write_text("{}")
    old = json.loads((path / "config.json").read_text()) | {"rope_theta": 7}
    (path / "config.json").write_text(json.dumps(old).replace("0.3", "0.4"))
    policy = load(path)
    (path / "model.safetensors.index.json").write_text("{}")
    next(policy.model.parameters()).data.zero_()
    runs.write_model(policy, new)
    assert not (new / "model.safetensors.index.json").exists()
    for name in ("processor_config.json", "tokenizer.json"):
        assert (new / name).read_bytes() == (path / name).read_bytes()
    if came["tokenizer_class"] == "TokenizersBackend":  # version 5's
        came["tokenizer_class"] = "PreTrainedTokenizerFast"
        came["model_input_names"] = ["input_ids", "attention_mask"]
    assert json.loads((new / "tokenizer_config.json").read_text()) == came
    assert json.loads((new / "config.json").read_text())["rope_theta"] == 7
    assert not next(load(new).model.parameters()).any()
    assert torch.equal(load(new).eos, policy.eos)
    # A model that is saved in shards needs the list of its own.
    policy.model.save_pretrained = partial(policy.model.save_pretrained, max_shard_size="20KB")
    runs.write_model(policy, tmp_path / "shards")
    assert not next(load(tmp_path / "shards").model.parameters()).any()
