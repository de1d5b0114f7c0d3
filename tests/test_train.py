"""The training script: its sampler, its log-probs, its gradient, its promises on the command
line."""

import copy
import itertools
import json
import math
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import train
from llm import policy as model
from llm.policy import CHUNK, PADDING, pieces
from losses import METHODS, Batch, group_advantages, kept_tokens
from train import Config, Rows, load_model, rollout, score

CPU = torch.device("cpu")
PROMPTS = [[5, 60, 61, 62], [70], [80, 81, 82, 83, 84, 85, 86]]
TINY = "--steps 4 --warm-steps 3 --warm-rows 8 --prompts 4 --group-size 3 --layers 1 --width 16 --max-tokens 12".split()
TINY += "--eval-items 6 --eval-every 2 --save-every 2 --minibatches 2 --train-items 500".split()


@pytest.fixture(scope="module")
def loaded(model_path):
    return load_model(Config(), None, CPU, model_path)


@pytest.fixture(scope="module")
def scratch():
    return load_model(Config(layers=1, width=16), train.Arithmetic(), CPU, "scratch")


def sample(loaded, prompts=PROMPTS, copies=1, tokens=12, temperature=0.0, seed=0):
    model, _, eos = loaded
    return rollout(model, prompts, copies, tokens, temperature, eos, train.rng(seed))


def test_greedy_rollout_is_token_by_token_argmax_without_a_cache(loaded):
    model, _, eos = loaded
    rows, _ = sample(loaded)
    for i, prompt in enumerate(PROMPTS):
        ids = list(prompt)
        for token in rows.tokens[i][rows.mask[i]].tolist():
            assert token == model(torch.tensor([ids])).logits[0, -1].argmax().item()
            ids.append(token)
        assert ids[-1] in eos or len(ids) == len(prompt) + 12


def test_rollout_log_probs_are_scoring_log_probs_at_every_temperature(loaded):
    for temperature in (0.7, 1.0, 1.6):
        rows, logp = sample(loaded, copies=4, temperature=temperature)
        again, _ = score(loaded[0], rows, temperature)
        assert torch.allclose(logp, again, atol=1e-4)


def test_scoring_is_the_plain_log_softmax_of_the_unpadded_sequence(loaded, monkeypatch):
    rows, _ = sample(loaded, copies=2, temperature=1.0)
    for chunk in (2**25, 300):  # 300 logits at once: three tokens a chunk, recomputed in backward
        monkeypatch.setitem(CHUNK, "cpu", chunk)
        logp, entropy = score(loaded[0], rows, 0.8)
        loaded[0].zero_grad()
        logp.sum().backward()
        grad = loaded[0].get_input_embeddings().weight.grad.clone()
        loaded[0].zero_grad()
        total = 0.0
        for i in range(len(rows.tokens)):
            answer = rows.tokens[i][rows.mask[i]]
            ids = torch.cat([rows.prompt[i][rows.prompt_mask[i]], answer])
            full = (loaded[0](ids[None]).logits[0, -len(answer) - 1 : -1] / 0.8).log_softmax(-1)
            expected = full.gather(1, answer[:, None]).squeeze(1)
            assert torch.allclose(logp[i][rows.mask[i]], expected, atol=1e-4)
            assert torch.allclose(entropy[i][rows.mask[i]], -(full.exp() * full).sum(-1), atol=1e-4)
            total = total + expected.sum()
        assert (logp[~rows.mask] == 0).all() and (entropy[~rows.mask] == 0).all()
        total.backward()
        assert torch.allclose(
            grad, loaded[0].get_input_embeddings().weight.grad, rtol=1e-3, atol=1e-3
        )


def test_pieces_hold_rows_of_like_length_and_each_row_once(loaded, monkeypatch):
    rows, _ = sample(loaded, copies=20, temperature=1.5)
    length = rows.mask.sum(1)
    assert len(length.unique()) > 5
    for size, padding in itertools.product((1, 7, 60, 100), (0, 3, 40, 10_000)):
        monkeypatch.setitem(PADDING, "cpu", padding)
        split = pieces(rows, size)
        assert torch.cat(split).sort().values.tolist() == list(range(60))
        assert (length[torch.cat(split)].diff() <= 0).all()  # longest first
        for piece, following in itertools.zip_longest(split, split[1:]):
            assert len(piece) <= size and (length[piece[0]] - length[piece]).sum() <= padding
            if following is not None:  # it was cut because one row more was too many
                more = torch.cat([piece, following[:1]])
                assert len(more) > size or (length[piece[0]] - length[more]).sum() > padding


def assert_pieces_are_the_whole(loaded, monkeypatch):
    model = loaded[0]
    rows, _ = sample(loaded, copies=4, temperature=1.0)
    weight = torch.randn(rows.mask.shape, generator=train.rng("weight"))

    def gradient(logp):
        model.zero_grad()
        (logp * weight).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = score(model, rows, 0.8, keep_hidden=True)
    wanted = gradient(expected[0])
    for size, padding in itertools.product((1, 5, 100), (0, 10_000)):
        monkeypatch.setitem(PADDING, "cpu", padding)
        got = train.score_all(model, rows, 0.8, size, keep_hidden=True, grad=True)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, expected, strict=True))
        assert torch.allclose(gradient(got[0]), wanted, rtol=1e-3, atol=1e-3)
        assert not train.score_all(model, rows, 0.8, size)[0].requires_grad


def test_scoring_in_pieces_is_scoring_at_once(loaded, monkeypatch):
    assert_pieces_are_the_whole(loaded, monkeypatch)


def test_scoring_in_pieces_suits_a_sliding_window(monkeypatch):
    shape = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=122,
    )
    more = dict(
        num_key_value_heads=2, initializer_range=0.3, sliding_window=4
    )  # prompts and answers are longer
    model = MistralForCausalLM(MistralConfig(**shape, **more)).eval()
    assert_pieces_are_the_whole((model, None, torch.tensor([1])), monkeypatch)


def test_each_prompt_goes_through_the_model_once(loaded):
    model, calls = loaded[0], []
    rows, _ = sample(loaded, [*PROMPTS, PROMPTS[0]], copies=4, temperature=1.0)
    hook = model.base_model.register_forward_pre_hook(
        lambda _, args: calls.append(tuple(args[0].shape))
    )
    train.score_all(model, rows, 1.0, 10)
    hook.remove()
    longest = rows.mask.sum(1).max().item()
    assert calls == [(3, 7), (10, longest - 1), (6, calls[2][1])] and calls[2][1] < longest


def test_left_padding_changes_nothing(loaded):
    together, logp = sample(loaded)
    for i, prompt in enumerate(PROMPTS):
        alone, alone_logp = sample(loaded, [prompt])
        assert (
            alone.tokens[0][alone.mask[0]].tolist() == together.tokens[i][together.mask[i]].tolist()
        )
        assert torch.allclose(alone_logp[0][alone.mask[0]], logp[i][together.mask[i]], atol=1e-4)


def test_a_repeated_cache_is_a_repeated_prompt(loaded):
    rows, logp = sample(loaded, copies=3, temperature=1.0)
    again, again_logp = sample(loaded, [p for p in PROMPTS for _ in range(3)], temperature=1.0)
    assert torch.equal(rows.tokens[rows.mask], again.tokens[again.mask])
    assert torch.allclose(logp, again_logp, atol=1e-4)


def test_mask_ends_with_the_first_eos(loaded):
    eos = set(loaded[2].tolist())
    rows, _ = sample(loaded, copies=200, tokens=30, temperature=3.0)
    ended = set()
    for tokens, mask in zip(rows.tokens.tolist(), rows.mask.tolist(), strict=True):
        length = sum(mask)
        assert mask == [True] * length + [False] * (len(mask) - length)
        assert not eos & set(tokens[: length - 1])
        assert tokens[length - 1] in eos or length == 30
        ended |= eos & {tokens[length - 1]}
    assert ended == eos  # each of several EOS ids ends an answer


def test_the_sampler_follows_the_models_distribution(loaded):
    """Nothing of the model's own generation config (top_k = 1 in one of them) shapes it."""
    model, _, eos = loaded
    rows, _ = sample(loaded, [PROMPTS[0]], copies=20000, tokens=1, temperature=1.5)
    p = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 1.5).softmax(-1)
    count = torch.bincount(rows.tokens[:, 0], minlength=len(p))
    chi2 = ((count - 20000 * p) ** 2 / (20000 * p)).sum().item()
    assert chi2 < len(p) + 5 * math.sqrt(2 * len(p))


def make_batch(loaded, rewards=(1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0)):
    rows, _ = sample(loaded, PROMPTS[:2], copies=4, temperature=1.0)
    logp, _ = train.score_all(loaded[0], rows, 1.0, 8)
    adv = group_advantages(torch.tensor(rewards), 4)[:, None].expand_as(logp)
    old = logp + 0.3 * torch.randn(logp.shape, generator=train.rng("old"))
    return rows, Batch(logp, old, adv, rows.mask, 4, 12)


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_have_the_gradient_of_the_unsplit_loss(loaded, method):
    model = loaded[0]
    rows, batch = make_batch(loaded)
    for loss_fn in METHODS[method].passes:
        model.zero_grad()
        logp, _ = score(model, rows, 1.0)
        loss_fn(replace(batch, logp=logp)).backward()
        expected = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        for micro_rows in (
            0,
            1,
            3,
            4,
            8,
            100,
        ):  # 0: through the graph of the log-probs, without a forward pass
            current = (
                batch
                if micro_rows
                else replace(batch, logp=train.score_all(model, rows, 1.0, 3, grad=True)[0])
            )
            optimizer = SimpleNamespace(zero_grad=model.zero_grad, step=lambda: None)
            config = Config(micro_rows=micro_rows or 1, grad_clip=1e9)
            train.update(model, optimizer, loss_fn, rows, current, config)
            got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            for name in expected:
                assert torch.allclose(got[name], expected[name], rtol=1e-3, atol=1e-5), (
                    micro_rows,
                    name,
                )


def test_a_non_finite_gradient_stops_before_the_weights_change(loaded):
    model = loaded[0]
    rows, batch = make_batch(loaded)
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(FloatingPointError, match="nan"):
        train.update(model, optimizer, lambda b: (b.logp * math.nan).sum(), rows, batch, Config())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_batch_without_signal_leaves_the_weights_to_no_momentum(loaded):
    model = loaded[0]
    rows, batch = make_batch(loaded)
    optimizer = train.adamw(model, 0.0)
    train.update(model, optimizer, METHODS["grpo"].passes[0], rows, batch, Config())
    optimizer.param_groups[0]["lr"] = 1.0
    before = [p.clone() for p in model.parameters()]
    train.update(
        model,
        optimizer,
        METHODS["grpo"].passes[0],
        rows,
        replace(batch, adv=0 * batch.adv),
        Config(),
    )
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_decoding_drops_the_eos_and_hides_nothing_else():
    tokenizer = train.Arithmetic().make_tokenizer()
    ids = tokenizer.encode("so #8<pad>5", add_special_tokens=False) + [tokenizer.eos_token_id, 5]
    rows = train.make_rows([[2]], [ids], CPU)
    rows.mask[0, -1] = False
    assert train.decode(tokenizer, rows, torch.tensor([tokenizer.eos_token_id])) == ["so #8<pad>5"]


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            hits = [any(i < c for i in subset) for subset in itertools.combinations(range(n), k)]
            assert math.isclose(train.pass_at_k(n, c, k), sum(hits) / len(hits), abs_tol=1e-12)


def test_prompts_walk_through_the_whole_training_split_before_any_repeats():
    task, config = SimpleNamespace(train=list(range(10))), Config(prompts=4)
    seen = [i for step in range(1, 11) for i in train.next_items(task, config, step)]
    for epoch in range(4):
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert seen[:10] != seen[10:20]


# ---------------- whole runs


def run(tmp_path, *args) -> Path:
    train.main([*TINY, "--out", str(tmp_path), "--name", "run", *args])
    return tmp_path / "run"


@pytest.fixture
def easy(monkeypatch):
    """A reward that an untrained model earns about half of the time."""
    monkeypatch.setattr(
        train.Arithmetic, "reward", lambda self, text, item: float(text.count("1") % 2)
    )


@pytest.mark.parametrize(
    "epochs, minibatches, micro_rows, with_gradient, without",
    [(1, 1, 12, 12, 0), (2, 1, 12, 24, 0), (1, 2, 6, 12, 12), (1, 1, 4, 12, 12), (2, 1, 4, 24, 24)],
)
def test_what_is_known_is_not_scored_again(
    tmp_path, monkeypatch, epochs, minibatches, micro_rows, with_gradient, without
):
    """The first update has the old policy's log-probs; and their graph, if the whole batch goes
    through at once."""
    made, score = [], train.score
    for module in (train, model):
        monkeypatch.setattr(
            module,
            "score",
            lambda *a: made.append((torch.is_grad_enabled(), len(a[1].mask))) or score(*a),
        )
    monkeypatch.setattr(
        train, "warm_start", lambda *_: made.clear()
    )  # forget the trial of the model
    monkeypatch.setattr(train, "prefix_probabilities", lambda *_: {})
    monkeypatch.setattr(
        train.Arithmetic, "reward", lambda self, text, item: 2.0 * (text.count("1") % 2)
    )  # no delta
    flags = [
        "--no-reference",
        "--steps",
        "1",
        "--warm-steps",
        "0",
        "--epochs",
        f"{epochs}",
        "--minibatches",
    ]
    flags += [f"{minibatches}", "--micro-rows"]
    found = run(tmp_path, *flags, f"{micro_rows}")
    assert sum(n for grad, n in made if grad) == with_gradient
    assert sum(n for grad, n in made if not grad) == without
    for micro_rows in (1, 100):  # memory only, never the result
        other = run(tmp_path / f"{micro_rows}", *flags, f"{micro_rows}")
        for a, b in zip(metrics(found), metrics(other), strict=True):
            assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


def test_weights_that_are_no_numbers_stop_the_run_in_one_line(tmp_path, easy):
    with pytest.raises(SystemExit, match="error: step 2: .*nan"):
        run(
            tmp_path,
            "--lr",
            "1e30",
            "--minibatches",
            "1",
            "--no-reference",
            "--schedule",
            "constant",
        )


def test_a_model_whose_state_is_no_key_value_cache_is_refused(tmp_path):
    """Its state after a prompt cannot be shared between answers."""
    shape = dict(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=122,
    )
    layers = dict(num_hidden_layers=2, layer_types=["conv", "full_attention"], eos_token_id=1)
    Lfm2ForCausalLM(Lfm2Config(**shape, **layers)).save_pretrained(tmp_path)
    train.Arithmetic().make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        load_model(Config(), None, CPU, str(tmp_path))


def test_a_graph_keeps_one_copy_of_the_weights(loaded, monkeypatch):
    """In bf16, of which autocast makes a copy each time that it is entered."""
    rows, _ = sample(loaded, copies=4, temperature=1.0)
    monkeypatch.setattr(
        model, "autocast", lambda device: torch.autocast(device.type, torch.bfloat16)
    )
    sizes = {tuple(p.shape) for p in loaded[0].parameters() if p.dim() == 2}
    sizes |= {shape[::-1] for shape in sizes}
    kept = []
    for size in (100, 3):
        found = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, f=found: f.setdefault(x.data_ptr(), x), lambda x: x
        ):
            train.score_all(loaded[0], rows, 1.0, size, grad=True)
        kept.append(
            sum(x.dtype == torch.bfloat16 and tuple(x.shape) in sizes for x in found.values())
        )
    assert kept[0] == kept[1] > 0


def test_sampler_and_scorer_must_agree(tmp_path, monkeypatch):
    wrong = train.rollout
    monkeypatch.setattr(
        train, "rollout", lambda *a: (lambda rows, logp: (rows, logp + 0.01))(*wrong(*a))
    )
    with pytest.raises(AssertionError, match="differ by 0.0[01].*: not on-policy"):
        run(tmp_path)


def test_a_model_whose_sampler_and_scorer_differ_is_refused(model_path, monkeypatch, capsys):
    wrong = model.rollout
    monkeypatch.setattr(
        model, "rollout", lambda *a: (lambda rows, logp: (rows, logp + 0.01))(*wrong(*a))
    )
    with pytest.raises(SystemExit):
        load_model(Config(), None, CPU, model_path)
    assert "is not supported (scored and sampled log-probs differ by 0.0" in capsys.readouterr().err


def test_a_full_gpu_is_one_line_that_says_what_helps(tmp_path, monkeypatch, capsys):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has ...")
    for module, place in ((model, "rollout"), (model, "score_all"), (train, "train_step")):
        with monkeypatch.context() as broken, pytest.raises(SystemExit) as stopped:
            broken.setattr(module, place, Mock(side_effect=full))
            train.main([*TINY, "--out", str(tmp_path)])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1
        assert error.startswith("error: CUDA out of memory; what helps: less of --micro-rows")


def test_the_optimiser_pulls_no_weight_that_has_no_gradient(scratch):
    policy = copy.deepcopy(scratch[0])
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)
    train.adamw(policy, 0.1).step()
    assert all(
        torch.equal(p, q) for p, q in zip(policy.parameters(), scratch[0].parameters(), strict=True)
    )


def test_every_step_and_seed_draws_answers_of_its_own(tmp_path, monkeypatch):
    seen, real = [], train.train_step

    def spy(*args):
        with monkeypatch.context() as during:
            rollout = train.rollout
            during.setattr(
                train, "rollout", lambda *a: seen.append(a[-1].initial_seed()) or rollout(*a)
            )
            return real(*args)

    monkeypatch.setattr(train, "train_step", spy)
    for seed in "01":
        run(tmp_path / seed, "--seed", seed)
    assert len(seen) == len(set(seen)) == 8


def test_a_run_goes_on_in_smaller_pieces(tmp_path, easy):
    whole = run(tmp_path / "whole", "--schedule", "constant")
    half = run(tmp_path / "half", "--schedule", "constant", "--steps", "2")
    train.main(["--resume", str(half), "--steps", "4", "--micro-rows", "1"])
    assert json.loads((half / "config.json").read_text())["config"]["micro_rows"] == 1
    for got, expected in zip(metrics(half), metrics(whole), strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_the_warm_start_shows_each_prompt_its_demonstration_and_the_end(scratch, monkeypatch):
    policy, tokenizer, eos = scratch
    task, seen, real = train.Arithmetic(), [], train.score
    monkeypatch.setattr(
        train, "score", lambda model, rows, *a: seen.append(rows) or real(model, rows, *a)
    )
    train.warm_start(copy.deepcopy(policy), tokenizer, task, Config(warm_steps=2, warm_rows=8), eos)
    demos = {item.prompt: item.demo for item in task.train}
    for rows in seen:
        for tokens, mask, prompt, ids in zip(
            rows.tokens, rows.mask, rows.prompt, rows.prompt_mask, strict=True
        ):
            assert tokenizer.decode(tokens[mask]) == demos[tokenizer.decode(prompt[ids])] + "<eos>"
    assert [len(rows.tokens) for rows in seen] == [8, 8]


def test_prefix_probabilities_are_those_of_the_sets(scratch):
    policy, tokenizer, _ = scratch
    items = train.Arithmetic().test[:2]
    found = train.prefix_probabilities(policy, tokenizer, train.Arithmetic(), items, Config(), CPU)
    expected = dict.fromkeys(found, 0.0)
    for item in items:
        for name, texts in train.Arithmetic().prefixes(item).items():
            for text in texts:
                ids, start = tokenizer(item.prompt + text)["input_ids"], len(item.prompt)
                p = policy(torch.tensor([ids])).logits[0].softmax(-1)
                expected[name] += (
                    math.prod(p[i - 1, ids[i]].item() for i in range(start, len(ids))) / 2
                )
    assert len(found) == 6 and found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("length, fits", [(1019, True), (1020, False)])
def test_a_demonstration_and_its_end_must_fit_the_context(scratch, length, fits, capsys):
    task = SimpleNamespace(
        encode=train.Arithmetic().encode,
        test=[],
        train=[SimpleNamespace(prompt="1+1=", demo="#" * length)],
    )
    train.check_context(*scratch[:2], task, Config(max_tokens=4), warm=False)
    with nullcontext() if fits else pytest.raises(SystemExit):
        train.check_context(*scratch[:2], task, Config(max_tokens=4), warm=True)
    assert fits or "longest prompt 4 + longest demonstration 1021 exceed" in capsys.readouterr().err


def test_scratch_is_gpt2_with_its_own_gelu(scratch):
    ours, tokenizer, _ = scratch
    assert ours.config.activation_function != GPT2Config().activation_function == "gelu_new"
    theirs = GPT2LMHeadModel(
        GPT2Config.from_dict(ours.config.to_dict() | {"activation_function": "gelu_new"})
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    ids = torch.arange(len(tokenizer))[None]
    assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith("_s")} for line in lines]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_the_toy(tmp_path, method, easy):
    lines = metrics(run(tmp_path, "--method", method, "--steps", "2", "--epochs", "2"))
    assert [line["step"] for line in lines] == [0, 1, 2]
    for key in (
        "reward",
        "equal_groups",
        "length",
        "truncated",
        "entropy",
        "clip_share",
        "kl_start",
        "grad_norm",
        "tax",
    ):
        assert math.isfinite(lines[1][key])
    assert lines[1]["grad_norm"] > 0 and lines[2]["kl_start"] > 0
    for key in ("greedy", "sampled", "pass@4", "opener so", "form direct"):
        assert 0 <= lines[2][key] <= 1


def test_a_run_leaves_what_it_promises(tmp_path):
    folder = run(tmp_path)
    about = json.loads((folder / "config.json").read_text())
    assert about["config"]["method"] == "grpo" and about["versions"]["torch"] == torch.__version__
    assert "step 4" in (folder / "samples.txt").read_text()
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000004",
    ]
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "step-000004")
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoints" / "step-000004")
    assert model(torch.tensor([tokenizer.encode("37+48=")])).logits.isfinite().all()


def test_same_seed_same_metrics_other_seed_others(tmp_path, easy):
    first, second, other = (
        run(tmp_path / name, "--seed", seed) for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    assert metrics(first) == metrics(second)
    assert (first / "samples.txt").read_text() == (second / "samples.txt").read_text()
    assert metrics(first)[1:] != metrics(other)[1:]


def test_ctrl_c_saves_and_resume_is_bit_for_bit(tmp_path, monkeypatch, capsys, easy):
    whole = run(tmp_path / "whole")
    step = train.train_step

    def interrupted(*args):
        if args[-1] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*args)

    monkeypatch.setattr(train, "train_step", interrupted)
    cut = run(tmp_path / "cut")
    assert f"python train.py --resume {cut}" in capsys.readouterr().out
    assert [line["step"] for line in metrics(cut)] == [0, 1, 2, 3]
    monkeypatch.setattr(train, "train_step", step)
    (cut / "metrics.jsonl").open("a").write('{"step": 4, "torn')
    train.main(["--resume", str(cut)])
    assert metrics(cut) == metrics(whole)
    for name in ("model.safetensors", "trainer.pt"):
        last = Path("checkpoints") / "step-000004" / name
        if name == "trainer.pt":
            a, b = (
                torch.load(folder / last, weights_only=True)["optimizer"]["state"]
                for folder in (whole, cut)
            )
            assert all(torch.equal(a[i][k], b[i][k]) for i in a for k in a[i])
        else:
            assert (whole / last).read_bytes() == (cut / last).read_bytes()


def test_a_constant_schedule_can_be_extended_and_a_linear_one_cannot(tmp_path, capsys, easy):
    whole = run(tmp_path / "whole", "--schedule", "constant", "--steps", "4")
    half = run(tmp_path / "half", "--schedule", "constant", "--steps", "2")
    train.main(["--resume", str(half), "--steps", "4"])
    assert metrics(half) == metrics(whole)
    assert json.loads((half / "config.json").read_text())["config"]["steps"] == 4
    linear = run(tmp_path / "linear", "--steps", "2")
    for args, said in (("--steps 4", "cannot be extended"), ("", "has already made 2 of 2 steps")):
        with pytest.raises(SystemExit) as stopped:
            train.main(["--resume", str(linear), *args.split()])
        assert stopped.value.code == 2 and said in capsys.readouterr().err
    about = (half / "config.json").read_text()
    with pytest.raises(SystemExit):
        train.main(["--resume", str(half), "--steps", "3"])
    assert "has already made 4 of 3 steps" in capsys.readouterr().err
    assert (half / "config.json").read_text() == about  # refused before anything is written


def test_changed_logs_are_noticed_on_resume(tmp_path, capsys):
    folder = run(tmp_path, "--schedule", "constant", "--steps", "2")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit):
        train.main(["--resume", str(folder), "--steps", "4"])
    assert "metrics.jsonl is not what it was at step 2" in capsys.readouterr().err


def test_a_credit_rule_reshapes_the_advantages_of_the_whole_batch_once(tmp_path, monkeypatch, easy):
    seen = []

    def credit(adv, old, strength: float = 1.0):
        if len(adv) > 2:  # the trial before a model is loaded has two rows
            seen.append((adv, old, strength))
        return adv * (old.tokens != old.tokens[0, 0]) * (1 - strength)

    monkeypatch.setitem(METHODS, "grpo", replace(METHODS["grpo"], credit=credit))
    lines = metrics(run(tmp_path, "--epochs", "2", "--hyper", "eps_low=0.3"))[1:]
    assert len(seen) == 4 and all(
        line["grad_norm"] == line["adv_left"] == 0 < line["reshaped"] for line in lines
    )
    run(tmp_path / "other", "--hyper", "strength=0.25")
    adv, old, strength = seen[-1]
    assert strength == 0.25 and old.hidden is None and not old.logp.requires_grad
    expected = group_advantages(old.rewards, 3)[:, None] * old.mask
    assert torch.equal(adv, expected) and torch.equal(old.logp * old.mask, old.logp)


def test_hidden_states_are_what_the_log_probs_come_from(loaded):
    model, rows = loaded[0], sample(loaded, copies=2, temperature=1.0)[0]
    logp, _, hidden = train.score_all(model, rows, 0.8, 2, keep_hidden=True)
    assert (
        hidden.shape[:2] == logp.shape
        and (hidden[~rows.mask] == 0).all()
        and not hidden.requires_grad
    )
    again = (
        (hidden @ model.get_output_embeddings().weight.T / 0.8)
        .log_softmax(-1)
        .gather(2, rows.tokens[..., None])
    )
    assert torch.allclose(again[..., 0][rows.mask], logp[rows.mask], atol=1e-4)


def test_nthr_gets_them_and_reports_what_it_reshaped(tmp_path, easy):
    for method, reshaped in (("nthr", True), ("nthr-random", True), ("grpo", False)):
        lines = metrics(
            run(tmp_path / method, "--method", method, *(["--hyper", "beta=0"] if reshaped else []))
        )[1:]
        assert all(("reshaped" in line) == reshaped for line in lines)
        assert not reshaped or any(
            0 < line["reshaped"] < 1 and 0 < line["adv_left"] < 1 for line in lines
        )


def test_a_pass_is_not_clipped_where_it_does_not_look(tmp_path, capsys, easy):
    lines = metrics(run(tmp_path, "--method", "lopti", "--minibatches", "1", "--lr", "1e-6"))[1:]
    assert (
        all(line.get("clip_share", 0) == 0 for line in lines)
        and "2 update(s)" in capsys.readouterr().out
    )
    lines = metrics(
        run(
            tmp_path / "far",
            "--method",
            "lopti",
            "--lr",
            "0.1",
            "--hyper",
            "eps_low=0",
            "eps_high=0",
        )
    )[1:]
    assert any(line.get("clip_share", 0) > 0.2 for line in lines)


def test_clip_share_leaves_out_the_kl_term_of_groups_without_an_advantage(monkeypatch):
    logp, mask = torch.full((4, 3), -1.0), torch.ones(4, 3, dtype=torch.bool)
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0])
    batch = Batch(logp, logp, advantages[:, None].expand(4, 3).clone(), mask, 2, 3, logp + 0.5)
    rows = Rows(mask.long(), mask, mask.long(), mask)
    clipped = lambda *a: ((a[4].adv == 0).float(), 1.0)  # noqa: E731  all that has an advantage
    monkeypatch.setattr(train, "update", clipped)
    config = Config(minibatches=1, group_size=2, kl=0.1)
    found = train.learn(None, None, config, dict(kl=0.1), rows, batch, advantages, train.rng(0))
    assert found["clip_share"] == 1 and found["grad_norm"] == 1


def test_an_output_layer_with_a_bias_is_refused_where_token_scores_would_leave_it_out(
    tmp_path, capsys
):
    from transformers import PhiConfig, PhiForCausalLM

    sizes = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
    )
    tokenizer = train.Arithmetic().make_tokenizer()
    PhiForCausalLM(PhiConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "phi")
    tokenizer.save_pretrained(tmp_path / "phi")
    args = [*TINY, "--model", str(tmp_path / "phi"), "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        train.main([*args, "--method", "nthr"])
    assert (
        stopped.value.code == 2
        and "has a bias, which its token scores leave out" in capsys.readouterr().err
    )
    train.main([*args, "--method", "grpo", "--steps", "1"])


def test_each_pass_of_lopti_is_a_step_of_its_own_with_the_old_log_probs_frozen(
    tmp_path, monkeypatch, easy
):
    seen = []

    def spy(f):
        return lambda b, **hyper: (
            seen.append((f.__name__, b.logp.detach(), b.logp_old, hyper)) or f(b, **hyper)
        )

    method = METHODS["lopti"]
    monkeypatch.setitem(METHODS, "lopti", replace(method, passes=tuple(map(spy, method.passes))))
    monkeypatch.setattr(train, "pick", lambda hyper, function: hyper)
    run(tmp_path, "--method", "lopti", "--steps", "1", "--minibatches", "1")
    (first, before, old, _), _, (second, after, frozen, _), _ = seen[
        -4:
    ]  # each once more, for its clip share
    assert (first, second) == ("lopti_low", "lopti_high")
    assert (
        torch.equal(old, frozen)
        and torch.allclose(before, old, atol=1e-3)
        and not torch.allclose(after, old, 1e-3)
    )


def test_delta_is_what_the_step_did_to_the_correct_answers_of_mixed_groups(tmp_path, easy):
    still = metrics(run(tmp_path / "still", "--lr", "0"))[1:]
    winners = metrics(run(tmp_path / "winners", "--method", "pos-only", "--minibatches", "1"))[1:]
    assert all(line.get("delta", 0) == 0 for line in still) and any(
        "delta" in line for line in still
    )
    assert all(line.get("delta", 1) > 0 for line in winners) and any(
        "delta" in line for line in winners
    )


def test_ibpo_asks_for_corrections_of_the_wrong_answers_beside_right_siblings(loaded):
    model, tokenizer, eos = loaded
    rows, seen = sample(loaded, PROMPTS[:2], copies=3, temperature=1.0)[0], []
    task = SimpleNamespace(
        repair=lambda item, answer, siblings: seen.append((item, answer, siblings)) or item,
        encode=lambda tokenizer, items: [PROMPTS["ab".index(item)] for item in items],
        reward=lambda text, item: float(len(seen) == 4 and item == "b"),
    )
    texts, rewards = list("stuvwx"), torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.5])
    config = Config(group_size=3, max_tokens=9, repair_references=2)
    args = (tokenizer, eos, task, config, list("aaabbb"), texts, rows, rewards)
    repaired, kept, generated = train.correct(model, *args, train.rng(1))
    assert seen == [
        ("a", "s", ["u", "t"]),
        ("a", "t", ["u", "s"]),
        ("b", "v", ["w", "x"]),
        ("b", "w", ["x", "v"]),
    ]
    assert repaired.tolist() == [False] * 3 + [True, True, False] and 4 <= generated <= 36
    fixed, _ = rollout(model, [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2, 1, 9, 1.0, eos, train.rng(1))
    wanted = kept_tokens(rows.tokens[[3, 4]], rows.mask[[3, 4]], fixed.tokens[2:], fixed.mask[2:])
    assert torch.equal(kept[[3, 4]], wanted) and not kept[[0, 1, 2, 5]].any()


def test_ibpo_trains_counts_its_tokens_and_is_grpo_when_nothing_is_repaired(
    tmp_path, monkeypatch, easy
):
    lines = metrics(run(tmp_path / "a", "--method", "ibpo"))[1:]
    assert all(
        line["generated"] > line["tokens"] and 0 <= line["repair_rate"] <= 1 for line in lines
    )
    assert any(line["repair_rate"] > 0 and line["reshaped"] > 0 for line in lines)
    plain = metrics(run(tmp_path / "b", "--repair-demos", "0.3"))
    assert all(line["generated"] == line["tokens"] for line in plain[1:])
    nothing = lambda *a: (torch.zeros_like(a[-2]) > 0, torch.zeros_like(a[-3].mask), 0)  # noqa: E731
    monkeypatch.setattr(train, "correct", nothing)
    same = metrics(run(tmp_path / "c", "--method", "ibpo"))
    assert [{k: v for k, v in line.items() if k in plain[-1]} for line in same] == plain


@pytest.mark.parametrize("method", ["gspo", "grpo"])
def test_the_projection_leaves_no_tax(tmp_path, method, easy):
    lines = metrics(
        run(tmp_path, "--method", method, "--epochs", "2", "--project", "--temperature", "0.5")
    )
    plain = metrics(
        run(tmp_path / "plain", "--method", method, "--epochs", "2", "--temperature", "0.5")
    )
    assert (
        max(line["tax"] for line in lines[1:])
        < 1e-5
        < 1e-2
        < max(line["tax"] for line in plain[1:])
    )


def test_with_a_context_the_projection_merges_more_and_still_leaves_no_tax(tmp_path, easy):
    more = ["--epochs", "2", "--project", "--temperature", "0.5"]
    wide, narrow, plain = (
        metrics(run(tmp_path / c, *more, "--context", c)) for c in ("99", "1", "0")
    )
    wide, plain, other = ([line | {"tax": 0} for line in lines] for lines in (wide, plain, narrow))
    assert wide == plain != other
    assert max(line["tax"] for line in narrow[1:]) < 1e-5


def test_a_kept_start_is_read_instead_of_made_again(tmp_path, easy):
    starts = ["--steps", "1", "--starts", str(tmp_path)]
    plain = metrics(run(tmp_path / "a", "--steps", "1"))
    made, read = (metrics(run(tmp_path / name, *starts)) for name in "bc")
    assert plain == made == read
    (kept,) = tmp_path.glob("*.pt")
    torch.save({k: v + 0.1 for k, v in torch.load(kept).items()}, kept)
    assert metrics(run(tmp_path / "d", *starts)) != plain
    kept.write_bytes(kept.read_bytes()[:1000])
    assert metrics(run(tmp_path / "damaged", *starts)) == plain
    run(tmp_path / "e", *starts, "--warm-lr", "0.01")  # another start
    assert len(list(tmp_path.glob("*.pt"))) == 2


@pytest.mark.parametrize("model", ["scratch", "qwen"])
def test_gsm8k_trains_from_local_files(tmp_path, small_gsm8k, qwen_path, model):
    args = [
        "--task",
        "gsm8k",
        "--data",
        small_gsm8k,
        "--model",
        "scratch" if model == "scratch" else qwen_path,
    ]
    args += ["--threads", "1"]
    lines = metrics(run(tmp_path, *args, "--max-tokens", "20", "--kl", "0.1"))
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    lines = metrics(run(tmp_path / "ibpo", *args, "--max-tokens", "20", "--method", "ibpo"))
    assert all(line["generated"] >= line["tokens"] for line in lines[1:])
    for method in ("nthr", "ar-lopti"):
        lines = metrics(
            run(tmp_path / method, *args, "--max-tokens", "20", "--method", method, "--steps", "2")
        )
        assert [line["step"] for line in lines] == [0, 1, 2]


# ---------------- a user's mistakes: one line, exit code 2


@pytest.mark.parametrize(
    "args, said",
    [
        ("--method gpro", "invalid choice: 'gpro'"),
        ("--task chess", "invalid choice: 'chess'"),
        ("--model no/such/model", "--model no/such/model cannot be loaded"),
        (
            "--task gsm8k --data DATA --model nobody/nothing-7b",
            "--model nobody/nothing-7b cannot be loaded",
        ),
        ("--group-size 1", "--group-size 1: must be a finite number, at least 2"),
        ("--prompts 30 --minibatches 4", "--prompts 30 is not divisible by --minibatches 4"),
        (
            "--method nthr --hyper self_term=perhaps",
            "--hyper self_term=perhaps: must be True or False",
        ),
        (
            "--method ar-lopti --hyper alpha=1.5",
            "--hyper alpha=1.5: alpha must lie between 0 and 1",
        ),
        (
            "--method ar-lopti --hyper beta=1",
            "accepted, with defaults: alpha=0.3, eta=0.5, eps_low=0.2, eps_high=0.2",
        ),
        (
            "--group-size 3 --repair-references 3",
            "--repair-references 3: an answer has --group-size - 1 siblings",
        ),
        (
            "--task gsm8k --data DATA --repair-demos 0.1",
            "--repair-demos 0.1: a share of at most 1, and of the arith",
        ),
        ("--repair-demos 1.1", "--repair-demos 1.1: a share"),
        (
            "--repair-bonus 5",
            "--repair-weight 0.6: times --repair-bonus it must stay below the reward of 1",
        ),
        ("--name " + 300 * "x", "--name 'xxxxxxxxxxxxxxxxxxxx'...: at most 200 bytes"),
        ("--lr -0.1", "--lr -0.1: must be a finite number, at least 0"),
        ("--lr nan", "--lr nan"),
        ("--lr fast", "invalid float value: 'fast'"),
        ("--temperature 0", "--temperature 0.0"),
        ("--width 20", "--width 20: must be a multiple of 8"),
        ("--grup-size 4", "unknown argument --grup-size; did you mean --group-size?"),
        (
            "--kl 0.1 --method gspo",
            "method gspo has no hyperparameter 'kl'; accepted, with defaults: eps_low=",
        ),
        ("--kl 0.1 --no-reference", "contradicts --no-reference"),
        ("--kl 0.1 --project", "--project would average the KL term away"),
        (
            "--context 2",
            "--context 2 says which tokens --project takes for shared; it needs that flag",
        ),
        (
            "--starts broken/train.jsonl",
            "--starts broken/train.jsonl: broken/train.jsonl is not a directory",
        ),
        ("--hyper kl=0.1 --no-reference", "the KL term needs logp_ref"),
        ("--hyper eps_low=nan", "eps_low=nan: must be a finite number, at least 0"),
        (
            "--hyper eps=0.1",
            "method grpo has no hyperparameter 'eps'; accepted, with defaults: eps_low=0.2",
        ),
        ("--hyper eps_low=wide", "eps_low=wide: could not convert string to float"),
        ("--hyper eps_low=0.1 eps_high=1 kl=maybe", "kl=maybe: could not convert"),
        (
            "--method dfpo-min --hyper ratio=sum",
            'ratio=sum: ratio must be "geometric" or "product"',
        ),
        ("--data somewhere", "only --task gsm8k reads data"),
        ("--task gsm8k --data /no/such/dir", "/no/such/dir"),
        ("--task gsm8k --data BROKEN", "train.jsonl:2"),
        (
            "--task gsm8k --data DATA --model scratch --max-tokens 2000",
            "exceed the model's context of 1024 tokens",
        ),
        ("--name taken", "taken exists; choose another"),
        ("--resume nowhere", "--resume nowhere: no config.json of a run there"),
        ("--resume taken --lr 1", "--lr cannot be changed when resuming"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_trained(
    args, said, tmp_path, small_gsm8k, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "broken").mkdir()
    good = (Path(small_gsm8k) / "train.jsonl").read_text().splitlines()[0]
    (tmp_path / "broken" / "train.jsonl").write_text(f'{good}\n{{"question": \n')
    (tmp_path / "broken" / "test.jsonl").write_text(good + "\n")
    monkeypatch.setattr(train, "warm_start", lambda *_: pytest.fail("training began"))
    args = args.replace("DATA", small_gsm8k).replace("BROKEN", str(tmp_path / "broken"))
    with pytest.raises(SystemExit) as stopped:
        train.main(args.split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / "runs" / "taken"]


def test_rows_can_be_indexed_together():
    rows = Rows(*(torch.arange(6).view(3, 2) for _ in range(4)))
    assert torch.equal(rows[torch.tensor([2, 0])].tokens, torch.tensor([[4, 5], [0, 1]]))
