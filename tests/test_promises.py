"""Nothing lost, nothing silently wrong: kills, Ctrl-C, full disks, bad numbers, resuming.

`make test` runs a sample of the kills; LONG=1 runs 50.
"""

import json
import math
import os
import random
import resource
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers import TINY, metrics, refused, run, spy

import train
from losses import METHODS, Method
from toy.arithmetic import Arithmetic

KILLS = 50 if os.environ.get("LONG") else 3
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


@pytest.fixture
def cut(tmp_path, whole):
    """The undisturbed run as it was after step 5, and a little of step 6."""

    def stop(policy, optimizer, step, folder):
        if step == 6:
            os._exit(5)

    child = start(
        [*BUSY, "--out", tmp_path / "run"], lambda: spy(pytest.MonkeyPatch(), "save", stop)
    )
    assert wait(child) == 5 and len(metrics(tmp_path / "run")) == 7
    return tmp_path / "run"


# ---------------- kills


def test_a_run_killed_again_and_again_is_the_undisturbed_run(tmp_path, whole):
    rng, kills, torn, number = random.Random(0), 0, 0, 0
    while kills < KILLS:
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


def test_a_kill_inside_a_checkpoint_write_leaves_the_one_before(tmp_path, whole, monkeypatch):
    folder, write = tmp_path / "run", torch.save

    def die_at_step_3(state, path):
        if path.name == "trainer.pt" and state["step"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        write(state, path)

    prepare = lambda: monkeypatch.setattr(torch, "save", die_at_step_3)  # noqa: E731
    assert wait(start([*BUSY, "--out", folder], prepare)) == -signal.SIGKILL
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step-000002", "unfinished"]
    train.main(["--resume", str(folder)])
    assert_same_run(folder, whole[0])
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000006"]


def test_a_run_without_a_checkpoint_begins_anew(tmp_path, whole):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(whole[0] / "config.json", folder)
    (folder / "metrics.jsonl").write_text('{"step": 0, "gre')
    train.main(["--resume", str(folder)])
    assert_same_run(folder, whole[0])


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


def test_ctrl_c_before_the_first_evaluation_leaves_nothing_and_a_second_one_does_not_wait(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        interrupt_at(patch, "warm_start")
        run(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        interrupt_at(patch, "sample")
        interrupt_at(patch, "score")
        run(tmp_path / "run")
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0]


def test_a_run_that_is_resumed_is_never_removed(tmp_path, monkeypatch, whole):
    """Not even where it begins anew, and is interrupted in its warm start again."""
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(whole[0] / "config.json", folder)
    (folder / "notes.txt").write_text("mine")
    interrupt_at(monkeypatch, "warm_start")
    with pytest.raises(SystemExit):
        train.main(["--resume", str(folder)])
    assert (folder / "notes.txt").read_text() == "mine"


# ---------------- what else may go wrong


def test_weights_that_are_not_finite_are_not_saved(tmp_path, scratch):
    (tmp_path / "metrics.jsonl").touch()
    optimizer = train.adamw(scratch.model, 0.1)
    train.save(scratch, optimizer, 1, tmp_path)
    weight = next(scratch.model.parameters())
    kept = weight.data[0, 0].item()
    weight.data[0, 0] = math.inf
    assert "step 2" in refused(train.save, scratch, optimizer, 2, tmp_path)
    weight.data[0, 0] = kept
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_context_too_small_is_said_before_the_warm_start(tmp_path, monkeypatch):
    starts = spy(monkeypatch, "warm_start")
    refused(run, tmp_path / "run", "--max-tokens", "2000")
    assert not starts and not (tmp_path / "run").exists()


def limit_files(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_is_one_line_and_leaves_what_is_saved(cut, whole, tmp_path, capfd):
    before = contents(cut / "checkpoints")
    small = (cut / "checkpoints" / "step-000005" / "trainer.pt").stat().st_size // 2
    for size in (small, 1000):  # too little for a checkpoint; for metrics.jsonl already
        capfd.readouterr()
        assert wait(start(["--resume", cut], limit_files(size))) == 3
        said = capfd.readouterr().err.splitlines()[-1]
        assert said.startswith(f"error: {cut}") and "--resume" in said
        left = contents(cut / "checkpoints")
        assert {path: x for path, x in left.items() if path.parts[0] != "unfinished"} == before
    train.main(["--resume", str(cut)])
    assert_same_run(cut, whole[0])
    new = tmp_path / "new"
    assert wait(start([*BUSY, "--out", new], limit_files(20_000))) == 3  # not even the model
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"error: {new}") and not new.exists()


def test_a_run_directory_belongs_to_one_process(cut):
    before = contents(cut)
    with FileLock(cut / "lock"):
        assert str(cut) in refused(train.main, ["--resume", str(cut)])
    assert str(cut) in refused(train.main, [*BUSY, "--out", str(cut)])
    assert contents(cut) == before


def test_a_loss_that_is_not_finite_ends_the_run_with_the_step_before_saved(tmp_path, monkeypatch):
    good, calls, folder = METHODS["grpo"].passes[0], [], tmp_path / "run"

    def loss(batch):
        calls.append(batch)
        return good(batch) * (math.inf if len(calls) > 12 else 1)

    monkeypatch.setitem(METHODS, "grpo", Method((loss,)))
    said = refused(train.main, [*BUSY, "--out", str(folder)])
    step = len(metrics(folder))
    assert step > 1 and f"step {step}" in said
    assert (folder / "checkpoints" / f"step-{step - 1:06d}").is_dir()


def test_where_sampler_and_scorer_disagree_the_run_ends_and_can_go_on(tmp_path, monkeypatch, whole):
    real, folder = train.score, tmp_path / "run"

    def score(policy, reference, answers, config):
        wrong = replace(answers, logp=answers.logp + (math.nan if answers.step == 3 else 0))
        return real(policy, reference, wrong, config)

    with monkeypatch.context() as broken:
        broken.setattr(train, "score", score)
        assert "step 3" in refused(train.main, [*BUSY, "--out", str(folder)])
    train.main(["--resume", str(folder)])
    assert_same_run(folder, whole[0])


# ---------------- resuming with other flags


def test_only_steps_of_a_constant_schedule_and_micro_rows_can_change(tmp_path):
    constant = ["--schedule", "constant"]
    whole, half = (
        run(tmp_path / "whole", *constant),
        run(tmp_path / "half", *constant, "--steps", 2),
    )
    train.main(["--resume", str(half), "--steps", "4", "--micro-rows", "1"])
    config = json.loads((half / "config.json").read_text())["config"]
    assert (config["steps"], config["micro_rows"]) == (4, 1)
    for got, expected in zip(metrics(half), metrics(whole), strict=True):
        assert got.pop("examples", 0) == expected.pop("examples", 0)
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)
    before = contents(half)
    for flags in (["--lr", "1"], ["--method", "gspo"], ["--fast"], ["--out", "x"]):
        assert flags[0] in refused(train.main, ["--resume", str(half), *flags])
    linear = run(tmp_path / "linear", "--steps", "2")
    assert "--steps" in refused(train.main, ["--resume", str(linear), "--steps", "4"])
    assert contents(half) == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": 3}', '{"config": {"steps": 3}}'])
def test_what_is_no_run_cannot_be_resumed(tmp_path, text):
    assert "--resume" in refused(train.main, ["--resume", str(tmp_path)])
    (tmp_path / "config.json").write_text(text)
    assert "--resume" in refused(train.main, ["--resume", str(tmp_path)])
