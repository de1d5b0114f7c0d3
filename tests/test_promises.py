"""Nothing lost, nothing silently wrong: kills, Ctrl-C, full disks, bad numbers, resuming."""

import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import load
from filelock import FileLock
from helpers import TINY, metrics, refused, run, spy

import train
from toy.arithmetic import Arithmetic

BUSY = [*TINY, *"--steps 6 --eval-every 1 --eval-items 2 --eval-samples 1".split()]
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


def assert_same(a, b, where):
    """Tensors, and what holds them, bit for bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key], where)
    else:
        assert a == b, where


def assert_same_run(run: Path, whole: Path):
    """A kill after the last save may leave the checkpoint before it."""
    assert metrics(run) == metrics(whole)
    ours, theirs = contents(run), contents(whole)
    assert {*theirs} <= {*ours}
    for path in theirs:
        if path.suffix == ".safetensors":
            assert ours[path] == theirs[path], path
        if path.suffix == ".pt":
            a, b = (torch.load(x / path, weights_only=True) for x in (run, whole))
            assert_same(a, b, path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, scratch):
    """The undisturbed run, and how long it takes where a model has been imported already."""
    folder, begin = tmp_path_factory.mktemp("whole") / "run", time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arithmetic, "reward", lambda self, text, item: text.count("1") % 2 * 1.0)
        assert wait(start([*BUSY, "--out", folder])) == 0
    return folder, time.time() - begin


# ---------------- kills


def die_at(module, name: str, call: int):
    """For a forked process: it is killed when a function is called for the so-manieth time."""

    def prepare():
        real, calls = getattr(module, name), itertools.count(1)

        def die(*args, **options):
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(module, name, die)

    return prepare


@pytest.mark.parametrize(
    "module, name, call",
    [
        (train, "warm_start", 1),
        (train, "save", 1),  # two lines of metrics and no checkpoint: it begins anew
        (torch, "save", 6),  # inside a checkpoint
        (train, "save", 6),  # a line of metrics more than the checkpoint has steps
        (Path, "rename", 3),  # a checkpoint that has not got its name
        (shutil, "rmtree", 3),  # two checkpoints
    ],
)
def test_a_killed_run_that_goes_on_is_the_undisturbed_run(tmp_path, whole, module, name, call):
    folder = tmp_path / "run"
    prepare = die_at(module, name, call)
    assert wait(start([*BUSY, "--out", folder], prepare)) == -signal.SIGKILL
    train.main(["--resume", str(folder)])
    assert_same_run(folder, whole[0])
    assert contents(folder).keys() == contents(whole[0]).keys()


@pytest.mark.skipif(not os.environ.get("LONG"), reason="minutes: LONG=1")
def test_a_run_killed_50_times_at_random_is_the_undisturbed_run(tmp_path, whole):
    rng, kills, torn, number = random.Random(0), 0, 0, 0
    while kills < 50:
        folder, number = tmp_path / f"run{number}", number + 1
        done = False
        while not done:
            exists = (folder / "config.json").exists()
            child = start(["--resume", folder] if exists else [*BUSY, "--out", folder])
            time.sleep(rng.uniform(0, 1.2 * whole[1]))
            done, status = os.waitpid(child, os.WNOHANG)
            assert not done or status == 0
            if not done:
                os.kill(child, signal.SIGKILL)
                kills += wait(child) == -signal.SIGKILL
                torn += (folder / "checkpoints" / "unfinished").exists()
                if not (folder / "config.json").exists():
                    shutil.rmtree(folder, ignore_errors=True)  # killed before it began
        assert_same_run(folder, whole[0])
    print(f"\n{kills} kills, {torn} of them inside a checkpoint write, {number} runs: no line lost")


# ---------------- Ctrl-C


def interrupt_at(monkeypatch, name, when=lambda *args: True):
    spy(monkeypatch, name, lambda *args: when(*args) and os.kill(os.getpid(), signal.SIGINT))


def test_ctrl_c_finishes_the_step_saves_it_and_resumes_bit_for_bit(tmp_path, monkeypatch):
    whole, before = run(tmp_path / "whole"), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_at(patch, "sample", lambda policy, task, items, step, config: step == 3)
        cut = run(tmp_path / "cut")
    assert signal.getsignal(signal.SIGINT) is before
    assert [line["step"] for line in metrics(cut)] == [0, 1, 2, 3]
    assert [path.name for path in (cut / "checkpoints").iterdir()] == ["step-000003"]
    (cut / "metrics.jsonl").open("a").write('{"step": 4, "torn')
    train.main(["--resume", str(cut)])
    assert_same_run(cut, whole)


def test_ctrl_c_removes_a_new_run_without_an_evaluation_and_the_second_does_not_wait(
    tmp_path, monkeypatch
):
    def stopped(args, *names):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            for name in names:
                interrupt_at(patch, name)
            train.main(args)

    new, folder = [*TINY, "--out", str(tmp_path / "run")], tmp_path / "run"
    stopped(new, "warm_start")
    assert not folder.exists()
    stopped(new, "sample", "score")
    assert [line["step"] for line in metrics(folder)] == [0]
    stopped(["--resume", str(folder)], "warm_start")
    assert (folder / "config.json").exists()  # what is resumed is never removed


# ---------------- what else may go wrong


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    policy = load("scratch", layers=1, width=16)
    optimizer = train.adamw(policy.model, 0.1)
    train.save(policy, optimizer, 1, tmp_path)
    next(policy.model.parameters()).data[0, 0] = math.inf
    assert "step 2" in refused(train.save, policy, optimizer, 2, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def limit_files(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_is_one_line_and_leaves_what_is_saved(tmp_path, whole, capfd):
    cut, new = tmp_path / "cut", tmp_path / "new"
    wait(start([*BUSY, "--out", cut], die_at(train, "save", 6)))
    before = contents(cut / "checkpoints")
    small = (cut / "checkpoints" / "step-000005" / "trainer.pt").stat().st_size // 2
    for size in (small, 1000):  # too little for a checkpoint; for metrics.jsonl already
        assert wait(start(["--resume", cut], limit_files(size))) == 3
        said = capfd.readouterr().err.splitlines()[-1]
        assert said.startswith(f"error: {cut}") and "--resume" in said
        shutil.rmtree(cut / "checkpoints" / "unfinished", ignore_errors=True)
        assert contents(cut / "checkpoints") == before
    train.main(["--resume", str(cut)])
    assert_same_run(cut, whole[0])
    assert wait(start([*BUSY, "--out", new], limit_files(20_000))) == 3  # not even the model
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"error: {new}") and not new.exists()


def test_a_run_directory_belongs_to_one_process(whole):
    before = contents(whole[0])
    with FileLock(whole[0] / "lock"):
        assert str(whole[0]) in refused(train.main, ["--resume", str(whole[0])])
    assert contents(whole[0]) == before


# ---------------- resuming with other flags


def test_only_steps_of_a_constant_schedule_and_micro_rows_can_change(tmp_path):
    constant = ["--schedule", "constant"]
    whole = run(tmp_path / "whole", *constant)
    half = run(tmp_path / "half", *constant, "--steps", 2)
    train.main(["--resume", str(half), "--steps", "4", "--micro-rows", "1"])
    config = json.loads((half / "config.json").read_text())["config"]
    assert (config["steps"], config["micro_rows"]) == (4, 1)
    for got, expected in zip(metrics(half), metrics(whole), strict=True):
        assert got.pop("examples", 0) == expected.pop("examples", 0)
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)
    before = contents(half)
    for flags in (["--lr", "1"], ["--method", "gspo"], ["--fast"], ["--out", "x"]):
        assert flags[0] in refused(train.main, ["--resume", str(half), *flags])
    assert contents(half) == before
    linear = run(tmp_path / "linear", "--steps", "0")
    assert "--steps" in refused(train.main, ["--resume", str(linear), "--steps", "4"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": 3}', '{"config": {"steps": 3}}'])
def test_what_is_no_run_cannot_be_resumed(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert "--resume" in refused(train.main, ["--resume", str(tmp_path)])
