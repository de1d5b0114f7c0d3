"""To whoever presses the tree page's buttons, in the notebook's frame, too: it draws what losses.py
says."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import losses
import train
from toy import tree

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium, in which to press the page")
STORY = re.findall(
    r'<button value="(.*?)">', Path(tree.__file__).with_name("tree_page.html").read_text()
)
START = "method=reinforce&cancel=off&lengths=unequal&won=1010&moved=1&spread=none"
NASTY = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
# Presses one element after the other, and notes what is drawn after each. An element is the start
# of a button's text, or the name of a control and what is chosen there.
PRESS = """<script type="module">
  const all = (selector) => [...document.querySelectorAll(selector)];
  const texts = (selector) => all(selector).map((element) => element.textContent);
  const sign = (bar) => (bar.matches(".minus") ? -1 : 1);
  // The wait lets a text of a model, if it ran, run before its traces are looked for.
  const wait = () => new Promise((done) => setTimeout(done, 200));
  do await wait(); while (!("ready" in document.body.dataset));
  top.document.documentElement.dataset.seen = JSON.stringify(PRESSES.map(([name, value]) => {
    const [first, ...others] = document.getElementsByName(name);
    if (!first) all("button").find((button) => button.textContent.startsWith(name)).click();
    else if (others.length) [first, ...others].find((radio) => radio.value === value).click();
    else { first.value = value; first.onchange(); }
    return {
      numbers: texts("#tree output").map((text) => Number(text.replace("−", "-"))),
      bars: all("#tree .track").map((bar) => sign(bar) * bar.style.getPropertyValue("--v")),
      labels: texts(".line small"), title: document.title, verdicts: texts("#tree .verdict"),
      leaves: texts("#tree .leaf").join(), about: all("#tree .chip").map((chip) => chip.title),
      said: texts("#say").join(),
    };
  }));
</script></html>"""


def press(page: str, presses: list, folder: Path) -> list[dict]:
    """What a browser shows after each press, in a frame as that of exercises/tour.ipynb."""
    page = page.replace("</html>", PRESS.replace("PRESSES", json.dumps(presses)))
    page = f'<iframe srcdoc="{html.escape(page)}" width="100%" height="900"></iframe>'
    (folder / "page.html").write_text(page)
    flags = "--headless --no-sandbox --disable-gpu --virtual-time-budget=99000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder}", folder / "page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', done.stdout)[1]))


def expect(group: tree.Group, state: int, method, cancel: str, look: int = 0) -> list[float]:
    """What losses.py says of a group under one of its policies, in the order of the page."""
    A = losses.group_advantages(group.rewards, 4, method.scale)
    adv, logp = A[:, None].expand_as(group.old), group.logp[state].clone().requires_grad_()
    batch = losses.Batch(logp, group.old, adv, group.mask, 4, group.max_tokens)
    loss = method.passes[0](batch)
    if cancel == "on":
        loss = losses.cancel(loss, batch, group.nodes)
    return drawn(group.texts, losses.token_coefficients(loss, logp), A, look)


def drawn(texts: list[list[str]], c, A, look: int, rows=range(4), t: int = 0) -> list[float]:
    """The numbers of the tree from top to bottom: the pushes on a shared token, their sum, its
    credit and its tax; then what follows it, or the other tokens of an answer.

    look: the place of the token that is looked at in answer 1.
    """
    numbers, branches = [], {}
    for i in rows:
        branches.setdefault(texts[i][t] if t < len(texts[i]) else i, []).append(i)
    for rows in branches.values():
        if len(rows) == 1:
            numbers += c[rows[0], t : len(texts[rows[0]])].tolist()
            continue
        end = len(os.path.commonprefix([texts[i] for i in rows]))
        pushes, of = c[rows, look if 0 in rows and t <= look < end else t], A[rows]
        credit = (pushes / of)[of != 0].mean() * of.sum() if of.any() else 0.0
        numbers += [*pushes.tolist(), *map(float, (pushes.sum(), credit, pushes.sum() - credit))]
        numbers += drawn(texts, c, A, look, rows, end)
    return numbers


def check(shown: dict, numbers: list[float]):
    """The numbers, their bars, and what their labels come to, such as "1/4×0.500"."""
    assert shown["numbers"] == pytest.approx(numbers, abs=6e-4)
    labels = [eval(label.replace("−", "-").replace("×", "*")) for label in shown["labels"]]
    assert labels == pytest.approx([*numbers[:4], *numbers[7:9]], abs=1.6e-3)
    longest = max(map(abs, numbers)) or 1
    assert [bar * longest for bar in shown["bars"]] == pytest.approx(numbers, abs=1e-3)


def test_the_story_and_every_method_show_what_losses_say(tmp_path):
    methods, settings, presses = tree.toy_methods(), [], [("1 ", "")]
    for step, values in enumerate(STORY, 1):
        setting = f"{START}&{html.unescape(values)}"
        chosen = dict(pair.split("=") for pair in setting.split("&"))
        settings += [chosen, chosen | {"won": chosen["won"][:3] + "1"}, chosen]  # answer 4 wins
        presses += [("▼4", ""), ("you changed", ""), (f"next: {step + 1}", "")]
    pressed = [("method", name) for name in methods]
    changes = [("lengths", "unequal"), ("moved", "1.6"), ("spread", "wide"), *pressed]
    changes += [("cancel", "on"), ("moved", "0.6"), ("lengths", "equal"), *pressed]
    chosen = settings[-1]
    for change in changes:
        chosen = chosen | dict([change])
        settings.append(chosen)
    seen = press(tree.toy_page(), presses[:-1] + changes, tmp_path)
    for shown, chosen in zip(seen, settings, strict=True):
        group = tree.toy_group(chosen["lengths"], chosen["won"])
        state = tree.MOVED.index(chosen["moved"]) * 2 + [*tree.SPREAD].index(chosen["spread"])
        check(shown, expect(group, state, methods[chosen["method"]], chosen["cancel"]))
    steps, pressed = seen[: 3 * len(STORY) : 3], seen[1 : 3 * len(STORY) : 3]
    for shown, then in zip(steps, pressed, strict=True):
        assert then["said"].replace("At the start of this step: ", "") == shown["said"]
        assert then["said"] != shown["said"]
    # The tax of "so", and the push on 7+8=15, which answers 1 and 2 share.
    taxed = [abs(shown["numbers"][6]) > 1e-3 for shown in steps]
    assert taxed == [False, False, True, True, True, False, False, False]
    chosen = [shown["numbers"][9] for shown in steps]
    assert [abs(push) > 1e-3 for push in chosen[4:]] == [True, True, False, False] and chosen[1] > 0
    assert [steps[k]["verdicts"] for k in (0, 1, 4)] == [["cancels"] * 2, ["cancels"], []]
    # Step 3: r of an answer's own last token, and s of the answer, the geometric mean of four r.
    assert all(f"s = {r ** (2 / 4):.3f}" in steps[2]["leaves"] for r in (1.5, 0.7))
    assert "r = 1.500" in steps[2]["about"][0]


def test_a_run_shows_its_newest_batch_and_runs_no_text_of_a_model(tmp_path):
    run = tmp_path / "run"
    flags = "--cancel --steps 1 --warm-steps 0 --layers 1 --width 16 --prompts 4 --eval-items 2"
    train.main([*flags.split(), "--hyper", "eps_high=0.04 kl=0.04", "--out", str(run)])
    (path,) = run.glob("batches/*.pt")
    # Another batch. In its first group no token is shared. In the second all answers share two
    # tokens, 1 and 2 a third, and in 2 and 4 A = 0.
    tokens = torch.tensor([[0, 1, 2, 4], [0, 1, 2, 5], [0, 1, 3, 6], [0, 1, 4, 7]]).repeat(1, 4)
    pieces = [[(NASTY, " b", "c\n", *"defgh")[k] for k in row] for row in tokens.tolist()]
    mask = torch.arange(16) < torch.tensor([[16], [5], [9], [12]])
    rewards = torch.tensor([0, 0.5, 1, 0.5]).double()
    old, new = -torch.rand(2, 4, 16, generator=torch.Generator().manual_seed(0)).double() / 2
    saved = torch.load(path) | {"logp_old": old, "logp": new, "rewards": rewards, "mask": mask}
    saved |= {k: torch.cat([saved[k]] * 2) for k in ("logp_old", "logp", "rewards", "mask")}
    saved["tokens"] = torch.cat([9 + torch.arange(64).view(4, 16), tokens])
    saved |= {"pieces": pieces * 2, "prompts": ["other", NASTY]}
    torch.save(saved | {"group_size": 4, "max_tokens": 20}, path.with_name("step-000010.pt"))
    os.utime(path, (2e9, 2e9))  # the newest file is not the newest batch
    tree.main([str(run)])
    page = (run / "tree.html").read_text()
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", page)  # it needs no network
    seen = press(page, [("policy", "after it"), ("␣b", ""), ("cancel", "off")], tmp_path)
    shown = (3 + tree.OWN, 5, 9, 2 + tree.OWN)  # tokens
    texts = [row[:n] for row, n in zip(pieces, shown, strict=True)]
    group = tree.Group("", texts, tokens, mask, rewards, old, new[None], 20)
    method = train.bind("grpo", {"eps_high": 0.04})
    for k, cancel in enumerate(["on", "on", "off"]):
        check(seen[k], expect(group, 0, method, cancel, look=int(k > 0)))
        assert "hacked" not in seen[k]["title"]


def test_the_picture_of_the_readme_has_the_numbers_of_losses():
    text, expected = Path(tree.__file__).with_name("tree.svg").read_text().replace("−", "-"), []
    A, lengths = torch.tensor([0.5, -0.5, 0.5, -0.5]), torch.tensor([4, 5, 2, 4])
    for divisor in (torch.full((4,), 5), lengths):
        c = A / divisor
        expected += [*c.tolist(), float(c.sum())]
    sums = re.findall(r">([+-]?0\.\d{3})<", text)
    half = len(sums) // 2
    shown = [float(x) for x in sums[:5] + sums[half : half + 5]]
    assert shown == pytest.approx(expected, abs=5e-4)
