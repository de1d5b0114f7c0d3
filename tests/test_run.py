"""To whoever runs train.py: what a run leaves, that a kill loses nothing, which models are taken.

LONG=1 adds the default run.
"""

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
import torch
from conftest import TINY, TOY, build, load, metrics, run, timeless, weights_of
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel

import train
from llm import runs
from llm.neighbours import add_scores
from tasks.gsm8k import GSM8K, Item
from toy import plain

# ---------------- what a run does and leaves

OWN_TASK = """
from tasks.task import BaseTask, Item

class Task(BaseTask):
    def __init__(self):
        items = [Item(f"{n}?", "!", "so !") for n in range(5, 30)]
        self.train, self.test = items[9:], items[:9]

    def reward(self, text, item):
        return sum(map(text.count, "so!?13579")) % 2 * 1.0

print("a letter that a console may lack: ×")
"""
FLAGS = [*TINY, "--seed", "6", "--eval-every", "1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing disturbed, in a process of its own, on an old console. What
    it said is beside it, and so is its task."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "mine.py").write_text(OWN_TASK)
    command = [sys.executable, train.__file__, *FLAGS, "--task", "mine.py", "--out", "run"]
    with (folder / "said").open("w") as said:
        env = os.environ | {"PYTHONIOENCODING": "ascii"}
        subprocess.run(command, cwd=folder, stdout=said, env=env, check=True)
    return folder / "run"


def test_a_run_leaves_what_it_promises(whole):
    """A line for each step; the policy at its start, at its best and at its end; of every step a
    group of answers to read, and all answers with their log-probs before and after the step."""
    flags = runs.read_config(whole)
    assert flags.pop("resumed") == []
    config = train.Config(**flags)
    task, lines = train.find_task(config.task)(), metrics(whole)
    assert [line["step"] for line in lines] == [*range(5)]
    # The third evaluation is the best one: the second has the same greedy reward, and less of
    # sampled answers, and of the fourth only sampled answers have more.
    scores = [(line["greedy"], line["sampled"]) for line in lines]
    assert max(scores) == scores[3] and scores[2][0] == scores[3][0] and scores[4][1] > scores[3][1]
    said = (whole.parent / "said").read_text()
    assert f"greedy {lines[0]['greedy']:.3f} -> {lines[4]['greedy']:.3f}" in said
    assert "best at step 3: " in said and (whole / "task.py").read_text() == OWN_TASK

    batches, samples = train.prompt_batches(task, config), (whole / "samples.txt").read_text()
    kept = (1, "start", "logp_old"), (3, "model-best", "logp"), (4, "model", "logp")
    for step, name, key in kept:
        policy = train.load_policy(config, task, str(whole / name))
        line = lines[0 if name == "start" else step]
        assert line == line | timeless(train.evaluate(policy, task, config))
        saved = torch.load(whole / f"batches/step-{step:06}.pt", weights_only=True)
        items = batches[step - 1]
        assert saved["prompts"] == [item.prompt for item in items]
        prompts = [row for row in task.encode(policy.tokenizer, items) for _ in range(3)]
        shown = [f"=== step {step}: {items[0].prompt} (!)"]
        for i, (prompt, seen) in enumerate(zip(prompts, saved["mask"], strict=True)):
            answer = saved["tokens"][i][seen].tolist()
            text = "".join(saved["pieces"][i][: len(answer)]).removesuffix("<eos>")
            shown.append(f"[{saved['rewards'][i]:g}] {text}")
            assert saved["rewards"][i] == task.reward(text, None)
            logp = plain.log_probs(policy, prompt, answer).detach()
            torch.testing.assert_close(saved[key][i][seen], logp, rtol=1e-4, atol=1e-5)
        assert "\n".join(shown[:4]) in samples


def test_a_credit_rule_and_a_reference_act_where_they_should(tmp_path, monkeypatch, easy):
    """A rule between assessing and learning; what it logs counts. A KL term's reference is the
    policy after the warm start, whose optimiser is not that of RL."""
    calls, references, moments = [], [], []
    for name in ("assess", "reshape_credit", "learn"):
        real = getattr(train, name)

        def spy(policy, given, *more, name=name, real=real):
            calls.append(name)
            if name == "assess":
                references.append(weights_of(given))
            if name == "learn":
                moments.append(len(given.state))
            return {"generated": 7} if name == "reshape_credit" else real(policy, given, *more)

        monkeypatch.setattr(train, name, spy)
    folder = run(tmp_path / "run", "--method", "ibpo", "--hyper", "kl=0.1", "--steps", 2)
    assert calls == ["assess", "reshape_credit", "learn"] * 2
    assert [line.get("generated") for line in metrics(folder)] == [None, 7, 7]
    start, end = (weights_of(load(folder / name)) for name in ("start", "model"))
    assert not torch.equal(start, end) and all(x.equal(start) for x in references)
    assert moments[0] == 0 < moments[1]


@pytest.mark.skipif(not os.environ.get("LONG"), reason="minutes: LONG=1")
def test_the_default_run_learns_to_add(tmp_path):
    train.main(["--out", str(tmp_path / "run")])
    lines = metrics(tmp_path / "run")
    assert lines[0]["greedy"] < 0.3 and lines[-1]["greedy"] > 0.95


def test_no_two_runs_write_into_one_folder(tmp_path):
    config = train.Config(out=str(tmp_path))
    with pytest.raises(FileExistsError), runs.own_folder(config):
        pass
    config.resume = config.out
    with runs.own_folder(config), pytest.raises(filelock.Timeout):
        filelock.FileLock(tmp_path / ".lock", timeout=0).acquire()  # as another process would


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path, monkeypatch, scratch):
    monkeypatch.setattr(runs, "first_group", lambda *_: "")
    policy, config = copy.deepcopy(scratch), train.Config(out=str(tmp_path))
    next(policy.model.parameters()).data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="a weight is not finite"):
        runs.save(policy, None, True, {"step": 3, "greedy": 1.0}, config)


# ---------------- resuming


def test_a_run_that_has_ended_resumes_with_more_steps_and_another_rate(
    whole, tmp_path, monkeypatch
):
    """Its first steps stay. The linear schedule is that of a run with the new steps. What changed
    is in config.json; what would be another experiment is refused. A tracker knows the run
    again."""
    opened, logged = [], []
    wandb = SimpleNamespace(log=lambda numbers, step: logged.append(numbers["lr"]))
    wandb.init = lambda **options: opened.append((options["name"], options["id"]))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder, before = shutil.copytree(whole, tmp_path / "run"), metrics(whole)
    resume = ["--resume", str(folder)]
    for flag in ("--method gspo", "--seed 1", "--eval-items 5", "--width 8"):
        with pytest.raises(SystemExit):
            train.main([*resume, *flag.split()])
    train.main([*resume, *"--steps 6 --lr 0.002 --eval-every 5 --track wandb".split()])
    lines = metrics(folder)
    assert lines[:5] == before and ["greedy" in line for line in lines[5:]] == [True, True]
    assert logged == [line["lr"] for line in lines[5:]]
    assert [line["lr"] for line in lines[4:]] == pytest.approx([0.001 / 4, 0.002 / 3, 0.002 / 6])
    changed = {"steps": [4, 6], "lr": [0.001, 0.002], "eval_every": [1, 5], "track": ["", "wandb"]}
    train.main([*resume, "--fast", "true"])
    resumed = [{"after_step": 4} | changed, {"after_step": 6, "fast": [False, True]}]
    assert runs.read_config(folder)["resumed"] == resumed
    assert opened[0] == opened[1]


class Killed(BaseException):
    """What no `except Exception` sees, as it would not see a kill."""


MOMENTS = [  # a call of a function, and --offload before and after the kill
    (runs, "first_group", 1, "false", "false"),  # a line and no checkpoint: the run begins anew
    (torch, "save", 6, "true", "false"),  # half of the third step's checkpoint is written
    (runs, "keep_best", 3, "false", "true"),  # a checkpoint of the best policy; no model-best/ yet
]


def test_a_killed_run_resumes_with_what_is_left(whole, tmp_path, monkeypatch):
    """And ends as the undisturbed run, bit for bit, in another process, and wherever AdamW is."""
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: x.clone())  # as from a GPU
    for module, name, call, before, after in MOMENTS:
        folder, real, calls = tmp_path / name, getattr(module, name), []

        def die(*args, name=name, real=real, calls=calls, call=call):
            calls.append(1)
            if len(calls) < call:
                return real(*args)
            if name == "save":
                Path(args[1]).write_text("half")
            raise Killed

        task = str(whole.parent / "mine.py")
        with monkeypatch.context() as patch:
            patch.setattr(module, name, die)
            with pytest.raises(Killed):
                train.main([*FLAGS, "--task", task, "--out", str(folder), "--offload", before])
        (folder / "metrics.jsonl").open("a").write('{"step": 9, "torn')  # a line cut off, too
        train.main(["--resume", str(folder), "--offload", after])
        assert metrics(folder) == metrics(whole) and models_of(folder) == models_of(whole), name
        assert (folder / "samples.txt").read_text() == (whole / "samples.txt").read_text()
    assert len(models_of(whole)) == 3  # start, model-best, model


def models_of(folder: Path) -> list[bytes]:
    return [x.read_bytes() for x in sorted(folder.glob("**/*.safetensors"))]


# ---------------- flags

MISTAKES = ["lr -1", "grad-clip -1", "temperature -1", "hyper eps=0.1", "hyper kl_ratio=2"]


@pytest.mark.parametrize("flag", MISTAKES)
def test_a_flag_that_would_train_something_else_is_refused(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, ValueError)):
        train.main(f"--steps 0 --warm-steps 0 --{flag}".split())
    assert not os.listdir()


def test_settings_follow_the_model_then_the_task_then_the_flags():
    def parsed(flags, *names):
        config, _ = train.parse(flags.split())
        return [getattr(config, name) for name in names]

    names = ("lr", "max_tokens", "minibatches", "warm_steps", "fast")
    assert parsed("", *names) == [1e-3, 26, 4, 700, False]
    assert parsed("--model some/model", *names) == [3e-6, 256, 1, 0, True]
    assert parsed("--task sums", *names) == [1e-5, 24, 1, 0, True]
    assert parsed("--task sums --lr 1 --fast false", *names) == [1.0, 24, 1, 0, False]
    assert parsed("--task tasks/five_words.py --model m", *names) == [1e-5, 24, 1, 0, True]


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
    tokenizer = TOY.make_tokenizer()
    tokenizer.add_tokens(["<end>"], special_tokens=True)
    path = build("qwen2", tmp_path, vocab_size=len(tokenizer))
    for closing, ends in (("#", []), ("<end><eos>", [len(tokenizer) - 1])):
        message = "{{ m.content }}" + closing
        tokenizer.chat_template = "{% for m in messages %}" + message + "{% endfor %}"
        tokenizer.save_pretrained(path)
        assert load(path).eos.tolist() == [1, 2, 3, *ends]


def test_a_prompt_has_what_the_tokenizer_puts_before_a_text_and_nothing_behind():
    words, tokenizer, item = GSM8K.__new__(GSM8K), TOY.make_tokenizer(), Item("1+1", "2", "")
    prompts = [(TOY, "1+1"), (words, "Question: 1+1\nAnswer:\n")]
    bare = [tokenizer(text)["input_ids"] for _, text in prompts]
    parts = dict(single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)])
    tokenizer._tokenizer.post_processor = TemplateProcessing(**parts)
    for (task, _), ids in zip(prompts, bare, strict=True):
        assert task.encode(tokenizer, [item]) == [[0, *ids]]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert TOY.encode(tokenizer, [item]) == bare[:1]  # a chat template brings its own


def test_a_model_that_a_number_would_be_wrong_for_is_refused(tmp_path, scratch):
    """One that would lose a layer, or whose output layer would be random; and for token scores one
    that adds a bias in it."""
    path = build("llama", tmp_path)
    file = tmp_path / "config.json"
    whole = file.read_text()
    file.write_text(whole.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    with pytest.raises(ValueError, match="unexpected_keys"):
        load(path)
    file.write_text(whole)
    AutoModel.from_pretrained(path).save_pretrained(path)  # without its output layer
    with pytest.raises(ValueError, match="missing_keys"):
        load(path)
    policy = copy.deepcopy(scratch)
    policy.model.lm_head.bias = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="bias"):
        add_scores(None, policy, None, train.Config())
