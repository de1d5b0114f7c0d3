"""To whoever presses the article's buttons, on its own or in the notebook's frame: it draws what
losses.py says, and its words and sentences fit its numbers."""

import functools
import html
import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
import torch

import losses
import train
from toy import clips, tax, tree

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium, in which to press the page")
PAGE = Path(tree.__file__).with_name("tree_page.html").read_text()
toy_page = functools.cache(tree.toy_page)
NASTY = "<img src=x onerror=\"document.title='hacked'\">"
# Presses one element after the other, and notes what is drawn after each. An element is the start
# of a button's text, or the name of a control and what is chosen there.
PRESS = """<script type="module">
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const texts = (selector, of) => all(selector, of).map(({ textContent }) => textContent);
  const sign = (bar) => (bar.matches(".minus") ? -1 : 1);
  const wait = () => new Promise((done) => setTimeout(done, 50));
  while (!("ready" in document.body.dataset)) await wait();
  top.document.documentElement.dataset.seen = JSON.stringify(PRESSES.map(([name, value]) => {
    const [first, ...others] = document.getElementsByName(name);
    if (!first) all("button").find((button) => button.textContent.startsWith(name)).click();
    else if (others.length) [first, ...others].find((radio) => radio.value === value).click();
    else { first.value = value; (first.onchange ?? first.oninput)(); }
    return {
      outputs: texts("#tree output"), labels: texts("#tree .line small"),
      bars: all("#tree .track").map((bar) => sign(bar) * bar.style.getPropertyValue("--v")),
      titles: all("#tree .card").map((card) => texts(".text", card)),
      verdicts: all("#tree .card").map((card) => texts(".verdict", card).join()),
      chips: texts("#tree .chip .text"), leaves: texts("#tree .leaf"),
      methods: texts("select[name=method] option"), lead: texts("#lead")[0],
      said: texts(".guess p:last-child:not([hidden])").map((text) => text.replace(/\\s+/g, " ")),
      figures: Object.fromEntries(all("section[id]")
        .map((of) => [of.id, texts("figure output", of)])),
      cells: texts("section td"), captions: texts("#trainer figcaption"),
      strips: all(".strip").map((of) => all("i", of).map((cell) => cell.className[0]).join("")),
      curves: all(".plot path[class]").map((path) => path.getAttribute("d").split("L").at(-1)),
      dots: all(".dot").map((dot) => dot.getAttribute("cy")), images: all("img").length,
      beyond: document.documentElement.scrollWidth - innerWidth,
    };
  }));
</script></html>"""


def press(page: str, presses: list, folder: Path, width: int | None = None) -> list[dict]:
    """What a browser shows after each press; in a frame of this width, as in the notebook's."""
    page = page.replace("</html>", PRESS.replace("PRESSES", json.dumps(presses)))
    if width:
        page = f'<iframe srcdoc="{html.escape(page)}" width="{width}" height="900"></iframe>'
    (folder / "page.html").write_text(page)
    flags = "--headless --no-sandbox --disable-gpu --virtual-time-budget=99000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder}", folder / "page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', done.stdout)[1]))


def number(text: str) -> float:
    return float(text.replace("−", "-"))


# ---------------- a group, written out here


class Group:
    """Answers as words, with the ratios of their tokens. All were sampled with probability 0.2."""

    def __init__(self, paths: list[str], rewards: list[float], ratios: list[list[float]], L: int):
        self.texts, self.rewards, self.ratios = [path.split("|") for path in paths], rewards, ratios
        ids = {text: k for k, text in enumerate({t: 0 for row in self.texts for t in row})}
        width = max(map(len, self.texts))

        def table(rows, fill):
            return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

        self.tokens = table([[ids[text] for text in row] for row in self.texts], 0)
        self.mask = table([[True] * len(row) for row in self.texts], False)
        self.old = torch.full(self.mask.shape, 0.2).double().log()
        self.logp = self.old + table(ratios, 1.0).double().log()
        self.R, self.L = torch.tensor(rewards).double(), L

    def coefficients(self, loss, A, baseline: bool):
        logp = self.logp.clone().requires_grad_()
        adv = A[:, None].expand_as(logp)
        batch = losses.Batch(logp, self.old, adv, self.mask, 4, self.L)
        value = loss(batch)
        if baseline:
            nodes = losses.prefix_nodes(self.tokens, self.mask, 4)
            value = losses.prefix_baseline(value, batch, nodes)
        return losses.token_coefficients(value, logp)


def toy(lengths="unequal", won="1010", moved="1", spread="none", **_) -> Group:
    """The group of the story, in one of its settings."""
    last = [
        r if digit == "1" else w
        for digit, r, w in zip(won, ["#85"] * 4, ["#75", "#75", "#86", "#84"], strict=True)
    ]
    first = [
        "so|7+8=15|70+15=85",
        "so|7+8=15|30+40=70",
        "so|37+40=77|77+8=85",
        "so|40+48=88|88-3=85",
    ]
    if lengths == "unequal":
        first[1], first[2] = "so|7+8=15|carry 1|30+40=70", "so"
    paths = [f"{start}|{end}" for start, end in zip(first, last, strict=True)]
    shared = (2, 2, 1, 1)  # tokens that other answers share
    factors = (1.5, 0.7, 0.85, 1.0) if spread == "wide" else (1.0,) * 4
    ratios = [
        [float(moved) * (factor if t >= n else 1) for t in range(path.count("|") + 1)]
        for path, factor, n in zip(paths, factors, shared, strict=True)
    ]
    return Group(paths, [float(digit) for digit in won], ratios, 5)


TOY_CARDS, TOY_TAILS = [((0, 1, 2, 3), 0, 1), ((0, 1), 1, 2)], (2, 2, 1, 1)


def check(shown, group, loss, scale, baseline, digits, cards=TOY_CARDS, tails=TOY_TAILS):
    """The tree has the numbers of losses.py, and the right words around them. Returns the numbers.

    From top to bottom: cards, which have their answers, first token and end, and then what follows
    in each answer. A card has its pushes, their sum, its credit and its tax.
    """
    A = losses.group_advantages(group.R, 4, scale)
    c, numbers, pushed, verdicts = group.coefficients(loss, A, baseline), [], [], []
    for rows, place, _ in cards:
        pushes, of = c[list(rows), place], A[list(rows)]
        credit = (pushes / of).mean() * of.sum()
        pushed += pushes.tolist()
        numbers += [*pushes.tolist(), *map(float, (pushes.sum(), credit, pushes.sum() - credit))]
        size = pushes.abs().sum()
        verdicts.append(
            "no push" if size < 1e-9 else "cancels" * bool(pushes.sum().abs() < 1e-9 * size)
        )
    for i, start in enumerate(tails):
        numbers += c[i, start : len(group.texts[i])].tolist()
    small = 0.6 * 10**-digits
    assert [*map(number, shown["outputs"])] == pytest.approx(numbers, abs=small)
    for text, x in zip(shown["outputs"], numbers, strict=True):
        assert text[0] == ("+" if x > small else "−" if x < -small else text[0]), (text, x)
    # What the labels come to, such as "0.250×0.500".
    labels = [eval(label.replace("−", "-").replace("×", "*")) for label in shown["labels"]]
    assert labels == pytest.approx(pushed, abs=3 * small)
    longest = max(map(abs, numbers)) or 1
    assert [bar * longest for bar in shown["bars"]] == pytest.approx(numbers, abs=2 * small)
    # The words: what stands on cards, chips and leaves.
    titles = [group.texts[rows[0]][begin:end] for rows, begin, end in cards]
    assert (shown["titles"], shown["verdicts"]) == (titles, verdicts)
    assert shown["chips"] == [x for row, n in zip(group.texts, tails, strict=True) for x in row[n:]]
    leaves = []
    for i, (row, ratios) in enumerate(zip(group.texts, group.ratios, strict=True)):
        s = torch.tensor(ratios).double().log().mean().exp()
        a = f"{abs(A[i]):.{digits}f}"
        leaf = f"{'▲' if A[i] > 0 else '▼'}{i + 1} reward {group.rewards[i]:g}"
        leaf += f"A = {'+' if A[i] > 0 else '−'}{a}T = {len(row)}"
        moved = any(abs(r - 1) > 1e-9 for ratios in group.ratios for r in ratios)
        leaves.append(leaf + f"s = {s:.{digits}f}" * moved)
    assert shown["leaves"] == leaves
    return numbers


# ---------------- the tree


@in_browser
def test_the_story_and_every_method_show_what_losses_say(tmp_path):
    names = [name for name, m in losses.METHODS.items() if len(m.passes) == 1 and not m.credit]
    settings, presses = [], [("1 ", "")]
    begin = dict(method="reinforce", baseline="off", lengths="unequal", won="1010")
    begin |= dict(moved="1", spread="none")
    for step, values in enumerate(re.findall(r'<button value="(.*?)">', PAGE), 1):
        chosen = begin | dict(parse_qsl(html.unescape(values)))
        settings += [chosen, chosen | {"won": chosen["won"][:3] + "1"}, chosen]  # answer 4 wins
        presses += [("▼4", ""), ("you changed", ""), (f"next: {step + 1}", "")]
    changes = [("lengths", "unequal"), ("spread", "wide")]
    for moved, baseline in (("1.6", "off"), ("0.6", "on")):
        changes += [("moved", moved), ("baseline", baseline), *(("method", name) for name in names)]
    for change in changes:
        settings.append(settings[-1] | dict([change]))
    seen, tables = press(toy_page(), presses[:-1] + changes, tmp_path, 1200), []
    assert seen[0]["methods"] == names
    for shown, at in zip(seen, settings, strict=True):
        loss = losses.METHODS[at["method"]].passes[0]
        if at["method"] == "gspo":  # its own range is made for long answers
            loss = functools.partial(loss, eps_low=0.2, eps_high=0.28)
        tables.append(check(shown, toy(**at), loss, "mean", at["baseline"] == "on", 3))
    assert tables[6][0] == pytest.approx(0.5 / 4 * 1.5**0.5, abs=1e-3)  # step 3: s A / T
    # What the story says: where "so" has a tax, and where 7+8=15, which answers 1 and 2 share, is
    # pushed; and what step 6 says of its tax.
    story = tables[:24:3]
    assert [abs(x[6]) > 1e-3 for x in story] == [x in (2, 3, 4) for x in range(8)]
    assert story[1][9] > 0 and [abs(x[9]) > 1e-3 for x in story[4:]] == [True, True, False, False]
    assert f"from {story[4][11]:+.3f} to {story[5][11]:+.3f}".replace("-", "−") in PAGE


@in_browser
def test_a_run_shows_its_newest_batch_and_runs_no_text_of_a_model(tmp_path):
    run = tmp_path / "run"
    flags = "--prefix-baseline --steps 1 --warm-steps 0 --width 16 --prompts 4 --eval-items 2"
    train.main([*flags.split(), "--hyper", "eps_low=0.4 kl=0.04", "--out", str(run)])
    (path,) = run.glob("batches/*.pt")
    # Two groups, as if they were a later batch of the run, and between them one of equal rewards.
    one, two = (
        toy(moved="1.3", spread="wide"),
        Group(
            ["x|y|a|b", "x|y|c", "x|y|d|e|f", "x|y"],
            [2.0, 1.0, 1.0, 0.5],
            [[0.5] * 4, [0.7] * 3, [1.5] * 5, [1.1] * 2],
            5,
        ),
    )
    one.texts[0][0], one.L, two.L = NASTY, 20, 20
    groups = (one, one, two)
    saved = {
        key: torch.cat([getattr(g, key) for g in groups])
        for key in ("tokens", "mask", "old", "logp")
    }
    saved["logp_old"], saved["pieces"] = saved.pop("old"), [row for g in groups for row in g.texts]
    saved["rewards"] = torch.cat([one.R, torch.ones(4), two.R])
    saved |= dict(group_size=4, prompts=[NASTY, "dull", "second"], max_tokens=20)
    saved = torch.load(path) | saved | {"step": 10}
    torch.save(saved, path.with_name("step-000010.pt"))
    torch.save(saved | {"rewards": 1 - saved["rewards"]}, path)  # of an earlier step
    tree.main([str(run)])
    page = (run / "tree.html").read_text()
    presses = [
        ("policy", "after it"),
        ("baseline", "off"),
        ("group", "2: second"),
        ("policy", "before the step"),
    ]
    seen = press(page, presses, tmp_path)
    loss = functools.partial(losses.grpo, eps_low=0.4)
    shared = [((0, 1, 2, 3), 0, 2)], (2, 2, 2, 2)  # its card has two tokens
    check(seen[0], one, loss, "std", True, 4)
    check(seen[1], one, loss, "std", False, 4)
    check(seen[2], two, loss, "std", False, 4, *shared)
    two.ratios = [[1.0] * len(row) for row in two.texts]
    two.logp = two.old
    check(seen[3], two, loss, "std", False, 4, *shared)
    assert {shown["images"] for shown in seen} == {0}
    assert f"Groups of {run}, a run of grpo, at step 10." in seen[0]["lead"]


# ---------------- what follows the tree

SLIDERS = {"a": 9, "b": 18, "c": 3, "d": 20, "q": 0.3}
PRESSES = """\
down | only on | GRPO: 1/T | identity-w2 0.45 | REINFORCE, answers 1
only losers | r = 0.61 | clip-r 1.24 | on-policy
half of | the group's mean | 3: worse
lengths-a 9 | lengths-b 18 | lengths-c 3 | lengths-d 20 | lengths-q 0.3
it stays | a tree with | noise-n 5 | noise-G 4 | noise-rho 0.5
to the crumb | … from | crumb-B 2 | crumb-c 0.6 | crumb-q 0.55 | crumb-p 2 | crumb-p 99
trainer slime"""
PRESSES = [press.strip() for press in re.split(r"[|\n]", PRESSES)]
TRAINERS = [
    dict(trainer=name, version="1", checked=checked, divisor={"is": is_, "source": "x.py:1"})
    for name, checked, is_ in (("TRL", "ran", "tokens"), ("slime", "read", "1/T_i"))
]


@pytest.fixture(scope="module")
def article(tmp_path_factory):
    """What is shown after each of PRESSES, on a phone."""
    if not CHROMIUM:
        pytest.skip("no chromium, in which to press the page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "find_trainers", lambda: TRAINERS)
        patch.setattr(tree, "find_table", lambda command: [["a", "b"], [command, NASTY]])
        page = tree.toy_page()
    control = re.compile(r"\w+-\w+ |trainer ")
    pairs = [x.rsplit(" ", 1) if control.match(x) else (x, "") for x in PRESSES]
    seen = press(page, pairs, tmp_path_factory.mktemp("article"), 390)
    return dict(zip(PRESSES, seen, strict=True))


def test_the_page_needs_no_network_and_fits_a_phone(article):
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", toy_page())
    assert max(shown["beyond"] for shown in article.values()) <= 0


def test_guesses_are_judged_and_shown(article):
    said = article[PRESSES[-1]]["said"]
    right = "No Yes Yes No Yes Yes".split()
    assert [text.split(".")[0] for text in said] == right
    assert "Up, by 0.150," in said[0]
    assert article["down"]["outputs"][4] == "+0.150"  # the story has gone to its step 5


def test_a_push_is_credit_plus_tax(article):
    group, sums = toy(), []
    nodes = losses.prefix_nodes(group.tokens, group.mask, 4)
    for key, w, A in (
        ("only on", [0.2, 0.2, 0.4, 0.2], [0.5, -0.5, 0.5, -0.5]),
        ("GRPO: 1/T", [1 / 4, 1 / 5, 1 / 2, 1 / 4], [0.5, -0.5, 0.5, -0.5]),
        ("identity-w2 0.45", [1 / 4, 0.45, 1 / 2, 1 / 4], [0.5, -0.5, 0.5, -0.5]),
        ("REINFORCE, answers 1", [1 / 5] * 4, [0.5, 0.5, -0.5, -0.5]),
    ):
        shown = [*map(number, article[key]["figures"]["identity"])]
        w, A = torch.tensor(w).double(), torch.tensor(A).double()
        c, expected = w * A, w.tolist()
        for n in (4, 2):
            credit = w[:n].sum() * A[:n].sum() / n
            expected += [*c[:n], c[:n].sum(), credit, c[:n].sum() - credit]
        assert shown == pytest.approx([*map(float, expected)], abs=6e-4)
        taxes = abs(shown[10]) + abs(shown[15])
        size = c.abs().sum() + c[:2].abs().sum()  # of what is shared
        tax = losses.learning_tax(c[:, None].expand(4, 5), A, nodes, group.mask)
        assert taxes / size == pytest.approx(tax, abs=6e-3)
        sums.append(shown[8:11] + shown[13:16])
    assert sums[0] == [0.1, 0, 0.1, 0, 0, 0]  # only "so", and all of it is tax


def test_a_clip_is_drawn_as_losses_has_it(article):
    assert [*clips.NAMES[:6]] == ["reinforce", "grpo", "grpo-symmetric", "cispo", "dapo", "gspo"]
    ratios = {"only losers": 1.61, "r = 0.61": 0.61, "clip-r 1.24": 1.23, "on-policy": 1.0}
    for key, r in ratios.items():
        first, *cells = article[key]["figures"]["clip"]
        assert float(first) == r
        for name, cell in zip(clips.NAMES, cells, strict=True):
            logp = torch.tensor([[r / 2], [r / 2]]).double().log().requires_grad_()
            old, adv = (
                torch.full_like(logp, 0.5).log().detach(),
                torch.tensor([[1.0], [-1.0]]).double(),
            )
            batch = losses.Batch(logp, old, adv, adv != 0, 2, 1)
            win, lose = losses.token_coefficients(losses.METHODS[name].passes[0](batch), logp)[
                :, 0
            ].tolist()
            left = win + lose
            said = f"left {left:+.3f}" if abs(left) > 1e-6 else "cancels" if win else "no push"
            expected = f"▲{win:.2f} ▼{-lose:.2f}\n{said}".replace("-0.00", "0.00").replace("-", "−")
            assert cell == expected, (name, r)
    grpo = article["only losers"]["figures"]["clip"][2]
    assert grpo == "▲0.00 ▼1.61\nleft −1.610"


def test_the_lines_of_the_clips_stop_where_grpo_does():
    """Winners above 1.2, losers below 0.8."""
    lines = re.findall(r'<polyline class="(win|lose)" points="(.*?)"', clips.panel("grpo"))
    assert {kind for kind, _ in lines} == {"win", "lose"}
    for kind, points in lines:
        for x, y in (map(float, point.split(",")) for point in points.split()):
            r, w = x / 75, 2 * (1 - y / 110)
            free = r < 1.2 if kind == "win" else r > 0.8
            assert w == pytest.approx(r if free else 0, abs=2e-3)


@functools.cache
def end_of(row: tax.Row, setting: str) -> float:
    """The expected reward after the page's schedule: 120 updates, each on a batch of its own."""
    path, _ = tax.train(row, tax.make_groups(setting), tax.START, 1, 120)
    return float(tax.expected_reward(setting, path[-1, 0]))


def test_the_curves_end_where_enumerated_groups_end(article, monkeypatch):
    monkeypatch.setattr(tax, "SIZE", 0.8)
    a, b, c, d, q = SLIDERS.values()
    monkeypatch.setitem(tax.SETTINGS, "by hand", ((a, b), q, (c, d)))
    one = tax.Row(losses.dr_grpo, "exact")
    rows = {
        "exact": [tax.Row(losses.grpo, "exact"), tax.Row(losses.grpo, "exact", True), one],
        "mean": [tax.Row(losses.grpo, "mean"), tax.Row(losses.grpo, "mean", True), one],
    }
    cases = {
        "half of": ("better way: wrong is short", "exact"),
        "the group's mean": ("better way: wrong is short", "mean"),
        "lengths-q 0.3": ("by hand", "mean"),
    }
    for key, (setting, scale) in cases.items():
        shown = [*map(float, article[key]["figures"]["lengths"][5:])]
        assert shown == pytest.approx([end_of(row, setting) for row in rows[scale]], abs=6e-4)
        # The lines end there: 0.6 is 174 points above 0, at 192. One divisor is drawn first.
        ends = [(192 - float(point.split()[1])) / 290 for point in article[key]["curves"][:3]]
        assert ends == pytest.approx([shown[2], *shown[:2]], abs=1e-3)
    sliders = [*map(float, article["3: worse"]["figures"]["lengths"])]
    assert sliders == [16, 16, 4, 24, 0.2, 0.205, 0.592, 0.597]  # toy/README's world 3
    said = article["half of"]["said"][3]
    assert re.findall(r"0\.\d+", said) == ["0.411", "0.6", "0.597"]


def test_noise_follows_its_law(article):
    for key, G, n, rho in (
        ("it stays", 8, 8, 0),
        ("a tree with", 8, 4, 0.64),
        ("noise-n 5", 8, 5, 0.64),
        ("noise-G 4", 4, 4, 0.64),  # no more can come by than there are
        ("noise-rho 0.5", 4, 4, 0.5),
    ):
        shown = [float(x.replace("× ", "")) for x in article[key]["figures"]["noise"]]
        fixed = (1 - rho) * n / (n - 1)
        even = 1 - (G / (G - 1)) / (n / (n - 1))  # there the law against the group's mean is 1
        dot = (192 - float(article[key]["dots"][0])) / 87  # its height in the plot
        assert dot == pytest.approx(fixed * (G - 1) / G, abs=1e-3)
        assert shown == pytest.approx([rho, n, G, fixed * (G - 1) / G, fixed, even], abs=6e-4)


def pull_of(scale: str, p: float, q: float, c: float, groups: int = 1) -> float:
    """The expected A of a rare answer less that of a usual one, by all compositions of a batch."""
    earned = torch.tensor([1, 0, c]).double()
    shares = torch.tensor([p * q, p * (1 - q), 1 - p]).double()

    def compositions(n: int):
        """Of n answers: their chance, and their rewards."""
        for k in itertools.product(range(n + 1), repeat=3):
            if sum(k) == n:
                ways = math.factorial(n) / math.prod(map(math.factorial, k))
                k = torch.tensor(k)
                yield ways * float((shares**k).prod()), earned.repeat_interleave(k)

    total = 0.0
    for parts in itertools.product(*(compositions(8 - (k == 0)) for k in range(groups))):
        chances, others = zip(*parts, strict=True)
        rows = [torch.cat([own[None], *others]) for own in earned]  # the first is one's own
        A = [losses.group_advantages(row, 8, scale)[0] for row in rows]
        total += math.prod(chances) * float(q * A[0] + (1 - q) * A[1] - A[2])
    return total


def test_where_a_crumb_leads(article):
    def shown(key):
        values = [*map(number, article[key]["figures"]["crumb"][4:])]
        return dict(
            zip(("std", "batch", "mean"), zip(values[::2], values[1::2], strict=True), strict=True)
        )

    def ends(key):
        return [end for _, end in shown(key).values()]

    assert ends("to the crumb") == [0.1, 0.45, 0.45]
    assert ends("… from") == [0.45, 0.45, 0.45]  # above the threshold of 0.080
    one, two = shown("to the crumb"), shown("crumb-B 2")
    assert one["std"][0] == pytest.approx(pull_of("std", 0.05, 0.45, 0.1), abs=6e-4)
    assert one["mean"][0] == pytest.approx(pull_of("mean", 0.05, 0.45, 0.1), abs=6e-4)
    assert two["batch"][0] == pytest.approx(pull_of("batch", 0.1, 0.45, 0.1, groups=2), abs=6e-4)
    # Where a large crumb is nearly as good, the std ends at a mixture, from above and below.
    low, high = 0.01, 0.99
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if pull_of("std", middle, 0.55, 0.6) > 0 else (low, middle)
    for key in ("crumb-p 2", "crumb-p 99"):
        assert shown(key)["std"][1] == pytest.approx(0.6 - 0.05 * low, abs=6e-4)
    # A strip changes its colour where the pull changes its sign: at 0.080, for the batch of 64
    # answers at 0.008.
    strip = article["to the crumb"]["strips"][0]
    assert strip == "l" * 20 + "w" * 41
    assert article["to the crumb"]["strips"][1:] == ["l" * 9 + "w" * 52, "w" * 61]


def test_tables_come_from_their_homes(article):
    shown = article["trainer slime"]
    assert shown["cells"] == ["python -m toy.luck", NASTY, "divisor", "1/T_i", "x.py:1"]
    assert shown["captions"] == ["slime 1: read, not run."] and shown["images"] == 0
    table = tree.find_table("python -m toy.tax")
    assert len(table) > 3 and {len(row) for row in table} == {4} and "---" not in str(table)
    # The article's worlds end as toy/README says.
    (grpo,) = (row for row in table if row[0] == "grpo")
    assert [cell.split()[0] for cell in grpo[1:]] == ["0.596", "0.411", "0.205"]
    assert tree.find_table("python -m toy.nothing") == []
