"""What train.py asks of a task: items, the ids of their prompts, and a reward of each answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    prompt: str  # "37+48="
    answer: str  # "85"
    demo: str  # one demonstration, right or wrong
    before: tuple[tuple[str, str], ...] = ()  # the chat so far: (("system", "Be brief."),)
    others: tuple[str, ...] = ()  # answers that are right as well


def after_thought(text: str) -> str:
    """What follows the last </think>: a thought is no answer, and one that is cut off has none."""
    answer = text.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


class BaseTask:
    """What train.py asks of a task. Yours is a class Task that extends this one.

    It sets `train` and `test`, lists of Items, and has a reward. An evaluation takes the first of
    `test`, so they should be in a random order. For a chat model tasks/chat.py has a shorter way.
    """

    train: list[Item]
    test: list[Item]
    settings = {}  # flags of train.py whose defaults differ for this task
    symbols = "="  # characters that the scratch model knows, beside those of the items
    wish = ""  # what follows every prompt
    opened = False  # whether the chat template begins the answer with <think>
    template = {}  # arguments of the chat template, such as {"enable_thinking": False}

    def reward(self, text: str, item: Item) -> float:
        """Any finite number; 1 means right. Of the answer without its end-of-text token, and
        without what the model thought before it."""

    def rewards(self, texts: list[str], items: list[Item]) -> list[float]:
        """Of many answers at once, with their thoughts. A judge that compares answers takes this
        one's place: those to one prompt are next to each other, group_size of them in training."""
        pairs = zip(texts, items, strict=True)
        return [self.reward(self.answer(text), item) for text, item in pairs]

    def answer(self, text: str) -> str:
        """What the reward sees of a text. Some chat templates have opened a thought already."""
        return after_thought("<think>" * self.opened + text)

    def encode(self, tokenizer, items: Iterable[Item]) -> list[list[int]]:
        """Prompt token ids of each item: a user's message, if the model has a chat template.

        Raises ValueError if the template loses a text, as one may that wants other turns.
        """
        asked = [[*item.before, ("user", item.prompt + self.wish)] for item in items]
        if not tokenizer.chat_template:
            texts = ["\n".join(text for _, text in turns) for turns in asked]
            return self.encode_texts(tokenizer, texts)
        chats = [[{"role": role, "content": text} for role, text in turns] for turns in asked]
        rendered = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=False, **self.template
        )
        for turns, chat in zip(asked, rendered, strict=True):
            for _, text in turns:
                if text.strip() not in chat:
                    raise ValueError(f"the chat template loses {text!r}: {chat!r}")
        self.opened = rendered[0].rstrip().endswith("<think>")
        return tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def encode_texts(self, tokenizer, texts: list[str]) -> list[list[int]]:
        """The ids of texts that an answer continues: with what the tokenizer puts before a text,
        such as BOS, and without an EOS behind it."""
        rows = tokenizer(texts)["input_ids"]
        return [row[:-1] if row[-1] == tokenizer.eos_token_id else row for row in rows]

    def shares(self, items: Iterable[Item], texts: Iterable[str]) -> dict[str, float]:
        """More to log of an evaluation's answers."""
        return {}

    def repair(self, item: Item, answer: str, siblings: list[str], demo: str = "") -> Item:
        """The problem of correcting an answer, given siblings' answers (ibpo)."""
        return Item(item.prompt + "=".join([answer, *siblings, ""]), item.answer, demo)

    def correction(self, item: Item, siblings: int = 1) -> Item:
        """What the warm start shows instead of the item if answers are corrected (ibpo)."""
        return item

    def make_tokenizer(self):
        """Of the scratch model: one token per character, plus padding and the end of the answer."""
        from tokenizers import Tokenizer, decoders, models
        from transformers import PreTrainedTokenizerFast

        said = "".join(item.prompt + item.demo for item in self.train + self.test)
        others = sorted({*said} - {*self.symbols})
        vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *self.symbols, *others])}
        tokenizer = Tokenizer(models.BPE(vocab, merges=[], unk_token="<pad>"))
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        )
