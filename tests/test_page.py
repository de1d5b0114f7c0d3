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
from engines import defaults
from toy import clips, tax, tree
from toy.policy import pad

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium, in which to press the page")
NASTY = "<img src=x onerror=\"document.title='hacked'\">"
# Presses one element after the other, and notes what is drawn after each. An element is the start
# of a button's text, or the name of a control and what is chosen there.
PRESS = """<script type="module">
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const texts = (selector, of) => all(selector, of).map(({ textContent }) => textContent);
  const sign = (bar) => (bar.matches(".minus") ? -1 : 1);
  const wait = () => new Promise((done) => setTimeout(done, 50));
  while (!("ready" in document.body.dataset)) await wait();
  let stays;
  addEventListener("click", (event) => (stays = event.defaultPrevented));
  top.document.documentElement.dataset.seen = JSON.stringify(PRESSES.map(([name, value]) => {
    const [first, ...others] = document.getElementsByName(name);
    if (!first) all("button, td a").find((button) => button.textContent.startsWith(name)).click();
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
      at: all(".at")[0]?.getAttribute("d"),
      lines: all(".panels polyline").map((line) => line.getAttribute("points").split(" ")),
      strips: all(".strip").map((of) => all("i", of).map((cell) => cell.className[0]).join("")),
      starts: all(".strip b").map((bar) => parseFloat(bar.style.left)),
      curves: Object.fromEntries(all(".plot path[class]")
        .map((path) => [`${path.closest("section").id} ${path.className.baseVal}`,
          path.getAttribute("d").slice(1).split("L")])),
      dot: all(".dot").map((dot) => `${dot.getAttribute("cx")} ${dot.getAttribute("cy")}`)[0],
      cells: texts("section td"),
      captions: texts("#trainer figcaption"), images: all("img").length,
      stays, top: Math.round(document.querySelector("#crumb")?.getBoundingClientRect().top),
      focus: document.activeElement.textContent.slice(0, 2),
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
    flags = "--headless --no-sandbox --disable-gpu --virtual-time-budget=999000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder}", folder / "page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', done.stdout)[1]))


def number(text: str) -> float:
    return float(text.replace("−", "-"))


# ---------------- a group, written out here


class Group:
    """Answers as words, with the ratios of their tokens. All were sampled with probability 0.2."""

    def __init__(self, paths: str, rewards: list[float], ratios: list[list[float]], L: int):
        self.texts, self.ratios = [path.split("|") for path in paths.split()], ratios
        words = [*itertools.chain(*self.texts)]
        self.tokens, self.mask = pad([tuple(map(words.index, row)) for row in self.texts])
        self.old = torch.full(self.mask.shape, 0.2).double().log()
        moves = torch.tensor([*itertools.chain(*ratios)]).double().log()
        self.logp = self.old + torch.zeros_like(self.old).masked_scatter(self.mask, moves)
        self.rewards, self.L = torch.tensor(rewards).double(), L

    def coefficients(self, loss, A, baseline: bool):
        logp = self.logp.clone().requires_grad_()
        batch = losses.Batch(logp, self.old, A[:, None].expand_as(logp), self.mask, 4, self.L)
        value = loss(batch)
        if baseline:
            nodes = losses.prefix_nodes(self.tokens, self.mask, 4)
            value = losses.prefix_baseline(value, batch, nodes)
        return losses.token_coefficients(value, logp)


def toy(lengths="unequal", won="1010", moved="1", spread="none", **_) -> Group:
    """The group of the story, in one of its settings."""
    paths = {
        "equal": "so|7+8=15|70+15=85 so|7+8=15|30+40=70 so|37+40=77|77+8=85 so|40+48=88|88-3=85",
        "unequal": "so|7+8=15|70+15=85 so|7+8=15|carry_1|30+40=70 so so|40+48=88|88-3=85",
    }[lengths]
    last = [("#85" if w == "1" else x) for w, x in zip(won, "#75 #75 #86 #84".split(), strict=True)]
    paths = [f"{path}|{end}" for path, end in zip(paths.split(), last, strict=True)]
    own = (1.5, 0.7, 0.85, 1.0) if spread == "wide" else (1,) * 4  # where an answer is alone
    ratios = [
        [float(moved) * (r if t >= shared else 1) for t in range(len(path.split("|")))]
        for path, r, shared in zip(paths, own, (2, 2, 1, 1), strict=True)
    ]
    group = Group(" ".join(paths), [float(digit) for digit in won], ratios, 5)
    group.texts = [[text.replace("_", " ") for text in row] for row in group.texts]
    return group


# Cards: their answers, first token and end. Tails: where an answer goes on alone.
TOY = [((0, 1, 2, 3), 0, 1), ((0, 1), 1, 2)], (2, 2, 1, 1)
RUN = [((0, 1, 2, 3), 0, 2)], (2, 2, 2, 2)


def check(shown, group, loss, scale, baseline, digits, cards=TOY[0], tails=TOY[1]):
    """The tree has the numbers of losses.py, and the right words around them. Returns the numbers,
    from top to bottom. A card has its pushes, their sum, its credit and its tax."""
    A = losses.group_advantages(group.rewards, 4, scale)
    c, numbers, pushed, verdicts = group.coefficients(loss, A, baseline), [], [], []
    for rows, place, _ in cards:
        pushes, of = c[list(rows), place], A[list(rows)]
        total, credit = pushes.sum(), (pushes / of).mean() * of.sum()
        pushed += pushes.tolist()
        numbers += [*pushes.tolist(), *map(float, (total, credit, total - credit))]
        none, zero = not pushes.any(), abs(total) < 1e-9
        verdicts.append("no push" if none else "cancels" if zero else "")
    for row, start, text in zip(c.tolist(), tails, group.texts, strict=True):
        numbers += row[start : len(text)]
    shown_numbers, small = [*map(number, shown["outputs"])], 0.6 * 10**-digits
    assert shown_numbers == pytest.approx(numbers, abs=small)
    signs = ["+" if x > 0 else "−" if x < 0 else "0" for x in shown_numbers]
    assert [text[0] for text in shown["outputs"]] == signs
    # What the labels come to, such as "0.250×0.500".
    labels = [eval(label.replace("−", "-").replace("×", "*")) for label in shown["labels"]]
    assert labels == pytest.approx(pushed, abs=3 * small)
    longest = max(map(abs, numbers)) or 1
    assert [bar * longest for bar in shown["bars"]] == pytest.approx(numbers, abs=2 * small)
    titles = [group.texts[rows[0]][begin:end] for rows, begin, end in cards]
    assert (shown["titles"], shown["verdicts"]) == (titles, verdicts)
    assert shown["chips"] == [x for row, n in zip(group.texts, tails, strict=True) for x in row[n:]]
    moved, leaves = any(r != 1 for row in group.ratios for r in row), []
    for i, row in enumerate(group.ratios):
        leaf = f"{'▲' if A[i] > 0 else '▼'}{i + 1} reward {group.rewards[i]:g}"
        leaf += f"A = {A[i]:+.{digits}f}T = {len(row)}".replace("-", "−")
        leaves.append(leaf + f"s = {math.prod(row) ** (1 / len(row)):.{digits}f}" * moved)
    assert shown["leaves"] == leaves
    return numbers


# ---------------- the tree


def test_the_story_and_every_method_show_what_losses_say(tmp_path):
    names = [name for name, m in losses.METHODS.items() if len(m.passes) == 1 and not m.credit]
    page, settings, presses = tree.toy_page(), [], [("1 ", "")]
    begin = dict(method="reinforce", baseline="off", lengths="unequal", won="1010")
    begin |= dict(moved="1", spread="none")
    for step, values in enumerate(re.findall(r'<button value="([^"]*)"><b>\d', page), 1):
        chosen = begin | dict(parse_qsl(html.unescape(values)))
        won = chosen["won"]
        leaf, won = ("▼4", won[:3] + "1") if step % 2 else ("▲1", "0" + won[1:])
        settings += [chosen, chosen | {"won": won}, chosen]
        presses += [(leaf, ""), ("you changed", ""), (f"next: {step + 1}", "")]
    changes = [("lengths", "unequal"), ("spread", "wide")]
    for moved, baseline in (("1.6", "off"), ("0.6", "on")):
        changes += [("moved", moved), ("baseline", baseline), *(("method", name) for name in names)]
    for change in changes:
        settings.append(settings[-1] | dict([change]))
    seen, tables = press(page, presses[:-1] + changes, tmp_path, 1200), []
    assert seen[0]["methods"] == names
    for shown, at in zip(seen, settings, strict=True):
        loss = losses.METHODS[at["method"]].passes[0]
        if at["method"] == "gspo":  # its own range is made for long answers
            loss = functools.partial(loss, eps_low=0.2, eps_high=0.28)
        tables.append(check(shown, toy(**at), loss, "mean", at["baseline"] == "on", 3))
    # A button that has gone hands the keyboard on: "back" always, "next" at the end.
    assert seen[2]["focus"] == "1 " and seen[21]["focus"] == "8 "
    # What the story says: where "so" has a tax, and where 7+8=15, which answers 1 and 2 share, is
    # pushed; and what step 6 says of its tax.
    story = tables[:24:3]
    assert [abs(x[6]) > 1e-3 for x in story] == [x in (2, 3, 4) for x in range(8)]
    assert story[1][9] > 0 and [abs(x[9]) > 1e-3 for x in story[4:]] == [True, True, False, False]
    assert f"from {story[4][11]:+.3f} to {story[5][11]:+.3f}".replace("-", "−") in page
    assert (
        f"ratio\n          of every token is {settings[9]['moved']}. GRPO's clip range ends at 1.2"
        in page
    )


def test_a_run_shows_its_newest_batch_and_runs_no_text_of_a_model(tmp_path):
    run = tmp_path / "run"
    flags = "--prefix-baseline --steps 1 --warm-steps 0 --width 16 --prompts 4 --eval-items 2"
    train.main([*flags.split(), "--hyper", "eps_low=0.4 kl=0.04", "--out", str(run)])
    (path,) = run.glob("batches/*.pt")
    # Two groups, as if they were a later batch of the run, and between them one of equal rewards.
    one = toy(moved="1.3", spread="wide")
    ratios = [[0.5] * 4, [0.7] * 3, [1.5] * 5, [1.1] * 2]
    two = Group("x|y|a|b x|y|c x|y|d|e|f x|y", [2.0, 1.0, 1.0, 0.5], ratios, 20)
    one.texts[0][0], one.L = NASTY, 20
    groups, saved = (one, one, two), torch.load(path)
    for key, name in dict(tokens="tokens", mask="mask", logp_old="old", logp="logp").items():
        saved[key] = torch.cat([getattr(group, name) for group in groups])
    saved["pieces"] = [row for group in groups for row in group.texts]
    saved["rewards"] = torch.cat([one.rewards, torch.ones(4), two.rewards])
    saved |= dict(step=10, group_size=4, prompts=[NASTY, "dull", "second"], max_tokens=20)
    torch.save(saved, path.with_name("step-000010.pt"))
    torch.save(saved | {"rewards": 1 - saved["rewards"]}, path)  # of an earlier step
    tree.main([str(run)])
    presses = [("policy", "after it"), ("baseline", "off"), ("group", "2: second")]
    presses.append(("policy", "before the step"))
    seen = press((run / "tree.html").read_text(), presses, tmp_path)
    loss = functools.partial(losses.grpo, eps_low=0.4)
    check(seen[0], one, loss, "std", True, 4)
    check(seen[1], one, loss, "std", False, 4)
    check(seen[2], two, loss, "std", False, 4, *RUN)
    two.ratios, two.logp = [[1.0] * len(row) for row in two.texts], two.old
    check(seen[3], two, loss, "std", False, 4, *RUN)
    assert {shown["images"] for shown in seen} == {0}
    assert f"Groups of {run}, a run of grpo, at step 10." in seen[0]["lead"]


# ---------------- what follows the tree

PRESSES = """\
down | only on | identity-w2 0.45 | REINFORCE, answers 1
only losers | r = 0.61 | clip-r 1.24 | r = 1
half | the group's mean | 3: worse
lengths-a 9 | lengths-b 18 | lengths-c 3 | lengths-d 20 | lengths-q 0.3
it stays | a tree with | noise-n 5 | noise-G 4
to the crumb | … from | crumb-B 2 | crumb-c 0.6 | crumb-q 0.55 | crumb-p 2 | crumb-p 99
one | trainer slime | std"""
PRESSES = [press.strip() for press in re.split(r"[|\n]", PRESSES)]
TRAINERS = [
    dict(trainer=name, version="1", checked=checked, std={"is": is_, "source": "x.py:1"})
    for name, checked, is_ in (("TRL", "ran", "none"), ("slime", "read", "group's"))
]


@pytest.fixture(scope="module")
def article(tmp_path_factory):
    """What is shown after each of PRESSES, on a phone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "ROWS", TRAINERS)
        patch.setattr(tree, "find_table", lambda command: [["a", "b"], [command, NASTY]])
        page = tree.toy_page()
    control = re.compile(r"\w+-\w+ |trainer ")
    pairs = [x.rsplit(" ", 1) if control.match(x) else (x, "") for x in PRESSES]
    seen = press(page, pairs, tmp_path_factory.mktemp("article"), 390)
    return dict(zip(PRESSES, seen, strict=True))


def test_the_page_needs_no_network_and_fits_a_phone(article):
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", tree.toy_page())
    assert max(shown["beyond"] for shown in article.values()) <= 0


def test_guesses_are_judged_and_sentences_have_the_numbers_of_their_homes(article):
    said = article[PRESSES[-1]]["said"]
    assert [text.split(".")[0] for text in said] == "No Yes Yes No Yes Yes Yes".split()
    # Each answer shows its setting, and has the numbers of its figure.
    keys = ["down", "only on", "only losers", "half", "it stays", "to the crumb"]
    sections = [None, "identity", "clip", "lengths", "noise", "crumb"]
    for key, section, answer in zip(keys, sections, said[:6], strict=True):
        shown = article[key]["figures"][section] if section else article[key]["outputs"]
        assert [x for x in re.findall(r"\d\.\d\d+", answer) if x not in str(shown)] == [], key
    gate = dict(tree.find_table("python -m toy.gate"))
    (mended,) = {gate[row] for row in gate if "grpo-symmetric" in row}
    (usual,) = {gate[row] for row in gate if row.startswith("grpo;")}
    T = [len(row) for row in toy().texts]
    share, even = (1 / (1 + math.exp(-x)) for x in tax.START)
    (lone,) = (row["trainer"] for row in defaults.ROWS if row["divisor"]["is"] == "1/T_i")
    sentences = [
        f"right answers have {T[0]} and {T[2]} tokens, the wrong ones {T[1]} and {T[3]}",
        f"REINFORCE divides every push by {toy().L},",
        f"GRPO ends at {usual} and a clip blind to the sign at {mended}, the best there is",
        # The bound of C28, ((M - m) / (M + m))^2: of 0.8 and 1.2, and of 1 and 2.
        f"within 20 % of 1 make at most {100 * 0.2**2:.0f} %",
        f"within a factor of two {100 / 3**2:.0f} % (C28)",
        f"the better way has the share {share:.2f}, and a good plan {even:.2f}",
        f"Only {lone}.",
    ]
    text = " ".join(tree.toy_page().split())
    assert [x for x in sentences if x not in text] == []
    # DFPO's numbers are those of the papers' table.
    papers = (Path(tree.__file__).parent.parent / "claims" / "README.md").read_text()
    reported = re.search("DFPO paper.*?not public", text)[0]
    assert set(re.findall(r"\d\d\.\d\b", reported)) == {"82.5", "76.9", "80.6"}
    assert re.search("GRPO and GSPO 76.9, GRPO-fix 80.6.*DFPO-Min 82.5", papers)


# A section's numbers after a press: by hand in "identity" and "noise", and in "clip", where a
# weight is r, 1 or 0 (but for sapo). Those of "lengths" are toy.tax's, with SIZE = 0.8 and one
# update a batch; the pulls of "crumb" are those of toy.crumb's enumerated groups.
SHOWN = {
    "identity": """\
only on: 0.20 0.20 0.40 0.20 +0.100 −0.100 +0.200 −0.100 +0.100 0.000 +0.100 \
+0.100 −0.100 0.000 0.000 0.000
identity-w2 0.45: 0.20 0.45 0.40 0.20 +0.100 −0.225 +0.200 −0.100 −0.025 0.000 −0.025 \
+0.100 −0.225 −0.125 0.000 −0.125
REINFORCE, answers 1: 0.20 0.20 0.20 0.20 +0.100 +0.100 −0.100 −0.100 0.000 0.000 0.000 \
+0.100 +0.100 +0.200 +0.200 0.000""",
    "lengths": """\
half: 24 6 32 32 0.00 0.411 0.411 0.597
the group's mean: 24 6 32 32 0.00 0.411 0.587 0.597
3: worse: 16 16 4 24 0.20 0.205 0.592 0.597
lengths-q 0.3: 9 18 3 20 0.30 0.302 0.386 0.597""",
    "noise": """\
it stays: 0.00 8 8 × 1.000 × 1.143 0.000
a tree with: 0.64 4 8 × 0.420 × 0.480 0.143
noise-G 4: 0.64 4 4 × 0.360 × 0.480 0.000""",
    "crumb": """\
to the crumb: 0.10 0.45 5 % 8 −0.082 0.100 +1.349 0.450 +0.306 0.450
crumb-B 2: 0.10 0.45 10 % 2 +0.052 0.450 +0.414 0.450 +0.306 0.450
crumb-p 2: 0.60 0.55 2 % 2 +0.222 0.583 +0.266 0.593 −0.044 0.600
crumb-p 99: 0.60 0.55 99 % 2 −0.059 0.583 −0.083 0.593 −0.044 0.600""",
    "clip": """\
only losers: 1.61 ▲1.00 ▼1.00 cancels ▲0.00 ▼1.61 left −1.610 ▲0.00 ▼0.00 no push \
▲1.61 ▼1.61 cancels ▲0.00 ▼1.61 left −1.610 ▲0.00 ▼1.61 left −1.610 \
▲0.00 ▼1.61 left −1.610 ▲0.00 ▼0.00 no push ▲1.47 ▼1.46 left +0.014
r = 0.61: 0.61 ▲1.00 ▼1.00 cancels ▲0.61 ▼0.00 left +0.610 ▲0.00 ▼0.00 no push \
▲0.61 ▼0.61 cancels ▲0.61 ▼0.00 left +0.610 ▲0.61 ▼0.00 left +0.610 \
▲0.61 ▼0.61 cancels ▲0.00 ▼0.00 no push ▲0.59 ▼0.59 left +0.002
clip-r 1.24: 1.23 ▲1.00 ▼1.00 cancels ▲0.00 ▼1.23 left −1.230 ▲0.00 ▼0.00 no push \
▲1.23 ▼1.23 cancels ▲1.23 ▼1.23 cancels ▲0.00 ▼1.23 left −1.230 \
▲1.23 ▼1.23 cancels ▲0.00 ▼0.00 no push ▲1.21 ▼1.21 left +0.002""",
}


@pytest.mark.parametrize("section", SHOWN)
def test_a_figure_shows(section, article):
    for line in SHOWN[section].splitlines():
        key, _, numbers = line.rpartition(": ")
        assert " ".join(article[key]["figures"][section]).replace("\n", " ") == numbers, key


def test_lines_are_drawn_where_their_numbers_are(article):
    ratio, *cells = article["only losers"]["figures"]["clip"]
    place = clips.RATIOS.index(float(ratio))
    weights = [float(x) for cell in cells for x in re.findall(r"\d\.\d\d\b(?!\d)", cell)[:2]]
    points = [line[place].split(",") for line in article["only losers"]["lines"]]
    # 75 points across for a ratio of 1, and 55 up for a weight of 1; 0 is at 110.
    assert article["only losers"]["at"].startswith("M120.75")
    assert [(float(x) / 75, 2 - float(y) / 55) for x, y in points] == [
        pytest.approx((float(ratio), weight), abs=6e-3) for weight in weights
    ]
    shown = article["the group's mean"]
    for line, J in zip("abc", shown["figures"]["lengths"][5:], strict=True):
        y = float(shown["curves"][f"lengths {line}"][-1].split()[1])
        assert (192 - y) / 290 == pytest.approx(float(J), abs=1e-3)
    (x, y), curves = (
        map(float, article["a tree with"]["dot"].split()),
        article["a tree with"]["curves"],
    )
    assert (192 - y) / 87 == pytest.approx(0.42, abs=1e-3)
    left, right = (float(end.split()[0]) for end in curves["noise a"])
    assert (x - left) / (right - left) == pytest.approx(0.64)
    # A strip changes its colour where the pull changes its sign: at 0.080, and for the batch of 64
    # answers at 0.008. The bar is at the start.
    strips = ["l" * 20 + "w" * 41, "l" * 9 + "w" * 52, "w" * 61]
    assert article["to the crumb"]["strips"] == strips
    left = (math.log(0.05 / 0.95) + 6.9) / 13.8
    assert article["to the crumb"]["starts"] == pytest.approx([100 * left] * 3)


def test_tables_come_from_their_homes(article):
    shown = article["trainer slime"]
    assert shown["cells"] == ["python -m toy.luck", NASTY, "std", "group's", "x.py:1"]
    assert shown["captions"] == ["slime 1: read, not run."] and shown["images"] == 0
    assert (
        article["std"]["stays"] and article["std"]["top"] == 0
    )  # the link has gone there, although in a frame
    table = tree.find_table("python -m toy.luck")
    assert table[0][:4] == ["world", "decided", "after 5", "with"] and "---" not in str(table)
