"""Nothing lost, nothing silently wrong: kills, full disks, torn files, bad numbers, hostile texts.

`make test` runs a sample. `make test-faults` (LONG=1) runs all of it: 50 kills, 10,000 texts a
verifier, 2,000 steps. README.md lists what is promised.
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
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers import TINY, metrics
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from llm.gsm8k import GSM8K
from losses import METHODS, Batch, Method
from toy.arithmetic import Arithmetic, Item

LONG = bool(os.environ.get("LONG"))
KILLS, TEXTS = (50, 10_000) if LONG else (3, 300)
BUSY = [*TINY, *"--steps 6 --eval-every 1 --eval-items 2 --eval-samples 1".split()]
LAST_TWO = {"step-000005", "step-000006"}
REWARD = Arithmetic.reward  # before `easy` replaces it
pytestmark = pytest.mark.usefixtures("easy")


def start(args: list, prepare=lambda: None) -> int:
    """Run the trainer in a forked process, which is killed like any other; its process id."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            prepare()
            train.main([*map(str, args)])
            os._exit(0)
        except SystemExit as stopped:
            os.write(2, f"{stopped.code}\n".encode())
            os._exit(3)
        finally:
            os._exit(4)
    return child


def wait(child: int) -> int:
    """The exit code of a forked process, negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file of a directory but the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def assert_same_run(run: Path, whole: Path):
    assert metrics(run) == metrics(whole)
    ours, theirs = contents(run), contents(whole)
    # A kill after the last save may leave a third checkpoint, for which no later save is to come.
    assert {*theirs} <= {*ours} and len([*(run / "checkpoints").iterdir()]) <= 3
    for path in theirs:
        if path.suffix == ".safetensors" or path.name in ("samples.txt", "groups.jsonl"):
            assert ours[path] == theirs[path], path
    for name in LAST_TWO:
        folders = (x / "checkpoints" / name / "trainer.pt" for x in (run, whole))
        a, b = (torch.load(path, weights_only=True)["optimizer"]["state"] for path in folders)
        assert a.keys() == b.keys() and all(torch.equal(a[i][k], b[i][k]) for i in a for k in a[i])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, scratch):
    """The undisturbed run, and how long it takes where a model has been imported already."""
    folder, begin = tmp_path_factory.mktemp("whole") / "run", time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arithmetic, "reward", lambda self, text, item: text.count("1") % 2 * 1.0)
        assert wait(start([*BUSY, "--out", folder])) == 0
    return folder, time.time() - begin


@pytest.fixture
def run(whole, tmp_path):
    """A copy of the undisturbed run."""
    return Path(shutil.copytree(whole[0], tmp_path / "run"))


@pytest.fixture
def cut(run):
    """A copy of the undisturbed run without its last checkpoint."""
    shutil.rmtree(run / "checkpoints" / "step-000006")
    return run


# ---------------- the run directory


def test_a_run_killed_again_and_again_is_the_undisturbed_run(tmp_path, whole):
    rng, kills, torn, number = random.Random(0), 0, 0, 0
    while kills < KILLS:
        run, number = tmp_path / f"run{number}", number + 1
        while True:
            child = start(["--resume", run] if run.exists() else [*BUSY, "--out", run])
            time.sleep(rng.uniform(0, 1.2 * whole[1]))
            done, status = os.waitpid(child, os.WNOHANG)
            if done:  # killed after its last save, a run has nothing left to do, and says so
                assert status == 0 or (run / "checkpoints" / "step-000006").is_dir()
                break
            os.kill(child, signal.SIGKILL)
            kills += wait(child) == -signal.SIGKILL
            torn += any((run / "checkpoints").glob("unfinished-*"))
        assert_same_run(run, whole[0])
    print(f"\n{kills} kills, {torn} of them inside a checkpoint write, {number} runs: no line lost")


def test_a_kill_inside_a_checkpoint_write_leaves_the_one_before(tmp_path, whole, monkeypatch):
    run, write = tmp_path / "run", torch.save

    def die_at_step_3(state, path):
        write(state, path) if state["step"] < 3 else os.kill(os.getpid(), signal.SIGKILL)

    child = start([*BUSY, "--out", run], lambda: monkeypatch.setattr(torch, "save", die_at_step_3))
    assert wait(child) == -signal.SIGKILL
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-000001", "step-000002", "unfinished-000003"]
    train.main(["--resume", str(run)])
    assert_same_run(run, whole[0])


def damage(file: Path, how: str):
    data = file.read_bytes()
    half = len(data) // 2
    file.unlink()
    if how != "gone":
        left = {"empty": b"", "cut": data[:half], "hole": data[:half] + bytes(len(data) - half)}
        file.write_bytes(left[how])


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "hole"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "trainer.pt", "config.json", "tokenizer.json"]
)
def test_a_damaged_checkpoint_is_passed_over_with_a_message(run, whole, capsys, name, how):
    damage(run / "checkpoints" / "step-000006" / name, how)
    train.main(["--resume", str(run)])
    assert "step-000006 is damaged" in capsys.readouterr().err
    assert_same_run(run, whole[0])


def edit(old, new):
    def change(run):
        text = (run / "config.json").read_text()
        assert old in text
        (run / "config.json").write_text(text.replace(old, new))

    return change


def write(name, text):
    return lambda run: (run / name).write_text(text)


NO_CONFIG, NO_START = "no config.json of a run there", "start/, the policy that the KL is measured"
BAD_METRICS = "metrics.jsonl is not what it was at step 5"
LAST = Path("checkpoints") / "step-000005" / "trainer.pt"


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda run: damage(run / LAST, "cut"), "none of its checkpoints can be read"),
        (write("metrics.jsonl", '{"step": -1}\n' * 100), BAD_METRICS),
        (write("metrics.jsonl", ""), BAD_METRICS),
        (write("samples.txt", "x"), "samples.txt is not what it was at step 5"),
        (lambda run: shutil.rmtree(run / "start"), NO_START),
        (edit('"steps": 6', '"steps": "6"'), NO_CONFIG),
        (edit('"steps": 6', '"steps": null'), NO_CONFIG),
        (edit('"steps": 6,', ""), NO_CONFIG),
        (edit('"grpo"', '"foo"'), "--method foo: must be one of reinforce, grpo"),
    ],
)
def test_what_cannot_be_resumed_is_refused_and_left_as_it_is(cut, capsys, change, said):
    change(cut)
    edit("git_commit", "old_commit")(cut)  # config.json would be written anew
    before = contents(cut)
    with pytest.raises(SystemExit) as stopped:
        train.main(["--resume", str(cut)])
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and said in err and "Traceback" not in err
    assert contents(cut) == before


def test_a_full_disk_leaves_the_last_checkpoint_intact_and_says_so(cut, whole, capfd):
    before = contents(cut / "checkpoints")
    small = (cut / "checkpoints" / "step-000005" / "trainer.pt").stat().st_size // 2
    full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (small, small))  # noqa: E731
    assert wait(start(["--resume", cut], full)) == 3
    said = capfd.readouterr().err
    assert "the checkpoint of step 6 cannot be written" in said
    assert f"step-000005 is intact, resume from it with --resume {cut}" in said
    assert contents(cut / "checkpoints") == before
    train.main(["--resume", str(cut)])
    assert_same_run(cut, whole[0])


def test_a_run_directory_belongs_to_one_process(cut, capsys):
    args = [*map(str, ["--resume", cut])]
    with FileLock(cut / "lock"), pytest.raises(SystemExit) as stopped:
        train.main(args)
    assert stopped.value.code == 2 and "another process is writing to it" in capsys.readouterr().err
    train.main(args)
    with pytest.raises(SystemExit):
        train.main([*BUSY, "--out", str(cut)])
    assert "exists" in capsys.readouterr().err


# ---------------- numbers


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_numbers_stop_the_run_before_the_weights_change_and_leave_the_batch(
    tmp_path, monkeypatch, bad
):
    good, calls, run = METHODS["grpo"].passes[0], [], tmp_path / "run"

    def sometimes_bad(batch):
        calls.append(len(batch.logp))
        return good(batch) + (bad * batch.logp.sum() if len(calls) > 6 else 0)

    monkeypatch.setitem(METHODS, "grpo", Method((sometimes_bad,)))
    with pytest.raises(SystemExit) as stopped:
        train.main([*BUSY, "--out", str(run)])
    step = len(metrics(run))
    assert step > 1 and f"error: step {step}: loss " in stopped.value.code
    assert f"bad-batch-{step:06d}.pt" in stopped.value.code
    batch = torch.load(run / f"bad-batch-{step:06d}.pt", weights_only=True)
    assert batch["logp"].shape == batch["tokens"].shape == batch["mask"].shape
    assert batch["logp"].isfinite().all()
    saved = max((run / "checkpoints").glob("step-*"))
    assert torch.load(saved / "trainer.pt", weights_only=True)["step"] == step - 1


LOSSES = sorted({f for method in METHODS.values() for f in method.passes}, key=lambda f: f.__name__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_ratios_of_e50_and_impossible_tokens_give_no_nan(loss_fn, dtype):
    """A ratio of e^50 is a number. A token with log pi = -inf has ratio 0 and no gradient. Where
    A log pi is the loss, that loss is infinite."""
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
    if loss_fn.__name__ in ("reinforce", "cispo", "dfpo_min", "dfpo_orthogonal"):
        assert not loss.isfinite()  # train.py stops there, see above
    else:
        assert loss.isfinite() and grad.isfinite().all() and (grad[:, 1] == 0).all()


# ---------------- text in, text out


def hostile() -> st.SearchStrategy[str]:
    parts = ["####", "#", r"\boxed{", "{", "}", "9**9**9", "٣", "½", "－７", "\0", "1,2", "$", "%"]
    parts += ["-", ".", " ", "\n", "42", "e9"]
    units = ["9", "{", r"\boxed{", "#", "1,", "-."]
    big = st.sampled_from([unit * (100_000 // len(unit)) for unit in units])
    return st.text() | st.lists(st.sampled_from(parts), max_size=60).map("".join) | big


@pytest.mark.parametrize("reward", [GSM8K.reward, REWARD], ids=["GSM8K", "Arithmetic"])
def test_verifiers_take_any_text_without_raising_in_50_ms(reward):
    item, worst = Item("37+48=", "85", ""), []

    @settings(max_examples=TEXTS, deadline=None)
    @given(hostile())
    def check(text):
        begin = time.thread_time()
        assert reward(None, text, item) in (0.0, 1.0)
        worst.append(time.thread_time() - begin)

    check()
    assert max(worst) < 0.05, f"{max(worst)} s"


def test_no_file_here_evaluates_or_unpickles():
    root = Path(train.__file__).parent
    sources = {path: path.read_text() for path in root.glob("[!.]*/**/*.py")}
    sources |= {path: path.read_text() for path in root.glob("*.py")}
    for path in root.glob("exercises/[0-9]*.py"):
        del sources[path]  # what students write there is theirs
    assert len(sources) > 20 and sources.pop(Path(__file__))
    for path, text in sources.items():
        assert "eval(" not in text.replace(".eval(", "") and "import pickle" not in text, path
        assert "trust_remote_code" not in text, path
        if path.parent != Path(__file__).parent:  # the grader runs the file that it is given
            assert text.count("torch.load(") == text.count("weights_only=True"), path
            assert ("exec(" in text or "exec_module(" in text) == (path.name == "process.py"), path


def test_bad_lines_can_be_left_out_and_are_counted(tmp_path, capsys):
    good = json.dumps({"question": "1+1?", "answer": "#### 2"})
    lines = b"\xef\xbb\xbf" + f"{good}\r\n{{bad\n[]\n{good}\n".encode() + b'{"question": "\xff"}\n'
    (tmp_path / "train.jsonl").write_bytes(lines)
    (tmp_path / "test.jsonl").write_text(good)
    with pytest.raises(ValueError, match=r"train.jsonl:2: bad record"):
        GSM8K(str(tmp_path))
    task = GSM8K(str(tmp_path), skip_bad_lines=True)
    assert len(task.train) == 2
    assert "train.jsonl: 3 bad line(s) left out: 2, 3, 5" in capsys.readouterr().out
    (tmp_path / "train.jsonl").write_text("{bad\n")
    with pytest.raises(ValueError, match="holds no problem"):
        GSM8K(str(tmp_path), skip_bad_lines=True)


# ---------------- a long run


@pytest.mark.skipif(not LONG, reason="2,000 steps: make test-faults")
def test_two_thousand_steps_need_no_more_memory_time_or_files_than_a_hundred(tmp_path, monkeypatch):
    log, run, record = tmp_path / "log", tmp_path / "run", train.record

    def and_look(*args, **named):
        record(*args, **named)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        with open(log, "a") as file:
            file.write(f"{pages} {time.perf_counter()}\n")

    monkeypatch.setattr(train, "record", and_look)
    sizes = ["--steps", "2000", "--eval-every", "500", "--warm-steps", "3"]
    assert wait(start([*TINY, *sizes, "--out", run])) == 0
    rows = [line.split() for line in log.read_text().splitlines()]
    pages, times = [int(row[0]) for row in rows], [float(row[1]) for row in rows]
    steps = [b - a for a, b in zip(times, times[1:], strict=False)]
    growth = max(pages[100:]) / pages[100]
    slower = statistics.median(steps[-500:]) / statistics.median(steps[100:600])
    print(f"\nresident size after step 100: x {growth:.4f}; median step time: x {slower:.3f}")
    assert growth < 1.02 and slower < 1.2
    assert len(metrics(run)) == 2001 and len([*(run / "checkpoints").iterdir()]) == 2
