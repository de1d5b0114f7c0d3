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

import pytest
import torch
from conftest import TINY, TOY, build, load, metrics, run, timeless
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel

import train
from llm import runs
from llm.credit import add_scores
from tasks.task import Item

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
FLAGS = [*TINY, "--seed", "47", "--eval-every", "1"]


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
    config = train.Config(**runs.read_config(whole))
    task, lines = train.find_task(config.task)(), metrics(whole)
    assert [line["step"] for line in lines] == [*range(5)]
    # The third evaluation is the best one: the second has the same greedy reward, and less of
    # sampled answers, and of the fourth only sampled answers have more.
    scores = [(line["greedy"], line["sampled"]) for line in lines]
    assert max(scores) == scores[3] and scores[2][0] == scores[3][0] and scores[4][1] > scores[3][1]
    first, last = (torch.tensor(lines[i]["greedy_by_item"]) for i in (0, 4))
    change, noise = (last - first).mean(), (last - first).std(correction=0) / len(first) ** 0.5
    wanted = f"greedy changed by {change:+.3f} (standard error {noise:.3f}): "
    wanted += f"{(last > first).sum()} items rose, {(last < first).sum()} fell; best at step 3: "
    assert wanted in (whole.parent / "said").read_text()
    assert (whole / "task.py").read_text() == OWN_TASK

    batches, samples = train.prompt_batches(task, config), (whole / "samples.txt").read_text()
    kept = (1, "start", "logp_old"), (3, "model-best", "logp"), (4, "model", "logp")
    for step, name, key in kept:
        policy = train.load_policy(config, task, str(whole / name))
        line = lines[0 if name == "start" else step]
        assert line == line | timeless(train.evaluate(policy, task, config))
        saved = torch.load(whole / f"batches/step-{step:06}.pt", weights_only=True)
        items = [item for item in batches[step - 1] for _ in range(3)]
        assert saved["prompts"] == [item.prompt for item in items[::3]]
        answers = SimpleNamespace(prompt_ids=train.encode(policy, task, items, config), **saved)
        logp = train.log_probs(policy, answers, 1.0).detach()
        torch.testing.assert_close(saved[key], logp, rtol=1e-4, atol=1e-5)
        text = "".join(saved["pieces"][0][: saved["mask"][0].sum()]).removesuffix("<eos>")
        R = task.reward(text, None)
        assert saved["rewards"][0] == R
        assert f"=== step {step}: {items[0].prompt} (!)\n[{R:g}] {text}\n" in samples


@pytest.mark.skipif(not os.environ.get("LONG"), reason="minutes: LONG=1")
def test_the_default_run_learns_to_add(tmp_path):
    train.main(["--out", str(tmp_path / "run")])
    lines = metrics(tmp_path / "run")
    assert lines[0]["greedy"] < 0.3 and lines[-1]["greedy"] > 0.95


# ---------------- resuming


def test_a_run_that_has_ended_resumes_with_more_steps_and_another_rate(
    whole, tmp_path, monkeypatch
):
    """From elsewhere, and its first steps stay. The linear schedule is that of a run with the new
    steps. What would be another experiment is refused."""
    folder, before = shutil.copytree(whole, tmp_path / "run"), metrics(whole)
    resume = ["--resume", str(folder)]
    monkeypatch.chdir(tmp_path)
    for flag in ("--method gspo", "--seed 1", "--eval-items 5", "--width 8", "--task sums"):
        with pytest.raises(SystemExit):
            train.main([*resume, *flag.split()])
    train.main([*resume, *"--steps 6 --lr 0.002 --eval-every 5".split()])
    lines = metrics(folder)
    assert lines[:5] == before and ["greedy" in line for line in lines[5:]] == [True, True]
    assert [line["lr"] for line in lines[4:]] == pytest.approx([0.001 / 4, 0.002 / 3, 0.002 / 6])


class Killed(BaseException):
    """What no `except Exception` sees, as it would not see a kill."""


MOMENTS = [  # a call of a function, and --offload before and after the kill
    (runs, "first_group", 1, "false", "false"),  # a line and no checkpoint: the run begins anew
    (torch, "save", 6, "true", "false"),  # half of the third step's checkpoint is written
    (runs, "keep_best", 3, "false", "true"),  # a checkpoint of the best policy; no model-best/ yet
]


@pytest.mark.parametrize("module, name, call, before, after", MOMENTS)
def test_a_killed_run_resumes_with_what_is_left(
    module, name, call, before, after, whole, tmp_path, monkeypatch
):
    """And ends as the undisturbed run, bit for bit, in another process, and wherever AdamW is."""
    folder, real, calls = tmp_path / "run", getattr(module, name), []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: x.clone())  # as from a GPU

    def die(*args):
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
    assert metrics(folder) == metrics(whole) and models_of(folder) == models_of(whole)
    assert (folder / "samples.txt").read_text() == (whole / "samples.txt").read_text()
    assert len(models_of(whole)) == 3  # start, model-best, model


def models_of(folder: Path) -> list[bytes]:
    return [x.read_bytes() for x in sorted(folder.glob("**/*.safetensors"))]


def test_the_reference_of_a_kl_term_is_the_policy_after_the_warm_start(tmp_path, easy):
    line = metrics(run(tmp_path / "run", "--hyper", "kl=0.1", "--steps", 2, "--lr", 0.1))
    assert abs(line[1]["kl"]) < 1e-9 < 1e-4 < line[2]["kl"]


# ---------------- flags

MISTAKES = ["lr -1", "grad-clip -1", "temperature 0", "hyper eps=0.1", "minibatches 3", "task gsm8"]


@pytest.mark.parametrize("flag", MISTAKES)
def test_a_flag_that_would_train_something_else_is_refused(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, ValueError, FileNotFoundError)):
        train.main(f"--steps 0 --warm-steps 0 --{flag}".split())
    assert not os.listdir()


def test_settings_follow_the_model_then_the_task_then_the_flags():
    config, _ = train.parse("--task tasks/five_words.py --model m --prompts 1".split())
    assert (config.warm_steps, config.lr, config.prompts) == (0, 1e-5, 1)


# ---------------- models


def test_a_policy_is_in_eval_mode_with_fp32_weights_and_every_eos_id(tmp_path):
    """Those of the tokenizer, of the generation config, and of a chat's turn."""
    path = build("qwen2", tmp_path, torch.bfloat16)
    tokenizer = TOY.make_tokenizer()
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained(path)
    once = load(path)
    runs.write_model(once, tmp_path / "saved")
    for policy in (once, load(tmp_path / "saved")):
        assert {weight.dtype for weight in policy.model.parameters()} == {torch.float32}
        assert policy.eos.tolist() == [1, 2, 3, len(tokenizer) - 1]
        assert not policy.model.training


def test_a_model_that_a_number_would_be_wrong_for_is_refused(tmp_path, scratch):
    """One whose output layer would be random; for token scores, one with a bias in it."""
    path = build("llama", tmp_path)
    AutoModel.from_pretrained(path).save_pretrained(path)  # without its output layer
    with pytest.raises(ValueError, match="no weights for"):
        load(path)
    with_bias, with_cap = copy.deepcopy(scratch), copy.deepcopy(scratch)
    with_bias.model.lm_head.bias = torch.nn.Parameter(torch.zeros(1))
    with_cap.model.config.final_logit_softcapping = 3.0
    for policy in (with_bias, with_cap):
        with pytest.raises(ValueError, match="no cap"):
            add_scores(None, policy, None, train.Config(), None)


def test_a_prompt_has_what_the_tokenizer_puts_before_a_text_and_nothing_behind():
    tokenizer = TOY.make_tokenizer()
    bare = tokenizer("1+1")["input_ids"]
    parts = dict(single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)])
    tokenizer._tokenizer.post_processor = TemplateProcessing(**parts)
    assert TOY.encode(tokenizer, [Item("1+1", "2", "")]) == [[0, *bare]]
