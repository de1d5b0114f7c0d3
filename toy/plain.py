"""The algorithm as plainly as it can be said: one answer at a time, no batch, no cache, no padding.

    python -m toy.plain        a tiny model learns to add, slowly: from .2 to .4 right, in minutes

The prompt `37+48=` has the right answer `so 7+8=15,30+40=70,#85`: reward 1 for the number behind
the last #, else 0. An answer is a list of tokens, here of characters; its log-probs are a tensor
(T_i,). Read from `step` downwards. train.py makes the same step sooner, and with any loss;
tests/test_step.py compares the two to the ninth digit.

GRPO maximises the mean over answers of 1/T_i sum_t min(r A, clip(r) A), where A compares the answer
with its group and r = pi / pi_old is a token's ratio. Because dr / dlog pi = r, the gradient of a
term is c grad log pi with c = r A, or 0 where the min has chosen the clipped side. So c says how
hard a token is pushed. It is a plain number, and log pi alone carries the gradient.
"""

from __future__ import annotations

from statistics import fmean, stdev
from types import SimpleNamespace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from toy.arithmetic import Arithmetic

G = 8  # answers to a prompt: one group
PROMPTS, MINIBATCHES = 8, 4  # of a step
TOKENS = 26  # the longest answer
EPS = 0.2  # GRPO's clip


def step(policy, optimizer, rows: list, minibatches: list[list[int]], baseline=False, G=G):
    """Learn from sampled answers. A row has a prompt, an answer and a reward; a group is G rows.

    minibatches: for each optimiser step the numbers of the groups that it learns from.
    """
    # Before learning: how probable each answer was, and how it compares with its group. Only the
    # end of an answer is rewarded, so each of its tokens has the advantage of the whole.
    A = advantages([row.reward for row in rows], G)
    for row, advantage in zip(rows, A, strict=True):
        row.old, row.A = log_probs(policy, row.prompt, row.answer).detach(), advantage
    for groups in minibatches:
        some = [row for g in groups for row in rows[g * G :][:G]]
        now = [log_probs(policy, row.prompt, row.answer) for row in some]  # (T_i,) each
        ratios = [(x.detach() - row.old).exp().tolist() for x, row in zip(now, some, strict=True)]
        # How hard is each token pushed? The division by the answer's length is GRPO's average.
        pairs = zip(ratios, some, strict=True)
        c = [[push(row.A, r) / len(row.answer) for r in its_ratios] for its_ratios, row in pairs]
        if baseline:
            c = prefix_baseline(c, ratios, [row.answer for row in some], G)
        # A push of c on a token is c times the gradient of its log-prob. Descent wants the minus.
        pushed = [torch.tensor(x) @ y for x, y in zip(c, now, strict=True)]
        optimizer.zero_grad()
        (-sum(pushed) / len(some)).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        if any(any(x) for x in c):  # where nothing is pushed, momentum alone must not move weights
            optimizer.step()


def push(A: float, r: float) -> float:
    """The slope of min(r A, clip(r) A) in log pi: the min stops winners above, losers below."""
    stopped = r > 1 + EPS if A > 0 else r < 1 - EPS
    return 0.0 if stopped else r * A


def advantages(rewards: list[float], G: int) -> list[float]:
    """(R - mean of the group) / (its standard deviation + 1e-4); 0 where all rewards are equal."""
    found = []
    for start in range(0, len(rewards), G):
        group = rewards[start : start + G]
        found += [(reward - fmean(group)) / (stdev(group) + 1e-4) for reward in group]
    return found


def prefix_baseline(c: list, ratios: list, answers: list, G: int) -> list:
    """From each push, subtract what the other answers with the same history are pushed by.

    A history is the prompt and what the answer has said so far. c / r is the push before its own
    ratio, so the others' mean of it is multiplied by the ratio r of this token. With ratios of 1
    the pushes .125, -.1, .25, -.125 on one shared token become .117, -.183, .283, -.217: they
    cancel.
    """
    new = [list(row) for row in c]
    for i, answer in enumerate(answers):
        for t in range(len(answer)):
            group = [j for j in range(i - i % G, i - i % G + G) if j != i]
            others = [j for j in group if len(answers[j]) > t and answers[j][:t] == answer[:t]]
            if others:
                mean = fmean(c[j][t] / ratios[j][t] for j in others)
                new[i][t] -= ratios[i][t] * mean
    return new


def log_probs(policy, prompt: list[int], answer: list[int], temperature: float = 1.0):
    """log pi of the answer's tokens. (T_i,)."""
    return read(policy, prompt, answer, temperature)[range(len(answer)), answer]


def read(policy, prompt: list[int], answer: list[int], temperature: float):
    """log pi of every id of the vocabulary at each place of the answer. (T_i, V).

    What the model reads up to a place predicts the next token, so the row before counts.
    """
    logits = policy.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


@torch.no_grad()
def rollout(policy, prompts: list, max_tokens: int, temperature: float, gen) -> list[list[int]]:
    """An answer to each prompt, with its end token; a temperature of 0 is greedy."""
    if temperature:
        uniform = torch.rand(len(prompts), max_tokens, generator=gen, dtype=torch.float64)
    answers = []
    for i, prompt in enumerate(prompts):
        answer = []
        while len(answer) < max_tokens and not (answer and answer[-1] in policy.eos):
            logits = policy.model(torch.tensor([prompt + answer])).logits[0, -1]
            if temperature:  # as many ids as lie below the random number: the next one is drawn
                sums = (logits / temperature).double().softmax(-1).cumsum(-1)
                answer.append(int((sums <= uniform[i, len(answer)] * sums[-1]).sum()))
            else:
                answer.append(int(logits.argmax()))
        answers.append(answer)
    return answers


def ask(policy, task, items: list, gen) -> list:
    """Rows: a sampled answer to each item, and its reward."""
    prompts, rows = task.encode(policy.tokenizer, items), []
    answers = rollout(policy, prompts, TOKENS, 1.0, gen)
    for item, prompt, answer in zip(items, prompts, answers, strict=True):
        text = policy.tokenizer.decode([x for x in answer if x not in policy.eos])
        rows.append(SimpleNamespace(prompt=prompt, answer=answer, reward=task.reward(text, item)))
    return rows


def main(warm_steps: int = 700, steps: int = 60):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    task, gen = Arithmetic(), torch.Generator().manual_seed(0)
    tokenizer = task.make_tokenizer()
    shape = dict(n_layer=1, n_embd=64, n_head=4, initializer_range=0.125)
    shape |= dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    model = GPT2LMHeadModel(GPT2Config(**shape)).eval()  # dropout would change every ratio
    policy = SimpleNamespace(model=model, tokenizer=tokenizer, eos=[tokenizer.eos_token_id])

    # Imitate imperfect demonstrations, so that some answers are right: RL needs something to find.
    optimizer = torch.optim.Adam(model.parameters(), 6e-3)
    for number in range(warm_steps):
        optimizer.param_groups[0]["lr"] = 6e-3 * (1 - number / warm_steps)
        optimizer.zero_grad()
        for i in torch.randint(len(task.train), (32,), generator=gen).tolist():
            (prompt,) = task.encode(tokenizer, [task.train[i]])
            demo = tokenizer(task.train[i].demo)["input_ids"] + policy.eos
            # 400: about as many tokens as 32 demonstrations have
            (-log_probs(policy, prompt, demo).sum() / 400).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    optimizer = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.9, 0.95))
    for number in range(1, steps + 1):
        picks = torch.randint(len(task.train), (PROMPTS,), generator=gen).tolist()
        rows = ask(policy, task, [task.train[i] for i in picks for _ in range(G)], gen)
        step(policy, optimizer, rows, torch.randperm(PROMPTS).view(MINIBATCHES, -1).tolist())
        if number % 10 == 0:
            text = tokenizer.decode(rows[0].prompt + rows[0].answer)
            print(f"step {number}: reward {fmean(row.reward for row in rows):.3f}   {text}")


if __name__ == "__main__":
    main()
