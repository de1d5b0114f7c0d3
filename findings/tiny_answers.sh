#!/bin/bash
# math-verify: below about 1e-16 every answer in scientific notation is right.
#
# One would guess: 4.97 x 10^-19 and 2.84 x 10^-19 differ, as 6.02 x 10^23 and 6.03 x 10^23 do. The
#   grader compares digits, not the distance from 0.
# What is so: two numbers in scientific notation are equal if they lie less than about 1e-16 apart,
#   whatever their signs and powers of ten. Two numbers written out, or percentages, are equal if
#   they round to the same six decimals.
# Why: math_verify/grader.py:179 asks for (a - b).evalf(chop=True, n=15) == 0, and `chop` turns a
#   small difference into 0. Line 166 rounds numbers written out to float_rounding=6 decimals.
# Who is hurt: RL with verifiable rewards on physics and chemistry in SI units (charges, masses and
#   energies of particles) and on tiny probabilities. Such a question pays for every answer
#   that is small enough: its mean reward is 1, and its group has no gradient. TRL 1.16.0's
#   accuracy_reward takes these defaults (trl/rewards/accuracy_rewards.py:100); run by hand, it pays
#   1 for the answers of the first two lines below. math-verify's issue 14 (closed) reports two
#   fractions.
# Instead: where the right answer is tiny, compare the quotient: abs(a / b - 1) < 1e-3, a and b from
#   parse(...)[0].evalf(). Another numeric_precision does not help: with 30, h and h-bar are equal;
#   with 50, 1.60 x 10^-19 and 16.0 x 10^-20 are not (both are checked below).
# Versions: math-verify 0.9.0, sympy 1.14.0, Python 3.11. Seen on 2026-11-28:
#   accepted for each other: 42 of 42
#   3.97 \times 10^{-19}  -3.97 \times 10^{-19}  True
#   3.97 \times 10^{-19}  3.97 \times 10^{-28}   True
#   6.63 \times 10^{-34}  9.11 \times 10^{-31}   True
#   \frac{1}{52!}         \frac{1}{51!}          True
#   0.0000012             0.0000014              True
#   0.0004\%              0.00042\%              True
#   3.97 \times 10^{-9}   2.84 \times 10^{-9}    False
#   6.02 \times 10^{23}   6.03 \times 10^{23}    False
#   3.97 \times 10^{-19}  39.7 \times 10^{-20}   True
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0
cat > see.py <<'P'
from importlib.metadata import version

from math_verify import parse, verify


def equal(right, answer, **how):
    return verify(parse(f"${right}$"), parse(f"${answer}$"), **how)


def scientific(x):
    digits, power = f"{x:.2e}".split("e")
    return rf"{digits} \times 10^{{{int(power)}}}"


print("math-verify", version("math-verify"), "sympy", version("sympy"))
energies = [scientific(6.626e-34 * 2.998e8 / (nm * 1e-9)) for nm in range(400, 701, 50)]
pairs = [(a, b) for a in energies for b in energies if a != b]
accepted = sum(equal(a, b) for a, b in pairs)
print(f"photons of 400, 450, ... 700 nm, energies in J, {energies[0]} to {energies[-1]}:")
print(f"accepted for each other: {accepted} of {len(pairs)} (expected: 0)")

print("right answer, answer, verify (expected: False but for the last line)")
seen = []
for right, answer in [
    (r"3.97 \times 10^{-19}", r"-3.97 \times 10^{-19}"),
    (r"3.97 \times 10^{-19}", r"3.97 \times 10^{-28}"),
    (r"6.63 \times 10^{-34}", r"9.11 \times 10^{-31}"),
    (r"\frac{1}{52!}", r"\frac{1}{51!}"),
    ("0.0000012", "0.0000014"),
    (r"0.0004\%", r"0.00042\%"),
    (r"3.97 \times 10^{-9}", r"2.84 \times 10^{-9}"),
    (r"6.02 \times 10^{23}", r"6.03 \times 10^{23}"),
    (r"3.97 \times 10^{-19}", r"39.7 \times 10^{-20}"),
]:
    seen.append(equal(right, answer))
    print(f"{right:21} {answer:22} {seen[-1]}")
as_told = accepted == len(pairs) and seen == [True] * 6 + [False] * 2 + [True]
as_told &= equal(r"6.63 \times 10^{-34}", r"1.05 \times 10^{-34}", numeric_precision=30)
as_told &= not equal(r"1.60 \times 10^{-19}", r"16.0 \times 10^{-20}", numeric_precision=50)
raise SystemExit(0 if as_told else "this has changed")
P
venv/bin/python see.py 2> log || { tail -n 3 log; exit 1; }
