"""To whoever runs train.py: what a run leaves, that a kill loses nothing, which models are taken.

LONG=1 adds the default run.
"""

import copy
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
import torch
from conftest import TINY, build, load, metrics, refused, run, timeless, weights_of
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel

import train
from llm import loading, runs
from llm.gsm8k import GSM8K, Item
from llm.neighbours import add_scores
from toy import plain
from toy.arithmetic import Arithmetic

pytestmark = pytest.mark.usefixtures("easy")


# ---------------- what a run does and leaves


def test_a_run_leaves_what_it_promises(tmp_path):
    """Lines, both models, and a batch with its log-probs before and after the step."""
    folder = run(tmp_path / "run", "--steps", 1, "--epochs", 2)
    flags = runs.read_config(folder)
    assert flags.pop("resumed") == []
    config, task = train.Config(**flags), Arithmetic()
    start, after = load(folder / "start"), load(folder / "model")
    first, last = metrics(folder)
    assert first == {"step": 0} | timeless(train.evaluate(start, task, config))
    assert last == last | {"step": 1} | timeless(train.evaluate(after, task, config))

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


def test_a_credit_rule_and_a_reference_act_where_they_should(tmp_path, monkeypatch):
    """A rule between assessing and learning; what it logs counts. A KL term's reference is the
    policy after the warm start."""
    calls, references = [], []
    monkeypatch.setattr(train, "reshape_credit", lambda *_: {"generated": 7})
    for name in ("assess", "reshape_credit", "learn"):
        real = getattr(train, name)
        monkeypatch.setattr(
            train, name, lambda *a, f=real, n=name: calls.append((n, a[1])) or f(*a)
        )
    folder = run(tmp_path / "rule", "--method", "advantage-reweighting", "--steps", 2)
    assert [name for name, _ in calls] == ["assess", "reshape_credit", "learn"] * 2
    assert [line.get("generated") for line in metrics(folder)] == [None, 7, 7]
    calls.clear()
    folder = run(tmp_path / "kl", "--hyper", "kl=0.1")
    references = [weights_of(given) for name, given in calls if name == "assess"]
    start, end = (weights_of(load(folder / name)) for name in ("start", "model"))
    assert not torch.equal(start, end) and all(x.equal(start) for x in references)


OWN_TASK = """
from toy.arithmetic import BaseTask, Item

class Task(BaseTask):
    settings = dict(warm_steps=150, max_tokens=9)
    def __init__(self):
        self.train = self.test = [Item(f"{n}?", "!", "so !") for n in range(9)]
    def reward(self, text, item):
        return item.answer in text
"""


def test_a_task_of_ones_own_is_a_file_with_its_settings(tmp_path, capsys):
    """Flags beat these. --resume finds the task again, and says that it has changed."""
    mine = tmp_path / "mine.py"
    mine.write_text(OWN_TASK)
    folder, flags = tmp_path / "run", f"--task {mine} --warm-lr 0.01 --max-tokens 8 --steps 3"
    small = "--warm-rows 8 --prompts 4 --group-size 3 --width 16 --minibatches 2 --eval-items 6"
    train.main([*flags.split(), *small.split(), "--out", str(folder)])
    config = runs.read_config(folder)
    assert config["warm_steps"] == 150 and config["max_tokens"] == 8
    mine.write_text(OWN_TASK.replace("item.answer in text", "no_such_name"))
    with pytest.raises(NameError) as stopped:  # her own line, and the task's copy is the old one
        train.main(["--resume", str(folder), "--steps", "4"])
    assert stopped.traceback[-1].path == mine
    assert f"{mine} has changed since this run began" in capsys.readouterr().out
    assert (folder / "task.py").read_text() == OWN_TASK and metrics(folder)[-1]["sampled"] > 0.5


def test_another_process_has_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.undo()  # the toy's own reward, as in the other process
    command = [sys.executable, train.__file__, *TINY, "--out", "run"]
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
    said = capsys.readouterr().out
    assert "greedy changed by +0.000" in said and said.endswith(
        f"best at step 3: {whole}/model-best\n"
    )
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
            reward, _, said = answer.strip("[").partition("] ")
            assert float(reward) == said.count("1") % 2


def test_no_two_runs_write_into_one_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs.time, "strftime", lambda _: "NOW")
    for _ in range(2):
        train.main([*TINY, "--steps", "1", "--warm-steps", "0"])
    name = "arithmetic-grpo-s0-NOW"
    assert sorted(os.listdir("runs")) == [name, f"{name}-{os.getpid()}"]
    assert [len(metrics(folder)) for folder in Path("runs").iterdir()] == [2, 2]
    with runs.own_folder(train.Config(out=f"runs/{name}", resume="x")):
        with pytest.raises(filelock.Timeout):
            train.main(["--resume", f"runs/{name}", "--steps", "2"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        train.main(TINY)
    assert "a launcher has started several" in capsys.readouterr().err


def test_a_console_that_lacks_a_letter_ends_no_run(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN_TASK.replace("?", "？"), "utf-8")
    console = io.TextIOWrapper(io.BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", console)
    run(tmp_path / "run", "--task", tmp_path / "mine.py")
    console.flush()
    assert rb"\uff1f" in console.buffer.getvalue()


def test_a_reward_that_is_no_finite_number_ends_the_run(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_TASK.replace("item.answer in text", "1e39"))
    assert "is inf, not a finite number" in refused(
        run, tmp_path / "r", "--task", tmp_path / "mine.py"
    )


def test_a_tracker_has_one_run_of_a_folder(tmp_path, monkeypatch):
    """A run that is resumed is the same one. The tracker gets no `step` among the numbers."""
    opened, logged = [], []

    def init(**options):
        opened.append((options["name"], options["id"], options["resume"]))

    wandb = SimpleNamespace(init=init, log=lambda numbers, step: logged.append(numbers))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = run(tmp_path / "run", "--track", "wandb")
    train.main(["--resume", str(folder), "--steps", "5"])
    (name, id_, resume), again = opened
    assert name == id_ and resume == "allow" and again == opened[0]
    assert len(logged) == 6 and all("lr" in x or "greedy" in x for x in logged)
    assert not any("step" in x or "examples" in x for x in logged)


# ---------------- resuming


def test_a_run_that_has_ended_resumes_with_more_steps_and_another_rate(tmp_path, capsys):
    """Its first steps stay. The linear schedule is that of a run with the new steps. What changed
    is in config.json; what would be another experiment is refused."""
    folder = run(tmp_path / "run")
    before = metrics(folder)
    for flag, other in {"method": "gspo", "seed": 1, "eval-items": 5, "width": 8}.items():
        with pytest.raises(SystemExit):
            train.main(["--resume", str(folder), f"--{flag}", str(other)])
        assert f"keeps the run's {flag.replace('-', '_')}; it takes" in capsys.readouterr().err
    train.main(["--resume", str(folder), "--steps", "6", "--lr", "0.002", "--eval-every", "5"])
    lines = metrics(folder)
    assert lines[:5] == before and ["greedy" in line for line in lines[4:]] == [True] * 3
    assert [line["lr"] for line in lines[4:]] == pytest.approx([0.001 / 4, 0.002 / 3, 0.002 / 6])
    changed = {"steps": [4, 6], "lr": [0.001, 0.002], "eval_every": [2, 5]}
    assert runs.read_config(folder)["resumed"] == [{"after_step": 4} | changed]
    assert train.learning_rate(60, train.Config()) == pytest.approx(0.001 / 60)  # no floor


class Killed(BaseException):
    """What no `except Exception` sees, as it would not see a kill."""


MOMENTS = [  # a call of a function of runs.py, and how many of six steps are left
    ("first_group", 1, 6),  # a line of metrics and no checkpoint: the run begins anew
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
        folder, real, calls = tmp_path / name, getattr(runs, name), []

        def die(*args, real=real, calls=calls, call=call):
            calls.append(1)
            if len(calls) == call:
                raise Killed
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(runs, name, die)
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


def test_files_are_replaced_as_a_whole_and_by_finite_weights_only(tmp_path, monkeypatch):
    """A full disk, or a kill, leaves the last checkpoint and model."""
    folder, real = run(tmp_path / "run", "--steps", 2), torch.save
    checkpoint, start = folder / "checkpoint.pt", folder / "start"
    before = checkpoint.read_bytes(), models_of(start), sorted(os.listdir(start))

    def fail(state, part):
        if "optimizer" in state:
            Path(part).write_text("half")
            raise RuntimeError("No space left on device")
        real(state, part)

    more = "--resume", str(folder), "--steps", "4"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(RuntimeError, match="No space"):
            train.main(more)
        patch.setattr(runs, "first_group", lambda *_: "")
        policy, config = load(start), train.Config(out=str(folder))
        next(policy.model.parameters()).data[0, 0] = torch.inf
        line = {"step": 3, "greedy": 1.0}
        assert "step 3: a weight" in refused(runs.save, policy, None, True, line, config)
        policy.tokenizer = None
        with pytest.raises(AttributeError):
            runs.write_model(policy, start)
    assert (checkpoint.read_bytes(), models_of(start), sorted(os.listdir(start))) == before
    train.main(more)
    assert len(metrics(folder)) == 5


# ---------------- flags

MISTAKES = """
--group-size 1: --group-size must be at least 2
--grad-clip -1: --grad-clip must be above 0
--lr nan: --lr must be above 0
--prompts 30 --minibatches 4: must divide
--model /no/such/model: /no/such/model
--task chess: no such file
--task gsm8k --model scratch --data /no/such/dir: train.jsonl
--out taken: taken
--hyper eps=0.1: no hyperparameter 'eps'; accepted: eps_low=0.2
--hyper kl_ratio=2: accepted: true, false
--method gpo: method 'gpo' does not exist; accepted: reinforce, grpo,
--method my.py: my.py
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_found_before_anything_is_trained(line, tmp_path, monkeypatch, capsys):
    flags, _, what = line.partition(": ")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    with pytest.raises((SystemExit, OSError, ValueError)) as stopped:
        train.main(flags.split())
    assert what in f"{stopped.value} {capsys.readouterr().err}"
    assert os.listdir() == ["taken"] and not os.listdir("taken")


def test_settings_follow_the_model_then_the_task_then_the_flags():
    def parsed(flags, *names):
        config, _ = train.parse(flags.split())
        return [getattr(config, name) for name in names]

    names = ("lr", "max_tokens", "minibatches", "warm_steps", "threads", "fast")
    toy, chat = [1e-3, 26, 4, 700, 1, False], [3e-6, 256, 1, 0, 0, True]
    assert parsed("", *names) == toy
    assert parsed("--model some/model", *names) == chat
    assert parsed("--task gsm8k", *names) == [1e-6, 512, *chat[2:]]
    assert parsed("--task sums", *names) == [1e-5, 24, *chat[2:]]
    assert parsed("--task sums --lr 1 --fast false", *names) == [1.0, 24, 1, 0, 0, False]
    assert parsed("--task llm/five_words.py --model m", *names) == [1e-5, 24, *chat[2:]]


def test_a_high_rate_of_a_pretrained_model_and_many_gigabytes_are_said(monkeypatch, capsys):
    size = torch.empty(200_000_000, device="meta")
    model = SimpleNamespace(parameters=lambda: iter([size]))
    tokenizer = SimpleNamespace(decode=lambda ids: f"read {ids}")
    policy = SimpleNamespace(model=model, bf16=True, tokenizer=tokenizer)
    for config in (
        train.Config(model="m", lr=2e-4, warm_steps=0),
        train.Config(model="m", lr=1e-5),
    ):
        runs.announce(policy, torch.tensor([-1, 5, 0]), config)
    high, low = capsys.readouterr().out.split("grpo on ")[1:]
    assert "in bf16 on meta" in high and "2 tokens: 'read [5, 0]'" in high
    assert "--lr 0.0002 is high for a pretrained model" in high and "is high" not in low
    # Two checkpoints of 2.4 GB while one replaces the other, the best model and perhaps the start.
    assert "needs 5.6 GB of disk, and 4.0 GB at" in high and "needs 6.4 GB" in low


def test_all_cores_are_those_that_the_process_may_use(monkeypatch):
    used = []
    monkeypatch.setattr(train.torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(train.torch, "set_num_threads", used.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    monkeypatch.setattr(train, "load_policy", lambda *_: 1 / 0)
    for threads in ("0", "7"):
        with pytest.raises(ZeroDivisionError):
            train.main(["--threads", threads])
    assert used == [2, 7]


# ---------------- which models are taken


def test_a_policy_is_in_eval_mode_with_fp32_weights_and_every_eos_id(tmp_path):
    path = build("qwen2", tmp_path, torch.bfloat16)
    once = load(path)
    runs.write_model(once, tmp_path / "saved")
    for policy in (once, load(tmp_path / "saved")):
        assert {weight.dtype for weight in policy.model.parameters()} == {torch.float32}
        assert policy.eos.tolist() == [1, 2, 3]  # of the tokenizer, and of the generation config
        assert not policy.model.training


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
    policy = copy.deepcopy(scratch)
    policy.model.lm_head.bias = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="bias"):
        add_scores(None, policy, None, train.Config())
