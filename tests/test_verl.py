"""engines/verl.py against losses.py: its registered functions on tensors, then verl's actor engine
on a tiny model.

`make test-verl` runs this in an environment of its own, because verl pins transformers. Nothing
here needs a GPU: verl's FSDP2 engine is put on the CPU through its own platform interface. As a
script (`torch.distributed.run tests/test_verl.py MODEL`) this file is one process of such an
engine.
"""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from losses import METHODS, Batch, OldPolicy, bind, group_advantages
from train import Answers, Config, Prompts, load_policy, log_probs

pytest.importorskip("verl", reason="verl has an environment of its own: make test-verl")
import numpy  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.workers.config import FSDPActorConfig, PolicyLossConfig  # noqa: E402

import engines.verl as adapter  # noqa: E402

G, T, L = 4, 6, 9
HONOURED = [
    name
    for name, m in METHODS.items()
    if not m.needs_scores and not m.repair and len(m.passes) == 1
]
COUPLED = ("dapo", "dfpo-min", "dfpo-orthogonal", "recentred")  # the adapter finds out by itself
UID = [f"prompt {i // G}" for i in range(16)]


def actor(mode="tgc-grpo", **options) -> FSDPActorConfig:
    given = dict(strategy="fsdp2", rollout_n=G, ppo_micro_batch_size_per_gpu=8, loss_scale_factor=L)
    return FSDPActorConfig(**given | options, policy_loss=PolicyLossConfig(loss_mode=mode))


def make_batch(name: str, dtype=torch.float64) -> Batch:
    """Four groups of four with different rewards, lengths 1 to 6 and ratios from 0.6 to 1.65."""
    g = torch.Generator().manual_seed(0)
    logp, noise = (torch.rand(16, T, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    rewards = torch.rand(16, generator=g, dtype=torch.float64).to(dtype)
    mask = torch.arange(T) < torch.randint(1, T + 1, (16, 1), generator=g)
    adv = group_advantages(rewards, G, METHODS[name].scale)[:, None] * mask
    return Batch(-3 * logp, -3 * logp + noise - 0.5, adv, mask, G, L)


def expected(name: str, b: Batch, **hyper):
    method = bind(name, hyper, reference=False)
    adv = b.adv
    if method.credit:
        adv = method.credit(adv, OldPolicy(b.mask.long(), b.mask, b.logp_old, b.adv[:, 0], G))
    return method.passes[0](replace(b, adv=adv))


def by_verl(mode, b, order, pieces, processes, weights=None, **options):
    """The mean over processes of the sum over micro-batches, as DDP and accumulation make it."""
    config = actor(mode, **options)
    config.global_batch_info.update(
        dp_size=processes, batch_num_tokens=b.mask.sum().item(), global_batch_size=16
    )
    config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor
    total = 0
    for rows in order.chunk(pieces * processes):
        adapter.rows_of["uid"] = [UID[i] for i in rows]
        tensors = (b.logp_old[rows], b.logp[rows], b.adv[rows], b.mask[rows])
        loss_fn = core_algos.get_policy_loss_fn(mode)
        total = total + loss_fn(*tensors, config=config, rollout_is_weights=weights)[0]
    return total / processes


@pytest.mark.parametrize("pieces, processes", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", HONOURED)
def test_shares_add_up_to_the_loss_of_the_whole_batch(name, pieces, processes):
    b = make_batch(name)
    g = torch.Generator().manual_seed(1)
    order = torch.randperm(16, generator=g)
    if name in COUPLED:  # whole groups in a micro-batch, their rows mixed
        whole = torch.randperm(4, generator=g)[:, None] * G + torch.arange(G)
        chunks = whole.flatten().chunk(pieces * processes)
        order = torch.cat([rows[torch.randperm(len(rows), generator=g)] for rows in chunks])
    pair = []
    for loss_of in (
        lambda b: expected(name, b),
        lambda b: by_verl(f"tgc-{name}", b, order, pieces, processes),
    ):
        logp = b.logp.clone().requires_grad_()
        loss = loss_of(replace(b, logp=logp))
        pair.append((loss.detach(), torch.autograd.grad(loss, logp)[0]))
    (loss, grad), (verl, verl_grad) = pair
    torch.testing.assert_close(verl, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(verl_grad, grad, rtol=1e-5, atol=1e-12)
    assert grad.abs().max() > 1e-3


def test_one_answer_is_a_micro_batch_too():
    b = make_batch("grpo")
    torch.testing.assert_close(by_verl("tgc-grpo", b, torch.arange(16), 16, 1), expected("grpo", b))


def test_hyperparameters_of_a_mode_of_ones_own():
    adapter.register("mine", "grpo", eps_high=0.05)
    b = make_batch("grpo")
    mine = by_verl("mine", b, torch.arange(16), 2, 1)
    torch.testing.assert_close(mine, expected("grpo", b, eps_high=0.05))
    assert abs(mine - expected("grpo", b)) > 1e-3


@pytest.mark.parametrize("scale", ["std", "mean"])
def test_advantages_are_those_of_losses(scale):
    """Rows in any order, a group of equal rewards, and a lone row of verl's own padding."""
    rewards = torch.tensor([0.1, 1, 0.1, 0, 0.1, 0.3, 0.1, 1, 5])
    mask = torch.arange(T) < torch.tensor([2, 6, 1, 3, 4, 5, 6, 1, 1])[:, None]
    scores = torch.zeros(9, T).scatter(1, mask.sum(1, keepdim=True) - 1, rewards[:, None])
    index = numpy.array(["a", "b", "a", "b", "a", "b", "a", "b", "pad"], dtype=object)
    adv, returns = core_algos.get_adv_estimator_fn(f"tgc-{scale}")(
        token_level_rewards=scores, response_mask=mask, index=index, config=None
    )
    assert adv is returns and not adv[8].any() and not adv[[0, 2, 4, 6]].any()
    b = group_advantages(torch.tensor([1, 0, 0.3, 1]), 4, scale)
    torch.testing.assert_close(adv[[1, 3, 5, 7]], b[:, None] * mask[[1, 3, 5, 7]])


def test_verl_leaves_its_own_ppo_loss_and_ours_notes_the_uids():
    import verl.workers.utils.losses as shipped

    assert shipped.ppo_loss is adapter.ppo_loss
    seen = []
    adapter.ppo_loss(
        None, None, {"uid": ["a", "b"]}, of_verl=lambda *_: seen.append(adapter.rows_of["uid"])
    )
    adapter.ppo_loss(None, None, {}, of_verl=lambda *_: seen.append(adapter.rows_of["uid"]))
    assert seen == [["a", "b"], None]


TORN = torch.randperm(16, generator=torch.Generator().manual_seed(1))
REFUSED = {
    "torn groups": (dict(mode="tgc-dfpo-min", order=TORN), "whole groups"),
    "a group without a difference": (dict(mode="tgc-dapo"), "filter_groups"),
    "no hidden states": (dict(mode="tgc-nthr"), "hidden states"),
    "no second rollout": (dict(mode="tgc-ibpo"), "second rollout"),
    "two passes": (dict(mode="tgc-lopti"), "two optimiser steps"),
    "no budget": (dict(loss_scale_factor=None), "loss_scale_factor must be L"),
    "verl's clip": (dict(clip_ratio_high=0.28), "are not read"),
    "rollout correction": (dict(weights=torch.ones(1)), "rollout correction"),
}


@pytest.mark.parametrize("options, reason", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_refused_with_the_reason(options, reason):
    b = make_batch("grpo")
    b.adv[4:8] = 0
    given = dict(mode="tgc-grpo", order=torch.arange(16)) | options
    with pytest.raises(ValueError, match=reason) as error:
        by_verl(b=b, pieces=4, processes=1, **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("processes", [1, 2])
def test_verls_actor_engine_makes_the_gradient_of_losses(qwen_path, processes):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc_per_node", str(processes)]
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VERL_USE_EXTERNAL_MODULES": "engines.verl",
    }
    done = subprocess.run(
        [*launch, __file__, qwen_path], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 2 * len(HONOURED) * processes


# ---------------- one process of verl's actor, as a script


def engine_on_cpu(path: str):
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        device_name, device_module, communication_backend_name = "cpu", torch.cpu, "gloo"

        def is_available(self):
            return True

        def current_device(self):
            return "cpu"

        def empty_cache(self):
            pass

    # Before the engine is imported, which asks for its device once.
    platform_manager._current_platform = Cpu()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    torch.distributed.init_process_group("gloo")
    plain = dict(use_remove_padding=False, enable_gradient_checkpointing=False)
    model = HFModelConfig(path=path, **plain, override_config={"attn_implementation": "sdpa"})
    fp32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineConfig(
        strategy="fsdp2", use_torch_compile=False, model_dtype="fp32", mixed_precision=fp32
    )
    engine = FSDPEngineWithLMHead(
        model, engine, FSDPOptimizerConfig(total_training_steps=9), CheckpointConfig()
    )
    engine.initialize()
    return engine


def one_process(path: str):
    from verl.protocol import DataProto
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding

    torch.set_num_threads(1)
    engine, P = engine_on_cpu(path), 3
    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = Config()
    policy = load_policy(config, None, path)
    ids = torch.randint(5, 60, (16, P + T), generator=torch.Generator().manual_seed(2))
    for name in HONOURED:
        b = make_batch(name, torch.float32)
        attention = torch.cat([torch.ones(16, P, dtype=torch.bool), b.mask], 1)
        policy.model.zero_grad()
        prompts = Prompts(ids[:, :P], torch.ones(16, P, dtype=torch.bool))
        answers = Answers([], prompts, [], ids[:, P:], b.mask, b.logp, b.logp[:, 0], generated=0)
        logp = log_probs(policy, answers, config)[0]
        old = logp.detach() + (b.logp_old - b.logp) * b.mask
        value = expected(name, replace(b, logp=logp, logp_old=old))
        value.backward()
        for micro in (16 // processes, 8 // processes):  # one micro-batch, and two
            rows = slice(rank * 16 // processes, (rank + 1) * 16 // processes)
            tensors = dict(
                input_ids=ids,
                attention_mask=attention.long(),
                response_mask=b.mask.long(),
                advantages=b.adv,
            )
            tensors |= dict(prompts=ids[:, :P], responses=ids[:, P:], old_log_probs=old)
            tensors["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
            uid = {"uid": numpy.array(UID, dtype=object)[rows]}
            data = DataProto.from_dict(
                {k: x[rows] for k, x in tensors.items()}, uid, {"temperature": 1.0}
            )
            data = left_right_2_no_padding(data.to_tensordict())
            tu.assign_non_tensor(
                data, global_batch_size=16, micro_batch_size_per_gpu=micro, use_dynamic_bsz=False
            )
            tu.assign_non_tensor(
                data, use_remove_padding=False, use_fused_kernels=False, calculate_entropy=False
            )
            with engine.train_mode():
                engine.optimizer_zero_grad()
                out = engine.forward_backward_batch(
                    data, partial(ppo_loss, config=actor(f"tgc-{name}"))
                )
                gradients = {k: p.grad.full_tensor() for k, p in engine.module.named_parameters()}
            shares = torch.tensor(sum(out["loss"]))
            torch.distributed.all_reduce(shares)
            by_engine = shares / processes
            assert abs(by_engine - value) <= 1e-6 * max(1.0, abs(value)), (name, by_engine, value)
            pair = gradients, {k: p.grad for k, p in policy.model.named_parameters()}
            x, y = (torch.cat([g[k].flatten() for k in sorted(g)]).double() for g in pair)
            error = (x - y).norm() / y.norm()
            assert y.norm() > 1e-4 and error <= 1e-5, (name, error)
            print(name, micro, "agrees", flush=True)


if __name__ == "__main__":
    one_process(sys.argv[1])
