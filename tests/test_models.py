"""Which models are taken, and which are refused in one line since they would not be exact."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import naive
import pytest
import torch
from conftest import CHAT, TRANSFORMERS_4, build, load
from helpers import TINY

import train
from llm import policy as llm_policy
from llm.policy import check_context, list_notes
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


LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0)
LLAMA3 |= dict(high_freq_factor=4.0, original_max_position_embeddings=32)
FAMILIES = {
    "qwen3": dict(head_dim=8),
    "llama": dict(rope_parameters=LLAMA3),
    "gemma": dict(head_dim=8),
    "gemma3_text": dict(
        head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "mistral": dict(sliding_window=4),
    "phi3": {},
    "gpt_neox": {},
    "olmo2": {},
    "smollm3": {},
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32),
    "mixtral": dict(num_local_experts=4),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_and_scores_what_its_plain_forward_pass_says(family, tmp_path):
    """GPT-2, Llama and Qwen2 have all tests of sampling and scoring. A text is longer than the
    sliding window, and than the first context of Llama 3's RoPE."""
    if family == "gemma3_text" and TRANSFORMERS_4:
        pytest.skip("transformers 4 refuses it: its base model is itself")
    policy = load(build(family, tmp_path, **FAMILIES[family]))
    prompts = [prompt for prompt in ([5, 60, 61, 62], [70], [*range(80, 95)]) for _ in range(2)]
    rows, sampled = train.generate(policy, prompts, 24, 1.5, train.rng(1))
    mask, config = rows.mask, train.Config(temperature=1.5, micro_rows=4)
    answers = [y[m].tolist() for y, m in zip(rows.tokens, mask, strict=True)]
    plain = torch.cat(naive.log_probs(policy, prompts, answers, 1.5))
    torch.testing.assert_close(sampled[mask], plain, rtol=0, atol=3e-5)
    scored, _, _ = train.log_probs(policy, rows, config)
    torch.testing.assert_close(scored[mask], plain, rtol=0, atol=3e-5)
    weights, weight = [*policy.model.parameters()], torch.randn(len(plain))
    ours = torch.autograd.grad((scored[mask] * weight).sum(), weights, allow_unused=True)
    theirs = torch.autograd.grad((plain * weight).sum(), weights, allow_unused=True)
    for x, y in zip(ours, theirs, strict=True):
        assert (x is y is None) or (x - y).norm() <= 1e-4 * y.norm() + 1e-5


@pytest.mark.parametrize(
    "kind, options, reason",
    [
        ("mamba", {}, "MambaForCausalLM keeps more than keys and values"),
        ("lfm2", dict(layer_types=["conv", "full_attention"]), "Lfm2ForCausalLM keeps more than"),
        ("rwkv", {}, "RwkvForCausalLM is not supported ("),
    ],
)
def test_a_model_whose_state_is_no_key_value_cache_is_refused(
    tmp_path, capsys, kind, options, reason
):
    """Its state after a prompt cannot be shared between answers."""
    said = refused(capsys, build(kind, tmp_path, **options))
    assert "accepted: decoders of text that keep keys and values alone" in said
    assert reason in said or TRANSFORMERS_4 and f"{reason.split()[0]} is not supported" in said


def test_a_model_that_sees_is_refused(capsys):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    sizes |= dict(head_dim=8, num_key_value_heads=1)
    seen = dict(image_size=28, patch_size=14)
    config = Gemma3Config(text_config=sizes | dict(vocab_size=9), vision_config=sizes | seen)
    with pytest.raises(SystemExit):
        llm_policy.refuse_unsupported(Gemma3ForConditionalGeneration(config), "gemma-3-4b")
    assert "Gemma3ForConditionalGeneration reads more than text" in capsys.readouterr().err


def test_a_rope_that_changes_with_the_length_is_refused_beyond_it(tmp_path, capsys):
    """There, the keys of a cache are not those of a whole forward pass."""
    rope = dict(rope_type="longrope", rope_theta=1e4)
    rope |= dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    options = dict(rope_parameters=rope, original_max_position_embeddings=32)
    policy, item = load(build("phi3", tmp_path, **options)), SimpleNamespace(prompt="1+1=")
    task = SimpleNamespace(encode=Arithmetic().encode, test=[], train=[item])
    check_context(policy, task, train.Config(max_tokens=28), warm=False)
    with pytest.raises(SystemExit):
        check_context(policy, task, train.Config(max_tokens=29), warm=False)
    assert "(LongRoPE); accepted: shorter" in capsys.readouterr().err


def test_what_to_know_of_a_model_is_said_at_the_start(tmp_path, scratch, monkeypatch, capsys):
    config = train.Config(task="gsm8k")
    assert list_notes(scratch, config) == []
    policy = load(build("mixtral", tmp_path, num_local_experts=2, num_hidden_layers=1))
    turn = "{% for m in messages %}<user>{{ m['content'] }}<end>\n{% endfor %}"
    policy.tokenizer.chat_template = turn
    router, end = list_notes(policy, config)
    assert "without its router's balancing loss" in router and "answers may run to" in end
    assert "ends an answer with '<end>', which does not end one here" in end
    policy.eos = torch.tensor([1, 2])  # <end> is 2
    assert list_notes(policy, config) == [router]
    policy.eos, policy.tokenizer.chat_template = torch.tensor([1]), CHAT  # nothing after an answer
    assert list_notes(policy, config) == [router]
    monkeypatch.setattr(train, "list_notes", lambda *_: ["of a model"])
    monkeypatch.setattr(train, "warm_start", Mock(side_effect=torch.OutOfMemoryError("full")))
    with pytest.raises(SystemExit):
        train.main([*TINY, "--out", str(tmp_path / "run")])
    assert "note: of a model\n" in capsys.readouterr().out


def test_files_that_lack_a_weight_or_do_not_fit_are_refused(tmp_path, capsys):
    """transformers would draw the output layer at random, each time another one."""
    from transformers import AutoModel, AutoTokenizer

    whole = build("llama", tmp_path / "whole")
    AutoModel.from_pretrained(whole).save_pretrained(tmp_path / "trunk")
    AutoTokenizer.from_pretrained(whole).save_pretrained(tmp_path / "trunk")
    assert "its files hold no lm_head.weight" in refused(capsys, str(tmp_path / "trunk"))
    (tmp_path / "whole" / "model.safetensors").write_bytes(b"cut off")
    assert "cannot be loaded" in refused(capsys, whole)
    assert "no such directory; accepted: scratch" in refused(capsys, str(tmp_path / "none"))


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
