"""Wording of questions and answers: templates with alternatives, articles, lists."""

import re
from dataclasses import dataclass
from random import Random

from demo.pictures import COLOURS, SHAPES, Scene, Thing

PICTURE = "(picture|picture|image|photo|drawing)"
THINGS = "(shapes|shapes|things|objects|figures)"
COLOUR = "(colour|color)"

# Phrases before and after a question.
_OPENINGS = ("", "", "", "", "", "please tell me: ", "hi! ", "hello, ", "look at this. ", "question: ", "so, ")
_CLOSINGS = ("", "", "", "", "", " please answer briefly.", " thanks!", " please.", " answer in a few words.")


def say(template: str, rng: Random) -> str:
    """Replace the innermost groups `(a|b|c)` of a template by one of their alternatives, until none is left."""
    while (group := re.search(r"\(([^()]*)\)", template)) is not None:
        template = template[: group.start()] + rng.choice(group[1].split("|")) + template[group.end() :]
    return template


def dress(question: str, rng: Random) -> str:
    """Vary a question as users do: with or without polite phrases and final punctuation, in any letter case."""
    if rng.random() < 0.2:
        question = question.rstrip("?.")
    question = rng.choice(_OPENINGS) + question + rng.choice(_CLOSINGS)
    case = rng.random()
    if case < 0.1:
        return question.upper()
    return question[0].upper() + question[1:] if case < 0.6 else question


def a(noun: str) -> str:
    """Return the noun with its article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def listing(nouns: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(nouns[:-1]), nouns[-1]]) if len(nouns) > 1 else nouns[0]


def description(scene: Scene) -> str:
    """Describe everything in the picture, in reading order."""
    if scene.number:
        return f"the number {scene.number}"
    return listing([a(str(thing)) for thing in scene.things])


@dataclass(frozen=True)
class Noun:
    """A noun phrase with a shape, a colour, both, or neither, for things of any kind."""

    shape: str = ""
    colour: str = ""

    def __str__(self) -> str:
        return f"{self.colour} {self.shape or 'shape'}".strip()

    @property
    def plural(self) -> str:
        """A template of the plural."""
        several = f"{self.shape}{'es' if self.shape == 'cross' else 's'}" if self.shape else THINGS
        return f"{self.colour} {several}".strip()

    def found(self, scene: Scene) -> list[Thing]:
        """Return the things in the scene that the noun describes."""
        return [
            thing for thing in scene.things if self.shape in ("", thing.shape) and self.colour in ("", thing.colour)
        ]


def some_noun(scene: Scene, rng: Random, shaped: float = 0.65, coloured: float = 0.65) -> Noun:
    """Return a noun with a shape and a colour with the given probabilities, mostly of a thing in the scene."""
    shape, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
    if scene.things and rng.random() < 0.7:
        thing = rng.choice(scene.things)
        shape, colour = thing.shape, thing.colour
        if rng.random() < 0.15:
            shape = rng.choice(SHAPES)
    with_shape, with_colour = rng.random() < shaped, rng.random() < coloured
    return Noun(shape if with_shape or not with_colour else "", colour if with_colour else "")


def definite_noun(scene: Scene, rng: Random, shaped: float = 0.65, coloured: float = 0.65) -> Noun | None:
    """Return a noun that describes exactly one thing or (one time in ten) none; None if no such noun was found."""
    wanted = 0 if rng.random() < 0.1 else 1
    for _ in range(12):
        noun = some_noun(scene, rng, shaped, coloured)
        if len(noun.found(scene)) == wanted:
            return noun
    return None
