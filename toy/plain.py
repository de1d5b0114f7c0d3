"""The algorithm as plainly as it can be said: one answer at a time, no batch, no cache, no padding.

    python -m toy.plain        a tiny model learns to add, slowly: its reward rises, in minutes

To the prompt `37+48=` the answer `so 7+8=15,30+40=70,#85` is right: it earns 1, because the number
behind its last # is 85. A wrong answer earns 0. An answer begins with "so", "ok" or "hm", which
mean nothing. A token is a character, and the end of an answer is a token, too.

GRPO maximises, as a mean over answers,

    (1/T) sum over the answer's T tokens of min(r A, clip(r) A)

A = (reward - mean of the group) / its standard deviation (which divides by G - 1) compares the
answer with the others to the same prompt. r = pi / pi_old is a token's ratio: how
much likelier it is now than when it was sampled. clip(r) keeps r between 1 - EPS and 1 + EPS. (The
paper's KL term is left out; train.py has it, off by default.)

The gradient of r A is r A grad log pi, because dr = r dlog pi. So GRPO comes down to one number for
each token, its *push*: r A / T. It is 0 where the min has chosen the clipped side, which is
constant: for winners (A > 0) above 1 + EPS, and for losers below 1 - EPS. A positive push makes the
token likelier. If 4 of 8 answers are right, a right one has A = .5 / .53 = .94, and with r = 1.1
each of its 23 tokens, 22 characters and the end, has a push of 1.1 * .94 / 23 = .045.

A *step* samples answers, and then makes several *updates* of the weights from them. Begin with
`learn`, which makes the updates. train.py does the same faster, and with any loss.
"""

from __future__ import annotations

from statistics import fmean, stdev
from types import SimpleNamespace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from toy.arithmetic import Arithmetic

G = 8  # answers to a prompt: one group
PROMPTS, UPDATES = 8, 4  # of a step
TOKENS = 26  # the longest answer
EPS = 0.2  # the clip range: PPO's; GRPO's paper prints none


def learn(policy, optimizer, rows: list, minibatches: list[list[int]], baseline=False, G=G):
    """Learn from sampled answers. A row has a prompt, an answer and a reward.

    The first G rows are a group, that is the answers to one prompt; the next G rows are another.
    minibatches: for each update the indices of its groups, as in [[3, 0], [5, 1]]. A row gains `A`
    and `old_logp`, which stay, and in each update `logp`, `ratio` and `push`.
    """
    # How an answer compares with its group, and how probable its tokens were: nothing has been
    # learnt yet, so the weights still are those that sampled. Only the end of an answer is
    # rewarded, so all its tokens have the same advantage A.
    for row, A in zip(rows, advantages([row.reward for row in rows], G), strict=True):
        row.A, row.old_logp = A, log_probs(policy, row.prompt, row.answer).detach()
    for groups in minibatches:
        minibatch = [row for g in groups for row in rows[g * G : g * G + G]]
        for row in minibatch:
            row.logp = log_probs(policy, row.prompt, row.answer)  # (T_i,), with a gradient
            row.ratio = (row.logp.detach() - row.old_logp).exp().tolist()
            row.push = [slope(row.A, r) / len(row.answer) for r in row.ratio]
        if baseline:  # not GRPO's: see the end of this file
            subtract_baseline(minibatch, G)
        # This loss has the right gradient: minus the mean over answers of the sum over tokens of
        # push * grad log pi. Its value means nothing.
        loss = -sum(torch.tensor(row.push) @ row.logp for row in minibatch) / len(minibatch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        # If no token is pushed there is nothing to learn, and momentum alone must not move weights.
        if any(any(row.push) for row in minibatch):
            optimizer.step()


def slope(A: float, r: float) -> float:
    """A push times T: the slope of min(r A, clip(r) A) in log pi.

    With A = 1 the slopes at r = .9, 1.1 and 1.3 are .9, 1.1 and 0.
    """
    stopped = r > 1 + EPS if A > 0 else r < 1 - EPS
    return 0.0 if stopped else r * A


def advantages(rewards: list[float], G: int) -> list[float]:
    """(R - mean of the group) / (its standard deviation + 1e-4); 0 where all rewards are equal."""
    compared = []
    for start in range(0, len(rewards), G):
        group = rewards[start : start + G]
        if max(group) == min(group):  # rounding may leave R - mean at 1e-17, which is not quite 0
            compared += [0.0] * G
        else:
            compared += [(reward - fmean(group)) / (stdev(group) + 1e-4) for reward in group]
    return compared


def log_probs(policy, prompt: list[int], answer: list[int], temperature: float = 1.0):
    """log pi of the answer's tokens. (T_i,)."""
    table = all_log_probs(policy, prompt, answer, temperature)  # (T_i, V)
    return table[range(len(answer)), answer]  # of row t the column answer[t]


def all_log_probs(policy, prompt: list[int], answer: list[int], temperature: float):
    """log pi of every id of the vocabulary at each place of the answer. (T_i, V).

    A model's output at a token predicts the next one. With the prompt a b and the answer c d, the
    output at b predicts c and that at c predicts d; the output at d is not needed.
    """
    logits = policy.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


@torch.no_grad()
def rollout(policy, prompts: list, max_tokens: int, temperature: float, gen) -> list[list[int]]:
    """An answer to each prompt, to its end token or max_tokens; a temperature of 0 is greedy."""
    if temperature:
        uniform = torch.rand(len(prompts), max_tokens, generator=gen, dtype=torch.float64)
    answers = []
    for i, prompt in enumerate(prompts):
        answer = []
        while len(answer) < max_tokens and not (answer and answer[-1] in policy.eos):
            logits = policy.model(torch.tensor([prompt + answer])).logits[0, -1]
            if temperature:
                # Sample: the first id whose cumulative probability exceeds a random number. Every
                # id before it has at most that number, so counting those gives the id. (By hand,
                # and with random numbers for each answer, so that train.py can draw the same.)
                cumulative = (logits / temperature).double().softmax(-1).cumsum(-1)
                number = uniform[i, len(answer)] * cumulative[-1]
                answer.append(int((cumulative <= number).sum()))
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

    imitate(policy, task, warm_steps, gen)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.9, 0.95))
    for number in range(1, steps + 1):
        picks = torch.randint(len(task.train), (PROMPTS,), generator=gen).tolist()
        rows = ask(policy, task, [task.train[i] for i in picks for _ in range(G)], gen)
        # A random order of the groups, cut into one part for each update.
        order = torch.randperm(PROMPTS, generator=gen).view(UPDATES, -1)
        learn(policy, optimizer, rows, order.tolist())
        if number % 10 == 0:
            text = tokenizer.decode(rows[0].prompt + rows[0].answer)
            print(f"step {number}: reward {fmean(row.reward for row in rows):.3f}   {text}")


def imitate(policy, task, steps: int, gen):
    """Before RL: learn from demonstrations, so that some answers are right and RL can compare.

    Most of them guess, as `so #86` does, and are usually wrong; some work it out and are right.
    """
    optimizer = torch.optim.Adam(policy.model.parameters(), 6e-3)
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = 6e-3 * (1 - number / steps)
        optimizer.zero_grad()
        for i in torch.randint(len(task.train), (32,), generator=gen).tolist():
            (prompt,) = task.encode(policy.tokenizer, [task.train[i]])
            demo = policy.tokenizer(task.train[i].demo)["input_ids"] + policy.eos
            # 32 demonstrations have 350 to 400 tokens; any constant divisor would do
            (-log_probs(policy, prompt, demo).sum() / 400).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()


# ---------------- not part of GRPO: a baseline at every prefix (learn's baseline=True)


def subtract_baseline(rows: list, G: int):
    """Compare each answer with those of the same prefix: the prompt and the tokens before.

        push -> push - r b,    b: the mean of push / r over the other answers of that prefix

    b says what answers of this prefix get, whichever token they take here. So what is left of a
    push is due to the token and to what follows it. Where all answers of the prefix take the same
    token, what is left sums to 0: with r = 1, pushes of .05 and -.02 become .07 and -.07. An answer
    without others keeps its push.

    Why r b, and not b: if pi_old samples the token, r b grad log pi is 0 on average, because

        sum over tokens of pi_old (pi / pi_old) grad log pi = sum of grad pi = grad 1 = 0

    So the expected update stays as it is, if nothing has been learnt from these answers yet, and if
    b does not depend on the answer at hand. In GRPO b does depend on that answer, because its
    reward is in the group's mean, which is in the A of all others. So the expected update moves.

    A token that the min has stopped is pushed again, by - r b. Without that the expected update
    would change.
    """
    corrected = []
    for i, row in enumerate(rows):
        start, push = i - i % G, list(row.push)
        others = [other for other in rows[start : start + G] if other is not row]
        for t in range(len(push)):
            same = [x for x in others if len(x.push) > t and x.answer[:t] == row.answer[:t]]
            if same:
                push[t] -= row.ratio[t] * fmean(x.push[t] / x.ratio[t] for x in same)
        corrected.append(push)
    for row, push in zip(rows, corrected, strict=True):
        row.push = push


if __name__ == "__main__":
    main()
