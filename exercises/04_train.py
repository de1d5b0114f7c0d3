# %% [markdown]
"""
# 4. Train it (12 minutes)

**Aim:** train one policy with GRPO and another with Dr. GRPO, and see which strategy each ends at.

    prompt -+- better: work it out -+- good plan - right 6 times in 10     16 tokens
            |                       `- bad plan -- never right             16 tokens
            `- worse: a shortcut ----------------- right 2 times in 10     4 tokens if right,
                                                                           24 if wrong

A right answer earns 1, a wrong one 0. At the start 88 of 100 answers follow the better strategy,
half of them with a good plan. So the mean reward is 0.29. If all answers work it out with a good
plan, the mean reward is 0.6. If all take the shortcut, it is 0.2.

Every step samples 16 groups of 4 answers, compares each answer with its group, and makes one
update. So all ratios are 1, and nothing is clipped. As on the board, A is R - mean(R), without the
std. The two methods differ in what divides A:

    GRPO:      c_i = A_i / T_i       T_i: the length of answer i
    Dr. GRPO:  c_i = A_i / L         L: the most tokens that an answer may have

**a)** Predict the mean reward at the end, once for GRPO and once for Dr. GRPO. Nothing is trained
before you have written it down.

**b)** Write the loss, -J, with J = (1/N) sum_i c_i log pi_i, a mean over the N answers of the step.
Here log pi_i is the log-probability of the whole answer, that is, the sum over its tokens.
`log_pi`, `A` and `T` are (N,). The rest of the file is complete. Read `train`: it is GRPO without
the std, and with one update per step, so without the ratio and the clip.

After a PASS the grader runs this file. It trains with three seeds, in a few seconds, and prints the
mean reward of every 80 steps.

**If you are early:** after a PASS, change one number of `sample` so that one of the methods ends at
the other strategy. Predict, and run this file again.

**Hint** for b): one line for each method.

**Grade it:** `python -m exercises.grader 4`
"""


# %%
def prediction() -> tuple[float, float]:
    """a) The mean reward at the end: of GRPO, and of Dr. GRPO."""
    raise NotImplementedError


# %%
import torch
from torch import Tensor

L = 24


def loss(log_pi: Tensor, A: Tensor, T: Tensor, method: str) -> Tensor:
    """b) A number to minimise. `method` is "grpo" or "dr-grpo"."""
    raise NotImplementedError


# %%
def sample(logits: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """n answers: log pi, reward and length of each. (n,) each."""
    better, good_plan = logits.sigmoid()  # the probabilities of the two choices
    works = torch.rand(n) < better.detach()
    plans = torch.rand(n) < good_plan.detach()
    log_works = torch.where(plans, good_plan, 1 - good_plan).log() + better.log()
    log_pi = torch.where(works, log_works, (1 - better).log())  # all other tokens are certain
    chance = torch.where(works, torch.where(plans, 0.6, 0.0), 0.2)
    right = torch.rand(n) < chance
    length = torch.where(works, 16, torch.where(right, 4, 24))
    return log_pi, right.double(), length


def train(method: str, seed: int, steps: int = 800) -> list[float]:
    """The mean reward of every step."""
    torch.manual_seed(seed)
    logits = torch.tensor([2.0, 0.0], requires_grad=True)  # the policy: for the strategy, the plan
    optimizer = torch.optim.SGD([logits], lr=20.0)  # high, because the c are small
    rewards = []
    for _ in range(steps):
        log_pi, R, T = sample(logits, 16 * 4)
        groups = R.view(16, 4)
        A = (groups - groups.mean(1, keepdim=True)).view(-1)
        optimizer.zero_grad()
        loss(log_pi, A, T, method).backward()
        optimizer.step()
        rewards.append(R.mean().item())
    return rewards


if __name__ == "__main__":
    print("  mean reward of every 80 steps, from first to last:\n")
    for method, guess in zip(["grpo", "dr-grpo"], prediction()):
        ends = []
        for seed in range(3):
            rewards = torch.tensor(train(method, seed)).view(-1, 80).mean(1)
            print(f"  {method:8} seed {seed}  ", *(f"{mean:.2f}" for mean in rewards))
            ends.append(rewards[-1].item())
        print(f"  you predicted {guess:.2f}, the seeds end at {sum(ends) / len(ends):.2f} on average\n")
