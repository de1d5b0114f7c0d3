"""The shapes that the benches run, and a training step on them: random weights and prompts."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

import train

EOS = 1
GROUP = 8  # answers to a prompt


@dataclass
class Case:
    prompts: int
    prompt: int  # tokens
    mean: float  # of the answers' lengths before the cap; inf: hardly an answer ends
    cap: int
    layers: int
    width: int
    vocab: int


CASES = {
    "toy": Case(prompts=32, prompt=6, mean=12, cap=16, layers=2, width=64, vocab=22),
    "gsm8k": Case(prompts=8, prompt=120, mean=70, cap=256, layers=4, width=256, vocab=2048),
    "0.5B": Case(
        prompts=16, prompt=120, mean=math.inf, cap=512, layers=24, width=896, vocab=151_936
    ),
}


def architecture(case: Case) -> nn.Module:
    """The case's model: a GPT-2, or Qwen2.5-0.5B's shape where the width is its own."""
    if case.width == 896:
        shape = Qwen2Config(
            vocab_size=case.vocab,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=case.layers,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        return Qwen2ForCausalLM(shape)
    shape = GPT2Config(
        vocab_size=case.vocab,
        n_layer=case.layers,
        n_embd=case.width,
        n_head=4,
        n_positions=max(1024, case.prompt + case.cap),
        activation_function="gelu_pytorch_tanh",
        bos_token_id=None,
        eos_token_id=EOS,
        # We never drop out; TRL would.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(shape)


def make_policy(case: Case, tokenizer=None, device: str = "cpu") -> train.Policy:
    """Random weights, with a bias on EOS that makes the answers' lengths geometric."""
    torch.manual_seed(0)
    model = architecture(case)
    model.generation_config.update(eos_token_id=EOS, pad_token_id=0)
    if case.mean < math.inf:
        head = nn.Linear(case.width, case.vocab)
        head.weight.data = model.get_output_embeddings().weight.data.clone()
        head.bias.data.zero_()
        head.bias.data[EOS] = math.log((case.vocab - 1) / (case.mean - 1))
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(head)
    model, eos = model.to(device).eval(), torch.tensor([EOS], device=device)
    return train.Policy(model, tokenizer, eos, bf16=train.has_bf16(eos.device))


class Task:
    """Random prompts, and a reward that half of the answers get. An item and a text are ids."""

    def __init__(self, case: Case):
        gen = torch.Generator().manual_seed(0)
        size = (case.prompts, case.prompt)
        self.train = torch.randint(2, case.vocab, size, generator=gen).tolist()

    def encode(self, tokenizer, items: list[list[int]]) -> list[list[int]]:
        return items

    def reward(self, text: list[int], item=None) -> float:
        return float(sum(text) % 2)


class Ids:
    """A tokenizer whose text is the list of ids itself."""

    def batch_decode(self, ids: list[list[int]]) -> list[list[int]]:
        return ids


def make_config(case: Case, **more) -> train.Config:
    """A step on all of the case's prompts. The learning rate is 0: the policy stays as it is."""
    same = dict(group_size=GROUP, minibatches=1, lr=0.0, schedule="constant", reference=False)
    same |= dict(prompts=case.prompts, max_tokens=case.cap, micro_rows=case.prompts * GROUP)
    return train.Config(**same | more)


def step(policy: train.Policy, task: Task, config, number: int = 1, reference=None) -> dict:
    """A training step as train.main makes it. Returns its metrics."""
    optimizer = train.adamw(policy.model, config.lr)
    answers = train.sample(policy, task, task.train, number, config)
    scored = train.score(policy, reference, answers, config)
    updates = train.learn(policy, optimizer, scored, config)
    return train.diagnose(policy, scored, updates, config)
