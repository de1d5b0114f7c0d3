"""A chat model learns to answer in exactly five words: a task of one's own in ten lines.

python train.py --task llm/five_words.py --model models/SmolLM2-135M-Instruct --max-tokens 24
"""

from llm.chat import ChatTask

THINGS = "the sea, a cat, the moon, winter, bread, a bridge, music, a river, sleep, the rain"


class Task(ChatTask):
    prompts = [f"{ask} {thing}." for ask in ("Describe",) for thing in THINGS.split(", ")]

    def reward(self, text, item):
        """1 for five words, and less the further away the number of words is."""
        return float(len(text.split()) == 5)
