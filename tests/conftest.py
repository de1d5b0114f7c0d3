"""Tiny causal LMs of three architectures, saved where `from_pretrained` finds them, as a user's own
model would be."""

import json
import os

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # read when transformers is imported: no test may wait for a network
)

import pytest  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

torch.set_num_threads(1)  # the models are tiny; threads only wait for each other
CHAT = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
SMALL = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def build(kind: str, folder):
    special = ["<pad>", "<eos>", "<end>", "<user>", "<bot>"]
    vocab = {token: i for i, token in enumerate([*special, *map(chr, range(10, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=special[2:],
    )
    torch.manual_seed(0)
    common = dict(vocab_size=len(fast), bos_token_id=None, pad_token_id=0, initializer_range=0.3)
    if kind == "gpt2":  # learned positions, tied embeddings, dropout that must stay off
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=1024, eos_token_id=1, **common)
        )
    elif kind == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(eos_token_id=1, max_position_embeddings=1024, **SMALL, **common)
        )
    else:  # qwen2: several EOS ids, a chat template, a generation config of its own, tied embeddings
        config = Qwen2Config(
            eos_token_id=1,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            **SMALL,
            **common,
        )
        model = Qwen2ForCausalLM(config)
        model.generation_config.update(
            eos_token_id=[1, 2], top_k=1, top_p=0.1, repetition_penalty=5.0, do_sample=True
        )
        fast.chat_template = CHAT
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session", params=["gpt2", "llama", "qwen2"])
def model_path(request, tmp_path_factory):
    return build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def qwen_path(tmp_path_factory):
    return build("qwen2", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def small_gsm8k(tmp_path_factory):
    """A directory in GSM8K's own format, with sums of our own."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, start in (("train", 2), ("test", 40)):
        lines = [
            {
                "question": f"Ann has {n} nuts and finds {n + 1}.",
                "answer": f"{n}+{n + 1}=<<{n}+{n + 1}={2 * n + 1}>>.\n#### {2 * n + 1}",
            }
            for n in range(start, start + 24)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)

@pytest.fixture(scope="module")
def double():
    """Everything in float64: new tensors, and what is asked to be fp32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)
