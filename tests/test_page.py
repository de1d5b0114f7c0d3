"""What the tree page draws is what losses.py says. Promised to whoever presses its buttons, in a
browser and in the notebook's frame."""

import html
import json
import os
import random
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
browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium here, in which the page is pressed")
FOLDER = Path(tree.__file__).parent
STORY = re.findall(r'<button value="(.*?)">', (FOLDER / "tree_page.html").read_text())
START = "method=reinforce&cancel=off&lengths=unequal&won=1010&moved=1&spread=none"
CONTROLS = ("method", "cancel", "lengths", "moved", "spread")
NASTY = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
# Presses one element after the other, and notes what is drawn after each. An element is the start
# of a button's text, or the name of a control and what is chosen there.
PRESS = """<script type="module">
  const all = (selector) => [...document.querySelectorAll(selector)];
  const texts = (selector) => all(selector).map((element) => element.textContent);
  const sign = (bar) => (bar.matches(".minus") ? -1 : 1);
  while (!("ready" in document.body.dataset)) await new Promise((done) => setTimeout(done, 20));
  top.document.documentElement.dataset.seen = JSON.stringify(PRESSES.map(([name, value]) => {
    const [first, ...others] = document.getElementsByName(name);
    if (!first) all("button").find((button) => button.textContent.startsWith(name)).click();
    else if (others.length) [first, ...others].find((radio) => radio.value === value).click();
    else { first.value = value; first.onchange(); }
    return {
      say: document.getElementById("say").textContent,
      next: !document.getElementById("next").hidden,
      numbers: texts("#tree output").map((text) => Number(text.replace("−", "-"))),
      bars: all("#tree .track").map((bar) => sign(bar) * bar.style.getPropertyValue("--v")),
      labels: texts(".line small"), chosen: all("select, input:checked").map((one) => one.value),
      groups: texts("[name=group] option"), title: document.title,
    };
  }));
</script></html>"""


def press(page: str, presses: list, folder: Path, framed: bool = False) -> list[dict]:
    """What a browser shows after each press; framed: as exercises/tour.ipynb shows the page."""
    page = page.replace("</html>", PRESS.replace("PRESSES", json.dumps(presses)))
    if framed:
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


def check(shown: dict, numbers: list[float], method: str, cancel: str):
    """The numbers, and what their labels come to, such as "1/4×0.500"."""
    assert shown["numbers"] == pytest.approx(numbers, abs=6e-4)
    labels = [label.replace("−", "-").replace("×", "*") for label in shown["labels"]]
    expected = [*numbers[:4], *numbers[7:9]]
    assert [eval(label) for label in labels] == pytest.approx(expected, abs=1.6e-3)
    if cancel == "off" and method not in ("dfpo-orthogonal", "recentred"):
        assert all(re.fullmatch(r"0\.0+|0\*.*|.*/.*", label) for label in labels)


def parse(setting: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in f"{START}&{setting}".split("&"))


def toy(chosen: dict[str, str]) -> list[float]:
    """The numbers of a setting of the toy page."""
    group = tree.toy_group(chosen["lengths"], chosen["won"])
    state = tree.MOVED.index(chosen["moved"]) * 2 + [*tree.SPREAD].index(chosen["spread"])
    return expect(group, state, tree.toy_methods()[chosen["method"]], chosen["cancel"])


@browser
def test_the_story_and_every_method_show_what_losses_say_in_the_notebooks_frame(tmp_path):
    rng, settings, presses = random.Random(0), [], [("1 ", "")]
    for step, values in enumerate(STORY, 1):
        chosen = parse(values.replace("&amp;", "&"))
        won = chosen["won"][:3] + "1"
        settings += [chosen, chosen | {"won": won}, chosen]  # answer 4 wins, and back
        presses += [("▼4", ""), ("you changed", ""), (f"next: {step + 1}", "")]
    presses.pop()
    for name in [*tree.toy_methods()] * 2:
        values = {"method": [name], "cancel": ["off", "on"], "lengths": [*tree.ANSWERS]}
        for key, options in (values | {"moved": tree.MOVED, "spread": [*tree.SPREAD]}).items():
            chosen = chosen | {key: rng.choice(options)}
            settings.append(chosen)
            presses.append((key, chosen[key]))
    seen = press(tree.toy_page(), presses, tmp_path, framed=True)
    for shown, chosen in zip(seen, settings, strict=True):
        numbers = toy(chosen)
        check(shown, numbers, chosen["method"], chosen["cancel"])
        assert shown["chosen"] == [chosen[name] for name in CONTROLS]
        longest = max(map(abs, numbers)) or 1
        assert [bar * longest for bar in shown["bars"]] == pytest.approx(numbers, abs=1e-3)
    story, says = seen[: 3 * len(STORY) : 3], [shown["say"] for shown in seen[: 3 * len(STORY)]]
    assert says[::3] == says[1::3] == says[2::3] and len({*says}) == len(STORY) == 8
    assert [shown["next"] for shown in seen[1:24:3]] == [True] * 7 + [False]
    # What the sentences say of "so" and of "7+8=15".
    first = [(0, 0), (0, 0.2), (0.034, 0.049), (-0.4, -0.2), (0.15, 0.025)]
    left = [(shown["numbers"][4], shown["numbers"][9]) for shown in story]
    assert left == [*first, (0, -0.067), (0, 0), (0, 0)]


def test_the_picture_of_the_readme_has_the_numbers_of_losses():
    text, expected = (FOLDER / "tree.svg").read_text().replace("−", "-"), []
    for numbers in (toy(parse("method=reinforce")), toy(parse("method=grpo"))):
        expected += numbers[:5] + numbers[7:10] + numbers[12:]  # without credit and tax
    shown = [float(x) for x in re.findall(r">([+-]?0\.\d{3})<", text)]
    assert shown == pytest.approx(expected, abs=5e-4)


@browser
def test_a_run_shows_its_newest_batch_and_runs_no_text_of_a_model(tmp_path):
    run = tmp_path / "run"
    flags = "--cancel --steps 1 --warm-steps 0 --layers 1 --width 16 --prompts 4 --eval-items 2"
    train.main([*flags.split(), "--hyper", "eps_high=0.1 kl=0.04", "--out", str(run)])
    (path,) = run.glob("batches/*.pt")
    # Behind its batch another one, of three groups. All answers share two tokens, 1 and 2 a third.
    # Group 0 has equal lengths, so no tax before the step, and group 2 equal rewards. In group 1
    # answers 2 and 4 have A = 0.
    saved, gen = torch.load(path), torch.Generator().manual_seed(0)
    tokens = torch.tensor([[0, 1, 2, 4], [0, 1, 2, 5], [0, 1, 3, 6], [0, 1, 4, 7]]).repeat(3, 4)
    pieces = [[(NASTY, " b", "c\n", *"defgh")[k] for k in row] for row in tokens.tolist()]
    mask = torch.arange(16) < torch.tensor([[12]] * 4 + [[16], [5], [9], [12]] + [[7]] * 4)
    rewards = torch.tensor([0.0, 1, 0, 1, 0, 0.5, 1, 0.5, 1, 1, 1, 1])
    old, new = -torch.rand(2, 12, 16, generator=gen) / 2
    saved |= {"logp_old": old, "logp": new, "rewards": rewards, "mask": mask, "tokens": tokens}
    saved |= {"group_size": 4, "max_tokens": 20, "prompts": ["0" + NASTY, "1" + NASTY, "2"]}
    torch.save(saved | {"pieces": pieces}, run / "batches" / "step-000010.pt")
    os.utime(path, (2e9, 2e9))  # the newest file is not the newest batch
    tree.main([str(run)])
    page = (run / "tree.html").read_text()
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", page)  # it needs no network
    presses = [("policy", "after it"), ("␣b", ""), ("cancel", "off")]
    methods = tree.shown_methods() | {"grpo": train.bind("grpo", {"eps_high": 0.1})}
    special = {"nthr", "nthr-random", "advantage-reweighting", "lopti", "ar-lopti", "ibpo"}
    assert {*losses.METHODS} - {*methods} == special  # more than one loss of a batch
    seen = press(page, presses + [("method", name) for name in methods], tmp_path)
    assert [label[3] for label in seen[0]["groups"]] == ["1", "0"]  # by their tax
    shown = (3 + tree.OWN, 5, 9, 2 + tree.OWN)  # tokens
    texts = [row[:n] for row, n in zip(pieces[4:8], shown, strict=True)]
    rewards, old, new = (x[4:8].double() for x in (rewards, old, new))
    group = tree.Group("", texts, tokens[4:8], mask[4:8], rewards, old, new[None], 20)
    for k, name in enumerate(["grpo"] * 3 + [*methods]):
        cancel = "off" if k > 1 else "on"
        numbers = expect(group, 0, methods[name], cancel, look=int(k > 0))
        check(seen[k], numbers, name, cancel)
        assert "hacked" not in seen[k]["title"]
