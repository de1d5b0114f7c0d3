"""Grade the exercises: PASS or NOT YET for every function, and what to look at.

    python -m exercises.grader 6       grade exercise 6; the path of a copy of it works, too
    python -m exercises.grader         how far you are

The file runs in a second process, which answers one call at a time (process.py). The right answers
are computed here. Exit code 0: all functions pass. 1: some do not yet. 2: a wrong command line.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import types
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import losses
from claims import CLAIMS, TOLERANCE, Missing, examine
from exercises import process
from exercises.claims import EXERCISES as OWN_CLAIMS
from exercises.contract import draw_trees
from exercises.mistakes import EXERCISES, Question
from exercises.process import CutOff, SecondProcess, decode, defined_names, encode, find_leaf
from llm import fail

FOLDER = Path(__file__).parent
CLAIM_ERROR = re.compile(r"^(?:AssertionError|RuntimeError|CutOff): ")


@dataclass
class Verdict:
    """What a student is told about one function."""

    function: str
    state: str  # PASS, NOT YET, blank
    lines: list[str] = field(default_factory=list)


class Student:
    """The functions of a student's file. Each call is answered by the second process.

    A result has the student's value, and its gradient by the first argument that asks for one.
    """

    def __init__(self, file: str, second_process: SecondProcess):
        self.file = file
        self.second_process = second_process

    def __getattr__(self, function: str):
        if function in ("Batch", "OldPolicy"):
            return getattr(losses, function)
        return partial(self.call, function)

    def answer(self, function: str, arguments: tuple, options: dict) -> dict:
        """As process.call's. Raises CutOff if there is none."""
        request = {"function": function, "arguments": encode(arguments), "options": options}
        reply = self.second_process.ask(self.file, **request)
        if not is_answer(reply):
            raise CutOff("sent no answer")
        return reply

    def call(self, function: str, *arguments, **options):
        reply = self.answer(function, arguments, options)
        if "blank" in reply:
            raise Missing(function)
        if "error" in reply:
            refused = reply["error"].startswith("ValueError")
            raise (ValueError if refused else RuntimeError)(reply["error"])
        value, gradient = decode(reply["value"]), decode(reply["gradient"])
        if gradient is None:
            return value
        leaf = find_leaf(arguments)
        return value.detach() + (gradient * (leaf - leaf.detach())).sum()


def is_answer(reply: dict) -> bool:
    """Whether a reply is one of process.call's, so that it can be compared and shown."""
    if reply.keys() != {"value", "gradient"}:
        return list(reply) in (["error"], ["blank"]) and isinstance(*reply.values(), str)
    try:
        gradient = decode(reply["gradient"])
        show_value(decode(reply["value"]))
    except Exception:  # decode raises what torch does
        return False
    return gradient is None or isinstance(gradient, Tensor)


# ---------------- comparing


def are_close(yours, right, floor: float) -> bool:
    """Whether two values of one shape agree; floor: see Question."""
    try:
        x, y = (torch.as_tensor(decode(v), dtype=torch.float64) for v in (yours, right))
    except (TypeError, ValueError, RuntimeError):
        return False
    if x.shape != y.shape:
        return False
    near = (x - y).abs() <= TOLERANCE * y.abs().clamp(min=floor)
    return bool((near | (x == y) | (x.isnan() & y.isnan())).all())


def dtype_of(answer: dict) -> torch.dtype | None:
    """None for what is no tensor."""
    return getattr(decode(answer["value"]), "dtype", None)


def is_undefined(answer: dict) -> bool:
    """Whether a number was divided by 0: an error of Python, or torch's nan."""
    if "error" in answer:
        return answer["error"].startswith("ZeroDivisionError")
    value = decode(answer["value"])
    return getattr(value, "shape", ()) == () and value != value


def agree(yours: dict, right: dict, floor: float) -> bool:
    """Whether two answers are the same: the kind of error, or the value and its gradient."""
    if is_undefined(yours) and is_undefined(right):
        return True
    if "error" in yours or "error" in right:
        kinds = ["error" in x and re.split("[: ]", x["error"])[0] for x in (yours, right)]
        return kinds[0] == kinds[1]
    if dtype_of(right) and dtype_of(yours) != dtype_of(right):
        return False
    gradients = [answer["gradient"] for answer in (yours, right)]
    if None in gradients and gradients[0] is not gradients[1]:
        return False
    same_gradient = gradients[0] is None or are_close(*gradients, 1.0)
    return same_gradient and are_close(yours["value"], right["value"], floor)


def answer_with(function, arguments: tuple) -> dict:
    """What a function of ours answers, as a student's would."""
    module = types.SimpleNamespace(f=function, __file__="")
    return process.call(module, "f", encode(arguments), {})


def holds_nan(answer: dict) -> bool:
    """Whether a number was divided by 0 anywhere in an answer."""
    value = decode(answer.get("value"))
    return is_undefined(answer) or isinstance(value, Tensor) and bool((value != value).any())


def find_hint(question: Question, yours: list[dict], right: list[dict], failing: int) -> str:
    """The hint of a mistake that is in these answers and shows at this input, "" if none does.

    A mistake is in them if they are the same as its own wherever it is wrong. If there is none,
    answers with a nan are left out: a missing guard may stand beside another mistake.
    """
    defined = [k for k, answer in enumerate(yours) if not holds_nan(answer)]
    for places in (range(len(yours)), defined):
        for mistake in question.mistakes:
            theirs = [answer_with(mistake, arguments) for arguments in question.inputs]
            wrong = [k for k in places if not agree(theirs[k], right[k], question.floor)]
            if failing in wrong and all(agree(yours[k], theirs[k], question.floor) for k in wrong):
                return mistake.__doc__
    return ""


# ---------------- grading


def grade(student: Student, question: Question) -> Verdict:
    """Small inputs first, then the claims about the function, on random ones."""
    verdict = Verdict(question.function, "PASS")
    if question.right:
        verdict = compare(student, question)
    if verdict.state == "PASS":
        verdict = check_claims(student, question)
    return verdict


def compare(student: Student, question: Question) -> Verdict:
    """The student's function beside the right one, on inputs from small to large."""
    name = question.function
    right = [answer_with(question.right, arguments) for arguments in question.inputs]
    yours = []
    for arguments in question.inputs:
        try:
            yours.append(student.answer(name, arguments, {}))
        except CutOff as trouble:
            line = f"with      {show_arguments(question, arguments)}"
            return Verdict(name, "NOT YET", [line, f"yours     no answer: {trouble}"])
        if len(yours) == 1 and "blank" in yours[0]:
            return blank_verdict(name, yours[0])
        if "blank" in yours[-1]:
            yours[-1] = {"error": "NotImplementedError"}
    for k, arguments in enumerate(question.inputs):
        if not agree(yours[k], right[k], question.floor):
            lines = show_difference(question, arguments, yours[k], right[k])
            hint = find_hint(question, yours, right, k) or guess(yours[k], right[k])
            return Verdict(name, "NOT YET", [*lines, *([hint] if hint else [])])
    return Verdict(name, "PASS")


def blank_verdict(name: str, reply: dict) -> Verdict:
    return Verdict(name, "blank", [reply["blank"]] if reply["blank"] else [])


def guess(yours: dict, right: dict) -> str:
    """A hint where no known mistake gives these answers."""
    if "error" in right:
        reason = right["error"].partition(": ")[2]
        return f"The exercise asks to refuse this with a ValueError: {reason}."
    if "error" in yours:
        return ""
    if yours["value"] is None:
        return "Your function returns nothing. Did you print instead of return?"
    parts = decode(yours["value"])
    if isinstance(parts, list) and any(isinstance(part, Tensor) for part in parts):
        return "This is no tensor. w.min(dim=1) gives a pair (values, indices): take its .values."
    if dtype_of(right) and not dtype_of(yours):
        return "A tensor is asked for."
    if dtype_of(right) and dtype_of(yours) != dtype_of(right):
        return f"Your result is {dtype_of(yours)}, but the input is {dtype_of(right)}."
    if yours["gradient"] and not right["gradient"]:
        return "Your result has a gradient. Return it detached."
    if are_close(yours["value"], right["value"], 1e5):
        return "The two are nearly the same. Did you add an epsilon, or is a part float32?"
    return ""


def check_claims(student: Student, question: Question) -> Verdict:
    """All claims that verify.py makes about this function, on the student's one."""
    name, held, lines = question.function, [], []
    for claim in (*CLAIMS, *OWN_CLAIMS):
        if name not in claim.functions:
            continue
        outcome = examine(student, claim, name, draw_trees(0)[claim.group_size])
        if claim in OWN_CLAIMS and outcome.evidence.rows:
            lines = show_table(["weight", "tax", "cosine"], outcome.evidence.rows)
        if outcome.state == "missing":
            arguments = question.inputs[0] if question.inputs else ()
            return blank_verdict(name, student.answer(name, arguments, {}))
        if outcome.state == "wrong":
            where = f"Small inputs are right. On random ones claim {claim.id} fails: "
            message = CLAIM_ERROR.sub("", outcome.message)
            message = where + message if question.right else sentence(message)
            is_open = not question.right and "CutOff" not in outcome.message
            hint = recognise(student, question) if is_open else []
            return Verdict(name, "NOT YET", [*lines, message, *hint])
        held.append(claim.id)
    if question.right:
        lines.append(f"Right on random inputs, too (claims: {', '.join(held)}).")
    return Verdict(name, "PASS", lines)


def recognise(student: Student, question: Question) -> list[str]:
    """The hint of a mistake that gives the student's values, where a claim alone decides."""
    for mistake in question.mistakes:
        for arguments in question.inputs:
            try:
                yours = student.answer(question.function, arguments, {})
            except CutOff:
                return []
            theirs = answer_with(mistake, arguments)
            if "value" not in yours or not are_close(yours["value"], theirs["value"], 1.0):
                break
        else:
            return [mistake.__doc__]
    return []


def grade_file(second_process: SecondProcess, number: int, file: str) -> list[Verdict]:
    """One verdict for each function of an exercise.

    Raises RuntimeError for a file that cannot be loaded.
    """
    try:
        second_process.ask(file)
    except CutOff as trouble:
        raise RuntimeError(f"{file}: {trouble} while it was loaded") from None
    student = Student(file, second_process)
    return [grade(student, question) for question in EXERCISES[number].questions]


# ---------------- printing


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text[-1:] in '.?!' else '.'}"


def show_value(value, digits: int = 4) -> str:
    """A number, list, tensor or name as a student would write it."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(show_value(x, digits) for x in value)}]"
    if isinstance(value, float):
        text = f"{value + 0.0:.{digits}g}"  # + 0.0: no -0
        return f"{text}.0" if text.lstrip("-").isdigit() else text
    if isinstance(value, str):
        return f'"{value}"'
    return f"a {value.type}" if hasattr(value, "type") else str(value)


def show_batch(batch: losses.Batch) -> str:
    """The ratios and the advantages of a batch; a point is padding."""
    ratios = (batch.logp - batch.logp_old).exp().tolist()
    rows = []
    for row, mask in zip(ratios, batch.mask.tolist(), strict=True):
        cells = [show_value(x) if inside else "." for x, inside in zip(row, mask, strict=True)]
        rows.append(f"[{', '.join(cells)}]")
    adv = show_value(batch.adv.masked_fill(~batch.mask, 0.0)[:, 0])
    return f"r = [{', '.join(rows)}], A = {adv}, L = {batch.max_tokens}"


def show_arguments(question: Question, arguments: tuple) -> str:
    """The arguments of a call with their names. Lines that are too long are divided."""
    parts = []
    for name, value in zip(inspect.signature(question.right).parameters, arguments, strict=False):
        is_batch = isinstance(value, losses.Batch)
        parts.append(show_batch(value) if is_batch else f"{name} = {show_value(value, 6)}")
    joint = ", ".join(parts)
    return joint if len(joint) < 86 else ",\n              ".join(parts)


def show_answer(answer: dict, arguments: tuple, digits: int) -> str:
    """A result; of a loss also its token coefficients, and of a weight whether it is detached."""
    if "error" in answer:
        return answer["error"]
    value, gradient = decode(answer["value"]), decode(answer["gradient"])
    text = show_value(value, digits)
    if dtype_of(answer) is None:
        return text
    if isinstance(arguments[0], losses.Batch):
        if gradient is None:
            return f"loss {text}, without a gradient"
        coefficients = show_value(-len(arguments[0].logp) * gradient, digits)
        return f"loss {text}, coefficients {coefficients}"
    if find_leaf(arguments) is not None:
        text += ", detached" if gradient is None else ", with a gradient"
    return text


def show_difference(question: Question, arguments: tuple, yours: dict, right: dict) -> list[str]:
    """The input, and both answers with as many digits as tell them apart."""
    expected = mine = ""
    for digits in (4, 10, 17):
        expected, mine = (show_answer(answer, arguments, digits) for answer in (right, yours))
        if expected != mine:
            break
    if "error" in right:
        expected = "a ValueError"
    lines = [f"with      {show_arguments(question, arguments)}"]
    return [*lines, f"yours     {mine}", f"expected  {expected}"]


def show_table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["".join(f"{cell:16}" for cell in row).rstrip() for row in (head, *rows)]


# ---------------- the command line


def path_of(number: int) -> Path:
    """The working file of an exercise."""
    path = next(FOLDER.glob(f"{number:02}_*.py"), None)
    if not path:
        fail(f"there is no exercises/{number:02}_*.py; `git restore exercises` brings it back")
    return path


def title_of(number: int) -> str:
    path = path_of(number)
    source = path.read_text(errors="replace")
    heading = re.search(rf"^# {number}\. (.*?)(?: \(.*)?$", source, re.MULTILINE)
    return heading[1] if heading else path.stem


def find_exercise(argument: str) -> tuple[int, str]:
    """The number and the file of an exercise, from either. A mistake ends the program."""
    for number in EXERCISES:
        if argument.lstrip("0") == str(number):
            return number, str(path_of(number))
    try:
        if not Path(argument).is_file():
            fail(f"there is no exercise {argument}; accepted: 1 to {len(EXERCISES)}, or a file")
        names = defined_names(argument)
    except OSError as error:
        fail(f"cannot read {argument}: {error.strerror}")
    for number, exercise in EXERCISES.items():
        if names & {question.function for question in exercise.questions}:
            return number, argument
    fail(f"{argument} defines none of the functions that the exercises ask for")


def show_exercise(number: int, verdicts: list[Verdict]) -> None:
    print(f"Exercise {number}: {title_of(number)}")
    for verdict in verdicts:
        print(f"\n  {verdict.function}  {verdict.state}")
        for line in verdict.lines:
            print(f"    {line}")
    print()
    if any(verdict.state != "PASS" for verdict in verdicts):
        return
    print(f"Why it is so: python verify.py --explain {EXERCISES[number].claim}")
    if number + 1 in EXERCISES:
        print(
            f"Next: {number + 1}. {title_of(number + 1)}, in exercises/{path_of(number + 1).name}"
        )
        print(f"      make exercise N={number + 1}")
    else:
        print("This was the last exercise. Which ones are still open: make exercises")


def show_progress(second_process: SecondProcess) -> None:
    """One line for each exercise, then the first that is still open."""
    todo = []
    for number in EXERCISES:
        note = ""
        try:
            verdicts = grade_file(second_process, number, str(path_of(number)))
            states = [verdict.state for verdict in verdicts]
            state = states[0] if len({*states}) == 1 else "NOT YET"
            if state != "PASS" and "PASS" in states:
                note = f"{states.count('PASS')} of {len(states)} functions pass"
        except RuntimeError as error:
            state, note = "NOT YET", str(error).partition(": ")[2]
        if state != "PASS":
            todo.append(number)
        print(f"{number:3}  {title_of(number):45} {state:8} {note}".rstrip())
    print(f"\n{len(EXERCISES) - len(todo)} of {len(EXERCISES)} pass.", end="")
    print(f" Next: make exercise N={todo[0]}" if todo else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = fail
    parser.add_argument("exercise", nargs="?", help="its number, or the path of a copy of it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sys.stdout.reconfigure(errors="backslashreplace")  # a file's text may be no Unicode
    second_process = SecondProcess()
    try:
        if options.exercise is None:
            show_progress(second_process)
            return 0
        number, file = find_exercise(options.exercise)
        verdicts = grade_file(second_process, number, file)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        second_process.stop()
    show_exercise(number, verdicts)
    return 0 if all(verdict.state == "PASS" for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
