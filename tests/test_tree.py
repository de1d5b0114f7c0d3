"""toy/tree.py: the page holds the numbers of losses.py, and shows them in a browser."""

import base64
import json
import math
import random
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from helpers import refused

import losses
from losses import METHODS, Batch, Method, OldPolicy, group_advantages, token_coefficients
from toy import tree

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HTML = Path(tree.__file__).with_name("tree_page.html").read_text()
LINKS = re.findall(r'<a href="#([^"]+)">', HTML)
PRESETS = [link.replace("&amp;", "&").replace("+", " ") for link in LINKS]
LOSSES = tree.toy_losses()
START = "method=reinforce&project=off&lengths=unequal&won=1010&moved=1&spread=none"
NASTY = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"


def unpack(page: str) -> dict:
    packed = re.search(r'id="data">([^<]+)<', page)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


@pytest.fixture(scope="module")
def page():
    return tree.toy_page()


def choose(setting: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in f"{START}&{setting}".split("&") if pair)


def fresh(setting: str) -> tuple:
    """What losses.py says about a setting, one policy alone: the group, log pi (G, T), c (G, T), A
    (G,), and the advantages after the credit rule (G, T)."""
    chosen = choose(setting)
    method = LOSSES[chosen["method"]][0]
    group = tree.toy_group(chosen["lengths"], chosen["won"])
    logp = group.old.clone()
    for i, text in enumerate(group.texts):
        for t in range(len(text)):
            alone = sum(other[: t + 1] == text[: t + 1] for other in group.texts) == 1
            own = tree.FACTOR[i] ** tree.SPREAD[chosen["spread"]] if alone else 1.0
            logp[i, t] += math.log(float(chosen["moved"]) * own)
    rewards = torch.tensor([float(digit) for digit in chosen["won"]]).double()
    shaped = method.repair(rewards, group.facts["repaired"]) if method.repair else rewards
    A = group_advantages(shaped, 4, method.scale)
    adv = A[:, None].expand_as(group.old)
    if method.credit:
        gen = torch.Generator().manual_seed(0)
        old = OldPolicy(group.tokens, group.mask, group.old, rewards, 4, gen, **group.facts)
        adv = method.credit(adv, old)
    batch = Batch(logp.requires_grad_(), group.old, adv, group.mask, group_size=4, max_tokens=6)
    loss = LOSSES[chosen["method"]][1](batch)
    if chosen["project"] == "on":
        nodes = losses.prefix_nodes(group.tokens, group.mask, 4)
        loss = losses.project(loss, logp, A, nodes, group.mask)
    return group, logp.detach(), token_coefficients(loss, logp), A, adv


def random_settings(count: int) -> list[str]:
    rng = random.Random(0)
    return [
        f"method={method}&project={rng.choice(['off', 'on'])}&lengths={rng.choice([*tree.ANSWERS])}"
        f"&won={rng.randrange(16):04b}&moved={rng.choice(tree.MOVED)}"
        f"&spread={rng.choice([*tree.SPREAD])}"
        for method in [*LOSSES] * count
    ]


def test_every_setting_of_the_toy_is_a_policy_that_exists():
    for group in (tree.toy_group(lengths, "0001") for lengths in tree.ANSWERS):
        for logp in group.logp:
            after = {}  # history -> {token: probability}
            for text, row in zip(group.texts, logp.exp().tolist(), strict=True):
                for t, token in enumerate(text):
                    after.setdefault(tuple(text[:t]), {})[token] = row[t]
            assert all(sum(children.values()) < 1 for children in after.values())


def test_the_page_holds_what_losses_say_of_each_policy_alone(page):
    data = unpack(page)
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", page)  # it needs no network
    for setting in PRESETS + random_settings(2):
        chosen = choose(setting)
        group, logp, c, A, adv = fresh(setting)
        scene = json.loads(data["scenes"][f"{chosen['lengths']}/{chosen['won']}"])
        loss = scene["losses"][f"{chosen['method']}/{chosen['project']}"]
        state = data["states"].index(f"{chosen['moved']}/{chosen['spread']}")
        credit = METHODS[chosen["method"].split(" ")[0]].credit
        assert (loss["adv"] is None) == (credit is None)
        ratio, lengths = logp - group.old, group.mask.sum(1)
        for shown, right in (
            (loss["c"][state], c[group.mask]),
            (loss["A"], A),
            (loss["adv"] or adv[group.mask].tolist(), adv[group.mask]),
            (scene["ratio"][state], ratio.exp()[group.mask]),
            (scene["s"][state], (ratio.sum(1) / lengths).exp()),
            (scene["old"], group.old.exp()[group.mask]),
            (scene["lengths"], lengths),
        ):
            assert shown == pytest.approx(right.tolist(), rel=1e-4, abs=1e-9), setting


def test_s_is_shown_where_a_token_feels_the_ratios_of_its_whole_answer():
    shown = {name for name, (_, loss) in LOSSES.items() if tree.feels_whole_answer(loss)}
    assert shown >= {"gspo", "dfpo-min", "dfpo-orthogonal"}
    assert not shown & {"reinforce", "grpo", "dr-grpo", "dapo", "cispo", "pos-only", "lopti pass 1"}


def test_a_new_method_is_on_the_page(monkeypatch):
    mine = Method((lambda batch: 2 * losses.grpo(batch),))
    monkeypatch.setitem(METHODS, "mine", mine)
    data = json.loads(tree.scene(tree.toy_group("equal", "1010"), tree.toy_losses()))["losses"]
    c = [torch.tensor(data[f"{name}/off"]["c"]) for name in ("mine", "grpo")]
    torch.testing.assert_close(c[0], 2 * c[1], rtol=1e-3, atol=0)
    assert tree.describe(mine, mine.passes[0])["source"]


def test_what_the_toy_knows_for_nthr_and_ibpo():
    group = tree.toy_group("unequal", "1010")
    V = len({text for row in group.texts for text in row})

    def dot(p_a, p_b, *known):
        """<e_a - pi, e_b - pi> of two tokens; what pi does not say is spread evenly."""
        square = sum(p * p for p in known) + (1 - sum(known)) ** 2 / (V - len(known))
        return (p_a == p_b) - p_a - p_b + square

    scores = group.facts["scores"]  # of answer 2, beside the right answers 1 and 3
    assert float(scores[1, 0]) == pytest.approx(2 * dot(0.4, 0.4, 0.4))  # both begin with "so"
    after_so = (0.55, 0.03, 0.03)
    pair = dot(0.55, 0.55, *after_so) + dot(0.55, 0.03, *after_so)
    assert float(scores[1, 1]) == pytest.approx(pair)
    repaired, kept = group.facts["repaired"], group.facts["kept_mask"]
    assert repaired.tolist() == [False, True, False, False]
    changed = [(i, group.texts[i][t]) for i, t in (group.mask & ~kept).nonzero().tolist()]
    assert changed == [(1, "#75"), (3, "#84")]


def test_the_picture_of_the_readme_has_the_numbers_of_losses():
    text = (Path(tree.__file__).parent / "tree.svg").read_text().replace("−", "-")
    words = [element.text for element in ElementTree.fromstring(text).iter() if element.text]
    numbers = [word for word in words if re.fullmatch(r"[+-]?0\.\d{3}", word)]
    expected = []
    for name in ("reinforce", "grpo"):
        group, _, c, _, _ = fresh(f"method={name}")
        for rows in ((0, 1, 2, 3), (0, 1)):  # at "so" and "7+8=15"; the credit of both is 0
            pushes = c[rows, 0 if len(rows) == 4 else 1]
            expected += [*pushes.tolist(), float(pushes.sum()), 0.0, float(pushes.sum())]
        for i, T in enumerate(map(len, group.texts)):
            expected += c[i, 2 - (i > 1) : T].tolist()
    assert [float(x) for x in numbers] == pytest.approx(expected, abs=5.01e-4)
    ends = re.findall(r"A = (\S+), T = (\d)", text)
    assert ends == [("+0.866", "4"), ("-0.866", "6"), ("+0.866", "3"), ("-0.866", "5")] * 2


# ---------------- a run


@pytest.fixture
def run(tmp_path):
    """A run folder with two saved batches. The newer has five groups of three answers: one with
    equal rewards, one that shares nothing, three in which 2, 4 and 3 tokens are contested."""
    shared, rows = (3, 0, 2, 4, 3), []
    for n in shared:
        rows += [[*range(10, 10 + n), *range(90 + i, 102 + i - n)] for i in (0, 20, 40)]
    rows[10][4] = rows[9][4]  # the first two answers of group 4 share one token more
    rewards = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 0, 0], [1, 0.5, 0], [1, 0, 0]]).flatten()
    tokens, g = torch.tensor(rows), torch.Generator().manual_seed(0)
    old = -torch.rand(tokens.shape, generator=g)
    saved = {
        "step": 40,
        "max_tokens": 20,
        "group_size": 3,
        "prompts": ["equal", "apart", "two", NASTY, "three"],
        "tokens": tokens,
        "pieces": [[NASTY if t == 10 else f"t{t}" for t in row] for row in rows],
        "mask": torch.arange(12).expand(tokens.shape) < torch.tensor([[12], [12], [11]] * 5),
        "rewards": rewards,
        "logp_old": old,
        "logp": old + 0.05 * torch.randn(tokens.shape, generator=g),
    }
    (tmp_path / "batches").mkdir()
    torch.save(saved, tmp_path / "batches" / "step-000040.pt")
    torch.save({}, tmp_path / "batches" / "step-000020.pt")
    hyper = ["eps_low=0.02", "eps_high=0.03"]
    flags = {"method": "gspo", "hyper": hyper, "project": False}
    (tmp_path / "config.json").write_text(json.dumps({"config": flags}))
    return tmp_path


def test_a_run_shows_its_most_contested_groups_before_and_after_the_step(run, capsys):
    tree.main([str(run)])
    data = unpack((run / "tree.html").read_text())
    assert [key[3:] for key in data["scenes"]] == [NASTY[:24], "three", "two"]
    assert data["start"]["method"] == "gspo" and "nthr" not in data["losses"]
    scene = json.loads(data["scenes"]["3: two"])
    saved = torch.load(run / "batches" / "step-000040.pt")
    assert [len(text) for text in scene["texts"]] == [2 + tree.OWN] * 3  # the rest is left out
    assert scene["lengths"] == [12, 12, 11] and scene["texts"][1][2] == "t110"
    old, mask = saved["logp_old"][6:9].double(), saved["mask"][6:9]
    A = group_advantages(torch.tensor([1.0, 0, 0]).double(), 3)
    for state, key in enumerate(("logp_old", "logp")):
        logp = saved[key][6:9].double().requires_grad_()
        batch = Batch(logp, old, A[:, None].expand(mask.shape), mask, 3, max_tokens=20)
        c = token_coefficients(losses.gspo(batch, 0.02, 0.03), logp)[:, :10].flatten()
        assert scene["losses"]["gspo/off"]["c"][state] == pytest.approx(c.tolist(), rel=1e-4)


def test_what_is_no_run_is_refused_in_one_line(run):
    path = run / "batches" / "step-000040.pt"
    equal = torch.load(path) | {"rewards": torch.ones(15)}
    for write, what in (
        (lambda: torch.save(equal, path), "no group in which"),
        (lambda: torch.save({}, path), "is not as train.py writes it"),
        (lambda: path.write_text("nothing"), "is not as train.py writes it"),
        (lambda: shutil.rmtree(run / "batches"), "a run folder of train.py is expected"),
    ):
        write()
        assert what in refused(tree.main, [str(run)])


# ---------------- in a browser

# Appended to a page: it goes through settings, and leaves what a person sees of each in the title.
WALK = """<script type="module">
  while (document.body.dataset.ready === undefined) await new Promise((r) => setTimeout(r, 5));
  const number = (x) => Number(x.textContent.replaceAll("−", "-").replace("–", "NaN"));
  const all = (where, what) => [...where.querySelectorAll(what)];
  const seen = [];
  for (const setting of SETTINGS) {
    location.hash = setting + "&k=" + seen.length;
    await new Promise((r) => addEventListener("hashchange", r, { once: true }));
    seen.push({
      cards: all(document, ".card").map((card) => ({
        node: card.dataset.node,
        pushes: all(card, "button.line output").map(number),
        totals: all(card, "div.line output").map(number),
      })),
      chips: all(document, ".chip output").map(number),
      meter: number(document.querySelector("#meter")),
      title: document.title,
      texts: all(document, ".card .text, .chip .text, .prompt").map((x) => x.textContent),
    });
  }
  const holder = document.createElement("pre");
  holder.textContent = JSON.stringify(seen);
  document.body.replaceChildren(holder);
</script>"""


def see(page: str, settings: list[str], folder: Path) -> list[dict]:
    if not CHROMIUM:
        pytest.skip("no chromium here; Debian's package is called chromium")
    file = folder / "page.html"
    file.write_text(page + WALK.replace("SETTINGS", json.dumps(settings)))
    flags = "--headless --no-sandbox --disable-gpu --virtual-time-budget=60000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    text = ElementTree.fromstring(re.search("<pre>.*</pre>", done.stdout, re.DOTALL)[0]).text
    return json.loads(text)


def test_a_browser_shows_these_numbers_for_every_preset(page, tmp_path):
    for setting, seen in zip(PRESETS, see(page, PRESETS, tmp_path), strict=True):
        group, _, c, A, _ = fresh(setting)
        nodes = losses.prefix_nodes(group.tokens, group.mask, 4)
        tax = losses.learning_tax(c, A, nodes, group.mask)
        assert seen["meter"] == pytest.approx(tax, abs=6e-4)
        alone = [c[nodes == node].tolist() for node in nodes[group.mask]]
        assert seen["chips"] == pytest.approx(sum([x for x in alone if len(x) == 1], []), abs=6e-4)
        assert seen["cards"]
        for card in seen["cards"]:
            i, t = map(int, card["node"].split("."))
            rows = (nodes[:, t] == nodes[i, t]) & group.mask[:, t]
            assert card["pushes"] == pytest.approx(c[rows, t].tolist(), abs=6e-4)
            used = rows & (A != 0)
            w = c[used, t] / A[used]
            total = float(c[rows, t].sum())
            credit = float(w.mean() * A[used].sum()) if len(w) else 0.0
            assert card["totals"] == pytest.approx([total, credit, total - credit], abs=6e-4)


def test_texts_of_a_model_are_shown_and_not_run(run, tmp_path):
    settings = ["look=0.0", "policy=after it&method=grpo&look=0.1", "method=<b>"]
    for view in see(tree.run_page(run), settings, tmp_path):
        assert view["texts"].count(NASTY) == 2 and view["title"].startswith("What does")
