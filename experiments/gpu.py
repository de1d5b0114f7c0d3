"""What a GPU makes of this repository, in one table to paste into an issue.

    make gpu        (python -m experiments.gpu)

No GPU was at hand when this was written, so the column "expected" is computed, and nobody has seen
the other one yet. Nothing is downloaded: the model is Qwen2.5-0.5B's architecture with random
weights, whose answers hardly ever end, and the prompts are random. Rows of the table:

- a run of two toy steps with every method
- the peak memory of two steps with GSM8K's preset (experiments.bench.memory)
- rollout beside transformers' generate() (experiments.bench.rollout)
- log-probs in chunks beside plain log_softmax (experiments.bench.scoring)
- 20 steps with GSM8K's preset: seconds by stage, and whether all gradients were finite
"""

import contextlib
import io
import math
import tempfile
from dataclasses import replace
from statistics import median

import torch
import transformers

import train
from experiments import fail
from experiments.bench import memory, rollout, scoring
from experiments.bench.rollout import CASES, Case, build
from experiments.bench.step import Ids, Task, make_policy
from experiments.bench.timing import now, show_ratio, turns
from llm.policy import CHUNK
from llm.runs import adamw
from losses import METHODS

DEVICE = "cuda"
STEPS = 20
CASE = replace(CASES["c"], prompts=16, mean=1e9)
TOY = "--steps 2 --warm-steps 3 --prompts 4 --group-size 4 --eval-items 8 --eval-every 2"
Row = tuple[str, str, str]  # what, expected, measured


def every_method() -> list[Row]:
    """The toy with every method, on the GPU."""
    failed = []
    for method in METHODS:
        said, quiet = io.StringIO(), contextlib.ExitStack()
        with tempfile.TemporaryDirectory() as out, quiet:
            quiet.enter_context(contextlib.redirect_stdout(said))
            quiet.enter_context(contextlib.redirect_stderr(said))
            try:
                train.main(f"--method {method} --device {DEVICE} --out {out}/run {TOY}".split())
            except (Exception, SystemExit) as error:
                last = (said.getvalue().strip() or "nothing printed").splitlines()[-1]
                failed.append(f"{method}: {error!r} after {last!r}")
    right = f"{len(METHODS) - len(failed)} of {len(METHODS)} methods"
    rows = [("", "", reason) for reason in failed]
    return [("a run of the toy", f"{len(METHODS)} of {len(METHODS)} methods", right), *rows]


def preset(case: Case) -> train.Config:
    """GSM8K's preset, at the size of the case."""
    same = {key: train.GSM8K_HUB[key] for key in ("minibatches", "micro_rows", "lr")}
    return train.Config(**same, prompts=case.prompts, max_tokens=case.cap, steps=STEPS)


def peak_memory(case: Case) -> list[Row]:
    expected = memory.compute(case, rollout.GROUP, preset(case).micro_rows)[1]
    measured = memory.measure(case, preset(case), DEVICE)
    return [("peak of two steps", f"{expected:.1f} GB", f"{measured:.1f} GB")]


def sampling(case: Case) -> list[Row]:
    """Our rollout and transformers', in answers that are cut at the cap."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        seconds, lengths = rollout.time_sides(case, 2, DEVICE)
    floor = said.getvalue().strip() or "bandwidth floor not measured"
    token = median(seconds["ours"]) / lengths.max().item()
    ratio = show_ratio(seconds["theirs"], seconds["ours"])
    return [
        ("rollout, a token of all answers", "15 to 20 ms at 24 layers", f"{token * 1e3:.1f} ms"),
        ("rollout", floor, f"{median(seconds['ours']):.2f} s"),
        ("generate() / ours", "-", ratio),
    ]


def scores(case: Case) -> list[Row]:
    """The output layer on as many tokens as a bucket of micro_rows answers has."""
    tokens = preset(case).micro_rows * case.cap
    shape = (case.width, case.vocab, DEVICE)
    chunk_rows = min(tokens, max(512, CHUNK[DEVICE] // case.vocab))
    logits, chunk = (4 * rows * case.vocab / 1e6 for rows in (tokens, chunk_rows))
    weight = 4 * case.vocab * case.width / 1e6
    expected = {"ours": 2 * chunk + weight, "plain": 3 * logits + weight}  # logits, logp, gradient
    layer = scoring.build(tokens, *shape)
    sides = {name: lambda f=f: f(layer) for name, f in scoring.SIDES.items()}
    seconds = turns(sides, 5, DEVICE)
    rows = []
    for name in scoring.SIDES:
        peak = scoring.measure_memory(name, tokens, *shape)
        rows.append((f"output layer, {name}", f"{expected[name]:.0f} MB", f"{peak:.0f} MB"))
    ratio = show_ratio(seconds["ours"], seconds["plain"])
    return [*rows, ("output layer, ours / plain", "1.3: four products, not three", ratio)]


def steps(case: Case) -> list[Row]:
    """Steps with the preset: median seconds of the stages, the gap of sampler and scorer."""
    model, prompts, _ = build(case, DEVICE)
    policy, task, config = make_policy(model, Ids()), Task(prompts), preset(case)
    optimizer = adamw(model, config.lr)
    times, gaps, norms = [], [], []
    for step in range(1, STEPS + 1):
        clock = [now(DEVICE)]
        answers = train.sample(policy, task, prompts, step, config)
        clock.append(now(DEVICE))
        scored = train.score(policy, None, answers, config)
        clock.append(now(DEVICE))
        updates = train.learn(policy, optimizer, scored, config)
        clock.append(now(DEVICE))
        times.append([b - a for a, b in zip(clock, clock[1:], strict=False)])
        gaps.append(scored.max_logp_gap)
        norms += [update.grad_norm for update in updates]
    finite = sum(map(math.isfinite, norms))
    stages = zip(("rollout", "score", "update"), zip(*times, strict=True), strict=True)
    return [
        *((f"a step: {stage}", "-", f"{median(part):.2f} s") for stage, part in stages),
        ("a step", "13 s at full size", f"{median(map(sum, times)):.2f} s"),
        ("sampled and scored log-probs", "0.01 to 0.5 nats", f"{max(gaps):.4f} nats at most"),
        ("finite gradients", f"{len(norms)} of {len(norms)}", f"{finite} of {len(norms)}"),
    ]


def main():
    if not torch.cuda.is_available():
        fail("torch finds no CUDA device; this table needs one")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ", end="")
    print(f"transformers {transformers.__version__}\n")
    print("| what | expected, computed | measured |\n|---|---|---|", flush=True)
    for part in (every_method, peak_memory, sampling, scores, steps):
        try:
            rows = part() if part is every_method else part(CASE)
        except (Exception, SystemExit) as error:
            rows = [(part.__name__, "a result", f"failed: {str(error).splitlines()[:1]}")]
        for row in rows:
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
