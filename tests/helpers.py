"""What several tests use: a tiny run of the trainer, a small task, random policies, float64."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train
from toy.arithmetic import Arithmetic, Item

TINY = "--steps 4 --warm-steps 3 --warm-rows 8 --prompts 4 --group-size 3 --layers 1 --width 16"
TINY += " --max-tokens 12 --eval-items 6 --eval-every 2 --minibatches 2 --train-items 500"
TINY = TINY.split()


def run(folder: Path, *args) -> Path:
    """Train in a directory, which is returned."""
    train.main([*TINY, "--out", str(folder), *map(str, args)])
    return folder


def metrics(folder: Path) -> list[dict]:
    """metrics.jsonl without what differs between equal runs: the seconds and their rate."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith("_s")} for line in lines]


def spy(monkeypatch, name: str, look=lambda *args: args) -> list:
    """What `look` makes of the arguments of a function of train.py, at every call from now on."""
    calls, real = [], getattr(train, name)
    monkeypatch.setattr(train, name, lambda *args: calls.append(look(*args)) or real(*args))
    return calls


def refused(function, *args) -> str:
    """What a function says in the one line with which it ends the process."""
    with pytest.raises(SystemExit) as stopped:
        function(*args)
    said = stopped.value.code
    assert isinstance(said, str) and said.startswith("error: ") and "\n" not in said
    return said


class Letters(Arithmetic):
    """Right: an odd number of the item's own letters. Half right: two of them."""

    def __init__(self):
        pairs = [("1+1=", "13579,so"), ("23=", "2"), ("4+4+4=", "67890#k"), ("5=", "02468,=m")]
        others = [("6+6=", "02468so"), ("7=", "13579"), ("8+8+8=", "hm+"), ("9+=", "so")]
        others.append(("0=", ""))
        self.train = [Item(*pair, "") for pair in pairs]
        self.test = [Item(*pair, "") for pair in others]

    def reward(self, text, item):
        count = sum(letter in item.answer for letter in text)
        return count % 2 + 0.5 * (count == 2)


def random_policy(seed: int) -> train.Policy:
    """A small GPT-2 that repeats itself, with three ids that end an answer."""
    policy = train.load_policy(train.Config(width=8, seed=seed), Arithmetic(), "scratch")
    policy.model.get_input_embeddings().weight.data *= 1.5
    return replace(policy, eos=torch.tensor([1, 5, 9]))


def pad(rows: list[list[int]]) -> train.Prompts:
    """Prompts as the trainer has them, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[-1] * (width - len(row)) + row for row in rows])
    return train.Prompts(ids.clamp(min=0), ids >= 0)


def answer(policy, prompts: list[list[int]], max_tokens: int, temperature: float, gen):
    """Answers to prompts that belong to no task."""
    padded = pad(prompts)
    tokens, mask, logp = train.generate(policy, padded, max_tokens, temperature, gen)
    return train.Answers(
        items=[None] * len(prompts),
        prompts=padded,
        texts=[""] * len(prompts),
        tokens=tokens,
        mask=mask,
        logp=logp,
        rewards=torch.zeros(len(prompts)),
        generated=int(mask.sum()),
    )


def rows_of(answers) -> list[list[int]]:
    """The tokens of each answer."""
    return [y[m].tolist() for y, m in zip(answers.tokens, answers.mask, strict=True)]


@contextmanager
def float64():
    """Everything in float64: new tensors, and what the code asks to be fp32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
