"""What NTHR's credit rule costs.

    python -m experiments.bench.nthr [--rounds 30]

Time: one toy step of nthr against one of grpo, interleaved. Both have the same weights, prompts and
seed of sampling, another one each round.

Memory: what the rule adds for 8 answers of 1024 tokens with d = 1024 and 1000 different ids, hidden
states included. It is the rise of a process's peak resident set (Linux), the median of 5.
"""

from dataclasses import replace
from itertools import count
from statistics import median

import torch

import train
from experiments.bench.step import make_step
from experiments.bench.timing import child, make_parser, rise_mb, show_ratio, turns
from llm.policy import load_policy
from losses import METHODS, OldPolicy, nthr


def time_steps(rounds: int) -> dict[str, list[float]]:
    """Seconds of the steps, by method. The learning rate is 0: the weights stay as they are."""
    config = train.parse(["--warm-steps", "300", "--no-reference", "--lr", "0"])
    torch.set_num_threads(config.threads)
    task = train.load_task(config)
    policy = load_policy(config, task, config.model)
    train.warm_start(policy, task, config)
    step = make_step(policy, task, train.prompt_batches(task, config)[0])

    def side(method: str):
        chosen = replace(config, method=method)
        numbers = count(1)
        return lambda: step(chosen, next(numbers))

    return turns({"grpo": side("grpo"), "nthr": side("nthr")}, rounds)


def measure_memory() -> float:
    torch.set_num_threads(1)
    G, T, d, V = 8, 1024, 1024, 32_000
    tokens = torch.arange(G * T).view(G, T) % 1000 * 32  # (G, T)
    mask = torch.ones(G, T, dtype=torch.bool)
    logp = torch.full((G, T), -1.0)
    adv = torch.ones(G, T)
    rewards = torch.tensor([1.0, 0.0] * 4)  # (G,)
    head = torch.randn(V, d)  # is there without nthr, as the log-probs are

    def work():
        hidden = torch.randn(G, T, d)
        nthr(adv, OldPolicy(tokens, mask, logp, rewards, G, hidden=hidden, head=head))

    work()  # loads the libraries' kernels
    return rise_mb(work)


def main(argv: list[str] | None = None):
    assert METHODS["nthr"].needs_hidden
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--memory", action="store_true", help="only the rise of the peak, in MB")
    args = parser.parse_args(argv)
    if args.memory:
        print(f"{measure_memory():.1f}")
        return
    seconds = time_steps(args.rounds)
    print(f"toy step, nthr / grpo: {show_ratio(seconds['nthr'], seconds['grpo'])}")
    megabytes = [child("-m", "experiments.bench.nthr", "--memory")[0] for _ in range(5)]
    shape = "memory of 8 x 1024 tokens, d = 1024, 1000 ids"
    print(f"{shape}: {median(megabytes):.0f} MB, of which hidden states 34 MB")


if __name__ == "__main__":
    main()
