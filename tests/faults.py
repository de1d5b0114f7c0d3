"""Wrong versions of losses.py: single faults, each a patch of one place, to see who notices.

    python -m tests.faults      who sees what: verify.py alone, the unit tests alone, both (30 minutes)

A fault is (what is wrong, text in losses.py, text in its place); the text must be there exactly once.
"""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path

import losses
from verify import CLAIMS, Draws, examine

SOURCE = Path(losses.__file__).read_text()
UNIT_TESTS = [
    str(Path(__file__).with_name(name)) for name in ("test_neighbours.py", "test_losses.py")
]

DRAWS = Draws(seed=0, count=5)
FAULTS = [
    # -------- group_advantages
    (
        "advantage: biased std",
        "groups.std(1, keepdim=True)",
        "groups.std(1, keepdim=True, correction=0)",
    ),
    ("advantage: std + 1e-8", "keepdim=True) + 1e-4)", "keepdim=True) + 1e-8)"),
    ("advantage: std of the batch", "groups.std(1, keepdim=True)", "groups.std()"),
    ("advantage: not centred", "adv = groups - groups.mean(1, keepdim=True)", "adv = groups"),
    (
        "advantage: mean of the batch",
        "adv = groups - groups.mean(1, keepdim=True)",
        "adv = groups - groups.mean()",
    ),
    (
        "advantage: median",
        "groups - groups.mean(1, keepdim=True)",
        "groups - groups.median(1, keepdim=True).values",
    ),
    (
        "advantage: equal rewards leave rounding noise",
        "adv.masked_fill(equal, 0.0).view(-1)",
        "adv.view(-1)",
    ),
    ("advantage: scales swapped", 'if scale == "std":', 'if scale == "mean":'),
    (
        "advantage: groups interleaved",
        "rewards.view(-1, group_size)",
        "rewards.view(group_size, -1).t().contiguous()",
    ),
    ("advantage: groups of one accepted", "    if group_size < 2:", "    if group_size < 1:"),
    (
        "advantage: broken groups accepted",
        "rewards.dim() != 1 or len(rewards) % group_size",
        "rewards.dim() != 1",
    ),
    ("advantage: any scale accepted", 'if scale not in ("std", "mean"):', "if not scale:"),
    # -------- ratios and lengths
    (
        "ratio: masked after exp",
        "(batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).exp()",
        "(batch.logp - batch.logp_old).exp().masked_fill(~batch.mask, 1.0)",
    ),
    (
        "ratio: upside down",
        "(batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).exp()",
        "(batch.logp_old - batch.logp).masked_fill(~batch.mask, 0.0).exp()",
    ),
    (
        "ratio: detached",
        "(batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).exp()",
        "(batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).exp().detach() + 0 * batch.logp",
    ),
    (
        "ratio: linear in log r",
        "(batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).exp()",
        "1 + (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0)",
    ),
    (
        "sequence ratio: padding included",
        "log_ratio = (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0).sum(1)",
        "log_ratio = (batch.logp - batch.logp_old).sum(1)",
    ),
    (
        "sequence ratio: root of the width",
        "(log_ratio / lengths(batch) if",
        "(log_ratio / batch.mask.shape[1] if",
    ),
    (
        "sequence ratio: root off by one",
        "(log_ratio / lengths(batch) if",
        "(log_ratio / (lengths(batch) - 1) if",
    ),
    (
        "sequence ratio: kinds swapped",
        'if kind == "geometric" else log_ratio)',
        'if kind == "product" else log_ratio)',
    ),
    (
        "sequence ratio: any kind accepted",
        'if kind not in ("geometric", "product"):',
        "if not kind:",
    ),
    (
        "sequence ratio: arithmetic mean",
        "(log_ratio / lengths(batch) if",
        "(((token_ratio(batch) * batch.mask).sum(1) / lengths(batch)).log() if",
    ),
    (
        "A_i: mean over the padded width",
        "masked_adv(batch).sum(1) / lengths(batch)",
        "masked_adv(batch).mean(1)",
    ),
    (
        "A_i: padding included",
        "masked_adv(batch).sum(1) / lengths(batch)",
        "batch.adv.sum(1) / lengths(batch)",
    ),
    (
        "A_i: the first token's",
        "masked_adv(batch).sum(1) / lengths(batch)",
        "masked_adv(batch)[:, 0]",
    ),
    ("length: 0 in an empty answer", "batch.mask.sum(1).clamp(min=1)", "batch.mask.sum(1)"),
    (
        "length: EOS not counted",
        "batch.mask.sum(1).clamp(min=1)",
        "(batch.mask.sum(1) - 1).clamp(min=1)",
    ),
    (
        "length: the padded width",
        "batch.mask.sum(1).clamp(min=1)",
        "batch.mask.sum(1) * 0 + batch.mask.shape[1]",
    ),
    # -------- aggregation
    (
        "seq-mean: over padded tokens",
        "(x.masked_fill(~batch.mask, 0.0).sum(1) / lengths(batch)).mean()",
        "x.masked_fill(~batch.mask, 0.0).mean(1).mean()",
    ),
    ("seq-mean: 1/N missing", "sum(1) / lengths(batch)).mean()", "sum(1) / lengths(batch)).sum()"),
    (
        "seq-mean: no mask",
        "(x.masked_fill(~batch.mask, 0.0).sum(1) / lengths(batch)).mean()",
        "(x.sum(1) / lengths(batch)).mean()",
    ),
    (
        "seq-mean: longest answer",
        "(x.masked_fill(~batch.mask, 0.0).sum(1) / lengths(batch)).mean()",
        "(x.masked_fill(~batch.mask, 0.0).sum(1) / lengths(batch).max()).mean()",
    ),
    (
        "constant: no mask",
        "x.masked_fill(~batch.mask, 0.0).sum() / (len(x) * batch.max_tokens)",
        "x.sum() / (len(x) * batch.max_tokens)",
    ),
    ("constant: 1/N missing", "(len(x) * batch.max_tokens)", "batch.max_tokens"),
    ("constant: 1/L missing", "(len(x) * batch.max_tokens)", "len(x)"),
    ("constant: padded width for L", "(len(x) * batch.max_tokens)", "(len(x) * x.shape[1])"),
    ("constant: number of tokens", "(len(x) * batch.max_tokens)", "batch.mask.sum().clamp(min=1)"),
    (
        "constant: prompts for answers",
        "(len(x) * batch.max_tokens)",
        "(len(x) / batch.group_size * batch.max_tokens)",
    ),
    ("token-mean: padding counted", "/ mask.sum().clamp(min=1)", "/ mask.numel()"),
    ("token-mean: 0/0 without tokens", "/ mask.sum().clamp(min=1)", "/ mask.sum()"),
    ("token-mean: no mask", "x.masked_fill(~mask, 0.0).sum() / mask", "x.sum() / mask"),
    # -------- the clipped surrogate
    (
        "clip: max for min",
        "return torch.minimum(ratio * batch.adv,",
        "return torch.maximum(ratio * batch.adv,",
    ),
    (
        "clip: bounds swapped",
        "torch.minimum(ratio * batch.adv, ratio.clamp(1 - eps_low, 1 + eps_high)",
        "torch.minimum(ratio * batch.adv, ratio.clamp(1 - eps_high, 1 + eps_low)",
    ),
    (
        "clip: on the log-ratio",
        "torch.minimum(ratio * batch.adv, ratio.clamp(1 - eps_low, 1 + eps_high)",
        "torch.minimum(ratio * batch.adv, ratio.log().clamp(-eps_low, eps_high).exp()",
    ),
    (
        "clip: no lower bound",
        "torch.minimum(ratio * batch.adv, ratio.clamp(1 - eps_low, 1 + eps_high)",
        "torch.minimum(ratio * batch.adv, ratio.clamp(max=1 + eps_high)",
    ),
    (
        "clip: no upper bound",
        "torch.minimum(ratio * batch.adv, ratio.clamp(1 - eps_low, 1 + eps_high)",
        "torch.minimum(ratio * batch.adv, ratio.clamp(min=1 - eps_low)",
    ),
    (
        "clip: min taken of the ratios",
        "torch.minimum(ratio * batch.adv, ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv)",
        "torch.minimum(ratio, ratio.clamp(1 - eps_low, 1 + eps_high)) * batch.adv",
    ),
    (
        "clip: no min",
        "torch.minimum(ratio * batch.adv, ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv)",
        "ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv",
    ),
    (
        "clip: straight-through",
        "ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv)\n\n\ndef k3",
        "(ratio + (ratio.clamp(1 - eps_low, 1 + eps_high) - ratio).detach()) * batch.adv)\n\n\ndef k3",
    ),
    ("k3: k1 instead", "return log_q.exp() - log_q - 1", "return -log_q"),
    ("k3: k2 instead", "return log_q.exp() - log_q - 1", "return log_q**2 / 2"),
    (
        "k3: upside down",
        "log_q = (batch.logp_ref - batch.logp)",
        "log_q = (batch.logp - batch.logp_ref)",
    ),
    (
        "k3: against pi_old",
        "log_q = (batch.logp_ref - batch.logp)",
        "log_q = (batch.logp_old - batch.logp)",
    ),
    (
        "k3: no mask",
        "(batch.logp_ref - batch.logp).masked_fill(~batch.mask, 0.0)",
        "(batch.logp_ref - batch.logp)",
    ),
    # -------- the losses
    (
        "reinforce: sign",
        "-budget_mean(masked_adv(batch) * batch.logp, batch)",
        "budget_mean(masked_adv(batch) * batch.logp, batch)",
    ),
    (
        "reinforce: ratio for log pi",
        "(masked_adv(batch) * batch.logp, batch)",
        "(batch.adv * token_ratio(batch), batch)",
    ),
    (
        "reinforce: seq-mean",
        "-budget_mean(masked_adv(batch) * batch.logp, batch)",
        "-seq_mean(masked_adv(batch) * batch.logp, batch)",
    ),
    ("grpo: sign", "return -seq_mean(surrogate, batch)", "return seq_mean(surrogate, batch)"),
    (
        "grpo: constant normaliser",
        "return -seq_mean(surrogate, batch)",
        "return -budget_mean(surrogate, batch)",
    ),
    ("grpo: KL rewarded", "surrogate - kl * k3(batch)", "surrogate + kl * k3(batch)"),
    ("grpo: KL forgotten", "surrogate = surrogate - kl * k3(batch)", "pass"),
    ("grpo: KL detached", "surrogate - kl * k3(batch)", "surrogate - kl * k3(batch).detach()"),
    (
        "grpo: KL times advantage",
        "surrogate - kl * k3(batch)",
        "surrogate - kl * k3(batch) * batch.adv",
    ),
    (
        "grpo: default clip of dapo",
        "eps_high: float = 0.2, kl: float",
        "eps_high: float = 0.28, kl: float",
    ),
    ("grpo: KL on by default", "kl: float = 0.0", "kl: float = 0.04"),
    (
        "grpo-symmetric: the min is back",
        "-budget_mean(token_ratio(batch).clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch)",
        "-budget_mean(clipped(batch, eps_low, eps_high), batch)",
    ),
    (
        "grpo-symmetric: 1/T_i is back",
        "-budget_mean(token_ratio(batch).clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch)",
        "-seq_mean(token_ratio(batch).clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch)",
    ),
    (
        "grpo-symmetric: bounds swapped",
        "token_ratio(batch).clamp(1 - eps_low, 1 + eps_high) * batch.adv",
        "token_ratio(batch).clamp(1 - eps_high, 1 + eps_low) * batch.adv",
    ),
    (
        "grpo-symmetric: no clip",
        "token_ratio(batch).clamp(1 - eps_low, 1 + eps_high) * batch.adv",
        "token_ratio(batch) * batch.adv",
    ),
    (
        "dr-grpo: 1/T_i is back",
        "-budget_mean(clipped(batch, eps_low",
        "-seq_mean(clipped(batch, eps_low",
    ),
    ("dr-grpo: sign", "-budget_mean(clipped(batch, eps_low", "budget_mean(clipped(batch, eps_low"),
    (
        "dr-grpo: eps_high ignored",
        "-budget_mean(clipped(batch, eps_low, eps_high)",
        "-budget_mean(clipped(batch, eps_low, eps_low)",
    ),
    ("dapo: default clip of grpo", "eps_high: float = 0.28", "eps_high: float = 0.2"),
    (
        "dapo: bounds swapped",
        "token_mean(clipped(batch, eps_low, eps_high), batch.mask & mixed",
        "token_mean(clipped(batch, eps_high, eps_low), batch.mask & mixed",
    ),
    ("dapo: equal-reward groups counted", "batch.mask & mixed[:, None])", "batch.mask)"),
    (
        "dapo: answers, not groups, left out",
        "mixed = groups.flatten(1).any(1).repeat_interleave(batch.group_size)",
        "mixed = groups.any(2).flatten()",
    ),
    (
        "dapo: constant normaliser",
        "-token_mean(clipped(batch, eps_low, eps_high), batch.mask & mixed[:, None])",
        "-budget_mean(clipped(batch, eps_low, eps_high) * mixed[:, None], batch)",
    ),
    (
        "dapo: sign",
        "-token_mean(clipped(batch, eps_low, eps_high), batch.mask & mixed",
        "token_mean(clipped(batch, eps_low, eps_high), batch.mask & mixed",
    ),
    (
        "gspo: product",
        "ratio, adv = sequence_ratio(batch),",
        'ratio, adv = sequence_ratio(batch, "product"),',
    ),
    (
        "gspo: detached",
        "ratio, adv = sequence_ratio(batch),",
        "ratio, adv = sequence_ratio(batch).detach() + 0 * batch.logp.sum(1),",
    ),
    ("gspo: max for min", "-torch.minimum(ratio * adv,", "-torch.maximum(ratio * adv,"),
    ("gspo: sum over answers", "1 + eps_high) * adv).mean()", "1 + eps_high) * adv).sum()"),
    (
        "gspo: bounds swapped",
        "ratio.clamp(1 - eps_low, 1 + eps_high) * adv).mean()",
        "ratio.clamp(1 - eps_high, 1 + eps_low) * adv).mean()",
    ),
    (
        "gspo: no clip",
        "-torch.minimum(ratio * adv, ratio.clamp(1 - eps_low, 1 + eps_high) * adv).mean()",
        "-(ratio * adv).mean()",
    ),
    (
        "gspo: clip of grpo",
        "eps_low: float = 3e-4, eps_high: float = 4e-4",
        "eps_low: float = 0.2, eps_high: float = 0.2",
    ),
    (
        "gspo: defaults swapped",
        "eps_low: float = 3e-4, eps_high: float = 4e-4",
        "eps_low: float = 4e-4, eps_high: float = 3e-4",
    ),
    (
        "gspo: weighted by length",
        "1 + eps_high) * adv).mean()",
        "1 + eps_high) * adv).mul(lengths(batch)).sum() / batch.mask.sum().clamp(min=1)",
    ),
    # -------- the transforms
    ("min-replace: max", "w.detach().amin(1, keepdim=True)", "w.detach().amax(1, keepdim=True)"),
    ("min-replace: mean", "w.detach().amin(1, keepdim=True)", "w.detach().mean(1, keepdim=True)"),
    ("min-replace: over the batch", "w.detach().amin(1, keepdim=True)", "w.detach().amin()"),
    (
        "min-replace: over the wrong axis",
        "w.detach().amin(1, keepdim=True)",
        "w.detach().amin(0, keepdim=True)",
    ),
    ("min-replace: not detached", "w.detach().amin(1, keepdim=True)", "w.amin(1, keepdim=True)"),
    (
        "min-replace: of the winners",
        "w.detach().amin(1, keepdim=True)",
        "w.detach().masked_fill(adv <= 0, torch.inf).amin(1, keepdim=True)",
    ),
    ("adv-orthogonal: not detached", "w, norm = w.detach(), ", "w, norm = w, "),
    (
        "adv-orthogonal: ||A|| for ||A||^2",
        "(adv * adv).sum(1, keepdim=True)",
        "(adv * adv).sum(1, keepdim=True).sqrt()",
    ),
    (
        "adv-orthogonal: ||w||^2",
        "(adv * adv).sum(1, keepdim=True)",
        "(w * w).sum(1, keepdim=True).detach()",
    ),
    (
        "adv-orthogonal: norm of the batch",
        "(adv * adv).sum(1, keepdim=True)",
        "(adv * adv).sum().expand(len(adv), 1)",
    ),
    (
        "adv-orthogonal: G for ||A||^2",
        "(adv * adv).sum(1, keepdim=True)",
        "torch.full_like(adv[:, :1], adv.shape[1])",
    ),
    ("adv-orthogonal: plus", "return w - projection * adv", "return w + projection * adv"),
    ("adv-orthogonal: the other part", "return w - projection * adv", "return projection * adv"),
    (
        "adv-orthogonal: negative weights cut off",
        "return w - projection * adv",
        "return (w - projection * adv).clamp(min=0)",
    ),
    ("adv-orthogonal: 0/0 in equal groups", "norm.masked_fill(norm == 0, 1.0)", "norm"),
    ("dfpo: 1/T_i is back", "-budget_mean((w.reshape(-1, 1)", "-seq_mean((w.reshape(-1, 1)"),
    (
        "dfpo: weight forgotten",
        "w.reshape(-1, 1) * masked_adv(batch) * batch.logp",
        "masked_adv(batch) * batch.logp + 0 * w.reshape(-1, 1)",
    ),
    (
        "dfpo: ratio for log pi",
        "w.reshape(-1, 1) * masked_adv(batch) * batch.logp",
        "w.reshape(-1, 1) * batch.adv * token_ratio(batch)",
    ),
    ("dfpo: kind of ratio ignored", "sequence_ratio(batch, ratio)", "sequence_ratio(batch)"),
    ("dfpo: sign", "-budget_mean((w.reshape(-1, 1)", "budget_mean((w.reshape(-1, 1)"),
    (
        "dfpo-min: product by default",
        'def dfpo_min(batch: Batch, ratio: str = "geometric"',
        'def dfpo_min(batch: Batch, ratio: str = "product"',
    ),
    (
        "dfpo-min: the other transform",
        "(batch, ratio, min_replace, eps)",
        "(batch, ratio, adv_orthogonal, eps)",
    ),
    (
        "dfpo-orthogonal: the other transform",
        "(batch, ratio, adv_orthogonal, eps)",
        "(batch, ratio, min_replace, eps)",
    ),
    (
        "dfpo: eps keeps what it must rest",
        "(token_ratio(batch) - 1).abs() > eps",
        "(token_ratio(batch) - 1).abs() < eps",
    ),
    (
        "dfpo: eps for large ratios only",
        "(token_ratio(batch) - 1).abs() > eps",
        "token_ratio(batch) - 1 > eps",
    ),
    (
        "dfpo: eps stops winners only",
        "(token_ratio(batch) - 1).abs() > eps",
        "((token_ratio(batch) - 1).abs() > eps) & (batch.adv > 0)",
    ),
    (
        "dfpo: eps on the answer's ratio",
        "(token_ratio(batch) - 1).abs() > eps",
        "((sequence_ratio(batch) - 1).abs() > eps)[:, None]",
    ),
    ("dfpo-min: eps ignored", "(batch, ratio, min_replace, eps)", "(batch, ratio, min_replace)"),
    (
        "dfpo-orthogonal: eps ignored",
        "(batch, ratio, adv_orthogonal, eps)",
        "(batch, ratio, adv_orthogonal)",
    ),
    ("pos-only: losers", "adv=batch.adv.clamp(min=0)", "adv=batch.adv.clamp(max=0)"),
    ("pos-only: absolute value", "adv=batch.adv.clamp(min=0)", "adv=batch.adv.abs()"),
    ("pos-only: everybody", "adv=batch.adv.clamp(min=0)", "adv=batch.adv"),
    (
        "pos-only: eps ignored",
        "adv=batch.adv.clamp(min=0)), eps_low, eps_high)",
        "adv=batch.adv.clamp(min=0)))",
    ),
    # -------- the meter
    ("coefficients: sign", "return -len(logp) * torch", "return len(logp) * torch"),
    ("coefficients: 1/N kept", "return -len(logp) * torch", "return -torch"),
    (
        "coefficients: tokens for answers",
        "return -len(logp) * torch",
        "return -logp.numel() * torch",
    ),
    ("coefficients: graph freed", "(loss, logp, retain_graph=True)", "(loss, logp)"),
    ("coefficients: not detached", "retain_graph=True)[0]", "create_graph=True)[0]"),
    (
        "context: one token too many",
        "before.unfold(1, min(context, width), 1)",
        "before.unfold(1, 1, 1)",
    ),
    ("context: all groups in one", "// group_size\n        windows", "* 0\n        windows"),
    ("context: the start is token 0", "- 1, 0), value=-1)", "- 1, 0), value=0)"),
    (
        "context: padding belongs",
        "nodes.masked_scatter(mask, windows",
        "nodes.masked_fill(~mask, 0).masked_scatter(mask, windows",
    ),
    ("context: 0 accepted", "if context < 1:", "if context < 0:"),
    (
        "nodes: the token alone",
        ".to(torch.uint8).cumprod(-1, dtype=torch.uint8)",
        ".to(torch.uint8)",
    ),
    ("nodes: groups mixed", "(offset[:, None] + first) * width", "first * width"),
    (
        "nodes: depth forgotten",
        "first) * width + torch.arange(width, device=tokens.device)",
        "first) * width",
    ),
    ("nodes: ids overlap", "(offset[:, None] + first) * width", "(offset[:, None] + first)"),
    ("nodes: padding has a node", "return nodes.masked_fill(~mask, -1)", "return nodes"),
    (
        "nodes: last visitor, one token late",
        "first = same.argmax(2)",
        "first = same.roll(1, -1).argmax(2)",
    ),
    ("tax: answers with A = 0 divide by it", "used = mask & (adv != 0)", "used = mask"),
    ("tax: padding included", "used = mask & (adv != 0)", "used = adv != 0"),
    ("tax: losers only", "used = mask & (adv != 0)", "used = mask & (adv < 0)"),
    ("tax: not centred", "per_node(c) - per_node(c / adv) / count * per_node(adv)", "per_node(c)"),
    (
        "tax: mean forgotten",
        "per_node(c / adv) / count * per_node(adv)",
        "per_node(c / adv) * per_node(adv)",
    ),
    (
        "tax: mean of c",
        "per_node(c / adv) / count * per_node(adv)",
        "per_node(c) / count * per_node(adv)",
    ),
    (
        "tax: signs cancel between nodes",
        "/ count * per_node(adv)).abs()",
        "/ count * per_node(adv))",
    ),
    (
        "tax: lone tokens in the total",
        "total = per_node(c.abs())[count > 1].sum()",
        "total = per_node(c.abs()).sum()",
    ),
    (
        "tax: |sum c| in the total",
        "total = per_node(c.abs())[count > 1]",
        "total = per_node(c).abs()[count > 1]",
    ),
    ("tax: 0/0 without shared tokens", " if total > 0 else 0.0", ""),
    ("nodes: negative ids", "(offset[:, None] + first)", "(offset[:, None] - first)"),
    ("tax: pairs left out", "tax[count > 1].sum()", "tax[count > 2].sum()"),
    ("projection: sum for mean", "c[used] / adv) / count", "c[used] / adv)"),
    ("projection: mean of c", "c[used] / adv) / count", "c[used]) / count"),
    (
        "projection: |A|",
        "c.masked_scatter(used, mean[node] * adv)",
        "c.masked_scatter(used, mean[node] * adv.abs())",
    ),
    (
        "projection: A forgotten",
        "c.masked_scatter(used, mean[node] * adv)",
        "c.masked_scatter(used, mean[node])",
    ),
    ("projection: nothing done", "c = c.masked_scatter(used, mean[node] * adv)", "pass"),
    (
        "projection: answers with A = 0 dropped",
        "c = c.masked_scatter(used,",
        "c = (0 * c).masked_scatter(used,",
    ),
    (
        "projection: 1/N missing",
        "-(c * logp).masked_fill(~mask, 0.0).sum() / len(logp)",
        "-(c * logp).masked_fill(~mask, 0.0).sum()",
    ),
    ("projection: sign", "return -(c * logp).masked_fill", "return (c * logp).masked_fill"),
    # -------- Advantage Reweighting and Lopti
    (
        "token-grpo: mean over the mixed groups' tokens",
        "return -token_mean(clipped(batch, eps_low, eps_high), batch.mask)\n\n\ndef lopti_low",
        "return -token_mean(clipped(batch, eps_low, eps_high), batch.mask & (batch.adv != 0))\n\n\ndef lopti_low",
    ),
    (
        "token-grpo: mean per answer",
        "return -token_mean(clipped(batch, eps_low, eps_high), batch.mask)\n\n\ndef lopti_low",
        "return -seq_mean(clipped(batch, eps_low, eps_high), batch)\n\n\ndef lopti_low",
    ),
    (
        "lopti: first pass by the new policy",
        "batch.logp_old.exp() <= eta",
        "batch.logp.exp() <= eta",
    ),
    (
        "lopti: second pass by the new policy",
        "batch.logp_old.exp() > eta",
        "batch.logp.exp() > eta",
    ),
    (
        "lopti: the threshold in neither part",
        "batch.logp_old.exp() <= eta",
        "batch.logp_old.exp() < eta",
    ),
    (
        "lopti: the threshold in both parts",
        "batch.logp_old.exp() > eta",
        "batch.logp_old.exp() >= eta",
    ),
    ("lopti: log-probability against eta", "batch.logp_old.exp() <= eta", "batch.logp_old <= eta"),
    ("lopti: both passes low", "batch.logp_old.exp() > eta", "batch.logp_old.exp() <= eta"),
    (
        "lopti: denominators shrunk to the kept tokens",
        "return -token_mean(clipped(batch, eps_low, eps_high).masked_fill(~kept, 0.0), batch.mask)",
        "return -token_mean(clipped(batch, eps_low, eps_high), batch.mask & kept)",
    ),
    (
        "lopti: kept tokens dropped",
        "return -token_mean(clipped(batch, eps_low, eps_high).masked_fill(~kept, 0.0), batch.mask)",
        "return -token_mean(clipped(batch, eps_low, eps_high).masked_fill(kept, 0.0), batch.mask)",
    ),
    (
        "reweighting: alpha on the wrong side",
        "(alpha * old.logp.detach().exp() + 1 - alpha)",
        "((1 - alpha) * old.logp.exp() + alpha)",
    ),
    (
        "reweighting: improbable tokens favoured",
        "(alpha * old.logp.detach().exp() + 1 - alpha)",
        "(1 - alpha * old.logp.exp())",
    ),
    (
        "reweighting: log-probability",
        "(alpha * old.logp.detach().exp() + 1 - alpha)",
        "(alpha * old.logp + 1 - alpha)",
    ),
    (
        "reweighting: winners only",
        "return (alpha * old.logp.detach().exp() + 1 - alpha) * adv",
        "return torch.where(adv > 0, (alpha * old.logp.exp() + 1 - alpha) * adv, adv)",
    ),
    (
        "reweighting: default of the paper's maths",
        "old: OldPolicy, alpha: float = 0.3",
        "old: OldPolicy, alpha: float = 0.1",
    ),
    # -------- NTHR
    ("nthr: eta without the 2", "2 * (0.5 - share).abs()", "(0.5 - share).abs()"),
    ("nthr: eta = |p|", "2 * (0.5 - share).abs()", "2 * share"),
    ("nthr: eta signed", "2 * (0.5 - share).abs()", "2 * (0.5 - share)"),
    (
        "nthr: p of the whole batch",
        ".mean(1).repeat_interleave(old.group_size)  # (N,)",
        ".mean().expand(len(adv))  # (N,)",
    ),
    ("nthr: constant eta ignored", "if eta < 0 else torch.full_like(share, eta)", ""),
    (
        "nthr: reshapes what is not selected",
        "factor[:, None] * adv, adv)",
        "adv, factor[:, None] * adv)",
    ),
    (
        "nthr: beta ignored",
        "nthr_selected(old, beta, self_term, full_vocab) & (adv < 0)\n    return torch.where",
        "nthr_selected(old, 1.0, self_term, full_vocab) & (adv < 0)\n    return torch.where",
    ),
    (
        "nthr: self_term ignored",
        "nthr_selected(old, beta, self_term, full_vocab) & (adv < 0)\n    return torch.where",
        "nthr_selected(old, beta, True, full_vocab) & (adv < 0)\n    return torch.where",
    ),
    (
        "nthr: full_vocab ignored",
        "nthr_selected(old, beta, self_term, full_vocab) & (adv < 0)\n    return torch.where",
        "nthr_selected(old, beta, self_term) & (adv < 0)\n    return torch.where",
    ),
    (
        "nthr: tau the largest mean",
        "masked_fill(~correct | means.isnan(), torch.inf).view(-1, old.group_size).amin(1)",
        "masked_fill(~correct | means.isnan(), -torch.inf).view(-1, old.group_size).amax(1)",
    ),
    (
        "nthr: tau from the wrong answers",
        "means.masked_fill(~correct | means.isnan(), torch.inf)",
        "means.masked_fill(correct, torch.inf)",
    ),
    ("nthr: tau of all answers", "means.masked_fill(~correct | means.isnan(), torch.inf)", "means"),
    (
        "nthr: tau from sums, not means",
        "scores.sum(1) / old.mask.sum(1)  # (N,)",
        "scores.sum(1)  # (N,)",
    ),
    (
        "nthr: mean over the padded width",
        "scores.sum(1) / old.mask.sum(1)  # (N,)",
        "scores.mean(1)  # (N,)",
    ),
    ("nthr: tau of the batch", "beta * lowest, lowest)", "beta * lowest.min(), lowest)"),
    ("nthr: tau without beta", "beta * lowest, lowest)", "lowest, lowest)"),
    (
        "nthr: selects below tau",
        "(scores > tau) & old.mask & ~correct[:, None]",
        "(scores < tau) & old.mask & ~correct[:, None]",
    ),
    (
        "nthr: selects right answers too",
        "(scores > tau) & old.mask & ~correct[:, None]",
        "(scores > tau) & old.mask",
    ),
    (
        "nthr: selects padding",
        "(scores > tau) & old.mask & ~correct[:, None]",
        "(scores > tau) & ~correct[:, None]",
    ),
    ("nthr: half right is right", "old.rewards == 1, nthr_scores", "old.rewards > 0, nthr_scores"),
    (
        "nthr: half right is right, in the scores",
        "device=old.mask.device), old.rewards == 1",
        "device=old.mask.device), old.rewards > 0",
    ),
    (
        "nthr: scores with the wrong sign",
        "scores[rows] = torch.stack([((g_i @ M)",
        "scores[rows] = torch.stack([(-(g_i @ M)",
    ),
    ("nthr: g of the taken token only", ".exp_().neg_()", ".mul_(0)"),
    (
        "nthr: g without the taken token",
        "g.scatter_add_(2, where, torch.ones_like(g[..., :1]))",
        "pass",
    ),
    (
        "nthr: pi renormalised on V*",
        "g.sub_(g.gather(2, where)).add_(old.logp[rows, :, None]).exp_()",
        "g = g.softmax(-1)",
    ),
    (
        "nthr: V* of the whole batch",
        "tokens[mask].unique()  # V*",
        "old.tokens[old.mask].unique()  # V*",
    ),
    ("nthr: temperature left out", ".to(dtype).T).div_(old.temperature)", ".to(dtype).T)"),
    (
        "nthr: M from the wrong answers",
        "for i in right.nonzero().flatten())",
        "for i in (~right).nonzero().flatten())",
    ),
    (
        "nthr: M from all answers",
        "for i in right.nonzero().flatten())",
        "for i in range(len(right)))",
    ),
    (
        "nthr: M from the first right answer",
        "for i in right.nonzero().flatten())",
        "for i in right.nonzero().flatten()[:1])",
    ),
    (
        "nthr: M with the padding",
        "M = sum(g[i, mask[i]].T @ h[i, mask[i]] for",
        "M = sum(g[i].T @ h[i] for",
    ),
    ("nthr: self term without the hidden state", " * h.norm(dim=2).square()", ""),
    ("nthr: self term taken off when wanted", "if not self_term:", "if self_term:"),
    (
        "nthr: self term taken off wrong answers",
        "scores[rows] -= right[:, None] *",
        "scores[rows] -=",
    ),
    ("nthr: vocabularies swapped", "if full_vocab else tokens", "if not full_vocab else tokens"),
    (
        "nthr: groups with one wrong answer skipped",
        "if right.all() or not right.any()",
        "if right.sum() >= len(right) - 1 or not right.any()",
    ),
    (
        "nthr: half precision",
        "torch.promote_types(old.hidden.dtype, torch.float32)",
        "old.hidden.dtype",
    ),
    (
        "nthr: an empty right answer counts",
        "means.masked_fill(~correct | means.isnan(), torch.inf)",
        "means.nan_to_num().masked_fill(~correct, torch.inf)",
    ),
    (
        "nthr: rewards softened too",
        "nthr_selected(old, beta, self_term, full_vocab) & (adv < 0)\n    return torch.where",
        "nthr_selected(old, beta, self_term, full_vocab)\n    return torch.where",
    ),
    ("nthr-random: rewards softened too", "full_vocab) & (adv < 0)).sum(1", "full_vocab)).sum(1"),
    ("reweighting: any alpha", "if not 0 <= alpha <= 1:", "if False:"),
    ("reweighting: carries a gradient", "old.logp.detach().exp() + 1", "old.logp.exp() + 1"),
    # -------- IBPO
    (
        "ibpo: blames what was kept",
        "return adv.masked_fill(old.kept_mask, 0.0)",
        "return adv.masked_fill(~old.kept_mask, 0.0)",
    ),
    ("ibpo: no mask", "return adv.masked_fill(old.kept_mask, 0.0)", "return adv"),
    (
        "ibpo: corrections missing, unnoticed",
        'raise ValueError("ibpo needs the corrections: kept_mask is None")',
        "return adv",
    ),
    ("shaped: right answers earn the bonus too", "(repaired & (rewards == 0)).to", "repaired.to"),
    (
        "shaped: all that are not right earn it",
        "(repaired & (rewards == 0)).to",
        "(repaired & (rewards < 1)).to",
    ),
    ("shaped: every wrong answer earns it", "(repaired & (rewards == 0)).to", "(rewards == 0).to"),
    ("shaped: weight left out", "rewards + weight * bonus *", "rewards + bonus *"),
    ("shaped: bonus left out", "rewards + weight * bonus *", "rewards + weight *"),
    ("shaped: taken away", "rewards + weight * bonus *", "rewards - weight * bonus *"),
    (
        "shaped: defaults swapped",
        "bonus: float = 0.5, weight: float = 0.6",
        "bonus: float = 0.6, weight: float = 0.6",
    ),
    ("kept: substitution for free", "edits[:, t, :-1] + ~same[:, t]", "edits[:, t, :-1]"),
    ("kept: no insertions", "(best - steps).cummin(1).values + steps", "best"),
    ("kept: deletion for free", "edits[:, t] + 1\n", "edits[:, t]\n"),
    (
        "kept: back from the padded end",
        "mask.sum(1), others_mask.sum(1)",
        "mask.sum(1) * 0 + width, others_mask.sum(1)",
    ),
    (
        "kept: the place after",
        "kept[rows[match], t[match] - 1] = True",
        "kept[rows[match], t[match] % width] = True",
    ),
    (
        "kept: longest common prefix",
        "match = both & same[rows, t - 1, u - 1]",
        "match = both & same[rows, t - 1, u - 1] & (t == u)",
    ),
    ("kept: substitutes too eagerly", "& (edits[rows, t - 1, u - 1] + 1 == here)", ""),
    ("old: kept of any shape", 'wanted["kept_mask"] = self.tokens.shape', "pass"),
    ("methods: ibpo without corrections", "credit=ibpo, repair=True", "credit=ibpo"),
    (
        "methods: ibpo without its mask",
        "Method((grpo,), credit=ibpo, repair=True)",
        "Method((grpo,), repair=True)",
    ),
    ("nthr: carries a gradient", "@torch.no_grad()\n", ""),
    ("nthr-random: padding drawn", ".masked_fill(~old.mask, 2.0)", ""),
    (
        "nthr-random: always the first tokens",
        "draw.argsort(1).argsort(1) < count",
        "draw.new_tensor(range(draw.shape[1])).expand_as(draw) < count",
    ),
    ("nthr-random: draws of its own", "generator=old.gen", "generator=None"),
    (
        "nthr-random: beta ignored",
        "(nthr_selected(old, beta, self_term, full_vocab) & (adv < 0)).sum(1",
        "(nthr_selected(old, 1.0, self_term, full_vocab) & (adv < 0)).sum(1",
    ),
    (
        "nthr-random: halves",
        "return adv.masked_fill(draw.argsort(1).argsort(1) < count, 0.0)",
        "return torch.where(draw.argsort(1).argsort(1) < count, adv / 2, adv)",
    ),
    # -------- the table of methods, and the batch
    (
        "methods: lopti's passes swapped",
        '"lopti": Method((lopti_low, lopti_high))',
        '"lopti": Method((lopti_high, lopti_low))',
    ),
    (
        "methods: lopti in one pass",
        '"lopti": Method((lopti_low, lopti_high))',
        '"lopti": Method((token_grpo,))',
    ),
    (
        "methods: ar-lopti without reweighting",
        "Method((lopti_low, lopti_high), credit=advantage_reweighting)",
        "Method((lopti_low, lopti_high))",
    ),
    ("methods: reweighting on grpo", "Method((token_grpo,), credit=", "Method((grpo,), credit="),
    ("methods: nthr at random", "credit=nthr,", "credit=nthr_random,"),
    ("methods: nthr without hidden states", "credit=nthr, needs_hidden=True", "credit=nthr"),
    ("old: any shape", "if getattr(self, name).shape != shape:", "if False:"),
    (
        "old: broken groups accepted",
        "if self.group_size < 2 or n % self.group_size:",
        "if self.group_size < 2:",
    ),
    (
        "old: groups of one accepted",
        "if self.group_size < 2 or n % self.group_size:",
        "if n % self.group_size:",
    ),
    (
        "old: hidden states of any width",
        'wanted["hidden"] = (*self.tokens.shape, self.head.shape[1])',
        "pass",
    ),
    ("methods: dr-grpo with std", 'Method((dr_grpo,), scale="mean")', "Method((dr_grpo,))"),
    ("methods: grpo without std", "Method((grpo,))", 'Method((grpo,), scale="mean")'),
    ("methods: dfpo twice the same", "Method((dfpo_orthogonal,))", "Method((dfpo_min,))"),
    ("methods: dapo is dr-grpo", "Method((dapo,))", "Method((dr_grpo,))"),
    ("methods: two steps of gspo", "Method((gspo,))", "Method((gspo, gspo))"),
    (
        "batch: shape of adv unchecked",
        'for name in ("logp_old", "adv", "mask", "logp_ref"):',
        'for name in ("logp_old", "mask", "logp_ref"):',
    ),
    (
        "batch: groups unchecked",
        "if self.group_size < 2 or len(self.logp) % self.group_size or not self.logp.numel():",
        "if self.group_size < 2 or not self.logp.numel():",
    ),
    ("adv: padding kept", "return batch.adv.masked_fill(~batch.mask, 0.0)", "return batch.adv"),
    ("dapo: padding decides", "(masked_adv(batch) != 0)", "(batch.adv != 0)"),
    ("batch: emptiness accepted", " or not self.logp.numel():", ":"),
    ("advantage: whole numbers accepted", " or not rewards.is_floating_point():", ":"),
    (
        "batch: reference forgotten in a part",
        "if isinstance(x, Tensor)}",
        "if isinstance(x, Tensor) and name != 'logp_ref'}",
    ),
    ("batch: no budget accepted", "if self.max_tokens < 1:", "if self.max_tokens < 0:"),
    (
        "batch: mask of numbers accepted",
        "self.logp.dim() != 2 or self.mask.dtype != torch.bool",
        "self.logp.dim() != 2",
    ),
]


def patched(old: str, new: str) -> tuple[types.ModuleType, str]:
    """losses.py with one place replaced, as a module, and the function that the place is in."""
    if SOURCE.count(old) != 1:
        raise ValueError(f"{old!r} is in losses.py {SOURCE.count(old)} times, not once")
    module = types.ModuleType("faulty_losses")
    sys.modules["faulty_losses"] = module  # where dataclasses look their module up
    exec(compile(SOURCE.replace(old, new), "faulty_losses.py", "exec"), module.__dict__)
    above = SOURCE[: SOURCE.index("\n", SOURCE.index(old))]
    return module, re.findall(r"^(?:def |class )?(\w+)", above, re.MULTILINE)[-1]


def verify_says(module: types.ModuleType, suspect: str = "") -> str:
    """The first claim that fails, on a few random trees, the claims about the suspect first; "" if
    none does."""
    # The claims on 200 sampled groups take most of the time and see nothing that the others do not.
    tasks = [
        (claim, f)
        for claim in CLAIMS
        for f in claim.functions
        if claim.id not in ("N7", "A3", "A5")
    ]
    for claim, function in sorted(tasks, key=lambda task: task[1] != suspect):
        outcome = examine(module, claim, function, DRAWS[claim.group_size])
        if outcome.state != "ok":
            return f"{claim.id} {function}: {outcome.message}"
    return ""


def unit_tests_fail(module: types.ModuleType, suspect: str = "") -> bool:
    """Whether the unit tests of losses.py fail on it; in a forked process, because it imports
    losses anew."""
    paths = sorted(
        UNIT_TESTS, key=lambda path: suspect not in Path(path).read_text()
    )  # where it is spoken of first
    child = os.fork()
    if not child:
        sys.modules["losses"] = module
        for path in UNIT_TESTS:
            sys.modules.pop(Path(path).stem, None)
        sys.stdout = sys.stderr = open(os.devnull, "w")
        import pytest

        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *paths]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


if __name__ == "__main__":
    if unit_tests_fail(losses) or verify_says(losses):
        sys.exit("losses.py does not pass as it is")
    seen = []
    for name, old, new in FAULTS:
        module, suspect = patched(old, new)
        said, failed = verify_says(module, suspect), unit_tests_fail(module, suspect)
        seen.append((bool(said), failed))
        print(f"{name:44} {'tests' if failed else '-':6} {said or '-'}", flush=True)
    verify_alone, tests_alone, together = (
        sum(v for v, _ in seen),
        sum(t for _, t in seen),
        sum(map(any, seen)),
    )
    print(
        f"\n{len(seen)} faults: verify.py alone {verify_alone}, unit tests alone {tests_alone}, together {together}"
    )
