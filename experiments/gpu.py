"""What a GPU makes of this repository, in one table to paste into an issue.

    make gpu        (python -m experiments.gpu)

Nobody has run this on a GPU yet. Nothing is downloaded: the model is Qwen2.5-0.5B's architecture
with random weights, whose answers hardly ever end, and the prompts are random. The settings are
those of the GSM8K preset. "plain" is train.py alone, "fast" is with --fast.
"""

import contextlib
import io
import sys
import tempfile
from functools import partial
from statistics import median

import torch
import transformers

import train
from experiments.bench import memory, rollout
from experiments.bench.cases import CASES, Ids, Task, make_config, make_policy
from experiments.bench.timing import now, show_ratio
from losses import METHODS

DEVICE = "cuda"
STEPS = 20
CASE = CASES["0.5B"]
TOY = "--steps 2 --warm-steps 3 --prompts 4 --group-size 4 --eval-items 8 --eval-every 2"
Row = tuple[str, str, str]  # what, expected, measured


def methods(flag: str) -> list[Row]:
    """Two steps of the toy with every method."""
    failed = []
    for method in METHODS:
        said = io.StringIO()
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(said):
            try:
                with contextlib.redirect_stderr(said):
                    train.main(f"--method {method} --out {out}/run {flag} {TOY}".split())
            except (Exception, SystemExit) as error:
                failed.append(("", "", f"{method}: {error!r}"))
    right = f"{len(METHODS) - len(failed)} of {len(METHODS)} methods"
    return [(f"two steps of the toy, {flag}", "all", right), *failed]


def peak(fast: bool) -> list[Row]:
    micro_rows = train.GSM8K["micro_rows"]
    expected = f"{memory.compute(CASE, micro_rows)['at the peak']:.1f} GB" if fast else "more"
    preset = dict(micro_rows=micro_rows, lr=train.GSM8K["lr"], reference=True)
    config = make_config(CASE, fast=fast, **preset)
    measured = f"{memory.measure(CASE, config, DEVICE):.1f} GB"
    return [(f"peak of a step, {'fast' if fast else 'plain'}", expected, measured)]


def sampling() -> list[Row]:
    seconds = rollout.time_sides(CASE, 2, DEVICE)
    rows = [(f"rollout, {side}", "-", f"{median(x):.2f} s") for side, x in seconds.items()]
    for side in ("plain", "fast"):
        ratio = show_ratio(seconds["generate()"], seconds[side])
        rows.append((f"rollout, generate() / {side}", "-", ratio))
    return rows


def steps(fast: bool, cudnn: bool) -> list[Row]:
    """Steps on prompts of unequal lengths: median seconds of the stages, sampler against scorer.

    A number that is not finite ends a run, and then the table has that line.
    """
    policy, task = make_policy(CASE, Ids(), DEVICE), Task(CASE)
    policy.fast = fast
    task.train = [prompt[i:] for i, prompt in enumerate(task.train)]
    preset = {key: train.GSM8K[key] for key in ("minibatches", "micro_rows", "lr")}
    config = make_config(CASE, steps=STEPS, **preset)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    optimizer, gap = train.adamw(policy.model, config.lr), 0.0
    seconds = {"rollout": [], "score": [], "update": [], "in all": []}
    for number in range(1, STEPS + 1):
        t0 = now(DEVICE)
        answers = train.sample(policy, task, task.train, number, config)
        t1 = now(DEVICE)
        scored = train.score(policy, None, answers, config)
        t2 = now(DEVICE)
        train.learn(policy, optimizer, scored, config)
        t3 = now(DEVICE)
        for name, x in zip(seconds, (t1 - t0, t2 - t1, t3 - t2, t3 - t0), strict=True):
            seconds[name].append(x)
        gap = max(gap, scored.max_logp_gap)
    name = f"a step, {'fast' if fast else 'plain'}, cuDNN attention {'on' if cudnn else 'off'}"
    return [
        *((f"{name}: {stage}", "-", f"{median(x):.2f} s") for stage, x in seconds.items()),
        (f"{name}: sampled and scored log-probs", "below 3 nats", f"{gap:.4f} nats at most"),
        (f"{name}: gradients", "finite", f"finite in {STEPS} steps"),
    ]


PARTS = {
    "the toy, plain": partial(methods, "--no-fast"),
    "the toy, fast": partial(methods, "--fast"),
    "memory, fast": partial(peak, True),
    "memory, plain": partial(peak, False),
    "rollout": sampling,
    "steps, fast": partial(steps, fast=True, cudnn=False),
    "steps, plain": partial(steps, fast=False, cudnn=False),
    "steps, fast, cuDNN": partial(steps, fast=True, cudnn=True),  # nan: pytorch's 196678
    "steps, plain, cuDNN": partial(steps, fast=False, cudnn=True),
}


def main():
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no CUDA device; this table needs one")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ", end="")
    print(f"transformers {transformers.__version__}\n")
    print("| what | expected | measured |\n|---|---|---|", flush=True)
    for name, part in PARTS.items():
        try:
            rows = part()
        except (Exception, SystemExit) as error:
            rows = [(name, "a result", f"failed: {(str(error) or repr(error)).splitlines()[0]}")]
        for row in rows:
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
