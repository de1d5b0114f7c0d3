"""To whoever trusts a reward: what each task pays for, and which problems it holds out.

GSM8K's own files are read where they are: $GSM8K_DATA, or ../shared/gsm8k.
"""

import json
import os
import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from conftest import ANN, BOB, PROBLEMS

from experiments import format_reward
from llm.gsm8k import GSM8K, Item, extract
from llm.sums import Sums
from toy.arithmetic import Arithmetic

TOY, SUMS = Arithmetic(), Sums()


def find(task, prompt: str) -> Item:
    return next(item for item in task.test + task.train if item.prompt == prompt)


@pytest.mark.parametrize(
    "task, form, numbers, held_out, first",
    [
        (TOY, "{}+{}=", range(10, 100), 500, "25+60="),
        (SUMS, "What is {} + {}?", range(2, 30), 200, "What is 4 + 18?"),
    ],
)
def test_problems_are_all_sums_and_always_the_same_are_held_out(
    task, form, numbers, held_out, first
):
    prompts = [item.prompt for item in task.test + task.train]
    assert sorted(prompts) == sorted(form.format(*pair) for pair in product(numbers, numbers))
    assert len(task.test) == held_out and prompts[0] == first


# ---------------- the toy


def test_only_the_final_answer_of_the_toy_counts():
    texts = "#85;hm #84,#85;7+8=1,#85;;85;#;#8;#855;#085;# 85;#85#84;#85,;#٨٥".split(";")
    item = find(TOY, "37+48=")
    assert [TOY.reward(text, item) for text in texts] == [1] * 3 + [0] * 10


def test_a_direct_demonstration_is_mostly_a_wrong_guess_and_a_worked_one_is_right():
    demos = [("=" in item.demo, TOY.reward(item.demo, item)) for item in TOY.test + TOY.train]
    assert Counter(demos) == {(False, 0): 5806, (False, 1): 289, (True, 1): 2005}


@pytest.mark.parametrize(
    "problem, demo",
    [
        ("10+10=so #21=hm 0+0=0,10+10=20,#20=", "so #20"),
        # A slip in a column, carried into the sum. The demonstration is a copy, on purpose.
        ("56+78=hm 50+60=110,6+8=14,#124=ok 50+70=120,", "hm 50+60=110,6+8=14,#124"),
        ("99+99=hm 90+90=180,9+9=18,#196=hm #198=", "hm 90+90=180,9+9=18,#198"),
    ],
)
def test_the_warm_start_of_ibpo_shows_an_answer_and_siblings_and_corrects_the_answer(problem, demo):
    prompt = problem.partition("=")[0] + "="
    made = TOY.correction(find(TOY, prompt), 3)
    assert made.prompt.startswith(problem) and made.prompt.count("#") == 4 and made.demo == demo


def test_shares_tell_openers_and_forms_apart():
    texts = "so #85;so #1;ok 7+8=15,30+40=70,#85;hm 30+1=2;hm 7+9=16;oh 37+48;;so".split(";")
    shares = TOY.shares([find(TOY, "37+48=")] * 8, texts)
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
#### Step 1|#### 2. Add|#### 3 - Halve|#### 4) So|#### 5 parts: done|The answer is 72. -> 72
#### 72||Question: Tom has 2 cats.|Answer:|#### 5 -> 72
Again:|Question: Tom has 2 cats.|Answer:|#### 5 -> 5
#### Final Answer|$\boxed{\$72}$, after 3 steps -> 72
Thus\boxed{72} -> 72
is 5|72 -> 72
first \boxed{3}, then \boxed{\text{about {all} of }72} of 90 -> 72
x = 5, \boxed{} -> None
\boxed{.5 -> .5
\boxed{\frac{3}{4}} -> None
48/2=24, or <<48/2=24>>24 -> 24
x -> 72 -> 72
**Answer:** $1,234,567.50 a year. -> 1234567.50
The answer is **72**. -> 72
72, in other digits ٤٣ -> 72
#### Rs. 72 each|Checked 3 times. -> 72
#### \textbf{72}|Checked 3 times. -> 72
the area is $72\,\text{m}^{2}$ -> 72
#### 72 cm^3 -> 72
(a+b)^2 -> None
$72{,}000{,}500$ -> 72000500
72,\!000 -> 72000
72 \, 500 -> 72500
72 000 -> None
72, 000 -> None
72\quad 500 -> None
3\,4 -> None
0,123 -> None
72.5.1 -> None
...72 -> None
,72 -> None
#### A72 -> None
72 ½ -> None
72e3 -> None
7 \times 10 -> None
\sqrt{72} -> None
3/4 -> None
3 / 4 -> None
3 * 4 -> None
3* 4 -> None
72k -> None
72 million -> None
#### 2nd step -> None
#### USD -72 -> -72
It is ¬72 -> -72
¬$72 -> -72
¬**72** -> -72
¬72␣500 -> -72500
10 - 82 = ¬72 -> -72
#### Minus $72 -> -72
It is negative 72 -> None
#### ¬USD 72 -> -72
It is ¬₹ 72 -> None
It is (¬USD 72) -> None
It is ¬US$72 -> None
It is ¬<b>72</b> -> None
5¬3 -> None
5 ¬ 3 -> None
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
    assert tokenizer.decode(SUMS.encode(tokenizer, ITEMS)[1]) == f"<user>{BOB}<ai>"


def test_a_correction_problem_shows_all_answers_and_is_graded_as_the_question():
    problem = GSM8K.repair(None, ITEMS[0], "48 left.\n#### 48", ["24 left.\n#### 24", "none"])
    shown = re.findall("Ann has 48|#### 48|#### 24|none|correct", problem.prompt)
    assert shown == ["Ann has 48", "#### 48", "#### 24", "none", "correct"]
    assert problem.answer == "24"


# ---------------- sums


def test_the_last_number_of_a_sum_counts_and_a_word_in_front_has_its_bonus():
    texts = ["27 + 25 = 52.", "52", "It is 52", " It is 5", "27 + 25 = 42", "52 and 1", ""]
    item, task = find(SUMS, "What is 27 + 25?"), format_reward.Task()
    assert [SUMS.reward(text, item) for text in texts] == [1, 1, 1, 0, 0, 0, 0]
    assert [task.reward(text, item) for text in texts] == [1, 1, 1.1, 0.1, 0, 0, 0]
    assert task.shares([item] * 7, texts) == {"right": 3 / 7, "words": 2 / 7}
