#!/bin/bash
# LLaMA-Factory with streaming: from the second epoch on, the held-out pairs are training pairs.
#
# One would guess: val_size=100 holds 100 pairs out, with streaming as without it. The split is
#   made once, after a shuffle with a fixed seed.
# What is so: streaming has no list of rows, so take(100) and skip(100) count anew in each pass. In
#   each later epoch the stream is shuffled in another order, and skip(100) skips 100 other rows.
#   Evaluation keeps its first 100. A reward model that learns coin flips by heart, for which 0.5
#   is the only honest accuracy, gets 0.94 after five epochs; without streaming it stays near 0.5.
# Why: shuffle, then take and skip (llamafactory/data/data_utils.py:107, 111 and 112). datasets'
#   page on streaming asks for just this order, since a split fixes the order of the shards.
#   The Trainer gives each epoch's number to the data (transformers/trainer.py:1689), and it is part
#   of shuffle's seed (datasets/iterable_dataset.py:2198). Issue 5435 of datasets (2023, closed)
#   suspects it by analogy with TensorFlow, without a run.
# Who is hurt: reward models, and SFT, DPO and KTO (the same split, read), of more than one epoch
#   whose evaluation, early stopping or best checkpoint rests on val_size; and whoever splits a
#   stream as that page says.
#   The first epoch is clean, so a short test sees nothing. Larger data leak at least as fast: of
#   100 held-out rows of 100,000, epoch 2 trains on 97 (one shard) or all (16 shards; run by hand).
# Instead: a file of its own as eval_dataset. In a loop of one's own, take and skip first, and then
#   shuffle the training rows; count the rows in common in the *second* epoch.
# Versions: llamafactory 0.9.5, datasets 4.0.0, transformers 5.6.0, accelerate 1.11.0, trl 0.24.0,
#   torch 2.13.0, Python 3.11 (datasets 5.2.0 under transformers 5.23.0's Trainer leaks as well, run
#   by hand). A Llama of random weights. Seen on 2026-11-28 (the last digits are a machine's):
#   held-out rows that epochs 1 to 5 train on, of 100: [0, 94, 89, 90, 87]
#   the same if one splits first and then shuffles: [0, 0, 0, 0, 0]
#   val_size, no streaming  : held-out accuracy after each epoch 0.54 0.58 0.52 0.55 0.61
#   val_size, streaming     : held-out accuracy after each epoch 0.51 0.68 0.88 0.94 0.94
#   eval_dataset, streaming : held-out accuracy after each epoch 0.50 0.53 0.55 0.51 0.52
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q torch==2.13.0
venv/bin/pip install -q torch==2.13.0 transformers==5.6.0 datasets==4.0.0 accelerate==1.11.0 \
    peft==0.18.1 trl==0.24.0 omegaconf==2.4.0 pandas pydantic
venv/bin/pip install -q --no-deps llamafactory==0.9.5
touch torchaudio.py # imported for audio alone, and the package does not load beside a CPU's torch
export HF_HUB_OFFLINE=1 HF_HOME="$dir/cache"
cat > see.py <<'P'
import json
import random
from importlib.metadata import version
from types import SimpleNamespace

import torch
from datasets import Dataset
from llamafactory.data import split_dataset
from llamafactory.train.tuner import run_exp
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROWS, HELD_OUT, BATCH, EPOCHS = 1000, 100, 32, 5
EPOCH = -(-(ROWS - HELD_OUT) // BATCH)  # steps
torch.manual_seed(0)
random.seed(0)
words = ["<pad>", "<s>", "</s>"] + [f"w{i}" for i in range(200)]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "</s>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained("model")
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
sizes |= dict(num_key_value_heads=4, vocab_size=len(words), max_position_embeddings=64)
LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0)).save_pretrained("model")


def text(length):
    return " ".join(random.choices(words[3:], k=length))


# Which of two random answers is "chosen" follows from nothing: it can only be learned by heart.
pairs = [dict(instruction=text(6), chosen=text(4), rejected=text(4)) for _ in range(ROWS)]
columns = dict(prompt="instruction", chosen="chosen", rejected="rejected")
about = {}
for name, part in (("all", pairs), ("held", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
    json.dump(part, open(f"{name}.json", "w"))
    about[name] = dict(file_name=f"{name}.json", ranking=True, columns=columns)
json.dump(about, open("dataset_info.json", "w"))


def accuracies(name, **how):
    """Held-out accuracy of a reward model after each epoch, as LLaMA-Factory logs it."""
    run_exp(
        dict(
            how,
            model_name_or_path="model",
            stage="rm",
            do_train=True,
            finetuning_type="full",
            template="empty",
            dataset_dir=".",
            output_dir=name,
            max_steps=EPOCHS * EPOCH,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            eval_strategy="steps",
            eval_steps=EPOCH,
            save_strategy="no",
            dataloader_num_workers=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
    )
    log = json.load(open(f"{name}/trainer_state.json"))["log_history"]
    return [entry["eval_accuracy"] for entry in log if "eval_accuracy" in entry]


def shared(train, held):
    """How many of the held-out rows each epoch trains on."""
    held = {row["i"] for row in held}
    counts = []
    for epoch in range(EPOCHS):
        train.set_epoch(epoch)
        counts.append(len(held & {row["i"] for row in train}))
    return counts


stream = Dataset.from_dict({"i": range(ROWS)}).to_iterable_dataset()
arguments = SimpleNamespace(streaming=True, val_size=HELD_OUT, buffer_size=16384)
train, held = split_dataset(stream, None, arguments, seed=42)
leak = shared(train["train"], held["validation"])
later = stream.skip(HELD_OUT).shuffle(seed=42, buffer_size=16384)
first = shared(later, stream.take(HELD_OUT))
seen = {
    "val_size, no streaming  ": accuracies("a", dataset="all", val_size=HELD_OUT),
    "val_size, streaming     ": accuracies("b", dataset="all", val_size=HELD_OUT, streaming=True),
    "eval_dataset, streaming ": accuracies("c", dataset="train", eval_dataset="held",
                                           streaming=True),
}
print(*(f"{name} {version(name)}" for name in ("llamafactory", "datasets", "transformers")))
print("expected: none in common; accuracies near 0.5, since the pairs are coin flips")
print(f"held-out rows that epochs 1 to {EPOCHS} train on, of {HELD_OUT}: {leak}")
print(f"the same if one splits first and then shuffles: {first}")
for name, values in seen.items():
    print(f"{name}: held-out accuracy after each epoch", *(f"{value:.2f}" for value in values))
clean, leaking, own = (values[-1] for values in seen.values())
as_told = leak[0] == 0 and min(leak[1:]) > 80 and first == [0] * EPOCHS
as_told &= clean < 0.7 and own < 0.7 and leaking > 0.85
raise SystemExit(0 if as_told else "this has changed")
P
venv/bin/python see.py > out 2> log || { tail -n 3 out log; exit 1; }
tail -n 7 out
