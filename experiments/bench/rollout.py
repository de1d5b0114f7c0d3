"""Sampling: train.py's generate, llm/fast.py's, and transformers' own generate().

    python -m experiments.bench.rollout [--cases toy gsm8k] [--rounds 9] [--device cuda]

The cases have the toy's shape, GSM8K's on a CPU, and Qwen2.5-0.5B's for a GPU, all with random
weights. The three sides have the same model and the same distribution. They draw their own answers,
and take turns in one process with one thread. On a CPU seconds are those of the process.
"""

import argparse
from dataclasses import replace
from statistics import median

import torch

import train
from experiments.bench.cases import CASES, GROUP, Case, Task, make_policy
from experiments.bench.timing import show_ratio, turns


def ours(policy: train.Policy, case: Case, seed: int):
    device = policy.model.device
    ids = torch.tensor(Task(case).train, device=device).repeat_interleave(GROUP, 0)
    prompts = train.Prompts(ids, torch.ones_like(ids, dtype=torch.bool))
    gen = torch.Generator().manual_seed(seed)
    return train.generate(policy, prompts, case.cap, 1.0, gen)[0]


@torch.no_grad()
def theirs(policy: train.Policy, case: Case, seed: int, processors=()):
    torch.manual_seed(seed)
    ids = torch.tensor(Task(case).train, device=policy.model.device)
    with train.bf16(policy):
        whole = policy.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=GROUP,
            logits_processor=[*processors],
            max_new_tokens=case.cap,
        )
    return whole[:, ids.shape[1] :]


def time_sides(case: Case, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of the three sides, whose n-th call has the seed n."""
    policy = make_policy(case, device=device)
    quick, seeds = replace(policy, fast=True), {"plain": 0, "fast": 0, "generate()": 0}

    def side(name: str, sampler, *args):
        seeds[name] += 1
        sampler(*args, case, seeds[name])

    sides = {
        "plain": lambda: side("plain", ours, policy),
        "fast": lambda: side("fast", ours, quick),
        "generate()": lambda: side("generate()", theirs, policy),
    }
    return turns(sides, rounds, device)


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=["toy", "gsm8k"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(argv)
    for name in options.cases:
        seconds = time_sides(CASES[name], options.rounds, options.device)
        for side, x in seconds.items():
            print(f"{name:6} {side:10} {median(x):8.3f} s")
        for over, under in (("generate()", "plain"), ("generate()", "fast"), ("plain", "fast")):
            print(f"{name:6} {over} / {under}: {show_ratio(seconds[over], seconds[under])}")


if __name__ == "__main__":
    main()
