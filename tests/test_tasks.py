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

from llm.gsm8k import GSM8K, extract
from llm.gsm8k import Item as Problem
from toy.arithmetic import Arithmetic, Item

TASK, ITEM = Arithmetic(), Item("37+48=", "85", "")


def test_problems_are_all_sums_split_in_one_order():
    prompts = [item.prompt for item in TASK.test + TASK.train]
    assert sorted(prompts) == [f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)]
    assert len(TASK.test) == 500 and len({prompt[:2] for prompt in prompts[:500]}) == 90
    assert Arithmetic().train == TASK.train


def test_only_the_final_answer_counts():
    for text in ("#85", "so 7+8=15,30+40=70,#85", "hm 7+8=1,#85", "hm #84,#85"):
        assert TASK.reward(text, ITEM) == 1
    for text in ("", "85", "#", "#8", "#855", "#085", "# 85", "#85#84", "#85,", "#٨٥"):
        assert TASK.reward(text, ITEM) == 0


def test_demonstrations_are_mostly_direct_mostly_wrong_and_fit_the_budget():
    direct = [item for item in TASK.train if "=" not in item.demo]
    assert len(direct) / len(TASK.train) == pytest.approx(0.75, abs=0.02)
    assert 0.03 < fmean(TASK.reward(item.demo, item) for item in direct) < 0.07
    assert all(TASK.reward(item.demo, item) for item in {*TASK.train} - {*direct})
    assert max(len(item.demo) for item in TASK.train) + 1 <= 26


def test_corrections_of_wrong_answers_succeed_as_often_as_promised():
    """The demonstration keeps the first answer's opener. It mends that answer, or copies it."""
    repaired = right = 0
    for item in TASK.train[:1000]:
        made = TASK.correction(item, 3)
        wrong, sibling, *_ = re.findall(r"#(\d+)", made.prompt)
        first = made.prompt.removeprefix(item.prompt)
        assert wrong != item.answer == made.answer and made.demo[:3] == first[:3]
        assert TASK.reward(made.demo, made) or first.startswith(f"{made.demo}=")
        repaired += TASK.reward(made.demo, made)
        right += sibling == item.answer
    assert 550 < repaired < 650 and 700 < right < 900
    assert TASK.repair(ITEM, "so #75", ["a", "b"]) == Item("37+48=so #75=a=b=", "85", "")


def test_shares_tell_openers_and_forms_apart():
    texts = "so #85;so #1;ok 7+8=15,30+40=70,#85;hm 30+1=2;hm 7+9=16;oh 37+48;;so".split(";")
    assert [*TASK.shares([ITEM] * 8, texts).items()] == [
        *(("opener so", 3 / 8), ("opener ok", 1 / 8), ("opener hm", 2 / 8), ("opener other", 2 / 8)),
        *(("form direct", 2 / 8), ("form ones first", 2 / 8), ("form tens first", 1 / 8)),
        ("form other", 3 / 8),
    ]


# ---------------- GSM8K: the verifier

REAL = Path(os.environ.get("GSM8K_DATA", Path(__file__).parents[2] / "shared" / "gsm8k"))


@pytest.mark.skipif(not (REAL / "train.jsonl").exists(), reason=f"no GSM8K files in {REAL}")
def test_every_gold_answer_of_the_real_files_is_read():
    task = GSM8K(str(REAL))
    assert (len(task.train), len(task.test)) == (7473, 1319)
    for item in task.train + task.test:
        _, _, gold = item.demo.rpartition("#### ")
        assert item.answer == gold and extract(item.demo) == gold.replace(",", "")
        assert task.reward(item.demo, item) == 1 and "<<" not in item.demo


# A text, its lines separated by "|", and the number that is read; "nothing" where it is refused.
READS = r"""
#### 41|no:|#### 72 -> 72
####|72|Checked 3 times. -> 72
#### 72|####|#### Check: done in 3 steps -> 72
#### Step 1: add|5+3=8|#### 2. Halve it|8/2=4|#### 3 - Answer|The answer is 4. -> 4
#### 72||Question: Tom has 2 cats.|Answer:|#### 5 -> 72
Question: Tom has 2 cats.|Answer:|#### 5 -> 5
#### Final Answer|$\boxed{\$72}$, after 3 steps -> 72
#### $\boxed{72}$|Checked 3 times. -> 72
first \boxed{3}, then \boxed{\text{about {all} of }72} of 90 -> 72
5 \boxed{} -> nothing
\boxed{.5 -> .5
\boxed{\frac{3}{4}} -> nothing
\boxed{5, 72} -> nothing
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
(a+b)^2 -> nothing
72 m**2 -> nothing
$72{,}000{,}500$ -> 72000500
\boxed{72\,000} -> 72000
72,\!000 -> 72000
72 000 -> nothing
72 500 -> nothing
72\quad 500 -> nothing
3\,4 -> nothing
12,34 -> nothing
0,123 -> nothing
72.5.1 -> nothing
...72 -> nothing
,72 -> nothing
x72 -> nothing
72½ -> nothing
72 ½ -> nothing
72² -> nothing
7_2 -> nothing
72٣ -> nothing
72e3 -> nothing
7.2 \times 10^{1} -> nothing
7 \times 10 -> nothing
\sqrt{72} -> nothing
3/4 -> nothing
3 / 4 -> nothing
3 * 4 -> nothing
12:30 -> nothing
72k -> nothing
72 million -> nothing
#### 2nd step -> nothing
10 - 7 = -3 -> -3
#### USD -72 -> -72
-.5 -> -.5
"""


@pytest.mark.parametrize("row", READS.strip().split("\n"))
def test_reads(row):
    text, _, number = row.rpartition(" -> ")
    for marked in (text, f"#### {text}"):
        assert str(extract(marked.replace("|", "\n"))).replace("None", "nothing") == number
