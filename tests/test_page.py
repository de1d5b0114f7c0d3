"""To whoever presses the article's buttons, on its own or in the notebook's frame: it draws what
losses.py says, and its words and sentences fit its numbers."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import run

from toy import clips, tree

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium, in which to press the page")
NASTY = "<img src=x onerror=\"document.title='hacked'\">"
# Presses one element after the other, and notes what is drawn after each. An element is the start
# of a button's text, or the name of a control and what is chosen there; "+" is an arrow key.
CONTROL = r"(?:\w+-\w+|method|spread|moved|baseline|policy|group) "
PRESS = """<script type="module">
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const texts = (selector, of) => all(selector, of).map(({ textContent }) => textContent);
  const bySection = (f) =>
    Object.fromEntries(all("section[id]").map((of) => [of.id, f(of).join(" ")]));
  const long = (of) => Number(Number(of.style.getPropertyValue("--v")).toFixed(2));
  const bar = (of) => `[${of.matches(".minus") ? "−" : ""}${long(of)}]`;
  const last = (path) => `${path.className.baseVal} ${path.getAttribute("d").split("L").at(-1)}`;
  const runs = (of) => all("i", of).map((cell) => cell.className[0]).join("")
    .replace(/(.)\\1*/g, (run) => run[0] + run.length);
  const wait = () => new Promise((done) => setTimeout(done, 50));
  while (!("ready" in document.body.dataset)) await wait();
  top.document.documentElement.dataset.seen = JSON.stringify(PRESSES.map(([name, value]) => {
    const [first, ...others] = document.getElementsByName(name);
    const button = all("button").find((of) => of.textContent.startsWith(name));
    if (!first) { button.click(); }
    else if (others.length) [first, ...others].find((radio) => radio.value === value).click();
    else {
      if (value === "+") first.stepUp();
      else first.value = value;
      (first.onchange ?? first.oninput)();
    }
    return {
      tree: all("#tree .card, #tree .chip, #tree .leaf").map((of) => all("*", of)
        .filter((part) => !part.firstElementChild)
        .map((part) => (part.matches(".fill") ? bar(part.parentNode) : part.textContent))
        .filter((text) => text.trim()).join(" ")),
      lead: texts("#lead")[0],
      said: texts(".guess p:last-child:not([hidden])").map((text) => text.replace(/\\s+/g, " ")),
      figures: bySection((of) => texts("figure output, .card .who", of)),
      drawn: bySection((of) => [...all(".plot path[class]", of).map(last),
        ...all(".at", of).slice(0, 1).map((path) => path.getAttribute("d").slice(0, 7)),
        ...all(".strip", of).map(runs),
        ...all(".strip b", of).map((mark) => mark.style.left.slice(0, 5))]),
      images: all("img").length,
      beyond: document.documentElement.scrollWidth - innerWidth,
    };
  }));
</script></html>"""


def press(page: str, presses: list[str], folder: Path, width: int = 1200) -> dict:
    """What a browser shows after each press; in a frame of this width, as in the notebook's."""
    pairs = [x.split(" ", 1) if re.match(CONTROL, x) else (x, "") for x in presses]
    page = page.replace("</html>", PRESS.replace("PRESSES", json.dumps(pairs)))
    page = f'<iframe srcdoc="{html.escape(page)}" width="{width}" height="900"></iframe>'
    (folder / "page.html").write_text(page)
    flags = "--headless --no-sandbox --disable-gpu --virtual-time-budget=999000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder}", folder / "page.html"]
    for _ in range(3):  # on a very busy machine the browser may give up before the page is done
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if found := re.search(r'data-seen="([^"]*)"', done.stdout):
            break
    seen = json.loads(html.unescape(found[1]))
    return dict(zip(presses, seen, strict=True))


def sums(shown: dict) -> str:
    """Of each card its first token, its verdict, and the sum, the credit and the tax."""
    card = r"(\S+).*?( cancels| no push)? [▲▼●].* pushes \S+ (\S+) credit \S+ (\S+) tax \S+ (\S+)"
    found = [re.fullmatch(card, text) for text in shown["tree"]]
    return ", ".join("{}{} {} {} {}".format(*x.groups("")) for x in found if x)


def read(table: str) -> dict[str, str]:
    return dict(line.split(" | ") for line in table.splitlines())


# ---------------- the tree

# What is left after each press. A is 0.5 and -0.5 (after "▼4": 0.25 and -0.75), and lengths are 4,
# 5, 2, 4, or all 4; so the first eleven follow by hand. So does "next: 9", a real model's answers:
# A is 5/8 three times and -3/8 five times, and lengths are 11, but 24 of a wrong one. After the
# step 4 and 5 are beyond the clip range.
STORY = """\
1  | so +0.150 0.000 +0.150, 7+8=15 +0.025 0.000 +0.025
next: 2 | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
▼4 | so cancels 0.000 0.000 0.000, 7+8=15 −0.100 −0.100 0.000
you changed | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
next: 3 | so cancels 0.000 0.000 0.000, 7+8=15 +0.200 +0.200 0.000
next: 4 | so +0.034 0.000 +0.034, 7+8=15 +0.049 0.000 +0.049
next: 5 | so −0.400 0.000 −0.400, 7+8=15 −0.200 0.000 −0.200
next: 6 | so cancels 0.000 0.000 0.000, 7+8=15 −0.067 0.000 −0.067
▲1 | so cancels 0.000 0.000 0.000, 7+8=15 −0.283 −0.283 0.000
next: 7 | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
next: 8 | so no push 0.000 0.000 0.000, 7+8=15 no push 0.000 0.000 0.000
method reinforce | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
method cispo | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
spread wide | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
moved 0.6 | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
method dppo | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
method gspo | so +0.158 0.000 +0.158, 7+8=15 +0.092 0.000 +0.092
baseline on | so cancels 0.000 0.000 0.000, 7+8=15 +0.009 0.000 +0.009
method dfpo-min | so cancels 0.000 0.000 0.000, 7+8=15 −0.006 0.000 −0.006
next: 9 | 2 +0.018 0.000 +0.018, 4 −0.152 −0.152 0.000, <|im_end|> −0.136 −0.136 0.000, 5 +0.170 \
+0.170 0.000
policy after it | 2 +0.018 0.000 +0.018, 4 no push 0.000 0.000 0.000, <|im_end|> −0.146 −0.146 \
0.000, 5 no push 0.000 0.000 0.000
method dr-grpo | 2 cancels 0.000 0.000 0.000, 4 no push 0.000 0.000 0.000, <|im_end|> −0.067 \
−0.067 0.000, 5 no push 0.000 0.000 0.000"""
# A group in full: labels, bars as parts of the longest, and numbers.
GROUPS = """\
next: 4 | so ▲1 0.306×0.500 [1] +0.153 ▼2 0.209×(−0.500) [−0.68] −0.105 ▲3 0.221×0.500 [0.72] \
+0.111 ▼4 0.250×(−0.500) [−0.82] −0.125 sum of the pushes [0.22] +0.034 credit [0] 0.000 tax \
[0.22] +0.034 / 7+8=15 ▲1 0.306×0.500 [1] +0.153 ▼2 0.209×(−0.500) [−0.68] −0.105 sum of the \
pushes [0.32] +0.049 credit [0] 0.000 tax [0.32] +0.049 / 70+15=85 [1] +0.153 / #85 [1] +0.153 / \
▲1 reward 1 A = +0.500 T = 4 s = 1.225 / 30+40=70 [−0.68] −0.105 / #75 [−0.68] −0.105 / ▼2 reward \
0 A = −0.500 T = 4 s = 0.837 / 37+40=77 [0.72] +0.111 / 77+8=85 [0.72] +0.111 / #85 [0.72] +0.111 \
/ ▲3 reward 1 A = +0.500 T = 4 s = 0.885 / 40+48=88 [−0.82] −0.125 / 88-3=85 [−0.82] −0.125 / #84 \
[−0.82] −0.125 / ▼4 reward 0 A = −0.500 T = 4 s = 1.000
next: 6 | so cancels ▲1 0.125 − 0.008 [0.41] +0.117 ▼2 −0.100 − 0.083 [−0.65] −0.183 ▲3 0.250 − \
(−0.033) [1] +0.283 ▼4 −0.125 − 0.092 [−0.76] −0.217 sum of the pushes [0] 0.000 credit [0] 0.000 \
tax [0] 0.000 / 7+8=15 ▲1 0.125 − 0.008 [0.41] +0.117 ▼2 −0.100 − 0.083 [−0.65] −0.183 sum of the \
pushes [−0.24] −0.067 credit [0] 0.000 tax [−0.24] −0.067 / 70+15=85 [0.79] +0.225 / #85 [0.44] \
+0.125 / ▲1 reward 1 A = +0.500 T = 4 / carry 1 [−0.79] −0.225 / 30+40=70 [−0.35] −0.100 / #75 \
[−0.35] −0.100 / ▼2 reward 0 A = −0.500 T = 5 / #85 [1] +0.283 / ▲3 reward 1 A = +0.500 T = 2 / \
40+48=88 [−0.76] −0.217 / 88-3=85 [−0.44] −0.125 / #84 [−0.44] −0.125 / ▼4 reward 0 A = −0.500 T \
= 4"""


def test_the_story_and_the_controls_show_what_losses_say(tmp_path):
    page, story = tree.toy_page(), read(STORY)
    seen = press(page, [*story], tmp_path)
    assert {key: sums(shown) for key, shown in seen.items()} == story
    for key, text in read(GROUPS).items():
        assert " / ".join(seen[key]["tree"]) == text
    assert "goes from +0.025 to −0.067." in page  # steps 1 and 6


# A group of a run: with --scale mean, and eps_low 0.5. Its policy has moved by 0.6 where answers
# share a token; in the second group two answers have A = 0.
RUN = """\
policy after it | so cancels ▲1 0.0750 − 0.0050 [0.41] +0.0700 ▼2 −0.0600 − 0.0500 [−0.65] \
−0.1100 ▲3 0.1500 − (−0.0200) [1] +0.1700 ▼4 −0.0750 − 0.0550 [−0.76] −0.1300 sum of the pushes \
[0] 0.0000 credit [0] 0.0000 tax [0] 0.0000 / 7+8=15 ▲1 0.0750 − 0.0050 [0.41] +0.0700 ▼2 −0.0600 \
− 0.0500 [−0.65] −0.1100 sum of the pushes [−0.24] −0.0400 credit [0] 0.0000 tax [−0.24] −0.0400 \
/ 70+15=85 [0.66] +0.1125 / NASTY [0.66] +0.1125 / ▲1 reward 1 A = +0.5000 T = 4 s = 0.7348 / \
carry 1 [−0.31] −0.0525 / 30+40=70 [0] 0.0000 / #75 [0] 0.0000 / ▼2 reward 0 A = −0.5000 T = 5 s \
= 0.4844 / #85 [0.85] +0.1445 / ▲3 reward 1 A = +0.5000 T = 2 s = 0.5532 / 40+48=88 [−0.76] \
−0.1300 / 88-3=85 [−0.44] −0.0750 / #84 [−0.44] −0.0750 / ▼4 reward 0 A = −0.5000 T = 4 s = \
0.6000
group 2: second | so well cancels ▲1 0.1500 − (−0.0500) [0.59] +0.2000 ●2 0.0000 − 0.0000 [0] \
0.0000 ●3 0.0000 − 0.0000 [0] 0.0000 ▼4 −0.1500 − 0.0500 [−0.59] −0.2000 sum of the pushes [0] \
0.0000 credit [0] 0.0000 tax [0] 0.0000 / 70+15=85 [1] +0.3375 / #85 [0.67] +0.2250 / ▲1 reward 2 \
A = +1.0000 T = 4 s = 0.7348 / carry 1 [0] 0.0000 / 30+40=70 [0] 0.0000 / #85 [0] 0.0000 / ●2 \
reward 1 A = 0.0000 T = 5 s = 0.4844 / ●3 reward 1 A = 0.0000 T = 2 s = 0.5532 / 88-3=85 [−0.67] \
−0.2250 / #84 [−0.44] −0.1500 / ▼4 reward 0 A = −1.0000 T = 4 s = 0.6000"""


def test_a_run_shows_its_newest_batch_and_runs_no_text_of_a_model(tmp_path):
    flags = ["--steps", 1, "--prefix-baseline", "--hyper", "eps_low=0.5 kl=0.04", "--scale", "mean"]
    folder = run(tmp_path / "run", *flags)
    (path,) = folder.glob("batches/*.pt")
    # Two groups, as if they were a later batch of the run, and between them one of equal rewards.
    groups, saved = [tree.toy_group("unequal", won) for won in ("1010", "1111", "1100")], {}
    groups[0].texts[0][-1] = NASTY
    groups[2].tokens[:, 1] = 99  # all share two tokens
    for row in groups[2].texts:
        row[1] = "well"
    for key in ("tokens", "mask", "rewards"):
        saved[key] = torch.cat([getattr(group, key) for group in groups])
    saved["rewards"][8:] = torch.tensor([2.0, 1.0, 1.0, 0.0])  # two have A = 0
    saved["logp_old"] = torch.cat([group.old for group in groups])
    saved["logp"] = torch.cat([group.logp[1] for group in groups])  # 0.6 where they share
    saved["pieces"] = [row for group in groups for row in group.texts]
    saved |= dict(step=10, group_size=4, prompts=[NASTY, "dull", "second"], max_tokens=5)
    assert saved.keys() <= torch.load(path).keys()
    torch.save(saved, path.with_name("step-000010.pt"))
    tree.main([str(folder)])
    shown = read(RUN)
    seen = press((folder / "tree.html").read_text(), [*shown], tmp_path)
    assert {key: " / ".join(of["tree"]) for key, of in seen.items()} == {
        key: text.replace("NASTY", NASTY) for key, text in shown.items()
    }
    assert {of["images"] for of in seen.values()} == {0}
    assert f"Groups of {folder}, a run of grpo, at step 10." in seen["policy after it"]["lead"]


# ---------------- what follows the tree

PRESSES = """\
up | only on | identity-w2 0.45 | GRPO: 1/T | REINFORCE, answers 1
only losers | r = 0.61 | clip-r + | r = 1
half | the group's mean | 3: worse
lengths-a 9 | lengths-b 18 | lengths-c 3 | lengths-d 20 | lengths-q 0.3
it rises
to the crumb | … from | crumb-B 2 | crumb-c 0.6 | crumb-q 0.55 | crumb-p 2 | crumb-p 99"""
PRESSES = [press.strip() for press in re.split(r"[|\n]", PRESSES)]


@pytest.fixture(scope="module")
def article(tmp_path_factory):
    """What is shown after each of PRESSES, on a phone."""
    return press(tree.toy_page(), PRESSES, tmp_path_factory.mktemp("article"), 390)


def test_the_page_needs_no_network_and_fits_a_phone(article):
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", tree.toy_page())
    assert max(shown["beyond"] for shown in article.values()) <= 0


def test_a_guess_is_judged_and_its_answer_has_the_numbers_of_its_figure(article):
    said = article[PRESSES[-1]]["said"]
    assert [text.split(".")[0] for text in said] == "Yes Yes Yes No Yes Yes".split()
    assert "by 0.150" in said[0]  # as in step 1 of the story
    answers = {"only on": said[1], "only losers": said[2], "half": said[3], "to the crumb": said[5]}
    for section, (key, answer) in zip(SHOWN, answers.items(), strict=True):
        numbers = re.findall(r"\d\.\d\d+", answer)
        assert [x for x in numbers if x not in article[key]["figures"][section]] == [], key


# A section's numbers after a press: by hand in "identity" and in "clip", where a weight
# is r, 1 or 0 (but for sapo). Those of "lengths" are toy.tax's, with SIZE = 0.8 and one
# update a batch; the pulls of "crumb" are those of toy.crumb's enumerated groups.
SHOWN = {
    "identity": """\
only on: 0.20 0.20 0.40 0.20 ▲1 +0.100 ▼2 −0.100 ▲3 +0.200 ▼4 −0.100 +0.100 0.000 +0.100 \
▲1 +0.100 ▼2 −0.100 0.000 0.000 0.000
identity-w2 0.45: 0.20 0.45 0.40 0.20 ▲1 +0.100 ▼2 −0.225 ▲3 +0.200 ▼4 −0.100 −0.025 0.000 −0.025 \
▲1 +0.100 ▼2 −0.225 −0.125 0.000 −0.125
GRPO: 1/T: 0.25 0.20 0.50 0.25 ▲1 +0.125 ▼2 −0.100 ▲3 +0.250 ▼4 −0.125 +0.150 0.000 +0.150 \
▲1 +0.125 ▼2 −0.100 +0.025 0.000 +0.025
REINFORCE, answers 1: 0.20 0.20 0.20 0.20 ▲1 +0.100 ▲2 +0.100 ▼3 −0.100 ▼4 −0.100 0.000 0.000 \
0.000 ▲1 +0.100 ▲2 +0.100 +0.200 +0.200 0.000""",
    "clip": """\
only losers: 1.61 ▲1.00 ▼1.00 cancels ▲0.00 ▼1.61 left −1.610 ▲0.00 ▼0.00 no push \
▲1.61 ▼1.61 cancels ▲0.00 ▼1.61 left −1.610 ▲0.00 ▼1.61 left −1.610 \
▲0.00 ▼1.61 left −1.610 ▲0.00 ▼0.00 no push ▲1.47 ▼1.46 left +0.014
r = 0.61: 0.61 ▲1.00 ▼1.00 cancels ▲0.61 ▼0.00 left +0.610 ▲0.00 ▼0.00 no push \
▲0.61 ▼0.61 cancels ▲0.61 ▼0.00 left +0.610 ▲0.61 ▼0.00 left +0.610 \
▲0.61 ▼0.61 cancels ▲0.00 ▼0.00 no push ▲0.59 ▼0.59 left +0.002
clip-r +: 0.63 ▲1.00 ▼1.00 cancels ▲0.63 ▼0.00 left +0.630 ▲0.00 ▼0.00 no push \
▲0.63 ▼0.63 cancels ▲0.63 ▼0.00 left +0.630 ▲0.63 ▼0.00 left +0.630 \
▲0.63 ▼0.63 cancels ▲0.00 ▼0.00 no push ▲0.61 ▼0.61 left +0.002""",
    "lengths": """\
half: 24 6 32 32 0.00 0.411 0.411 0.597
the group's mean: 24 6 32 32 0.00 0.411 0.587 0.597
3: worse: 16 16 4 24 0.20 0.205 0.592 0.597
lengths-q 0.3: 9 18 3 20 0.30 0.302 0.386 0.597""",
    "crumb": """\
to the crumb: 0.10 0.45 5 % 8 −0.082 0.100 +1.349 0.450 +0.306 0.450
crumb-B 2: 0.10 0.45 10 % 2 +0.052 0.450 +0.414 0.450 +0.306 0.450
crumb-p 2: 0.60 0.55 2 % 2 +0.222 0.583 +0.266 0.593 −0.044 0.600
crumb-p 99: 0.60 0.55 99 % 2 −0.059 0.583 −0.083 0.593 −0.044 0.600""",
}


# Where it is drawn: the ends of lines, 12 from the right, and at 192 for 0 and 290 higher for 1;
# the mark at a ratio, 75 for 1. A strip changes where the pull changes its sign, at a share of
# 0.080, and for the batch of 64 answers at 0.008. Its bar is at the start.
DRAWN = """\
clip | only losers | M120.75
lengths | the group's mean | c 317.0 18.8 a 317.0 72.7 b 317.0 21.7
crumb | to the crumb | l20w41 l9w52 w61 28.66 28.66 28.66"""


@pytest.mark.parametrize("section", SHOWN)
def test_a_figure_shows(section, article):
    for line in SHOWN[section].splitlines():
        key, _, numbers = line.rpartition(": ")
        assert article[key]["figures"][section].replace("\n", " ") == numbers, key


def test_lines_are_drawn_where_their_numbers_are(article):
    for line in DRAWN.splitlines():
        section, key, places = line.split(" | ")
        assert article[key]["drawn"][section] == places, section
    # At r = 1.61 GRPO stops winners, and losers push 1.61 times as hard: 110 is 0, and 55 up is 1.
    lines = re.findall('<polyline class="(?:win|lose)" points="(.*?)"', clips.panel("grpo"))
    place = clips.RATIOS.index(1.61)
    assert [line.split()[place] for line in lines] == ["120.8,110.0", "120.8,21.4"]
