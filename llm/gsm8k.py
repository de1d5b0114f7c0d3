r"""The GSM8K task (Cobbe et al. 2021): word problems, their prompt, and an exact verifier.

The verifier reads the last '####' with nothing but a number on its line, else the last \boxed{...},
else the last number. A bare '####' marks the line that follows it.
Nothing is read after a line that starts with 'Question:', where a base model poses itself the next
problem, unless there is no number before it.
- Around the number of a '####' there may be a sign, a currency and a unit: '-$1,234.00 a year' is
  -1234. A heading such as '#### Step 2: halve it' or '#### 2. Halve it' is no answer.
- A box must hold exactly one number: \boxed{3/4} is nothing.
- A number is ASCII digits with optional sign, thousands groups and decimals. Letters may touch its
  end (42kg), and nothing else may: '1,2', '42e3', 'x42' and '4½' are no numbers. 50% is 50.
- What may be half of an expression ('5-3', '10–12', '3 / 4', '72 000') is nothing, and so is a
  number whose sign is unclear ('10 - 7', or '- 7' in running text). 42k and 42nd are not 42.
"""

import json
import re
from collections.abc import Iterable
from decimal import Decimal
from itertools import accumulate, repeat
from pathlib import Path

from toy.arithmetic import BaseTask, Item

VOCAB_SIZE = 2048
# The ways in which models write one thing are made one, in this order.
SPELLINGS = (
    # hyphens, dashes and minus signs of all kinds; whether one is a sign is decided later
    (r"[\u00ad\u02d7\u2010-\u2015\u2043\u207b\u208b\u2212\u2796\ufe58\ufe63\uff0d]", "-"),
    (r"(?i:minus|negative)\b", "-"),
    (r"\\(?:text|math)(?:bf|it|rm|sf|tt)?(?![A-Za-z])", ""),  # \text{...} around a number or a unit
    # between digits: LaTeX's {,} and ,\! and \, and the spaces that are no plain space
    (r"(?<=[0-9]) ?(?:\{,\}|,?\\[,:;! ]|[~\u00a0\u2007-\u200a\u202f]) ?(?=[0-9])", ","),
    (r"(?<=[A-Za-z])(\}?)\^(?:\{-?[0-9]+\}|-?[0-9]+)", r"\1"),  # a unit's exponent, m^2
)
# Thousands groups or plain digits, then decimals. What follows must not make another number of it.
NUMBER = r"((?=\.?[0-9])(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]*|0)?(?:\.[0-9]+)?)"
NUMBER += r"(?!(?:st|nd|rd|th|[kKMB])\b|\W*(?:hundred|thousand|[mb]illion))"
NUMBER += r"(?!\s*[\u00bc-\u00be\u2150-\u215e])"  # the half of 4½
# The line of a '####': symbols with a sign among them, a currency's code, the number, and its unit.
# A point, a colon, a bracket or a dash before a word makes a heading of it.
MARKED = r"[^\w-]*(?:(-)[^\w-]*)?(?:(?:[A-Z]{1,3}|Rs)[^\w-]+)?(?<![.,])"
MARKED = re.compile(MARKED + NUMBER + r"(?:\W*|[^\w.:)-]*[A-Za-z][^0-9:]{0,40})")
# Elsewhere the last digits are looked at together with all that touches them, so that a piece of a
# malformed number never counts. [0-9] because \d takes any script's digits.
DIGITS = re.compile(r"\.?[0-9][0-9.,]*")
WHOLE = re.compile(NUMBER + r"[A-Za-z_.,]*(?![\w.,])")
# What touches them on their left: neither digit nor dash, or symbols with one dash, the sign.
TOUCHING = re.compile(r"(?:[^\d-]*[^\w.,^-])?|[^\w-]*(-)[^\w.,-]*")
# A word before them that makes them half of an expression, or may hold their sign ('-USD 42').
JOINED = re.compile(r"^\W*-|[-+/×÷^0-9]\**$|[0-9]\\|^(?:\*|x|\\times|\\cdot|\\div)$")


def extract(text: str) -> str | None:
    """The text's answer as sign and digits, "-1234.50"; None if there is no clear one.

    Linear time; never raises.
    """
    for spelling, plain in SPELLINGS:
        text = re.sub(spelling, plain, text)
    own = text.partition("\nQuestion:")[0]  # a base model may continue with the next problem
    text = own if DIGITS.search(own) else text
    for region in reversed(text.split("####")[1:]):
        line = region.replace(r"\boxed", "").strip().partition("\n")[0]
        if marked := MARKED.fullmatch(line):
            return (marked[1] or "") + marked[2].replace(",", "")
    before, box, region = text.rpartition(r"\boxed{")
    if box:
        depths = [*accumulate(map({"{": 1, "}": -1}.get, region, repeat(0))), -1]
        region = region[: depths.index(-1)]  # a box that never closes runs to the end
        text = f"{before}|{region}"  # its sign may precede it
    found = [*DIGITS.finditer(text)]
    if not found or box and len(DIGITS.findall(region)) != 1:
        return None
    start = found[-1].start()
    line = re.split(r"\n|=|->|→|>>", text[:start])[-1]  # what an equation gives stands for itself
    *_, previous, touching = ["", *re.split(r"\s+", line)]
    before, number = TOUCHING.fullmatch(touching.replace("{", "")), WHOLE.match(text, start)
    if not before or not number or JOINED.search(previous):
        return None
    return (before[1] or "") + number[1].replace(",", "")


def to_item(row: dict) -> Item:
    """A GSM8K record, its solution without calculator marks such as <<48/2=24>>."""
    demo = re.sub("<<[^<>]*>>", "", row["answer"]).strip()
    _, mark, answer = demo.rpartition("####")
    if not mark or len(DIGITS.findall(answer)) != 1 or extract(f"####{answer}") is None:
        raise ValueError('"answer" has no "####" followed by one number')
    return Item(row["question"], answer.strip(), demo)


def read_items(path: Path) -> list[Item]:
    """The Items of a file of JSON lines. A bad line raises a ValueError that names it."""
    items = []
    for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                items.append(to_item(json.loads(line)))
            except (KeyError, TypeError, ValueError) as error:
                expected = '{"question": "...", "answer": "... #### 42"}'
                raise ValueError(f"{path}:{number}: {error!r}; expected {expected}") from None
    return items


class GSM8K(BaseTask):
    """Problems from the hub (data=None) or from DIR/train.jsonl and DIR/test.jsonl.

    An item's prompt is the question, its answer the gold number as written ("1,234"), and its demo
    the worked solution, up to "#### 1,234".
    """

    wish = "\nReason step by step; end with '#### ' and the number."  # what follows a question

    settings = dict(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        steps=200,
        prompts=16,
        max_tokens=512,
        micro_rows=4,
        lr=1e-6,
        eval_items=200,
    )

    def __init__(self, data: str | None = None):
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

    def plain(self, item: Item) -> str:
        """The prompt without a chat template; no token straddles the end of its last line."""
        return f"Question: {item.prompt}\nAnswer:\n"

    def encode(self, tokenizer, items: Iterable[Item]) -> list[list[int]]:
        """Prompt token ids of each item, through the tokenizer's chat template if it has one."""
        if not tokenizer.chat_template:
            return self.encode_texts(tokenizer, [self.plain(item) for item in items])
        return self.encode_chats(tokenizer, [item.prompt + self.wish for item in items])

    def repair(self, item: Item, answer: str, siblings: list[str]) -> Item:
        """The problem of correcting an answer, given siblings' answers, in plain language."""
        others = "".join(f"\n\nAnother answer to compare it with:\n{text}" for text in siblings)
        wish = "Find the mistake in the first answer. "
        wish += "Write that answer again, corrected, changing as little as you can."
        prompt = f"{item.prompt}\n\nA first answer:\n{answer}{others}\n\n{wish}"
        return Item(prompt, item.answer, "")

    def make_tokenizer(self):
        """Byte-level BPE learned on the training split, each digit a token; deterministic."""
        from tokenizers import ByteLevelBPETokenizer, Tokenizer
        from tokenizers.pre_tokenizers import Digits, Sequence
        from transformers import PreTrainedTokenizerFast

        bpe = ByteLevelBPETokenizer()  # its alphabet is all 256 bytes: any text can be encoded
        bpe.pre_tokenizer = Sequence([Digits(individual_digits=True), bpe.pre_tokenizer])
        texts = (self.plain(item) + item.demo for item in self.train)
        bpe.train_from_iterator(
            texts, VOCAB_SIZE, show_progress=False, special_tokens=["<pad>", "<eos>"]
        )
        core = Tokenizer.from_str(bpe.to_str())  # the plain class, the one that transformers wraps
        return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


Task = GSM8K
