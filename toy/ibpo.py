"""What IBPO's corrections teach, by the tokens that get the credit: mistakes, or right answers.

    python -m toy.ibpo        the table

A word has six letters. Its answer replaces each of them by that letter's partner, which is secret.
The policy is a table: the probability of each answer token, given the letter. A correction mends
each slip of a wrong answer with a chance of its own, so near misses are repaired more often.
Everything else goes through losses.py. A row of the table is a reading of `losses.ibpo`:

    grpo         nothing is corrected
    none         shaped rewards, no mask
    changed      credit on the changed tokens of the wrong answer, whatever the sign
    correction   the same on the correction, which stands in the place of the wrong answer
    sign         blame on changed tokens, praise on kept ones: the default

First comes one AdamW step on groups in which all answers are wrong: how much log pi moves for right
answers to unseen words, and for the slips that were repaired. Then comes training: the chance that
an unseen word is answered right. Both are computed from the table, exactly.

A step by sign makes right answers likelier and slips rarer, and so does one on the corrections. The
step on changed tokens does the reverse, and training on them ends near 0 in five of six seeds. By
sign training is ahead of grpo after 20 steps, and a little behind after 100. Steps are compared,
not tokens, of which the corrections need more.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from losses import Batch, OldPolicy, group_advantages, grpo, ibpo, kept_tokens, shaped_rewards

READINGS = ("grpo", "none", "changed", "correction", "sign")
LETTERS, LENGTH, G = 12, 6, 8
MEND = 0.7  # chance that a correction mends a slip
GROUPS, STEP = 32, 0.1  # of the single step
STEPS, EARLY, PROMPTS, LR = 100, 20, 16, 0.05  # of the training
PARTNER = torch.arange(LETTERS).roll(5)  # of each letter


def start_table(gen: torch.Generator) -> Tensor:
    """Logits of every token (column) for every letter (row): right in about half of the cases."""
    W = torch.randn(LETTERS, LETTERS, generator=gen, dtype=torch.float64)
    W[torch.arange(LETTERS), PARTNER] += 3.0
    return W.requires_grad_()


def draw_words(n: int, gen: torch.Generator) -> Tensor:
    return torch.randint(0, LETTERS, (n, LENGTH), generator=gen)


def sample(W: Tensor, words: Tensor, gen: torch.Generator) -> Tensor:
    """An answer to each word. (N, LENGTH) -> (N, LENGTH)."""
    p = W.detach().softmax(1)[words].flatten(0, 1)
    return torch.multinomial(p, 1, generator=gen).view(words.shape)


def draw_wrong_groups(W: Tensor, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words and answers of GROUPS groups without a right answer. (N, LENGTH) each."""
    words = draw_words(8 * GROUPS, gen).repeat_interleave(G, 0)
    answers = sample(W, words, gen)
    hopeless = ~(answers == PARTNER[words]).all(1).view(-1, G).any(1)
    chosen = hopeless.repeat_interleave(G).nonzero().flatten()[: GROUPS * G]
    return words[chosen], answers[chosen]


def correct(words: Tensor, answers: Tensor, gen: torch.Generator) -> Tensor:
    """The answers with some slips mended. (N, LENGTH)."""
    return torch.where(torch.rand(words.shape, generator=gen) < MEND, PARTNER[words], answers)


def loss(W: Tensor, words: Tensor, answers: Tensor, fixed: Tensor, reading: str) -> Tensor:
    """GRPO's loss with the rewards and the credit of a reading; fixed: the corrections."""
    right, mask = PARTNER[words], torch.ones_like(words, dtype=torch.bool)
    rewards = (answers == right).all(1).double()
    repaired = (rewards == 0) & (fixed == right).all(1) & (reading != "grpo")
    if reading == "correction":
        swap = repaired[:, None]
        answers, fixed = torch.where(swap, fixed, answers), torch.where(swap, answers, fixed)
    logp = W.log_softmax(1)[words, answers]
    old = OldPolicy(answers, mask, logp.detach(), rewards, G, repaired=repaired)
    old.kept_mask = kept_tokens(answers, mask, fixed, mask)
    A = group_advantages(shaped_rewards(rewards, repaired), G)
    rule = {"correction": "changed", "grpo": "none"}.get(reading, reading)
    adv = ibpo(A[:, None].expand(mask.shape), old, rule)
    return grpo(Batch(logp, logp.detach(), adv, mask, G, LENGTH))


def one_step(reading: str, seed: int) -> tuple[float, float]:
    """How much log pi moves: of the right answer to an unseen word, of a slip that was repaired."""
    gen = torch.Generator().manual_seed(seed)
    W = start_table(gen)
    words, answers = draw_wrong_groups(W, gen)
    fixed, unseen = correct(words, answers, gen), draw_words(1000, gen)
    optimizer = torch.optim.AdamW([W], lr=STEP, weight_decay=0.0)
    before = W.detach().log_softmax(1)
    loss(W, words, answers, fixed, reading).backward()
    optimizer.step()
    moved = W.detach().log_softmax(1) - before
    right = moved[unseen, PARTNER[unseen]].sum(1).mean()
    slips = (answers != fixed) & (fixed == PARTNER[words]).all(1, keepdim=True)
    return float(right), float(moved[words[slips], answers[slips]].mean())


def train(reading: str, seed: int) -> list[float]:
    """The mean probability of the right answer to an unseen word, after 0, 1, ..., STEPS steps."""
    gen = torch.Generator().manual_seed(seed)
    W = start_table(gen)
    unseen = draw_words(1000, gen)
    optimizer = torch.optim.AdamW([W], lr=LR, weight_decay=0.0)
    rewards = []
    for _ in range(STEPS + 1):
        p = W.detach().softmax(1)[unseen, PARTNER[unseen]]  # (1000, LENGTH)
        rewards.append(float(p.prod(1).mean()))
        words = draw_words(PROMPTS, gen).repeat_interleave(G, 0)
        answers = sample(W, words, gen)
        optimizer.zero_grad()
        loss(W, words, answers, correct(words, answers, gen), reading).backward()
        optimizer.step()
    return rewards


def mean(values: list[float]) -> str:
    """Mean and its standard error."""
    x = torch.tensor(values, dtype=torch.float64)
    return f"{x.mean():.3f} +- {x.std() / len(x) ** 0.5:.3f}"


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser("python -m toy.ibpo", description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=10, help="of the single step (default 10)")
    parser.add_argument("--seeds", type=int, default=6, help="of the training (default 6)")
    options = parser.parse_args(argv)
    if min(options.starts, options.seeds) < 2:
        parser.error("--starts and --seeds must be at least 2, for a standard error")
    torch.set_num_threads(1)
    print(f"one step on {GROUPS} all-wrong groups, {options.starts} starts: change of log pi;")
    print(f"{STEPS} steps of training, {options.seeds} seeds: reward; mean +- standard error\n")
    titles = ("right answers", "slips", f"after {EARLY} steps", f"after {STEPS} steps")
    print(f"{'':12}" + "".join(f"{title:>18}" for title in titles) + "   each seed")
    for reading in READINGS:
        columns = [*zip(*(one_step(reading, seed) for seed in range(options.starts)), strict=True)]
        curves = [train(reading, seed) for seed in range(options.seeds)]
        columns += [[curve[n] for curve in curves] for n in (EARLY, STEPS)]
        cells = "".join(f"{mean(values):>18}" for values in columns)
        print(f"{reading:12}{cells}   {' '.join(f'{x:.2f}' for x in columns[-1])}", flush=True)
    print(f"reward at the start: {mean([curve[0] for curve in curves])}")


if __name__ == "__main__":
    main()
