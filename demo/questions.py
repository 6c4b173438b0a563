"""Training and evaluation data of the demo model: pictures, questions about them, and answers.

Training uses seeds below 10**9; validation and evaluation have their own ranges above, so that evaluation examples are
never trained on, whatever the seed of a training run.
"""

import io
from dataclasses import dataclass
from random import Random

from PIL import Image

from demo.pairs import ask_pair
from demo.pictures import Scene, as_file, draw, random_digits, random_number, random_shapes
from demo.single import QuestionAnswer, ask, describe
from demo.wording import dress

TRAINING_SEEDS = range(10**9)
EVALUATION_SEEDS = range(10**9, 10**9 + 10**6)
VALIDATION_SEEDS = range(10**9 + 10**6, 10**9 + 2 * 10**6)

# The parts of a user's message in order: texts, and indices of pictures.
Components = tuple[str | int, ...]

_LEADS = (
    "look at this:",
    "here is a picture:",
    "my picture:",
    "consider the following.",
    "look:",
    "this is a picture.",
)
_ORDINALS = (("first picture:", "second picture:"), ("picture 1:", "picture 2:"), ("one:", "two:"), ("here is", "and"))


@dataclass(frozen=True)
class Example:
    """One question as a user sends it, with its answer."""

    pictures: list[Image.Image]
    parts: Components
    answer: str
    kind: str


@dataclass(frozen=True)
class Quiz:
    """Some pictures and several questions about them."""

    pictures: list[Image.Image]
    asked: list[QuestionAnswer]


@dataclass(frozen=True)
class Lesson:
    """Difficulty of quizzes in a phase of the curriculum."""

    most_things: int = 4
    most_digits: int = 3
    pairs: float = 0.3
    """Probability of two pictures."""
    described: float = 0.0
    """Probability that the first question asks for everything in the picture, which teaches most."""
    hard: float = 0.0
    """Share of questions of the kinds that take longest to learn."""


HARD = ("count", "pair: count", "pair: equal", "pair: larger", "pair: more", "pair: where", "pair: which")

FINAL_LESSON = Lesson()


def make_example(seed: int) -> Example:
    """Return the example of a seed, always the same."""
    rng = Random(seed)
    quiz = make_quiz(rng, 1)
    (asked,) = quiz.asked
    return Example(quiz.pictures, arrange(len(quiz.pictures), asked.question, rng), asked.answer, asked.kind)


def make_quiz(rng: Random, questions: int, lesson: Lesson = FINAL_LESSON) -> Quiz:
    """Return up to `questions` different questions about one picture or about two."""
    scenes = _two_scenes(rng) if rng.random() < lesson.pairs else [_scene(rng, lesson)]
    asked: dict[str, QuestionAnswer] = {}
    if len(scenes) == 1 and rng.random() < lesson.described:
        one = describe(scenes[0], "", rng)
        asked[one.question] = QuestionAnswer(one.kind, dress(one.question, rng), one.answer)
    for _ in range(questions):
        one = _ask(scenes, rng)
        if rng.random() < lesson.hard:
            one = next((other for _ in range(20) if (other := _ask(scenes, rng)).kind in HARD), one)
        asked.setdefault(one.question, QuestionAnswer(one.kind, dress(one.question, rng), one.answer))
    quiz = Quiz([through_file(draw(scene, rng), rng) for scene in scenes], list(asked.values()))
    if rng.random() < 0.015:
        return Quiz([], [QuestionAnswer("no picture", one.question, "there is no picture") for one in quiz.asked])
    return quiz


def _ask(scenes: list[Scene], rng: Random) -> QuestionAnswer:
    if len(scenes) == 2:
        return ask_pair(scenes[0], scenes[1], rng)
    return ask(scenes[0], rng.choice(("", "", " in the picture", " in the image", " in this picture")), rng)


def arrange(pictures: int, question: str, rng: Random) -> Components:
    """Return the message: the question before, between or after the pictures, perhaps with an introduction."""
    every = tuple(range(pictures))
    layout = rng.random()
    if layout < 0.5 or not pictures:
        return (*every, question)
    if layout < 0.75:
        return (question, *every)
    if layout < 0.87 or pictures == 1:
        return (rng.choice(_LEADS), *every, question)
    if layout < 0.93:
        return (0, question, 1)
    one, two = rng.choice(_ORDINALS)
    return (one, 0, two, 1, question)


def _scene(rng: Random, lesson: Lesson) -> Scene:
    if rng.random() < 0.3:
        return random_number(rng, random_digits(rng)[: lesson.most_digits])
    return random_shapes(rng, lesson.most_things)


def _two_scenes(rng: Random) -> list[Scene]:
    """Return two scenes of shapes, two of numbers of up to two digits (often equal), or one of each."""
    kind = rng.random()
    if kind < 0.5:
        return [random_shapes(rng, 3), random_shapes(rng, 3)]
    if kind < 0.9:
        one, two = random_digits(rng)[:2], random_digits(rng)[:2]
        return [random_number(rng, one), random_number(rng, one if rng.random() < 0.25 else two)]
    scenes = [random_shapes(rng, 3), random_number(rng)]
    rng.shuffle(scenes)
    return scenes


def through_file(picture: Image.Image, rng: Random) -> Image.Image:
    """Return the picture as decoded from a file: half of them are JPEG, which changes the pixels."""
    if rng.random() < 0.5:
        return picture
    return Image.open(io.BytesIO(as_file(picture, rng.randint(60, 95)))).convert("RGB")
