"""One group of answers as a prefix tree, and what a loss does to each of its tokens.

    python -m toy.tree                 tree.html: the article, which begins with a toy group
    python -m toy.tree runs/NAME       runs/NAME/tree.html: groups of a run of train.py

The page is one file, and needs neither a network nor a library. tree_page.html contains the tree
and its story in nine steps; article.html and article.js contain the sections below the tree. The
tree shows every method that is one loss of a batch, without and with a prefix baseline. This file
computes the pushes c of all settings, as token_pushes(loss(batch), logp) with the losses of
losses.py. The page's script draws them, and adds them up at shared tokens:

    net push = sum c = wbar sum A + sum (w - wbar) A = credit + tax,   c = w A

The toy group answers "37+48=" four times. For all methods A is the reward minus the group mean, as
in README. toy/tree.svg, README's picture, shows this group under one divisor for all answers, and
under GRPO's. A group of a real model, from sums.json, has the same A. A run's groups have the scale
of the run, or of their method.

A run saves the rollout of each evaluated step: batches/step-NUMBER.pt, a dict by torch.save. N
answers, G to each prompt, have T places for tokens:

    step, group_size, max_tokens            numbers: the last two are G and L
    prompts, pieces                         texts: of the N/G prompts, and of the tokens, (N, T)
    tokens, mask, rewards, logp_old, logp   tensors: (N, T), but for rewards, (N,); logp is log pi
                                            after the step
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
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import losses
from losses import METHODS, Batch, Method
from toy import clips, tax
from toy.policy import pad

# ---------------- the toy group

# The tokens of each answer; "#" is the last number, which ends the answer. Answers 1 and 2 share a
# token that 3 and 4 do not have.
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
# A loss sees a policy's move as ratios. All tokens were sampled with probability 0.2, so that in
# every setting the probabilities after a prefix sum to at most 1.
OLD = 0.2
MOVED = ("0.6", "1", "1.6")  # the ratio of every token
SPREAD = {"none": 0.0, "wide": 1.0}  # exponent of FACTOR
FACTOR = (1.5, 0.7, 0.85, 1.0)  # on the ratios of tokens that only one answer has
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
    states: list[str]  # S, the names of the policies


def toy_group(lengths: str, won: str) -> Group:
    """The toy group; won: a digit per answer, "1010" if answers 1 and 3 are right."""
    last = [RIGHT if digit == "1" else wrong for digit, wrong in zip(won, WRONG, strict=True)]
    paths = [path.split("|") for path in ANSWERS[lengths]]
    texts = [[last[i] if text == "#" else text for text in path] for i, path in enumerate(paths)]
    vocabulary = list(dict.fromkeys(itertools.chain(*texts)))
    tokens, mask = pad([tuple(map(vocabulary.index, row)) for row in texts])
    rewards = torch.tensor([float(digit) for digit in won], dtype=torch.float64)
    old = torch.full(mask.shape, math.log(OLD), dtype=torch.float64)
    states = [f"{moved}/{spread}" for moved in MOVED for spread in SPREAD]
    nodes = losses.prefix_nodes(tokens, mask, G)
    own = (nodes[:, None] == nodes).sum(1) == 1  # no other answer shares the token
    factor = torch.tensor(FACTOR, dtype=torch.float64).log()[:, None] * own  # (G, T)
    moves = [math.log(float(m)) + s * factor for m in MOVED for s in SPREAD.values()]
    logp = old + torch.stack(moves)  # (S, G, T)
    return Group("37+48=", texts, tokens, mask, rewards, old, logp, L, states)


# ---------------- the groups of a run

STATES = ["before the step", "after it"]


def run_group(batch: dict, k: int, rows: Tensor) -> Group:
    """Group k of a saved batch, at these rows, with the policies before and after the step."""
    old, new = (batch[key][rows].double() for key in ("logp_old", "logp"))
    tokens, mask = batch["tokens"][rows], batch["mask"][rows]
    texts = [batch["pieces"][i][: mask[i - rows[0]].sum()] for i in rows.tolist()]
    prompt, rewards = batch["prompts"][k], batch["rewards"][rows].double()
    logp, budget = torch.stack([old, new]), batch["max_tokens"]
    return Group(prompt, texts, tokens, mask, rewards, old, logp, budget, STATES)


def real_group() -> Group:
    """Eight answers of a real model to one sum: a group of a saved batch, as sums.json."""
    batch = json.loads(read("sums.json"))
    for key in ("tokens", "mask", "rewards", "logp_old", "logp"):
        batch[key] = torch.tensor(batch[key])
    return run_group(batch, 0, torch.arange(len(batch["tokens"])))


# ---------------- what a loss does to a group


def shown_methods(scale: str) -> dict[str, Method]:
    """The methods that are one loss of a batch: without a credit rule or a second pass.

    All get this scale; if it is empty, each keeps its own.
    """
    single = {name: m for name, m in METHODS.items() if len(m.passes) == 1 and not m.credit}
    return {name: replace(m, scale=scale or m.scale) for name, m in single.items()}


def toy_methods() -> dict[str, Method]:
    """The methods of the toy group: all with one scale, and GSPO with a wider clip range.

    Its own range is made for long answers, and would clip all of the toy's ratios but 1.
    """
    methods = shown_methods("mean")
    wider = functools.partial(losses.gspo, eps_low=0.2, eps_high=0.28)
    methods["gspo"] = replace(methods["gspo"], passes=(wider,))
    return methods


# ---------------- the page


def scene(group: Group, methods: dict[str, Method]) -> str:
    """The page's data about a group. Tokens are listed one after the other, answer by answer.

    The S groups, one for each policy, are one batch, in which a token mean is as in one group.
    """
    S, G, T = group.logp.shape
    tokens, mask, old = (x.repeat(S, 1) for x in (group.tokens, group.mask, group.old))
    logp = group.logp.view(S * G, T).requires_grad_()
    nodes, table = losses.prefix_nodes(tokens, mask, G), {}
    for name, method in methods.items():
        batch = Batch(logp, old, old, mask, G, group.max_tokens)
        A = losses.group_advantages(group.rewards.repeat(S), G, method.scale)
        batch = replace(batch, adv=A[:, None].expand_as(mask))
        loss = method.passes[0](batch)
        both = (loss, losses.prefix_baseline(loss, batch, nodes))
        pushes = (losses.token_pushes(x, batch.logp).view(S, G, T) for x in both)
        off, on = (brief(c[:, group.mask]) for c in pushes)
        table[name] = {"A": brief(A[:G]), "off": off, "on": on}
    about = {
        "prompt": group.prompt,
        "texts": group.texts,
        "nodes": nodes[:G][group.mask].tolist(),
        "rewards": group.rewards.tolist(),
        "s": brief(losses.sequence_ratio(batch).detach().view(S, G)),
        "states": group.states,
        "losses": table,
    }
    return json.dumps(about)


def brief(x: Tensor) -> list:
    """The numbers of x; 8 decimals are enough to see what cancels."""
    return x.round(decimals=8).tolist()


def write_page(data: dict, methods: dict[str, Method]) -> str:
    """The html, with all data packed in it. data: controls, scenes and start.

    A control is its id, its label, its options, and what it chooses: the scene, the loss, or the
    state, which is a policy. Its style and the choice of *answers* that shows it may follow.
    """
    method = ("method", "method", [*methods], "loss", "select")
    baseline = ("baseline", "prefix baseline", ["off", "on"], "loss")
    data["controls"] = [method, baseline, *data["controls"]]
    data["methods"] = {name: formula(method.passes[0]) for name, method in methods.items()}
    packed = base64.b64encode(zlib.compress(json.dumps(data).encode(), 9)).decode()
    return read("tree_page.html").replace("DATA", packed, 1)


def formula(loss) -> str:
    """What a loss says about its J."""
    text = inspect.getdoc(getattr(loss, "func", loss)) or ""
    return next((line for line in text.splitlines() if line.startswith("J = ")), "")


def read(name: str) -> str:
    """A file in this folder."""
    return Path(__file__).with_name(name).read_text("utf-8")


def toy_page() -> str:
    """The page of the toy group, with all methods, lengths, winners and moves of the policy, and
    of the real model's group."""
    methods = toy_methods()
    winners = ["".join(digits) for digits in itertools.product("10", repeat=G)]
    keys = itertools.product(ANSWERS, winners)
    made_up, real = "made up", "SmolLM2-135M"
    start = {"method": "reinforce", "baseline": "off", "lengths": "unequal", "won": "1010"}
    start |= {"answers": made_up, "moved": "1", "spread": "none", "policy": STATES[0]}
    scenes = {f"{made_up}/{n}/{won}": scene(toy_group(n, won), methods) for n, won in keys}
    data = {
        "digits": 3,
        "start": start,
        "scenes": scenes | {real: scene(real_group(), methods)},
        "controls": [
            ("answers", "answers", (made_up, real), "scene"),
            ("lengths", "lengths of the answers", [*ANSWERS], "scene", "radio", made_up),
            ("won", "who won", winners, "scene", "leaves", made_up),
            ("moved", "ratio r of the tokens", MOVED, "state", "radio", made_up),
            ("spread", "spread of the answers' own ratios", [*SPREAD], "state", "radio", made_up),
            ("policy", "policy", STATES, "state", "radio", real),
        ],
    }
    return add_article(write_page(data, methods))


# ---------------- the article below the tree

# toy/article.png shows the article's buttons and tree, not its words. After `python -m toy.tree`:
#     echo '<style>.prose, #say, #method { display: none !important }</style>' >> tree.html
#     chromium --headless --hide-scrollbars --window-size=1250,600 --virtual-time-budget=9999 \
#         --screenshot=toy/article.png tree.html
#     python -c "from PIL import Image; picture = Image.open('toy/article.png').convert('RGB'); \
#         picture.crop((0, 16, 1250, 526)).quantize(256, 1).save('toy/article.png')"


def add_article(page: str) -> str:
    """Adds the sections below the tree. Data from Python replaces the words in capitals."""
    settings = enumerate(tax.SETTINGS.items(), 1)
    facts = {
        "ratios": clips.RATIOS,
        "clips": clips.weights(),
        # The worlds of toy/tax.py: four lengths, and how often the worse strategy is right.
        "worlds": [[f"{k}: {x}", [*own, *worse, p]] for k, (x, (own, p, worse)) in settings],
    }
    text = read("article.html").replace("FACTS", json.dumps(facts), 1)
    return page.replace("<!-- ARTICLE -->", text, 1).replace("// SCRIPT", read("article.js"), 1)


def run_page(run: Path) -> str:
    """The page of a run: three groups of its last saved batch, before and after the step."""
    flags = json.loads((run / "config.json").read_text("utf-8"))
    path = max(run.glob("batches/step-*.pt"))
    batch = torch.load(path, map_location="cpu", weights_only=True)
    rows = torch.arange(len(batch["tokens"])).split(batch["group_size"])
    groups = [run_group(batch, k, part) for k, part in enumerate(rows)]
    groups.sort(key=lambda group: group.rewards.unique().numel() == 1)  # without pushes: last
    name, methods = Path(flags["method"]).name, shown_methods(flags["scale"])
    lead = f"Groups of {run}, a run of {name}, at step {batch['step']}."
    lead += " Each is shown as if it were a batch of its own."
    lead += " If a card has several tokens, it shows the pushes on the first."
    _, own, function = name.rpartition(".py")
    loss = f"{run}/method.py{function}" if own else name  # a run has a copy of its loss
    bound = losses.bind(loss, dict(pair.split("=", 1) for pair in flags["hyper"].split()))
    if bound.credit or len(bound.passes) > 1:
        lead += f" {name} is more than one loss of a batch, so grpo is shown first."
        name = "grpo"
    else:
        if "kl" in bound.hyper:  # the log-probs of the reference are not saved
            bound.passes = (functools.partial(*bound.passes, kl=0.0),)
        methods[name] = replace(bound, scale=flags["scale"] or bound.scale)
    scenes = {f"{k}: {x.prompt[:24]}": scene(x, methods) for k, x in enumerate(groups[:3], 1)}
    start = {"group": next(iter(scenes)), "method": name, "policy": STATES[0]}
    start |= {"baseline": "on" if flags["prefix_baseline"] else "off"}
    controls = [
        ("group", "group", [*scenes], "scene", "select"),
        ("policy", "policy", STATES, "state"),
    ]
    data = {"digits": 4, "lead": lead, "start": start, "scenes": scenes}
    return write_page(data | {"controls": controls}, methods)


def main(argv: list[str] | None = None):
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("run", nargs="?", type=Path, help="a run folder of train.py")
    run = parser.parse_args(argv).run
    torch.set_num_threads(1)  # the groups are tiny
    path = (run or Path()) / "tree.html"
    path.write_text(run_page(run) if run else toy_page(), "utf-8")
    print(f"{path}: open it in a browser")


if __name__ == "__main__":
    main()
