"""Which models are taken, how they are loaded, and what is refused in one line."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import build, load
from helpers import TINY, refused

import train
from toy.arithmetic import Arithmetic, Item


def test_a_policy_is_in_eval_mode_with_fp32_weights_and_every_eos_id(tmp_path):
    policy = load(build("qwen2", tmp_path, torch.bfloat16))
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert policy.eos.tolist() == [1, 2, 3]  # of the tokenizer, and of the generation config
    assert not policy.model.generation_config.do_sample  # its sampler is not ours
    policy = load(build("gpt2", tmp_path))
    assert policy.eos.tolist() == [1] and not policy.model.training


def test_scratch_has_the_size_and_the_seed_of_the_config():
    config = load("scratch", layers=3, width=24).model.config
    assert (config.n_layer, config.n_embd) == (3, 24)
    seeds = [load("scratch", width=16, seed=seed).model.lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(*seeds[:2]) and not torch.equal(*seeds[1:])


def without_an_output_layer(folder):
    """transformers would draw it at random, each time another one."""
    from transformers import AutoModel, AutoTokenizer

    whole = build("llama", folder / "whole")
    AutoModel.from_pretrained(whole).save_pretrained(folder / "trunk")
    AutoTokenizer.from_pretrained(whole).save_pretrained(folder / "trunk")
    return folder / "trunk"


def cut_off(folder):
    path = build("llama", folder)
    (folder / "model.safetensors").write_bytes(b"cut off")
    return path


def without_an_end(folder):
    policy = load("scratch", layers=1, width=16)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    for name in ("generation_config.json", "tokenizer_config.json", "config.json"):
        kept = json.loads((folder / name).read_text())
        kept = {key: x for key, x in kept.items() if key not in ("eos_token", "eos_token_id")}
        (folder / name).write_text(json.dumps(kept))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    return folder


def without_keys_and_values(folder):
    return build("mamba", folder)


MODELS = [without_an_output_layer, cut_off, without_an_end, without_keys_and_values]


@pytest.mark.parametrize("make", [*MODELS, lambda folder: folder / "none"])
def test_a_model_that_cannot_be_trained_is_refused(make, tmp_path):
    path = str(make(tmp_path))
    assert path in refused(load, path)


def test_token_scores_know_no_bias(tmp_path):
    policy = load(build("phi", tmp_path))
    assert policy.model.get_output_embeddings().bias is not None
    task, config = Arithmetic(), train.Config(method="nthr", max_tokens=2)
    answers = train.sample(policy, task, task.train[:2], 1, config)
    assert "nthr" in refused(train.score, policy, None, answers, config)


@pytest.mark.parametrize("length, fits", [(1019, True), (1020, False)])
def test_a_text_must_fit_the_context(scratch, length, fits):
    """The prompt has 4 tokens, and a demonstration one more, its end."""
    task = SimpleNamespace(encode=Arithmetic().encode, reward=lambda *_: 0.0)
    task.train = [Item("1+1=", "2", "#" * length)]
    config = train.Config(warm_steps=1, warm_rows=1, warm_lr=0.0, max_tokens=1)
    ways = [lambda: train.warm_start(scratch, task, config)]
    items = [Item("1" * (length + 4), "2", "")]
    ways.append(lambda: train.ask(scratch, task, items, config, None))
    for way in ways:
        way() if fits else refused(way)


def test_a_full_gpu_is_one_line_that_says_what_helps(tmp_path, monkeypatch):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has ...")
    for place in ("warm_start", "learn"):
        with monkeypatch.context() as broken:
            broken.setattr(train, place, Mock(side_effect=full))
            said = refused(train.main, [*TINY, "--out", str(tmp_path / place)])
        assert "CUDA out of memory" in said and "--micro-rows" in said
    assert not (tmp_path / "warm_start").exists() and (tmp_path / "learn").exists()
