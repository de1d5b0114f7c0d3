"""Single faults in losses.py and in the trainer (faults.py): claims and tests let none through."""

import ast
import os

import pytest
from faults import (
    FAULTS,
    INDICES,
    LOSSES,
    ON_CPU,
    ROOT,
    RULES,
    TRAINER,
    UNSEEN,
    by_rule,
    find_edits,
    losses,
    plant,
    read,
    trainer_tests_fail,
    unit_tests_fail,
    verify_says,
)

pytestmark = pytest.mark.filterwarnings("ignore:std")  # a fault that accepts groups of one

LONG = os.environ.get("LONG")
TRAINER_FAULTS = [(path, fault) for path, faults in TRAINER.items() for fault in faults]
SEEN = [fault for fault in FAULTS if fault.name not in UNSEEN]
SOME = SEEN if LONG else SEEN[::8]  # all of them: make test-faults

EXAMPLE = '''
LIMIT = 3


class Counter:
    """A docstring with self.n + 1 in it."""

    step: int = 1

    def __init__(self, n=0, *, limit=LIMIT):
        self.n, self.limit = n, limit

    def count(self, by=None):
        self.n += (
            by or self.step  # one line
        )
        self.n = min(self.n, self.limit)
        return self.n


TABLE = {"two-more": Counter(2), "none": Counter()}
'''


@pytest.fixture(scope="module")
def survivors():
    """The faults that the claims alone do not see."""
    return [fault for fault in SOME if not verify_says(plant(LOSSES, fault), fault.where)]


@pytest.fixture
def example(tmp_path):
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE)
    return path


def test_the_right_version_passes():
    assert verify_says(losses) == "" and not unit_tests_fail(losses)


def test_there_are_many_different_faults_in_every_function():
    names, edits = {fault.name for fault in FAULTS}, {fault[1:] for fault in FAULTS}
    assert len(names) == len(edits) == len(FAULTS) >= 263 + len(UNSEEN)
    functions = {
        name
        for name, x in vars(losses).items()
        if getattr(x, "__module__", "") == "losses" and callable(x)
    }
    assert functions <= {fault.where for fault in SEEN}
    assert UNSEEN.keys() <= names


def test_formatting_comments_and_docstrings_do_not_matter(tmp_path):
    tree = ast.parse(LOSSES.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body[0].value.value = "Another docstring."
    path = tmp_path / "losses.py"
    path.write_text(ast.unparse(tree))  # without comments, line breaks and parentheses
    trees = ast.parse(LOSSES.read_text()), ast.parse(path.read_text())
    for fault in FAULTS:
        here, there = (
            [(ast.dump(old), ast.dump(new)) for old, new in find_edits(tree, fault)]
            for tree in trees
        )
        assert here == there, fault
    assert list(by_rule(read(RULES), path)) == list(by_rule(read(RULES), LOSSES))
    assert verify_says(plant(path, FAULTS[0]), FAULTS[0].where)


@pytest.mark.parametrize(
    "line, result",
    [
        ("LIMIT: smaller: 3 => 1", lambda x: x.Counter().count(9) == 1),
        ("Counter: large steps: step=2", lambda x: x.Counter().count() == 2),
        ("Counter: no limit: min(x_, y_) => x_", lambda x: x.Counter().count(9) == 9),
        ("Counter.__init__: starts late: n=5, limit=7", lambda x: x.Counter().count() == 6),
        ("Counter.count: forgets: self.n += x_ => pass", lambda x: x.Counter().count() == 0),
        ("Counter.count: always 1: by or x_ => x_", lambda x: x.Counter().count(2) == 1),
        ("TABLE.two-more: three more: 2 => 3", lambda x: x.TABLE["two-more"].n == 3),
    ],
)
def test_a_fault_is_planted_in_any_file(example, line, result):
    [fault] = read(line)
    assert result(plant(example, fault))


@pytest.mark.parametrize(
    "line, message",
    [
        ("Counter.count: wrong: self.m => 0", "'Counter.count: wrong'.* self.m is there 0 times"),
        ("Counter.count: wrong: self.n => 0", "'Counter.count: wrong'.* self.n is there 4 times"),
        ("Counter.sum: wrong: self.n => 0", "'Counter.sum: wrong'.* Counter.sum is there 0 times"),
        ("TABLE.one: wrong: 2 => 3", "'TABLE.one: wrong'.* TABLE.one is there 0 times"),
        ("Counter.count: wrong: to=3", "'Counter.count: wrong'.* lacks one of these defaults"),
    ],
)
def test_a_fault_without_its_place_is_named(example, line, message):
    [fault] = read(line)
    with pytest.raises(ValueError, match=message):
        plant(example, fault)


def test_the_claims_alone_see_nine_in_ten(survivors):
    assert len(survivors) <= len(SOME) / (10 if LONG else 6), survivors  # some vary more than all


def test_the_unit_tests_see_the_rest(survivors):
    assert [f.name for f in survivors if not unit_tests_fail(plant(LOSSES, f), f.where)] == []


def test_the_faults_of_the_trainer_are_many_and_have_their_places():
    assert len({fault[1:] for _, fault in TRAINER_FAULTS}) == len(TRAINER_FAULTS) > 150
    for path, fault in TRAINER_FAULTS:
        assert find_edits(ast.parse((ROOT / path).read_text()), fault), fault


def test_the_pretended_gpu_sees_what_is_left_on_the_cpu():
    """Indices of a tensor on the GPU may be there. All faults: make test-faults."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401  once, not in each forked process

    faults = [(path, f) for path, f in ON_CPU if LONG or not f.name.startswith(INDICES)]
    assert len(faults) > 20
    for path, fault in faults if LONG else faults[::12]:
        seen = trainer_tests_fail(path, fault, "pretended_cuda")
        assert bool(seen) != fault.name.startswith(INDICES), fault.name


@pytest.mark.skipif(not LONG, reason="an hour: make test-faults")
def test_the_tests_of_the_trainer_see_every_fault_in_it():
    assert trainer_tests_fail() == ""
    assert [f.name for path, f in TRAINER_FAULTS if not trainer_tests_fail(path, f)] == []


@pytest.mark.skipif(not LONG, reason="a minute: make test-faults")
def test_what_is_called_unseen_is_not_seen():
    unseen = [(fault, plant(LOSSES, fault)) for fault in FAULTS if fault.name in UNSEEN]
    assert [f.name for f, module in unseen if verify_says(module) or unit_tests_fail(module)] == []
