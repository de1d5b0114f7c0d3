"""IBPO on groups in which all answers are wrong: what its corrections teach, and when they pay.

    python -m toy.ibpo                   the tables
    python -m toy.ibpo --plot ibpo.png   and the picture (needs matplotlib)
    python -m toy.ibpo --variants        grpo against sign where something else is changed

A word of K letters is decoded. Each letter has a digit, which is secret, and one slip spoils the
answer. The policy is a table: the chance of each digit, given the letter. So the chance of a right
answer is known exactly; at the start it is 0.63^K. All else goes through losses.py.

The policy corrects each wrong answer of its own beside a sibling, a right one where there is one.
It draws every digit from its table once more, but with 6 times the odds for each of the two answers
that shows the digit. So it mostly keeps what they agree on, and about 0.8 of the other digits are
right. It knows nothing but its table, and which sibling is right. A row is a kind of credit:

    grpo         nothing is corrected
    sign         blame on changed tokens, praise on kept ones: the default
    correction   credit on the changed tokens of the correction, put in the wrong answer's place
    none         shaped rewards, no mask
    changed      credit on the changed tokens of the wrong answer, whatever the sign

The first table is a single step on groups in which all answers are wrong. The second one counts
tokens, those of corrections too, until the chance of a right answer is 0.5. Each row has its own
learning rate for each K, chosen on other seeds.

IBPO pays where successes are nearly absent, and not before: beyond 12 letters. But the right digit
is the likeliest from the start. So a lower temperature makes samples right, too, and at 0.7 IBPO
does not pay (last rows). The chance of a right answer is always taken at temperature 1.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from losses import Batch, OldPolicy, group_advantages, grpo, ibpo, kept_tokens, shaped_rewards
from toy.figure import interval, save_picture

LETTERS, DIGITS, PROMPTS, G = 26, 10, 16, 8
DIGIT = torch.arange(LETTERS) % DIGITS  # of each letter
TRUTH = one_hot(DIGIT, DIGITS)  # (LETTERS, DIGITS)
RIGHT = 0.63  # chance of the right digit at the start
GOAL, LIMIT = 0.5, 300_000  # reward to reach; tokens after which a run is stopped
STEP_LENGTH, STEP_GROUPS = 8, 32  # K and groups of the single step
STEP_RATES = {"adamw": 0.1, "sgd": 50}
RATES = {"adamw": (0.2, 0.4, 0.8, 1.6, 3.2), "sgd": (200, 400, 800, 1600, 3200)}
SEEDS, TUNING_SEEDS = range(12), range(100, 124)


@dataclass(frozen=True)
class Setting:
    reading: str = "grpo"  # a key of LENGTHS
    length: int = STEP_LENGTH  # K
    temperature: float = 1.0
    optimizer: str = "adamw"  # or "sgd"
    spread: float = 0.0  # standard deviation of noise on the start's logits
    shown: float = 6.0  # what a correction multiplies the odds by, for each answer with that digit
    mend: float | None = None  # given: the chance of the right digit where the two answers differ


LENGTHS = {name: (4, 8, 12, 16, 20) for name in ("grpo", "sign", "correction")}
LENGTHS |= {"none": (8,), "changed": (8,)}  # to save time, as runs that fail are long
VARIANTS = {
    "SGD": {"optimizer": "sgd"},
    "corrections see no answer": {"shown": 1.0},
    "corrections keep what agrees, mend 0.8": {"mend": 0.8},
    "the same, mend 0.4": {"mend": 0.4},
    "uneven start": {"spread": 1.0},
    "uneven start, temperature 0.7": {"spread": 1.0, "temperature": 0.7},
    "uneven start, mend 0.8": {"spread": 1.0, "mend": 0.8},
}
# Okabe and Ito's colours; markers and dashes tell lines apart in grey.
STYLES = {
    "grpo": dict(color="#000000", marker="o"),
    "sign": dict(color="#0072B2", marker="s"),
    "correction": dict(color="#D55E00", marker="^"),
    "grpo at 0.7": dict(color="#000000", marker="o", linestyle="--", markerfacecolor="white"),
    "sign at 0.7": dict(color="#0072B2", marker="s", linestyle="--", markerfacecolor="white"),
}


def start_tables(setting: Setting, gens: list[torch.Generator]) -> Tensor:
    """Logits of every digit for every letter, for each generator. (S, LETTERS, DIGITS)."""
    shape, odds = (LETTERS, DIGITS), RIGHT / (1 - RIGHT) * (DIGITS - 1)
    noise = [torch.randn(shape, generator=gen, dtype=torch.float64) for gen in gens]
    return (setting.spread * torch.stack(noise) + math.log(odds) * TRUTH).requires_grad_()


def chance(tables: Tensor, length: int) -> Tensor:
    """Of a right answer to a word of this length, the mean over all words. (S,)."""
    return (tables.detach().softmax(2) * TRUTH).sum(2).mean(1) ** length


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """A digit for each place, in proportion to its weight. (N, K, DIGITS), (N, K) -> (N, K)."""
    sums = weights.cumsum(2)
    return (sums < uniform[..., None] * sums[..., -1:]).sum(2)


@dataclass
class Rollout:
    """Of S runs; N = S x groups x G answers of K digits."""

    run: Tensor  # (N, 1)
    words: Tensor  # (N, K)
    answers: Tensor  # (N, K)
    fixed: Tensor  # (N, K) corrections of the wrong answers; elsewhere the answers
    generated: Tensor  # (S,) tokens of both


def sample(tables: Tensor, setting: Setting, gens: list[torch.Generator], groups: int) -> Rollout:
    """G answers to each word and, but for grpo, a correction of each wrong one."""
    shape = (groups, setting.length)
    words = torch.stack([torch.randint(LETTERS, shape, generator=gen) for gen in gens])
    words = words.repeat_interleave(G, 1).flatten(0, 1)  # (N, K)
    shape = (2, groups * G, setting.length)
    uniform = [torch.rand(shape, generator=gen, dtype=torch.float64) for gen in gens]
    first, second = torch.cat(uniform, 1)  # (N, K) each
    run = torch.arange(len(gens)).repeat_interleave(groups * G)[:, None]
    weights = (tables.detach() / setting.temperature).softmax(2)[run, words]  # (N, K, DIGITS)
    answers = draw(weights, first)
    wrong = (answers != DIGIT[words]).any(1)  # (N,)
    fixed, generated = answers, torch.full((len(gens),), float(first.numel() / len(gens)))
    if setting.reading != "grpo":
        corrections = correct(weights, words, answers, second, setting)
        fixed = torch.where(wrong[:, None], corrections, answers)
        generated += wrong.view(len(gens), -1).sum(1) * setting.length
    return Rollout(run, words, answers, fixed, generated)


def correct(
    weights: Tensor, words: Tensor, answers: Tensor, uniform: Tensor, setting: Setting
) -> Tensor:
    """Every answer once more, written beside a sibling. (N, K)."""
    wrong = (answers != DIGIT[words]).any(1).view(-1, 1, G)  # (P, 1, G)
    turn = (torch.arange(G) - torch.arange(1, G + 1)[:, None]) % G  # a wrong answer itself is last
    order = turn + G * wrong  # (P, G, G)
    siblings = order.argmin(2) + G * torch.arange(len(order))[:, None]  # (P, G)
    shown = answers, answers[siblings.flatten()]
    if setting.mend is not None:
        mended = torch.where(uniform < setting.mend, DIGIT[words], answers)
        return torch.where(shown[0] == shown[1], answers, mended)
    for digits in shown:
        boost = setting.shown ** (1 / setting.temperature) - 1
        weights = weights * (1 + boost * one_hot(digits, DIGITS))
    return draw(weights, uniform)


def loss(tables: Tensor, rollout: Rollout, setting: Setting) -> Tensor:
    """GRPO's loss with the rewards and the credit of a reading, the sum over the S runs."""
    words, answers, fixed = rollout.words, rollout.answers, rollout.fixed
    right, mask = DIGIT[words], torch.ones_like(words, dtype=torch.bool)
    rewards = (answers == right).all(1).double()
    repaired = (rewards == 0) & (fixed == right).all(1) & (setting.reading != "grpo")
    if setting.reading == "correction":
        swap = repaired[:, None]
        answers, fixed = torch.where(swap, fixed, answers), torch.where(swap, answers, fixed)
    kept_mask = torch.zeros_like(mask)
    if repaired.any():
        rows = answers[repaired], mask[repaired], fixed[repaired], mask[repaired]
        kept_mask[repaired] = kept_tokens(*rows)
    logp = (tables / setting.temperature).log_softmax(2)[rollout.run, words, answers]
    old = OldPolicy(answers, mask, logp.detach(), rewards, G, repaired=repaired)
    old.kept_mask = kept_mask
    A = group_advantages(shaped_rewards(rewards, repaired), G)
    rule = {"correction": "changed", "grpo": "none"}.get(setting.reading, setting.reading)
    adv = ibpo(A[:, None].expand(mask.shape), old, rule)
    return len(tables) * grpo(Batch(logp, logp.detach(), adv, mask, G, setting.length))


def make_optimizer(tables: Tensor, setting: Setting, rate: float) -> torch.optim.Optimizer:
    if setting.optimizer == "sgd":
        return torch.optim.SGD([tables], lr=rate)
    return torch.optim.AdamW([tables], lr=rate, weight_decay=0.0)


def one_step(setting: Setting, seed: int) -> tuple[float, float]:
    """How much log pi moves: of the right answer to a word (mean of all), of a repaired slip."""
    gens = [torch.Generator().manual_seed(seed)]
    tables = start_tables(setting, gens)
    corrected = replace(setting, reading="sign")  # also for grpo, to know the slips
    rollout = sample(tables, corrected, gens, 4 * STEP_GROUPS)
    right = DIGIT[rollout.words]
    all_wrong = (rollout.answers != right).any(1).view(-1, G).all(1)
    chosen = all_wrong.repeat_interleave(G).nonzero().flatten()[: STEP_GROUPS * G]
    rows = (rollout.run, rollout.words, rollout.answers, rollout.fixed)
    rollout, right = Rollout(*(x[chosen] for x in rows), rollout.generated), right[chosen]
    before = tables.detach().log_softmax(2)[0]
    loss(tables, rollout, setting).backward()
    make_optimizer(tables, setting, STEP_RATES[setting.optimizer]).step()
    moved = tables.detach().log_softmax(2)[0] - before  # (LETTERS, DIGITS)
    slips = (rollout.answers != right) & (rollout.fixed == right).all(1, keepdim=True)
    moved_right = (moved * TRUTH).sum(1).mean() * setting.length
    return float(moved_right), float(moved[rollout.words[slips], rollout.answers[slips]].mean())


def train(setting: Setting, seeds: range, rate: float) -> Tensor:
    """Tokens generated until the chance of a right answer is GOAL, inf if it is not reached. (S,)

    All seeds are trained side by side. Each has its own table and its own random numbers.
    """
    gens = [torch.Generator().manual_seed(seed) for seed in seeds]
    tables = start_tables(setting, gens)
    optimizer = make_optimizer(tables, setting, rate)
    generated, reached = torch.zeros(len(gens)), torch.full((len(gens),), torch.inf)
    while True:
        reward = chance(tables, setting.length)
        reached = torch.where((reward >= GOAL) & reached.isinf(), generated, reached)
        left = (reached.isinf() & (generated < LIMIT)).nonzero().flatten()
        if not len(left):
            return reached
        part = tables[left]
        rollout = sample(part, setting, [gens[i] for i in left], PROMPTS)
        optimizer.zero_grad()
        loss(part, rollout, setting).backward()
        optimizer.step()
        generated[left] += rollout.generated


def tokens_to_goal(setting: Setting) -> Tensor:
    """Of each seed, inf if it does not get there, at the rate that was best on other seeds. (S,)"""
    rates = RATES[setting.optimizer]
    costs = [train(setting, TUNING_SEEDS, rate).clamp(max=LIMIT).mean() for rate in rates]
    return train(setting, SEEDS, rates[int(torch.stack(costs).argmin())])


def study(changes: dict, readings: tuple[str, ...]) -> dict[str, dict[int, Tensor]]:
    """reading -> K -> tokens of each seed. Prints a row for each reading."""
    curves = {}
    for reading in readings:
        lengths = LENGTHS[reading]
        curves[reading] = {K: tokens_to_goal(Setting(reading, K, **changes)) for K in lengths}
        show(reading, [cell(curves[reading].get(K)) for K in LENGTHS["grpo"]])
    pairs = [(curves["sign"][K], curves["grpo"][K]) for K in LENGTHS["grpo"]]
    show("sign minus grpo", [cell(a.clamp(max=LIMIT) - b.clamp(max=LIMIT)) for a, b in pairs])
    return curves


def cell(tokens: Tensor | None) -> str:
    """In thousands. A run that does not get there counts as LIMIT; their number is in brackets."""
    if tokens is None:
        return "-"
    center, half = interval((tokens.clamp(max=LIMIT) / 1000).tolist())
    failed = int(tokens.isinf().sum())
    return f"{center:.1f} +- {half:.1f}" + f" ({failed})" * bool(failed)


def show(name: str, cells: list[str]):
    print(f"{name:24}" + "".join(f"{text:>20}" for text in cells), flush=True)


def show_steps() -> dict[str, list[tuple[float, float]]]:
    """What the single step does, for each reading and optimiser: mean and half the interval."""
    print(f"one step on {STEP_GROUPS} all-wrong groups, K = {STEP_LENGTH}: change of log pi\n")
    show("", [f"{what}, {name}" for name in STEP_RATES for what in ("right answers", "slips")])
    changes = {}
    for reading in LENGTHS:
        settings = [Setting(reading, optimizer=name) for name in STEP_RATES]
        moved = torch.tensor([[one_step(s, seed) for s in settings] for seed in SEEDS])
        changes[reading] = [interval(values.tolist()) for values in moved.flatten(1).T]
        show(reading, ["{:+.3f} +- {:.3f}".format(*x) for x in changes[reading]])
    return changes


def show_start(setting: Setting):
    """What the start policies do with words of each length."""
    chances, repairs = [], []
    for K in LENGTHS["grpo"]:
        gens = [torch.Generator().manual_seed(seed) for seed in SEEDS]
        tables = start_tables(setting, gens)
        rollout = sample(tables, replace(setting, reading="sign", length=K), gens, 4 * PROMPTS)
        wrong, failed = (
            (x != DIGIT[rollout.words]).any(1).view(-1, G) for x in (rollout.answers, rollout.fixed)
        )
        chances.append(f"{float(chance(tables, K).mean()):.1e}")
        repairs.append(f"{1 - float(failed[wrong.all(1)].double().mean()):.3f}")
    show("chance at the start", chances)
    show("repaired, if all wrong", repairs)


def plot(changes: dict, curves: dict, path: Path):
    """Two panels: the single step by AdamW, and tokens against K."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = torch.arange(len(changes)).double()
    for i, (label, color) in enumerate((("right answers", "#009E73"), ("slips", "#E69F00"))):
        centers, halves = zip(*(values[i] for values in changes.values()), strict=True)
        bars = dict(color=color, edgecolor="black", hatch="//" * i, label=label)
        left.bar(places + 0.4 * i - 0.2, centers, 0.4, yerr=halves, capsize=2, **bars)
    left.axhline(0, color="black", linewidth=0.8)
    left.set_xticks(places, changes)
    left.set_title("one step on all-wrong groups: change of log pi", fontsize=9)
    for name, cost in curves.items():
        points = [interval((tokens.clamp(max=LIMIT) / 1000).tolist()) for tokens in cost.values()]
        style = dict(label=name, capsize=2, markersize=5) | STYLES[name]
        right.errorbar([*cost], *zip(*points, strict=True), **style)
        for (K, tokens), (center, _) in zip(cost.items(), points, strict=True):
            if failed := int(tokens.isinf().sum()):
                right.annotate(f"{failed} fail ", (K, center), ha="right", fontsize=7)
    right.set(yscale="log", xticks=LENGTHS["grpo"])
    right.set_xlabel("K, letters of a word", fontsize=8)
    right.set_title(f"thousands of tokens to a reward of {GOAL}", fontsize=9)
    for axis in (left, right):
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=100)
    print(f"\npicture: {path}")


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser("python -m toy.ibpo", description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .svg or .png")
    parser.add_argument("--variants", action="store_true", help="what else was tried")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    changes = {} if options.variants else show_steps()
    print(f"\nthousands of tokens to a reward of {GOAL}, {len(SEEDS)} seeds, +- half the 95 %")
    print(f"interval; (n): n seeds do not get there and count as {LIMIT // 1000} thousand\n")
    show("", [f"K = {K}" for K in LENGTHS["grpo"]])
    if options.variants:
        for name, variant in VARIANTS.items():
            print(f"\n{name}")
            show_start(Setting(**variant))
            study(variant, ("grpo", "sign"))
        return
    show_start(Setting())
    curves = study({}, tuple(LENGTHS))
    print("\nsampled at temperature 0.7")
    cold = study({"temperature": 0.7}, ("grpo", "sign"))
    curves = {name: curves[name] for name in ("grpo", "sign", "correction")}
    curves |= {f"{name} at 0.7": values for name, values in cold.items()}
    save_picture(plot, changes, curves, path=options.plot)


if __name__ == "__main__":
    main()
