"""Puzzles of reasoning-gym 0.1.25 as a task: a hundred kinds, which it makes and grades.

    pip install -e '.[puzzles]'
    PYTHONHASHSEED=0 python train.py --task llm/puzzles.py --model models/SmolLM2-135M-Instruct

`name` and `options` choose another kind. Two thirds also pay for a wrong answer, and 37 of these
pay a sentence by the share of it that is the answer. So only a full score counts here. Avoid
game_of_life_halting, which pays for any text, puzzle24, which pays for "6 + 6 + 6 + 6", and those
whose answer is None: boxnet, graph_color, propositional_logic, rubiks_cube, rush_hour. Without
PYTHONHASHSEED, five kinds make other puzzles in each process, such as ransom_note.

In 5 minutes of one CPU core the sampled answers of SmolLM2-135M go from 0.13 to 0.47 right, because
it learns to say True to every puzzle; its greedy answers fall from 0.81 to 0.47.
"""

import reasoning_gym

from llm.chat import ChatTask


class Task(ChatTask):
    name, options = "course_schedule", {}
    settings = dict(max_tokens=8, prompts=4, steps=10, lr=2e-5, schedule="constant", eval_items=32)

    def __init__(self):
        # Seed 1 has the puzzles of seed 0, one place later. So all are of one seed, none is there
        # twice, and some of them are held out.
        self.dataset = reasoning_gym.create_dataset(self.name, seed=0, size=1000, **self.options)
        self.puzzles = {puzzle["question"]: puzzle for puzzle in self.dataset}
        self.prompts = [(text, str(puzzle["answer"])) for text, puzzle in self.puzzles.items()]
        super().__init__()

    def reward(self, text, item):
        return float(self.dataset.score_answer(text.strip(), self.puzzles[item.prompt]) == 1)
