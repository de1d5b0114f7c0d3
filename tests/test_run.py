"""To whoever runs train.py: what a run leaves, that a kill loses nothing, a mistake is one line.

LONG=1 adds the default run.
"""

import copy
import io
import json
import os
import shutil
import string
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, build, load, metrics, refused, run, timeless, weights_of
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel

import train
from llm import loading
from llm.chat import ChatTask
from llm.gsm8k import GSM8K, Item
from llm.neighbours import add_scores
from toy import plain
from toy.arithmetic import Arithmetic, BaseTask

pytestmark = pytest.mark.usefixtures("easy")


# ---------------- what a run does and leaves


def test_a_run_leaves_what_it_promises(tmp_path, capsys):
    """Lines, both models, and a batch with its log-probs before and after the step."""
    folder = run(tmp_path / "run", "--steps", 1, "--epochs", 2)
    config, task = train.Config(**json.loads((folder / "config.json").read_text())), Arithmetic()
    start, after = load(folder / "start"), load(folder / "model")
    first, last = metrics(folder)
    assert first == {"step": 0} | timeless(train.evaluate(start, task, config))
    assert last == last | {"step": 1} | timeless(train.evaluate(after, task, config))
    assert f"greedy {first['greedy']:.3f} -> {last['greedy']:.3f}" in capsys.readouterr().out

    saved = torch.load(*folder.glob("batches/*"), weights_only=True)
    items = train.prompt_batches(task, config)[0]
    assert saved["prompts"] == [item.prompt for item in items]
    prompts = [row for row in task.encode(after.tokenizer, items) for _ in range(3)]
    for i, (prompt, seen) in enumerate(zip(prompts, saved["mask"], strict=True)):
        answer = saved["tokens"][i][seen].tolist()
        text = "".join(saved["pieces"][i][: len(answer)]).removesuffix("<eos>")
        assert saved["rewards"][i] == task.reward(text, None)
        for name, policy in (("logp_old", start), ("logp", after)):
            logp = plain.log_probs(policy, prompt, answer).detach()
            torch.testing.assert_close(saved[name][i][seen], logp, rtol=1e-4, atol=1e-5)


def test_a_credit_rule_acts_between_assessing_and_learning(tmp_path, monkeypatch):
    """And what it logs counts: ibpo's number of tokens includes the corrections."""
    calls = []
    monkeypatch.setattr(train, "reshape_credit", lambda *_: {"generated": 7})
    for name in ("assess", "reshape_credit", "learn"):
        real = getattr(train, name)
        monkeypatch.setattr(train, name, lambda *a, f=real, n=name: calls.append(n) or f(*a))
    folder = run(tmp_path / "run", "--method", "advantage-reweighting", "--steps", 2)
    assert calls == ["assess", "reshape_credit", "learn"] * 2
    assert [line.get("generated") for line in metrics(folder)] == [None, 7, 7]


def test_a_kl_term_compares_with_the_start_policy(tmp_path, monkeypatch):
    references, real = [], train.assess
    monkeypatch.setattr(train, "assess", lambda *args: references.append(args[1]) or real(*args))
    folder = run(tmp_path / "run", "--hyper", "kl=0.1")
    start, end = (weights_of(load(folder / name)) for name in ("start", "model"))
    assert not torch.equal(start, end)
    for reference in references:
        assert torch.equal(weights_of(reference), start)


OWN_TASK = """
from toy.arithmetic import BaseTask, Item

class Task(BaseTask):
    def __init__(self):
        self.train = self.test = [Item(f"{n}?", "!", "so !") for n in range(9)]
    def reward(self, text, item):
        return item.answer in text
"""


def test_a_task_of_ones_own_is_a_file(tmp_path, capsys):
    """The run keeps a copy, and says if the file has changed since."""
    mine = tmp_path / "mine.py"
    mine.write_text(OWN_TASK)
    flags = "--warm-steps 150 --warm-lr 0.01 --max-tokens 8 --steps 3 --task".split()
    folder = run(tmp_path / "run", *flags, mine)
    assert metrics(folder)[-1]["sampled"] > 0.5 and (folder / "task.py").read_text() == OWN_TASK
    mine.write_text(OWN_TASK.replace("in text", "not in text"))
    train.main(["--resume", str(folder)])
    assert f"{mine} has changed since" in capsys.readouterr().out


def test_a_console_that_lacks_a_letter_and_a_windows_that_renames_onto_no_file(
    tmp_path, monkeypatch
):
    """End neither a run nor its --resume."""
    (tmp_path / "mine.py").write_text(OWN_TASK.replace("?", "？"), "utf-8")
    console = io.TextIOWrapper(io.BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", console)
    for name in ("rename", "link"):
        monkeypatch.setattr(os, name, lambda *_, **__: pytest.fail("it is not for Windows"))
    folder = run(tmp_path / "run", "--task", tmp_path / "mine.py")
    train.main(["--resume", str(folder)])
    console.flush()
    assert rb"\uff1f" in console.buffer.getvalue()


def test_a_run_outlives_its_terminal(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # both are put back after the test
    assert len(metrics(run(tmp_path / "run"))) == 5


def test_runs_that_start_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.time, "strftime", lambda _: "NOW")
    for seed in ("3", "3"):
        train.main([*TINY, "--steps", "1", "--warm-steps", "0", "--seed", seed])
    assert sorted(os.listdir("runs")) == ["arithmetic-grpo-s3-NOW", "arithmetic-grpo-s3-NOW-2"]
    assert [len(metrics(folder)) for folder in Path("runs").iterdir()] == [2, 2]
    with train.own_folder(train.Config(out="runs/arithmetic-grpo-s3-NOW", resume="x")):
        assert "another process" in refused(train.main, ["--resume", "runs/arithmetic-grpo-s3-NOW"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "launcher" in refused(train.main, ["--resume", "runs/arithmetic-grpo-s3-NOW"])


def test_three_files_are_all_that_the_default_command_needs(tmp_path, monkeypatch):
    """And another process has the same random numbers."""
    monkeypatch.undo()  # the toy's own reward, as in the other process
    (tmp_path / "toy").mkdir()
    for name in ("train.py", "losses.py", "toy/arithmetic.py"):
        shutil.copy(Path(train.__file__).parent / name, tmp_path / name)
    (tmp_path / "llm.py").write_text("raise ImportError")  # in place of an installed one
    command = [sys.executable, "train.py", *TINY, "--out", "run"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert metrics(tmp_path / "run") == metrics(run(tmp_path / "here"))


@pytest.mark.skipif(not os.environ.get("LONG"), reason="minutes: LONG=1")
def test_the_default_run_learns_to_add(tmp_path, monkeypatch):
    monkeypatch.undo()  # the toy's own reward
    train.main(["--out", str(tmp_path / "run")])
    lines = metrics(tmp_path / "run")
    assert lines[0]["greedy"] < 0.3 and lines[-1]["greedy"] > 0.95


def test_the_best_policy_is_kept_and_one_group_of_every_step(tmp_path, monkeypatch, capsys):
    """The best evaluation is that with the highest greedy reward, and then sampled reward."""
    scores, real = iter([(5, 5), (4, 9), (6, 1), (6, 2), (6, 2), (5, 5)]), train.evaluate

    def evaluate(*args):
        return real(*args) | dict(zip(("greedy", "sampled"), next(scores), strict=True))

    monkeypatch.setattr(train, "evaluate", evaluate)
    whole = run(tmp_path / "whole", *"--steps 5 --eval-every 1 --schedule constant".split())
    assert capsys.readouterr().out.endswith(f"best at step 3: {whole}/model-best\n")
    monkeypatch.setattr(train, "evaluate", real)
    three = run(tmp_path / "three", *"--steps 3 --schedule constant".split())
    best, third, last = (
        weights_of(load(x)) for x in (whole / "model-best", three / "model", whole / "model")
    )
    assert best.equal(third) and not best.equal(last)

    steps = (whole / "samples.txt").read_text().split("=== step ")[1:]
    items = train.prompt_batches(Arithmetic(), train.Config(prompts=4, steps=5))
    for number, (text, batch) in enumerate(zip(steps, items[:5], strict=True), 1):
        title, *answers = text.strip("\n").split("\n")
        assert title == f"{number}: {batch[0].prompt} ({batch[0].answer})" and len(answers) == 3
        for answer in answers:
            reward, _, said = answer.partition("] ")
            assert float(reward.strip("[").partition(",")[0]) == said.count("1") % 2


def test_a_group_to_read_says_which_answers_were_cut_off(scratch):
    """Those without an end, and not the longest that has one."""
    tokens = torch.tensor([[3, 3, 1], [3, 1, 0], [3, 3, 3]])
    zeros, item = torch.zeros(3, 3), Item("1+1", "2", "")
    rows = [item] * 3, ["a", "b", "c"], tokens, tokens, tokens > 0, zeros, zeros, torch.ones(3)
    said = train.describe_group(scratch, train.Rollout(*rows), 9, train.Config(group_size=3))
    assert said == "=== step 9: 1+1 (2)\n[1] a\n[1] b\n[1, cut off] c\n\n"


def test_the_last_lines_say_what_went_wrong(tmp_path, capsys):
    first = {"step": 0, "greedy": 0.5, "greedy_se": 0.03, "sampled": 0.5}
    last = {"step": 9, "greedy_se": 0.03, "sampled": 0.6}
    steps = [{"step": 1, "generated": 30, "seconds": 2.0}, {"step": 2, "generated": 10}]
    steps[1]["seconds"] = 3.0
    # 0.42 is within two standard errors, of 0.042. What went wrong most is said, and no more.
    for greedy, truncated, wrong in ((0.4, 0.3, "below"), (0.42, 0.3, "cut off"), (0.42, 0.2, "")):
        last |= {"greedy": greedy, "truncated": truncated}
        lines = map(json.dumps, (first, *steps, last))
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        train.summarize(tmp_path)
        said = capsys.readouterr().out
        assert f"greedy 0.500 -> {greedy:.3f}, sampled 0.500 -> 0.600, 8 tokens a" in said
        assert f"changed by {greedy - 0.5:+.3f} (standard error 0.042)" in said
        assert ("below its start" in said) == (wrong == "below")
        assert ("30% of the last answers were cut off" in said) == (wrong == "cut off")


def test_a_row_cuts_off_no_digit(capsys):
    first = dict(greedy=1.0, sampled=-162000.25, reward=0.12345, entropy=2.0, equal_groups=0.5)
    train.show({"step": 20, **first, "length": 123.45, "truncated": 0, "examples": ["1+1= -> 2"]})
    row, example = capsys.readouterr().out.splitlines()
    assert row.split()[1:] == "20: 1.000 -1.62e+05 0.123 2.000 0.500 123 0.000".split()
    assert example == "    1+1= -> 2"


def test_costs_are_said_before_they_are_spent(tmp_path, capsys, scratch):
    """9 steps of 30 s and 4 evaluations (steps 3, 6, 9 and 10) of 15 s are 5.5 minutes. A
    checkpoint is three times as large as a model. There are two for a moment, beside the best
    model; at the end there is one, beside the best model and the last."""
    line = {"step": 0, "greedy": 0, "eval_seconds": 15}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    config = train.Config(out=str(tmp_path), steps=10, eval_every=3, warm_steps=0)
    weights = [SimpleNamespace(numel=lambda: 100_000_000)]
    large = SimpleNamespace(model=SimpleNamespace(parameters=lambda: weights))
    train.announce_costs(large, {"seconds": 30.0}, config)
    said = capsys.readouterr().out
    assert said.startswith("about 6 minutes to go")
    assert said.endswith("needs 2.8 GB of disk, and 2.0 GB at the end\n")
    config.steps = 2
    train.announce_costs(scratch, {"seconds": 1.0}, config)
    assert not capsys.readouterr().out


# ---------------- resuming


def test_a_run_that_has_ended_resumes_with_more_steps_and_another_rate(tmp_path, capsys):
    """Its first steps stay. The linear schedule is that of a run with the new steps."""
    folder = run(tmp_path / "run")
    before, more = metrics(folder), ["--resume", str(folder), "--steps"]
    train.main([*more, "6", "--lr", "0.002", "--eval-every", "5"])
    assert "after step 4 of 6, at a learning rate of 0.00067" in capsys.readouterr().out
    lines = metrics(folder)
    assert lines[:5] == before and ["greedy" in line for line in lines[4:]] == [True] * 3
    assert [line["lr"] for line in lines[4:]] == pytest.approx([0.001 / 4, 0.002 / 3, 0.002 / 6])
    assert train.learning_rate(60, train.Config()) == pytest.approx(0.001 / 60)  # no floor
    assert "already made 6" in refused(train.main, [*more, "5"])
    train.main(more[:2])
    assert "after step 6 of 6, --steps adds more" in capsys.readouterr().out
    config = json.loads((folder / "config.json").read_text())
    changed = {"steps": 6, "lr": 0.002, "eval_every": 5}
    assert config.items() >= changed.items() and config["prompts"] == 4
    assert config["resumed"] == [{"after_step": 4} | changed]


class Killed(BaseException):
    """What no `except Exception` sees, as it would not see a kill."""


MOMENTS = [  # a call of a function, and how many of six steps are left
    ("describe_group", 1, 6),  # a line of metrics and no checkpoint: the run begins anew
    ("save_rollout", 2, 5),  # the second step is only in metrics.jsonl
    ("keep_best", 2, 4),  # a checkpoint of the best policy, which is not in model-best/ yet
]


def test_a_killed_run_resumes_with_what_is_left(tmp_path, monkeypatch):
    """And ends as the undisturbed run, bit for bit."""
    asked, sample = [], train.sample
    monkeypatch.setattr(train, "sample", lambda *args: asked.append(args[2:4]) or sample(*args))
    flags = "--steps 6 --eval-every 1 --eval-items 2 --seed 7".split()
    whole = run(tmp_path / "whole", *flags)
    every = asked.copy()
    assert every[0][0] != every[1][0]  # their prompts
    for name, call, left in MOMENTS:
        folder, real, calls = tmp_path / name, getattr(train, name), []

        def die(*args, real=real, calls=calls, call=call):
            calls.append(1)
            if len(calls) == call:
                raise Killed
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(train, name, die)
            with pytest.raises(Killed):
                run(folder, *flags)
        (folder / "metrics.jsonl").open("a").write('{"step": 9, "torn')  # a line cut off, too
        asked.clear()
        train.main(["--resume", str(folder)])
        assert asked == every[6 - left :], name
        assert metrics(folder) == metrics(whole) and models_of(folder) == models_of(whole)
        assert (folder / "samples.txt").read_text() == (whole / "samples.txt").read_text()
    assert len(models_of(whole)) == 3  # start, model-best, model


def models_of(folder: Path) -> list[bytes]:
    return [x.read_bytes() for x in sorted(folder.glob("**/*.safetensors"))]


def test_weights_that_are_not_finite_spoil_no_checkpoint(tmp_path):
    folder = run(tmp_path / "run", "--steps", 1)
    policy, config = load("scratch", layers=1, width=16), train.Config(out=str(folder), steps=1)
    optimizer, best = train.adamw(policy.model, 0.1), models_of(folder)
    next(policy.model.parameters()).data[0, 0] = torch.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "describe_group", lambda *_: "")
        line = {"step": 2, "greedy": 1.0}
        assert "step 2" in refused(train.save, policy, optimizer, True, line, config)
    assert train.restore(policy, optimizer, config) == 1 and models_of(folder) == best


def test_a_full_disk_ends_a_run_in_one_line_and_leaves_no_half_file(tmp_path, monkeypatch):
    def fail(state, part):
        Path(part).write_text("half")
        raise RuntimeError("[enforce fail] unexpected pos\nand more")

    folder, real = run(tmp_path / "run", "--steps", 2), torch.save
    before = (folder / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(torch, "save", fail)
    said = refused(train.main, ["--resume", str(folder), "--steps", "4"])
    assert "step-000004.pt could not be written; is the disk full? ([enforce" in said
    monkeypatch.setattr(torch, "save", lambda *x: real(*x) if "batches" in str(x[1]) else fail(*x))
    said = refused(train.main, ["--resume", str(folder), "--steps", "4"])
    assert "checkpoint.pt could not be written" in said
    assert (folder / "checkpoint.pt").read_bytes() == before and not [*folder.rglob("*.part")]


def test_a_tracker_has_one_run_and_its_failure_is_not_the_runs(tmp_path, monkeypatch, capsys):
    """A run that is resumed is the same one. The tracker gets no `step` among the numbers."""
    opened, logged = [], []

    def init(**options):
        opened.append((options["name"], options["id"], options["resume"]))

    def log(numbers, step):
        logged.append(numbers)
        raise ConnectionError("no network\nand more")

    wandb = SimpleNamespace(init=init, log=log, __spec__=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda _: True)
    folder = run(tmp_path / "run", "--track", "wandb")
    train.main(["--resume", str(folder), "--steps", "5"])
    (name, id_, resume), again = opened
    assert name == id_ and resume == "allow" and again == opened[0]
    assert len(logged) == 6 and all("lr" in x or "greedy" in x for x in logged)
    assert not any("step" in x or "examples" in x for x in logged)
    assert "--track wandb: no network; metrics.jsonl has" in capsys.readouterr().out
    wandb.init = lambda **_: 1 / 0
    assert "--track wandb: " in refused(run, tmp_path / "other", "--track", "wandb")
    assert not (tmp_path / "other").exists() and folder.exists()


# ---------------- flags and mistakes

MISTAKES = """
--task chess: no such file
--warm-lr nan: --warm-lr nan
--group-size 1: --group-size must be at least 2
--width 12: --width 12 is not a multiple of 8
--prompts 30 --minibatches 4: not divisible
--model /no/such/model: --model /no/such/model
--task sums --model no/such/SmolLM2-135M-Instruct: make real builds the directory models/SmolLM2
--task gsm8k --data /no/such/dir: train.jsonl
--data /no/such/dir: needs --task gsm8k
--out taken: --out taken exists
--resume nowhere: no config.json
--resume nowhere --group-size 4: keeps the run's --group-size; it takes --steps, --lr,
--hyper eps=0.1: no hyperparameter 'eps'; accepted: eps_low=0.2
--hyper kl=true: could not convert string to float: 'true'
--method gpo: method 'gpo' does not exist; accepted: reinforce, grpo,
--method my.py: No such file or directory
--hyper kl_ratio=2: accepted: true, false
--method dfpo-min --hyper ratio=sum: accepted: geometric, product
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_line_before_anything_is_trained(line, tmp_path, monkeypatch):
    """argparse says the rest."""
    flags, _, what = line.partition(": ")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    monkeypatch.setattr(train, "warm_start", lambda *_: pytest.fail("training began"))
    assert what in refused(train.main, flags.split())
    assert os.listdir() == ["taken"]


OWN_MISTAKES = """
item.answer in text | float('nan')                             | 'so !' to '0?' is nan; accepted
item.answer in text | 1e39                                     | accepted: a finite number that
item.answer in text | "1"                                      | is '1'; accepted: a finite number
item.answer in text | None if text != item.demo else 0         | is None; accepted: a finite number
range(9)]           | range(9)]; self.test = []                | test split has no item
range(9)]           | range(9)]; self.train[7] = Item("1" * 1100, "", "") | the model's context
"so !"              | ""                                       | no item has a demonstration
def __init__(self): | def init(self):                          | train split has no item
"""


@pytest.mark.parametrize("line", OWN_MISTAKES.strip().splitlines())
def test_a_mistake_in_a_task_of_ones_own_is_one_line(line, tmp_path):
    """Its reward is tried before a run, and a sampled answer's when it comes."""
    old, new, said = (part.strip() for part in line.split("|"))
    (tmp_path / "mine.py").write_text(OWN_TASK.replace(old, new))
    assert said in refused(run, tmp_path / "run", "--task", tmp_path / "mine.py")


@pytest.mark.parametrize("line", ["r/lr: -1", "r/steps: 4.5", "r/method: 'gppo'", "r/prompts: 5"])
def test_an_edited_config_is_checked_like_flags(line, tmp_path):
    folder = run(tmp_path / "r")
    config = json.loads((folder / "config.json").read_text())
    name, _, value = line.removeprefix("r/").partition(": ")
    (folder / "config.json").write_text(json.dumps(config | {name: eval(value)}))
    with pytest.raises(SystemExit):
        train.main(["--resume", str(folder)])


def test_settings_follow_the_model_then_the_task_then_the_flags(tmp_path, qwen_path, capsys):
    def parsed(flags, *names):
        config = train.parse(f"--out x {flags}".split())
        return [getattr(config, name) for name in names]

    names = ("lr", "max_tokens", "minibatches", "warm_steps", "threads", "fast")
    toy, chat = [1e-3, 26, 4, 700, 1, False], [3e-6, 256, 1, 0, 0, True]
    assert parsed("", *names) == toy
    assert parsed("--model some/model", *names) == chat
    assert parsed("--task mine.py --model some/model", *names) == chat
    assert parsed("--task gsm8k", *names) == [1e-6, 512, *chat[2:]]
    assert parsed("--task sums", *names) == [1e-5, 24, *chat[2:]]
    assert parsed("--task sums --lr 1 --fast false", *names) == [1.0, 24, 1, 0, 0, False]
    assert parsed("--task sums --model scratch", *names) == [1e-3, 24, *toy[2:]]
    flags = ["--model", qwen_path, "--steps", 1, "--threads", 1]
    run(tmp_path / "high", *flags, "--lr", 2e-4)
    assert "--lr 0.0002 is high for a pretrained model" in capsys.readouterr().out
    run(tmp_path / "low", *flags)
    assert "is high" not in capsys.readouterr().out


def test_all_cores_are_those_that_the_process_may_use(tmp_path, monkeypatch):
    used = []
    monkeypatch.setattr(train.torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(train.torch, "set_num_threads", used.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    monkeypatch.setattr(train, "run", lambda config: None)
    for threads in ("0", "7"):
        train.main(["--threads", threads])
    assert used == [2, 7]


# ---------------- which models are taken


def test_a_policy_is_in_eval_mode_with_fp32_weights_and_every_eos_id(tmp_path, capsys):
    path = build("qwen2", tmp_path, torch.bfloat16)
    once = load(path, model=path)
    assert "has no chat template, so prompts are plain text" in capsys.readouterr().out
    train.write_model(once, tmp_path / "saved")
    for policy in (once, load(tmp_path / "saved")):
        assert {weight.dtype for weight in policy.model.parameters()} == {torch.float32}
        assert policy.eos.tolist() == [1, 2, 3]  # of the tokenizer, and of the generation config
        assert not policy.model.training


def test_a_prompt_is_a_users_message_where_there_is_a_chat_template(tmp_path, capsys):
    """And a template that refuses such a chat is one line."""
    path, task = build("qwen2", tmp_path), Arithmetic()
    tokenizer = task.make_tokenizer()
    template = "{% for m in messages %}#{{ m.content }}{% endfor %}"
    tokenizer.chat_template = template + "{% if add_generation_prompt %}so{% endif %}"
    tokenizer.save_pretrained(path)
    policy = load(path, model=path)
    assert "user's message in the model's chat template" in capsys.readouterr().out
    items = task.test[:2]
    expected = [tokenizer(f"#{item.prompt}so")["input_ids"] for item in items]
    assert task.encode(policy.tokenizer, items) == expected
    tokenizer.chat_template = "{{ raise_exception('system first') }}"
    tokenizer.save_pretrained(path)
    assert "refuses a user's message: system first" in refused(load, path)


def test_an_answer_ends_where_the_chat_template_closes_a_turn(tmp_path):
    """Also that of a base model, whose EOS is another. Text is no such token."""
    tokenizer = Arithmetic().make_tokenizer()
    assert loading.turn_end(tokenizer) == set()
    for template in ("{{ m.content }}#", "<eos>{{ m.content.upper() }}", "{{ raise }}{{ 1 / 0 }}"):
        tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
        assert loading.turn_end(tokenizer) == set()
    tokenizer.add_tokens(["<end>"], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<end><eos>{% endfor %}"
    assert loading.turn_end(tokenizer) == {len(tokenizer) - 1}
    path = build("qwen2", tmp_path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(path)
    assert load(path).eos.tolist() == [1, 2, 3, len(tokenizer) - 1]


def test_a_prompt_has_what_the_tokenizer_puts_before_a_text_and_nothing_behind():
    sums, words = Arithmetic(), GSM8K.__new__(GSM8K)
    tokenizer, item = sums.make_tokenizer(), Item("1+1", "2", "")
    prompts = [(sums, "1+1"), (words, "Question: 1+1\nAnswer:\n")]
    bare = [tokenizer(text)["input_ids"] for _, text in prompts]
    parts = dict(single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)])
    tokenizer._tokenizer.post_processor = TemplateProcessing(**parts)
    for (task, _), ids in zip(prompts, bare, strict=True):
        assert task.encode(tokenizer, [item]) == [[0, *ids]]


def test_a_model_that_a_number_would_be_wrong_for_is_refused(tmp_path, scratch):
    """One whose output layer would be random; and for token scores one that adds a bias in it."""
    path = build("llama", tmp_path)
    AutoModel.from_pretrained(path).save_pretrained(path)  # without its output layer
    assert "missing_keys lm_head" in refused(load, path)
    for name, what in (("model.safetensors", "header"), ("adapter_config.json", "an adapter")):
        (Path(path) / name).write_text("version https://git-lfs.github.com/spec/v1")
        assert what in refused(load, path)
    policy = copy.deepcopy(scratch)
    policy.model.lm_head.bias = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="bias"):
        add_scores(None, policy, None, train.Config())


def test_a_chat_task_is_prompts_and_a_reward(tmp_path, small_gsm8k):
    """So is llm/five_words.py; and GSM8K trains from local files, whatever sampler a model has."""
    letters, path = BaseTask(), build("qwen2", tmp_path, vocab_size=128)
    letters.train, letters.test = [Item(string.printable, "", "")], []
    letters.make_tokenizer().save_pretrained(path)
    flags = f"--model {path} --threads 1 --max-tokens 20 --steps 1 --warm-steps 0".split()
    folder = run(tmp_path / "five", *flags, "--task", "llm/five_words.py")
    assert len(metrics(folder)) == 2
    task = train.load_task(train.parse(["--task", "llm/five_words.py"]))
    said = {"A cat is an animal.": 1, "A cat is an animal that purrs.": 1 / 3, "": 1 / 6}
    assert {text: task.reward(text, task.train[0]) for text in said} == said
    assert not {x.prompt for x in task.train} & {x.prompt for x in task.test}
    triple, twice = [("one", "two", "three"), "four"], [("one", "1"), ("one", "2"), "two"]
    pairs, nested = {"one": "1", "two": "2"}, [("one", ["1"]), "two"]
    for wrong in ("one", ["one", "one"], [1, 2], triple, twice, pairs, nested):
        with pytest.raises(ValueError, match="two or more different texts"):
            type("Task", (ChatTask,), {"prompts": wrong})()
    toy = ["--task", "llm/five_words.py", "--out", str(tmp_path / "toy")]
    assert "no item has a demonstration" in refused(train.main, toy)  # it needs --model
    assert not (tmp_path / "toy").exists()
    gsm8k = f"--task gsm8k --data {small_gsm8k} --method ibpo".split()
    assert len(metrics(run(tmp_path / "gsm8k", *flags, *gsm8k))) == 2
