"""To whoever presses the article's buttons, on its own or in the notebook's frame: it draws what
losses.py says, and its words and sentences fit its numbers."""

import base64
import html
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
import torch
from conftest import run

from toy import tree

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Presses one element after the other, and notes what is drawn after each. An element is the start
# of a button's text, or "name→what" for a control and what is chosen there; "+" is an arrow key.
PRESS = """<script type="module">
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const texts = (selector, of) => all(selector, of).map(({ textContent }) => textContent);
  const numbers = (of) => (of.textContent.match(/[−+]?\\d\\.\\d\\d+/g) ?? []).join(" ");
  const long = (of) => Number(Number(of.style.getPropertyValue("--v")).toFixed(2));
  const bar = (of) => `[${of.matches(".minus") ? "−" : ""}${long(of)}]`;
  const last = (path) => `${path.className.baseVal} ${path.getAttribute("d").split("L").at(-1)}`;
  const runs = (of) => all("i", of).map((cell) => cell.className[0]).join("")
    .replace(/(.)\\1*/g, (run) => run[0] + run.length);
  const atRatio = (line) => { // where the line is drawn at the slider's ratio
    const { ratios } = JSON.parse(document.getElementById("facts").textContent);
    const [{ value }] = document.getElementsByName("clip-r");
    return line.getAttribute("points").split(" ")[ratios.indexOf(Number(value))];
  };
  const section = (of) => [...texts("figure output, .card .who", of),
    ...all(".plot path[class]", of).map(last),
    ...all(".at", of).slice(0, 1).map((path) => path.getAttribute("d").slice(0, 7)),
    ...all(".panels div:nth-child(2) polyline", of).map(atRatio),
    ...all(".strip", of).map(runs),
    ...all(".strip b", of).map((mark) => mark.style.left.slice(0, 5)),
  ].join(" ").replace(/\\s+/g, " ");
  const wait = () => new Promise((done) => setTimeout(done, 50));
  while (!("ready" in document.body.dataset)) await wait();
  top.document.documentElement.dataset.seen = JSON.stringify(PRESSES.map((press) => {
    const [name, value] = press.split("→");
    const [first, ...others] = value ? document.getElementsByName(name) : [];
    if (!first) all("button").find((of) => of.textContent.startsWith(name)).click();
    else if (others.length) [first, ...others].find((radio) => radio.value === value).click();
    else {
      if (value === "+") first.stepUp();
      else first.value = value;
      (first.onchange ?? first.oninput)();
    }
    return {
      sums: all("#tree .card").map((of) => [texts(".text", of)[0], ...texts(".verdict", of),
        ...texts("output", of).slice(-3)].join(" ")).join(", "),
      tree: all("#tree .card, #tree .chip, #tree .leaf").map((of) => all("*", of)
        .filter((part) => !part.firstElementChild)
        .map((part) => (part.matches(".fill") ? bar(part.parentNode) : part.textContent))
        .filter((text) => text.trim()).join(" ")).join(" / "),
      says: numbers(document.getElementById("say")),
      lead: texts("#lead")[0],
      formula: texts("#method")[0],
      prompt: texts(".prompt")[0],
      guesses: all(".guess p:last-child:not([hidden])")
        .map((of) => `${of.textContent.split(".")[0]} ${numbers(of)}`.trim()).join(", "),
      ...Object.fromEntries(all("section[id]").map((of) => [of.id, section(of)])),
      images: String(all("img").length),
      beyond: document.documentElement.scrollWidth - innerWidth,
    };
  }));
</script></html>"""


def press(page: str, presses: list[str], folder: Path, width: int) -> dict[str, dict]:
    """What a browser shows after each press; in a frame of this width, as in the notebook's."""
    page = page.replace("</html>", PRESS.replace("PRESSES", json.dumps(presses)))
    page = f'<iframe srcdoc="{html.escape(page)}" width="{width}" height="900"></iframe>'
    (folder / "page.html").write_text(page)
    flags = "--headless --no-sandbox --disable-gpu --virtual-time-budget=999000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder}", folder / "page.html"]
    for _ in range(3):  # on a very busy machine the browser may give up before the page is done
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if found := re.search(r'data-seen="([^"]*)"', done.stdout):
            break
    return dict(zip(presses, json.loads(html.unescape(found[1])), strict=True))


# ---------------- the article

# The tree. Its sums are, of each card, the first token, the verdict, the net push, the credit and
# the tax. A is 0.5 and -0.5 (after "▼4": 0.25 and -0.75), and lengths are 4, 5, 2, 4, or all 4; so
# the first eleven follow by hand. So does "next: 9", a real model's answers: A is 5/8 three times
# and -3/8 five times, and lengths are 11, but 24 of a wrong one. After the step 4 and 5 are beyond
# the clip range. A group in full has labels, bars as parts of the longest, and numbers.
STORY = """\
1  | sums | so +0.150 0.000 +0.150, 7+8=15 +0.025 0.000 +0.025
1  | says | +0.150
next: 2 | sums | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
▼4 | sums | so cancels 0.000 0.000 0.000, 7+8=15 −0.100 −0.100 0.000
you changed | sums | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
next: 3 | sums | so cancels 0.000 0.000 0.000, 7+8=15 +0.200 +0.200 0.000
next: 4 | sums | so +0.034 0.000 +0.034, 7+8=15 +0.049 0.000 +0.049
next: 4 | tree | so ▲1 0.306×0.500 [1] +0.153 ▼2 0.209×(−0.500) [−0.68] −0.105 ▲3 0.221×0.500 \
[0.72] +0.111 ▼4 0.250×(−0.500) [−0.82] −0.125 net push [0.22] +0.034 credit [0] 0.000 tax [0.22] \
+0.034 / 7+8=15 ▲1 0.306×0.500 [1] +0.153 ▼2 0.209×(−0.500) [−0.68] −0.105 net push [0.32] +0.049 \
credit [0] 0.000 tax [0.32] +0.049 / 70+15=85 [1] +0.153 / #85 [1] +0.153 / ▲1 reward 1 A = +0.500 \
T = 4 s = 1.225 / 30+40=70 [−0.68] −0.105 / #75 [−0.68] −0.105 / ▼2 reward 0 A = −0.500 T = 4 s = \
0.837 / 37+40=77 [0.72] +0.111 / 77+8=85 [0.72] +0.111 / #85 [0.72] +0.111 / ▲3 reward 1 A = \
+0.500 T = 4 s = 0.885 / 40+48=88 [−0.82] −0.125 / 88-3=85 [−0.82] −0.125 / #84 [−0.82] −0.125 / \
▼4 reward 0 A = −0.500 T = 4 s = 1.000
next: 5 | sums | so −0.400 0.000 −0.400, 7+8=15 −0.200 0.000 −0.200
next: 6 | sums | so cancels 0.000 0.000 0.000, 7+8=15 −0.067 0.000 −0.067
next: 6 | tree | so cancels ▲1 0.125 − 0.008 [0.41] +0.117 ▼2 −0.100 − 0.083 [−0.65] −0.183 ▲3 \
0.250 − (−0.033) [1] +0.283 ▼4 −0.125 − 0.092 [−0.76] −0.217 net push [0] 0.000 credit [0] 0.000 \
tax [0] 0.000 / 7+8=15 ▲1 0.125 − 0.008 [0.41] +0.117 ▼2 −0.100 − 0.083 [−0.65] −0.183 net push \
[−0.24] −0.067 credit [0] 0.000 tax [−0.24] −0.067 / 70+15=85 [0.79] +0.225 / #85 [0.44] +0.125 / \
▲1 reward 1 A = +0.500 T = 4 / carry 1 [−0.79] −0.225 / 30+40=70 [−0.35] −0.100 / #75 [−0.35] \
−0.100 / ▼2 reward 0 A = −0.500 T = 5 / #85 [1] +0.283 / ▲3 reward 1 A = +0.500 T = 2 / 40+48=88 \
[−0.76] −0.217 / 88-3=85 [−0.44] −0.125 / #84 [−0.44] −0.125 / ▼4 reward 0 A = −0.500 T = 4
next: 6 | says | +0.025 −0.067
▲1 | sums | so cancels 0.000 0.000 0.000, 7+8=15 −0.283 −0.283 0.000
next: 7 | sums | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
next: 8 | sums | so no push 0.000 0.000 0.000, 7+8=15 no push 0.000 0.000 0.000
method→reinforce | sums | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
method→cispo | formula | J = sg[clip(r)] A log pi / tokens
method→cispo | sums | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
spread→wide | sums | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
moved→0.6 | sums | so cancels 0.000 0.000 0.000, 7+8=15 cancels 0.000 0.000 0.000
method→gspo | sums | so +0.158 0.000 +0.158, 7+8=15 +0.092 0.000 +0.092
baseline→on | sums | so cancels 0.000 0.000 0.000, 7+8=15 +0.009 0.000 +0.009
method→dfpo-min | sums | so cancels 0.000 0.000 0.000, 7+8=15 −0.006 0.000 −0.006
next: 9 | sums | 2 +0.018 0.000 +0.018, 4 −0.152 −0.152 0.000, <|im_end|> −0.136 −0.136 0.000, 5 \
+0.170 +0.170 0.000
next: 9 | says | 0.018
policy→after it | sums | 2 +0.018 0.000 +0.018, 4 no push 0.000 0.000 0.000, <|im_end|> −0.146 \
−0.146 0.000, 5 no push 0.000 0.000 0.000
method→dr-grpo | sums | 2 cancels 0.000 0.000 0.000, 4 no push 0.000 0.000 0.000, <|im_end|> \
−0.067 −0.067 0.000, 5 no push 0.000 0.000 0.000"""
# What follows the tree. By hand in "identity" and in "clip", where a weight is r, 1 or 0. Those
# of "lengths" are toy.tax's, with worlds.SIZE = 0.8 and one update a batch; the pulls of "crumb"
# are those of toy.crumb's groups. Then comes where it is drawn. In "clip" the mark, 75 for 1, and
# GRPO's winners and losers there, 110 for 0 and 55 higher for 1. In "lengths" the ends of lines,
# at 192 for 0 and 290 higher for 1. In "crumb" a strip changes where the pull changes its sign,
# at a share of 0.080, and for the batch of 64 answers at 0.008; its bar is at the start.
FIGURES = """\
up
only “so” | identity | 0.20 0.20 0.40 0.20 ▲1 +0.100 ▼2 −0.100 ▲3 +0.200 ▼4 −0.100 +0.100 0.000 \
+0.100 ▲1 +0.100 ▼2 −0.100 0.000 0.000 0.000
identity-w2→0.45 | identity | 0.20 0.45 0.40 0.20 ▲1 +0.100 ▼2 −0.225 ▲3 +0.200 ▼4 −0.100 −0.025 \
0.000 −0.025 ▲1 +0.100 ▼2 −0.225 −0.125 0.000 −0.125
GRPO: 1/T | identity | 0.25 0.20 0.50 0.25 ▲1 +0.125 ▼2 −0.100 ▲3 +0.250 ▼4 −0.125 +0.150 0.000 \
+0.150 ▲1 +0.125 ▼2 −0.100 +0.025 0.000 +0.025
REINFORCE, answers 1 | identity | 0.20 0.20 0.20 0.20 ▲1 +0.100 ▲2 +0.100 ▼3 −0.100 ▼4 −0.100 \
0.000 0.000 0.000 ▲1 +0.100 ▲2 +0.100 +0.200 +0.200 0.000
only losers | clip | 1.61 ▲1.00 ▼1.00 cancels ▲0.00 ▼1.61 net push −1.610 ▲0.00 ▼0.00 no push \
▲1.61 ▼1.61 cancels ▲0.00 ▼1.61 net push −1.610 ▲1.61 ▼1.61 cancels M120.75 120.8,110.0 120.8,21.4
r = 0.61 | clip | 0.61 ▲1.00 ▼1.00 cancels ▲0.61 ▼0.00 net push +0.610 ▲0.00 ▼0.00 no push ▲0.61 \
▼0.61 cancels ▲0.61 ▼0.00 net push +0.610 ▲0.61 ▼0.61 cancels M45.75 45.8,76.5 45.8,110.0
clip-r→+ | clip | 0.63 ▲1.00 ▼1.00 cancels ▲0.63 ▼0.00 net push +0.630 ▲0.00 ▼0.00 no push ▲0.63 \
▼0.63 cancels ▲0.63 ▼0.00 net push +0.630 ▲0.63 ▼0.63 cancels M47.25 47.3,75.4 47.3,110.0
r = 1
half | lengths | 24 6 32 32 0.00 0.411 0.411 0.597 c 317.0 18.8 a 317.0 72.7 b 317.0 72.7
the group mean | lengths | 24 6 32 32 0.00 0.411 0.587 0.597 c 317.0 18.8 a 317.0 72.7 b 317.0 \
21.7
3: worse | lengths | 16 16 4 24 0.20 0.205 0.592 0.597 c 317.0 18.8 a 317.0 132.4 b 317.0 20.3
lengths-a→9
lengths-b→18
lengths-c→3
lengths-d→20
lengths-q→0.3 | lengths | 9 18 3 20 0.30 0.302 0.386 0.597 c 317.0 18.8 a 317.0 104.4 b 317.0 \
80.0
it rises
at the bonus | crumb | 0.10 0.45 5% 8 −0.082 0.100 +1.349 0.450 +0.306 0.450 l20w41 l9w52 w61 \
28.66 28.66 28.66
… from
crumb-B→2 | crumb | 0.10 0.45 10% 2 +0.052 0.450 +0.414 0.450 +0.306 0.450 l20w41 l16w45 w61 34.07 \
34.07 34.07
crumb-c→0.6
crumb-q→0.55
crumb-p→2 | crumb | 0.60 0.55 2% 2 +0.222 0.583 +0.266 0.593 −0.044 0.600 w28l33 w23l38 l61 21.79 \
21.79 21.79
crumb-p→99 | crumb | 0.60 0.55 99% 2 −0.059 0.583 −0.083 0.593 −0.044 0.600 w28l33 w23l38 l61 \
83.29 83.29 83.29
crumb-p→99 | guesses | Yes 0.150, Yes, Yes 1.61, No 0.411 0.597, Yes 0.84 1.12 0.64 0.48, Yes \
0.45"""


@pytest.mark.skipif(not CHROMIUM, reason="no chromium, in which to press the page")
def test_the_article_says_and_draws_what_losses_say_and_fits_a_phone(tmp_path):
    """A line is "press", or "press | part | what it shows"."""
    page = tree.toy_page()
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", page)  # it needs no network
    rows = [line.split(" | ") for line in f"{STORY}\n{FIGURES}".splitlines()]
    seen = press(page, list(dict.fromkeys(row[0] for row in rows)), tmp_path, 390)
    for key, part, text in (row for row in rows if len(row) == 3):
        assert seen[key][part] == text, (key, part)
    assert max(shown["beyond"] for shown in seen.values()) <= 0


# ---------------- a run


def test_a_run_shows_its_last_batch_and_runs_no_text_of_a_model(tmp_path, easy):
    """Groups whose rewards differ come first. A is the run's, R - mean(R)."""
    flags = "--steps 3 --eval-every 2 --prefix-baseline --scale mean --max-tokens 8"
    folder = run(tmp_path / "run", *flags.split(), "--hyper", "eps_low=0.5 kl=0.04")
    tree.main([str(folder)])
    page = (folder / "tree.html").read_text()
    packed = re.search(r'<script[^>]* id="data"[^>]*>(.*?)</script>', page, re.S)[1]
    data = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert data["start"] | {"method": "grpo", "baseline": "on"} == data["start"]
    saved = torch.load(folder / "batches" / "step-000003.pt", weights_only=True)
    for scene in map(json.loads, [*data["scenes"].values()][:2]):
        k = saved["prompts"].index(scene["prompt"])
        R, mask, old, new = (
            saved[key][3 * k : 3 * k + 3] for key in ("rewards", "mask", "logp_old", "logp")
        )
        assert R.std() > 0 and scene["rewards"] == R.tolist()
        assert scene["texts"][1] == saved["pieces"][3 * k + 1][: mask[1].sum()]
        change = ((new - old).sum(1) / mask.sum(1)).exp()
        assert scene["s"] == [[1.0] * 3, pytest.approx(change.tolist())]
        assert scene["losses"]["grpo"]["A"] == pytest.approx((R - R.mean()).tolist())
    assert "innerHTML" not in page  # a text is never markup
