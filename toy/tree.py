"""One group of answers as a prefix tree, and what a loss does to each of its tokens.

    python -m toy.tree                 tree.html: the article, which begins with a toy group
    python -m toy.tree runs/NAME       runs/NAME/tree.html: groups of a run of train.py

The page is one file, without a network or a library. tree_page.html has the tree, with its story in
eight steps; article.html and article.js are what follows it. The tree has every method that is one
loss of a batch, without and with a baseline at every prefix. All coefficients c of all its
settings are computed here, by token_coefficients(loss(batch), logp) on the losses of losses.py. Its
script draws them, and adds them up at the tokens that several answers share:

    sum c = wbar sum A + sum (w - wbar) A = credit + tax,   c = w A

The toy group answers "37+48=" four times. Its A has the scale "mean" for all methods, so it is
reward minus the group's mean, as README says. toy/tree.svg, README's picture, is this group under
REINFORCE and under GRPO. A run's groups have the scale of the run, or of their method.
"""

from __future__ import annotations

import argparse
import base64
import functools
import itertools
import json
import math
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import losses
from losses import METHODS, Batch, Method
from toy import clips, tax
from toy.policy import pad

# ---------------- the toy group

# Answer by answer, its tokens; "#" stands for the last number, which ends the answer. Answers 1
# and 2 share a token that 3 and 4 do not have.
ANSWERS = {
    "equal": (
        "so|7+8=15|70+15=85|#",
        "so|7+8=15|30+40=70|#",
        "so|37+40=77|77+8=85|#",
        "so|40+48=88|88-3=85|#",
    ),
    "unequal": (
        "so|7+8=15|70+15=85|#",
        "so|7+8=15|carry 1|30+40=70|#",
        "so|#",
        "so|40+48=88|88-3=85|#",
    ),
}
RIGHT, WRONG = "#85", ("#75", "#75", "#86", "#84")
# What a loss sees of a policy's move are ratios. All tokens were sampled with probability 0.2, so
# that in every setting the probabilities after a prefix sum to at most 1.
OLD = 0.2
MOVED = ("0.6", "1", "1.6")  # the ratio of every token
SPREAD = {"none": 0.0, "wide": 1.0}  # exponent of FACTOR
FACTOR = (1.5, 0.7, 0.85, 1.0)  # on the ratios of the tokens that an answer has for itself
G, L = 4, 5


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


def toy_group(lengths: str, won: str) -> Group:
    """The toy group; won: a digit per answer, "1010" if answers 1 and 3 are right."""
    last = [RIGHT if digit == "1" else wrong for digit, wrong in zip(won, WRONG, strict=True)]
    paths = [path.split("|") for path in ANSWERS[lengths]]
    texts = [[last[i] if text == "#" else text for text in path] for i, path in enumerate(paths)]
    vocabulary = list(dict.fromkeys(itertools.chain(*texts)))
    tokens, mask = pad([tuple(map(vocabulary.index, row)) for row in texts])
    rewards = torch.tensor([float(digit) for digit in won], dtype=torch.float64)
    old = torch.full(mask.shape, math.log(OLD), dtype=torch.float64)
    group = Group("37+48=", texts, tokens, mask, rewards, old, old[None], L)
    own = (group.nodes[:, None] == group.nodes).sum(1) == 1  # no other answer shares the token
    factor = torch.tensor(FACTOR, dtype=torch.float64).log()[:, None] * own  # (G, T)
    moves = [math.log(float(m)) + s * factor for m in MOVED for s in SPREAD.values()]
    group.logp = old + torch.stack(moves)  # (S, G, T)
    return group


# ---------------- the groups of a run


def run_groups(run: Path) -> tuple[int, list[Group]]:
    """The newest saved step of a run in which answers to a prompt differ in reward, and the groups
    where they do."""
    for path in sorted(run.glob("batches/step-*.pt"), reverse=True):
        batch = torch.load(path, map_location="cpu", weights_only=True)
        rows = torch.arange(len(batch["tokens"])).split(batch["group_size"])
        groups = [run_group(batch, k, part) for k, part in enumerate(rows)]
        groups = [group for group in groups if group.rewards.unique().numel() > 1]
        if groups:
            return batch["step"], groups
    sys.exit(f"error: {run} has no batches/step-*.pt with right and wrong answers to one prompt")


def run_group(batch: dict, k: int, rows: Tensor) -> Group:
    """Group k of a saved batch; its two policies are those before and after the step."""
    old, new = (batch[key][rows].double() for key in ("logp_old", "logp"))
    tokens, mask = batch["tokens"][rows], batch["mask"][rows]
    texts = [batch["pieces"][i][: mask[i - rows[0]].sum()] for i in rows.tolist()]
    prompt, rewards = batch["prompts"][k], batch["rewards"][rows].double()
    logp, budget = torch.stack([old, new]), batch["max_tokens"]
    return Group(prompt, texts, tokens, mask, rewards, old, logp, budget)


# ---------------- what a loss does to a group


def shown_methods(scale: str) -> dict[str, Method]:
    """The methods that are one loss of a batch: without a credit rule or a second pass.

    All have this scale; each has its own if it is empty.
    """
    single = {name: m for name, m in METHODS.items() if len(m.passes) == 1 and not m.credit}
    return {name: replace(m, scale=scale or m.scale) for name, m in single.items()}


def toy_methods() -> dict[str, Method]:
    """Them on the toy group: all with one scale, and GSPO with a clip range that suits it.

    Its own is made for long answers, and would clip all of the toy's ratios but 1.
    """
    methods = shown_methods("mean")
    wider = functools.partial(losses.gspo, eps_low=0.2, eps_high=0.28)
    methods["gspo"] = replace(methods["gspo"], passes=(wider,))
    return methods


def advantages(group: Group, method: Method) -> Tensor:
    """A_i. (G,)."""
    return losses.group_advantages(group.rewards, len(group.rewards), method.scale)


def coefficients(group: Group, method: Method) -> tuple[Tensor, Tensor]:
    """c of every token under every policy, without a baseline at every prefix and with it.

    The S groups are one batch, in which averages over all tokens are what they are for one group.
    (S, G, T) each.
    """
    S, G, T = group.logp.shape
    logp = group.logp.reshape(S * G, T).requires_grad_()
    adv = advantages(group, method).repeat(S)[:, None].expand(S * G, T)
    mask = group.mask.repeat(S, 1)
    batch = Batch(logp, group.old.repeat(S, 1), adv, mask, G, group.max_tokens)
    loss = method.passes[0](batch)
    nodes = losses.prefix_nodes(group.tokens.repeat(S, 1), mask, G)
    both = (loss, losses.prefix_baseline(loss, batch, nodes))
    pair = (losses.token_coefficients(x, logp) for x in both)
    plain, with_baseline = (c.view(S, G, T) for c in pair)
    return plain, with_baseline


def sequence_ratios(group: Group) -> Tensor:
    """s_i of every answer under every policy of the group. (S, G)."""
    rows = [Batch(x, group.old, x, group.mask, len(x), group.max_tokens) for x in group.logp]
    return torch.stack([losses.sequence_ratio(batch) for batch in rows])


# ---------------- the page


def scene(group: Group, methods: dict[str, Method]) -> str:
    """What the page knows of a group. Tokens stand one after the other, answer by answer."""
    mask, table = group.mask, {}
    for name, method in methods.items():
        off, on = (brief(c[:, mask]) for c in coefficients(group, method))
        table[name] = {"A": brief(advantages(group, method)), "off": off, "on": on}
    about = {
        "prompt": group.prompt,
        "texts": group.texts,
        "nodes": group.nodes[mask].tolist(),
        "rewards": group.rewards.tolist(),
        "s": brief(sequence_ratios(group)),
        "losses": table,
    }
    return json.dumps(about)


def brief(x: Tensor) -> list:
    """Its numbers; 8 decimals tell what cancels from what does not."""
    return x.round(decimals=8).tolist()


def control(name: str, label: str, options, kind: str, style: str = "radio") -> dict:
    """A control. kind: whether it chooses the scene, the loss, or the state, which is a policy."""
    return {"id": name, "label": label, "options": list(options), "kind": kind, "style": style}


def write_page(data: dict, methods: dict[str, Method]) -> str:
    """The html, with all data packed in it. data: controls, states, scenes and start."""
    method = control("method", "method", methods, "loss", "select")
    baseline = control("baseline", "baseline at every prefix", ("off", "on"), "loss")
    data["controls"] = [method, baseline, *data["controls"]]
    data["methods"] = {name: f"J = {m.formula}" for name, m in methods.items()}
    packed = base64.b64encode(zlib.compress(json.dumps(data).encode(), 9)).decode()
    return read("tree_page.html").replace("DATA", packed, 1)


def read(name: str) -> str:
    """A file that lies beside this one."""
    return Path(__file__).with_name(name).read_text("utf-8")


def toy_page() -> str:
    """The page of the toy group: all methods, lengths, winners and moves of the policy."""
    methods = toy_methods()
    winners = ["".join(digits) for digits in itertools.product("10", repeat=G)]
    keys = itertools.product(ANSWERS, winners)
    start = {"method": "reinforce", "baseline": "off", "lengths": "unequal", "won": "1010"}
    data = {
        "digits": 3,
        "start": start | {"moved": "1", "spread": "none"},
        "states": [f"{moved}/{spread}" for moved in MOVED for spread in SPREAD],
        "scenes": {f"{n}/{won}": scene(toy_group(n, won), methods) for n, won in keys},
        "controls": [
            control("lengths", "lengths of the answers", ANSWERS, "scene"),
            control("won", "who won", winners, "scene", "leaves"),
            control("moved", "ratio r of the tokens", MOVED, "state"),
            control("spread", "spread of the answers' own ratios", SPREAD, "state"),
        ],
    }
    return add_article(write_page(data, methods))


# ---------------- the article below the tree

# toy/article.png shows the article's tree. After `python -m toy.tree`, this makes it again:
#     chromium --headless --hide-scrollbars --window-size=1250,1100 --virtual-time-budget=9999 \
#         --screenshot=toy/article.png tree.html
#     python -c "from PIL import Image; picture = Image.open('toy/article.png').convert('RGB'); \
#         picture.crop((0, 394, 1250, 1004)).quantize(256, 1).save('toy/article.png')"


def add_article(page: str) -> str:
    """The sections after the tree, with what they take from Python in place of their capitals."""
    settings = enumerate(tax.SETTINGS.items(), 1)
    facts = {
        "ratios": clips.RATIOS,
        "clips": clips.weights(),
        # The worlds of toy/tax.py: four lengths, and the chance to be right on the worse way.
        "worlds": [[f"{k}: {x}", [*own, *worse, p]] for k, (x, (own, p, worse)) in settings],
    }
    panels = "\n".join(f"<div>{clips.panel(name)}<output></output></div>" for name in clips.NAMES)
    text = read("article.html").replace("CLIP_STYLE", clips.STYLE, 1).replace("PANELS", panels, 1)
    text = text.replace("FACTS", json.dumps(facts), 1)
    return page.replace("<!-- ARTICLE -->", text, 1).replace("// SCRIPT", read("article.js"), 1)


def run_page(run: Path) -> str:
    """The page of a run: three groups of a saved batch, before and after the step."""
    flags = json.loads((run / "config.json").read_text("utf-8"))
    (step, groups), name, methods = run_groups(run), flags["method"], shown_methods(flags["scale"])
    lead = f"Groups of {run}, a run of {name}, at step {step}."
    lead += " Each is shown as if it were a batch of its own."
    lead += " Where a card has several tokens, the pushes are those on the first."
    if name in methods:
        pairs = (pair.split("=", 1) for pair in flags["hyper"].split())
        # Not the KL term: the log-probs of the reference are not saved.
        hyper = {key: value for key, value in pairs if not key.startswith("kl")}
        methods[name] = replace(losses.bind(name, hyper), scale=methods[name].scale)
    else:
        lead += f" {name} is more than one loss of a batch, so grpo is shown first."
        name = "grpo"
    scenes = {f"{k}: {x.prompt[:24]}": scene(x, methods) for k, x in enumerate(groups[:3], 1)}
    states = ["before the step", "after it"]
    start = {"group": next(iter(scenes)), "method": name, "policy": states[0]}
    start |= {"baseline": "on" if flags["prefix_baseline"] else "off"}
    controls = [
        control("group", "group", scenes, "scene", "select"),
        control("policy", "policy", states, "state"),
    ]
    data = {"digits": 4, "lead": lead, "start": start, "states": states, "scenes": scenes}
    return write_page(data | {"controls": controls}, methods)


def main(argv: list[str] | None = None):
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("run", nargs="?", type=Path, help="a run folder of train.py")
    run = parser.parse_args(argv).run
    torch.set_num_threads(1)  # the groups are tiny
    text = run_page(run) if run else toy_page()
    path = (run or Path()) / "tree.html"
    path.write_text(text, "utf-8")
    print(f"{path}: open it in a browser")


if __name__ == "__main__":
    main()
