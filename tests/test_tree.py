"""toy/tree.py: in a real browser the page shows the numbers of losses.py, to eyes and keyboard."""

import itertools
import json
import math
import os
import random
import re
import select
import shutil
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import losses
from losses import METHODS, Batch, group_advantages, learning_tax, token_coefficients
from toy import tree

LONG = bool(os.environ.get("LONG"))

ROOT = Path(tree.__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars"
FLAGS += " --disable-background-networking --disable-component-update --disable-sync"
LINKS = re.findall(r'<a href="#([^"]+)">', (ROOT / "toy" / "tree_page.html").read_text())
PRESETS = [link.replace("&amp;", "&").replace("+", " ") for link in LINKS]
START = "method=reinforce&project=off&lengths=unequal&won=1010&moved=1&spread=none"
NASTY = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"

# What a person sees: of every card the numbers of its lines, of every chip its push, and the rest.
SEEN = """(() => {
  const number = (element) => Number(element.textContent.replaceAll("−", "-"));
  const all = (where, what) => [...where.querySelectorAll(what)];
  return {
    cards: Object.fromEntries(all(document, ".card").map((card) => [card.dataset.node, {
      pushes: all(card, "button.line output").map(number),
      totals: all(card, "div.line output").map(number),
      formula: card.querySelector(".formula b").textContent.replaceAll("−", "-"),
      word: card.querySelector(".verdict").textContent,
    }])),
    chips: Object.fromEntries(all(document, ".chip").map((chip) =>
      [chip.dataset.key, number(chip.querySelector("output"))])),
    leaves: Object.fromEntries(all(document, ".leaf").map((leaf) => [leaf.dataset.key,
      all(leaf, "span").map((line) => Number(line.textContent.replace("−", "-").slice(4)))])),
    meter: number(document.querySelector("#meter")),
    say: document.querySelector("#say").textContent,
    preset: all(document, "#presets a[aria-current]").map((link) => link.firstChild.data),
    heading: all(document, "#presets div:has([aria-current]) small").map((x) => x.textContent),
    detail: all(document, "#detail dd").map(number),
    code: all(document, "#detail pre").map((line) => line.textContent),
  };
})()"""
# Boxes that lie over each other, stick out of the page or do not hold their text.
FAULTS = """((width) => {
  const found = [];
  const sticky = getComputedStyle(document.querySelector("#detail")).position === "sticky";
  const scrolls = getComputedStyle(document.querySelector("#tree")).overflowX === "auto";
  const boxes = [...document.querySelectorAll(
    "h1, #lead, #say, #presets a, #presets small, #controls > *, .card, .chip, .leaf, .prompt"
    + ", #words div" + (sticky ? "" : ", #detail"))];
  const rects = boxes.map((box) => box.getBoundingClientRect());
  boxes.forEach((box, i) => {
    const a = rects[i];
    const wide = box.scrollWidth > box.clientWidth + 1;
    const high = box.scrollHeight > box.clientHeight + 1 && !box.matches(".prompt");
    if (box.clientWidth && (wide || high)) found.push("text sticks out: " + box.textContent);
    const may = box.closest(scrolls ? "#presets, #tree" : "#presets");
    if (a.right > width + 1 && !may) found.push("outside the page: " + box.textContent);
    rects.slice(i + 1).forEach((b, j) => {
      const apart = a.left > b.right - 1 || b.left > a.right - 1
        || a.top > b.bottom - 1 || b.top > a.bottom - 1;
      if (!apart) found.push(box.textContent + " over " + boxes[i + 1 + j].textContent);
    });
  });
  if (document.documentElement.scrollWidth > width) found.push("the page scrolls sideways");
  return found;
})"""


class Browser:
    """A headless Chromium, driven by DevTools messages over two pipes."""

    def __init__(self, profile: Path):
        self.answers, their_end = os.pipe()
        their_start, self.calls = os.pipe()
        command = f'exec "$@" 3<&{their_start} 4>&{their_end}'
        options = ["--remote-debugging-pipe", f"--user-data-dir={profile}", *FLAGS.split()]
        self.process = subprocess.Popen(
            ["bash", "-c", command, "bash", CHROMIUM, *options],
            pass_fds=(their_start, their_end),
            stderr=subprocess.DEVNULL,
        )
        os.close(their_start)
        os.close(their_end)
        self.buffer, self.count, self.errors, self.session = b"", 0, [], {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params} | self.session
        os.write(self.calls, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                assert select.select([self.answers], [], [], 30)[0], f"no answer to {method}"
                self.buffer += os.read(self.answers, 1 << 20)
            text, _, self.buffer = self.buffer.partition(b"\0")
            answer = json.loads(text)
            event = answer.get("method")
            if event == "Runtime.exceptionThrown" or event == "Log.entryAdded":
                self.errors.append(answer["params"])
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script: str):
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, page: Path, setting: str = "", width: int = 1280):
        size = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{page.as_uri()}#{setting}")
        for _ in range(500):
            if self.run("document.body?.dataset.ready") == "":
                return
            time.sleep(0.01)
        raise AssertionError(f"the page is never ready: {self.errors}")

    def go(self, setting: str):
        """Another setting, as a link has it."""
        self.run(f"location.hash = {json.dumps(setting)}; new Promise(requestAnimationFrame)")

    def press(self, key: str):
        text = {"Enter": "\r", " ": " "}.get(key, "")
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
        event = dict(key=key, code=key, windowsVirtualKeyCode=codes[key], text=text)
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no chromium here; Debian's package is called chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.call("Browser.close")
    browser.process.wait(10)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page as a user gets it, written in less than 5 s (beyond what `import torch` takes)."""
    path = tmp_path_factory.mktemp("page") / "tree.html"
    start = time.process_time()
    tree.main(["--out", str(path)])
    # 5 s is the promise; where other programs share the cores, a second of work is longer.
    assert time.process_time() - start < (5 if LONG else 15)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with two groups of its own making, with texts that want to be HTML."""
    folder = tmp_path_factory.mktemp("run")
    config = {"method": "gspo", "hyper": ["eps_low=0.1", "eps_high=0.1"], "project": False}
    (folder / "config.json").write_text(json.dumps({"config": config}))
    lines = []
    for step in (20, 40):
        answers = []
        for i, ids in enumerate([(5, 6, 7, 8, 1), (5, 6, 7, 9, 9, 1), (5, 6, 1), (5, 6, 1)]):
            answer = {"ids": ids, "tokens": [f"t{k}" for k in ids], "reward": float(i % 2)}
            answer["logp_old"] = [-0.5 - 0.1 * k for k in ids]
            answer["logp"] = [-0.4 - 0.1 * k - 0.3 * (k > 7) for k in ids]
            answers.append(answer | {"text": "", "advantage": 0.0})
        answers[0]["tokens"][3] = NASTY
        for answer in answers:
            answer["tokens"][0] = NASTY
        line = {"step": step, "prompt": NASTY, "method": "gspo", "max_tokens": 8}
        lines.append(json.dumps(line | {"answers": answers}))
    (folder / "groups.jsonl").write_text("\n".join(lines))
    return folder


def visitors(group: tree.Group, i: int, t: int) -> list[int]:
    """The answers that agree with answer i up to and including its token t, by their texts."""
    prefix = group.texts[i][: t + 1]
    return [j for j, text in enumerate(group.texts) if text[: t + 1] == prefix]


def fresh(setting: str) -> dict:
    """What losses.py says about a setting: one group, one policy, sums by hand over equal texts."""
    chosen = dict(pair.split("=") for pair in f"{START}&{setting}".split("&") if pair)
    group = tree.toy_group(chosen["lengths"], chosen["won"])
    places = [(i, t) for i, text in enumerate(group.texts) for t in range(len(text))]
    logp = group.old.clone()
    for i, t in places:
        alone = len(visitors(group, i, t)) == 1
        own = tree.FACTOR[i] ** tree.SPREAD[chosen["spread"]] if alone else 1.0
        logp[i, t] += math.log(float(chosen["moved"]) * own)
    c, A, adv = coefficients(group, logp.requires_grad_(), chosen)
    nodes = losses.prefix_nodes(group.tokens, group.mask, tree.G)
    seen = {"cards": {}, "chips": {}, "meter": learning_tax(c, A, nodes, group.mask)}
    look = tuple(map(int, chosen.get("look", "0.0").split(".")))
    ratio = (logp - group.old).exp().detach()
    sizes = [len(text) for text in group.texts]
    s = [math.prod(row[:size]) ** (1 / size) for row, size in zip(ratio, sizes, strict=True)]
    by_answer = chosen["method"] in ("gspo", "dfpo-min", "dfpo-orthogonal")
    credited = METHODS[chosen["method"].split(" pass ")[0]].credit
    facts = [group.old.exp()[look], ratio[look], *[s[look[0]]] * by_answer, A[look[0]]]
    facts += [*[adv[look]] * bool(credited), c[look] / A[look[0]], c[look]]
    seen["detail"] = [float(fact.nan_to_num()) for fact in facts]
    seen["leaves"] = {f"leaf {i}": [float(A[i]), *[float(s[i])] * by_answer] for i in range(tree.G)}
    for i, t in places:
        rows = visitors(group, i, t)
        if len(rows) == 1:
            seen["chips"][f"{i}.{t}"] = float(c[i, t])
        elif rows[0] == i:
            seen["cards"][f"{i}.{t}"] = card(c[rows, t].tolist(), A[rows].tolist())
    return seen


def coefficients(group: tree.Group, logp: torch.Tensor, chosen: dict) -> tuple:
    """c (G, T), A (G,) and the advantages after the credit rule (G, T), for one policy."""
    name, _, number = chosen["method"].partition(" pass ")
    method = METHODS[name]
    rewards = torch.tensor([float(digit) for digit in chosen["won"]]).double()
    shaped = method.repair(rewards, group.facts.repaired) if method.repair else rewards
    A = group_advantages(shaped, tree.G, method.scale)
    adv = A[:, None].expand_as(group.old)
    if method.credit:
        gen = torch.Generator().manual_seed(0)
        adv = method.credit(adv, replace(group.facts, rewards=rewards, gen=gen))
    batch = Batch(logp, group.old, adv, group.mask, tree.G, tree.L)
    loss = method.passes[int(number or 1) - 1](batch, **tree.HYPER.get(name, {}))
    if chosen["project"] == "on":
        nodes = losses.prefix_nodes(group.tokens, group.mask, tree.G)
        loss = losses.project(loss, logp, A, nodes, group.mask)
    return token_coefficients(loss, logp), A, adv


def card(pushes: list[float], A: list[float]) -> dict:
    used = [(c / a, a) for c, a in zip(pushes, A, strict=True) if a]
    mean = sum(w for w, _ in used) / len(used) if used else 0.0
    credit = mean * sum(a for _, a in used)
    tax = sum((w - mean) * a for w, a in used)
    formula = [mean, sum(a for _, a in used), tax]
    return {"pushes": pushes, "totals": [sum(pushes), credit, tax], "formula": formula}


def assert_shown(seen: dict, expected: dict):
    def near(shown, exact):
        assert shown == pytest.approx(exact, abs=5.01e-4)

    assert seen["cards"].keys() == expected["cards"].keys()
    near(seen["chips"], expected["chips"])
    near(seen["meter"], expected["meter"])
    near(seen["detail"], expected["detail"])
    assert seen["leaves"].keys() == expected["leaves"].keys()
    for leaf, numbers in expected["leaves"].items():
        near(seen["leaves"][leaf], numbers)
    for node, wanted in expected["cards"].items():
        shown = seen["cards"][node]
        near(shown["pushes"], wanted["pushes"])
        near(shown["totals"], wanted["totals"])
        near([float(x) for x in re.findall(r"-?\d+\.\d+", shown["formula"])], wanted["formula"])
        total, credit, tax = (abs(x) > 1e-9 for x in wanted["totals"])
        words = "cancels", "credit only", "tax only", "credit and tax"
        word = words[credit + 2 * tax] if any(wanted["pushes"]) else "no gradient"
        assert shown["word"] == word and total <= (credit or tax)


# ---------------- what is computed


def test_every_setting_of_the_toy_is_a_policy_that_exists():
    for lengths, won in itertools.product(tree.ANSWERS, ("1010", "0001")):
        group = tree.toy_group(lengths, won)
        assert len({len(text) for text in group.texts}) == {"equal": 1, "unequal": 4}[lengths]
        for logp in group.logp:
            after = {}  # history -> {token: probability}
            for text, row in zip(group.texts, logp.exp().tolist(), strict=True):
                for t, token in enumerate(text):
                    after.setdefault(tuple(text[:t]), {})[token] = row[t]
            assert all(sum(children.values()) < 1 for children in after.values())


def test_s_is_shown_where_a_token_feels_the_ratios_of_its_whole_answer():
    group = tree.toy_group("equal", "1010")
    moved = group.old.clone()
    moved[1, -1] -= 0.05
    group.logp = torch.stack([group.old, moved])
    for loss in tree.all_losses(tree.HYPER, model=True):
        c, _ = tree.coefficients(group, loss.function, *tree.advantages(group, loss.method))
        shown = tree.sequence_ratios(group, loss.function) is not None
        assert shown == bool((c[0, :, 0] - c[1, :, 0]).abs().max() > 1e-9), loss.name
    product = partial(losses.dfpo_min, ratio="product")
    assert tree.sequence_ratios(group, product)[1, 1] == pytest.approx(math.exp(-0.05))


def test_a_run_is_shown_before_and_after_its_step_with_its_own_hyperparameters(run):
    config, groups = tree.run_groups(run)
    group = list(groups.values())[1]
    loss = next(
        loss
        for loss in tree.all_losses({"gspo": {"eps_low": 0.1, "eps_high": 0.1}}, False)
        if loss.name == "gspo"
    )
    A, adv = tree.advantages(group, loss.method)
    both = tree.coefficients(group, loss.function, A, adv)
    for state, logp in enumerate((group.old, group.logp[1])):
        logp = logp.clone().requires_grad_()
        value = losses.gspo(
            Batch(logp, group.old, adv, group.mask, 4, 8), eps_low=0.1, eps_high=0.1
        )
        assert torch.allclose(both[0][state], token_coefficients(value, logp))
        value = losses.project(value, logp, A, group.nodes, group.mask)
        assert torch.allclose(both[1][state], token_coefficients(value, logp))
    assert (group.logp[0] == group.old).all() and (group.logp[1] != group.old).any()


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda run: (run / "config.json").unlink(), "No such file or directory; a run directory"),
        (lambda run: (run / "groups.jsonl").unlink(), "No such file or directory; a run directory"),
        (lambda run: (run / "groups.jsonl").write_text(""), "no group in which answers of"),
        (lambda run: (run / "groups.jsonl").write_text('{"step": 1}'), "line 1 is not as train.py"),
        (lambda run: (run / "groups.jsonl").write_text("{"), "line 1 is not as train.py"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(run, tmp_path, capsys, damage, said):
    folder = shutil.copytree(run, tmp_path / "run")
    damage(folder)
    with pytest.raises(SystemExit) as end:
        tree.main([str(folder)])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and said in error


def test_the_picture_is_svg_and_says_so(capsys):
    with pytest.raises(SystemExit):
        tree.main(["--svg", "x.png"])
    assert capsys.readouterr().err == "error: --svg x.png: a name that ends in .svg is expected\n"


def test_the_picture_of_the_readme_is_the_one_that_the_command_writes(tmp_path):
    tree.main(["--svg", str(tmp_path / "tree.svg")])
    text = (tmp_path / "tree.svg").read_text()
    assert text == (ROOT / "toy" / "tree.svg").read_text() and len(text) < 60_000
    words = [element.text for element in ElementTree.fromstring(text).iter() if element.text]
    sums = [words[k + 1] for k, word in enumerate(words) if word == "sum"]
    expected = [fresh(f"method={name}")["cards"] for name in ("reinforce", "grpo")]
    assert sums == [
        tree.signed(cards[node]["totals"][0]) for cards in expected for node in ("0.0", "0.1")
    ]


# ---------------- what is seen


def test_the_page_is_one_small_file_that_asks_for_nothing(page):
    text = page.read_text()
    assert len(text.encode()) < 400_000
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|XMLHttp|<link", text)


def test_the_page_shows_what_losses_py_says_now(browser, page):
    browser.open(page)
    assert_shown(browser.run(SEEN), fresh(""))
    rng = random.Random(0)
    methods = browser.run("[...document.querySelectorAll('option')].map((o) => o.value)")
    assert {method.split(" pass ")[0] for method in methods} == set(METHODS)
    for setting in PRESETS + [
        f"method={method}&project={rng.choice(tree.PROJECTION)}&lengths={rng.choice(list(tree.ANSWERS))}"
        f"&won={rng.randrange(16):04b}&moved={rng.choice(tree.MOVED)}&spread={rng.choice(list(tree.SPREAD))}"
        for method in methods * 2
    ]:
        browser.go(setting)
        seen = browser.run(SEEN)
        assert_shown(seen, fresh(setting))
        assert len(seen["preset"]) == (setting in PRESETS) or setting not in PRESETS
    assert not browser.errors


def test_each_preset_shows_what_its_sentence_says(browser, page):
    browser.open(page)
    shown = {}
    for k in range(len(PRESETS)):
        click = f"document.querySelectorAll('#presets a')[{k}].click();"
        browser.run(click + "new Promise(requestAnimationFrame)")
        seen = browser.run(SEEN)
        assert seen["say"].endswith((".", "below.")) and len(seen["preset"]) == 1
        shown[seen["preset"][0]] = {
            node: card["word"] for node, card in seen["cards"].items()
        } | seen
    words = {name: (seen["0.0"], seen["0.1"]) for name, seen in shown.items()}
    assert words == {
        "REINFORCE": ("cancels", "cancels"),
        "Credit": ("cancels", "credit only"),
        "Equal lengths": ("cancels", "cancels"),
        "Unequal lengths": ("tax only", "tax only"),
        "Above the clip range": ("tax only", "tax only"),
        "GSPO": ("tax only", "tax only"),
        "One divisor": ("cancels", "cancels"),
        "Clip without min": ("no gradient", "no gradient"),
        "CISPO": ("cancels", "cancels"),
        "Min-Replace": ("cancels", "cancels"),
        "Adv-Orthogonal": ("cancels", "tax only"),
        "Projection": ("cancels", "credit only"),
        "NTHR": ("tax only", "cancels"),
        "Lopti": ("cancels", "no gradient"),
        "IBPO": ("tax only", "credit and tax"),
    }
    at_so = {heading: set() for seen in shown.values() for heading in seen["heading"]}
    for seen in shown.values():
        at_so[seen["heading"][0]].add(seen["0.0"])
    assert list(at_so) == ["Cancels", "Three things break it", "Repairs", "Related methods"]
    assert at_so["Cancels"] == {"cancels"} and at_so["Three things break it"] == {"tax only"}
    assert at_so["Repairs"] == {"cancels", "no gradient"}
    assert "return w.detach().amin(1" in shown["Min-Replace"]["code"][-1]
    assert "return w - projection * adv" in shown["Adv-Orthogonal"]["code"][-1]
    pushes = {name: seen["cards"]["0.0"]["pushes"] for name, seen in shown.items()}
    assert [x != 0 for x in pushes["Above the clip range"]] == [False, True, False, True]
    assert pushes["NTHR"][1] == pushes["NTHR"][3] == 0 and shown["IBPO"]["chips"]["1.3"] < 0
    assert [shown["IBPO"]["chips"][key] for key in ("1.2", "1.4")] == [0, 0]
    browser.go("method=ibpo&lengths=equal&look=1.1&won=0000")
    chips = browser.run(SEEN)["chips"]
    assert chips["1.3"] == 0 and chips["1.2"] > 0 and chips["1.4"] > 0


def test_texts_of_a_model_are_shown_and_not_run(browser, run):
    tree.main([str(run)])
    for policy in ("before the step", "after it"):
        browser.open(run / "tree.html", f"policy={policy}&look=0.0")
        where = ".card .text, .chip .text, .prompt, #detail code"
        texts = browser.run(f"[...document.querySelectorAll('{where}')].map((x) => x.textContent)")
        assert texts.count(NASTY) == 4 and browser.run("document.title").startswith("What does")
        assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelectorAll('.leaf').length") == 4
    assert "2 of the 2 groups" in browser.run("document.querySelector('#lead').textContent")
    browser.go("look=0.1")  # the second token of a card that holds two
    assert "0.1" in browser.run(SEEN)["cards"] and not browser.errors


# ---------------- by keyboard, by link, on paper, in time

ACTIVE = """(() => {
  const a = document.activeElement;
  return a.dataset.key ?? a.id + (a.name ?? "") + (a.hash ? "preset" : "");
})()"""


def test_the_keyboard_reaches_every_control_and_token(browser, page):
    browser.open(page)
    stops = []
    while len(stops) < 60 and (not stops or stops[-1]):
        browser.press("Tab")
        stops.append(browser.run(ACTIVE))
    radios = ["project", "lengths", "moved", "spread"]
    assert stops[: len(PRESETS)] == ["preset"] * len(PRESETS)
    assert stops[len(PRESETS) :][:6] == ["method", *radios, "0.0"]
    assert {f"leaf {i}" for i in range(4)} <= set(stops)

    browser.run("document.querySelector('[data-key=\"0.0\"]').focus()")
    reached = ["0.0"]
    for _ in range(17):
        browser.press("ArrowRight")
        reached.append(browser.run(ACTIVE))
    tokens = browser.run(
        "[...document.querySelectorAll('.line[data-key], .chip')].map((x) => x.dataset.key)"
    )
    assert reached == tokens and len(set(tokens)) == 18
    browser.press("ArrowLeft")
    assert browser.run(ACTIVE) == tokens[-2] and f"look={tokens[-2]}" in browser.run(
        "location.hash"
    )

    browser.run("document.querySelector('[name=moved]:checked').focus()")
    browser.press("ArrowRight")
    assert "moved=1.1" in browser.run("location.hash") and browser.run(ACTIVE) == "moved"
    browser.run("document.querySelector('[data-key=\"leaf 1\"]').focus()")
    browser.press("Enter")
    assert "won=1110" in browser.run("location.hash") and browser.run(ACTIVE) == "leaf 1"
    browser.run("document.querySelectorAll('#presets a')[3].focus()")
    browser.press("Enter")
    browser.run("new Promise(requestAnimationFrame)")
    assert browser.run(SEEN)["preset"] == ["Unequal lengths"]
    browser.run("document.querySelector('#method').focus()")
    browser.press("ArrowDown")
    assert "method=grpo-symmetric" in browser.run("location.hash") and not browser.errors


def test_the_address_holds_the_state_and_nonsense_in_it_does_no_harm(browser, page):
    browser.open(page, "method=gspo&lengths=equal")
    browser.run("document.querySelector('[name=spread][value=wide]').click()")
    browser.run("document.querySelector('[data-key=\"leaf 0\"]').click()")
    browser.run("document.querySelector('[data-key=\"2.1\"]').click()")
    seen, address = browser.run(SEEN), browser.run("location.hash")
    browser.open(page, address[1:])
    assert browser.run(SEEN) == seen
    assert_shown(seen, fresh("method=gspo&lengths=equal&spread=wide&won=0010&look=2.1"))
    browser.open(page, "method=ppo&won=2222&look=9.9&lengths=&x=<b>")
    assert browser.run(SEEN)["preset"] == ["REINFORCE"] and not browser.errors
    browser.open(page, "look=0.__proto__")
    assert browser.run(SEEN)["preset"] == ["REINFORCE"] and not browser.errors


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overlaps_or_sticks_out(browser, page, run, width):
    browser.open(page, width=width)
    for setting in [*PRESETS, "method=nthr-random&won=0000", "won=1111&lengths=equal&method=ibpo"]:
        browser.go(setting)
        assert browser.run(f"{FAULTS}({width})") == [], setting
        assert browser.run("document.querySelector('#tree').scrollWidth") <= width
    tree.main([str(run)])
    browser.open(run / "tree.html", width=width)
    assert browser.run(f"{FAULTS}({width})") == []


def test_on_paper_there_are_no_controls_and_stripes_tell_the_sides_apart(browser, page):
    browser.open(page, "method=grpo")
    browser.call("Emulation.setEmulatedMedia", media="print")
    look = "getComputedStyle(document.querySelector('{}')).{}"
    assert browser.run(look.format("#controls", "display")) == "none"
    assert "method: grpo" in browser.run("document.querySelector('#setting').innerText")
    assert browser.run(look.format(".tree, body", "printColorAdjust")) == "exact"
    striped = [
        browser.run(look.format(f"#tree .{kind} .fill", "backgroundImage"))
        for kind in ("win", "lose", "credit", "tax")
    ]
    assert ["stripes" if "gradient" in image else image for image in striped] == [
        "none",
        "stripes",
        "none",
        "stripes",
    ]
    browser.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.skipif(not LONG, reason="wants a machine of its own: make test-faults")
def test_it_is_drawn_in_a_fifth_of_a_second_and_no_control_takes_50_ms(browser, page):
    script = "new MutationObserver(() => window.drawn ??= performance.now())"
    script += (
        ".observe(document, {subtree: true, attributes: true, attributeFilter: ['data-ready']})"
    )
    added = browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    times = []
    for _ in range(5):  # the best of five: this machine may be busy
        browser.open(page)
        times.append(
            browser.run("drawn - performance.getEntriesByType('navigation')[0].domInteractive")
        )
    browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
    assert min(times) < 200, times
    slowest = browser.run("""(async () => {
      const times = {};
      const all = (where) => [...document.querySelectorAll(where)];
      const clicks = all("#presets a, input").map((x) => () => x.click());
      for (const name of ["leaf 0", "leaf 3", "0.1", "3.3"])
        clicks.push(() => document.querySelector(`[data-key="${name}"]`).click());
      for (const { value } of all("option")) clicks.push(() => {
        document.querySelector("select").value = value;
        document.querySelector("select").onchange();
      });
      for (const [k, click] of clicks.entries()) for (let again = 0; again < 3; again++) {
        const start = performance.now();
        click();
        dispatchEvent(new Event("hashchange"));
        document.body.offsetHeight;
        times[k] = Math.min(times[k] ?? Infinity, performance.now() - start);
      }
      return Math.max(...Object.values(times));
    })()""")
    assert slowest < 50
