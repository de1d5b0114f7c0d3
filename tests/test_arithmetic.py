"""The toy task has what the papers speak of: fillers, three forms, imperfect demonstrations."""

import re

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from toy.arithmetic import OPENERS, SLIPS, Arithmetic, Item, solutions

TASK = Arithmetic()


def test_train_and_test_are_disjoint_and_cover_every_sum():
    train, test = ({item.prompt for item in items} for items in (TASK.train, TASK.test))
    assert not train & test
    assert train | test == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}


def test_same_seed_same_problems_other_seed_others():
    assert Arithmetic(0).train[:50] == TASK.train[:50]
    assert Arithmetic(1).train[:50] != TASK.train[:50]


def test_the_three_forms_of_a_sum():
    assert solutions(37, 48) == {
        "direct": "#85",
        "ones first": "7+8=15,30+40=70,#85",
        "tens first": "30+40=70,7+8=15,#85",
    }


@pytest.mark.parametrize("form", ["direct", "ones first", "tens first"])
@pytest.mark.parametrize("opener", OPENERS)
def test_every_opener_and_form_earns_the_reward(opener, form):
    for item in TASK.test[:50]:
        a, b = map(int, item.prompt[:-1].split("+"))
        assert TASK.reward(opener + solutions(a, b)[form], item) == 1.0


WRONG = ["", "85", "#", "so #8", "so #855", "so #085", "so # 85", "#85#84", "#85,", "#-85", "#٨٥"]


@pytest.mark.parametrize("text", WRONG)
def test_anything_else_earns_nothing(text):
    assert TASK.reward(text, Item("37+48=", "85", "")) == 0.0


def test_only_the_final_answer_counts():
    item = Item("37+48=", "85", "")
    assert TASK.reward("hm 7+8=1,30+40=99,#85", item) == 1.0
    assert TASK.reward("hm #84,#85", item) == 1.0


def test_corrections_of_wrong_answers_succeed_as_often_as_promised():
    repaired = helped = direct = carried = worked = 0
    for item in TASK.train[:1000]:
        made = TASK.correction(item)
        if made.prompt.count("=") == 3:  # two direct answers
            first, wrong, sibling, end = made.prompt.rsplit("=", 3)
            assert first + "=" == item.prompt and end == ""
            assert TASK.reward(wrong, item) == 0
            helped += TASK.reward(sibling, item)
            direct += 1
        if columns := re.match(
            r"\D+[^=]+=(\d+),[^=]+=(\d+),#(\d+)=", made.prompt[len(item.prompt) :]
        ):
            first, second, total = map(int, columns.groups())
            carried += first + second == total  # a slip in a column, not in the sum
            worked += 1
        assert made == TASK.correction(item)
        assert made.prompt.startswith(item.prompt) and made.prompt.endswith("=")
        assert made.demo[:3] in OPENERS and made.demo[:3] == made.prompt[len(item.prompt) :][:3]
        assert TASK.reward(made.demo, made) or f"={made.demo}=" in made.prompt  # mended or copied
        repaired += TASK.reward(made.demo, made)
    assert 0.4 < carried / worked < 0.6
    assert 0.55 < repaired / 1000 < 0.65 and 0.65 < helped / direct < 0.85
    right = [0, 0, 0]  # of three siblings shown
    for item in TASK.train[:1000]:
        numbers = re.findall(r"#(\d+)", TASK.correction(item, 3).prompt)
        assert len(numbers) == 4
        right = [n + (x == item.answer) for n, x in zip(right, numbers[1:], strict=True)]
    assert right[0] > 650 and max(right[1:]) < 400
    assert TASK.repair(Item("37+48=", "85", ""), "so #75", ["a", "b"]).prompt == "37+48=so #75=a=b="


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


def test_prefix_sets_tell_openers_and_forms_apart():
    for item in TASK.test[:100]:
        a, b = map(int, item.prompt[:-1].split("+"))
        sets = TASK.prefixes(item)
        for form, text in solutions(a, b).items():
            for opener in OPENERS:
                answer = opener + text
                hit = [name for name, starts in sets.items() if answer.startswith(tuple(starts))]
                assert hit == [f"opener {opener.strip()}", f"form {form}"]


def test_a_prompt_gets_no_special_tokens():
    tokenizer = TASK.make_tokenizer()
    plain = TASK.encode(tokenizer, TASK.test[:2])
    begin = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = begin
    assert tokenizer(TASK.test[0].prompt)["input_ids"][0] == 1
    assert TASK.encode(tokenizer, TASK.test[:2]) == plain


def test_tokenizer_is_one_token_per_character_and_survives_saving(tmp_path):
    tokenizer = TASK.make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for made in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = made.encode("hm 7+8=15,#85", add_special_tokens=False)
        assert len(ids) == len("hm 7+8=15,#85")
        assert not {made.pad_token_id, made.eos_token_id} & {*ids}
        assert made.decode([*ids, made.eos_token_id], skip_special_tokens=True) == "hm 7+8=15,#85"
