r"""A chat model learns to answer in exactly five words: a task of your own in ten lines of code.

The reward pays for coming close, so that the first steps have something to compare. It takes many
values, so advantages are not divided by the std (scale="mean"). `make real` gets the model:

    python train.py --task tasks/five_words.py --model models/SmolLM2-135M-Instruct
"""

from tasks.chat import ChatTask

THINGS = (
    "bread, salt, a bridge, the moon, winter, a cat, music, a river, sleep, rain, a clock, gold, "
    "a forest, tea, a mirror, the sea, paper, a shadow, sand, a candle, snow, a horse, chess, ice, "
    "a garden, thunder, a ladder, honey, a map, smoke, a violin, a spider, wine, a tower, glass, "
    "a wheel, silk, a desert, wool, a lighthouse, copper, a market, fog, a whale, coffee, iron, "
    "a library, a tree, milk, a castle, dust, a dream, fire, a mountain, cotton, a robot, wind, "
    "a secret, stone, a poem"
)


class Task(ChatTask):
    settings = dict(max_tokens=24, steps=30, lr=1e-5, schedule="constant", scale="mean")
    prompts = [
        f"{ask} {thing}? Answer in exactly five words."
        for thing in THINGS.split(", ")
        for ask in ("What is", "What do people say about")
    ]

    def reward(self, text, item):
        return 1 / (1 + abs(len(text.split()) - 5))  # 1 for five words, 1/2 for four or six, ...
