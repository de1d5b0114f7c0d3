"""Every claim about token gradient cancellation, checked to the last digit on a policy that is
known exactly.

    python verify.py                           all claims, the audit of all methods, and the price of cancelling
    python verify.py --only C9 C17             some of them
    python verify.py --explain C14             what a claim says, and why it is so
    python verify.py --losses my_losses.py     grade what another file defines, by the contract of losses.py
    python verify.py --losses exercises/06_min_replace.py
    python verify.py --markdown                the tables for the README

The claims themselves are in claims.py and claims_neighbours.py, one short function each. Each is checked on many random
prefix trees: 1 to 3 prompts, 2 to 16 answers each, of unequal length, on- and off-policy, inside and outside the clip
range, garbage in the padding. The table says what was predicted by hand and measured by autograd where the two are
furthest apart, and the largest error of all draws. "left" is the average size of what remains when the condition of a
HOLDS ONLY IF is dropped, or by how much a FAILS AS STATED is wrong.

Exit code 0: every verdict is the expected one; 1: some are not; 2: a wrong command line.
"""

from __future__ import annotations

import argparse
import inspect
import math
import multiprocessing
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import losses
from claims import cancellation as c
from claims import neighbours as n
from claims.cancellation import ALL, AUDIT, DFPO, NEIGHBOURS, REGIMES
from claims.trees import Draw
from exercises import claims as x

DRAWS = 24  # random trees per claim
TOLERANCE = 1e-10  # of |measured - predicted| / max(1, |predicted|), float64
NOTICEABLE = 1e-6  # what a dropped condition must leave, on average over the draws
PATIENCE = 20  # seconds that a student's function may take for one claim


@dataclass(frozen=True)
class Claim:
    id: str
    check: Callable  # (module, name of the function it speaks of, draws, evidence) -> None
    functions: tuple[str, ...]  # of losses.py
    verdict: str = "HOLDS"
    condition: str = ""  # under which it holds, or why it fails
    group_size: int | None = None  # of the draws; None: 2 to 16

    @property
    def text(self) -> tuple[str, str, str]:
        """What it shows, its source, and the derivation."""
        statement, source, *why = self.check.__doc__.strip().split("\n")
        return statement, source.strip(), textwrap.dedent("\n".join(why)).strip("\n ")


TABLES = ("AUDIT", "C16", "N3", "N7", "A3", "X10")  # claims with a table of their own
ONLY_IF, FAILS = "HOLDS ONLY IF", "FAILS AS STATED"
FACTORISED = ("reinforce", "grpo_symmetric", "dr_grpo", "dapo")
CLAIMS = (
    Claim("M1", c.m1, (*ALL, *NEIGHBOURS)),
    Claim("M2", c.m2, (*ALL, *NEIGHBOURS)),
    Claim("M3", c.m3, ("group_advantages",)),
    Claim("M4", c.m4, ("METHODS",)),
    Claim("M5", c.m5, ("Batch", "OldPolicy")),
    Claim("M6", n.m6, ("nthr", "nthr_random")),
    Claim("M7", n.m7, ("METHODS",)),
    Claim("M8", n.m8, ("kept_tokens",)),
    Claim("C1", c.c1, ("token_coefficients",)),
    Claim("C2", c.c2, FACTORISED),
    Claim("C3", c.c3, ("grpo_symmetric", "dr_grpo"), group_size=2),
    Claim("C4", c.c4, ("sequence_ratio", "gspo")),
    Claim("C5a", c.c5a, ("sequence_ratio",)),
    Claim(
        "C5b",
        c.c5b,
        ("sequence_ratio",),
        FAILS,
        '"cancels only if all u_i are equal" is wrong for G > 2',
    ),
    Claim("C6", c.c6, ("grpo", "dr_grpo", "dapo")),
    Claim("C7", c.c7, ("grpo_symmetric", "dr_grpo"), ONLY_IF, "the min is dropped"),
    Claim(
        "C8",
        c.c8,
        ("grpo", "gspo", *FACTORISED),
        ONLY_IF,
        "all T_i are equal, or the normaliser is a common factor",
    ),
    Claim("C9", c.c9, ("min_replace", "dfpo_min")),
    Claim("C9e", c.c9e, DFPO),
    Claim(
        "C10",
        c.c10,
        ("adv_orthogonal", "dfpo_orthogonal"),
        ONLY_IF,
        "the whole group shares the token",
    ),
    Claim("C11", c.c11, DFPO, ONLY_IF, "the policy has not moved"),
    Claim("C12", c.c12, DFPO, ONLY_IF, "the weight is detached"),
    Claim("C13", c.c13, ("dr_grpo", "grpo_symmetric", "dfpo_min")),
    Claim("C14", c.c14, ("reinforce",), FAILS, "Eq. 5 needs score gradients of equal norm"),
    Claim(
        "C15",
        c.c15,
        ("learning_tax", "prefix_nodes", "dfpo_min"),
        ONLY_IF,
        "w is constant on the node",
    ),
    Claim(
        "C16",
        c.c16,
        ("sequence_ratio", *ALL),
        ONLY_IF,
        "on-policy, or the weight is the plain product",
    ),
    Claim("C17a", c.c17a, ("project",)),
    Claim("C17b", c.c17b, ("project",)),
    Claim("C17c", c.c17c, ("project",)),
    Claim("C17d", c.c17d, ("project",)),
    Claim("C17e", c.c17e, ("project",)),
    Claim("C17f", c.c17f, ("project",)),
    Claim("C17g", c.c17g, ("project", "prefix_nodes")),
    Claim("AUDIT", c.audit, tuple(AUDIT)),
    Claim("N1", n.n1, ("group_advantages",)),
    Claim("N2", n.n2, ("group_advantages",), ONLY_IF, "answers are counted, not tokens"),
    Claim("N3", n.n3, ("reinforce",)),
    Claim("N4", n.n4, ("nthr_scores",)),
    Claim("N5", n.n5, ("nthr_scores",)),
    Claim("N6", n.n6, ("nthr_scores",)),
    Claim("N7", n.n7, ("nthr",)),
    Claim("A1", n.a1, ("reinforce",)),
    Claim("A2", n.a2, ("advantage_reweighting",)),
    Claim("A3", n.a3, ("advantage_reweighting",)),
    Claim("A4", n.a4, ("lopti_low", "lopti_high")),
    Claim("A5", n.a5, ("METHODS",), ONLY_IF, "the step is small"),
    Claim("I1", n.i1, ("shaped_rewards",), ONLY_IF, "p > (weight bonus / 2)(1 - (1-p) q)"),
    Claim("I2", n.i2, ("ibpo",)),
    Claim("I3", n.i3, ("ibpo",)),
)
EXERCISES = (  # about functions that only exercises/ asks for
    Claim("X2", x.x2, ("shared_token_gradient",)),
    Claim("X3", x.x3, ("gate_is_open", "left_at_a_shared_token")),
    Claim("X5", x.x5, ("left_by_the_length", "an_accident")),
    Claim("X7", x.x7, ("blind_spot",)),
    Claim("X9", x.x9, ("counterexample", "change_of_log_odds")),
    Claim("X10", x.x10, ("weight",)),
)


# ---------------- one claim about one function


class Evidence:
    """What the draws said."""

    def __init__(self):
        self.error = 0.0  # largest |measured - predicted| / max(1, |predicted|)
        self.excess = (
            -1.0
        )  # the same over its tolerance: up to 1 is agreement, -1 is nothing compared
        self.pair = (math.nan, math.nan)  # predicted and measured where they are furthest apart
        self.lefts = []  # sizes of what is left when a condition is dropped, or of a statement's error
        self.cells = []  # a row of the audit, or of the price

    def equal(self, predicted, measured, tolerance: float = TOLERANCE) -> None:
        p, m = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (predicted, measured))
        if p.shape != m.shape:
            raise ValueError(f"a result of shape {tuple(m.shape)}; {tuple(p.shape)} was expected")
        if not p.numel():
            return
        errors = ((m - p).abs() / p.abs().clamp(min=1)).nan_to_num(math.inf).flatten()
        worst = errors.argmax()
        if errors[worst] / tolerance > self.excess:
            self.error, self.excess = float(errors[worst]), float(errors[worst]) / tolerance
            self.pair = (float(p.flatten()[worst]), float(m.flatten()[worst]))

    def left(self, size) -> None:
        self.lefts.append(torch.as_tensor(size, dtype=torch.float64).abs().mean().item())

    def raises(self, function: Callable, *args, **named) -> None:
        try:
            function(*args, **named)
        except ValueError:
            return
        raise AssertionError(f"{function.__name__} accepted what it must refuse with a ValueError")

    @property
    def remainder(self) -> float:
        return sum(self.lefts) / len(self.lefts) if self.lefts else math.nan


@dataclass
class Outcome:
    claim: str
    function: str
    state: str = "ok"  # ok, wrong, missing
    message: str = ""
    evidence: Evidence = field(default_factory=Evidence)


class Written:
    """The module under test. What it lacks is not yet written; Batch and OldPolicy are only
    containers and may be ours."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        if not hasattr(self.module, name):
            if name not in ("Batch", "OldPolicy"):
                raise NotImplementedError(name)
            return getattr(losses, name)
        return getattr(self.module, name)


def examine(module, claim: Claim, function: str, draws: list[Draw]) -> Outcome:
    """Whatever goes wrong in here is the function's, and no other function's."""
    outcome = Outcome(claim.id, function)
    e = outcome.evidence
    for d in draws:
        d.generator.manual_seed(d.seed)  # the same numbers, whichever claims were checked before
    try:
        L = Written(module)
        getattr(L, function)
        claim.check(L, function, draws, e)
    except NotImplementedError as error:
        needs = str(error).isidentifier() and str(error) != function
        outcome.state, outcome.message = (
            "missing",
            f"needs {error}, not yet written" if needs else "not yet written",
        )
    except (Exception, SystemExit) as error:
        outcome.state, outcome.message = "wrong", f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        if e.excess > 1:
            outcome.state, outcome.message = (
                "wrong",
                f"expected {e.pair[0]:.6g}, got {e.pair[1]:.6g}",
            )
        elif e.remainder < NOTICEABLE:
            outcome.state, outcome.message = "wrong", "what must differ here is the same"
    return outcome


class Draws(dict):
    """Random trees by group size (None: any), grown when first asked for."""

    def __init__(self, seed: int, count: int = DRAWS):
        self.seed, self.count = seed, count

    def __missing__(self, group_size: int | None) -> list[Draw]:
        self[group_size] = [Draw(self.seed, k, group_size) for k in range(self.count)]
        return self[group_size]


def verify(module, claims: Iterable[Claim], draws: Draws) -> Iterator[Outcome]:
    """Check claims on a module that keeps the contract of losses.py."""
    for claim in claims:
        for function in claim.functions:
            yield examine(module, claim, function, draws[claim.group_size])


# ---------------- the grader


TOP_LEVEL = re.compile(
    r"^(?:@.*\n)*(?:def|class) (\w+).*\n?(?:(?!@|def |class ).*\n?)*?(?=^@|^def |^class |\Z)",
    re.MULTILINE,
)


def mend(source: str) -> str:
    """Put a function that says so in the place of every one that has a syntax error; line numbers
    stay."""

    def check(block: re.Match) -> str:
        lines_above = source.count("\n", 0, block.start())
        try:
            compile("\n" * lines_above + block[0], "", "exec")
        except SyntaxError as error:
            stub = f"def {block[1]}(*_, **__): raise SyntaxError({f'{error.msg}, line {error.lineno}'!r})"
            return stub + "\n" * block[0].count("\n")
        return block[0]

    return TOP_LEVEL.sub(check, source)


def load(path: str):
    """A Python file as a module. An `import losses` in it finds the reference."""
    module = types.ModuleType("student")
    sys.modules["student"] = module  # where dataclasses look their module up
    source = Path(path).read_text()
    try:
        code = compile(source, path, "exec")
    except SyntaxError:
        code = compile(mend(source), path, "exec")
    exec(code, module.__dict__)
    return module


def defined(path: str) -> set[str]:
    """The names that a file gives a meaning at its top level, imports left out."""
    return set(re.findall(r"^(?:def |class )?(\w+)\s*[(:=]", Path(path).read_text(), re.MULTILINE))


def work(path: str, tasks: list[tuple[str, str]], seed: int, pipe) -> None:
    """In the second process: say hello, then what is wrong with the file ("": nothing), then all
    outcomes."""
    pipe.send("hello")
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # a print in a loss would be heard some hundred times
    try:
        module = load(path)
    except (Exception, SystemExit) as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send("")
    draws, by_id = Draws(seed), {claim.id: claim for claim in (*CLAIMS, *EXERCISES)}
    for id_, function in tasks:
        pipe.send(examine(module, by_id[id_], function, draws[by_id[id_].group_size]))


def grade(path: str, claims: Iterable[Claim], seed: int) -> Iterator[Outcome]:
    """`verify` on a stranger's file, in a second process, which can be killed whatever it is doing.

    Raises RuntimeError when the file cannot be loaded at all.
    """
    tasks = [(claim.id, function) for claim in claims for function in claim.functions]
    context = multiprocessing.get_context("spawn")

    def receive(seconds: float):
        if not here.poll(seconds):
            raise TimeoutError
        return here.recv()

    while tasks:
        here, there = context.Pipe(duplex=False)
        worker = context.Process(target=work, args=(path, tasks, seed, there), daemon=True)
        worker.start()
        there.close()
        loaded = False
        try:
            receive(60)  # a new process, which imports torch
            if trouble := receive(PATIENCE):
                raise RuntimeError(f"{path}: {trouble}")
            loaded = True
            while tasks:
                yield receive(PATIENCE)
                tasks.pop(0)
        except (TimeoutError, EOFError) as error:
            trouble = (
                f"cut off after {PATIENCE} s"
                if isinstance(error, TimeoutError)
                else "the process died"
            )
            if not loaded:
                raise RuntimeError(f"{path}: {trouble} while it was loaded") from None
            culprit = tasks[0][1]
            yield from (
                Outcome(id_, function, "wrong", trouble)
                for id_, function in tasks
                if function == culprit
            )
            tasks = [task for task in tasks if task[1] != culprit]
        finally:
            worker.kill()
            worker.join()


# ---------------- printing


def number(x: float) -> str:
    if math.isnan(x):
        return ""
    return "0" if x == 0 else f"{x:.4f}" if 1e-3 <= abs(x) < 1e4 else f"{x:.0e}"


def row(claim: Claim, outcomes: list[Outcome]) -> dict[str, str]:
    """A claim's line: the function and the draw with the largest error speak for it."""
    worst = max((o.evidence for o in outcomes), key=lambda e: e.excess)
    left = [o.evidence.remainder for o in outcomes if o.evidence.lefts]
    states = {o.state for o in outcomes}
    return {
        "verdict": "WRONG"
        if "wrong" in states
        else "NOT YET WRITTEN"
        if "missing" in states
        else claim.verdict,
        "predicted": number(worst.pair[0]),
        "measured": number(worst.pair[1]),
        "error": number(worst.error) if worst.excess >= 0 else "",
        "left": number(sum(left) / len(left)) if left else "",
    }


def where(function: str) -> str:
    """The function and its line in losses.py."""
    code = getattr(inspect.unwrap(getattr(losses, function, None)), "__code__", None)
    return f"{function}:{code.co_firstlineno}" if code else function


def tables(
    claims: list[Claim], outcomes: list[Outcome]
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """The tables below the claims: title, head, rows."""
    cells = {
        id_: [
            (o.function, o.evidence.cells) for o in outcomes if o.claim == id_ and o.evidence.cells
        ]
        for id_ in TABLES
    }
    if cells["AUDIT"]:
        rows = [
            [f, *("0" if x < TOLERANCE else f"{x:.3f}" for x in xs)] for f, xs in cells["AUDIT"]
        ]
        yield (
            "What is left at a token that the whole group shares, |sum c| / sum |c|",
            ["method", *REGIMES],
            rows,
        )
    if cells["C16"]:
        head = [
            f"{what} {when}"
            for when in ("on-policy", "off-policy", "projected")
            for what in ("cos", "norm")
        ]
        rows = [[f, *(f"{x:.3f}" for x in xs)] for f, xs in cells["C16"]]
        title = (
            "The price: expected update against the exact gradient (unbiased: cos 1, norm 0.667)"
        )
        yield title, ["method", *head], rows
    if cells["N3"]:
        title = "N3: what moves a correct answer's log-likelihood, mean over correct answers"
        yield (
            title,
            ["", "(I)", "(II)", "(III)", "(IV)", "GWHES"],
            [["mean", *(f"{x:.3f}" for x in cells["N3"][0][1])]],
        )
    if cells["N7"]:
        head = ["", "grpo lowers Delta", "nthr selects"]
        head += [
            f"above {other}, {how}"
            for how in ("1st order", "step 1")
            for other in ("grpo", "random")
        ]
        yield (
            "N7: share of 200 sampled groups; of those where nthr selects, its Delta above another's",
            head,
            [["share", *(f"{x:.3f}" for x in cells["N7"][0][1])]],
        )
    if cells["A3"]:
        names = ("tokens", "gradient, grpo", "gradient, A2")
        rows = [
            [name, *(f"{x:.3f}" for x in xs)]
            for name, xs in zip(names, cells["A3"][0][1], strict=True)
        ]
        title = "A3: share of tokens, and of the gradient's norm, by probability of the token, 200 sampled groups"
        yield title, ["", *(f"{k / 10:.1f}-{(k + 1) / 10:.1f}" for k in range(10))], rows
    if cells["X10"]:
        rows = [[name, f"{tax:.3f}", f"{cosine:.4f}"] for name, tax, cosine in cells["X10"][0][1]]
        yield "X10: the leaderboard, off-policy", ["weight", "tax", "cosine"], rows


def show(claims: list[Claim], outcomes: list[Outcome], grading: bool = False) -> None:
    print(
        f"{'claim':6}{'verdict':17}{'predicted':>11}{'measured':>11}{'error':>9}{'left':>9}   source"
    )
    for claim in claims:
        mine = [o for o in outcomes if o.claim == claim.id]
        r, (statement, source, _) = row(claim, mine), claim.text
        numbers = f"{r['predicted']:>11}{r['measured']:>11}{r['error']:>9}{r['left']:>9}"
        print(f"\n{claim.id:6}{r['verdict']:17}{numbers}   {source}")
        if not grading or all(
            o.state == "ok" for o in mine
        ):  # a claim may be the solution of an exercise
            print(f"      {statement}")
            if claim.condition:
                print(f"      {claim.verdict.capitalize()}: {claim.condition}.")
        if not grading:
            print(f"      losses.py: {' '.join(where(f) for f in claim.functions)}")
        for mark, state in (("!", "wrong"), ("?", "missing")):
            for message in dict.fromkeys(o.message for o in mine if o.state == state):
                print(
                    f"    {mark} {' '.join(o.function for o in mine if o.message == message)}: {message}"
                )
    for title, head, rows in tables(claims, outcomes):
        print(f"\n{title}")
        for name, *cells in [head, *rows]:
            print(f"{name:16}" + "".join(f"{cell:>{max(map(len, head)) + 2}}" for cell in cells))


def show_markdown(claims: list[Claim], outcomes: list[Outcome]) -> None:
    def table(head, rows):
        for cells in [head, ["---"] * len(head), *rows]:
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")

    lines = []
    for claim in claims:
        r, (statement, source, _) = (
            row(claim, [o for o in outcomes if o.claim == claim.id]),
            claim.text,
        )
        names = (
            "all methods"
            if set(ALL) <= set(claim.functions)
            else ", ".join(f"`{f}`" for f in claim.functions)
        )
        verdict = f"**{r['verdict']}** {claim.condition}".strip()
        lines.append(
            [
                claim.id,
                statement,
                source,
                names,
                r["predicted"],
                r["measured"],
                r["error"],
                r["left"],
                verdict,
            ]
        )
    table(
        [
            "claim",
            "what it shows",
            "source",
            "losses.py",
            "predicted",
            "measured",
            "error",
            "left",
            "verdict",
        ],
        lines,
    )
    for title, head, rows in tables(claims, outcomes):
        print(f"\n{title}:\n")
        table(head, rows)


def show_score(outcomes: list[Outcome]) -> None:
    """Claims passed per function."""
    print("\nscore")
    for function in dict.fromkeys(o.function for o in outcomes):
        mine = [o for o in outcomes if o.function == function]
        passed = sum(o.state == "ok" for o in mine)
        first = next((f"{o.claim}: {o.message}" for o in mine if o.state != "ok"), "")
        if all(o.state == "missing" for o in mine):
            first = "not yet written"
        print(f"  {function:20}{passed:3} of {len(mine):2}   {first}")
    print(f"  {'all':20}{sum(o.state == 'ok' for o in outcomes):3} of {len(outcomes)}")


def select(ids: list[str]) -> list[Claim]:
    """C17 stands for C17a to C17g. Raises ValueError for an id that names no claim."""
    known = (*CLAIMS, *EXERCISES)
    for id_ in ids:
        if not any(
            id_.lower() in (claim.id.lower(), claim.id.lower().rstrip("abcdefg")) for claim in known
        ):
            raise ValueError(
                f"there is no claim {id_}; there are {' '.join(claim.id for claim in known)}"
            )
    wanted = {id_.lower() for id_ in ids}
    return [
        claim for claim in known if wanted & {claim.id.lower(), claim.id.lower().rstrip("abcdefg")}
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="ID", help="check these claims only")
    parser.add_argument(
        "--explain", nargs="+", metavar="ID", help="print the derivation of these claims"
    )
    parser.add_argument("--losses", metavar="FILE", help="grade this file instead of losses.py")
    parser.add_argument("--markdown", action="store_true", help="print markdown tables")
    parser.add_argument("--seed", type=int, default=0, help="of the random trees (default 0)")
    options = parser.parse_args(arguments)
    try:
        if options.losses and not Path(options.losses).is_file():
            raise ValueError(f"there is no file {options.losses}")
        graded = (*CLAIMS, *EXERCISES) if options.losses else CLAIMS
        claims = select(options.explain or options.only or [claim.id for claim in graded])
        if options.losses:
            there = defined(options.losses)
            claims = [claim for claim in claims if there & {*claim.functions}]
            claims = [
                claim  # an exercise wants all of its functions
                if claim in EXERCISES
                else replace(claim, functions=tuple(f for f in claim.functions if f in there))
                for claim in claims
            ]
            if not claims:
                raise ValueError(
                    f"{options.losses} defines none of the functions that these claims are about"
                )
    except ValueError as error:
        print(f"verify.py: {error}", file=sys.stderr)
        return 2
    if options.explain:
        for claim in claims:
            statement, source, why = claim.text
            print(f"{claim.id}  {statement}\n{source}\n" + (f"\n{why}\n" if why else ""))
        return 0
    torch.set_num_threads(1)
    run = (
        grade(options.losses, claims, options.seed)
        if options.losses
        else verify(losses, claims, Draws(options.seed))
    )
    try:
        outcomes = list(run)
    except RuntimeError as error:
        print(f"verify.py: {error}", file=sys.stderr)
        return 1
    show_markdown(claims, outcomes) if options.markdown else show(
        claims, outcomes, bool(options.losses)
    )
    if options.losses:
        show_score(outcomes)
        contract = {f for claim in CLAIMS for f in claim.functions}
        if len(contract & there) > 3:  # more than an exercise asks for
            print(f"  {len(contract - there)} functions of the contract are not in this file")
    return 0 if all(o.state == "ok" for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
