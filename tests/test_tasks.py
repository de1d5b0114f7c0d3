"""To whoever trusts a reward: what each task pays for, and which problems it holds out.

GSM8K's own files are read where they are: $GSM8K_DATA, or ../shared/gsm8k.
"""

import os
import re
import string
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from conftest import ANN, BOB, PROBLEMS, TOY
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from experiments import format_reward
from llm.unpack import split_as_trained
from tasks.gsm8k import GSM8K, Item, extract
from tasks.table import read_pairs

SUMS = format_reward.Task()
ITEMS = {item.prompt: item for task in (TOY, SUMS) for item in task.test + task.train}


def test_problems_are_all_sums_and_always_the_same_are_held_out():
    found = {}
    for task, numbers in ((TOY, range(10, 100)), (SUMS, range(2, 30))):
        prompts = [item.prompt for item in task.test + task.train]
        sums = sorted(tuple(map(int, re.findall("[0-9]+", prompt))) for prompt in prompts)
        assert sums == [*product(numbers, numbers)]
        found[prompts[0]] = len(task.test)
    assert found == {"25+60=": 500, "What is 4 + 18?": 200}


# ---------------- the toy


def test_only_the_final_answer_of_the_toy_counts():
    texts = "#85;hm #84,#85;7+8=1,#85;;85;#;#8;#855;#085;# 85;#85#84;#85,;#٨٥".split(";")
    assert [TOY.reward(text, ITEMS["37+48="]) for text in texts] == [1] * 3 + [0] * 10


def test_a_direct_demonstration_is_mostly_a_wrong_guess_and_a_worked_one_is_right():
    demos = [("=" in item.demo, TOY.reward(item.demo, item)) for item in TOY.test + TOY.train]
    assert Counter(demos) == {(False, 0): 5806, (False, 1): 289, (True, 1): 2005}


@pytest.mark.parametrize(
    "problem, demo",
    [
        ("10+10=so #21=hm 0+0=0,10+10=20,#20=", "so #20"),
        # A slip in a column, carried into the sum. The demonstration is a copy, on purpose.
        ("56+78=hm 50+60=110,6+8=14,#124=ok 50+70=120,", "hm 50+60=110,6+8=14,#124"),
    ],
)
def test_the_warm_start_of_ibpo_shows_an_answer_and_siblings_and_corrects_the_answer(problem, demo):
    made = TOY.correction(ITEMS[problem[:6]], 3)
    assert made.prompt.startswith(problem) and made.prompt.count("#") == 4 and made.demo == demo


def test_shares_tell_openers_apart():
    texts = "so #85;so #1;ok 7+8=15,30+40=70,#85;hm 30+1=2;hm 7+9=16;oh 37+48;;so".split(";")
    assert [share * 8 for share in TOY.shares([], texts).values()] == [3, 1, 2]


# ---------------- GSM8K and sums: the verifier

REAL = Path(os.environ.get("GSM8K_DATA", Path(__file__).parents[2] / "shared" / "gsm8k"))


@pytest.mark.skipif(not (REAL / "train.jsonl").exists(), reason=f"no GSM8K files in {REAL}")
def test_every_gold_answer_of_the_real_files_is_read():
    task = GSM8K(str(REAL))
    assert (len(task.train), len(task.test)) == (7473, 1319)
    for item in task.train + task.test:
        assert extract(item.demo) == item.answer.replace(",", "")


# A text, and the number that is read, or None where it is refused. "|" parts lines.
READS = r"""
#### 72 clips; 2 months -> 72
#### 72, i.e. 6 dozen -> 72
#### 72|#### 2 steps were used -> 72
#### 72 (48 + 24) -> 72
#### 72/1 -> None
The answer is 72 (see step 3). -> 72
So Ann has 72.||Q: What is 2+2?|A: 4 -> 72
So Ann has 72.||**Question:** Tom has 2 cats. -> 72
So Ann has 72.||Human: Tom has 2 cats and 3-4 dogs. -> 72
\boxed{48 + 24 = 72} -> 72
#### 72元 -> 72
因此，总共有72个苹果。 -> 72
####|72|Checked 3 times. -> 72
##### -$72.50 a year|or 6 a month -> -72.50
#### Step 1|#### 2. Add|#### 3 - Halve|#### 4) 5|#### 6 parts: done|The answer is 72. -> 72
#### Rs. 72 each|Checked 3 times. -> 72
#### \textbf{72}|Checked 3 times. -> 72
#### Final Answer|$\boxed{\$72}$, after 3 steps -> 72
Again:|Question: Tom has 2 cats.|Answer:|#### 72 -> 72
first \boxed{3}, then \boxed{\text{about {all} of }72} of 90 -> 72
within \boxed{}, so 3 of it|is 5 -> 5
is 5|72 -> 72
**Answer**: $1,234,567.50 a year. It took 3 steps. -> 1234567.50
The answer is 36 clips * 2 = 72 -> 72
48/2=24 -> 24
48/2 =24 -> 24
<<48/2=24>>25 -> 25
x -> 72 -> 72
The answer is clear after 3 steps:|72 -> 72
The answer is 3, no:|#### 72 -> 72
---|72 -> 72
It weighs 72kg. -> 72
72, in other digits ٤٣ -> 72
the area is $72\,\text{m}^{2}$ -> 72
$72{,}000{,}500$ -> 72000500
72,\!000 -> 72000
72 500 -> 72500
.5 -> .5
He calls 10 times|72 -> 72
72 000 -> None
72, 000 -> None
72\quad 500 -> None
3\,4 -> None
0,123 -> None
1234,567 -> None
72.5.1 -> None
...72 -> None
,72 -> None
#### A72 -> None
72 ½ -> None
72e3 -> None
7 \times 10 -> None
7 \cdot 10 -> None
\boxed{144 \div 2} -> None
\sqrt{72} -> None
\boxed{\frac{3}{4}} -> None
10^2 -> None
(a+b)^2 -> None
3/4 -> None
3 / 4 -> None
3* 4 -> None
3 * 4 -> None
3 x 4 -> None
#### 72, 73 -> None
#### 3/4 of 72 -> None
5 apples times 4 -> None
72k -> None
72 million -> None
72万 -> None
#### 2nd -> None
It is −72 -> -72
It is negative 72 -> -72
It is $-72 -> -72
-.5 -> -.5
－$72 -> -72
–**72** -> -72
10 - 82 = -72 -> -72
#### Minus $72 -> -72
#### USD -72|in 3 steps -> -72
#### -USD 72 -> -72
It is -₹ 72 -> None
It is -<b>72</b> -> None
5–3 -> None
#### 5 – 3 -> None
5 apples - 3 -> None
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


# ---------------- GSM8K: the problems

ROWS = [
    Item(ANN, "24", "48/2=24, so 24 left.\n#### 24"),
    Item(BOB, "4,800", "4*1200 = $4800\n#### 4,800"),
]


def test_items_hold_question_gold_and_solution_without_calculator_marks(small_gsm8k, monkeypatch):
    hub = {("openai/gsm8k", "main"): {"train": PROBLEMS, "test": PROBLEMS[:1]}}
    monkeypatch.setattr("datasets.load_dataset", lambda *names: hub[names])
    for task in (GSM8K(small_gsm8k), GSM8K(None)):
        assert (task.train, task.test) == (ROWS, ROWS[:1])


def test_a_chat_model_is_asked_in_its_template(small_gsm8k):
    task = GSM8K(small_gsm8k)
    task.train.append(Item(string.printable, "", ""))
    tokenizer = task.make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<ai>{% endif %}"
    chat = tokenizer.decode(task.encode(tokenizer, ROWS)[1])
    assert chat == f"<user>{BOB}\nReason step by step; end with '#### ' and the number.<ai>"
    assert tokenizer.decode(SUMS.encode(tokenizer, ROWS)[1]) == f"<user>{BOB}<ai>"


def test_a_correction_problem_shows_all_answers_and_is_graded_as_the_question():
    problem = GSM8K.repair(None, ROWS[0], "48 left.\n#### 48", ["24 left.\n#### 24", "none"])
    assert re.search("Ann has 48.*#### 48.*#### 24.*none.*correct", problem.prompt, re.DOTALL)
    assert problem.answer == "24"


# ---------------- tables, beside test_own.py


def test_of_several_usual_columns_the_more_usual_counts_and_no_digit_is_lost():
    columns = {"input": ["no"], "Question": ["?"], "label": ["no"], "answer": [1234567.5]}
    assert read_pairs(Dataset.from_dict(columns), "") == [("?", "1234567.5")]


# ---------------- SmolLM2


def test_white_space_before_a_number_is_one_token_as_in_the_models_training():
    vocabulary = {token: i for i, token in enumerate(["a", "Ġ", "Ċ", "1", "2", "12", "ĊĊ"])}
    bpe = models.BPE(vocabulary, [("Ċ", "Ċ"), ("1", "2")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(bpe))
    split_as_trained(tokenizer)
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
