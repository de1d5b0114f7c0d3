"""What several tests use: tiny runs, models saved as a user's own would be, tasks, float64."""

import json
import os
from contextlib import contextmanager
from pathlib import Path

# Before torch and transformers are imported. The tests are about bits: they run on the CPU,
# whatever else is there. And they wait for no network.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)  # the models are tiny; threads only wait for each other

import train  # noqa: E402
from tasks.arithmetic import Arithmetic  # noqa: E402
from tasks.task import Item  # noqa: E402

TOY = Arithmetic()
TINY = "--steps 4 --warm-steps 3 --warm-rows 8 --prompts 4 --group-size 3 --layers 1 --width 16"
TINY += " --max-tokens 12 --eval-items 6 --eval-every 2 --minibatches 2"
TINY = TINY.split()


def run(folder: Path, *args) -> Path:
    """Train in a directory, which is returned."""
    train.main([*TINY, "--out", str(folder), *map(str, args)])
    return folder


def metrics(folder: Path) -> list[dict]:
    """metrics.jsonl without what differs between equal runs."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [timeless(json.loads(line)) for line in lines]


def timeless(line: dict) -> dict:
    return {key: x for key, x in line.items() if not key.endswith("seconds")}


class Letters(Arithmetic):
    """Right: an odd number of the item's own letters. Half right: two of them.

    Its prompts hold id 0, which is padding elsewhere.
    """

    def __init__(self):
        pairs = [("5=", "13579,so"), ("23=", " "), ("4+4+4=", "67890#k"), ("5=", "02468,=m")]
        others = [("6+6=", "02468so"), ("7=", "13579"), ("8+8+8=", "hm+"), ("9+=", "so")]
        others.append(("0=", ""))
        self.train = [Item(*pair, f"so #{i}") for i, pair in enumerate(pairs)]
        self.test = [Item(*pair, "") for pair in others]

    def encode(self, tokenizer, items):
        return [[*row[:-1], 0, row[-1]] for row in super().encode(tokenizer, items)]

    def shares(self, items, texts):
        return {}

    def correction(self, item, siblings=1):
        return self.repair(item, "so #9", ["ok #7"] * siblings, demo="so #7")

    def reward(self, text, item):
        count = sum(letter in item.answer for letter in text)
        return count % 2 + 0.5 * (count == 2)


@contextmanager
def float64():
    """Everything in float64: new tensors, and what the code asks to be fp32.

    train.py says `.float()` where bf16 must end. A switch for the sake of tests would stand in what
    people read, so what it means is changed here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def build(kind: str, folder, dtype=torch.float32, **options) -> str:
    """A model and the toy's tokenizer, in a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = TOY.make_tokenizer()
    sizes = dict(
        vocab_size=len(tokenizer),
        initializer_range=0.3,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=kind == "qwen2",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | options))
    if kind == "qwen2":  # several EOS ids, and a sampler that must not be used
        more = dict(top_k=1, top_p=0.1, repetition_penalty=5.0, do_sample=True)
        model.generation_config.update(eos_token_id=[2, 3], **more)  # the tokenizer has 1
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def qwen_path(tmp_path_factory):
    return build("qwen2", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def scratch():
    """The toy's own model, in small."""
    return load("scratch", layers=1, width=16)


def load(path, **options):
    """The policy at a path, as the trainer loads it; options are the Config's."""
    return train.load_policy(train.Config(**options), TOY, str(path))


@pytest.fixture
def easy(monkeypatch):
    """Few sums, and a reward that an untrained model earns about half of the time."""

    def few(self):
        self.train, self.test = TOY.train[:40], TOY.test[:8]

    monkeypatch.setattr(Arithmetic, "__init__", few)
    monkeypatch.setattr(Arithmetic, "reward", lambda self, text, item: text.count("1") % 2 * 1.0)
