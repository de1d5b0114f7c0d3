"""engines/verl.py against losses.py: verl's actor engine on a tiny model, and what is refused.

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

import naive
import pytest
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from losses import METHODS, Batch, OldPolicy, bind, group_advantages
from train import Config, load_policy

pytest.importorskip("verl", reason="verl has an environment of its own: make test-verl")
import numpy  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.workers.config import FSDPActorConfig, PolicyLossConfig  # noqa: E402

import engines.verl as adapter  # noqa: E402

N, G, P, T, L = 16, 4, 3, 6, 9
HONOURED = [
    (name, {})
    for name, m in METHODS.items()
    if not m.needs_scores and not m.repair and len(m.passes) == 1
]
HONOURED.append(("grpo", {"eps_high": 0.05}))  # a mode of one's own
COUPLED = ("dapo", "dfpo-min", "dfpo-orthogonal", "recentred")  # the adapter finds out by itself
UID = numpy.array([f"prompt {i // G}" for i in range(N)], dtype=object)


def actor(mode, **options) -> FSDPActorConfig:
    given = dict(strategy="fsdp2", rollout_n=G, ppo_micro_batch_size_per_gpu=8, loss_scale_factor=L)
    return FSDPActorConfig(**given | options, policy_loss=PolicyLossConfig(loss_mode=mode))


@pytest.mark.parametrize("scale", ["std", "mean"])
def test_advantages_are_those_of_losses(scale):
    """Rows in any order, a group of equal rewards, and a lone row of verl's own padding."""
    rewards = torch.tensor([0.1, 1, 0.1, 0, 5])
    index = numpy.array(["a", "b", "a", "b", "pad"], dtype=object)
    mask = torch.arange(3) < torch.tensor([2, 3, 1, 2, 1])[:, None]
    adv, returns = core_algos.get_adv_estimator_fn(f"tgc-{scale}")(
        token_level_rewards=pad(rewards[:, None], (0, 2)),
        response_mask=mask,
        index=index,
        config=None,
    )
    b = group_advantages(rewards[[1, 3]], 2, scale)
    expected = torch.tensor([0, b[0], 0, b[1], 0])[:, None] * mask
    torch.testing.assert_close((adv, returns), (expected, expected))


REFUSED = {
    "torn groups": (dict(mode="tgc-dfpo-min", uid=UID[2:6]), "whole groups"),
    "unknown groups": (dict(mode="tgc-dfpo-min", uid=None), "whole groups"),
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
    options = dict(mode="tgc-grpo", uid=UID[:4], weights=None) | options
    mode, uid, weights = (options.pop(key) for key in ("mode", "uid", "weights"))
    zeros = torch.zeros(4, T)
    tensors = (zeros, zeros, zeros, zeros == 0)
    with pytest.raises(ValueError, match=reason) as error:
        adapter.ppo_loss(
            actor(mode, **options),
            None,
            {} if uid is None else {"uid": uid},
            of_verl=lambda config, *_: core_algos.get_policy_loss_fn(mode)(
                *tensors, config=config, rollout_is_weights=weights
            ),
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("processes", [1, 2])
def test_verls_actor_engine_makes_the_gradient_of_losses(qwen_path, processes):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc_per_node", str(processes)]
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
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


def by_losses(policy, ids, mask, method) -> tuple[torch.Tensor, Batch]:
    """The loss of the whole batch, and the batch: random rewards, and ratios of 0.6 to 1.65."""
    prompts = ids[:, :P].tolist()
    answers = [row[P:][seen].tolist() for row, seen in zip(ids, mask, strict=True)]
    rows = naive.log_probs(policy, prompts, answers, temperature=1.0)
    logp = pad_sequence(rows, batch_first=True)
    old = logp.detach() + (torch.rand(N, T) - 0.5) * mask
    adv = group_advantages(torch.rand(N), G, method.scale)[:, None] * mask
    b = Batch(logp, old, adv, mask, G, L)
    if method.credit:
        adv = method.credit(adv, OldPolicy(ids[:, P:], mask, old, adv[:, 0], G))
    return method.passes[0](replace(b, adv=adv)), b


def by_verl(engine, tensors, order, mode, micro) -> tuple[torch.Tensor, dict]:
    """The loss and gradient of verl's engine, which deals out the rows in this order."""
    from verl.protocol import DataProto
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding

    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    order = order.chunk(processes)[rank]
    uid = {"uid": UID[order]}
    data = DataProto.from_dict({k: x[order] for k, x in tensors.items()}, uid, {"temperature": 1.0})
    data = left_right_2_no_padding(data.to_tensordict())
    sizes = dict(global_batch_size=N, micro_batch_size_per_gpu=micro, use_dynamic_bsz=False)
    flags = dict.fromkeys(("use_remove_padding", "use_fused_kernels", "calculate_entropy"), False)
    tu.assign_non_tensor(data, **sizes, **flags)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(data, partial(ppo_loss, config=actor(mode)))
        gradients = {k: p.grad.full_tensor() for k, p in engine.module.named_parameters()}
    shares = torch.tensor(sum(out["loss"]))
    torch.distributed.all_reduce(shares)
    return shares / processes, gradients


def one_process(path: str):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    engine, policy = engine_on_cpu(path), load_policy(Config(), None, path)
    ids = torch.randint(5, 60, (N, P + T))
    for name, hyper in HONOURED:
        mode = f"tgc-{name}"
        if hyper:
            mode = "mine"
            adapter.register(mode, name, **hyper)
        mask = torch.arange(T) < torch.randint(1, T + 1, (N, 1))
        policy.model.zero_grad()
        value, b = by_losses(policy, ids, mask, bind(name, hyper, reference=False))
        value.backward()
        tensors = dict(input_ids=ids, prompts=ids[:, :P], responses=ids[:, P:])
        seen = pad(mask, (P, 0), value=True).long()
        tensors |= dict(attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp(min=0))
        tensors |= dict(response_mask=mask.long(), advantages=b.adv, old_log_probs=b.logp_old)
        share = N // torch.distributed.get_world_size()
        order, few = torch.randperm(N), 1
        if name in COUPLED:  # whole groups in a micro-batch, their rows mixed
            few = share // 2
            order = torch.cat([rows[torch.randperm(few)] for rows in torch.arange(N).split(few)])
        for micro in (few, share):
            by_engine, gradients = by_verl(engine, tensors, order, mode=mode, micro=micro)
            assert abs(by_engine - value) <= 1e-6 * max(1.0, abs(value)), (mode, by_engine, value)
            pair = gradients, {k: p.grad for k, p in policy.model.named_parameters()}
            x, y = (torch.cat([g[k].flatten() for k in sorted(g)]).double() for g in pair)
            error = (x - y).norm() / y.norm()
            assert y.norm() > 1e-4 and error <= 1e-5, (mode, error)
            print(mode, micro, "agrees", flush=True)


if __name__ == "__main__":
    one_process(sys.argv[1])
