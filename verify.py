"""Every claim about token gradient cancellation, checked to the last digit; and a loss of your own.

    python verify.py                  all claims, and which losses cancel when
    python verify.py C9 c22b          these: what they say, their proofs, and whether they hold
    python verify.py symbols          what the letters mean
    python verify.py mine.py eps=0.1  the page on a loss of your own, or on a method

A claim is a short function in claims/. It compares what autograd says of a loss with a formula, on
24 random prefix trees: 1 to 3 prompts with 2 to 16 answers each, on-policy and off-policy, inside
and outside the clip range. Three more trees are steep (ratios of 20), wide (64 answers whose
rewards nearly agree) and long (300 tokens). Some claims are proved but not measured.

HOLDS: so many numbers agree, and the largest error is this. Exit code 0: all claims hold, and one
of them checks each function of METHODS.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import torch

import losses
from claims import CLAIMS, evidence, report
from claims.cancellation import AUDIT, REGIMES, net_push
from claims.control_variate import noise_table
from claims.evidence import Tree, random_trees
from claims.formulas import fitting

PROOFS = Path(__file__).parent / "claims" / "PROOFS.md"


def check(id_: str, trees: list[Tree]) -> str:
    """HOLDS, or the first thing that is wrong."""
    claim, names = CLAIMS[id_]
    errors = []
    for name in names:
        evidence.errors.clear()
        for tree in trees:
            tree.generator.manual_seed(tree.seed)  # the same numbers, whatever was checked before
            try:
                claim(name, tree)
            except (AssertionError, ValueError, RuntimeError) as error:
                return f"WRONG for {name}, {tree.name}: {error}"
        if not evidence.errors:
            return f"WRONG for {name}: nothing was compared"
        errors += evidence.errors
    return f"HOLDS, {len(errors):,} numbers, largest error {max(errors):.0e}"


def unchecked() -> set[str]:
    """The functions of METHODS that no claim checks."""
    parts = {x.__name__ for m in losses.METHODS.values() for x in losses.functions(m)}
    return parts.difference(*(names for _, names in CLAIMS.values()))


def explanations() -> dict[str, str]:
    """What each claim says, where it is from, and its proof; and the symbols."""
    _, *sections = PROOFS.read_text("utf-8").split("\n## ")
    texts = {title: text.strip() for title, _, text in (x.partition("\n") for x in sections)}
    for id_, (claim, _) in CLAIMS.items():  # its docstring has more than the short claim (>)
        proof = re.sub("^>.*\n", "", texts.get(id_, ""), flags=re.M)
        texts[id_] = f"{inspect.getdoc(claim)}\n\n{proof}"
    return texts


def print_table(title: str, head: list[str], rows: list[list]):
    print(f"\n{title}\n")
    for row in (head, ["---"] * len(head), *rows):
        print("|", *(f"{x if isinstance(x, str) else format(x + 1e-9, '.3f')} |" for x in row))


def print_tables(trees: list[Tree]):
    rows = [[x, *(net_push(fitting(x), trees, *y) for y in REGIMES.values())] for x in AUDIT]
    title = "Net push at a fully shared token, |sum c| / sum |c|. 0: cancels, 1: all push one way"
    print_table(title, ["loss", *REGIMES], rows)
    title = "C27: the noise with a prefix baseline over the noise without it, 4 visitors, b = 0.5"
    print_table(title, ["the token", "t", "(1 - t) n/(n - 1)", "measured"], noise_table())


def main(words: list[str]) -> int | None:
    if words and words[0] in ("-h", "--help"):
        return print(__doc__)
    torch.set_num_threads(1)
    texts = explanations()
    known = {id_.lower(): id_ for id_ in texts}
    if words and words[0].lower() not in known:
        name, *hyper = words
        report.print_page(name, dict(x.partition("=")[::2] for x in hyper))
        return 0
    trees, missed = random_trees(), [f"no claim checks {name}" for name in unchecked()]
    for id_ in [known[word.lower()] for word in words] or CLAIMS:
        verdict = check(id_, trees) if id_ in CLAIMS else "proved, not measured"
        if "WRONG" in verdict:
            missed.append(f"{id_}  {verdict}")
        statement, _, rest = texts[id_].partition("\n\n")
        print(f"\n{id_}  {verdict}\n{statement}" + f"\n\n{rest}" * bool(words))
    if not words:
        print_tables(trees)
    print("", *missed, f"{len(missed)} failures", sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
