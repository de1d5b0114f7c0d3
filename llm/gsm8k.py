r"""The GSM8K task (Cobbe et al. 2021): word problems, their prompt, and an exact verifier.

The verifier reads the line after the last '####', else the last \boxed{...}, else the last number.
- A line or box must hold exactly one number, units aside: '$1,234.00 a year' is 1234, while
  'not 42 but 43' and '3/4' are nothing.
- A number is ASCII digits with optional sign, thousands groups and decimals. Letters may touch its
  end (42kg), and nothing else may: '1,2', '42e3', 'x42' and '4½' are no numbers. 50% is 50. A dash
  is a sign unless it touches a word before it.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate, repeat
from pathlib import Path

from toy.arithmetic import BaseTask

VOCAB_SIZE = 2048
# A word is all that hangs on a digit, judged whole so that a piece of a malformed number never
# counts. BEFORE reads on leftwards: point, currency, sign. [0-9] because \d takes any script's
# digits; \u2212 is minus, \u2013 the en dash.
WORD = re.compile(r"[0-9][\w.,]*")
BEFORE = re.compile(r"(\.?)(?![\w.,])[ $€£({\\]*([-\u2212\u2013](?!\w))?")
NUMBER = re.compile(r"((?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?)[A-Za-z_.,]*")


@dataclass(frozen=True)
class Item:
    prompt: str  # the question
    answer: str  # the gold number as written, "1,234"
    demo: str  # the worked solution, up to "#### 1,234"

    def plain(self) -> str:
        """The prompt without a chat template; no token straddles the end of its last line."""
        return f"Question: {self.prompt}\nAnswer:\n"


def extract(text: str) -> str | None:
    """The text's answer as sign and digits, "-1234.50"; None if there is no clear one.

    Linear time; never raises.
    """
    text = text.replace("{,}", ",")  # LaTeX writes 1{,}000
    _, mark, region = text.rpartition("####")  # without a mark, region is the whole text
    if mark:
        region = region.strip().partition("\n")[0]
    elif r"\boxed{" in region:
        _, mark, region = region.rpartition(r"\boxed{")
        depths = [*accumulate(map({"{": 1, "}": -1}.get, region, repeat(0))), -1]
        region = region[: depths.index(-1)]  # a box that never closes runs to the end
    words = WORD.findall(region)
    if not words or mark and len(words) > 1:
        return None
    before = BEFORE.match(region.rpartition(words[-1])[0][::-1])
    number = before and NUMBER.fullmatch(before[1] + words[-1])
    return number and ("-" if before[2] else "") + number[1].replace(",", "")


def to_item(row: object) -> Item:
    """One GSM8K record without its calculator marks <<48/2=24>>. ValueError for anything else."""
    for key in ("question", "answer"):
        if not isinstance(row, dict) or not isinstance(row.get(key), str):
            raise ValueError(f'no text under "{key}"')
    demo = re.sub("<<[^<>]*>>", "", row["answer"]).strip()
    if "####" not in demo or extract(demo) is None:
        raise ValueError('"answer" has no "####" followed by one number')
    return Item(row["question"], demo.rpartition("####")[2].strip(), demo)


def read_items(path: Path) -> list[Item]:
    """The Items of a file of JSON lines. ValueError, saying where and why, for a bad one."""
    if not path.is_file():
        reads = "--data DIR reads DIR/train.jsonl and DIR/test.jsonl"
        raise ValueError(f"{path} is not a file; {reads}")
    items, expected = [], 'expected {"question": "...", "answer": "... #### 42"} on each line'
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            if text := line.decode("utf-8-sig").strip():
                items.append(to_item(json.loads(text)))
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)  # without JSON's own line number, always 1
            raise ValueError(f"{path}:{number}: bad record: {reason}; {expected}") from None
    if not items:
        raise ValueError(f"{path} holds no problem; {expected}")
    return items


class GSM8K(BaseTask):
    """Problems from the hub (data=None) or from DIR/train.jsonl and DIR/test.jsonl.

    Raises ValueError if there are none.
    """

    name = "gsm8k"

    def __init__(self, data: str | None):
        if data is not None:
            files = (Path(data) / f"{split}.jsonl" for split in ("train", "test"))
            self.train, self.test = map(read_items, files)
            return
        try:
            from datasets import load_dataset

            hub = load_dataset("openai/gsm8k", "main")
        except Exception as error:  # network, hub and cache each fail in classes of their own
            reason = f"({type(error).__name__}); --data DIR reads local files"
            raise ValueError(f"cannot load openai/gsm8k {reason}") from error
        self.train = [to_item(row) for row in hub["train"]]
        self.test = [to_item(row) for row in hub["test"]]

    def reward(self, text: str, item: Item) -> float:
        """1.0 if the text's answer equals the gold one exactly, else 0.0."""
        answer, gold = extract(text), extract(f"####{item.answer}")
        return float(answer is not None and Decimal(answer) == Decimal(gold))

    def encode(self, tokenizer, items: Iterable[Item]) -> list[list[int]]:
        """Prompt token ids of each item, through the tokenizer's chat template if it has one."""
        if tokenizer.chat_template is None:
            return self.encode_texts(tokenizer, [item.plain() for item in items])
        wish = "Reason step by step; end with '#### ' and the number."
        chats = [[{"role": "user", "content": f"{item.prompt}\n{wish}"}] for item in items]
        # return_dict is spelt out because its default differs between transformers 4 and 5
        options = {"add_generation_prompt": True, "return_dict": True}
        return tokenizer.apply_chat_template(chats, **options)["input_ids"]

    def repair(self, item: Item, answer: str, siblings: list[str]) -> Item:
        """The problem of correcting an answer, given siblings' answers, in plain language."""
        others = "".join(f"\n\nAnother answer to compare it with:\n{text}" for text in siblings)
        wish = "Find the mistake in the first answer. "
        wish += "Write that answer again, corrected, changing as little as you can."
        prompt = f"{item.prompt}\n\nA first answer:\n{answer}{others}\n\n{wish}"
        return Item(prompt, item.answer, "")

    def make_tokenizer(self):
        """Byte-level BPE learnt on the training split, each digit a token; deterministic."""
        from tokenizers import ByteLevelBPETokenizer, Tokenizer
        from tokenizers.pre_tokenizers import Digits, Sequence
        from transformers import PreTrainedTokenizerFast

        bpe = ByteLevelBPETokenizer()  # its alphabet is all 256 bytes: any text can be encoded
        bpe.pre_tokenizer = Sequence([Digits(individual_digits=True), bpe.pre_tokenizer])
        texts = (item.plain() + item.demo for item in self.train)
        bpe.train_from_iterator(
            texts, VOCAB_SIZE, show_progress=False, special_tokens=["<pad>", "<eos>"]
        )
        core = Tokenizer.from_str(bpe.to_str())  # the plain class, the one that transformers wraps
        return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
