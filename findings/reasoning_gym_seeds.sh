#!/bin/bash
# Data that repeats: two seeds of reasoning-gym that are neighbours are one data set, moved by one.
#
# One would guess: seed 42 for training and seed 43 for evaluation give different questions, and
#   ReseedingDataset, "infinite" by new seeds, gives new questions in each chunk.
# What is so: item i of a data set is drawn from Random(seed + i), so item i of seed 43 is item
#   i + 1 of seed 42. Of 95 data sets that were tried, 91 repeat in full. ReseedingDataset gives
#   chunk c the seed + c, so 1,000 draws in chunks of 100 hold 109 questions, not 1,000.
# Why: the data sets' __getitem__, as in reasoning_gym/arithmetic/chain_sum.py, and composite.py:127
#   (seed + idx); dataset.py:103 (seed + chunk number).
# Who is hurt: whoever evaluates on "another seed". The held-out score is the training score, and
#   a model that has learned its questions by heart looks as if it generalised.
# Instead: seeds that are further apart than both sizes (0 and 1,000,000). Count the questions in
#   common before the run.
# Versions: reasoning-gym 0.1.25, Python 3.11. Seen on 2026-11-28:
#   leg_counting     seeds 42 and 43: 100 of 100 in common, each as its neighbour; 1000042: 0
#   knights_knaves   seeds 42 and 43: 100 of 100 in common, each as its neighbour; 1000042: 0
#   basic_arithmetic seeds 42 and 43: 100 of 100 in common, each as its neighbour; 1000042: 0
#   word_sorting     seeds 42 and 43: 100 of 100 in common, each as its neighbour; 1000042: 0
#   ReseedingDataset, chunks of 100: 1000 draws, 109 different questions
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q reasoning-gym==0.1.25
cat > see.py <<'P'
from importlib.metadata import version

from reasoning_gym import create_dataset
from reasoning_gym.dataset import ReseedingDataset


def questions(name, seed, size):
    return [item["question"] for item in create_dataset(name, seed=seed, size=size)]


print("reasoning-gym", version("reasoning-gym"))
print("expected: (nearly) nothing in common; 1000 different questions")
as_told = True
for name in ["leg_counting", "knights_knaves", "basic_arithmetic", "word_sorting"]:
    train = questions(name, 42, 1000)
    near, far = questions(name, 43, 100), questions(name, 1_000_042, 100)
    common = sum(q in set(train) for q in near)
    moved = all(near[i] == train[i + 1] for i in range(100))
    rest = sum(q in set(train) for q in far)
    how = "each as its neighbour" if moved else "not as neighbours"
    print(f"{name:16} seeds 42 and 43: {common} of 100 in common, {how}; 1000042: {rest}")
    as_told &= moved and rest < 10
draws = iter(ReseedingDataset(create_dataset("leg_counting", seed=42, size=100), chunk_size=100))
different = len({next(draws)["question"] for _ in range(1000)})
print(f"ReseedingDataset, chunks of 100: 1000 draws, {different} different questions")
raise SystemExit(0 if as_told and different == 109 else "this has changed")
P
venv/bin/python see.py
