"""A user's mistake is one line with exit code 2, before anything is trained."""

import subprocess
import sys
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import pytest

import losses
import train
from llm import bind
from train import LOWEST, Config

MISTAKES = [
    ("--method gpro", "invalid choice: 'gpro'"),
    ("--task chess", "invalid choice: 'chess'"),
    ("--grup-size 4", "unknown argument --grup-size; did you mean --group-size?"),
    ("--temp 1", "unknown argument --temp; did you mean --temperature?"),
    ("--learning-rate 1", "unknown argument --learning-rate; --help lists what there is"),
    ("--kl 0.1", "unknown argument --kl"),
    ("--project maybe", "argument --project: Truthy value expected"),
    ("--model no/such/model", "--model no/such/model cannot be loaded"),
    ("--task gsm8k --data DATA --model nobody/7b", "--model nobody/7b cannot be loaded"),
    ("--group-size 1", "--group-size 1: must be a finite number, at least 2"),
    ("--prompts 30 --minibatches 4", "--prompts 30 is not divisible by --minibatches 4"),
    ("--group-size 3 --repair-references 3", "3: an answer has --group-size - 1 siblings"),
    ("--width 20", "--width 20: must be a multiple of 8"),
    ("--data somewhere", "only --task gsm8k reads data"),
    ("--task gsm8k --data /no/such/dir", "/no/such/dir"),
    ("--task gsm8k --data BROKEN", "train.jsonl:2"),
    ("--task gsm8k --data DATA --model scratch --max-tokens 2000", "context of 1024 tokens"),
    ("--out runs/taken", "--out runs/taken exists; choose another"),
    ("--out " + 300 * "x", "--out 'xxxxxxxxxxxxxxxxxxxx'...: a name of at most 200 bytes"),
    ("--out runs/taken/file/run", "cannot make the run directory runs/taken/file/run"),
    ("--resume nowhere", "--resume nowhere: no config.json of a run there"),
    ("--resume runs/taken --lr 1", "--lr cannot be changed when resuming"),
    # hyperparameters
    ("--hyper eps_low", "eps_low: NAME=VALUE is expected"),
    ("--hyper eps_low=nan", "eps_low=nan: must be a finite number, at least 0"),
    ("--hyper eps_low=-1", "eps_low=-1: must be a finite number, at least 0"),
    ("--hyper eps_low=wide", "eps_low=wide: a number is expected"),
    ("--hyper eps_low=0.1 eps_high=1 kl=maybe", "kl=maybe: a number is expected"),
    ("--hyper eps=0.1", "grpo has no hyperparameter 'eps'; accepted, with defaults: eps_low=0.2"),
    ("--hyper kl=0.1 --no-reference", "the KL term needs logp_ref"),
    ("--hyper kl=0.1 --project", "--project would average the KL term away"),
    ("--hyper kl=0.1 --method gspo", "method gspo has no hyperparameter 'kl'; accepted, with"),
    ("--method nthr --hyper self_term=perhaps", "self_term=perhaps: must be True or False"),
    ("--method ar-lopti --hyper alpha=1.5", "alpha=1.5: alpha must lie between 0 and 1"),
    ("--method ar-lopti --hyper beta=1", "alpha=0.3, eta=0.5, eps_low=0.2, eps_high=0.2"),
    ("--method dfpo-min --hyper ratio=sum", 'ratio=sum: ratio must be "geometric" or "product"'),
    ("--method ibpo --hyper bonus=5", "below the reward"),
    ("--method ibpo --hyper reading=kept", "reading=kept: reading must be"),
]


@pytest.mark.parametrize("args, said", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_trained(
    args, said, tmp_path, small_gsm8k, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "file").touch()
    (tmp_path / "broken").mkdir()
    good = (Path(small_gsm8k) / "train.jsonl").read_text().splitlines()[0]
    (tmp_path / "broken" / "train.jsonl").write_text(f'{good}\n{{"question": \n')
    (tmp_path / "broken" / "test.jsonl").write_text(good + "\n")
    monkeypatch.setattr(train, "warm_start", lambda *_: pytest.fail("training began"))
    args = args.replace("DATA", small_gsm8k).replace("BROKEN", str(tmp_path / "broken"))
    before = {*tmp_path.rglob("*")}
    assert_one_line(args.split(), said, capsys)
    assert {*tmp_path.rglob("*")} == before


def assert_one_line(args, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(args)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error
    assert error.startswith("error: ") and error.count("\n") == 1


CASES = []
for f in fields(Config):
    flag, kind = "--" + f.name.replace("_", "-"), type(f.default)
    if kind is not bool:
        CASES.append(([flag], "expected"))
    if f.metadata.get("choices"):
        CASES.append(([flag, "nonsense"], "invalid choice: 'nonsense'"))
    if kind in (int, float):
        CASES.append(([flag, "many"], f"{flag}: invalid {kind.__name__} value: 'many'"))
        low = LOWEST.get(f.name, 0)
        below = f"{flag} {kind(low - 1)}: must be a finite number, at least {low}"
        CASES.append(([flag, str(low - 1)], below))
    if kind is float:
        CASES += [([flag, bad], f"{flag} {bad}: must be") for bad in ("nan", "inf")]
    if len(f.name) > 4:
        CASES.append(([flag[:-2] + flag[-1] + "q"], f"did you mean {flag}"))


@pytest.mark.parametrize("args, said", CASES, ids=lambda x: x if isinstance(x, str) else x[0])
def test_every_flag_refuses_a_wrong_value_in_one_line(args, said, capsys):
    assert_one_line(args, said, capsys)


def test_flags_become_the_config_and_gsm8k_has_defaults_of_its_own(small_gsm8k, monkeypatch):
    config = train.parse(
        "--method ibpo --hyper bonus=0.2 weight=1 --project --lr 3 --out x".split()
    )
    given = dict(method="ibpo", hyper=["bonus=0.2", "weight=1"], project=True, lr=3.0, out="x")
    assert asdict(config) == asdict(Config()) | given
    monkeypatch.chdir(Path(small_gsm8k).parent)  # a run may be resumed in another directory
    data = ["--task", "gsm8k", "--data", Path(small_gsm8k).name, "--warm-rows", "5"]
    for more, preset in (([], train.GSM8K_HUB), (["--model", "scratch"], train.GSM8K_SCRATCH)):
        config = asdict(train.parse(data + more))
        assert config["out"].startswith("runs/gsm8k-grpo-s0-") and config["data"] == small_gsm8k
        assert preset.items() - {("warm_rows", 16)} <= config.items() and config["warm_rows"] == 5


def test_hyperparameters_reach_the_functions_that_take_them():
    low, high = bind("ar-lopti", {"alpha": "0.5", "eps_high": "0.3", "eta": "0.2"}).passes
    assert low.keywords == high.keywords == {"eps_high": 0.3, "eta": 0.2}
    method = bind("ar-lopti", {"alpha": "0.5"})
    assert method.credit.keywords == {"alpha": 0.5} and method.passes[0] is losses.lopti_low
    assert bind("nthr", {"self_term": "False"}).credit.keywords == {"self_term": False}
    method = bind("ibpo", {"bonus": 1, "kl": 0.1})
    assert method.repair.keywords == {"bonus": 1.0} and method.credit is losses.ibpo
    assert bind("ibpo", {"reading": "changed"}).credit.keywords == {"reading": "changed"}
    assert isinstance(method.passes[0], partial) and method.passes[0].keywords == {"kl": 0.1}
    assert bind("dfpo-min", {"ratio": "product"}).passes[0].keywords == {"ratio": "product"}
    assert bind("grpo", {}) == losses.METHODS["grpo"]


def test_nothing_heavy_is_imported_before_the_flags_are_known_to_be_right():
    code = "import sys, train\ntry: train.main(['--lr', 'nan'])\nexcept SystemExit: pass\n"
    code += "heavy = {'datasets', 'transformers.modeling_utils'} & {*sys.modules}\n"
    code += "sys.exit(f'imported: {heavy}' if heavy else 0)"
    root = Path(train.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
