"""To whoever trusts a reward: what both tasks pay for, and which problems they hold out.

GSM8K's own files are read where they are: $GSM8K_DATA, or ../shared/gsm8k.
"""

import json
import os
import re
import time
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest
from conftest import ANN, BOB, PROBLEMS

from experiments import format_reward
from llm.gsm8k import GSM8K, Item, extract
from llm.sums import Sums
from toy.arithmetic import Arithmetic, solutions

TASK = Arithmetic()
SUM = next(item for item in TASK.train + TASK.test if item.prompt == "37+48=")


def test_problems_are_all_sums_and_always_the_same_are_held_out():
    prompts = [item.prompt for item in TASK.test + TASK.train]
    assert sorted(prompts) == [f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)]
    assert len(TASK.test) == 500 and len({prompt[:2] for prompt in prompts[:500]}) == 90
    assert Arithmetic().train == TASK.train


def test_only_the_final_answer_counts():
    forms = "#85;7+8=15,30+40=70,#85;30+40=70,7+8=15,#85".split(";")
    assert [*solutions(37, 48).values()] == forms
    texts = "#85;hm #84,#85;7+8=1,#85;;85;#;#8;#855;#085;# 85;#85#84;#85,;#٨٥".split(";")
    assert [TASK.reward(text, SUM) for text in texts] == [1] * 3 + [0] * 10


def test_demonstrations_are_mostly_direct_mostly_wrong_and_fit_the_budget():
    direct = [item for item in TASK.train if "=" not in item.demo]
    assert 0.73 < len(direct) / len(TASK.train) < 0.77
    assert 0.03 < fmean(TASK.reward(item.demo, item) for item in direct) < 0.07
    assert all(TASK.reward(item.demo, item) for item in {*TASK.train} - {*direct})
    assert max(len(item.demo) for item in TASK.train) < 26  # with its end within --max-tokens


def test_corrections_of_wrong_answers_succeed_as_often_as_promised():
    """The demonstration keeps the first answer's opener. It mends that answer, or copies it."""
    repaired = right = 0
    for item in TASK.train[:1000]:
        made = TASK.correction(item, 3)
        wrong, sibling, *_ = re.findall(r"#(\d+)", made.prompt)
        first = made.prompt.removeprefix(item.prompt)
        assert made == TASK.correction(item, 3)
        assert wrong != item.answer == made.answer and made.demo[:3] == first[:3]
        mended = TASK.reward(made.demo, made)
        assert mended or first.startswith(f"{made.demo}=")
        repaired, right = repaired + mended, right + (sibling == item.answer)
    assert 550 < repaired < 650 and 700 < right < 900
    assert TASK.repair(SUM, "so #75", ["a", "b"]).prompt == "37+48=so #75=a=b="


def test_shares_tell_openers_and_forms_apart():
    texts = "so #85;so #1;ok 7+8=15,30+40=70,#85;hm 30+1=2;hm 7+9=16;oh 37+48;;so".split(";")
    shares = TASK.shares([SUM] * 8, texts)
    assert ", ".join(f"{name} {share * 8:.0f}" for name, share in shares.items()) == (
        "opener so 3, opener ok 1, opener hm 2, opener other 2, "
        "form direct 2, form ones first 2, form tens first 1, form other 3"
    )


# ---------------- GSM8K: the verifier

REAL = Path(os.environ.get("GSM8K_DATA", Path(__file__).parents[2] / "shared" / "gsm8k"))


@pytest.mark.skipif(not (REAL / "train.jsonl").exists(), reason=f"no GSM8K files in {REAL}")
def test_every_gold_answer_of_the_real_files_is_read():
    task = GSM8K(str(REAL))
    assert (len(task.train), len(task.test)) == (7473, 1319)
    for item in task.train + task.test:
        gold = item.demo.rpartition("#### ")[2]
        assert item.answer == gold and extract(item.demo) == gold.replace(",", "")


# A text, and the number that is read, or None where it is refused. "|" parts lines; "␣" is each of
# SPACES, and "¬" each of MINUS.
SPACES = "\u00a0\u2007\u2008\u2009\u200a\u202f"
MINUS = "-\u00ad\u2010\u2011\u2012\u2013\u2014\u207b\u2212\ufe58\ufe63\uff0d"
READS = r"""
#### 41|no:|#### $\boxed{72}$ -> 72
####|72|Checked 3 times. -> 72
#### 72|####|#### Check: done in 3 steps -> 72
#### Step 1|#### 2. Add|#### 3 - Halve|#### 4) So|#### 5 parts: done|The answer is 72. -> 72
#### 2 is what we divide by, because each of them gets a half|so 72 -> 72
#### 72||Question: Tom has 2 cats.|Answer:|#### 5 -> 72
Again:|Question: Tom has 2 cats.|Answer:|#### 5 -> 5
#### Final Answer|$\boxed{\$72}$, after 3 steps -> 72
Thus\boxed{72} -> 72
is 5|72 -> 72
first \boxed{3}, then \boxed{\text{about {all} of }72} of 90 -> 72
x = 5, \boxed{} -> None
\boxed{.5 -> .5
\boxed{\frac{3}{4}} -> None
\boxed{5, 72} -> None
48/2=24, or <<48/2=24>>24 -> 24
x -> 72 -> 72
**Answer:** $1,234,567.50 a year. -> 1234567.50
The answer is **72**. -> 72
72, in other digits ٤٣ -> 72
#### Rs. 72 each|Checked 3 times. -> 72
#### \textbf{72}|Checked 3 times. -> 72
#### 72\%|Checked 3 times. -> 72
#### 72 km/h.|Checked 3 times. -> 72
the area is $72\,\text{m}^{2}$ -> 72
#### 72 cm^3 -> 72
72 m² -> 72
(a+b)^2 -> None
72 m**2 -> None
$72{,}000{,}500$ -> 72000500
\boxed{72\,000} -> 72000
72,\!000 -> 72000
72 \, 500 -> 72500
72 000 -> None
72 500 -> None
72, 000 -> None
72\quad 500 -> None
3\,4 -> None
12,34 -> None
0,123 -> None
72.5.1 -> None
...72 -> None
,72 -> None
x72 -> None
#### A72 -> None
72½ -> None
72 ½ -> None
72² -> None
7_2 -> None
72٣ -> None
72e3 -> None
7.2 \times 10^{1} -> None
10^3 -> None
7 \times 10 -> None
7 x 3 -> None
\sqrt{72} -> None
3/4 -> None
3 / 4 -> None
3 * 4 -> None
3* 4 -> None
12:30 -> None
72k -> None
72 million -> None
#### 2nd step -> None
#### USD -72 -> -72
¬.5 -> -.5
72␣500 -> 72500
$1␣072␣500.5 -> 1072500.5
72␣50 -> None
72␣km -> 72
It is ¬72 -> -72
¬$72 -> -72
$¬72 -> -72
#### $¬72|Checked 3 times. -> -72
¬₹72 -> -72
¬\$72 -> -72
¬**72** -> -72
**¬72** -> -72
¬72␣500 -> -72500
x=¬72 -> -72
10 - 82 = ¬72 -> -72
$¬\boxed{72}$ -> -72
\boxed{¬72} -> -72
It is \boxed{¬\text{US\$}72} -> None
#### Minus $72 -> -72
#### &minus;72 -> -72
It is negative 72 -> None
#### ¬ 72 -> -72
#### ¬$␣72 -> -72
#### ¬USD 72 -> -72
#### ¬Rs. 72 -> -72
It is ¬ 72 -> None
It is ¬₹ 72 -> None
It is ¬USD 72 -> None
It is (¬USD 72) -> None
It is ¬US$72 -> None
It is ¬<b>72</b> -> None
It is ¬{72} -> -72
The total ¬ \boxed{72} -> None
5¬3 -> None
5 ¬ 3 -> None
5 ¬3 -> None
"""


@pytest.mark.parametrize("row", READS.strip().split("\n"))
def test_reads(row):
    text, _, number = row.rpartition(" -> ")
    for lead, space, minus in product(("", "#### "), SPACES, MINUS):
        spelt = text.replace("|", "\n").replace("␣", space).replace("¬", minus)
        assert str(extract(lead + spelt)) == number


def test_answers_are_right_if_the_numbers_are_equal_exactly():
    item = Item("", "1,800", "")
    texts = ("2\nso 1800.00", "none", "1800." + "0" * 40 + "1")
    assert [GSM8K.reward(None, text, item) for text in texts] == [1, 0, 0]


def test_time_grows_with_the_length_and_not_with_its_square():
    units = r"9 1, ,000 1* - # ####1. { {,} 1\, \boxed{ \text m^ $".split() + [" ", "1 ", "- "]
    seconds = []
    for length in (10_000, 80_000):  # seconds grow 8 times if linear, 64 times if quadratic
        start = time.process_time()
        for unit, lead, end in product(units, ("", "####", "####1"), ("", "1", "é")):
            extract(lead + unit * (length // len(unit)) + end)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 24 * seconds[0]


# ---------------- GSM8K: the problems

ITEMS = [
    Item(ANN, "24", "48/2=24, so 24 left.\n#### 24"),
    Item(BOB, "4,800", "4*1200 = $4800\n#### 4,800"),
]


def test_items_hold_question_gold_and_solution_without_calculator_marks(small_gsm8k, monkeypatch):
    hub = {("openai/gsm8k", "main"): {"train": PROBLEMS, "test": PROBLEMS[:1]}}
    monkeypatch.setattr("datasets.load_dataset", lambda *names: hub[names])
    for task in (GSM8K(small_gsm8k), GSM8K(None)):
        assert (task.train, task.test) == (ITEMS, ITEMS[:1])


@pytest.mark.parametrize("answer", ["1", "#### 42 of 60", "#### x42"])
def test_a_record_that_cannot_be_graded_is_named_in_one_line(small_gsm8k, answer):
    line = json.dumps({"question": "a", "answer": answer})
    Path(small_gsm8k, "test.jsonl").write_text(f"{json.dumps(PROBLEMS[0])}\n{line}")
    with pytest.raises(ValueError, match=r"^[^\n]*test\.jsonl:2: [^\n]*$"):
        GSM8K(small_gsm8k)


def test_sums_are_all_pairs_and_always_the_same_are_held_out():
    task, numbers = Sums(), range(2, 30)
    prompts = [item.prompt for item in task.test + task.train]
    assert sorted(prompts) == sorted(f"What is {a} + {b}?" for a, b in product(numbers, numbers))
    assert len(task.test) == 200 and Sums().train == task.train


def test_the_last_number_of_a_sum_counts_and_a_word_in_front_has_its_bonus():
    texts = ["27 + 25 = 52.", "52", "It is 52", " It is 5", "27 + 25 = 42", "52 and 1", ""]
    item = next(x for x in Sums().train + Sums().test if x.prompt == "What is 27 + 25?")
    assert [Sums().reward(text, item) for text in texts] == [1, 1, 1, 0, 0, 0, 0]
    task = format_reward.Task()
    assert [task.reward(text, item) for text in texts] == [1, 1, 1.1, 0.1, 0, 0, 0]
    assert task.shares([item] * 7, texts) == {"right": 3 / 7, "words": 2 / 7}


def test_a_chat_model_is_asked_in_its_template_and_others_in_plain_text(small_gsm8k):
    task = GSM8K(small_gsm8k)
    tokenizer = task.make_tokenizer()
    assert tokenizer.tokenize("4800") == [*"4800"]  # each digit a token, though 48 is frequent
    plain = tokenizer.decode(task.encode(tokenizer, ITEMS)[1])
    assert plain == f"Question: {BOB}\nAnswer:\n"
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<ai>{% endif %}"
    )
    chat = tokenizer.decode(task.encode(tokenizer, ITEMS)[1])
    assert chat == f"<user>{BOB}\nReason step by step; end with '#### ' and the number.<ai>"
    assert tokenizer.decode(Sums().encode(tokenizer, ITEMS)[1]) == f"<user>{BOB}<ai>"


def test_a_correction_problem_shows_all_answers_and_is_graded_as_the_question():
    problem = GSM8K.repair(None, ITEMS[0], "48 left.\n#### 48", ["24 left.\n#### 24", "none"])
    shown = re.findall("Ann has 48|#### 48|#### 24|none|correct", problem.prompt)
    assert shown == ["Ann has 48", "#### 48", "#### 24", "none", "correct"]
    assert problem.answer == "24"
