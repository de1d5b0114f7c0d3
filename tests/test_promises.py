"""Nothing lost, nothing silently wrong: kills, full disks, torn files, bad numbers, bad flags.

`make test` runs a sample; `make test-faults` (LONG=1) runs all of it: 50 kills, 10,000 texts a verifier, 2,000 steps.
"""

import json
import math
import os
import random
import resource
import shutil
import signal
import statistics
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import TINY, metrics

import losses
import train
from config import Config
from llm import runs
from llm.gsm8k import GSM8K
from losses import METHODS, Batch
from toy.arithmetic import Arithmetic, Item

LONG = bool(os.environ.get("LONG"))
KILLS, TEXTS = (50, 10_000) if LONG else (3, 300)
BUSY = [*TINY, "--steps", "12", "--save-every", "1", "--eval-every", "6", "--warm-steps", "5"]


@pytest.fixture(autouse=True)
def easy(monkeypatch):
    monkeypatch.setattr(Arithmetic, "reward", lambda self, text, item: float(text.count("1") % 2))


def in_a_child(args: list[str], before=lambda: None) -> int:
    """Run the trainer in a forked process, which is killed like any other; its process id."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            before()
            train.main(args)
            os._exit(0)
        except SystemExit as stopped:
            os.write(2, f"{stopped.code}\n".encode())
            os._exit(3)
        finally:
            os._exit(4)
    return child


def weights(run: Path) -> dict:
    last = max((run / "checkpoints").glob("step-*"))
    state = torch.load(last / "trainer.pt", weights_only=True)["optimizer"]["state"]
    return {
        "model": (last / "model.safetensors").read_bytes(),
        **{f"{i}.{k}": x for i in state for k, x in state[i].items()},
    }


def assert_same_run(run: Path, whole: Path):
    assert (
        metrics(run) == metrics(whole)
        and (run / "samples.txt").read_text() == (whole / "samples.txt").read_text()
    )
    ours, theirs = weights(run), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(a, theirs[k]) if isinstance(a, torch.Tensor) else a == theirs[k]
        for k, a in ours.items()
    )
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-000011",
        "step-000012",
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run, and how long it takes."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arithmetic, "reward", lambda self, text, item: float(text.count("1") % 2))
        start = time.time()
        assert os.waitpid(in_a_child([*BUSY, "--out", str(out), "--name", "run"]), 0)[1] == 0
    return out / "run", time.time() - start


def test_a_run_killed_again_and_again_is_the_undisturbed_run(tmp_path, whole):
    rng, kills, torn, number = random.Random(0), 0, 0, 0
    while kills < KILLS:
        run, number = tmp_path / f"run{number}", number + 1
        while True:
            args = (
                ["--resume", str(run)]
                if run.exists()
                else [*BUSY, "--out", str(tmp_path), "--name", run.name]
            )
            child = in_a_child(args)
            time.sleep(rng.uniform(0, 1.2 * whole[1]))
            done, status = os.waitpid(child, os.WNOHANG)
            if done:  # killed after its last save, a run has nothing left to do, and says so
                assert status == 0 or (run / "checkpoints" / "step-000012").is_dir()
                break
            os.kill(child, signal.SIGKILL)
            kills += os.waitpid(child, 0)[1] == signal.SIGKILL
            torn += any((run / "checkpoints").glob("unfinished-*"))
        assert_same_run(run, whole[0])
    print(f"\n{kills} kills, {torn} of them inside a checkpoint write, {number} runs: no line lost")


def test_a_kill_inside_a_checkpoint_write_leaves_the_one_before(tmp_path, whole, monkeypatch):
    run = tmp_path / "run"

    def die():
        write = torch.save
        monkeypatch.setattr(
            torch,
            "save",
            lambda x, f: write(x, f) if x["step"] < 5 else os.kill(os.getpid(), signal.SIGKILL),
        )

    os.waitpid(in_a_child([*BUSY, "--out", str(tmp_path), "--name", "run"], die), 0)
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "step-000003",
        "step-000004",
        "unfinished-000005",
    ]
    train.main(["--resume", str(run)])
    assert_same_run(run, whole[0])


def damage(file: Path, how: str):
    data = file.read_bytes()
    half = len(data) // 2
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(
            {"empty": b"", "cut": data[:half], "hole": data[:half] + bytes(len(data) - half)}[how]
        )


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "hole"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "trainer.pt", "config.json", "tokenizer.json"]
)
def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path, whole, capsys, name, how):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    damage(run / "checkpoints" / "step-000012" / name, how)
    train.main(["--resume", str(run)])
    assert "step-000012 is damaged" in capsys.readouterr().err
    assert_same_run(run, whole[0])


def test_what_cannot_be_resumed_is_refused_and_left_as_it_is(tmp_path, whole, capsys):
    def refused(run: Path, said: str):
        before = {
            path: path.read_bytes()
            for path in run.rglob("*")
            if path.is_file() and path.name != "lock"
        }
        with pytest.raises(SystemExit) as stopped:
            train.main(["--resume", str(run)])
        err = capsys.readouterr().err
        assert stopped.value.code == 2 and said in err and "Traceback" not in err
        assert before == {
            path: path.read_bytes()
            for path in run.rglob("*")
            if path.is_file() and path.name != "lock"
        }

    for number, change in enumerate(
        ["all damaged", "longer log", "shorter log", "no start", "wrong config"]
    ):
        run = tmp_path / f"run{number}"
        shutil.copytree(whole[0], run)
        shutil.rmtree(run / "checkpoints" / "step-000012")
        log, config = run / "metrics.jsonl", run / "config.json"
        if change == "all damaged":
            damage(run / "checkpoints" / "step-000011" / "trainer.pt", "cut")
            refused(run, "none of its checkpoints can be read")
        elif change == "longer log":
            log.write_text('{"step": -1}\n' + log.read_text())
            (run / "config.json").write_text(config.read_text().replace("git_commit", "old_commit"))
            refused(run, "metrics.jsonl is not what it was at step 11")
        elif change == "shorter log":
            log.write_text("")
            refused(run, "metrics.jsonl is not what it was at step 11")
        elif change == "no start":
            shutil.rmtree(run / "start")
            refused(run, "start/, the policy that the KL is measured from, is missing")
        else:
            for wrong in ('"steps": "12"', '"steps": null'):
                config.write_text(
                    whole[0].joinpath("config.json").read_text().replace('"steps": 12', wrong)
                )
                refused(run, "no config.json of a run there")
            config.write_text(
                whole[0].joinpath("config.json").read_text().replace('"grpo"', '"foo"')
            )
            refused(run, "--method foo: must be one of reinforce, grpo")


def test_a_full_disk_leaves_the_last_checkpoint_intact_and_says_so(tmp_path, whole, capfd):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    shutil.rmtree(run / "checkpoints" / "step-000012")
    small = (run / "checkpoints" / "step-000011" / "trainer.pt").stat().st_size // 2
    before = {
        path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()
    }
    child = in_a_child(
        ["--resume", str(run)], lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (small, small))
    )
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    said = capfd.readouterr().err
    assert (
        "the checkpoint of step 12 cannot be written" in said
        and f"step-000011 is intact, go on from it with --resume {run}" in said
    )
    assert before == {
        path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()
    }
    train.main(["--resume", str(run)])
    assert_same_run(run, whole[0])


def test_a_run_directory_belongs_to_one_process(tmp_path, whole, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    held = runs.lock(run)
    with pytest.raises(SystemExit) as stopped:
        train.main(["--resume", str(run)])
    assert stopped.value.code == 2 and "another process is writing to it" in capsys.readouterr().err
    held.close()
    with pytest.raises(SystemExit):
        train.main([*BUSY, "--out", str(tmp_path), "--name", "run"])
    assert "exists" in capsys.readouterr().err


# ---------------- numbers


def test_pieces_of_any_size_give_the_same_run_up_to_rounding(tmp_path, whole):
    train.main(
        [
            *BUSY,
            "--out",
            str(tmp_path),
            "--name",
            "run",
            "--micro-rows",
            "5",
            "--steps",
            "1",
            "--lr",
            "1e-4",
        ]
    )
    train.main([*BUSY, "--out", str(tmp_path), "--name", "one", "--steps", "1", "--lr", "1e-4"])
    split, one = metrics(tmp_path / "run"), metrics(tmp_path / "one")
    assert split[1].keys() == one[1].keys() and all(
        split[1][k] == pytest.approx(one[1][k], rel=1e-3, abs=1e-5) for k in one[1]
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_numbers_stop_the_run_before_the_weights_change_and_leave_the_batch(
    tmp_path, monkeypatch, bad
):
    good, calls = METHODS["grpo"].passes[0], []

    def sometimes_bad(batch, **hyper):
        calls.append(len(batch.logp))
        return good(batch) + (
            bad * batch.logp.sum() if len(calls) > 8 and len(batch.logp) > 2 else 0
        )

    monkeypatch.setitem(METHODS, "grpo", losses.Method((sometimes_bad,)))
    with pytest.raises(SystemExit) as stopped:
        train.main([*BUSY, "--out", str(tmp_path), "--name", "run"])
    run, step = tmp_path / "run", len(metrics(tmp_path / "run"))
    assert (
        f"error: step {step}: loss " in stopped.value.code
        and f"bad-batch-{step:06d}.pt" in stopped.value.code
    )
    batch = torch.load(run / f"bad-batch-{step:06d}.pt", weights_only=True)
    assert (
        batch["logp"].shape == batch["tokens"].shape == batch["mask"].shape
        and batch["logp"].isfinite().all()
    )
    saved = max((run / "checkpoints").glob("step-*"))
    assert torch.load(saved / "trainer.pt", weights_only=True)["step"] == step - 1


LOSSES = sorted({f for method in METHODS.values() for f in method.passes}, key=lambda f: f.__name__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_ratios_of_e50_and_impossible_tokens_give_no_nan(loss_fn, dtype):
    """A ratio of e^50 is a number. log pi = -inf: ratio 0, no gradient; where A log pi is the loss,
    it is infinite."""
    adv = torch.tensor([[1.0], [-1.0]], dtype=dtype).expand(2, 3)
    old = torch.full((2, 3), -60.0, dtype=dtype)
    for change in (50.0, -50.0):
        logp = (old + change).requires_grad_()
        loss = loss_fn(Batch(logp, old, adv, old < 0, 2, 3))
        assert loss.isfinite() and torch.autograd.grad(loss, logp)[0].isfinite().all()
    logp = old.clone()
    logp[:, 1] = -math.inf
    logp.requires_grad_()
    loss = loss_fn(Batch(logp, old, adv, old < 0, 2, 3))
    grad = torch.autograd.grad(loss, logp)[0]
    if loss_fn.__name__ in (
        "reinforce",
        "dfpo_min",
        "dfpo_orthogonal",
    ):  # train.py stops there, see above
        assert not loss.isfinite()
    else:
        assert loss.isfinite() and grad.isfinite().all() and (grad[:, 1] == 0).all()


# ---------------- text in, text out


def hostile() -> st.SearchStrategy[str]:
    pieces = [
        "####",
        "#",
        r"\boxed{",
        "{",
        "}",
        "9**9**9",
        "٣",
        "½",
        "－７",
        "\0",
        "1,2",
        "$",
        "%",
        "-",
        ".",
        " ",
        "\n",
        "42",
        "e9",
    ]
    big = st.sampled_from(
        [
            "9" * 100_000,
            "{" * 100_000,
            r"\boxed{" * 14_000,
            "#" * 100_000,
            "1," * 50_000,
            "-." * 50_000,
        ]
    )
    return st.text() | st.lists(st.sampled_from(pieces), max_size=60).map("".join) | big


@pytest.mark.parametrize("task", [GSM8K, Arithmetic])
def test_verifiers_take_any_text_without_raising_in_50_ms(task):
    item, worst = Item("37+48=", "85", ""), []

    @settings(max_examples=TEXTS, deadline=None)
    @given(hostile())
    def check(text):
        start = time.thread_time()
        assert reward(None, text, item) in (0.0, 1.0)
        worst.append(time.thread_time() - start)

    reward = GSM8K.reward if task is GSM8K else ARITHMETIC_REWARD
    check()
    assert max(worst) < 0.05, f"{max(worst)} s"


ARITHMETIC_REWARD = Arithmetic.reward  # before `easy` replaces it


def test_no_file_here_evaluates_or_unpickles():
    sources = {path: path.read_text() for path in Path(train.__file__).parent.rglob("[!.]*.py")}
    assert len(sources) > 8
    for path, text in sources.items():
        assert "eval(" not in text.replace(".eval(", "") and "import pickle" not in text, path
        assert ("exec(" in text) == (
            path.name in ("verify.py", "faults.py", "test_verify.py")
        )  # the grader runs the file that it is given
        assert (
            text.count("torch.load(") == text.count("weights_only=True")
            and "trust_remote_code" not in text
        ), path


def test_bad_lines_can_be_left_out_and_are_counted(tmp_path, capsys):
    good = json.dumps({"question": "1+1?", "answer": "#### 2"})
    (tmp_path / "train.jsonl").write_bytes(
        b"\xef\xbb\xbf" + f"{good}\r\n{{bad\n[]\n{good}\n".encode() + b'{"question": "\xff"}\n'
    )
    (tmp_path / "test.jsonl").write_text(good)
    with pytest.raises(ValueError, match=r"train.jsonl:2: bad record"):
        GSM8K(str(tmp_path))
    task = GSM8K(str(tmp_path), skip_bad_lines=True)
    assert (
        len(task.train) == 2
        and "train.jsonl: 3 bad line(s) left out: 2, 3, 5" in capsys.readouterr().out
    )
    (tmp_path / "train.jsonl").write_text("{bad\n")
    with pytest.raises(ValueError, match="holds no problem"):
        GSM8K(str(tmp_path), skip_bad_lines=True)


# ---------------- every flag

CASES = []
for f in fields(Config):
    name, low, choices = "--" + f.name.replace("_", "-"), f.metadata["low"], f.metadata["choices"]
    if not isinstance(f.default, bool):
        CASES.append(([name], "expected"))
    if choices:
        CASES.append(([name, "nonsense"], "invalid choice: 'nonsense'"))
    if type(f.default) in (int, float):
        CASES += [
            ([name, "many"], f"argument {name}: invalid {type(f.default).__name__} value: 'many'")
        ]
    if type(f.default) is float:
        CASES += [([name, "nan"], f"{name} nan: must be"), ([name, "inf"], f"{name} inf: must be")]
    if low is not None:
        CASES.append(
            (
                [name, str(low - 1)],
                f"{name} {type(f.default)(low - 1)}: must be a finite number, at least {low}",
            )
        )
    if len(f.name) > 4:
        CASES.append(([name[:-2] + name[-1] + "q"], f"did you mean {name}"))


@pytest.mark.parametrize(
    "args, said", CASES, ids=lambda x: " ".join(x) if isinstance(x, list) else ""
)
def test_every_flag_refuses_a_wrong_value_in_one_line(args, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(args)
    err = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and said in err
        and err.startswith("error: ")
        and err.count("\n") == 1
    )


# ---------------- a long run


@pytest.mark.skipif(not LONG, reason="2,000 steps: make test-faults")
def test_two_thousand_steps_need_no_more_memory_time_or_files_than_a_hundred(tmp_path, monkeypatch):
    log = tmp_path / "log"
    record = train.record

    def and_look(run, metrics, *args, **named):
        record(run, metrics, *args, **named)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        with open(log, "a") as file:
            file.write(f"{pages} {time.perf_counter()}\n")

    monkeypatch.setattr(train, "record", and_look)
    sizes = ["--steps", "2000", "--save-every", "500", "--eval-every", "500", "--warm-steps", "3"]
    assert (
        os.waitpid(in_a_child([*TINY, *sizes, "--out", str(tmp_path), "--name", "run"]), 0)[1] == 0
    )
    rows = [line.split() for line in log.read_text().splitlines()]
    pages, times = [int(row[0]) for row in rows], [float(row[1]) for row in rows]
    steps = [b - a for a, b in zip(times, times[1:], strict=False)]
    growth, slower = (
        max(pages[100:]) / pages[100],
        statistics.median(steps[-500:]) / statistics.median(steps[100:600]),
    )
    print(
        f"\nresident size after step 100: x {growth:.4f}; step time, last 500 to steps 100-600: x {slower:.3f}"
    )
    assert growth < 1.02 and slower < 1.2
    assert (
        len(metrics(tmp_path / "run")) == 2001
        and len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    )
