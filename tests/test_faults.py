"""Single faults in losses.py (faults.py): verify.py and the unit tests together let none of them
through."""

import os

import pytest
from faults import FAULTS, losses, patched, unit_tests_fail, verify_says

pytestmark = pytest.mark.filterwarnings("ignore:std")  # a fault that accepts groups of one


SOME = FAULTS if os.environ.get("LONG") else FAULTS[::8]  # all of them: make test-faults


@pytest.fixture(scope="module")
def survivors():
    """The faults that verify.py alone does not see."""
    return [(name, old, new) for name, old, new in SOME if not verify_says(*patched(old, new))]


def test_the_right_version_passes():
    assert verify_says(losses) == ""


def test_there_are_many_different_faults_in_every_function():
    names, patches = {name for name, _, _ in FAULTS}, {(old, new) for _, old, new in FAULTS}
    assert len(names) == len(patches) == len(FAULTS) >= 40
    hit = {patched(old, new)[1] for _, old, new in FAULTS}
    functions = {
        name
        for name, x in vars(losses).items()
        if getattr(x, "__module__", "") == "losses" and callable(x)
    }
    assert functions - hit <= {"Method"}


def test_verify_alone_sees_nine_in_ten(survivors):
    assert len(survivors) <= len(SOME) / 10, survivors


def test_the_unit_tests_see_the_rest(survivors):
    assert [name for name, old, new in survivors if not unit_tests_fail(*patched(old, new))] == []
