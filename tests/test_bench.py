"""Of the benches: both sides do the same work, and what is computed is what is true."""

from dataclasses import replace

import pytest
import torch
from conftest import TRANSFORMERS_4
from helpers import TINY, float64
from torch.nn import functional as F

import train
from experiments import gpu
from experiments.bench import growth, memory, rollout, scoring, step, timing, where
from llm import policy


def draw(case: rollout.Case, seed: int):
    """Sampling as our generate() does it, from the same numbers, for transformers' own."""
    size = (case.prompts * rollout.GROUP, case.cap)
    gen = torch.Generator().manual_seed(seed)
    uniform = torch.rand(size, generator=gen, dtype=torch.float64)

    def only(ids, scores):
        cdf = scores.double().softmax(-1).cumsum(-1)
        token = torch.searchsorted(cdf, uniform[:, ids.shape[1] - case.prompt, None], right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)

    return only


def test_rollout_generates_the_tokens_that_generate_does():
    case = replace(
        rollout.CASES["b"], prompts=3, prompt=5, mean=6, cap=12, layers=2, width=32, vocab=50
    )
    model, prompts, lengths = rollout.build(case, "cpu")
    head = model.get_output_embeddings()
    pair = []
    for generate, processors in (
        (rollout.ours, {}),
        (rollout.theirs, {"processors": [draw(case, 3)]}),
    ):
        model.set_output_embeddings(rollout.Ends(head, lengths))
        pair.append(generate(model, prompts, case.cap, 3, **processors))
    assert torch.equal(*pair) and lengths.unique().numel() > 3
    ended = (pair[0] == rollout.EOS).any(1)
    assert torch.equal((pair[0] == rollout.EOS).int().argmax(1)[ended] + 1, lengths[ended])
    assert (lengths[~ended] == case.cap).all() and pair[0].unique().numel() > 20


def test_scoring_in_chunks_is_the_plain_path(monkeypatch):
    monkeypatch.setattr(policy, "CHUNK", {"cpu": 1})  # 512 rows
    layer = scoring.build(1200, 16, 61, "cpu")
    sides = []
    for side in (scoring.ours, scoring.plain):
        layer.weight.grad = layer.hidden.grad = None
        sides.append((side(layer), layer.hidden.grad, layer.weight.grad))
    for ours, plain in zip(*sides, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
        assert plain.abs().max() > 1


def test_the_output_layers_gradients_are_autograds_with_bias_and_temperature():
    g = torch.Generator().manual_seed(0)
    with float64():
        inputs = [torch.randn(*shape, generator=g) for shape in ((1100, 4), (7, 4), (7,))]
        grad = torch.randn(1100, generator=g)
        targets = torch.randint(7, (1100,), generator=g)
        ours, plain = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
        logp, entropy = policy.ChunkedLogProbs.apply(*ours, targets, 0.7, 512)
        full = (F.linear(*plain) / 0.7).log_softmax(-1)
        torch.testing.assert_close(logp, full[range(1100), targets], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), rtol=1e-12, atol=1e-12)
        assert not entropy.requires_grad
        logp.backward(grad)
        full[range(1100), targets].backward(grad)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


def test_the_metered_step_is_the_bare_one_and_the_projected_one_is_not():
    case = replace(rollout.CASES["a"], prompts=4, mean=5)
    config = step.make_config(case)
    make = step.make_case_step(case)
    metered = make(config)
    projected = make(replace(config, project=True))
    assert metered["length"] == projected["length"] == pytest.approx(5, abs=1.5)
    assert metered["tax"] > 0.01 > projected["tax"]
    assert metered["grad_norm"] == make(config)["grad_norm"] != projected["grad_norm"]


def test_trl_and_we_make_as_many_steps_on_as_many_tokens():
    pytest.importorskip("trl", minversion="1.16")
    from experiments.bench import trl_step

    case = replace(rollout.CASES["a"], mean=5, layers=1)
    pairs = trl_step.run_both(case, 2)
    counts = [len(x) for kind in (pairs.seconds, pairs.tokens) for x in kind.values()]
    assert counts == [2, 2, 2, 2]
    theirs = sum(pairs.tokens["trl"])
    assert sum(pairs.tokens["ours"]) == pytest.approx(theirs, rel=0.15) and theirs > 1500


def test_growth_fits_exponents_and_takes_steps_of_full_length():
    assert growth.exponent([1, 2, 4], [3, 6, 12]) == pytest.approx(1)
    assert growth.exponent([1, 4, 16], [5, 80, 1280]) == pytest.approx(2)
    case = replace(growth.BASE, layers=1, width=32, cap=20)
    assert step.make_case_step(case)(step.make_config(case))["length"] == 20


def test_operations_are_counted_by_phase_forward_and_backward():
    current = ["score"]
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    with where.Count(current) as count:
        y = x @ w
        current[:] = ["update"]
        y.backward(torch.ones(3, 7))
        current.clear()
        F.scaled_dot_product_attention(q, q, q).backward(torch.ones_like(q))
        (q.detach().view(-1) + 1).t()
        torch.zeros(2, 2).addmm_(torch.zeros(2, 9), torch.zeros(9, 2))
    assert count.flops == {"score": 210, "update": 420, "rest": 14 * 2 * 4 * 6 * 6 * 8 + 72}
    assert count.largest["score"] == (3, 5, 7) and sorted(count.largest["update"]) == [3, 5, 7]
    assert count.bytes["score"] == 0 and count.bytes["rest"] >= 2 * 4 * q.numel()


def test_where_the_time_goes_adds_up_and_ends_at_the_goal(monkeypatch):
    main = train.main
    monkeypatch.setattr(train, "main", lambda argv: main([*argv, *TINY]))
    monkeypatch.setattr(where, "GOAL", -1.0)
    result = where.run(0, counted=True)
    phases = {*result["seconds"]} - {"write"}
    assert result["step"] == 0 and phases == {"load", "warm start", "evaluate"}
    assert min(result["flops"][phase] for phase in ("warm start", "evaluate")) > 1e6
    assert all(x > 0 for x in where.rates((4, 3, 2)))
    monkeypatch.setattr(where, "GOAL", 2.0)
    with pytest.raises(SystemExit, match="seed 1 ends before it reaches 2.0"):
        where.run(1, counted=False)


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 looks into its masks")
def test_memory_is_counted_without_data_as_it_is_with():
    case = replace(rollout.CASES["b"], prompts=2, prompt=5, cap=8, layers=2, width=32, vocab=50)
    kept, real = (memory.count_kept(case, 4, fake) for fake in (True, False))
    mask = 4 * 2 * 5 * 5  # of the prompts, which with data is seen to be needless
    assert kept.prompts == real.prompts + mask and kept.both == real.both + mask
    assert kept.bucket == real.bucket > 4 * 4 * 8 * 32
    model = rollout.architecture(case).eval()
    assert kept.parameters == real.parameters == sum(p.numel() for p in model.parameters())
    assert (
        kept.token == kept.sampled == 2 * 2 * 2 * 32
    )  # layers, keys and values, bytes of bf16, width
    prompts = [[3] * 5, [4] * 5]
    rows = policy.make_rows(prompts, [[0] * 8] * 2, model.device)
    same = step.make_policy(model, None)
    hidden = train.log_probs(same, rows, train.Config(), keep_hidden=True)[2]
    states = policy.read_prompts(model, prompts).of(torch.arange(2))
    torch.testing.assert_close(memory.read_answers(model, 8, states), hidden.flatten(0, 1))
    config = step.make_config(case)
    assert memory.measure(case, replace(config, lr=1e-3), "cpu") >= 0


def test_timing_takes_turns_and_a_failed_child_is_one_line():
    calls = []
    seconds = timing.turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert "".join(calls) == "abbaab" and [len(x) for x in seconds.values()] == [2, 2]
    assert timing.quartiles([2, 6, 9], [1, 2, 9]) == [1.5, 2, 2.5]
    assert timing.child("-c", "print(1); print(2.5, 3)") == [2.5, 3]
    with pytest.raises(SystemExit, match="^error: .*failed: ValueError: no$"):
        timing.child("-c", "raise ValueError('no')")
    # in a child, as the benches do: here, memory that another test freed would serve again
    measure = "from experiments.bench.timing import rise_mb; import torch; "
    measure += "print(rise_mb(lambda: torch.zeros(10_000_000).sum()))"
    assert timing.child("-c", measure) == pytest.approx([40], abs=8)


@pytest.mark.skipif(TRANSFORMERS_4, reason="the memory table counts without data")
def test_the_gpus_table_is_made_end_to_end_on_a_cpu(monkeypatch, capsys):
    """In small. What only a GPU has is left out: its name, its allocator, its bandwidth."""
    case = replace(rollout.CASES["b"], prompts=2, prompt=5, mean=1e9, cap=6)
    case = replace(case, layers=1, width=16, vocab=30)
    with pytest.raises(SystemExit):
        gpu.main()
    assert capsys.readouterr().err == "error: torch finds no CUDA device; this table needs one\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no card")
    small = dict(DEVICE="cpu", CASE=case, STEPS=2, METHODS=["grpo", "nothing"])
    for name, value in small.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "TOY", f"{gpu.TOY} --layers 1 --width 16 --max-tokens 5")
    gpu.main()
    said = capsys.readouterr().out
    assert said.startswith("no card, torch") and "failed" not in said
    rows = [line.strip("| ").split(" | ") for line in said.splitlines()[4:]]
    table = {row[0]: row[-1] for row in rows}
    assert table["a run of the toy"] == "1 of 2 methods" and len(rows) == 15
    assert "invalid choice: 'nothing'" in rows[1][0] and table["finite gradients"] == "2 of 2"
    assert float(table["sampled and scored log-probs"].split()[0]) < 1e-4
    assert all(float(table[f"a step: {s}"].split()[0]) >= 0 for s in ("rollout", "update"))
