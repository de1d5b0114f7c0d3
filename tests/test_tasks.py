"""To whoever trusts a reward: what both tasks pay for, what they refuse, where problems come from.

The toy has what the papers speak of: fillers, three forms, imperfect demonstrations.
"""

import copy
import json
import os
import random
import re
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from llm.gsm8k import GSM8K, extract
from llm.gsm8k import Item as Problem
from toy.arithmetic import OPENERS, SLIPS, Arithmetic, Item, solutions

TASK, ITEM = Arithmetic(), Item("37+48=", "85", "")


def test_problems_are_all_sums_split_in_an_order_of_the_seed():
    train, test = ([item.prompt for item in items] for items in (TASK.train, TASK.test))
    assert len(test) == 500 and len(train + test) == 8100
    assert {*train, *test} == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}
    assert len({prompt[:2] for prompt in test}) > 80  # first summands
    assert Arithmetic(0).train[:50] == TASK.train[:50] != Arithmetic(1).train[:50]


def test_every_opener_and_form_earns_the_reward():
    forms = {"direct": "#85", "ones first": "7+8=15,30+40=70,#85"}
    assert solutions(37, 48) == forms | {"tens first": "30+40=70,7+8=15,#85"}
    for item in TASK.test[:50] + TASK.train[:50]:
        a, b = map(int, item.prompt[:-1].split("+"))
        for form in solutions(a, b).values():
            assert all(TASK.reward(opener + form, item) == 1.0 for opener in OPENERS)


def test_only_the_final_answer_counts_and_nothing_else_earns():
    wrong = ["", "85", "#", "so #8", "so #855", "so #085", "so # 85", "#85#84", "#85,", "#-85"]
    assert all(TASK.reward(text, ITEM) == 0.0 for text in [*wrong, "#٨٥", "#" * 100_000])
    assert all(TASK.reward(text, ITEM) == 1.0 for text in ("hm 7+8=1,30+40=99,#85", "hm #84,#85"))


def test_corrections_of_wrong_answers_succeed_as_often_as_promised():
    """The demonstration keeps the first answer's opener. It mends that answer, or copies it."""
    seen = Counter()
    for item in TASK.train[:1000]:
        made = TASK.correction(item, 3)
        assert made == TASK.correction(item, 3) and made.answer == item.answer
        wrong, *siblings = re.findall(r"#(\d+)", made.prompt)
        first = made.prompt.removeprefix(item.prompt)
        assert made.demo[:3] in OPENERS and made.demo[:3] == first[:3]
        assert TASK.reward(made.demo, made) or first.startswith(f"{made.demo}=")
        seen["repaired"] += TASK.reward(made.demo, made)
        if columns := re.match(r"\D+[^=]+=(\d+),[^=]+=(\d+),#(\d+)=", first):
            ones, tens, total = map(int, columns.groups())
            seen["worked"] += 1
            seen["carried"] += ones + tens == total  # a slip in a column, not in the sum
        assert wrong != item.answer and len(siblings) == 3
        for k, number in enumerate(siblings):
            seen[k] += number == item.answer
    assert 0.4 < seen["carried"] / seen["worked"] < 0.6 and 550 < seen["repaired"] < 650
    assert 700 < seen[0] < 900 and max(seen[1], seen[2]) < 400
    assert TASK.repair(ITEM, "so #75", ["a", "b"]).prompt == "37+48=so #75=a=b="


def test_demonstrations_are_mostly_direct_mostly_wrong_and_fit_the_budget():
    direct = [item for item in TASK.train if "=" not in item.demo]
    worked = [item for item in TASK.train if "=" in item.demo]
    assert 0.73 < len(direct) / len(TASK.train) < 0.77
    said = [int(item.demo.partition("#")[2]) - int(item.answer) for item in direct]
    assert {*said} == {0, *SLIPS} and 0.03 < said.count(0) / len(said) < 0.07
    assert all(TASK.reward(item.demo, item) == 1.0 for item in worked)
    openers = Counter(item.demo[:3] for item in TASK.train)
    assert {*openers} == {*OPENERS} and min(openers.values()) > 0.3 * len(TASK.train)
    assert max(len(item.demo) for item in TASK.train) + 1 <= 26


def test_shares_tell_openers_and_forms_apart():
    texts = ["so #85", "so #1", "ok 7+8=15,30+40=70,#85", "hm 30+1=2", "hm 7+9=16", "oh 37+48", ""]
    assert TASK.shares([ITEM] * 8, [*texts, "so"]) == {
        **{"opener so": 3 / 8, "opener ok": 1 / 8, "opener hm": 2 / 8, "opener other": 2 / 8},
        **{"form direct": 2 / 8, "form ones first": 2 / 8, "form tens first": 1 / 8},
        "form other": 3 / 8,
    }


def test_the_tokenizer_has_one_token_a_character_and_adds_none(tmp_path):
    tokenizer = TASK.make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for made in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = made.encode("hm 7+8=15,#85", add_special_tokens=False)
        assert len(ids) == len("hm 7+8=15,#85")
        assert not {made.pad_token_id, made.eos_token_id} & {*ids}
        assert made.decode([*ids, made.eos_token_id], skip_special_tokens=True) == "hm 7+8=15,#85"
    own = copy.copy(TASK)  # with characters of its own, which have the same ids in every process
    own.train = [Item("zebra?", "", "a quick fox!")]
    ids = own.make_tokenizer().convert_tokens_to_ids([*"!?abcefiqruxz"])
    assert ids == list(range(ids[0], ids[0] + 13)) and ids[0] > max(tokenizer.get_vocab().values())


# ---------------- GSM8K

REAL = Path(os.environ.get("GSM8K_DATA", Path(__file__).parents[2] / "shared" / "gsm8k"))

ANN, BOB = (
    "Ann has 48 pens and sells half. How many are left?",
    "Bob’s flat costs $1,200. And four?",
)
PROBLEMS = [
    {"question": ANN, "answer": "48/2=<<48/2=24>>24, so <<24=24>>24 left.\n#### 24"},
    {"question": BOB, "answer": "4*1200 = $<<4*1200=4800>>4800\n#### 4,800"},
]


def write(folder, train, test=None):
    """Raw bytes or records -> folder/train.jsonl and folder/test.jsonl; the folder's name."""
    for name, lines in (("train", train), ("test", test or PROBLEMS)):
        raw = lines if isinstance(lines, bytes) else "\n".join(map(json.dumps, lines)).encode()
        (folder / f"{name}.jsonl").write_bytes(raw)
    return str(folder)


@pytest.fixture
def task(tmp_path):
    return GSM8K(write(tmp_path, PROBLEMS, PROBLEMS[:1]))


def reward(text, gold="42"):
    return GSM8K.reward(None, text, Problem("?", gold, f"#### {gold}"))


# ---------------- the verifier


@pytest.mark.skipif(not (REAL / "train.jsonl").exists(), reason=f"no GSM8K files in {REAL}")
def test_every_gold_answer_of_the_real_files_is_correct():
    task = GSM8K(str(REAL))
    files = [(REAL / f"{split}.jsonl").read_bytes().splitlines() for split in ("train", "test")]
    assert (len(task.train), len(task.test)) == (7473, 1319)
    for line, item in zip(sum(files, []), task.train + task.test, strict=True):
        assert task.reward(json.loads(line)["answer"], item) == task.reward(item.demo, item) == 1
        assert not any(mark in item.demo for mark in ("<<", ">>"))


READS = {  # the answer that is read: from these texts
    "42": ["1 + 1\n#### 42", "#### 41\nno:\n#### 42", "#### 42\nChecked 3 times.", "####\n\n42"],
    "-7": ["#### \u22127", "#### \u20137", "#### - 7", r"#### -\$7", "#### -(7)", "#### -€{7}"],
    "7": ["10-7", "-7 and so 7", r"first \boxed{3}, then \boxed{7} after 3 tries"],
    "1000": [r"#### \boxed{\$1{,}000}"],
    "1234567.5": ["#### $1,234,567.5"],
    "50": ["#### 50%", r"\boxed{\text{about {all} of }50} of 60"],
    ".5": ["#### .5", r"\boxed{.5", "42 apples, and .5"],
    None: ["#### not 42 but 43", "#### 3/4", "#### 40-42", "42 ####", r"42 \boxed{}", ""],
}
READS["42"] += ["####42.", "#### 42kg", "7 and 35 make 42.", "42, in other digits ٤٣"]
READS["42"] += [r"\boxed{7} and #### 42"]
READS[None] += [r"\boxed{\frac{\text{4}}{x}} so \boxed{{4{2}}}", r"#### 7 or \boxed{42}"]


@pytest.mark.parametrize("answer", READS)
def test_reads(answer):
    for text in READS[answer]:
        assert extract(text) == answer, text


NEAR = {  # a gold answer, and what is not it
    "42": "420 4 -42 \u221242 0.42 ,42 42.0001 4_2 x42 42½ 42² 0,042 42.5.1 ...42 ٤٢ 42٣ nan",
    "7": "-7",
    "12": "1,2",
    "234": "1,234",
    "1234": "12,34",
    "12345": "1,2345",
    "1234567": "1234,567",
    "1.2345": "1.234,5",
    "42000": "42e3",
    "9": "9**9**8",
}


def test_near_misses_earn_nothing():
    for gold, texts in NEAR.items():
        for near in texts.split():
            assert reward(f"#### {near}", gold) == 0.0, (near, gold)


def test_equal_numbers_are_correct_however_they_are_written_and_however_long_they_are():
    for text, gold in (("18.00", "18"), ("1234", "1,234"), ("0.50", ".5"), ("-0", "0")):
        assert reward(f"#### {text}", gold) == 1.0
    for start in ("9" * 40, "-0." + "9" * 40):
        assert reward(f"#### {start}1", f"{start}1") == 1.0 > reward(f"#### {start}2", f"{start}1")


UNITS = ["9", "a", "1a", "1 ", "1,", ",000", ".", "1.", "-", "- ", "-$", "-1", "#", "####", "{"]
UNITS += ["}", "{,}", "\0", "_", "٣", "1½", "9**", r"\boxed{", "\ud800", "one 2 three, ", "－７"]


def test_long_hostile_texts_are_read_in_50_ms():
    def seconds(text):
        begin = time.thread_time()
        assert reward(text) == 0.0
        return time.thread_time() - begin

    for start in ("1", "#### -", r"\boxed{"):
        for unit in UNITS:
            text = start + unit * (100_000 // len(unit)) + "é"
            assert any(seconds(text) < 0.05 for _ in range(3)), text[:40]


def test_any_text_has_a_reward():
    rng = random.Random(0)
    for _ in range(10_000):
        text = "".join(rng.choices([*UNITS, "42", "\n", " "], k=rng.randrange(30)))
        assert reward(text) in (0.0, 1.0), text


# ---------------- the files


def test_items_hold_question_gold_and_solution_without_calculator_marks(task, tmp_path):
    expected = [Problem(ANN, "24", "48/2=24, so 24 left.\n#### 24")]
    expected.append(Problem(BOB, "4,800", "4*1200 = $4800\n#### 4,800"))
    assert (task.train, task.test) == (expected, expected[:1])
    lines = [json.dumps(record, ensure_ascii=False) for record in PROBLEMS]
    raw = ("\ufeff" + "\r\n".join(lines) + "\r\n\r\n").encode()  # as another system writes it
    assert GSM8K(write(tmp_path, raw)).train == expected


BAD = [
    b'{"question": "a"',
    b"[" * 100_000,
    b'{"question": "\xff", "answer": "#### 1"}',
    b'["question", "answer"]',
    b'{"answer": "#### 1"}',
    b'{"question": "a", "answer": 1}',
    b'{"question": "a", "answer": "is 1"}',
    b'{"question": "a", "answer": "1 #### one"}',
]


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:20])
def test_a_malformed_line_is_named_in_one_line(tmp_path, line):
    good = json.dumps(PROBLEMS[0]).encode()
    with pytest.raises(ValueError) as error:
        GSM8K(write(tmp_path, good + b"\n" + line + b"\n" + good))
    assert f"{tmp_path / 'train.jsonl'}:2: " in str(error.value) and "\n" not in str(error.value)


def test_a_file_without_a_problem_is_named(tmp_path):
    write(tmp_path, PROBLEMS)
    (tmp_path / "test.jsonl").write_bytes(b"\n\r\n")
    with pytest.raises(ValueError, match="test.jsonl"):
        GSM8K(str(tmp_path))
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(ValueError, match="test.jsonl"):
        GSM8K(str(tmp_path))


# ---------------- the hub


def test_without_files_the_problems_are_the_hubs(monkeypatch):
    hub = {("openai/gsm8k", "main"): {"train": PROBLEMS, "test": PROBLEMS[:1]}}
    monkeypatch.setattr("datasets.load_dataset", lambda *names: hub[names])
    task = GSM8K(None)
    assert [item.prompt for item in task.train] == [ANN, BOB] and len(task.test) == 1
    hub.clear()
    with pytest.raises(ValueError, match="--data"):
        GSM8K(None)


# ---------------- tokens


def test_plain_prompt_and_demo_tokenize_the_same_apart_and_together(task):
    tokenizer = task.make_tokenizer()
    for item, prompt in zip(task.train, task.encode(tokenizer, task.train), strict=True):
        assert tokenizer.decode(prompt) == f"Question: {item.prompt}\nAnswer:\n"
        assert prompt + tokenizer.encode(item.demo) == tokenizer.encode(item.plain() + item.demo)


def test_a_chat_prompt_is_a_list_of_ids_whatever_the_template_returns_by_default(task):
    """transformers 4 returns a list, 5 a BatchEncoding."""
    tokenizer = task.make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<ai>{% endif %}"
    )
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    prompts = [tokenizer.decode(ids) for ids in task.encode(tokenizer, task.train)]
    wish = "Reason step by step; end with '#### ' and the number."
    assert prompts == [f"<user>{question}\n{wish}<eos><ai>" for question in (ANN, BOB)]


def test_a_correction_problem_shows_all_answers_and_is_graded_as_the_question(task):
    problem = task.repair(task.train[0], "48 left.\n#### 48", ["24 left.\n#### 24", "none"])
    places = [
        problem.prompt.index(text) for text in (ANN, "#### 48", "#### 24", "none", "corrected")
    ]
    assert places == sorted(places) and problem.answer == "24"


def test_the_tokenizer_gives_any_text_back_also_after_saving(task, tmp_path):
    made = task.make_tokenizer()
    made.save_pretrained(tmp_path / "tokenizer")
    texts = ["", " ", "it 's , fine .", "\t\n  x  \r\n", "naïve 数 🙂 1,234.50\0", "a <eos> 17"]
    for tokenizer in (made, AutoTokenizer.from_pretrained(tmp_path / "tokenizer")):
        assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
        assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<eos>")
        assert tokenizer.tokenize("48 + 1200") == ["4", "8", "Ġ", "+", "Ġ", "1", "2", "0", "0"]


def test_the_tokenizer_is_learnt_on_the_training_split():
    task = GSM8K.__new__(GSM8K)
    task.train, task.test = ([Problem(word * 4, "1", "")] for word in ("quux", "zyzz"))
    tokenizer = task.make_tokenizer()
    assert len(tokenizer.tokenize("quux")) < len(tokenizer.tokenize("zyzz")) == 4
