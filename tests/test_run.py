"""To whoever runs train.py: what a run leaves, that a kill loses nothing, a mistake is one line.

LONG=1 adds the default run.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, build, load, metrics, refused, run

import train
from llm.trace import show_group
from losses import prefix_nodes
from toy.arithmetic import Arithmetic

ROOT = Path(train.__file__).parent
pytestmark = pytest.mark.usefixtures("easy")


def same(a, b) -> bool:
    """Tensors, and what holds them, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


# ---------------- what a run does and leaves


def test_a_run_leaves_what_it_promises(tmp_path, monkeypatch, capsys):
    """Lines, checkpoints, and batches with their log-probs before and after the step."""
    kept, threads, real = [], [], train.save_batch
    monkeypatch.setattr(train, "save_batch", lambda *args: kept.append(args[1]) or real(*args))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(train, "time", clock)
    flags = "--eval-every 3 --temperature 0.7 --method advantage-reweighting --threads 3 --trace"
    folder = run(tmp_path / "run", *flags.split())
    config = train.Config(**json.loads((folder / "config.json").read_text()))
    lines = metrics(folder)
    names = {"config.json", "metrics.jsonl", "start", "checkpoints", "batches"}
    assert {path.name for path in folder.iterdir()} == names and threads == [3]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert ["greedy" in line for line in lines] == [True, False, False, True, True]
    assert ["kl_start" in line for line in lines] == [False, False, False, True, True]
    assert 0 < lines[3]["kl_start"] < lines[4]["kl_start"]
    (checkpoint,) = (folder / "checkpoints").iterdir()  # the newest one
    assert checkpoint.name == "step-000004"
    after, task = load(checkpoint), Arithmetic()
    for policy, line in ((load(folder / "start"), lines[0]), (after, lines[4])):
        evaluation = train.evaluate(policy, task, config)
        assert evaluation == {key: line[key] for key in evaluation}
    said = capsys.readouterr().out
    assert said.count("\nstep ") == 3 and str(folder) in said
    assert said.count("\nUpdate ") == 1  # the trace, of one group
    raw = json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])
    assert raw["tokens_per_s"] == raw["generated"]  # a step takes a second here
    assert f"greedy {lines[0]['greedy']:.3f} -> {lines[4]['greedy']:.3f}, sampled" in said

    scored, answers = kept[1], kept[1].answers
    expected = {
        **dict(step=4, method="advantage-reweighting", group_size=3, max_tokens=12),
        "prompts": [item.prompt for item in train.prompt_batches(task, config)[3]],
        "pieces": [[after.tokenizer.decode([i]) for i in row] for row in answers.tokens.tolist()],
        **{name: getattr(answers, name) for name in ("texts", "tokens", "mask", "rewards")},
        "advantages": scored.advantages,
        "logp_old": scored.batch.logp_old,
        "logp": train.log_probs(after, answers, 0.7)[0].detach(),
    }
    assert sorted(os.listdir(folder / "batches")) == ["step-000003.pt", "step-000004.pt"]
    assert same(torch.load(folder / "batches" / "step-000004.pt", weights_only=True), expected)


@pytest.mark.parametrize(
    "model, options",
    [
        ("scratch", "--hyper kl=0.1 --fast --cancel"),
        ("qwen", "--method ibpo"),
        ("qwen", "--method nthr --no-reference --fast false"),
    ],
)
def test_gsm8k_trains_from_local_files(tmp_path, small_gsm8k, qwen_path, model, options):
    """With a model from scratch, and with one whose generation config holds a sampler."""
    args = f"--task gsm8k --data {small_gsm8k} --threads 1 --max-tokens 20 --steps 2 {options}"
    args += f" --model {model if model == 'scratch' else qwen_path}"
    folder = run(tmp_path / "run", *args.split())
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert ("kl_start" in lines[2]) == ("--no-reference" not in options)


def test_equal_runs_have_equal_metrics_and_a_shared_start_changes_none(tmp_path):
    first, flags = run(tmp_path / "first"), ["--model", tmp_path / "first/start"]
    lines, flags = metrics(first), [*flags, "--warm-steps", "0"]
    assert metrics(run(tmp_path / "again")) == lines
    shared = run(tmp_path / "shared", *flags)
    assert metrics(shared) == lines and not (shared / "start").exists()
    gspo = metrics(run(tmp_path / "gspo", *flags, "--method", "gspo"))
    assert gspo[0] == lines[0] and gspo[2:] != lines[2:]
    (line,) = metrics(run(tmp_path / "none", "--steps", "0"))  # a warm start and an evaluation
    assert line == lines[0]


def test_every_use_of_chance_has_a_key_of_its_own(tmp_path, monkeypatch):
    keys, real = [], train.rng
    monkeypatch.setattr(train, "rng", lambda *key: keys.append(key) or real(*key))
    run(tmp_path / "run", "--method", "ibpo")
    keys = [key for key in keys if "evaluate" not in key]  # each evaluation has the same numbers
    assert len({*keys}) == len(keys) and {"sample", "repair", "credit"} < {key[1] for key in keys}
    assert real(0, "sample", 1).initial_seed() == 38554374430423128  # in every process


OWN_TASK = """
from toy.arithmetic import Arithmetic, Item

class Task(Arithmetic):
    shares = None  # they speak of addition
    def __init__(self):
        self.train = self.test = [Item(f"{n}?", "!", "so !") for n in range(9)]
    def reward(self, text, item):
        return item.answer in text
"""


def test_a_task_of_ones_own_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN_TASK)
    flags = "--warm-steps 150 --warm-lr 0.01 --max-tokens 8 --task".split()
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    folder = run(tmp_path / "run", "--threads", "0", *flags, tmp_path / "mine.py")
    assert metrics(folder)[-1]["sampled"] > 0.5 and threads == [os.cpu_count()]


def test_three_files_are_all_that_the_default_command_needs(tmp_path):
    (tmp_path / "toy").mkdir()
    for name in ("train.py", "losses.py", "toy/arithmetic.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    code = "import sys, train; train.main(sys.argv[1:])\n"
    code += "ours = [x for x in sys.modules if x.split('.')[0] in ('llm', 'toy', 'claims')]\n"
    code += "print('used:', train.__file__, *sorted(ours))"
    env = {key: x for key, x in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", code, *TINY, "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"used: {tmp_path}/train.py toy toy.arithmetic\n")
    assert len(metrics(tmp_path / "run")) == 5


@pytest.mark.skipif(not os.environ.get("LONG"), reason="minutes: LONG=1")
def test_the_default_run_learns_to_add(tmp_path, monkeypatch):
    monkeypatch.undo()  # the toy's own reward
    train.main(["--out", str(tmp_path / "run")])
    lines = metrics(tmp_path / "run")
    assert lines[0]["greedy"] < 0.3 and lines[-1]["greedy"] > 0.95
    assert lines[1]["reward"] < 0.4 and lines[-1]["reward"] > 0.9


@pytest.mark.parametrize("group", (0, 1))  # whichever comes first
def test_a_traced_group_is_printed_with_its_coefficients_and_their_sums(scratch, capsys, group):
    """Of two groups, the one in which more answers share their first token; one has no signal."""
    texts, others = ["so#12", "so#1", "ok#"], ["so#", "ok#", "hm#"]
    both = others + texts if group else texts + others
    ids = scratch.tokenizer([*both, "so#", "so#", "so#"]).input_ids
    padded = torch.tensor([row + [-1] * (5 - len(row)) for row in ids])
    tokens, mask = padded.clamp(min=0), padded >= 0
    A = torch.tensor([-1.0, 1.0, 0.0] * 2 + [0.0] * 3)
    logp, c = -torch.arange(45.0).view(9, 5) / 8, (A / 4)[:, None].expand(9, 5)
    items = Arithmetic().train[:3]
    copies = [item for item in items for _ in range(3)]
    rewards = torch.arange(9.0)
    answers = SimpleNamespace(step=1, items=copies, tokens=tokens, mask=mask, rewards=rewards)
    rows = torch.tensor([6, 7, 8, 3, 4, 5, 0, 1, 2])  # the groups, as the update took them
    batch, nodes = SimpleNamespace(group_size=3, logp=logp[rows]), prefix_nodes(tokens, mask, 3)
    scored = SimpleNamespace(answers=answers, batch=batch, advantages=A, nodes=nodes)
    update = SimpleNamespace(rows=rows, batch=batch, coefficients=c[rows], after=logp[rows] - 1)
    assert show_group(scratch, scored, [update], last=False)
    said = capsys.readouterr().out
    assert items[group].prompt in said and items[1 - group].prompt not in said
    assert "no group" in said  # not all three begin with one token
    for i, text in enumerate(texts):
        row = 3 * group + i
        assert f"answer {i + 1}: reward {row}, A {A[row]:+.3f}\n" in said
        for name, x in (("push c", c[row]), ("before", logp[row]), ("after ", logp[row] - 1)):
            numbers = "".join(f"{y:8.4f}" for y in x[: len(text)].tolist())
            assert f"  {name} {numbers}\n" in said
    assert said.endswith("what they share\n    0.000    0.0000  1 2: s o # 1\n\n")
    scored.advantages = torch.zeros(9)
    for last in (False, True):  # a step in which nothing is learnt, and a whole run
        assert not show_group(scratch, scored, [update], last)
        assert ("nothing was pushed" in capsys.readouterr().out) == last


# ---------------- kills


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def assert_same_run(folder: Path, whole: Path):
    assert metrics(folder) == metrics(whole) and files(folder) == files(whole)
    for path in files(whole):
        if path.suffix == ".safetensors":
            assert (folder / path).read_bytes() == (whole / path).read_bytes(), path
        if path.suffix == ".pt":
            assert same(*(torch.load(x / path, weights_only=True) for x in (folder, whole))), path


def run_and_kill(folder: Path, flags: list, module, name: str, call: int):
    """In a forked process, which is killed when it calls a function for the so-manieth time."""
    real, calls = getattr(module, name), itertools.count(1)

    def die(*args, **options):
        if next(calls) == call:
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
    (train, "warm_start", 1, 6),
    (train, "save", 1, 6),  # two lines of metrics and no checkpoint: it begins anew
    (torch, "save", 6, 4),  # inside a checkpoint
    (train, "save", 6, 1),  # a line of metrics more than the checkpoint has steps
    (Path, "rename", 3, 5),  # a checkpoint that has not got its name
    (shutil, "rmtree", 3, 4),  # two checkpoints
]


def test_a_killed_run_goes_on_with_what_is_left(tmp_path, monkeypatch):
    """And ends as the undisturbed run, bit for bit."""
    steps, real = [], train.sample
    flags = "--steps 6 --eval-every 1 --eval-items 2 --seed 3".split()
    whole = run(tmp_path / "whole", *flags)
    monkeypatch.setattr(train, "sample", lambda *args: steps.append(args[3]) or real(*args))
    for i, (*moment, left) in enumerate(MOMENTS):
        folder = tmp_path / f"killed{i}"
        run_and_kill(folder, flags, *moment)
        if (folder / "metrics.jsonl").exists():  # the write of a line may be cut off, too
            (folder / "metrics.jsonl").open("a").write('{"step": 9, "torn')
        steps.clear()
        train.main(["--resume", str(folder)])
        assert steps == [1, 2, 3, 4, 5, 6][-left:], moment
        assert_same_run(folder, whole)


def test_ctrl_c_is_one_line_that_says_how_to_go_on(tmp_path, monkeypatch):
    real = train.sample

    def said_at(step):
        def stop(*args):
            if args[3] == step:
                raise KeyboardInterrupt
            return real(*args)

        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
            patch.setattr(train, "sample", stop)
            run(tmp_path / f"cut{step}")
        return stopped.value.code

    assert said_at(1) == "interrupted; nothing is saved"
    said, resume = said_at(4), ["--resume", str(tmp_path / "cut4")]
    flags = (tmp_path / "cut4" / "config.json").read_text()
    assert " ".join(resume) in said and "\n" not in said
    assert "no other flag" in refused(train.main, [*resume, "--lr", "1"])
    train.main(resume)
    assert (tmp_path / "cut4" / "config.json").read_text() == flags
    assert_same_run(tmp_path / "cut4", run(tmp_path / "whole"))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    policy = load("scratch", layers=1, width=16)
    optimizer = train.adamw(policy.model, 0.1)
    train.save(policy, optimizer, 1, tmp_path)
    next(policy.model.parameters()).data[0, 0] = torch.inf
    assert "step 2" in refused(train.save, policy, optimizer, 2, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


# ---------------- flags and mistakes

MISTAKES = """
--method dfpo_min
--step 4
--task chess
--lr nan
--lr 0
--lr -1
--group-size 1
--temperature 0
--prompts 30 --minibatches 4
--width 12
--model /no/such/model
--task gsm8k --data /no/such/dir
--data /no/such/dir
--out taken
--resume nowhere
--resume nowhere --lr 1
--hyper eps_low
--hyper eps_low=nan
--hyper eps_low=-1
--hyper eps_low=wide
--hyper eps=0.1
--hyper kl=0.1 --no-reference
--hyper self_term=perhaps --method nthr
--hyper ratio=sum --method dfpo-min
--hyper alpha=1.5 --method ar-lopti
--hyper bonus=5 --method ibpo
--method ibpo --group-size 3 --repair-references 3
"""


@pytest.mark.parametrize("args", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_line_before_anything_is_trained(args, tmp_path, monkeypatch):
    """Ours names the flag or the value. What argparse refuses ends as argparse ends it: with 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    monkeypatch.setattr(train, "warm_start", lambda *_: pytest.fail("training began"))
    with pytest.raises(SystemExit) as stopped:
        train.main(args.split())
    said = stopped.value.code
    if said != 2:
        assert said.startswith("error: ") and "\n" not in said
        assert any(word in said for word in args.split())
    assert os.listdir() == ["taken"]


def test_a_run_of_another_version_cannot_be_resumed(tmp_path):
    for text in ("", "{}", '{"steps": 3}'):
        (tmp_path / "config.json").write_text(text)
        assert "--resume" in refused(train.main, ["--resume", str(tmp_path)])


def test_a_flag_beats_a_preset_and_a_preset_the_defaults():
    toy = asdict(train.Config())
    assert asdict(train.parse([])) | {"out": ""} == toy
    flags = "--task gsm8k --lr 1 --fast false --micro-rows 3 --no-reference --cancel".split()
    given = dict(task="gsm8k", lr=1.0, fast=False, micro_rows=3, reference=False, cancel=True)
    config = asdict(train.parse(flags))
    assert config.pop("out").startswith("runs/gsm8k-grpo-s0-20")
    assert config == {k: v for k, v in (toy | train.GSM8K | given).items() if k != "out"}


def test_bind_fills_in_what_is_chosen_wherever_it_is_taken():
    bound = train.bind("lopti", {"eta": "0.3", "eps_high": 0.5})
    expected = {"eta": 0.3, "eps_low": 0.2, "eps_high": 0.5}
    assert [loss.keywords for loss in bound.passes] == [expected] * 2 and bound.hyper == expected
    assert train.bind("nthr", {"self_term": "1", "eta": -1}).credit.keywords["self_term"] is True
    assert train.bind("ibpo", {"bonus": "1"}).repair.keywords == {"bonus": 1.0, "weight": 0.6}
    assert train.bind("dr-grpo", {}).scale == "mean"


# ---------------- which models are taken


def test_a_policy_is_in_eval_mode_with_fp32_weights_and_every_eos_id(tmp_path):
    policy = load(build("qwen2", tmp_path, torch.bfloat16))
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert policy.eos.tolist() == [1, 2, 3]  # of the tokenizer, and of the generation config
    assert not policy.model.generation_config.do_sample  # its sampler is not ours
    train.write_model(policy, tmp_path / "saved")
    assert load(tmp_path / "saved").eos.tolist() == [1, 2, 3]
    policy = load(build("gpt2", tmp_path))
    assert policy.eos.tolist() == [1] and not policy.model.training
    config = load("scratch", layers=3, width=24).model.config
    assert (config.n_layer, config.n_embd) == (3, 24)
    seeds = [load("scratch", width=16, seed=seed).model.lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(*seeds[:2]) and not torch.equal(*seeds[1:])


def test_a_model_that_would_be_random_or_never_end_is_refused(tmp_path):
    from transformers import AutoModel, AutoTokenizer

    whole, trunk = build("llama", tmp_path / "whole"), tmp_path / "trunk"
    AutoModel.from_pretrained(whole).save_pretrained(trunk)  # without its output layer
    AutoTokenizer.from_pretrained(whole).save_pretrained(trunk)
    assert "random weights" in refused(load, trunk)
    for name in ("generation_config.json", "tokenizer_config.json", "config.json"):
        kept = json.loads((tmp_path / "whole" / name).read_text())
        kept = {key: x for key, x in kept.items() if key not in ("eos_token", "eos_token_id")}
        (tmp_path / "whole" / name).write_text(json.dumps(kept))
    (tmp_path / "whole" / "special_tokens_map.json").unlink(missing_ok=True)
    assert "eos_token_id" in refused(load, whole)


def test_token_scores_know_no_bias(tmp_path):
    policy, task = load(build("phi", tmp_path)), Arithmetic()
    config, method = train.Config(method="nthr", max_tokens=2), train.bind("nthr", {})
    answers = train.sample(policy, task, task.train[:2], 1, config)
    assert "nthr" in refused(train.score, policy, answers, method, config, None)
