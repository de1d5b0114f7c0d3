"""Flags become the config; a user's mistake is one line, before anything is trained."""

from dataclasses import asdict
from pathlib import Path

import pytest

import train

MISTAKES = """
--method gpro
--task chess
--grup-size 4
--temp 1
--learning-rate 1
--project maybe
--steps
--steps many
--lr many
--lr nan
--lr inf
--lr -1
--temperature 0
--seed -1
--group-size 1
--eval-every 0
--grad-clip 0
--schedule cosine
--model no/such/model
--task gsm8k --data DATA --model nobody/7b
--prompts 30 --minibatches 4
--method ibpo --group-size 3 --repair-references 3
--width 20
--task gsm8k --data /no/such/dir
--task gsm8k --data BROKEN
--out taken
--out taken/file/run
--resume nowhere
--hyper
--hyper eps_low
--hyper eps_low=nan
--hyper eps_low=-1
--hyper eps_low=wide
--hyper eps_low=0.1 eps_high=1 kl=maybe
--hyper eps=0.1
--hyper kl=0.1 --no-reference
--hyper kl=0.1 --project
--hyper kl=0.1 --method gspo
--method nthr --hyper self_term=perhaps
--method ar-lopti --hyper alpha=1.5
--method dfpo-min --hyper ratio=sum
--method ibpo --hyper bonus=5
--method ibpo --hyper reading=kept
"""


@pytest.mark.parametrize("args", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_line_before_anything_is_trained(
    args, tmp_path, small_gsm8k, monkeypatch, capsys
):
    """Ours names the flag or the value; what argparse refuses ends as argparse ends it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    (tmp_path / "broken").mkdir()
    good = (Path(small_gsm8k) / "train.jsonl").read_text().splitlines()[0]
    (tmp_path / "broken" / "train.jsonl").write_text(f'{good}\n{{"question": \n')
    (tmp_path / "broken" / "test.jsonl").write_text(good + "\n")
    monkeypatch.setattr(train, "warm_start", lambda *_: pytest.fail("training began"))
    given = args.replace("DATA", small_gsm8k).replace("BROKEN", str(tmp_path / "broken")).split()
    before = {*tmp_path.rglob("*")}
    with pytest.raises(SystemExit) as stopped:
        train.main(given)
    said = stopped.value.code
    after = {path for path in tmp_path.rglob("*") if path.name != "runs"}  # it may be left, empty
    assert after == before and said not in (0, None)
    if isinstance(said, str):
        assert said.startswith("error: ") and "\n" not in said
        assert any(part.split("=")[0] in said for part in given[::-1])
    else:
        assert capsys.readouterr().err.count("error: ") == 1


TOY = dict(
    **dict(task="arithmetic", method="grpo", hyper=[], project=False, data="", train_items=0),
    **dict(model="scratch", layers=1, width=64, warm_steps=700, warm_rows=64, warm_lr=6e-3),
    **dict(steps=60, prompts=32, group_size=8, max_tokens=26, temperature=1.0, epochs=1),
    **dict(repair_references=1, minibatches=4, micro_rows=64, lr=1e-3, schedule="linear"),
    **dict(grad_clip=1.0, reference=True, eval_every=20, eval_items=200, eval_samples=4, seed=0),
    **dict(threads=1, fast=False, trace=False, resume=""),
)
HUB = dict(
    **dict(task="gsm8k", model="Qwen/Qwen2.5-0.5B-Instruct", warm_steps=0, steps=200, prompts=16),
    **dict(max_tokens=512, minibatches=1, micro_rows=8, lr=1e-6, eval_samples=1, threads=0),
    **dict(fast=True),
)
SMALL = dict(
    **dict(task="gsm8k", layers=2, width=128, train_items=32, warm_steps=45, warm_rows=16),
    **dict(warm_lr=3e-3, steps=60, prompts=32, max_tokens=48, micro_rows=64, lr=5e-4),
    **dict(eval_every=30, eval_samples=1, minibatches=1, threads=1, fast=True),
)


@pytest.mark.parametrize(
    "args, expected",
    [
        ("", {}),
        ("--task gsm8k", HUB),
        ("--task gsm8k --model scratch", SMALL),
        ("--task gsm8k --lr 1 --no-fast --steps 3", HUB | dict(lr=1.0, fast=False, steps=3)),
        ("--method ibpo --hyper bonus=0.2 weight=1 --project --lr 3 --seed 4 --no-reference",
         dict(method="ibpo", hyper=["bonus=0.2", "weight=1"], project=True, lr=3.0, seed=4,
              reference=False)),
    ],
)  # fmt: skip
def test_flags_become_the_config_and_gsm8k_has_defaults_of_its_own(args, expected):
    config = asdict(train.parse(args.split()))
    expected = TOY | expected
    name = f"runs/{expected['task']}-{expected['method']}-s{expected['seed']}-20"
    assert config.pop("out").startswith(name) and config == expected


def test_help_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        train.parse(["--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and all("--" + x.replace("_", "-") in said for x in TOY)
