"""Which models are taken, and which are refused in one line since they would not be exact."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import load
from helpers import TINY

import train
from llm import policy as llm_policy
from llm.policy import check_context
from toy.arithmetic import Arithmetic


def save(model, folder) -> str:
    """A model of our vocabulary, with the toy's tokenizer."""
    model.save_pretrained(folder)
    Arithmetic().make_tokenizer().save_pretrained(folder)
    return str(folder)


def refused(capsys, path, **options) -> str:
    with pytest.raises(SystemExit) as stopped:
        load(path, **options)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_a_policy_is_in_eval_mode_with_fp32_weights_and_every_eos_id(policy, model_path):
    assert not policy.model.training
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert policy.eos.tolist() == ([1, 2, 3] if "qwen" in model_path else [1])


def test_scratch_is_gpt2_with_its_own_gelu(scratch):
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = load("scratch", layers=3, width=24).model.config
    assert (ours.n_layer, ours.n_embd) == (3, 24)
    ours = scratch.model.config
    assert ours.activation_function != GPT2Config().activation_function == "gelu_new"
    config = GPT2Config.from_dict(ours.to_dict() | {"activation_function": "gelu_new"})
    theirs = GPT2LMHeadModel(config).eval()
    theirs.load_state_dict(scratch.model.state_dict())
    ids = torch.arange(len(scratch.tokenizer))[None]
    torch.testing.assert_close(scratch.model(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)


def test_a_model_whose_state_is_no_key_value_cache_is_refused(tmp_path, capsys):
    """Its state after a prompt cannot be shared between answers."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=122)
    sizes |= dict(num_key_value_heads=2, num_hidden_layers=2, eos_token_id=1)
    model = Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=["conv", "full_attention"]))
    assert "Lfm2ForCausalLM is not supported" in refused(capsys, save(model, tmp_path))


def test_a_model_that_changes_its_logits_after_the_output_layer_is_refused(tmp_path, capsys):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=22)
    sizes |= dict(num_key_value_heads=1, num_hidden_layers=1, head_dim=8, eos_token_id=1)
    config = Gemma2Config(**sizes, final_logit_softcapping=0.5, initializer_range=1.0)
    said = refused(capsys, save(Gemma2ForCausalLM(config), tmp_path))
    assert "changes its logits after the output layer" in said


@pytest.mark.parametrize("what", ["attention_mask", "position_ids"])
def test_a_model_whose_cache_and_plain_log_probs_differ_is_refused(
    model_path, monkeypatch, capsys, what
):
    """Here because prompts are read without their mask, or with their padding counted."""
    from transformers import GPT2Model, LlamaModel, Qwen2Model

    for cls in (GPT2Model, LlamaModel, Qwen2Model):
        real = cls.forward

        def forward(self, *args, real=real, **kwargs):
            reads_prompts = args and args[0].shape == (2, 5)
            return real(self, *args, **(kwargs | {what: None} if reads_prompts else kwargs))

        monkeypatch.setattr(cls, "forward", forward)
    assert "is not supported (with its cache, log-probs differ by" in refused(capsys, model_path)


def test_an_output_layer_with_a_bias_is_refused_where_token_scores_would_leave_it_out(
    tmp_path, capsys
):
    from transformers import PhiConfig, PhiForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=22)
    config = PhiConfig(**sizes, num_attention_heads=2, eos_token_id=1)
    path = save(PhiForCausalLM(config), tmp_path)
    said = refused(capsys, path, method="nthr")
    assert "has a bias, which its token scores leave out" in said
    assert load(path, method="grpo").model.get_output_embeddings().bias is not None


def test_a_model_without_an_end_of_sequence_token_is_refused(tmp_path, scratch, capsys):
    scratch.model.save_pretrained(tmp_path)
    scratch.tokenizer.save_pretrained(tmp_path)
    for name in ("generation_config.json", "tokenizer_config.json", "config.json"):
        kept = json.loads((tmp_path / name).read_text())
        kept = {key: x for key, x in kept.items() if key not in ("eos_token", "eos_token_id")}
        (tmp_path / name).write_text(json.dumps(kept))
    if (tmp_path / "special_tokens_map.json").exists():
        (tmp_path / "special_tokens_map.json").unlink()
    assert "names an end-of-sequence token" in refused(capsys, str(tmp_path))


@pytest.mark.parametrize("length, fits", [(1019, True), (1020, False)])
def test_a_demonstration_and_its_end_must_fit_the_context(scratch, length, fits, capsys):
    demo = SimpleNamespace(prompt="1+1=", demo="#" * length)
    task = SimpleNamespace(encode=Arithmetic().encode, test=[], train=[demo])
    check_context(scratch, task, train.Config(max_tokens=4), warm=False)
    with nullcontext() if fits else pytest.raises(SystemExit):
        check_context(scratch, task, train.Config(max_tokens=4), warm=True)
    assert fits or "longest prompt 4 + longest demonstration 1021 exceed" in capsys.readouterr().err


def test_a_held_out_prompt_must_fit_the_context(scratch, capsys):
    items = [SimpleNamespace(prompt="1" * length, demo="") for length in (4, 1021)]
    task = SimpleNamespace(encode=Arithmetic().encode, train=items[:1], test=items)
    check_context(scratch, task, train.Config(max_tokens=4, eval_items=1), warm=False)
    with pytest.raises(SystemExit):
        check_context(scratch, task, train.Config(max_tokens=4), warm=False)
    assert "longest prompt 1021 + --max-tokens 4 exceed" in capsys.readouterr().err


@pytest.mark.parametrize("tokens, fits", [(203, True), (204, False)])
def test_a_correction_problem_of_full_length_must_fit_the_context(scratch, tokens, fits, capsys):
    """A prompt of 4, the answer and 3 siblings with an "=" each, and the correction: 8 + 5 T."""
    task = SimpleNamespace(encode=Arithmetic().encode, repair=Arithmetic().repair)
    task.train, task.test = Arithmetic().train[:1], []
    task.train = [task.train[0].__class__("1+1=", "2", "#2")]
    config = train.Config(method="ibpo", repair_references=3, max_tokens=tokens)
    with nullcontext() if fits else pytest.raises(SystemExit):
        check_context(scratch, task, config, warm=False)
    assert fits or f"--max-tokens {tokens} exceed the model's" in capsys.readouterr().err


def test_a_full_gpu_is_one_line_that_says_what_helps(tmp_path, monkeypatch, capsys):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has ...")
    for module, place in ((llm_policy, "cache_gap"), (train, "warm_start"), (train, "learn")):
        with monkeypatch.context() as broken, pytest.raises(SystemExit) as stopped:
            broken.setattr(module, place, Mock(side_effect=full))
            train.main([*TINY, "--out", str(tmp_path / place)])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1
        assert error.startswith("error: CUDA out of memory; what helps: less of --micro-rows")
