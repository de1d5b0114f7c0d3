"""Someone who reads one step from start to end needs few files and few short functions."""

import ast
import sys
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from helpers import run

import train

ROOT = Path(train.__file__).parent
SHORT_LINES = ("train.py", "losses.py", "llm/policy.py")


@cache
def find(code) -> tuple[str, str] | None:
    """File and name of one of our functions."""
    path = Path(code.co_filename)
    inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in (".venv", "tests")
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no co_qualname
    return (str(path.relative_to(ROOT)), name) if inside else None


def trace(folder, steps: int) -> tuple[Counter, Counter]:
    """How often each of our functions is called in a run, and by which functions of other files."""
    calls, between_files = Counter(), Counter()

    def profile(frame, event, _):
        if event != "call" or not (function := find(frame.f_code)):
            return
        calls[function] += 1
        caller = frame.f_back
        while caller and not find(caller.f_code):
            caller = caller.f_back
        if caller and find(caller.f_code)[0] != function[0]:
            between_files[find(caller.f_code), function] += 1

    args = ["--steps", steps, "--schedule", "constant", "--eval-every", 100]
    sys.setprofile(profile)
    try:
        run(folder, *args)
    finally:
        sys.setprofile(None)
    return calls, between_files


def test_a_step_takes_few_functions_files_and_calls_between_files(tmp_path, easy, scratch):
    """What is called more often in a run of 5 steps than in one of 2, comprehensions left out.

    The reward is the test's own. `scratch` has imported what would be imported under the trace.
    """
    (short, short_pairs), (long, long_pairs) = (trace(tmp_path / f"{n}", n) for n in (2, 5))
    functions = [f for f in long if long[f] > short[f] and "<" not in f[1].split(".")[-1]]
    pairs = [pair for pair in long_pairs if long_pairs[pair] > short_pairs[pair]]
    assert len(functions) <= 39, functions
    assert len({file for file, _ in functions}) <= 5
    assert len(pairs) <= 23, pairs
    assert ("train.py", "learn") in functions and len(functions) > 15  # the trace saw something


def functions_of(file: str) -> list[ast.FunctionDef]:
    tree = ast.parse((ROOT / file).read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_the_functions_of_the_trainer_are_short_and_take_and_return_little():
    for f in functions_of("train.py"):
        args = f.args.posonlyargs + f.args.args + f.args.kwonlyargs
        assert f.end_lineno - f.lineno + 1 <= 45 and len(args) <= 5, f.name
        values = [x.value for x in ast.walk(f) if isinstance(x, ast.Return)]
        assert all(len(x.elts) <= 3 for x in values if isinstance(x, ast.Tuple)), f.name


@pytest.mark.parametrize("file", SHORT_LINES)
def test_lines_are_short(file):
    assert max(map(len, (ROOT / file).read_text().splitlines())) <= 100


def test_there_are_few_flags_and_three_files_at_the_root():
    assert len(fields(train.Config)) <= 34
    assert {path.name for path in ROOT.glob("*.py")} == {"train.py", "losses.py", "verify.py"}
