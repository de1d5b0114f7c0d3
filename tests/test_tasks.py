"""To whoever trusts a reward: what both tasks pay for, and which problems they hold out.

GSM8K's own files are read where they are: $GSM8K_DATA, or ../shared/gsm8k.
"""

import json
import os
import re
from pathlib import Path
from statistics import fmean

import pytest
from conftest import ANN, BOB, PROBLEMS

from llm.gsm8k import GSM8K, extract
from llm.gsm8k import Item as Problem
from toy.arithmetic import OPENERS, Arithmetic, Item, solutions

TASK, ITEM = Arithmetic(), Item("37+48=", "85", "")


def test_problems_are_all_sums_split_in_one_order():
    train, test = ([item.prompt for item in items] for items in (TASK.train, TASK.test))
    assert sorted(train + test) == [f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)]
    assert len(test) == 500 and len({prompt[:2] for prompt in test}) == 90  # drawn from all
    assert Arithmetic().train == TASK.train


def test_every_opener_and_form_earns_the_reward_and_only_the_final_answer_counts():
    forms = {"direct": "#85", "ones first": "7+8=15,30+40=70,#85"}
    assert solutions(37, 48) == forms | {"tens first": "30+40=70,7+8=15,#85"}
    right = [opener + form for opener in OPENERS for form in forms.values()]
    assert all(TASK.reward(text, ITEM) == 1.0 for text in [*right, "hm 7+8=1,#85", "hm #84,#85"])
    wrong = ["", "85", "#", "so #8", "so #855", "so #085", "so # 85", "#85#84", "#85,", "#٨٥"]
    assert all(TASK.reward(text, ITEM) == 0.0 for text in wrong)


def test_demonstrations_are_mostly_direct_mostly_wrong_and_fit_the_budget():
    shares = TASK.shares(TASK.train, [item.demo for item in TASK.train])
    expected = dict.fromkeys(("opener so", "opener ok", "opener hm"), 1 / 3)
    expected |= {"form direct": 0.75, "form ones first": 0.125, "form tens first": 0.125}
    assert shares == pytest.approx(expected | {"opener other": 0, "form other": 0}, abs=0.02)
    direct = [item for item in TASK.train if "=" not in item.demo]
    assert 0.03 < fmean(TASK.reward(item.demo, item) for item in direct) < 0.07
    assert all(TASK.reward(item.demo, item) == 1 for item in {*TASK.train} - {*direct})
    assert max(len(item.demo) for item in TASK.train) + 1 <= 26


def test_corrections_of_wrong_answers_succeed_as_often_as_promised():
    """The demonstration keeps the first answer's opener. It mends that answer, or copies it."""
    repaired = right = 0
    for item in TASK.train[:1000]:
        made = TASK.correction(item, 3)
        assert made == TASK.correction(item, 3) and made.answer == item.answer
        wrong, sibling, *_ = re.findall(r"#(\d+)", made.prompt)
        first = made.prompt.removeprefix(item.prompt)
        assert wrong != item.answer and made.demo[:3] == first[:3]
        assert TASK.reward(made.demo, made) or first.startswith(f"{made.demo}=")
        repaired += TASK.reward(made.demo, made)
        right += sibling == item.answer
    assert 550 < repaired < 650 and 700 < right < 900
    problem = TASK.repair(ITEM, "so #75", ["a", "b"])
    assert (problem.prompt, problem.answer) == ("37+48=so #75=a=b=", "85")


def test_shares_tell_openers_and_forms_apart():
    texts = ["so #85", "so #1", "ok 7+8=15,30+40=70,#85", "hm 30+1=2", "hm 7+9=16", "oh 37+48", ""]
    assert TASK.shares([ITEM] * 8, [*texts, "so"]) == {
        **{"opener so": 3 / 8, "opener ok": 1 / 8, "opener hm": 2 / 8, "opener other": 2 / 8},
        **{"form direct": 2 / 8, "form ones first": 2 / 8, "form tens first": 1 / 8},
        "form other": 3 / 8,
    }


# ---------------- GSM8K: the verifier

REAL = Path(os.environ.get("GSM8K_DATA", Path(__file__).parents[2] / "shared" / "gsm8k"))


@pytest.mark.skipif(not (REAL / "train.jsonl").exists(), reason=f"no GSM8K files in {REAL}")
def test_every_gold_answer_of_the_real_files_is_correct():
    task = GSM8K(str(REAL))
    assert (len(task.train), len(task.test)) == (7473, 1319)
    for item in task.train + task.test:
        assert task.reward(item.demo, item) == 1 and "<<" not in item.demo
        assert item.demo.endswith(f"#### {item.answer}")


READS = {  # the answer that is read: from these texts
    "42": [
        "#### 41\nno:\n#### 42",
        "####\n42",
        "#### 42\nChecked 3 times.",
        "42, in other digits ٤٣",
    ],
    "-7": ["#### \u22127", "#### \u20137", "#### - 7", r"#### -\$7"],
    "7": ["10-7", "-7 and so 7", r"first \boxed{3}, then \boxed{7} after 3 tries"],
    "1000": [r"#### \boxed{\$1{,}000}"],
    "1234567.5": ["#### $1,234,567.5"],
    "50": ["#### 50%", r"\boxed{\text{about {all} of }50} of 60"],
    ".5": ["#### .5", r"\boxed{.5"],
    None: ["#### not 42 but 43", "#### 3/4", "42 ####", r"42 \boxed{}", ""],
}


@pytest.mark.parametrize("answer", READS)
def test_reads(answer):
    for text in READS[answer]:
        assert extract(text) == answer, text


def reward(text, gold="42"):
    return GSM8K.reward(None, text, Problem("?", gold, f"#### {gold}"))


NEAR = {  # a gold answer, and what is not it
    "42": "420 4 -42 \u221242 0.42 ,42 42.0001 4_2 x42 42½ 42.5.1 ...42 ٤٢ 42٣ nan",
    "12": "1,2",
    "234": "1,234",
    "1234": "12,34",
    "123": "0,123",
    "42000": "42e3",
}


def test_near_misses_earn_nothing():
    for gold, texts in NEAR.items():
        for near in texts.split():
            assert reward(f"#### {near}", gold) == 0.0, (near, gold)


def test_equal_numbers_are_correct_however_they_are_written_and_however_long_they_are():
    for text, gold in (("18.00", "18"), ("1234", "1,234"), ("0.50", ".5"), ("-0", "0")):
        assert reward(f"#### {text}", gold) == 1.0
    assert reward("#### " + "9" * 40 + "1", "9" * 40 + "2") == 0.0


def test_long_hostile_texts_are_read_at_once():
    """In milliseconds. They would take minutes if time grew with the square of the length."""
    for unit in ("1,", "- ", "{", "#", r"\boxed{", "9", ",000"):
        assert reward(unit * 100_000 + "é") == 0.0


# ---------------- GSM8K: the problems

ITEMS = [
    Problem(ANN, "24", "48/2=24, so 24 left.\n#### 24"),
    Problem(BOB, "4,800", "4*1200 = $4800\n#### 4,800"),
]


def test_items_hold_question_gold_and_solution_without_calculator_marks(small_gsm8k, monkeypatch):
    hub = {("openai/gsm8k", "main"): {"train": PROBLEMS, "test": PROBLEMS[:1]}}
    monkeypatch.setattr("datasets.load_dataset", lambda *names: hub[names])
    for task in (GSM8K(small_gsm8k), GSM8K(None)):
        assert (task.train, task.test) == (ITEMS, ITEMS[:1])


def test_what_cannot_be_read_is_named_in_one_line(small_gsm8k):
    for line in ('{"question": "a"', '{"question": "a", "answer": "1"}'):
        Path(small_gsm8k, "test.jsonl").write_text(f"{json.dumps(PROBLEMS[0])}\n{line}")
        with pytest.raises(ValueError, match=r"^[^\n]*test\.jsonl:2: [^\n]*$"):
            GSM8K(small_gsm8k)


def test_a_chat_model_is_asked_in_its_template_and_others_in_plain_text(small_gsm8k):
    task = GSM8K(small_gsm8k)
    tokenizer = task.make_tokenizer()
    assert tokenizer.tokenize("4800") == [*"4800"]  # each digit a token, though 48 is frequent
    plain = [tokenizer.decode(ids) for ids in task.encode(tokenizer, ITEMS)]
    assert plain == [f"Question: {question}\nAnswer:\n" for question in (ANN, BOB)]
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<ai>{% endif %}"
    )
    prompts = [tokenizer.decode(ids) for ids in task.encode(tokenizer, ITEMS)]
    wish = "Reason step by step; end with '#### ' and the number."
    assert prompts == [f"<user>{question}\n{wish}<eos><ai>" for question in (ANN, BOB)]


def test_a_correction_problem_shows_all_answers_and_is_graded_as_the_question():
    problem = GSM8K.repair(None, ITEMS[0], "48 left.\n#### 48", ["24 left.\n#### 24", "none"])
    shown = [ANN, "#### 48", "#### 24", "none", "corrected"]
    places = [problem.prompt.index(text) for text in shown]
    assert places == sorted(places) and problem.answer == "24"
