"""To whoever brings data or trusts a reward: a table is read as it is written or refused with its
row, what is held out is not trained on, and a reward pays for the answer that was given.
"""

import json
import re
import string
from collections import Counter
from pathlib import Path

import pytest
from conftest import TOY, build, metrics, run
from tokenizers import Tokenizer

import train
from experiments import format_reward
from tasks.gsm8k import GSM8K, extract
from tasks.task import BaseTask, Item

SUMS = format_reward.Task()
ITEMS = {item.prompt: item for task in (TOY, SUMS) for item in task.test + task.train}


@pytest.fixture
def chat_model(tmp_path) -> str:
    """A tiny Qwen2 that knows all printable letters, with a chat template."""
    letters, path = BaseTask(), build("qwen2", tmp_path / "model", vocab_size=128)
    letters.train, letters.test = [Item(string.printable, "", "")], []
    tokenizer = letters.make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    tokenizer.save_pretrained(path)
    return path


# ---------------- a table


def table(path: Path, text: str, held_out: str = ""):
    path.write_text(text, encoding="utf-8")
    return train.find_task(str(path))(held_out)


# A file of two rows, and what the first comes to: what is asked, and all right answers.
READ = {
    'a[1].CSV|\ufeffQuestion;id;Answer\n"a\n""b""";1;1.10\n;;\nc;2;d\n': ('a\n"b"', "1.10"),
    "a.tsv|prompt\tlabel\ta, b\na\tNone\t\nc\td\t": ("a", "None"),
    """a.jsonl|{"instruction": "a", "input": "b", "output": 12e4}

{"input": "a", "output": "2021-03-04"}""": ("a\nb", "12e4"),
    """a.json|[{"context": "p", "question": "a", "answer": ["b", "c"]},
{"question": "c", "answer": "d"}]""": ("p\na", "b", "c"),
    """a.jsonl|{"question": "a", "choices": [3, 4], "answer": 1}
{"question": "b", "choices": "x", "answer": "d"}""": ("a\nA. 3\nB. 4", "B", "4", "B. 4"),
    """b.jsonl|{"problem": "a", "solution": "so #### 7"}
{"problem": "b", "solution": "<think>5</think> d"}""": ("a", "7"),
}


@pytest.mark.parametrize("file", READ)
def test_a_row_is_read_as_it_is_written(file, tmp_path):
    name, _, text = file.partition("|")
    task = table(tmp_path / name, text)
    items = {item.prompt: (item.answer, *item.others) for item in task.train + task.test}
    prompt, *right = READ[file]
    assert len(items) == 2 and items[prompt] == (*right,)


REFUSED = {  # what would be another answer, or a shifted one
    "a.csv|question,answer\na,b\nc, d, e\n": "row 3: 3 cells",
    'a.csv|question,answer\n"a,b\nc,d\n': "row 2: unexpected end",
    "a.csv|question,answer\na,b\nc,\n": "row 3: '' is no text",
    "a.csv|question,note\na,b\nc,d\n": "row 2: None is no text",
    """a.jsonl|{"question": "a", "answer": "b"}

{"question": "c", "answer": {"d": "e"}}""": "row 3: {'d': 'e'} is no",
    'a.jsonl|{"question": "a", "choices": [1, 3], "answer": 1}': "more than one, of the options",
    'a.jsonl|{"problem": "a", "solution": "so #### none"}': "None is no text",
    """b.json|[{"messages": [{"role": "system", "content": "a"},
{"role": "user", "content": "a"}]}]""": "row 1: it is not a user who asks",
}


@pytest.mark.parametrize("file", REFUSED)
def test_a_row_that_cannot_be_used_is_named(file, tmp_path):
    name, _, text = file.partition("|")
    with pytest.raises(ValueError, match=re.escape(REFUSED[file])):
        table(tmp_path / name, text)


def test_what_is_held_out_is_not_trained_on(tmp_path, capsys):
    rows = "".join(f"{i}+{i}=,{2 * i},easy\n" for i in range(10))
    more = tmp_path / "more.csv"
    more.write_text("prompt,output\n3+3=,6\nx,1\n")
    task = table(tmp_path / "a.csv", "question,answer,level\n" + rows, str(more))
    assert {x.prompt for x in task.train} == {f"{i}+{i}=" for i in range(10)} - {"3+3="}
    assert {x.prompt for x in task.test} == {"3+3=", "x"}
    wanted = "9 of 10 rows are trained on, 2 held out; columns not read: level"
    assert wanted in capsys.readouterr()[0]
    backwards = "".join(reversed(rows.splitlines(True)))
    halves = [table(tmp_path / "b.csv", "question,answer,_\n" + x) for x in (rows, backwards)]
    assert (len(halves[0].train), len(halves[0].test)) == (8, 2)
    assert halves[0].test == halves[1].test


CHAT = '[{"role": "system", "content": "S"}, {"role": "user", "content": "%s"}%s]'


def test_a_chat_is_asked_as_one(tmp_path, chat_model):
    """By a tokenizer that splits as its file says. transformers' own for this model would not."""
    end = ', {"role": "assistant", "content": "May 3"}'
    rows = [f'{{"messages": {CHAT % (i, end)}}}' for i in range(4)]
    rows += [f'{{"prompt": {CHAT % ("a  b", "")}, "answer": "12"}}']
    task = table(tmp_path / "chats.jsonl", "\n".join(rows))
    tokenizer = train.load_policy(train.Config(), task, chat_model).tokenizer
    own = Tokenizer.from_file(f"{chat_model}/tokenizer.json")
    asked = [own.encode(f"<S><{x}>").ids for x in (*range(4), "a  b")]
    assert sorted(task.encode(tokenizer, task.train + task.test)) == sorted(asked)
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="the chat template loses 'S'"):
        task.encode(tokenizer, task.train)


def test_any_right_answer_of_a_table_is_paid(tmp_path):
    task = table(tmp_path / "a.csv", "question,answer\na,b\nc,d\n")
    for answer, text, paid in [
        ("May 3", ' "may 3."\n', 1),
        ("May 3", "3", 0),
        ("1,003", "It is 1003.", 1),
        ("1,003", "103", 0),
        ("B", "**B**", 1),
        ("B", "(b)", 1),
        ("b", "not b", 0),
        ("*", "", 0),
    ]:
        assert task.reward(text, Item("", answer, "")) == paid, text
        assert task.reward(text, Item("", "x", "", (), (answer,))) == paid, text


# ---------------- thoughts, and tasks of one's own


def test_a_thought_is_no_answer():
    """Some chat templates have opened it already."""
    task, tokenizer = BaseTask(), TOY.make_tokenizer()
    task.reward = lambda text, item: text
    texts = ["<think>5</think> 7", "5</think>7", "7", "<think>7", "<think></think>7<think>8"]
    assert task.rewards(texts, texts) == [" 7", "7", "7", "", ""]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    task.encode(tokenizer, [Item("7=", "", "")])
    assert task.rewards(texts[1:3], texts[1:3]) == ["7", ""]


OWN = """
import torch
from tasks.arithmetic import Arithmetic

class Task(Arithmetic):
    def answer(self, text):
        return text.partition("5")[2]  # a 5 ends a thought

    def reward(self, text, item):
        return len(text) % 2

def loss(batch):
    noise = torch.rand_like(batch.logp)
    return -(noise * batch.adv * batch.logp * batch.mask).sum()
"""


def test_a_run_that_was_moved_resumes_with_its_own_files(tmp_path, monkeypatch, capsys):
    """And as if it had not been: also the random numbers of a loss are the same. Its last lines say
    how many answers ended inside a thought."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("mine.py").write_text(OWN)
    flags = "--task mine.py --method mine.py --schedule constant --steps".split()
    lines = metrics(run(Path("whole"), *flags, 4))
    said = f"{lines[4]['unfinished']:.0%} of the sampled answers ended inside a thought"
    assert 0 < lines[4]["unfinished"] < 1 and said in capsys.readouterr()[0]
    run(Path("half"), *flags, 2).rename(tmp_path / "half")
    Path("mine.py").unlink()
    train.main(["--resume", str(tmp_path / "half"), "--steps", "4"])
    assert metrics(tmp_path / "half") == lines


# ---------------- the toy


def test_the_toy_pays_for_the_final_answer_and_demonstrates_mostly_wrong_guesses():
    texts = "#85;hm #84,#85;7+8=1,#85;;85;#;#8;#855;#085;# 85;#85#84;#85,;#٨٥".split(";")
    assert [TOY.reward(text, ITEMS["37+48="]) for text in texts] == [1] * 3 + [0] * 10
    demos = [("=" in item.demo, TOY.reward(item.demo, item)) for item in TOY.test + TOY.train]
    assert Counter(demos) == {(False, 0): 5806, (False, 1): 289, (True, 1): 2005}


def test_the_warm_start_of_ibpo_shows_an_answer_and_siblings_and_corrects_the_answer():
    """This one has a slip in a column, carried into the sum. Its demonstration is a copy, on
    purpose."""
    made = TOY.correction(ITEMS["56+78="], 3)
    assert made.prompt.startswith("56+78=hm 50+60=110,6+8=14,#124=ok 50+70=120,")
    assert made.prompt.count("#") == 4 and made.demo == "hm 50+60=110,6+8=14,#124"


# ---------------- GSM8K and sums

REAL = Path(__file__).parents[2] / "shared" / "gsm8k"


@pytest.mark.skipif(not REAL.exists(), reason=f"no GSM8K files in {REAL}")
def test_every_gold_answer_of_the_real_files_is_read():
    task = GSM8K(str(REAL))
    for item in task.train + task.test:
        assert extract(item.demo) == item.answer.replace(",", "")


# A text, and the number that is read, or None where it is refused. "|" parts lines.
READS = r"""
#### 5|No:|#### 72 clips; 2 months -> 72
#### Step 1|#### 2. Add|#### 3|8/2=4|#### Final|The answer is **4.** See 5. -> 3
#### Step 1|8/2=4|#### 2. Halve|**The answer is:** $4. See 5. -> 4
####|-$1,234.50|Checked 3 times. -> -1234.50
#### 48/2 = 24 clips in 3 days -> 24
So \boxed{60 - 35 = \text{25}} of 90. The answer is 3. -> 25
\boxed{3}, so \boxed{\$72{,}000} of 90 -> 72000
So Ann has 72.||**Question:** Tom has 2 cats. -> 72
It weighs 72kg. -> 72
因此，总共有72元。 -> 72
It is −72. -> -72
10 - 82 = -**72** -> -72
- 72 -> 72
---|72 -> 72
x -> .5 -> .5
<think>5</think>|#### 72 -> 72
<think>#### 72 -> None
#### 3/4 -> None
\boxed{\frac{3}{4}} -> None
\boxed{48 \times 2} -> None
72 000 -> None
1,2 -> None
5–3 -> None
A72 -> None
"""


@pytest.mark.parametrize("row", READS.strip().split("\n"))
def test_reads(row):
    text, _, number = row.rpartition(" -> ")
    assert str(extract(text.replace("|", "\n"))) == number


def test_a_sum_is_right_if_it_is_equal_exactly_and_a_word_in_front_has_its_bonus():
    texts = ["27 + 25 = 52.0", " It is 52", "It is 52." + "0" * 40 + "1", "27 + 25 = 42", ""]
    item = ITEMS["What is 27 + 25?"]
    assert [SUMS.reward(text, item) for text in texts] == [1, 1.1, 0.1, 0, 0]
    assert SUMS.shares([item] * 5, texts) == {"right": 2 / 5, "words": 2 / 5}
    assert not {*SUMS.train} & {*SUMS.test}


ANN, BOB = "Ann has 48 pens and sells half. How many are left?", "Bob’s flat costs $1,200. And 4?"
PROBLEMS = [
    {"question": ANN, "answer": "48/2=<<48/2=24>>24, so <<24=24>>24 left.\n#### 24"},
    {"question": BOB, "answer": "4*1200 = $<<4*1200=4800>>4800\n#### 4,800"},
]
ROWS = [
    Item(ANN, "24", "48/2=24, so 24 left.\n\\boxed{24}"),
    Item(BOB, "4,800", "4*1200 = $4800\n\\boxed{4,800}"),
]


def test_gsm8k_has_solutions_without_marks_and_is_asked_with_a_wish(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, PROBLEMS)))
    task = GSM8K(str(tmp_path))
    assert task.train == task.test == ROWS
    task.train.append(Item(string.printable, "", ""))
    tokenizer = task.make_tokenizer()
    assert tokenizer.decode(task.encode(tokenizer, ROWS)[1]) == f"Question: {BOB}\nAnswer:\n"
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<ai>{% endif %}"
    asked = [tokenizer.decode(x.encode(tokenizer, ROWS)[1]) for x in (task, SUMS)]
    assert asked == [f"<user>{BOB}{task.wish}<ai>", f"<user>{BOB}<ai>"] and len(task.wish) > 9
    problem = task.repair(ROWS[0], "48 left.\n#### 48", ["24 left.\n#### 24", "none"])
    assert re.search("Ann has 48.*#### 48.*#### 24.*none.*correct", problem.prompt, re.DOTALL)
