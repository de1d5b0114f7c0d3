"""toy/tree.py: the page holds the numbers of losses.py, and shows them in a browser."""

import base64
import json
import math
import random
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import refused
from helpers import run as train_in

import losses
from losses import METHODS, Batch, OldPolicy, group_advantages, token_coefficients
from toy import tree

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FOLDER = Path(tree.__file__).parent
LINKS = re.findall(r'<a href="#([^"]+)">', (FOLDER / "tree_page.html").read_text())
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
    method, loss_fn = LOSSES[chosen["method"]]
    group = tree.toy_group(chosen["lengths"], chosen["won"])
    logp = group.old.clone()
    for i, text in enumerate(group.texts):
        for t in range(len(text)):
            alone = sum(other[: t + 1] == text[: t + 1] for other in group.texts) == 1
            own = tree.FACTOR[i] ** tree.SPREAD[chosen["spread"]] if alone else 1.0
            logp[i, t] += math.log(float(chosen["moved"]) * own)
    rewards = torch.tensor([float(digit) for digit in chosen["won"]]).double()
    A = group_advantages(rewards, 4, method.scale)
    adv = A[:, None].expand_as(group.old)
    if method.credit:
        old = OldPolicy(group.tokens, group.mask, group.old, rewards, 4)
        adv = method.credit(adv, old)
    batch = Batch(logp.requires_grad_(), group.old, adv, group.mask, group_size=4, max_tokens=6)
    loss = loss_fn(batch)
    if chosen["project"] == "on":
        nodes = losses.prefix_nodes(group.tokens, group.mask, 4)
        loss = losses.project(loss, logp, A, nodes, group.mask)
    return group, logp.detach(), token_coefficients(loss, logp), A, adv


def test_the_page_holds_what_losses_say_of_each_policy_alone(page):
    data, rng = unpack(page), random.Random(0)
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", page)  # it needs no network
    without = {*METHODS} - {name.partition(" pass ")[0] for name in LOSSES}
    assert without == {"nthr", "nthr-random", "ibpo"}
    settings = [
        f"method={method}&project={rng.choice(['off', 'on'])}&lengths={rng.choice([*tree.ANSWERS])}"
        f"&won={rng.randrange(16):04b}&moved={rng.choice(tree.MOVED)}"
        f"&spread={rng.choice([*tree.SPREAD])}"
        for method in [*LOSSES] * 2
    ]
    for setting in PRESETS + settings:
        chosen = choose(setting)
        group, logp, c, A, adv = fresh(setting)
        scene = json.loads(data["scenes"][f"{chosen['lengths']}/{chosen['won']}"])
        loss = scene["losses"][f"{chosen['method']}/{chosen['project']}"]
        state = data["states"].index(f"{chosen['moved']}/{chosen['spread']}")
        credit = LOSSES[chosen["method"]][0].credit
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


def test_why_w_is_what_it_is_also_for_a_method_of_ones_own_with_a_narrow_clip(monkeypatch):
    def mine(batch, eps_low=3e-4, eps_high=4e-4):
        return losses.gspo(replace(batch, adv=2 * batch.adv), eps_low, eps_high)

    monkeypatch.setitem(METHODS, "mine", losses.Method((mine,)))
    choices = tree.toy_losses()
    for name, *fraction in (
        ("reinforce", "1", "L", ""),
        ("grpo", "r", "T", "0 if clipped"),
        ("dapo", "r", "mean T", "0 if clipped"),
        ("gspo", "s", "T", "0 if clipped"),
        ("dfpo-min", "min s", "L", ""),
        ("lopti pass 1", "r", "mean T", "0 if clipped or left out"),
        ("advantage-reweighting",),  # it has a factor of its own
    ):
        assert tree.explain_weight(*choices[name]) == (fraction or None)
    group = tree.toy_group("equal", "1010")
    A, adv = tree.advantages(group, METHODS["mine"])
    c = [tree.coefficients(group, choices[name][1], A, adv)[0] for name in ("mine", "gspo")]
    torch.testing.assert_close(c[0], 2 * c[1])
    assert (c[0][9] != 0)[group.mask].all()  # shared tokens moved by 1.1: nothing is clipped


def numbers_of(setting: str) -> list[float]:
    """What is drawn: at "so" and "7+8=15" the pushes, their sum, its credit and its tax; then the
    other tokens."""
    group, _, c, A, _ = fresh(setting)
    numbers = []
    for t, rows in enumerate(((0, 1, 2, 3), (0, 1))):
        total = float(c[rows, t].sum())
        credit = float((c[rows, t] / A[[*rows]]).mean() * A[[*rows]].sum())
        numbers += [*c[rows, t].tolist(), total, credit, total - credit]
    for i, T in enumerate(map(len, group.texts)):
        numbers += c[i, 2 - (i > 1) : T].tolist()
    return numbers


def test_the_picture_of_the_readme_has_the_numbers_of_losses():
    text = (FOLDER / "tree.svg").read_text().replace("−", "-")
    numbers = [float(x) for x in re.findall(r">([+-]?0\.\d{3})<", text)]
    expected = numbers_of("method=reinforce") + numbers_of("method=grpo")
    assert numbers == pytest.approx(expected, abs=5.01e-4)


# ---------------- a run


@pytest.fixture
def run(tmp_path):
    """A run of gspo, in whose newest batch 3, 2, 4 and 3 tokens are shared by a group. The first
    group has equal rewards."""
    hyper = "--method gspo --hyper eps_low=0.02 eps_high=0.03".split()
    folder = train_in(tmp_path / "run", *hyper, "--steps", 2)
    (path,) = folder.glob("batches/*2.pt")
    saved, gen = torch.load(path), torch.Generator().manual_seed(0)
    tokens = torch.arange(100, 244).view(12, 12)
    for k, n in enumerate((3, 2, 4, 3)):
        tokens[3 * k : 3 * k + 3, :n] = torch.arange(n)
    saved["pieces"] = [[NASTY if t == 0 else f"t{t}" for t in row] for row in tokens.tolist()]
    saved["tokens"], saved["mask"] = tokens, torch.arange(12) < torch.tensor([[11]] * 9 + [[5]] * 3)
    saved["rewards"] = torch.tensor([1.0, 1, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0])
    saved["logp_old"] = -torch.rand(tokens.shape, generator=gen)
    saved["logp"] = saved["logp_old"] + 0.05 * torch.randn(tokens.shape, generator=gen)
    saved["prompts"] = ["equal", "two", NASTY, "three"]
    torch.save(saved, path)
    return folder


def test_a_run_shows_its_most_contested_groups_before_and_after_the_step(run):
    tree.main([str(run)])
    data = unpack((run / "tree.html").read_text())
    assert [key[3:] for key in data["scenes"]] == [NASTY[:24], "three", "two"]
    assert data["start"]["method"] == "gspo" and "nthr" not in data["losses"]
    scene = json.loads(data["scenes"]["3: two"])
    (path,) = run.glob("batches/*2.pt")
    saved = {key: torch.load(path)[key][3:6] for key in ("logp_old", "logp", "mask")}
    assert [len(text) for text in scene["texts"]] == [2 + tree.OWN] * 3  # the rest is left out
    assert scene["lengths"] == [11] * 3 and scene["texts"][1][2] == "t150"
    A = group_advantages(torch.tensor([1.0, 0, 0]).double(), 3)
    for state, key in enumerate(("logp_old", "logp")):
        logp, old = saved[key].double().requires_grad_(), saved["logp_old"].double()
        batch = Batch(logp, old, A[:, None].expand(3, 12), saved["mask"], 3, max_tokens=12)
        c = token_coefficients(losses.gspo(batch, 0.02, 0.03), logp)[:, :10].flatten()
        assert scene["losses"]["gspo/off"]["c"][state] == pytest.approx(c.tolist(), rel=1e-4)


def test_a_run_opens_on_the_group_with_the_largest_learning_tax(run):
    (path,) = run.glob("batches/*2.pt")
    saved = torch.load(path)
    saved["mask"][3, 6:] = False  # an answer of the least contested group is shorter now
    torch.save(saved, path)
    data = unpack(tree.run_page(run))
    assert [key[3:] for key in data["scenes"]] == ["two", NASTY[:24], "three"]
    assert data["start"]["group"] == "1: two" and "step 2" in data["lead"]


def test_what_is_no_run_is_refused_in_one_line(run):
    (path,) = run.glob("batches/*2.pt")
    equal = torch.load(path) | {"rewards": torch.ones(12)}
    for write, what in (
        (lambda: torch.save(equal, path), "no group in which"),
        (lambda: path.write_text("nothing"), "is not as train.py writes it"),
        (lambda: shutil.rmtree(run / "batches"), "a run folder of train.py is expected"),
    ):
        write()
        assert what in refused(tree.main, [str(run)])


@pytest.mark.skipif(not CHROMIUM, reason="no chromium here; Debian's package is called chromium")
def test_a_browser_shows_these_numbers_and_runs_no_text_of_a_model(page, run, tmp_path):
    shown = []
    for text, setting in ((page, "method=grpo&won=1110"), (tree.run_page(run), "")):
        (tmp_path / "page.html").write_text(text)
        address = (tmp_path / "page.html").as_uri() + "#" + setting
        flags = "--headless --no-sandbox --disable-gpu --virtual-time-budget=9000 --dump-dom"
        command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        shown.append(done.stdout.replace("−", "-"))
    drawn = shown[0].partition('id="tree"')[2].partition('id="panel"')[0]
    numbers = [float(x) for x in re.findall(r"<output[^>]*>([^<]+)<", drawn)]
    assert numbers == pytest.approx(numbers_of("method=grpo&won=1110"), abs=6e-4)
    assert "&lt;script&gt;" in shown[1] and ">hacked<" not in shown[1]
