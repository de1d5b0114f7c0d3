"""To whoever trusts a reward: what both tasks pay for, what they refuse, where problems come from.

The toy has what the papers speak of: fillers, three forms, imperfect demonstrations.
"""

import json
import os
import re
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from llm import gsm8k
from llm.gsm8k import GSM8K, extract
from llm.gsm8k import Item as Problem
from toy.arithmetic import OPENERS, SLIPS, Arithmetic, Item, solutions

TASK, ITEM = Arithmetic(), Item("37+48=", "85", "")


def test_problems_are_all_sums_split_in_an_order_of_the_seed():
    train, test = ([item.prompt for item in items] for items in (TASK.train, TASK.test))
    assert len(test) == 500 and len(train + test) == 8100
    assert {*train, *test} == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}
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
        made = TASK.correction(item)
        assert made == TASK.correction(item) and made.answer == item.answer
        assert made.prompt.startswith(item.prompt) and made.prompt.endswith("=")
        first = made.prompt.removeprefix(item.prompt)
        assert made.demo[:3] in OPENERS and made.demo[:3] == first[:3]
        assert TASK.reward(made.demo, made) or first.startswith(f"{made.demo}=")
        seen["repaired"] += TASK.reward(made.demo, made)
        if columns := re.match(r"\D+[^=]+=(\d+),[^=]+=(\d+),#(\d+)=", first):
            ones, tens, total = map(int, columns.groups())
            seen["worked"] += 1
            seen["carried"] += ones + tens == total  # a slip in a column, not in the sum
        wrong, *siblings = re.findall(r"#(\d+)", TASK.correction(item, 3).prompt)
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
    assert 0.03 < sum(TASK.reward(item.demo, item) for item in direct) / len(direct) < 0.07
    said = [int(item.demo.partition("#")[2]) - int(item.answer) for item in direct]
    assert {*said} == {0, *SLIPS}
    assert all(TASK.reward(item.demo, item) == 1.0 for item in worked)
    for opener in OPENERS:
        share = sum(item.demo.startswith(opener) for item in TASK.train) / len(TASK.train)
        assert 0.30 < share < 0.37
    assert max(len(item.demo) for item in TASK.train) + 1 <= 26


def test_shares_tell_openers_and_forms_apart():
    texts = ["so #85", "so #1", "ok 7+8=15,30+40=70,#85", "hm 30+1=2", "hm 7+9=16", "oh 37+48", ""]
    assert TASK.shares([ITEM] * 7, texts) == {
        **{"opener so": 2 / 7, "opener ok": 1 / 7, "opener hm": 2 / 7, "opener other": 2 / 7},
        **{"form direct": 2 / 7, "form ones first": 2 / 7, "form tens first": 1 / 7},
        "form other": pytest.approx(2 / 7),
    }


def test_the_tokenizer_has_one_token_a_character_and_adds_none(tmp_path):
    tokenizer = TASK.make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for made in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = made.encode("hm 7+8=15,#85", add_special_tokens=False)
        assert len(ids) == len("hm 7+8=15,#85")
        assert not {made.pad_token_id, made.eos_token_id} & {*ids}
        assert made.decode([*ids, made.eos_token_id], skip_special_tokens=True) == "hm 7+8=15,#85"


# ---------------- GSM8K

REAL = Path(os.environ.get("GSM8K_DATA", Path(__file__).parents[2] / "shared" / "gsm8k"))

QUESTIONS = {
    "Ann has 48 pens and sells half. How many are left?": "48/2=<<48/2=24>>24 left.\n#### 24",
    "Bob’s flat costs $1,200 a year. And four?": "4*1200 = $<<4*1200=4800>>4800\n#### 4,800",
    "It was 3° and fell by 10°. Now?": "3-10 = -7.\n#### -7",
}
PROBLEMS = [{"question": key, "answer": text} for key, text in QUESTIONS.items()]


def write(folder, train, test=None):
    """Raw bytes or records -> folder/train.jsonl and folder/test.jsonl; the folder's name."""
    for name, lines in (("train", train), ("test", test or PROBLEMS)):
        raw = lines if isinstance(lines, bytes) else "\n".join(map(json.dumps, lines)).encode()
        (folder / f"{name}.jsonl").write_bytes(raw)
    return str(folder)


@pytest.fixture
def task(tmp_path):
    return GSM8K(write(tmp_path, PROBLEMS, PROBLEMS[:2]))


def reward(text, gold="42"):
    return GSM8K.reward(None, text, Problem("?", gold, f"#### {gold}"))


# ---------------- the verifier


@pytest.mark.skipif(not (REAL / "train.jsonl").exists(), reason=f"no GSM8K files in {REAL}")
def test_every_gold_answer_of_the_real_files_is_correct_and_can_be_encoded():
    task = GSM8K(str(REAL))
    files = [(REAL / f"{split}.jsonl").read_bytes().splitlines() for split in ("train", "test")]
    assert (len(task.train), len(task.test)) == (7473, 1319)
    for line, item in zip(sum(files, []), task.train + task.test, strict=True):
        assert task.reward(json.loads(line)["answer"], item) == task.reward(item.demo, item) == 1
        assert not any(mark in item.demo for mark in ("<<", ">>"))
    task.train = task.train[:1000]
    tokenizer = task.make_tokenizer()
    texts = [item.plain() + item.demo for item in task.test]
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"]) == texts
    assert len(tokenizer) == gsm8k.VOCAB_SIZE == 2048


READS = {  # the answer that is read: from these texts
    "42": ["1 + 1\n#### 42", "#### 41\nno:\n#### 42", "#### 42\nChecked 3 times.", "####\n\n42"],
    "-7": ["#### -7", "#### \u22127", "#### \u20137", "#### - 7", "#### -$7", "#### $-7"],
    "7": ["#### +7", "10-7"],
    "1000": [r"#### \boxed{\$1{,}000}", r"\boxed{\$1{,}000}"],
    "1234.00": ["#### $1,234.00"],
    "1234567.5": ["#### 1,234,567.5"],
    "50": ["#### 50%"],
    ".5": ["#### .5"],
    None: ["#### not 42 but 43", "#### 3/4", "#### 40-42", "#### 9**9**9", "#### 4 2", "42 ####"],
}
READS["42"] += [r"\boxed{7} and #### 42", r"first \boxed{7}, then \boxed{42} after 3 tries"]
READS["42"] += [r"\boxed{\text{about {all} of }42} of 50", r"\boxed{42", "7 and 35 make 42."]
READS["42"] += ["42, in other digits ٤٣", "#### 42 dollars", "#### USD 42", "#### €42", "####42."]
READS["42"] += ["#### 42kg", "#### **42**", "#### 42<|im_end|>", r"\boxed{42\text{ apples}}"]
READS["42"] += [r"\boxed{42} and }, a 7}"]
READS["-7"] += [r"#### -\$7", "#### -(7)"]
READS[None] += ["#### 4\x002", r"42 \boxed{}", "", "forty-two"]
READS[None] += [r"\boxed{\frac{\text{4}}{x}} so \boxed{{4{2}}}"]


@pytest.mark.parametrize("answer", READS)
def test_reads(answer):
    for text in READS[answer]:
        assert extract(text) == answer, text


NEAR_42 = "420 142 4 2 -42 \u221242 0.42 .42 ,42 4.2 42.0001 42e3 42e0 4_2 x42 0x2A 42½ 42² 0,042"
NEAR_42 = [*NEAR_42.split(), "٤٢", "42٣", "٣42", "not 42 but 43", "4 2", "42.5.1", "...42", "４２"]
NEAR_42 += ["9" * 10_000, "nan", ""]
NEAR = """7 -7|-7 7|1,234 234|234 1,234|1,2 12|1,2 2|1,2 1|12,34 1234|1,2345 12345|1234,567 1234567
1.234,5 1.2345|1e400 1|42e3 3|42e3 42000|9**9**8 9|1/2 1|42٣ 423"""
NEAR = [tuple(pair.split()) for pair in NEAR.replace("\n", "|").split("|")] + [("", "0")]


@pytest.mark.parametrize("where", ["{}", "#### {}", r"\boxed{{{}}}", "The answer is {}."])
def test_near_misses_earn_nothing(where):
    for near, gold in [(near, "42") for near in NEAR_42] + NEAR:
        assert reward(where.format(near), gold) == 0.0, (near, gold)


def test_equal_numbers_are_correct_however_they_are_written_and_however_long_they_are():
    for text, gold in (("18.00", "18"), ("1,234", "1234"), ("1234", "1,234"), ("0.50", ".5")):
        assert reward(f"#### {text}", gold) == 1.0
    assert reward("#### -0", "0") == 1.0
    for start in ("9" * 40, "-" + "9" * 40, "0." + "9" * 40, "-0." + "9" * 40):
        assert reward(f"#### {start}1", f"{start}1") == 1.0 > reward(f"#### {start}2", f"{start}1")


UNITS = ["9", "a", "1a", "1 ", "1,", ",000", ".", "1.", "-", "- ", "-$", "-1", "#", "####", "{"]
UNITS += ["}", "{,}", "\0", "_", "٣", "1½", "9**", r"\boxed{", "\ud800", "one 2 three, ", "－７"]
LONG_TEXTS = [
    start + unit * (100_000 // len(unit)) + "é"
    for start in ("1", "#### -", r"\boxed{")
    for unit in UNITS
]


def test_long_hostile_texts_are_read_in_50_ms():
    def seconds(text):
        begin = time.thread_time()
        assert reward(text) == 0.0
        return time.thread_time() - begin

    for text in LONG_TEXTS:
        assert any(seconds(text) < 0.05 for _ in range(3)), text[:40]


@settings(max_examples=10_000 if os.environ.get("LONG") else 300, deadline=None)
@given(st.text() | st.lists(st.sampled_from([*UNITS, "42", "\n", " "]), max_size=60).map("".join))
def test_any_text_has_a_reward(text):
    assert reward(text) in (0.0, 1.0)


# ---------------- the files


def test_items_hold_question_gold_and_solution_without_calculator_marks(task, tmp_path):
    expected = [
        Problem(
            "Ann has 48 pens and sells half. How many are left?", "24", "48/2=24 left.\n#### 24"
        ),
        Problem("Bob’s flat costs $1,200 a year. And four?", "4,800", "4*1200 = $4800\n#### 4,800"),
        Problem("It was 3° and fell by 10°. Now?", "-7", "3-10 = -7.\n#### -7"),
    ]
    assert (task.train, task.test) == (expected, expected[:2])
    lines = [json.dumps(record, ensure_ascii=False) for record in PROBLEMS]
    raw = ("\ufeff" + "\r\n".join(lines) + "\r\n\r\n").encode()  # as another system writes it
    assert GSM8K(write(tmp_path, raw)).train == expected


BAD = [
    b'{"question": "a"',
    b"nonsense",
    b"[" * 100_000,
    b'{"question": "\xff", "answer": "#### 1"}',
]
BAD += [b'["question", "answer"]', b'{"answer": "#### 1"}', b'{"question": "a"}', b"3"]
BAD += [b'{"question": "a", "answer": 1}', b'{"question": 1, "answer": "#### 1"}']
BAD += [b'{"question": "a", "answer": "%s"}' % x for x in (b"is 1", b"1 #### one", b"#### 1 or 2")]


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:20])
def test_a_malformed_line_is_named_in_one_line(tmp_path, line):
    good = json.dumps(PROBLEMS[0]).encode()
    with pytest.raises(ValueError) as error:
        GSM8K(write(tmp_path, good + b"\n" + line + b"\n" + good))
    assert f"{tmp_path / 'train.jsonl'}:2: " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("raw", [b"", b"\n\r\n", b"\xef\xbb\xbf", None])
def test_a_file_without_a_problem_is_named(tmp_path, raw):
    write(tmp_path, PROBLEMS)
    (tmp_path / "test.jsonl").unlink() if raw is None else (tmp_path / "test.jsonl").write_bytes(
        raw
    )
    with pytest.raises(ValueError, match="test.jsonl"):
        GSM8K(str(tmp_path))


# ---------------- the hub


def test_without_files_the_problems_are_the_hubs(monkeypatch):
    hub = {("openai/gsm8k", "main"): {"train": PROBLEMS, "test": PROBLEMS[:1]}}
    monkeypatch.setattr("datasets.load_dataset", lambda *names: hub[names])
    task = GSM8K(None)
    assert [item.prompt for item in task.train] == list(QUESTIONS) and len(task.test) == 1
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
    ids, *others = task.encode(tokenizer, task.train)
    assert len(others) == len(task.train) - 1
    question = "Ann has 48 pens and sells half. How many are left?"
    instruction = "Reason step by step; end with '#### ' and the number."
    assert tokenizer.decode(ids) == f"<user>{question}\n{instruction}<eos><ai>"


def test_a_correction_problem_shows_all_answers_and_is_graded_as_the_question(task):
    item, tokenizer = task.train[0], task.make_tokenizer()
    problem = task.repair(item, "48 left.\n#### 48", ["24 left.\n#### 24", "none"])
    shown = (item.prompt, "#### 48", "#### 24", "none", "corrected")
    places = [problem.prompt.index(text) for text in shown]
    assert places == sorted(places)
    assert task.reward("#### 24", problem) == 1 > task.reward("#### 48", problem)
    assert problem.prompt in tokenizer.decode(task.encode(tokenizer, [problem])[0])


def test_the_tokenizer_gives_any_text_back_also_after_saving(task, tmp_path):
    made = task.make_tokenizer()
    assert made.get_vocab() == task.make_tokenizer().get_vocab()
    made.save_pretrained(tmp_path / "tokenizer")
    texts = ["", " ", "it 's , fine .", "\t\n  x  \r\n", "naïve 数 🙂 1,234.50\0", "a <eos> 17"]
    texts += [item.plain() + item.demo for item in task.train]
    for tokenizer in (made, AutoTokenizer.from_pretrained(tmp_path / "tokenizer")):
        assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
        assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<eos>")
        assert tokenizer.pad_token_id != tokenizer.eos_token_id
        split = ["4", "8", "Ġ", "+", "Ġ", "1", "2", "0", "0"]
        assert tokenizer.tokenize("48 + 1200") == split


def test_the_tokenizer_is_learnt_on_the_training_split():
    task = GSM8K.__new__(GSM8K)
    task.train, task.test = ([Problem(word * 4, "1", "")] for word in ("quux", "zyzz"))
    tokenizer = task.make_tokenizer()
    assert len(tokenizer.tokenize("quux")) < len(tokenizer.tokenize("zyzz")) == 4
