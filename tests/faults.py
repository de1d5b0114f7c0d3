"""Planted faults: one wrong edit of a source file at a time, to see who notices.

    python -m tests.faults              losses.py: the claims alone, the unit tests alone, both
    python -m tests.faults train.py     the trainer's tests; of train.py or another of its files

A fault is a change of the syntax tree, so formatting, comments and docstrings never matter. In the
tables below, a line without indentation names a function, a class, a method (Batch.__getitem__) or
an entry of a table (METHODS.dr-grpo). A line with indentation is one fault in there:

    what is wrong: old => new         an expression or a statement, which must occur exactly once
    what is wrong: name=value         other defaults, of arguments or of a dataclass's fields

A letter with an underscore, such as x_, stands for any expression. A line that is indented further
continues the one above. RULES has the same notation and holds wherever a pattern fits. So has
trainer_faults.txt, where a line [train.py] names the file that the following lines are about.
"""

from __future__ import annotations

import ast
import copy
import os
import re
import signal
import sys
import tempfile
import types
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import losses
from claims import CLAIMS, ORDINARY, Draws, examine_on

LOSSES = Path(losses.__file__)
ROOT = LOSSES.resolve().parent
UNIT_TESTS = [Path(__file__).with_name(f"test_{name}.py") for name in ("neighbours", "losses")]
DRAWS, EXTREME = Draws(seed=0, count=5, kinds=()), Draws(seed=0, count=0)
TRAINER_TABLE = Path(__file__).with_name("trainer_faults.txt")
# Not test_promises.py: a process that a test starts does not have the fault.
TRAINER_TESTS = "whole_step run evaluation sampling update scoring arithmetic gsm8k models"
TRAINER_TESTS += " command_line"
TRAINER_MODULES = r"(train|losses|llm|toy|naive|helpers|conftest|test_\w+)(\..*)?"
ON_GPU = (
    "train.py",
    "losses.py",
    "llm/policy.py",
    "llm/cache.py",
    "llm/runs.py",
)  # where tensors are made
# Tensors that may be on the CPU: they are indices of others, in these functions.
INDICES = ("log_probs: torch.arange", "learn: minibatch", "warm_start: learnt", "length_buckets")
INDICES += ("PromptStates: torch.arange",)
PATIENCE = 1200  # seconds; a fault may let a run hang
torch.set_num_threads(1)  # a forked process waits for ever for the threads of its parent

RULES = """
    sign: return -x_ => return x_
    carries the gradient of x_: x_.detach() => x_
    no mask on x_: x_.masked_fill(m_, v_) => x_
    mask m_ turned round: x_.masked_fill(~m_, v_) => x_.masked_fill(m_, v_)
    padding included: masked_adv(batch) => batch.adv
    accepts c_: if c_: raise x_ => pass
    a_ <= b_: a_ < b_ => a_ <= b_
    a_ < b_: a_ <= b_ => a_ < b_
    a_ >= b_: a_ > b_ => a_ >= b_
    a_ > b_: a_ >= b_ => a_ > b_
    b_ left out beside a_: a_ & b_ => a_
    a_ left out beside b_: a_ & b_ => b_
    b_ left out beside a_: a_ or b_ => a_
    a_ left out beside b_: a_ or b_ => b_
    a_ left out: a_ or b_ or c_ => b_ or c_
    b_ left out: a_ or b_ or c_ => a_ or c_
    c_ left out: a_ or b_ or c_ => a_ or b_
    factor b_ left out beside a_: a_ * b_ => a_
    factor a_ left out beside b_: a_ * b_ => b_
    not divided by b_: a_ / b_ => a_
    always x_: x_ if c_ else y_ => x_
    always y_: x_ if c_ else y_ => y_
    swapped, c_: x_ if c_ else y_ => y_ if c_ else x_
    no floor under x_: x_.clamp(min=v_) => x_
    sign of x_ kept: x_.abs() => x_
    max for min: torch.minimum => torch.maximum
    a_ without the min: torch.minimum(a_, b_) => a_
    b_ without the min: torch.minimum(a_, b_) => b_
    sum for mean: x_.mean() => x_.sum()
    half right is right: old.rewards == 1 => old.rewards > 0
    log-probability for its exp: x_.exp() => x_
    by the new policy: batch.logp_old => batch.logp
    upside down: batch.logp - batch.logp_old => batch.logp_old - batch.logp
    ratio for log pi: x_ * batch.logp => x_ * token_ratio(batch)
    padded width for T_i: lengths(batch) => batch.mask.shape[1]
    constant normaliser: seq_mean(x_, batch) => budget_mean(x_, batch)
    mean over tokens: seq_mean(x_, batch) => token_mean(x_, batch.mask)
    1/T_i is back: budget_mean(x_, batch) => seq_mean(x_, batch)
    mean over tokens: budget_mean(x_, batch) => token_mean(x_, batch.mask)
    constant normaliser: token_mean(x_, batch.mask) => budget_mean(x_, batch)
    mean per answer: token_mean(x_, batch.mask) => seq_mean(x_, batch)
    bounds swapped: x_.clamp(1 - eps_low, 1 + eps_high) => x_.clamp(1 - eps_high, 1 + eps_low)
    no lower bound: x_.clamp(1 - eps_low, 1 + eps_high) => x_.clamp(max=1 + eps_high)
    no upper bound: x_.clamp(1 - eps_low, 1 + eps_high) => x_.clamp(min=1 - eps_low)
    no clip: x_.clamp(1 - eps_low, 1 + eps_high) => x_
    bounds swapped: f_(x_, eps_low, eps_high) => f_(x_, eps_high, eps_low)
    bounds swapped: f_(x_, y_, eps_low, eps_high) => f_(x_, y_, eps_high, eps_low)
"""
# What a default may be mistaken for. One that is not here stays.
OTHER_DEFAULTS = """
    'std'='mean' 'geometric'='product' 'sign'='changed' float('inf')=0.1 True=False False=True
    0.0003=0.0004 0.0004=0.0003 0.2=0.28 0.28=0.2 0.3=0.1 0.5=0.6 0.6=0.3 0.0=0.04 1.0=0.5 -1.0=1.0
"""
TABLE = """
Batch
    shape of adv unchecked: ("logp_old", "adv", x_, y_) => ("logp_old", x_, y_)
    reference forgotten in a part: isinstance(x, t_) => isinstance(x, t_) and name != "logp_ref"
group_advantages
    biased std: groups.std(1, keepdim=True) => groups.std(1, keepdim=True, correction=0)
    std + 1e-8: 1e-4 => 1e-8
    std of the batch: groups.std(1, keepdim=True) => groups.std()
    not centred: groups - x_ => groups
    mean of the batch: groups.mean(1, keepdim=True) => groups.mean()
    median: groups.mean(1, keepdim=True) => groups.median(1, keepdim=True).values
    scales swapped: scale == "std" => scale == "mean"
    groups interleaved: rewards.view(x_, y_) => rewards.view(y_, x_).t().contiguous()
token_ratio
    masked after exp: x_.masked_fill(m_, 0.0).exp() => x_.exp().masked_fill(m_, 1.0)
    detached: x_.exp() => x_.exp().detach() + 0 * batch.logp
    linear in log r: x_.exp() => 1 + x_
sequence_ratio
    root off by one: lengths(batch) => (lengths(batch) - 1)
    arithmetic mean: log_ratio / x_ => ((token_ratio(batch) * batch.mask).sum(1) / x_).log()
trajectory_advantage: the first token's: x_.sum(1) / lengths(batch) => x_[:, 0]
lengths
    EOS not counted: batch.mask.sum(1) => batch.mask.sum(1) - 1
    the padded width: x_.clamp(min=1) => x_ * 0 + batch.mask.shape[1]
seq_mean: longest answer: lengths(batch) => lengths(batch).max()
budget_mean
    padded width for L: batch.max_tokens => x.shape[1]
    number of tokens: len(x) * batch.max_tokens => batch.mask.sum().clamp(min=1)
    prompts for answers: len(x) => len(x) / batch.group_size
token_mean: padding counted: mask.sum().clamp(min=1) => mask.numel()
clipped
    on the log-ratio: x_.clamp(a_ - b_, a_ + c_) => x_.log().clamp(-b_, c_).exp()
    min taken of the ratios: torch.minimum(r_ * a_, x_ * a_) => torch.minimum(r_, x_) * a_
    straight-through: ratio.clamp(a_, b_) => ratio + (ratio.clamp(a_, b_) - ratio).detach()
k3
    k1 instead: log_q.exp() - log_q - 1 => -log_q
    k2 instead: log_q.exp() - log_q - 1 => log_q**2 / 2
    upside down: batch.logp_ref - batch.logp => batch.logp - batch.logp_ref
    against pi_old: batch.logp_ref - batch.logp => batch.logp_old - batch.logp
grpo
    KL rewarded: surrogate - x_ => surrogate + x_
    KL forgotten: surrogate = surrogate - x_ => pass
    KL detached: k3(batch) => k3(batch).detach()
    KL times advantage: k3(batch) => k3(batch) * batch.adv
grpo_symmetric: the min is back: x_.clamp(a_, b_) * batch.adv => clipped(batch, eps_low, eps_high)
dapo
    answers, not groups, left out: x_.any(1).repeat_interleave(n_) => groups.any(2).flatten()
    constant normaliser: token_mean(x_, m_ & g_) => budget_mean(x_ * g_, batch)
    mean per answer: token_mean(x_, m_ & g_) => seq_mean(x_ * g_, batch)
gspo
    product: sequence_ratio(batch) => sequence_ratio(batch, "product")
    detached: sequence_ratio(batch) => sequence_ratio(batch).detach() + 0 * batch.logp.sum(1)
    clip of grpo: eps_low=0.2, eps_high=0.2
    weighted by length: x_.mean() => x_.mul(lengths(batch)).sum() / batch.mask.sum().clamp(min=1)
cispo
    the gradient of the ratio: x_.clamp(a_, b_).detach() => x_.clamp(a_, b_)
    clipped tokens dropped: x_.clamp(a_, b_) => x_.masked_fill((x_ < a_) | (x_ > b_), 0.0)
    clip for winners only: x_.clamp(a_, b_) => x_.where(batch.adv < 0, x_.clamp(a_, b_))
min_replace
    max: x_.amin(1, keepdim=True) => x_.amax(1, keepdim=True)
    mean: x_.amin(1, keepdim=True) => x_.mean(1, keepdim=True)
    over the batch: x_.amin(1, keepdim=True) => x_.amin()
    over the wrong axis: x_.amin(1, keepdim=True) => x_.amin(0, keepdim=True)
    of the winners: w.detach() => w.detach().masked_fill(adv <= 0, torch.inf)
adv_orthogonal
    ||A|| for ||A||^2: (adv * adv).sum(1, keepdim=True) => (adv * adv).sum(1, keepdim=True).sqrt()
    ||w||^2: (adv * adv).sum(1, keepdim=True) => (w * w).sum(1, keepdim=True).detach()
    norm of the batch: (adv * adv).sum(1, keepdim=True) => (adv * adv).sum().expand(len(adv), 1)
    G for ||A||^2: (adv * adv).sum(1, keepdim=True) => torch.full_like(adv[:, :1], adv.shape[1])
    plus: w - x_ => w + x_
    the other part: w - x_ => x_
    negative weights cut off: w - x_ => (w - x_).clamp(min=0)
dfpo_min: the other transform: min_replace => adv_orthogonal
dfpo_orthogonal: the other transform: adv_orthogonal => min_replace
_dfpo
    eps keeps what it must clip: x_ > eps => x_ < eps
    eps stops winners only: x_ > eps => (x_ > eps) & (batch.adv > 0)
    eps on the answer's ratio: token_ratio(batch) => sequence_ratio(batch)[:, None]
pos_only
    losers: batch.adv.clamp(min=0) => batch.adv.clamp(max=0)
    absolute value: batch.adv.clamp(min=0) => batch.adv.abs()
token_grpo: mean over the mixed groups' tokens: batch.mask => batch.mask & (batch.adv != 0)
lopti_high: both passes low: x_ >= eta => x_ < eta
_lopti: denominators shrunk: token_mean(x_.masked_fill(~m_, v_), y_) => token_mean(x_, y_ & m_)
OldPolicy
    kept_mask of any shape: v_["kept_mask"] = x_ => pass
    repaired of any shape: v_["repaired"] = x_ => pass
    hidden states of any width: v_["hidden"] = x_ => pass
advantage_reweighting
    alpha on the wrong side: alpha * x_ + 1 - alpha => (1 - alpha) * x_ + alpha
    improbable tokens favoured: alpha * x_ + 1 - alpha => 1 - alpha * x_
    winners only: x_ * adv => torch.where(adv > 0, x_ * adv, adv)
    alpha 0 refused: 0 <= alpha <= 1 => 0 < alpha <= 1
    alpha 1 refused: 0 <= alpha <= 1 => 0 <= alpha < 1
nthr_factor
    eta = |p|: (0.5 - share).abs() => share
    p of the whole batch: x_.mean(1).repeat_interleave(n_) => x_.mean().expand(old.mask.shape[0])
nthr
    reshapes what is not selected: torch.where(c_, a_, adv) => torch.where(c_, adv, a_)
nthr_random
    always the first tokens: x_.argsort(1).argsort(1) => draw.new_tensor(range(draw.shape[1]))
    draws of its own: old.gen => None
    eta 0 always: nthr_factor(old, eta) * adv => 0 * adv
nthr_selected
    tau the largest mean: x_.amin(1) => x_.nan_to_num(posinf=-torch.inf).amax(1)
    tau from the wrong answers: ~correct | means.isnan() => correct
    an empty right answer counts: x_.masked_fill(a_ | b_, c_) => x_.nan_to_num().masked_fill(a_, c_)
    tau nan beside an empty right answer: ~correct | means.isnan() => ~correct
    mean over the padded width: x_.sum(1) / y_ => x_.mean(1)
    tau of the batch: beta * lowest => beta * lowest.min()
    selects below tau: scores > tau => scores < tau
nthr_scores
    with the wrong sign: x_ @ M => -(x_ @ M)
    g of the taken token only: g.exp_().neg_() => g.mul_(0)
    g without the taken token: g.scatter_add_(a_, b_, c_) => pass
    pi renormalised on V*: g.exp_().neg_() => g.copy_(-g.softmax(-1))
    V* of the whole batch: tokens[mask].unique() => old.tokens[old.mask].unique()
    V* with the padding: tokens[mask].unique() => tokens.unique()
    vocabularies swapped: full_vocab => not full_vocab
    temperature left out: x_.div_(old.temperature) => x_
    M from the wrong answers: right.nonzero() => (~right).nonzero()
    M from all answers: right.nonzero().flatten() => range(len(right))
    M from the first right answer: right.nonzero().flatten() => right.nonzero().flatten()[:1]
    M with the padding: g[i, mask[i]].T @ h[i, mask[i]] => g[i].T @ h[i]
    self term taken off when wanted: not self_term => self_term
    groups with one wrong answer skipped: right.all() => right.sum() >= len(right) - 1
    half precision: torch.promote_types(old.hidden.dtype, torch.float32) => old.hidden.dtype
    carries a gradient: torch.no_grad() => torch.enable_grad()
ibpo
    everything else masked: adv.masked_fill(m_, v_) => adv.masked_fill(~m_, v_)
    halves: adv.masked_fill(m_, v_) => torch.where(m_, adv / 2, adv)
    sign turned: adv < 0 => adv > 0
    kept for changed: old.kept_mask == x_ => old.kept_mask != x_
    blames kept tokens: old.kept_mask == (adv < 0) => ~old.kept_mask & (adv > 0)
    praises changed tokens: old.kept_mask == (adv < 0) => old.kept_mask & (adv < 0)
    acts on answers that are not repaired: old.repaired[:, None] => ~old.repaired[:, None]
    acts on all answers that are not right: old.repaired[:, None] => (old.rewards < 1)[:, None]
    no mask by default: reading='none'
    none masks by sign: return adv => pass
    none for sign: reading == "none" => reading == "sign"
shaped_rewards
    all that are not right earn it: rewards == 0 => rewards < 1
    taken away: rewards + x_ => rewards - x_
kept_tokens
    substitution for free: torch.where(same[:, t], -1, price) => torch.where(same[:, t], -1, 0)
    of several edits any: torch.where(same[:, t], -1, price) => torch.where(same[:, t], 0, price)
    more kept for more edits: price = width + 1 => price = 1
    no insertions: (best - inserts).cummin(1).values + inserts => best
    deletion for free: costs[:, t] + price => costs[:, t]
    back from the padded end: mask.sum(1) => mask.sum(1) * 0 + width
    back from the other's padded end: others_mask.sum(1) => others_mask.sum(1) * 0 + others.shape[1]
    the place after: t[match] - 1 => t[match] % width
    longest common prefix: both & same[x_, y_, z_] => both & same[x_, y_, z_] & (t == u)
token_coefficients
    sign: -len(logp) => len(logp)
    1/N kept: -len(logp) => -1
    tokens for answers: len(logp) => logp.numel()
    graph freed: torch.autograd.grad(a_, b_, retain_graph=True) => torch.autograd.grad(a_, b_)
    not detached: f_(a_, b_, retain_graph=True) => f_(a_, b_, create_graph=True)
prefix_nodes
    context of one token: before.unfold(1, x_, 1) => before.unfold(1, 1, 1)
    context, all groups in one: group[:, None].expand(n, width) => torch.zeros_like(mask)
    context, the start is token 0: f_(x_, y_, value=-1) => f_(x_, y_, value=0)
    context, padding belongs: nodes.masked_scatter(a_, b_) => (nodes * 0).masked_scatter(a_, b_)
    the token alone: x_.cumprod(-1, dtype=torch.uint8) => x_
    groups mixed: group[:, None] * group_size + first => first
    negative ids: group[:, None] * group_size + first => group[:, None] * group_size - first
    depth forgotten: x_ * width + y_ => x_ * width
    last visitor, one token late: same.argmax(2) => same.roll(1, -1).argmax(2)
_visitors: losers only: adv != 0 => adv < 0
learning_tax
    not centred: total - x_ => total
    lone tokens in the total: sums[:, 4] > 1 => sums[:, 4] > 0
    pairs left out: sums[:, 4] > 1 => sums[:, 4] > 2
project
    nothing done: _node_means(x_, p_, q_, r_) => (x_, None)
    of another mask: _surrogate(c_mean, logp, mask) => _surrogate(c_mean, logp, mask & (nodes > 0))
_node_means
    |A|: x_[node] * adv => x_[node] * adv.abs()
    answers with A = 0 dropped: c.masked_scatter(used, x_) => (0 * c).masked_scatter(used, x_)
    everybody alone: torch.ones_like(c).masked_scatter(used, x_) => torch.ones_like(c)
_surrogate: sign: -x_ => x_
project_unbiased
    the node mean: c_mean + x_ => c_mean
    nothing done: c_mean + x_ => c
    towards the weight, not beyond the mean: c_mean - c => c - c_mean
    from the weight: c_mean + x_ => c + x_
    Bessel's correction forgotten: (n - 1).clamp(min=1) => n
    one visitor fewer: (n - 1).clamp(min=1) => (n - 2).clamp(min=1)
    without the group: 1 - n / G => 1
    the group without this node's visitors: 1 - n / G => n / G
    answers with A = 0 in the group: (advantages != 0) => (advantages == advantages)
    rows for groups: (advantages != 0).view(-1, batch.group_size) => (advantages != 0).view(-1, 1)
token_ratio: at most 10: x_.exp() => x_.exp().clamp(max=10)
lengths: below 256: batch.mask.sum(1) => batch.mask.sum(1, dtype=torch.uint8).long()
group_advantages: nearly equal is equal: x_ == groups.amin(1, keepdim=True) =>
        x_ - groups.amin(1, keepdim=True) < 1e-3
adv_orthogonal: small advantages are none: norm == 0 => norm < 1e-6
_visitors: small advantages are none: adv != 0 => adv.abs() > 1e-4
nthr_scores: short ids: tokens.contiguous() => tokens.to(torch.int16).contiguous()
kept_tokens: short ids: tokens[:, :, None] == others[:, None] =>
        tokens[:, :, None].to(torch.int16) == others[:, None].to(torch.int16)
prefix_nodes: short ids: groups[:, :, None] == groups[:, None] =>
        groups[:, :, None].to(torch.int16) == groups[:, None].to(torch.int16)
prefix_nodes: 99 tokens: x_ * width + y_ => x_ * width + y_.clamp(max=99)
METHODS.grpo: without std: Method(p_) => Method(p_, scale="mean")
METHODS.dr-grpo: with std: "mean" => "std"
METHODS.dapo: is dr-grpo: dapo => dr_grpo
METHODS.gspo: two steps: (gspo,) => (gspo, gspo)
METHODS.dfpo-orthogonal: dfpo twice the same: dfpo_orthogonal => dfpo_min
METHODS.nthr: at random: nthr => nthr_random
METHODS.nthr: without hidden states: True => False
METHODS.advantage-reweighting: on grpo: token_grpo => grpo
METHODS.lopti: passes swapped: (lopti_low, lopti_high) => (lopti_high, lopti_low)
METHODS.lopti: in one pass: (lopti_low, lopti_high) => (token_grpo,)
METHODS.ar-lopti: without reweighting: advantage_reweighting => None
METHODS.ibpo: without corrections: shaped_rewards => None
METHODS.ibpo: without its mask: ibpo => None
"""
# Made by the rules, and no faults at all.
UNSEEN = {
    "_dfpo: default eps=0.1": "both callers pass it",
    "pos_only: eps_low ignored": "no advantage is below 0, and only there eps_low acts",
    "nthr: adv <= 0": "an advantage of 0 times the factor is 0",
    "nthr_random: adv <= 0": "an answer's advantages have one sign, or all are 0",
    "kept_tokens: ~match left out beside both": "where tokens match, no shortest edit needs more",
    "kept_tokens: t >= 0 in (t > 0) & ~match": "no edit of all tokens costs one less than none",
    "kept_tokens: t > 0 left out beside ~match": "no edit of all tokens costs one less than none",
    "ibpo: adv <= 0": "a mask times 0",
}


# ---------------- a fault in the syntax tree


class Fault(NamedTuple):
    name: str
    where: str  # a function, a class, a method or an entry of a table
    old: str  # code that occurs once in there; "" for a default
    new: str


def read(text: str) -> list[Fault]:
    """The faults of a table."""
    faults, where = [], ""
    for line in re.sub(r"\n {8}", " ", text).splitlines():
        if not line.startswith(" "):
            where, _, line = line.partition(": ")
        if line:
            what, code = line.strip().split(": ", 1)
            old, _, new = code.rpartition(" => ")
            faults.append(Fault(f"{where}: {what}", where, old, new))
    return faults


def parse(*codes: str) -> list[ast.AST]:
    """The expressions that these are or, if one of them is none, the statements."""
    statements = [ast.parse(code).body[0] for code in codes]
    both = all(isinstance(statement, ast.Expr) for statement in statements)
    return [statement.value for statement in statements] if both else statements


def is_variable(node) -> bool:
    return isinstance(node, ast.Name) and bool(re.fullmatch("[a-z]_", node.id))


def fits(pattern, node, bound: dict[str, ast.AST]) -> bool:
    """Whether they are the same code; `bound` takes what the variables x_ stand for."""
    if is_variable(pattern) and isinstance(node, ast.expr):
        return ast.dump(bound.setdefault(pattern.id, node)) == ast.dump(node)
    if isinstance(pattern, ast.expr_context):
        return True
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.AST):
        return all(fits(getattr(pattern, f), getattr(node, f), bound) for f in pattern._fields)
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(map(fits, pattern, node, [bound] * len(node)))
    return pattern == node


def find(pattern: ast.AST, scope: ast.AST) -> list[tuple[ast.AST, dict[str, ast.AST]]]:
    """The nodes that a pattern fits, and what its variables stand for there."""
    candidates = [(node, {}) for node in ast.walk(scope)]
    return [(node, bound) for node, bound in candidates if fits(pattern, node, bound)]


class Replace(ast.NodeTransformer):
    """Put another node in the place of each that `new_for` has one for."""

    def __init__(self, new_for):
        self.new_for = new_for

    def visit(self, node):
        return self.new_for(node) or self.generic_visit(node)


def fill(new: ast.AST, bound: dict[str, ast.AST]) -> ast.AST:
    """The node, with what they stand for in the place of its variables."""
    return Replace(lambda x: copy.deepcopy(bound[x.id]) if is_variable(x) else None).visit(new)


def children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What a module, a class, a function or a table calls by a name."""
    table = getattr(node, "value", None)
    if isinstance(table, ast.Dict):
        for key, value in zip(table.keys, table.values, strict=True):
            yield getattr(key, "value", ""), value
    for x in getattr(node, "body", []):
        target = x.targets[0] if isinstance(x, ast.Assign) else getattr(x, "target", x)
        yield getattr(target, "id", getattr(target, "name", "")), x


def find_defaults(scope: ast.AST) -> dict[str, ast.AST]:
    """The default values of a function's arguments, or of a dataclass's fields."""
    if isinstance(scope, ast.ClassDef):
        fields = [x for x in scope.body if isinstance(x, ast.AnnAssign) and x.value]
        return {x.target.id: x.value for x in fields}
    names = scope.args.args + scope.args.kwonlyargs
    values = scope.args.defaults + scope.args.kw_defaults
    pairs = zip(names[len(names) - len(values) :], values, strict=True)
    return {argument.arg: value for argument, value in pairs if value}


def find_edits(tree: ast.Module, fault: Fault) -> list[tuple[ast.AST, ast.AST]]:
    """The nodes to replace, and by what. Raises ValueError, which names the fault, if its place is
    not there or not the only one."""
    scopes = [tree]
    for name in fault.where.split("."):
        scopes = [child for scope in scopes for key, child in children(scope) if key == name]
    if len(scopes) != 1:
        raise ValueError(f"fault {fault.name!r}: {fault.where} is there {len(scopes)} times")
    if not fault.old:
        defaults = find_defaults(scopes[0])
        changes = ast.parse(f"f({fault.new})").body[0].value.keywords
        if any(x.arg not in defaults for x in changes):
            raise ValueError(f"fault {fault.name!r}: {fault.where} lacks one of these defaults")
        return [(defaults[x.arg], x.value) for x in changes]
    old, new = parse(fault.old, fault.new)
    places = find(old, scopes[0])
    if len(places) != 1:
        raise ValueError(f"fault {fault.name!r}: {fault.old} is there {len(places)} times")
    return [(place, fill(new, bound)) for place, bound in places]


def faulty_tree(path: str | Path, fault: Fault) -> ast.Module:
    """The syntax tree of a source file with a fault in it."""
    tree = ast.parse(Path(path).read_text())
    new_for = dict(find_edits(tree, fault))
    return ast.fix_missing_locations(Replace(new_for.get).visit(tree))


def plant(path: str | Path, fault: Fault) -> types.ModuleType:
    """A source file with a fault in it, as a module."""
    module = types.ModuleType(f"faulty_{Path(path).stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses look their module up
    exec(compile(faulty_tree(path, fault), path, "exec"), module.__dict__)
    return module


# ---------------- faults by rule


def faults_of_defaults(scope: ast.AST) -> Iterator[Fault]:
    """Every default changed, and every argument that is used once ignored."""
    others = dict(pair.split("=") for pair in OTHER_DEFAULTS.split())
    for name, node in find_defaults(scope).items():
        default = ast.unparse(node)
        if default in others:
            change = f"{name}={others[default]}"
            yield Fault(f"{scope.name}: default {change}", scope.name, "", change)
        uses = find(*parse(name), scope) if isinstance(scope, ast.FunctionDef) else []
        if len(uses) == 1:
            yield Fault(f"{scope.name}: {name} ignored", scope.name, name, default)


def faults_of_rule(rule: Fault, scope: ast.AST) -> Iterator[Fault]:
    """A fault for every place in a scope that a rule fits. Where the same code occurs twice, the
    fault is about the code around it."""
    old, new = parse(rule.old, rule.new)
    parents = {x: parent for parent in ast.walk(scope) for x in ast.iter_child_nodes(parent)}
    for place, bound in find(old, scope):
        what = re.sub(r"\b[a-z]_\b", lambda x, b=bound: ast.unparse(b[x[0]]), rule.name)
        around, copies = place, {}
        while len(find(around, scope)) > 1 or not isinstance(around, ast.expr | ast.stmt):
            around = parents[around]
        edited = copy.deepcopy(around, copies)
        edited = Replace({copies[id(place)]: fill(copy.deepcopy(new), bound)}.get).visit(edited)
        name = f"{scope.name}{what}" + ("" if around is place else f" in {ast.unparse(around)}")
        yield Fault(name, scope.name, ast.unparse(around), ast.unparse(edited))


def by_rule(rules: list[Fault], path: Path) -> Iterator[Fault]:
    """What the rules and the other defaults make of the functions and classes of a source file."""
    for scope in ast.parse(path.read_text()).body:
        if isinstance(scope, ast.FunctionDef | ast.ClassDef):
            yield from faults_of_defaults(scope)
            for rule in rules:
                yield from faults_of_rule(rule, scope)


def without_device(path: str) -> Iterator[Fault]:
    """Every `device=...` and `.to(device)` of a source file left out: a tensor is on the CPU."""
    for scope in ast.parse((ROOT / path).read_text()).body:
        if not isinstance(scope, ast.FunctionDef | ast.ClassDef):
            continue
        for call in (node for node in ast.walk(scope) if isinstance(node, ast.Call)):
            left = copy.copy(call)
            left.keywords = [keyword for keyword in call.keywords if keyword.arg != "device"]
            if isinstance(call.func, ast.Attribute) and call.func.attr == "to":
                if re.search(r"dtype$|^torch\.\w+$", ast.unparse(call.args[0])):
                    continue
                left = call.func.value
            elif len(left.keywords) == len(call.keywords):
                continue
            old, new = ast.unparse(call), ast.unparse(left)
            yield from faults_of_rule(Fault(f": {old} on the CPU", scope.name, old, new), scope)


# A dict, because `a_ * b_` of x * x is the same edit twice.
FAULTS = list(dict.fromkeys([*read(TABLE), *by_rule(read(RULES), LOSSES)]))
_, *sections = re.split(r"^\[(.+)\]\n", TRAINER_TABLE.read_text(), flags=re.MULTILINE)
ON_CPU = [(path, fault) for path in ON_GPU for fault in dict.fromkeys(without_device(path))]
TRAINER = {path: read(table) for path, table in zip(sections[::2], sections[1::2], strict=True)}


# ---------------- who sees it


def verify_says(module: types.ModuleType, suspect: str = "") -> str:
    """The first claim that fails on a few random trees, or ""; those about the suspect go first.

    Extreme trees are tried last, and where claims speak of the suspect only with these.
    """
    # The claims on 200 sampled groups take most of the time and see nothing that the others do not.
    tasks = [(c, f) for c in CLAIMS for f in c.functions if c.id not in ("N7", "A3", "A5")]
    tasks.sort(key=lambda task: task[1] != suspect)
    about = [task for task in tasks if task[1] == suspect] or tasks
    beyond = [(EXTREME, *task) for task in about if task[0].id not in ORDINARY]
    for draws, claim, function in [*((DRAWS, *task) for task in tasks), *beyond]:
        outcome = examine_on(draws[claim.group_size], module, claim, function)
        if outcome.state != "ok":
            return f"{claim.id} {function}: {outcome.message}"
    return ""


def unit_tests_fail(module: types.ModuleType, suspect: str = "") -> bool:
    """Whether the unit tests of losses.py fail on it. They run in a forked process, because they
    import losses anew."""
    paths = sorted(UNIT_TESTS, key=lambda path: suspect not in path.read_text())  # spoken of first
    child = os.fork()
    if not child:
        sys.modules["losses"] = module
        for path in UNIT_TESTS:
            sys.modules.pop(path.stem, None)
        sys.stdout = sys.stderr = open(os.devnull, "w")
        options = ["-x", "--noconftest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
        os._exit(pytest.main([*options, *map(str, paths)]))
    return os.waitpid(child, 0)[1] != 0


def trainer_tests_fail(
    path: str = "", fault: Fault | None = None, names: str = TRAINER_TESTS
) -> str:
    """The first test of the trainer that fails with a fault in one of its files, or "".

    Its modules import each other. So the fault is planted where Python reads a file, in a forked
    process in which all of them and their tests are imported anew.
    """
    source, log = ROOT / path, tempfile.TemporaryFile("w+")
    code = fault and compile(faulty_tree(source, fault), source, "exec")
    suspect = fault.where.split(".")[-1] if fault else ""
    tests = [ROOT / "tests" / f"test_{name}.py" for name in names.split()]
    tests.sort(key=lambda test: f"{suspect}(" not in test.read_text())  # those that call it first
    child = os.fork()
    if not child:
        real = SourceFileLoader.get_code

        def get_code(self, name):
            return code if fault and Path(self.path).resolve() == source else real(self, name)

        SourceFileLoader.get_code = get_code
        for name in [name for name in sys.modules if re.fullmatch(TRAINER_MODULES, name)]:
            del sys.modules[name]
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        signal.alarm(PATIENCE)
        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
        os._exit(pytest.main([*options, *map(str, tests)]))
    status = os.waitpid(child, 0)[1]
    log.seek(0)
    said = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", log.read(), re.MULTILINE)
    return (said or [f"status {status}"])[0] if status else ""


def show_trainer(path: str, name: str = ""):
    """Print who sees the faults in a file of the trainer, or those whose names hold a text."""
    missed = []
    faults = [fault for fault in TRAINER[path] if name in fault.name]
    for fault in faults:
        said = trainer_tests_fail(path, fault)
        missed += [] if said else [fault.name]
        print(f"{fault.name:60} {said or '-'}", flush=True)
    print(f"\n{len(faults)} faults in {path}, not noticed: {missed}")


def main():
    if sys.argv[1:]:
        return show_trainer(*sys.argv[1:])
    if unit_tests_fail(losses) or verify_says(losses):
        sys.exit("losses.py does not pass as it is")
    counts = dict.fromkeys(("claims alone", "unit tests alone", "together"), 0)
    for fault in FAULTS:
        module = plant(LOSSES, fault)
        said, failed = verify_says(module, fault.where), unit_tests_fail(module, fault.where)
        for key, notices in zip(counts, (said, failed, said or failed), strict=True):
            counts[key] += bool(notices)
        print(f"{fault.name:70} {'tests' if failed else '-':6} {said or '-'}", flush=True)
    print(f"\n{len(FAULTS)} faults:", ", ".join(f"{key} {n}" for key, n in counts.items()))


if __name__ == "__main__":
    main()
