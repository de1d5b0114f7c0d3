#!/bin/bash
# verl's best@N is not pass@N.
#
# One would guess: val-core/.../best@8/mean with 8 answers a prompt is the share of prompts with a
#   right answer among the 8, the pass@8 that papers, lm-eval and lighteval report.
# What is so: verl draws N of the N answers *with* replacement, 1,000 times, and averages the best.
#   A prompt with one right answer among 8 counts 1 - (7/8)^8 = 0.66, not 1; for N below the
#   number of answers it lies below the unbiased pass@N as well. worst@N is too high likewise.
# Why: verl/trainer/ppo/metric_utils.py:840 (replace=True). Its docstring says "bootstrap samples";
#   the log says best@8.
# Who is hurt: whoever compares best@8 with a pass@8 from elsewhere, or asks whether RL "only
#   sharpens" what the model can do. Where right answers gather on fewer prompts, pass@8 falls and
#   best@8 rises, as the last two lines show (counts that we made up).
# Instead: write the rewards out (trainer.validation_data_dir) and count, or use the unbiased formula
#   1 - C(n-c, k)/C(n, k).
# Versions: verl 0.9.1 (with those of its dependencies that the function's import needs), torch
#   2.13.0, transformers 5.10.4, Python 3.11. Seen on 2026-11-28:
#   every prompt: 1 of 8 right           : mean 0.125, best@4 0.41 (pass@4 0.50), best@8 0.65 (pass@8 1.00)
#   before: 1 of 8 right for 36, 0 for 4 : mean 0.113, best@4 0.37 (pass@4 0.45), best@8 0.59 (pass@8 0.90)
#   after: 4 of 8 right for 32, 0 for 8  : mean 0.400, best@4 0.75 (pass@4 0.79), best@8 0.80 (pass@8 0.80)
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q torch==2.13.0
venv/bin/pip install -q torch==2.13.0 transformers==5.10.4 tensordict==0.10.0 \
    ray==2.49.2 omegaconf==2.4.0
venv/bin/pip install -q --no-deps verl==0.9.1
cat > see.py <<'P'
from importlib.metadata import version
from math import comb

from verl.trainer.ppo.metric_utils import process_validation_metrics

ANSWERS = 8


def both(right):
    """verl's best@k and the unbiased pass@k of prompts, each with right[i] right answers of 8."""
    rewards = [float(j < r) for r in right for j in range(ANSWERS)]
    prompts = [f"prompt {i}" for i in range(len(right)) for _ in range(ANSWERS)]
    metrics = process_validation_metrics(["data"] * len(rewards), prompts, {"reward": rewards})
    best = {k: metrics["data"]["reward"][f"best@{k}/mean"] for k in (4, 8)}
    passed = {k: sum(1 - comb(ANSWERS - r, k) / comb(ANSWERS, k) for r in right) / len(right)
              for k in (4, 8)}
    mean = metrics["data"]["reward"]["mean@8"]
    return mean, best, passed


print("verl", version("verl"))
print("expected: best@k is pass@k")
seen = []
for name, right in [
    ("every prompt: 1 of 8 right           ", [1] * 40),
    ("before: 1 of 8 right for 36, 0 for 4 ", [1] * 36 + [0] * 4),
    ("after: 4 of 8 right for 32, 0 for 8  ", [4] * 32 + [0] * 8),
]:
    mean, best, passed = both(right)
    seen.append((best, passed))
    print(f"{name}: mean {mean:.3f}, best@4 {best[4]:.2f} (pass@4 {passed[4]:.2f}), "
          f"best@8 {best[8]:.2f} (pass@8 {passed[8]:.2f})")
(one, _), (before, passed_before), (after, passed_after) = seen
as_told = abs(one[8] - (1 - (7 / 8) ** 8)) < 0.03
as_told &= after[8] > before[8] and passed_after[8] < passed_before[8]
raise SystemExit(0 if as_told else "this has changed")
P
venv/bin/python see.py 2> log || { tail -n 3 log; exit 1; }
