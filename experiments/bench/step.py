"""One training step for the benches: random weights, random prompts, rewards by token ids."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

import train
from experiments.bench.rollout import EOS, GROUP, Case, build
from llm.policy import Policy
from llm.runs import adamw


@dataclass
class Task:
    """Random prompts; a reward that half of the answers get, by their token ids."""

    train: list[list[int]]

    def encode(self, tokenizer, items: list[list[int]]) -> list[list[int]]:
        return items

    def reward(self, text: list[int], item: list[int]) -> float:
        return float(sum(text) % 2)


class Ids:
    """A tokenizer whose text is the list of ids itself."""

    def batch_decode(self, ids: list[list[int]]) -> list[list[int]]:
        return ids


def with_ends(case: Case):
    """The case's random model, with a bias on EOS that makes the answers' lengths geometric.

    Without it an answer hardly ever ends.
    """
    model = build(case, "cpu")[0]
    head = torch.nn.Linear(case.width, case.vocab)
    head.weight.data = model.get_output_embeddings().weight.data.clone()
    head.bias.data.zero_()
    head.bias.data[EOS] = math.log((case.vocab - 1) / (case.mean - 1))
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    return model


def make_policy(model, tokenizer) -> Policy:
    return Policy(model, tokenizer, torch.tensor([EOS], device=model.device))


def make_config(case: Case, minibatches: int = 1) -> train.Config:
    """A step on all of the case's prompts. The learning rate is 0: the policy stays as it is."""
    return train.Config(
        prompts=case.prompts,
        group_size=GROUP,
        max_tokens=case.cap,
        minibatches=minibatches,
        micro_rows=case.prompts * GROUP,
        lr=0.0,
        schedule="constant",
        reference=False,
    )


def make_step(policy: Policy, task, items: list, reference: Policy | None = None) -> Callable:
    """A function that makes a training step on these items, as train.train() does.

    It takes a train.Config and the step's number, which seeds the sampling. It returns the metrics.
    """
    optimizer = adamw(policy.model, 0.0)  # learn() sets the config's learning rate

    def step(config: train.Config, number: int = 1) -> dict[str, float]:
        answers = train.sample(policy, task, items, number, config)
        scored = train.score(policy, reference, answers, config)
        updates = train.learn(policy, optimizer, scored, config)
        return train.diagnose(policy, answers, scored, updates, config)

    return step


def make_case_step(case: Case) -> Callable:
    """make_step for the case's random model and prompts."""
    task = Task(build(case, "cpu")[1])
    return make_step(make_policy(with_ends(case), Ids()), task, task.train)
