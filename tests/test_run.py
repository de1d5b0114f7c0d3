"""To whoever runs train.py: what a run leaves, that a kill loses nothing, a mistake is one line.

LONG=1 adds the default run.
"""

import copy
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import TINY, build, load, metrics, refused, run, weights_of
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel

import train
from llm import loading
from llm.gsm8k import GSM8K, Item
from llm.neighbours import add_scores
from toy import plain
from toy.arithmetic import Arithmetic

pytestmark = pytest.mark.usefixtures("easy")


# ---------------- what a run does and leaves


def test_a_run_leaves_what_it_promises(tmp_path, capsys):
    """Lines, both models, and a batch with its log-probs before and after the step."""
    flags = "--steps 1 --temperature 0.7 --epochs 2"
    folder = run(tmp_path / "run", *flags.split())
    config, task = train.Config(**json.loads((folder / "config.json").read_text())), Arithmetic()
    start, after = load(folder / "start"), load(folder / "model")
    first, last = metrics(folder)
    assert first == {"step": 0} | train.evaluate(start, task, config)
    assert last == last | {"step": 1} | train.evaluate(after, task, config)
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
            logp = plain.log_probs(policy, prompt, answer, 0.7).detach()
            torch.testing.assert_close(saved[name][i][seen], logp, rtol=1e-4, atol=1e-5)


def test_a_credit_rule_acts_between_scoring_and_learning(tmp_path, monkeypatch):
    calls = []
    for name in ("assess", "reshape_credit", "learn"):
        real = getattr(train, name)
        monkeypatch.setattr(train, name, lambda *a, f=real, n=name: calls.append(n) or f(*a))
    run(tmp_path / "run", "--method", "advantage-reweighting", "--steps", 2)
    assert calls == ["assess", "reshape_credit", "learn"] * 2


def test_a_kl_term_compares_with_the_start_policy(tmp_path, monkeypatch):
    references, real = [], train.assess
    monkeypatch.setattr(train, "assess", lambda *args: references.append(args[1]) or real(*args))
    folder = run(tmp_path / "run", "--hyper", "kl=0.1")
    start, end = (weights_of(load(folder / name)) for name in ("start", "model"))
    assert not torch.equal(start, end)
    for reference in references:
        assert torch.equal(weights_of(reference), start)


@pytest.mark.parametrize("options", ["--model scratch --hyper kl=0.1", "--method ibpo"])
def test_gsm8k_trains_from_local_files(tmp_path, small_gsm8k, qwen_path, options):
    """A model from scratch, and one whose generation config holds a sampler."""
    flags = f"--model {qwen_path} --task gsm8k --data {small_gsm8k} --threads 1 --max-tokens 20"
    assert len(metrics(run(tmp_path / "run", *flags.split(), *options.split()))) == 5


OWN_TASK = """
from toy.arithmetic import BaseTask, Item

class Task(BaseTask):
    def __init__(self):
        self.train = self.test = [Item(f"{n}?", "!", "so !") for n in range(9)]
    def reward(self, text, item):
        return item.answer in text
"""


def test_a_task_of_ones_own_is_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_TASK)
    flags = "--warm-steps 150 --warm-lr 0.01 --max-tokens 8 --steps 3 --task".split()
    folder = run(tmp_path / "run", *flags, tmp_path / "mine.py")
    assert metrics(folder)[-1]["sampled"] > 0.5


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


def test_runs_that_start_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.time, "strftime", lambda _: "NOW")
    for seed in ("3", "3"):
        train.main([*TINY, "--steps", "1", "--warm-steps", "0", "--seed", seed])
    assert sorted(os.listdir("runs")) == ["arithmetic-grpo-s3-NOW", "arithmetic-grpo-s3-NOW-2"]
    assert [len(metrics(folder)) for folder in Path("runs").iterdir()] == [2, 2]
    assert "--resume" in refused(train.main, ["--resume", ""])
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


OWN_MISTAKES = """
item.answer in text | float('nan')                             | 'so !' to '0?' is nan; accepted
item.answer in text | 1e39                                     | accepted: a finite number that
item.answer in text | None if text != item.demo else 0         | is None; accepted: a finite number
range(9)]           | range(9)]; self.test = []                | test split has no item
range(9)]           | range(9)]; self.train[7] = Item("1" * 1100, "", "") | the model's context
"""


@pytest.mark.parametrize("line", OWN_MISTAKES.strip().splitlines())
def test_a_mistake_in_a_task_of_ones_own_is_one_line(tmp_path, line):
    """Its reward is tried before a run, and a sampled answer's when it comes."""
    old, new, said = (part.strip() for part in line.split("|"))
    (tmp_path / "mine.py").write_text(OWN_TASK.replace(old, new))
    assert said in refused(run, tmp_path / "run", "--task", tmp_path / "mine.py")
    assert (tmp_path / "run").exists() == ("demo" in new)


def test_the_last_lines_say_what_went_wrong(tmp_path, capsys):
    first = {"step": 0, "greedy": 0.5, "greedy_se": 0.03, "sampled": 0.5}
    bad = {"step": 9, "greedy": 0.4, "greedy_se": 0.03, "sampled": 0.6, "truncated": 0.3}
    fine = bad | {"greedy": 0.42, "truncated": 0.2}  # within two standard errors, of .042
    for last, wrong in ((bad, True), (fine, False)):
        (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last)}")
        train.summarize(tmp_path)
        said = capsys.readouterr().out
        assert f"greedy 0.500 -> {last['greedy']:.3f}, sampled 0.500 -> 0.600" in said
        assert ("below its start" in said) == ("30% of the last answers" in said) == wrong


# ---------------- going on


def test_a_run_that_has_ended_goes_on_with_more_steps_and_another_rate(tmp_path, capsys):
    """Its first steps stay. The linear schedule is that of a run with the new steps."""
    folder = run(tmp_path / "run")
    before, more = metrics(folder), ["--resume", str(folder), "--steps"]
    train.main([*more, "6", "--lr", "0.002", "--eval-every", "5"])
    assert "after step 4 of 6, at a learning rate of 0.00067" in capsys.readouterr().out
    lines = metrics(folder)
    assert lines[:5] == before and ["greedy" in line for line in lines[4:]] == [True] * 3
    assert [line["lr"] for line in lines[4:]] == pytest.approx([0.001 / 4, 0.002 / 3, 0.002 / 6])
    assert "already made 6" in refused(train.main, [*more, "5"])
    config = json.loads((folder / "config.json").read_text())
    assert config == asdict(train.parse([*TINY, "--lr", "0.002"])) | {
        "out": str(folder),
        "steps": 6,
        "eval_every": 5,
    }


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


# ---------------- kills


def weights(folder: Path) -> list[bytes]:
    return [x.read_bytes() for x in sorted(folder.glob("**/*.safetensors"))]


def run_and_kill(folder: Path, flags: list, module, name: str, n: int):
    """In a forked process, which is killed when it calls a function for the n-th time."""
    real, calls = getattr(module, name), itertools.count(1)

    def die(*args, **options):
        if next(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    child = os.fork()
    if not child:
        try:
            setattr(module, name, die)
            run(folder, *flags)
        finally:
            os._exit(4)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


MOMENTS = [  # a call of a function, and how many of six steps are left
    (train, "save", 1, 6),  # two lines of metrics and no checkpoint: it begins anew
    (os, "replace", 5, 5),  # a checkpoint that has not got its name
    (train, "keep_best", 2, 4),  # a checkpoint of the best policy, which is not in model-best/ yet
]


def test_a_killed_run_goes_on_with_what_is_left(tmp_path, monkeypatch):
    """And ends as the undisturbed run, bit for bit."""
    asked, real = [], train.sample
    monkeypatch.setattr(train, "sample", lambda *args: asked.append(args[2:4]) or real(*args))
    flags = "--steps 6 --eval-every 1 --eval-items 2 --seed 7".split()
    whole = run(tmp_path / "whole", *flags)
    every = asked.copy()
    assert every[0][0] != every[1][0]  # their prompts
    for *moment, left in MOMENTS:
        folder = tmp_path / f"{moment[1]}{left}"
        run_and_kill(folder, flags, *moment)
        if (folder / "metrics.jsonl").exists():  # the write of a line may be cut off, too
            (folder / "metrics.jsonl").open("a").write('{"step": 9, "torn')
        asked.clear()
        train.main(["--resume", str(folder)])
        assert asked == every[6 - left :], moment
        assert metrics(folder) == metrics(whole) and weights(folder) == weights(whole)
        assert (folder / "samples.txt").read_text() == (whole / "samples.txt").read_text()
    assert len(weights(whole)) == 3  # start, model-best, model


def test_weights_that_are_not_finite_spoil_no_checkpoint(tmp_path):
    folder = run(tmp_path / "run", "--steps", 1)
    policy, config = load("scratch", layers=1, width=16), train.Config(out=str(folder))
    optimizer, best = train.adamw(policy.model, 0.1), weights(folder)
    next(policy.model.parameters()).data[0, 0] = torch.inf
    assert "step 2" in refused(train.save, policy, optimizer, None, 2, config)
    assert train.restore(policy, optimizer, config) == 1 and weights(folder) == best


# ---------------- flags and mistakes

MISTAKES = """
--task chess: no such file
--warm-lr nan: --warm-lr nan
--group-size 1: --group-size must be at least 2
--prompts 30 --minibatches 4: not divisible
--model /no/such/model: --model /no/such/model
--task sums --model no/such/SmolLM2-135M-Instruct: make real builds the directory models/SmolLM2
--task gsm8k --data /no/such/dir: train.jsonl
--data /no/such/dir: needs --task gsm8k
--out taken: --out taken exists
--resume nowhere: no config.json
--resume nowhere --lr 1: no config.json
--resume nowhere --group-size 4: keeps the run's --group-size; it takes --steps, --lr,
--hyper eps=0.1: no hyperparameter 'eps'; accepted: eps_low=0.2
--hyper eps_low=-1: not a number of at least 0
--hyper eps_low=x: could not convert
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_line_before_anything_is_trained(line, tmp_path, monkeypatch):
    """argparse says the rest, such as an unknown method."""
    flags, _, what = line.partition(": ")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    monkeypatch.setattr(train, "warm_start", lambda *_: pytest.fail("training began"))
    assert what in refused(train.main, flags.split())
    assert os.listdir() == ["taken"]


# What READMEs say of the toy, of GSM8K and of sums hangs on these.
DEFAULTS = """
layers 1, width 64, warm_steps 700, warm_rows 64, warm_lr 0.006, steps 60, prompts 32, group_size 8,
max_tokens 26, temperature 1.0, repair_references 1, epochs 1, minibatches 4, micro_rows 64,
lr 0.001, grad_clip 1.0, eval_every 20, eval_items 200, eval_samples 4, seed 0, threads 1,
task arithmetic, method grpo, model scratch, schedule linear, prefix_baseline False,
fast False, hyper , scale , data , track , out x, resume None
"""
PRESET = """
task gsm8k, model Qwen/Qwen2.5-0.5B-Instruct, warm_steps 0, steps 200, prompts 16, max_tokens 512,
minibatches 1, micro_rows 4, lr 1e-06, eval_samples 1, threads 0, fast True
"""
SUMS = """
task sums, model HuggingFaceTB/SmolLM2-135M-Instruct, warm_steps 0, steps 30, prompts 8,
max_tokens 24, minibatches 1, micro_rows 16, lr 1e-05, schedule constant, eval_every 10,
eval_items 100, eval_samples 2, threads 0, fast True
"""


# Any other model than scratch, whatever the task.
PRETRAINED = """
model some/model, warm_steps 0, prompts 8, max_tokens 256, minibatches 1, lr 3e-06, eval_items 100,
eval_samples 1, micro_rows 8, threads 0, fast True
"""


def test_a_flag_beats_the_preset_and_the_preset_the_defaults():
    def read(text):
        return dict(line.strip().partition(" ")[::2] for line in text.split(","))

    def parsed(flags):
        return {k: str(x) for k, x in asdict(train.parse(f"--out x {flags}".split())).items()}

    assert parsed("") == read(DEFAULTS)
    assert parsed("--model some/model") == read(DEFAULTS) | read(PRETRAINED)
    assert parsed("--task gsm8k") == read(DEFAULTS) | read(PRESET)
    assert parsed("--task sums") == read(DEFAULTS) | read(SUMS)
    given = read("lr 1.0, fast False, micro_rows 3, prefix_baseline True")
    flags = "--lr 1 --fast false --micro-rows 3 --prefix-baseline --task gsm8k"
    assert parsed(flags) == read(DEFAULTS) | read(PRESET) | given


# ---------------- which models are taken


def test_a_policy_is_in_eval_mode_with_fp32_weights_and_every_eos_id(tmp_path, capsys):
    path = build("qwen2", tmp_path, torch.bfloat16)
    once = load(path, model=path)
    assert (
        capsys.readouterr().out
        == f"--model {path} has no chat template, so prompts are plain text\n"
    )
    train.write_model(once, tmp_path / "saved")
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
    for name, what in (("model.safetensors", "header"), ("adapter_config.json", "an adapter")):
        (Path(path) / name).write_text("version https://git-lfs.github.com/spec/v1")
        assert what in refused(load, path)
    policy = copy.deepcopy(scratch)
    policy.model.lm_head.bias = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="bias"):
        add_scores(None, policy, None, train.Config())
