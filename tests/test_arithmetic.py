"""The toy task has what the papers speak of: fillers, three forms, imperfect demonstrations."""

import re
from collections import Counter

import pytest
from transformers import AutoTokenizer

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
