"""One group of answers as a prefix tree, and what a loss does to each of its tokens.

    python -m toy.tree                 tree.html: a toy group under most methods
    python -m toy.tree runs/NAME       runs/NAME/tree.html: groups of a run of train.py

The page is one file, without a network or a library. All coefficients c of all its settings are
computed here, by token_coefficients(loss(batch), logp) on the losses of losses.py. Its script draws
them, and adds them up at the nodes that several answers share:

    sum c = wbar sum A + sum (w - wbar) A = credit + tax,   c = w A

The toy group answers "37+48=" four times. Every setting of the page is a policy that exists: in
each, the probabilities after every history sum to 1. toy/tree.svg, README's picture, is the
group under REINFORCE and under GRPO. NTHR and IBPO need more than a policy's probabilities, so they
are not on the page.
"""

from __future__ import annotations

import base64
import functools
import inspect
import itertools
import json
import math
import pickle
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import losses
from losses import METHODS, Batch, Method, OldPolicy, learning_tax
from toy.figure import parse_arguments
from toy.policy import pad

# ---------------- the toy group

# Answer by answer: each token with its probability under the old policy. "#" stands for the last
# number. Answers 1 and 2 share a token that 3 and 4 do not have.
ANSWERS = {
    "equal": (
        "so .4|7+8=15 .55|70+15=85 .25|# .4|<eos> .4",
        "so .4|7+8=15 .55|30+40=70 .3|# .4|<eos> .4",
        "so .4|37+40=77 .03|77+8=85 .4|# .4|<eos> .4",
        "so .4|30+40=70 .03|7+8=15 .4|# .4|<eos> .4",
    ),
    "unequal": (
        "so .4|7+8=15 .55|# .25|<eos> .4",
        "so .4|7+8=15 .55|carry 1 .3|30+40=70 .4|# .4|<eos> .4",
        "so .4|# .03|<eos> .4",
        "so .4|30+40=70 .03|7+8=15 .4|# .4|<eos> .4",
    ),
}
RIGHT, WRONG = "#85", ("#75", "#75", "#86", "#84")
MOVED = ("0.6", "0.9", "1", "1.1", "1.6")  # ratio of the shared tokens
SPREAD = {"none": 0.0, "some": 0.4, "wide": 1.0}  # exponent of FACTOR
FACTOR = (1.5, 0.7, 0.85, 1.0)  # on the ratios of the tokens that an answer has for itself
G, L = 4, 6
WIDE = {"eps_low": 0.2, "eps_high": 0.28}  # in place of a narrower clip range
OWN = 8  # shown tokens of what an answer shares with no other


@dataclass
class Group:
    """G answers to one prompt, and S policies at which the losses are taken."""

    prompt: str
    texts: list[list[str]]  # of the tokens of each answer
    tokens: Tensor  # (G, T) ids, 0 on padding
    mask: Tensor  # (G, T) bool
    rewards: Tensor  # (G,)
    old: Tensor  # (G, T) log pi_old
    logp: Tensor  # (S, G, T) log pi of each policy
    max_tokens: int

    def __post_init__(self):
        self.nodes = losses.prefix_nodes(self.tokens, self.mask, len(self.tokens))

    def count_visitors(self) -> Tensor:
        """How many answers share each token. (G, T)."""
        return (self.nodes[:, None] == self.nodes).sum(1)


def toy_group(lengths: str, won: str) -> Group:
    """The toy group; won: a digit per answer, "1010" if answers 1 and 3 are right."""
    steps = [[step.rsplit(" ", 1) for step in path.split("|")] for path in ANSWERS[lengths]]
    last = [RIGHT if digit == "1" else wrong for digit, wrong in zip(won, WRONG, strict=True)]
    texts = [[last[i] if text == "#" else text for text, _ in row] for i, row in enumerate(steps)]
    vocabulary = list(dict.fromkeys(["<eos>", RIGHT, *itertools.chain(*texts)]))
    tokens, mask = pad([tuple(map(vocabulary.index, row)) for row in texts])
    old = torch.zeros(mask.shape, dtype=torch.float64)
    old[mask] = torch.tensor([float(p) for row in steps for _, p in row], dtype=torch.float64).log()
    rewards = torch.tensor([float(digit) for digit in won], dtype=torch.float64)
    group = Group("37+48=", texts, tokens, mask, rewards, old, old[None], L)
    own = group.count_visitors() == 1
    factor = torch.tensor(FACTOR, dtype=torch.float64).log()[:, None] * own  # (G, T)
    moves = [math.log(float(m)) + s * factor for m in MOVED for s in SPREAD.values()]
    group.logp = old + torch.stack(moves).masked_fill(~mask, 0.0)  # (S, G, T)
    return group


# ---------------- the groups of a run


def run_groups(run: Path) -> tuple[dict, int, list[Group]]:
    """The flags of a run, and the step and the groups of the newest batch that it saved.

    Those in which answers that differ in reward share tokens; first where they share most.
    """
    saved = sorted(run.glob("batches/step-*.pt"))
    if not saved:
        sys.exit(f"error: {run} has no batches/step-*.pt; a run folder of train.py is expected")
    try:
        batch = torch.load(saved[-1], map_location="cpu", weights_only=True)
        flags = json.loads((run / "config.json").read_text())["config"]
        rows = torch.arange(len(batch["tokens"])).split(batch["group_size"])
        step, groups = batch["step"], [run_group(batch, k, part) for k, part in enumerate(rows)]
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, pickle.PickleError) as error:
        reason = str(error).partition("\n")[0]
        what = f"is not as train.py writes it: {type(error).__name__} {reason}"
        sys.exit(f"error: {saved[-1]}, or config.json beside it, {what}")
    contested = [group for group in groups if count_contested(group)]
    if not contested:
        sys.exit(f"error: {saved[-1]} has no group in which right and wrong answers share tokens")
    return flags, step, sorted(contested, key=count_contested, reverse=True)


def run_group(batch: dict, k: int, rows: Tensor) -> Group:
    """Group k of a saved batch; its two policies are those before and after the step."""
    old, new = (batch[key][rows].double() for key in ("logp_old", "logp"))
    tokens, mask = batch["tokens"][rows], batch["mask"][rows]
    texts = [batch["pieces"][i][: mask[i - rows[0]].sum()] for i in rows.tolist()]
    prompt, rewards = batch["prompts"][k], batch["rewards"][rows].double()
    logp, budget = torch.stack([old, new]), batch["max_tokens"]
    return Group(prompt, texts, tokens, mask, rewards, old, logp, budget)


def count_contested(group: Group) -> int:
    """How many tokens are shared by answers that differ in reward."""
    differ = (group.rewards[:, None] != group.rewards)[..., None]  # (G, G, 1)
    same = (group.nodes[:, None] == group.nodes) & (group.nodes >= 0)  # (G, G, T)
    return int((same & differ).any(1).sum())


# ---------------- what a loss does to a group


def bind_losses(hyper: dict[str, dict]) -> dict[str, tuple[Method, Callable]]:
    """name -> a method and one of its losses; Lopti has two, the others one.

    Only those of methods that need neither a model's hidden states nor corrections.
    """
    found = {}
    for name in METHODS:
        method = losses.bind(name, hyper.get(name, {}), reference=False)
        if not (method.needs_scores or method.repair):
            for k, loss in enumerate(method.passes, 1):
                found[f"{name} pass {k}" if len(method.passes) > 1 else name] = method, loss
    return found


def toy_losses() -> dict[str, tuple[Method, Callable]]:
    """With clip ranges that suit the toy. One that is made for long answers, such as GSPO's, would
    clip all of the toy's ratios but 1, so it is widened."""
    hyper = {}
    for name, method in METHODS.items():
        taken = inspect.signature(method.passes[0]).parameters
        narrow = [key for key in WIDE if key in taken and taken[key].default < 0.1]
        hyper[name] = {key: WIDE[key] for key in narrow}
    return bind_losses(hyper)


def advantages(group: Group, method: Method) -> tuple[Tensor, Tensor]:
    """A_i (G,), and what the method's credit rule makes of it (G, T)."""
    A = losses.group_advantages(group.rewards, len(group.rewards), method.scale)
    adv = A[:, None].expand_as(group.old).masked_fill(~group.mask, 0.0)
    if method.credit:
        old = OldPolicy(group.tokens, group.mask, group.old, group.rewards, len(A))
        adv = method.credit(adv, old)
    return A, adv


def coefficients(group: Group, loss: Callable, A: Tensor, adv: Tensor) -> tuple[Tensor, Tensor]:
    """c of every token under every policy of the group, and c of the projected loss. (S, G, T).

    The S groups are one batch, in which averages over all tokens are what they are for one group.
    """
    S, G, T = group.logp.shape
    logp = group.logp.reshape(S * G, T).detach().requires_grad_()
    tokens, mask = group.tokens.repeat(S, 1), group.mask.repeat(S, 1)
    value = loss(Batch(logp, group.old.repeat(S, 1), adv.repeat(S, 1), mask, G, group.max_tokens))
    nodes = losses.prefix_nodes(tokens, mask, G)
    projected = losses.project(value, logp, A.repeat(S), nodes, mask)
    plain, projected = (losses.token_coefficients(x, logp) for x in (value, projected))
    return plain.view(S, G, T), projected.view(S, G, T)


def tax_before(group: Group, method: Method, loss: Callable) -> float:
    """The learning tax of the group before the step, without the projection."""
    A, adv = advantages(group, method)
    c = coefficients(group, loss, A, adv)[0][0]
    return learning_tax(c, A, group.nodes, group.mask)


def sequence_ratios(group: Group) -> Tensor:
    """s_i of every answer under every policy of the group. (S, G)."""
    rows = [Batch(x, group.old, x, group.mask, len(x), group.max_tokens) for x in group.logp]
    return torch.stack([losses.sequence_ratio(batch) for batch in rows])


def explain_weight(method: Method, loss: Callable) -> list[str] | None:
    """The fraction that w is, such as r / T, as two texts; None if it is none of these.

    And a third text: when it is 0 instead, "" for never.
    """
    group = toy_group("unequal", "1000")
    A, adv = advantages(group, method)
    w = coefficients(group, loss, A, adv)[0] / A[:, None]  # (S, G, T)
    T, s = group.mask.sum(1, keepdim=True), sequence_ratios(group)[:, :, None]
    tops = {"1": 1.0, "r": (group.logp - group.old).exp(), "s": s, "min s": s.amin(1, keepdim=True)}
    bottoms = {"1": 1.0, "T": T, "L": group.max_tokens, "mean T": T.double().mean()}
    for top, bottom in itertools.product(tops, bottoms):
        fraction = tops[top] / bottoms[bottom] * torch.ones_like(w)
        if torch.allclose(w, fraction.masked_fill(w == 0, 0.0)):
            return [top, bottom, explain_zero(group, w)]
    return None


def explain_zero(group: Group, w: Tensor) -> str:
    """When a weight is 0. Without a move of the policy nothing is clipped. (S, G, T)."""
    zero = (w == 0) & group.mask
    moved = (group.logp != group.old).flatten(1).any(1)  # (S,)
    if zero[~moved].any():
        return "0 if clipped or left out"
    return "0 if clipped" if zero.any() else ""


# ---------------- the page


def scene(group: Group, choices: dict[str, tuple[Method, Callable]]) -> str:
    """What the page knows of a group. Tokens stand one after the other, answer by answer."""
    places = torch.arange(group.mask.shape[1])
    shared = group.mask & (group.count_visitors() > 1)
    last = (shared * (places + 1)).amax(1, keepdim=True)  # (G, 1)
    mask = group.mask & (places < last + OWN)  # the rest of an answer is not shown
    shown = [text[:n] for text, n in zip(group.texts, mask.sum(1).tolist(), strict=True)]
    table = {}
    for name, (method, loss) in choices.items():
        A, adv = advantages(group, method)
        for projection, c in zip(("off", "on"), coefficients(group, loss, A, adv), strict=True):
            table[f"{name}/{projection}"] = {
                "A": brief(A),
                "adv": brief(adv[mask]) if method.credit else None,
                "c": brief(c[:, mask]),
            }
    about = {"prompt": group.prompt, "texts": shown, "nodes": group.nodes[mask].tolist()}
    about |= {"lengths": group.mask.sum(1).tolist(), "rewards": group.rewards.tolist()}
    about |= {"L": group.max_tokens}
    about |= {"old": brief(group.old.exp()[mask]), "s": brief(sequence_ratios(group))}
    about |= {"ratio": brief((group.logp - group.old).exp()[:, mask]), "losses": table}
    return json.dumps(about)


def brief(x: Tensor) -> list:
    """Numbers of five digits."""
    return [brief(row) if x.dim() > 1 else float(f"{row:.5g}") for row in x]


def describe(method: Method, loss: Callable) -> dict:
    """What a loss does, and where its functions stand, with their formula."""
    functions, lines = [f for f in (method.credit, loss) if f], []
    for function in functions:
        given = ""
        if isinstance(function, functools.partial):
            given = ", ".join(f"{key} = {value}" for key, value in function.keywords.items())
            function = function.func
        doc = inspect.getdoc(function) or ""
        formula = next((line for line in doc.splitlines() if line.startswith(("J = ", "A_"))), "")
        number = inspect.getsourcelines(function)[1]
        lines.append([f"losses.py:{number} {function.__name__} {given}", formula])
    first = getattr(functions[0], "func", functions[0])
    about = (inspect.getdoc(first) or "").partition("\n")[0]
    return {"about": about, "source": lines, "fraction": explain_weight(method, loss)}


def control(name: str, label: str, options, kind: str, style: str = "radio") -> dict:
    """A control. kind: whether it chooses the scene, the loss, or the state, which is a policy."""
    return {"id": name, "label": label, "options": list(options), "kind": kind, "style": style}


def write_page(data: dict, choices: dict[str, tuple[Method, Callable]]) -> str:
    """The html, with all data packed in it. data: controls, states, scenes and start."""
    method = control("method", "method", choices, "loss", "select")
    projection = control("project", "projection", ("off", "on"), "loss")
    data["controls"] = [method, projection, *data["controls"]]
    data["losses"] = {name: describe(*choice) for name, choice in choices.items()}
    packed = base64.b64encode(zlib.compress(json.dumps(data).encode(), 9)).decode()
    return Path(__file__).with_name("tree_page.html").read_text().replace("DATA", packed, 1)


def toy_page() -> str:
    """The page of the toy group: all methods, lengths, winners and moves of the policy."""
    choices = toy_losses()
    winners = ["".join(digits) for digits in itertools.product("10", repeat=G)]
    keys = itertools.product(ANSWERS, winners)
    data = {"digits": 3, "states": [f"{moved}/{spread}" for moved in MOVED for spread in SPREAD]}
    data["scenes"] = {f"{n}/{won}": scene(toy_group(n, won), choices) for n, won in keys}
    data["start"] = {"method": "reinforce", "project": "off", "lengths": "unequal", "won": "1010"}
    data["start"] |= {"moved": "1", "spread": "none", "look": "0.0"}
    data["controls"] = [
        control("lengths", "lengths of the answers", ANSWERS, "scene"),
        control("won", "who won", winners, "scene", "leaves"),
        control("moved", "policy moved: ratio of shared tokens", MOVED, "state"),
        control("spread", "spread of the answers' own ratios", SPREAD, "state"),
    ]
    return write_page(data, choices)


def run_page(run: Path) -> str:
    """The page of a run: three groups of its newest saved batch, before and after the step.

    Those with the largest learning tax.
    """
    flags, step, groups = run_groups(run)
    name, states = flags["method"], ["before the step", "after it"]
    hyper = dict(text.split("=", 1) for text in flags["hyper"])
    hyper.pop("kl", None)  # the log-probs of the reference are not saved
    choices = bind_losses({name: hyper})
    own = [choice for choice in choices if choice.split(" pass ")[0] == name]
    lead = f"Groups of {run}, a run of {name}, at step {step}."
    lead += " They have the largest learning tax of their batch."
    lead += " Each is shown as if it were a batch of its own."
    lead += " Choose a token in the title of a card to see its account."
    if not own:
        lead += f" {name} needs more than a saved batch holds, so grpo is shown first."
    data = {"digits": 4, "states": states, "lead": lead}
    first = (own or ["grpo"])[0]
    groups.sort(key=lambda group: -round(tax_before(group, *choices[first]), data["digits"]))
    named = {f"{k}: {group.prompt[:24]}": group for k, group in enumerate(groups[:3], 1)}
    data["scenes"] = {key: scene(group, choices) for key, group in named.items()}
    data["start"] = {"group": next(iter(named)), "method": first}
    data["start"] |= {"project": "on" if flags["project"] else "off"}
    data["start"] |= {"policy": states[0], "look": "0.0"}
    data["controls"] = [
        control("group", "group", named, "scene", "select"),
        control("policy", "policy", states, "state"),
    ]
    return write_page(data, choices)


def main(argv: list[str] | None = None):
    about = dict(nargs="?", type=Path, help="a run folder of train.py")
    run = parse_arguments(__doc__, argv, {"run": about}).run
    torch.set_num_threads(1)  # the groups are tiny
    text = run_page(run) if run else toy_page()
    path = (run or Path()) / "tree.html"
    try:
        path.write_text(text)
    except OSError as error:
        sys.exit(f"error: {path} cannot be written: {error.strerror}")
    print(f"{path}, {len(text.encode()) / 1000:.0f} kB: open it in a browser")


if __name__ == "__main__":
    main()
