"""To whoever presses the tree page's buttons, on its own or in the notebook's frame: it draws what
losses.py says."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
import torch

import losses
import train
from toy import tree

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium, in which to press the page")
PAGE = Path(tree.__file__).with_name("tree_page.html").read_text()
NASTY = "<img src=x onerror=\"document.title='hacked'\">"
# Presses one element after the other, and notes what is drawn after each. An element is the start
# of a button's text, or the name of a control and what is chosen there.
PRESS = """<script type="module">
  const all = (selector) => [...document.querySelectorAll(selector)];
  const sign = (bar) => (bar.matches(".minus") ? -1 : 1);
  const wait = () => new Promise((done) => setTimeout(done, 50));
  while (!("ready" in document.body.dataset)) await wait();
  top.document.documentElement.dataset.seen = JSON.stringify(PRESSES.map(([name, value]) => {
    const [first, ...others] = document.getElementsByName(name);
    if (!first) all("button").find((button) => button.textContent.startsWith(name)).click();
    else if (others.length) [first, ...others].find((radio) => radio.value === value).click();
    else { first.value = value; first.onchange(); }
    return {
      numbers: all("#tree output").map(({ textContent }) => Number(textContent.replace("−", "-"))),
      bars: all("#tree .track").map((bar) => sign(bar) * bar.style.getPropertyValue("--v")),
      labels: all(".line small").map((label) => label.textContent), images: all("img").length,
    };
  }));
</script></html>"""


def press(page: str, presses: list, folder: Path, frame: bool) -> list[dict]:
    """What a browser shows after each press; in a frame as that of exercises/tour.ipynb."""
    page = page.replace("</html>", PRESS.replace("PRESSES", json.dumps(presses)))
    if frame:
        page = f'<iframe srcdoc="{html.escape(page)}" width="100%" height="900"></iframe>'
    (folder / "page.html").write_text(page)
    flags = "--headless --no-sandbox --disable-gpu --virtual-time-budget=99000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder}", folder / "page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', done.stdout)[1]))


def check(shown: dict, group: tree.Group, state: int, method, cancel: str) -> list[float]:
    """The page has the numbers of losses.py, for a toy group under one of its policies.

    From top to bottom: the card of the first token, that of what answers 1 and 2 share, and the
    other tokens. A card has the pushes, their sum, its credit and its tax.
    """
    A = losses.group_advantages(group.rewards, 4, method.scale)
    adv, logp = A[:, None].expand_as(group.old), group.logp[state].clone().requires_grad_()
    batch = losses.Batch(logp, group.old, adv, group.mask, 4, group.max_tokens)
    loss = method.passes[0](batch)
    if cancel == "on":
        loss = losses.prefix_baseline(loss, batch, group.nodes)
    c, numbers = losses.token_coefficients(loss, logp), []
    for place, visitors in ((0, 4), (1, 2)):
        pushes, of = c[:visitors, place], A[:visitors]
        credit = (pushes / of).mean() * of.sum()
        numbers += [*pushes.tolist(), *map(float, (pushes.sum(), credit, pushes.sum() - credit))]
    for i, start in enumerate((2, 2, 1, 1)):
        numbers += c[i, start : len(group.texts[i])].tolist()
    assert shown["numbers"] == pytest.approx(numbers, abs=6e-4)
    # What the labels come to, such as "0.250×0.500".
    labels = [eval(label.replace("−", "-").replace("×", "*")) for label in shown["labels"]]
    assert labels == pytest.approx([*numbers[:4], *numbers[7:9]], abs=1.6e-3)
    longest = max(map(abs, numbers)) or 1
    assert [bar * longest for bar in shown["bars"]] == pytest.approx(numbers, abs=1e-3)
    return numbers


def test_the_story_and_every_method_show_what_losses_say(tmp_path):
    methods, settings, presses = tree.toy_methods(), [], [("1 ", "")]
    begin = dict(
        method="reinforce", cancel="off", lengths="unequal", won="1010", moved="1", spread="none"
    )
    for step, values in enumerate(re.findall(r'<button value="(.*?)">', PAGE), 1):
        chosen = begin | dict(parse_qsl(html.unescape(values)))
        settings += [chosen, chosen | {"won": chosen["won"][:3] + "1"}, chosen]  # answer 4 wins
        presses += [("▼4", ""), ("you changed", ""), (f"next: {step + 1}", "")]
    changes = [("lengths", "unequal"), ("spread", "wide")]
    for moved, cancel in (("1.6", "off"), ("0.6", "on")):
        changes += [("moved", moved), ("cancel", cancel), *(("method", name) for name in methods)]
    for change in changes:
        settings.append(settings[-1] | dict([change]))
    seen, taxed, chosen = press(tree.toy_page(), presses[:-1] + changes, tmp_path, True), [], []
    for shown, at in zip(seen, settings, strict=True):
        group = tree.toy_group(at["lengths"], at["won"])
        state = tree.MOVED.index(at["moved"]) * 2 + [*tree.SPREAD].index(at["spread"])
        numbers = check(shown, group, state, methods[at["method"]], at["cancel"])
        taxed.append(abs(numbers[6]) > 1e-3)
        chosen.append(abs(numbers[9]) > 1e-3)
    assert seen[6]["numbers"][0] == pytest.approx(0.5 / 4 * 1.5**0.5, abs=1e-3)  # step 3: s A / T
    # What the story says: where "so" has a tax, and where 7+8=15, which answers 1 and 2 share, is
    # pushed.
    assert taxed[:24:3] == [False, False, True, True, True, False, False, False]
    assert chosen[3] and chosen[12:24:3] == [True, True, False, False]


def test_a_run_shows_its_newest_batch_and_runs_no_text_of_a_model(tmp_path):
    run = tmp_path / "run"
    flags = "--prefix-baseline --steps 1 --warm-steps 0 --width 16 --prompts 4 --eval-items 2"
    train.main([*flags.split(), "--hyper", "eps_low=0.4 kl=0.04", "--out", str(run)])
    (path,) = run.glob("batches/*.pt")
    group = tree.toy_group("unequal", "1010")  # as if it were another batch of the run
    group.texts[0][0] = NASTY
    saved = dict(tokens=group.tokens, mask=group.mask, rewards=group.rewards, pieces=group.texts)
    saved |= dict(logp_old=group.old, logp=group.logp[3], group_size=4, prompts=[NASTY])
    saved = torch.load(path) | saved | {"max_tokens": 20}
    torch.save(saved, path.with_name("step-000010.pt"))
    torch.save(saved | {"rewards": 1 - group.rewards}, path)  # of an earlier step
    group.max_tokens = 20
    tree.main([str(run)])
    page = (run / "tree.html").read_text()
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", page)  # it needs no network
    seen = press(page, [("policy", "after it"), ("cancel", "off")], tmp_path, False)
    for shown, cancel in zip(seen, ("on", "off"), strict=True):
        check(shown, group, 3, train.bind("grpo", {"eps_low": 0.4}), cancel)
        assert shown["images"] == 0


def test_the_picture_of_the_readme_has_the_numbers_of_losses():
    text = Path(tree.__file__).with_name("tree.svg").read_text().replace("−", "-")
    sums = [float(x) for x in re.findall(r">([+-]?0\.\d{3})<", text)]
    A, lengths = torch.tensor([0.5, -0.5, 0.5, -0.5]), torch.tensor([4, 5, 2, 4])
    for c, shown in ((A / 5, sums), (A / lengths, sums[len(sums) // 2 :])):
        assert shown[:5] == pytest.approx([*c.tolist(), float(c.sum())], abs=5e-4)
