"""One group of answers as a prefix tree, and what a loss does to each of its tokens.

    python -m toy.tree                 tree.html: a toy group under every method
    python -m toy.tree runs/NAME       runs/NAME/tree.html: groups that a run of train.py has kept
    python -m toy.tree --svg FILE      the picture of the README

A page is one file, without a network or a library. Its script only draws. All coefficients of all
settings are computed here, by token_coefficients(loss(batch), logp) on the losses of losses.py.

At a node that several answers share, the coefficients c = w A of its visitors add up:

    sum c = wbar sum A + sum (w - wbar) A = credit + tax

The toy group answers "37+48=" four times. Its policy is a table of probabilities (toy.policy), in
which every history has logits of its own. So every setting of the page is a policy that exists.
"""

from __future__ import annotations

import argparse
import base64
import functools
import inspect
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch import Tensor

import losses
from llm import bind, fail
from losses import METHODS, Batch, Method, OldPolicy
from toy.policy import Policy, pad, tabular

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
PROMPT, RIGHT, WRONG = "37+48=", "#85", ("#75", "#75", "#86", "#84")
MOVED = ("0.6", "0.9", "1", "1.1", "1.6")  # ratio of the shared tokens
SPREAD = {"none": 0.0, "some": 0.4, "wide": 1.0}  # exponent of FACTOR
FACTOR = (1.5, 0.7, 0.85, 1.0)  # on the ratios of the tokens that an answer has for itself
G, L = 4, 6
# GSPO's own clip range, 3e-4/4e-4, is made for long answers. Here it would clip all ratios but 1.
HYPER = {"gspo": {"eps_low": 0.2, "eps_high": 0.28}}

WORDS = ("cancels", "credit only", "tax only", "credit and tax", "no gradient")  # for a node
PROJECTION = ("off", "on")
# The losses whose weights are made of the answers' ratios s_i, and what DFPO does to these.
TRANSFORM = {
    losses.dfpo_min: losses.min_replace,
    losses.dfpo_orthogonal: losses.adv_orthogonal,
}
ON_SEQUENCE_RATIO = (losses.gspo, *TRANSFORM)
OWN = 8  # shown tokens of what an answer shares with no other
LIMIT = 400_000  # bytes of a page


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
    facts: OldPolicy | None = None  # for methods that need a model

    def __post_init__(self):
        self.nodes = losses.prefix_nodes(self.tokens, self.mask, len(self.tokens))


def toy_group(lengths: str, won: str) -> Group:
    """The toy group; won: a digit per answer, "1010" if answers 1 and 3 are right."""
    answers = []
    table: dict[tuple, dict[str, float]] = {}  # history -> probabilities of its next tokens
    for path, digit, wrong in zip(ANSWERS[lengths], won, WRONG, strict=True):
        answer = []
        for step in path.split("|"):
            token, p = step.rsplit(" ", 1)
            token = token if token != "#" else RIGHT if digit == "1" else wrong
            table.setdefault(tuple(answer), {})[token] = float(p)
            answer.append(token)
        answers.append(answer)
    vocabulary = list(dict.fromkeys(["<eos>", RIGHT, *itertools.chain(*answers)]))
    W = torch.empty(len(vocabulary), len(table), dtype=torch.float64)
    for column, children in enumerate(table.values()):
        W[:, column] = math.log((1 - sum(children.values())) / (len(vocabulary) - len(children)))
        for token, p in children.items():
            W[vocabulary.index(token), column] = math.log(p)
    phi = tabular([tuple(map(vocabulary.index, history)) for history in table])
    ids = [tuple(map(vocabulary.index, answer)) for answer in answers]
    old, mask = Policy(W, phi, L).log_probs([()] * G, ids)
    tokens, _ = pad(ids)
    rewards = torch.tensor([float(digit) for digit in won], dtype=torch.float64)

    hidden = torch.zeros(*mask.shape, len(table), dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        hidden[i, t] = phi(ids[i][:t])
    # A correction for IBPO mends the last number; that of answer 4 is wrong again.
    repaired = (rewards == 0) & (torch.arange(G) < 3)
    last = mask.sum(1, keepdim=True) - 2
    corrections = tokens.scatter(1, last, vocabulary.index(RIGHT))
    facts = OldPolicy(tokens, mask, old, rewards, G, hidden=hidden, head=W, repaired=repaired)
    facts.kept_mask = losses.kept_tokens(tokens, mask, corrections, mask)

    group = Group(PROMPT, answers, tokens, mask, rewards, old, old[None], L, facts)
    own = (group.nodes[:, None] == group.nodes).sum(1) == 1  # (G, T)
    factor = torch.tensor(FACTOR, dtype=torch.float64).log()[:, None] * own  # (G, T)
    moves = [math.log(float(m)) + s * factor for m in MOVED for s in SPREAD.values()]
    group.logp = old + torch.stack(moves).masked_fill(~mask, 0.0)  # (S, G, T)
    return group


# ---------------- the groups of a run


def run_groups(run: Path) -> tuple[dict, dict[str, Group]]:
    """The configuration of a run, and the groups that it has kept, by a name each."""
    groups = {}
    where = "config.json"
    try:
        config = json.loads((run / where).read_text())["config"]
        config = {key: config[key] for key in ("method", "hyper", "project")}
        for number, line in enumerate((run / "groups.jsonl").read_text().splitlines(), 1):
            where = f"groups.jsonl, line {number}"
            kept = json.loads(line)
            groups[f"{number}: step {kept['step']}, {kept['prompt'][:24]}"] = run_group(kept)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}; a run directory of train.py is expected")
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        fail(f"{run}/{where} is not as train.py writes it: {type(error).__name__} {error}")
    if not groups:
        kept = "in which answers of different rewards share tokens; longer runs keep some"
        fail(f"{run}/groups.jsonl has no group {kept}")
    return config, groups


def run_group(kept: dict) -> Group:
    """A kept group; its two policies are those before and after the step."""
    answers = kept["answers"]
    tokens, mask = pad([answer["ids"] for answer in answers])
    logp = torch.zeros(2, *mask.shape, dtype=torch.float64)
    for i, answer in enumerate(answers):
        for state, key in enumerate(("logp_old", "logp")):
            logp[state, i, mask[i]] = torch.tensor(answer[key], dtype=torch.float64)
    rewards = torch.tensor([float(answer["reward"]) for answer in answers], dtype=torch.float64)
    texts = [[str(token) for token in answer["tokens"]] for answer in answers]
    if len(texts) < 2 or [len(text) for text in texts] != mask.sum(1).tolist():
        raise ValueError("a group has two answers or more, with as many tokens as ids")
    budget = kept["max_tokens"]
    return Group(kept["prompt"], texts, tokens, mask, rewards, logp[0], logp, budget)


# ---------------- what a loss does to a group


@dataclass
class Loss:
    """One loss of a method; Lopti has two, the others one."""

    name: str
    method: Method
    function: Callable  # Batch -> scalar


def all_losses(hyper: dict[str, dict], model: bool) -> list[Loss]:
    """Of all methods, or without a model of those that need none."""
    choices = []
    for name in METHODS:
        method = bind(name, hyper.get(name, {}), reference=False)
        if model or not (method.needs_hidden or method.repair):
            for number, function in enumerate(method.passes, 1):
                several = len(method.passes) > 1
                choices.append(Loss(f"{name} pass {number}" if several else name, method, function))
    return choices


def advantages(group: Group, method: Method) -> tuple[Tensor, Tensor]:
    """A_i (G,), and what the method's credit rule makes of it (G, T)."""
    rewards = group.rewards
    if method.repair:
        rewards = method.repair(rewards, group.facts.repaired)
    A = losses.group_advantages(rewards, len(rewards), method.scale)
    adv = A[:, None].expand_as(group.old).masked_fill(~group.mask, 0.0)
    if method.credit:
        plain = OldPolicy(group.tokens, group.mask, group.old, group.rewards, len(A))
        facts = group.facts or plain
        facts.gen = torch.Generator().manual_seed(0)
        adv = method.credit(adv, facts)
    return A, adv


def coefficients(group: Group, loss: Callable, A: Tensor, adv: Tensor) -> tuple[Tensor, Tensor]:
    """c of every token under every policy of the group, and c of the projected loss. (S, G, T).

    The S groups are one batch, in which averages over all tokens are what they are for one group.
    """
    S, G, T = group.logp.shape
    logp = group.logp.reshape(S * G, T).detach().requires_grad_()
    tokens, mask = group.tokens.repeat(S, 1), group.mask.repeat(S, 1)
    batch = Batch(logp, group.old.repeat(S, 1), adv.repeat(S, 1), mask, G, group.max_tokens)
    value = loss(batch)
    nodes = losses.prefix_nodes(tokens, mask, G)
    projected = losses.project(value, logp, A.repeat(S), nodes, mask)
    plain, projected = (losses.token_coefficients(x, logp) for x in (value, projected))
    return plain.view(S, G, T), projected.view(S, G, T)


def sequence_ratios(group: Group, loss: Callable) -> Tensor | None:
    """s_i (S, G) of every answer under every policy of the group; None if the loss uses none."""
    if getattr(loss, "func", loss) not in ON_SEQUENCE_RATIO:
        return None
    kind = getattr(loss, "keywords", {}).get("ratio", "geometric")
    S, G, T = group.logp.shape
    old, mask = group.old.repeat(S, 1), group.mask.repeat(S, 1)
    unused = torch.zeros_like(old)  # the ratio does not depend on the advantages
    batch = Batch(group.logp.reshape(S * G, T), old, unused, mask, G, group.max_tokens)
    return losses.sequence_ratio(batch, kind).view(S, G)


def branches(group: Group, rows: list[int], t: int = 0) -> list[dict]:
    """The prefix tree of answers that agree in their first t tokens.

    A branch is the answers ("rows") that share the tokens t0 <= t < t1, and the branches after it.
    """
    children: dict[int, list[int]] = {}
    for i in rows:
        node = int(group.nodes[i, t]) if t < len(group.texts[i]) else -1 - i
        children.setdefault(node, []).append(i)
    tree = []
    for visitors in children.values():
        end = t
        shortest = min(len(group.texts[i]) for i in visitors)
        while end < shortest and len(group.nodes[visitors, end].unique()) == 1:
            end += 1
        after = branches(group, visitors, end) if len(visitors) > 1 else []
        tree.append({"rows": visitors, "t0": t, "t1": end, "after": after})
    return tree


def shared_tokens(tree: list[dict]) -> Iterator[tuple[list[int], int]]:
    """The answers and the place of every token that several of them share, in tree order."""
    for branch in tree:
        if len(branch["rows"]) > 1:
            for t in range(branch["t0"], branch["t1"]):
                yield branch["rows"], t
            yield from shared_tokens(branch["after"])


def account(c: Tensor, A: Tensor) -> Tensor:
    """Credit and tax of one node, from c (S, n) and A (n,) of its visitors. (S, 7).

    Columns: sum c, wbar, sum A, credit, tax, the place of a word in WORDS, and what the learning
    tax divides by: sum |c|, or 0 for a single visitor. Answers with A_i = 0 are left out of all.
    """
    c, A = c[:, A != 0], A[A != 0]
    w = c / A  # (S, n)
    mean = w.sum(1) / max(len(A), 1)
    credit, tax, size = mean * A.sum(), ((w - mean[:, None]) * A).sum(1), c.abs().sum(1)
    zero = 1e-9 * size  # what rounding leaves
    word = (credit.abs() > zero) + 2 * (tax.abs() > zero)
    word = word.masked_fill(size < 1e-9, WORDS.index("no gradient"))
    counted = size * (len(A) > 1)
    return torch.stack([c.sum(1), mean, A.sum().expand(len(c)), credit, tax, word, counted], 1)


# ---------------- the page


class Page:
    """What a page shows: groups, with all their numbers as places in a table of distinct ones."""

    def __init__(self, choices: list[Loss], digits: int):
        self.choices = choices
        self.digits = digits
        self.table: dict[tuple, int] = {}

    def tidy(self, x: Tensor) -> list:
        scale = 10**self.digits
        return ((x * scale).round() / scale + 0.0).tolist()  # + 0.0: no -0

    def scene(self, group: Group) -> str:
        """A group: its tree, what is the same under all losses, and the numbers of each loss."""
        tree = branches(group, list(range(len(group.texts))))
        nodes = list(shared_tokens(tree))
        shown = []  # tokens of each answer; of those that it shares with no other, the first OWN
        for i, text in enumerate(group.texts):
            last = max((t + 1 for rows, t in nodes if i in rows), default=0)
            shown.append(min(len(text), last + OWN))
        mask = torch.arange(group.mask.shape[1]) < torch.tensor(shown)[:, None]  # (G, T)
        scene = {
            "prompt": group.prompt,
            "texts": [text[:n] for text, n in zip(group.texts, shown, strict=True)],
            "more": [len(text) - n for text, n in zip(group.texts, shown, strict=True)],
            "rewards": self.tidy(group.rewards),
            "old": self.tidy(group.old.exp()[mask]),
            "ratio": self.tidy((group.logp - group.old).exp()[:, mask]),
            "tree": tree,
            "losses": {},
        }
        for choice in self.choices:
            A, adv = advantages(group, choice.method)
            both = coefficients(group, choice.function, A, adv)
            s = sequence_ratios(group, choice.function)
            for projection, c in zip(PROJECTION, both, strict=True):
                scene["losses"][f"{choice.name}/{projection}"] = {
                    "A": self.tidy(A),
                    "adv": self.tidy(adv[mask]) if choice.method.credit else None,
                    "s": None if s is None else self.tidy(s),
                    "numbers": self.numbers(c, A, mask, nodes),
                }
        return pack(scene)

    def numbers(self, c: Tensor, A: Tensor, mask: Tensor, nodes: list) -> list[list[int]]:
        """For each policy: (c, w) of every token, the account of every node, the learning tax."""
        w = (c / A[:, None]).masked_fill(A[:, None] == 0, 0.0)
        accounts = [account(c[:, rows, t], A[rows]) for rows, t in nodes]
        accounts = torch.stack(accounts, 1) if nodes else c.new_zeros(len(c), 0, 7)  # (S, V, 7)
        share = accounts[..., 4].abs().sum(1) / accounts[..., 6].sum(1).clamp(min=1e-9)
        parts = torch.stack([c, w], -1)[:, mask], accounts, share[:, None, None]
        return [
            [self.table.setdefault(tuple(x), len(self.table)) for part in state for x in part]
            for state in zip(*map(self.tidy, parts), strict=True)
        ]

    def write(self, data: dict) -> str:
        """The html, with all data packed in it."""
        data = data | {"digits": self.digits, "table": list(self.table), "words": WORDS}
        data["losses"] = {choice.name: source(choice) for choice in self.choices}
        _, number = inspect.getsourcelines(losses.project)
        data["projection"] = [[f"losses.py:{number} project", "w = c/A becomes its node's mean"]]
        packed = base64.b64encode(zlib.compress(pack(data).encode(), 9)).decode()
        return Path(__file__).with_name("tree_page.html").read_text().replace("DATA", packed, 1)


def pack(data: dict) -> str:
    return json.dumps(data, separators=(",", ":"))


def source(choice: Loss) -> dict:
    """What a loss does, and where its functions stand, with their formula and what they return."""
    functions = filter(None, (choice.method.repair, choice.method.credit, choice.function))
    lines = [part for function in functions for part in describe(function)]
    first = choice.method.repair or choice.method.credit or choice.function
    return {"about": getattr(first, "func", first).__doc__.splitlines()[0], "source": lines}


def describe(function: Callable) -> list[tuple[str, str]]:
    """Where a function of losses.py stands, and what it computes.

    Of dfpo_min and dfpo_orthogonal, what the transform of the weights returns is shown instead.
    """
    given = ""
    if isinstance(function, functools.partial):
        given = ", ".join(f"{key} = {value}" for key, value in function.keywords.items())
        function = function.func
    code, number = inspect.getsourcelines(function)
    doc = [line.strip() for line in function.__doc__.splitlines()]
    formula = next(line for line in doc if line.startswith(("J = ", "A_", "R' = ", "w~")))
    returned = "".join(code).rpartition("return ")[2].strip()
    where = f"losses.py:{number} {function.__name__} {given}".strip()
    if function in TRANSFORM:
        return [(where, formula), *describe(TRANSFORM[function])]
    return [(where, f"{formula}\nreturn {returned}")]


def control(name: str, label: str, options: Iterable[str], kind: str, style: str = "radio") -> dict:
    """A control. kind: whether it chooses the scene, the loss, or the state, which is a policy."""
    return {"id": name, "label": label, "options": list(options), "kind": kind, "style": style}


def loss_controls(choices: list[Loss]) -> list[dict]:
    return [
        control("method", "method", [choice.name for choice in choices], "loss", "select"),
        control("project", "projection", PROJECTION, "loss"),
    ]


def toy_page() -> str:
    """The page of the toy group: all methods, lengths, winners and moves of the policy."""
    page = Page(all_losses(HYPER, model=True), digits=3)
    winners = ["".join(digits) for digits in itertools.product("10", repeat=G)]
    scenes = {f"{n}/{won}": page.scene(toy_group(n, won)) for n in ANSWERS for won in winners}
    controls = [
        *loss_controls(page.choices),
        control("lengths", "lengths of the answers", ANSWERS, "scene"),
        control("won", "who won", winners, "scene", "leaves"),
        control("moved", "policy moved: ratio of shared tokens", MOVED, "state"),
        control("spread", "spread of the answers' own ratios", SPREAD, "state"),
    ]
    start = {"method": "reinforce", "project": "off", "lengths": "unequal", "won": "1010"}
    start |= {"moved": "1", "spread": "none", "look": "0.0"}
    states = [f"{moved}/{spread}" for moved in MOVED for spread in SPREAD]
    return page.write({"controls": controls, "states": states, "scenes": scenes, "start": start})


def run_page(run: Path) -> str:
    """The page of a run. Of too many groups every second is left out, until the others fit."""
    config, groups = run_groups(run)
    hyper = dict(text.split("=", 1) for text in config["hyper"])
    hyper.pop("kl", None)  # the log-probs of the reference are not kept
    choices = all_losses({config["method"]: hyper}, model=False)
    own = [choice.name for choice in choices if choice.name.split()[0] == config["method"]]
    states = ["before the step", "after it"]
    shown, text = list(groups), ""
    while not text or len(text.encode()) > LIMIT and len(shown) > 1:
        shown = shown[:: 2 if text else 1]
        page = Page(choices, digits=4)
        scenes = {name: page.scene(groups[name]) for name in shown}
        lead = (
            f"{len(shown)} of the {len(groups)} groups that {run} has kept. Its method is"
            f" {config['method']}. Each group is shown as if it were a batch of its own."
            " Choose a token in the title of a card to see its account."
        )
        if not own:
            lead += f" {config['method']} needs more than a group keeps, so grpo is shown first."
        if hyper.get("ratio") == "product":
            lead += f" In {config['method']}, s is the product of an answer's r."
        controls = [
            control("group", "group", shown, "scene", "select"),
            *loss_controls(choices),
            control("policy", "policy", states, "state"),
        ]
        start = {"group": shown[0], "method": (own or ["grpo"])[0], "policy": states[0]}
        start |= {"project": "on" if config["project"] else "off", "look": "0.0"}
        data = {"lead": lead, "controls": controls, "start": start}
        text = page.write(data | {"states": states, "scenes": scenes})
    return text


# ---------------- the picture of the README

CARD, CHIP, GAP, ROW = 176, 63, 24, 17  # widths, and the height of a line
COLORS = {"win": "#0072b2", "lose": "#d55e00", "sum": "#1d2126"}
COLORS |= {"credit": "#009e73", "tax": "#cc79a7"}
LEGEND = ("A bar is a token's coefficient c:", "how hard the loss pushes the token")
LEGEND += (
    "up (right) or down (left).",
    "Credit: what equal weights",
    "would leave. Tax: the rest.",
)
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 850 {height:g}" fill="#1d2126"
 font-family="system-ui, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="12.5">
<title>One group of answers as a prefix tree, under REINFORCE and under GRPO</title>"""
STYLE = """<style>.code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px }
.small { font-size: 11px } .large { font-size: 15px } .bold { font-weight: 600 }
.end { text-anchor: end } .middle { text-anchor: middle }
.win { fill: #0072b2 } .lose { fill: #b34f00 } .tax { fill: #9b3d74 }</style>
<pattern id="stripes" width="4" height="4" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)"><path d="M0 0h1.7v4h-1.7z" fill="#fff"/></pattern>"""


class Picture:
    """A group under one loss, as parts of an SVG."""

    def __init__(self, group: Group, loss: Loss):
        self.group = group
        self.A, adv = advantages(group, loss.method)
        self.c, _ = coefficients(group, loss.function, self.A, adv)  # (1, G, T)
        self.tree = branches(group, list(range(len(group.texts))))
        sums = [account(self.c[..., r, t], self.A[r])[0, 0] for r, t in shared_tokens(self.tree)]
        self.largest = float(torch.stack([*self.c.flatten(), *sums]).abs().max())
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = ""):
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def line(self, path: str, color: str = "#bbb6aa"):
        self.parts.append(f'<path d="{path}" fill="none" stroke="{color}"/>')

    def box(self, x: float, y: float, width: float, height: float):
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {size} rx="6" fill="#fff" stroke="#bbb6aa"/>')

    def bar(self, x: float, y: float, value: float, kind: str):
        """From the zero line at x, to the right if value > 0; striped for losers and tax."""
        width = value / self.largest * (33 if kind in COLORS else 24)
        kind = kind.removeprefix("own ")
        self.line(f"M{x:g} {y - 9:g}v11", "#5b636e")
        for color in (COLORS[kind], "url(#stripes)")[: 2 if kind in ("lose", "tax") else 1]:
            self.parts.append(f'<path d="M{x:g} {y - 8:g}h{width:.1f}v9H{x:g}z" fill="{color}"/>')

    def side(self, i: int) -> str:
        return "win" if self.A[i] > 0 else "lose"

    def mark(self, i: int) -> str:
        return f"{'▲' if self.A[i] > 0 else '▼'}{i + 1}"

    def card_height(self, branch: dict) -> float:
        return 34 + ROW * (len(branch["rows"]) + 3)

    def height(self, branch: dict) -> float:
        if len(branch["rows"]) == 1:
            return 52
        return max(self.card_height(branch) + 8, sum(map(self.height, branch["after"])))

    def draw(self, branch: dict, x: float, middle: float):
        """A branch and all that comes after it."""
        if len(branch["rows"]) == 1:
            self.draw_tail(branch["rows"][0], branch["t0"], x, middle)
            return
        self.draw_card(branch, x, middle - self.card_height(branch) / 2)
        y = middle - sum(map(self.height, branch["after"])) / 2
        for child in branch["after"]:
            center = y + self.height(child) / 2
            self.line(f"M{x + CARD} {middle:g}h{GAP / 2}V{center:g}h{GAP / 2}")
            self.draw(child, x + CARD + GAP, center)
            y += self.height(child)

    def draw_card(self, branch: dict, x: float, y: float):
        rows, t = branch["rows"], branch["t0"]
        total, _, _, credit, tax, word, _ = account(self.c[..., rows, t], self.A[rows])[0].tolist()
        self.box(x, y, CARD, self.card_height(branch))
        self.text(x + 10, y + 19, self.group.texts[rows[0]][t], "code bold")
        self.text(x + CARD - 10, y + 19, WORDS[int(word)], "end bold " + "tax" * (abs(tax) > 1e-9))
        y += 38
        for i in rows:
            self.draw_entry(x, y, self.mark(i), float(self.c[0, i, t]), self.side(i))
            y += ROW
        self.line(f"M{x + 10} {y - 11:g}h{CARD - 20}", "#1d2126")
        for k, (name, value) in enumerate({"sum": total, "credit": credit, "tax": tax}.items()):
            self.draw_entry(x, y + 3 + k * ROW, name, value, name)

    def draw_entry(self, x: float, y: float, name: str, value: float, kind: str):
        bold = " bold" * (kind == "sum")
        self.text(x + 10, y, name, kind + bold if name != kind else bold)
        self.bar(x + 84, y, value, kind)
        self.text(x + CARD - 10, y, signed(value), "code end" + bold)

    def draw_tail(self, i: int, t0: int, x: float, middle: float):
        for t, token in enumerate(self.group.texts[i][t0:], t0):
            center = x + CHIP / 2 - 2
            self.box(x, middle - 23, CHIP - 4, 46)
            self.text(center, middle - 9, token, "code middle small")
            self.bar(center, middle + 4, float(self.c[0, i, t]), f"own {self.side(i)}")
            self.text(center, middle + 18, signed(float(self.c[0, i, t])), "code middle small")
            x += CHIP
        reward = f"{self.mark(i)} reward {self.group.rewards[i]:g}"
        self.text(x + 4, middle - 3, reward, f"bold {self.side(i)}")
        self.text(x + 4, middle + 13, f"A = {signed(float(self.A[i]))}")


def signed(x: float) -> str:
    return f"{x:+.3f}".replace("-", "−") if abs(x) >= 5e-4 else "0.000"


def toy_picture() -> str:
    """REINFORCE and GRPO, on-policy and with unequal lengths, one below the other."""
    group = toy_group("unequal", "1010")
    group.logp = group.old[None]
    headlines = {
        "reinforce": "REINFORCE: two winners push “so” up, two losers push it down. The sum is 0.",
        "grpo": "GRPO divides by an answer's length: short answers push harder, a tax is left.",
    }
    chosen = [loss for loss in all_losses({}, model=False) if loss.name in headlines]
    pictures = {loss.name: Picture(group, loss) for loss in chosen}
    largest = max(picture.largest for picture in pictures.values())
    parts, top = [], 0
    for name, picture in pictures.items():
        picture.largest = largest  # bars of both have one scale
        (root,) = picture.tree
        middle = top + 36 + picture.height(root) / 2
        picture.text(10, top + 26, headlines[name], "large bold")
        picture.text(10, middle + 4, group.prompt, "code")
        picture.line(f"M64 {middle:g}h14")
        picture.draw(root, 78, middle)
        for k, words in enumerate(() if parts else LEGEND):
            picture.text(645, top + 216 + 15 * k, words, "small")
        parts += picture.parts
        top += 44 + picture.height(root)
    head = [HEAD.format(height=top + 4), STYLE, f'<path d="M0 0h850v{top + 4:g}H0z" fill="#fff"/>']
    return "\n".join([*head, *parts, "</svg>\n"])


# ---------------- the command line


def main(argv: list[str] | None = None):
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser("python -m toy.tree", description=about, allow_abbrev=False)
    parser.error = fail
    parser.add_argument("run", nargs="?", type=Path, help="a run directory of train.py")
    parser.add_argument("--out", type=Path, help="the page (default tree.html, or RUN/tree.html)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the README's picture")
    options = parser.parse_args(argv)
    if options.svg and options.svg.suffix != ".svg":
        fail(f"--svg {options.svg}: a name that ends in .svg is expected")
    if options.svg and (options.run or options.out):
        fail("--svg writes the picture of the toy group alone; leave RUN and --out out")
    torch.set_num_threads(1)  # the groups are tiny
    if options.svg:
        path, text = options.svg, toy_picture()
    else:
        path = options.out or (options.run or Path()) / "tree.html"
        text = run_page(options.run) if options.run else toy_page()
    try:
        path.write_text(text)
    except OSError as error:
        fail(f"{path}: {error.strerror}; a file that can be written is expected")
    print(f"{path}, {len(text.encode()) / 1000:.0f} kB: open it in a browser")


if __name__ == "__main__":
    main()
