"""Questions about one picture, with their answers.

An asker takes the scene, the words that name the picture (as " in the second picture"; empty if there is only one) and
a random source. It returns None if its question makes no sense for the scene.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.pictures import PLACES, Scene
from demo.wording import COLOUR, PICTURE, THINGS, a, definite_noun, description, say, some_noun


@dataclass(frozen=True)
class QuestionAnswer:
    """A question and the only answer that counts as right."""

    kind: str
    """The kind of question, for statistics."""
    question: str
    answer: str


Asker = Callable[[Scene, str, Random], QuestionAnswer | None]


def describe(scene: Scene, where: str, rng: Random) -> QuestionAnswer:
    """Ask for everything in the picture, in reading order."""
    where = where or f" in (the|this|the) {PICTURE}"
    picture = where.removeprefix(" in ")
    template = rng.choice(
        (
            f"(what is|what is|what's|what do you see|what can you see|what is shown){where}?",
            f"describe {picture}.",
            f"what does {picture} show?",
            f"(tell me|say) what (is|you see){where}.",
            f"(what {THINGS} are (there|shown)|list the {THINGS}|what {THINGS} can you see){where}?",
        )
    )
    return QuestionAnswer("describe", say(template, rng), description(scene))


def count(scene: Scene, where: str, rng: Random) -> QuestionAnswer:
    """Ask for the number of things: of a shape, of a colour, of both, or in total."""
    if rng.random() < 0.3:
        template = (
            f"(how many {THINGS} (are there|are there|do you see|can you see|are shown){where}( in all| in total||)?"
        )
        return QuestionAnswer("count", say(template + f"|count the {THINGS}{where}.)", rng), str(len(scene.things)))
    noun = some_noun(scene, rng)
    template = rng.choice(
        (
            f"how many {noun.plural} (are there|are there|do you see|can you see|are shown){where}?",
            f"how many {noun.plural} (are there|are there|does the picture show|can you see){where}?",
            f"count the {noun.plural}{where}.",
        )
    )
    if noun.colour and not noun.shape and rng.random() < 0.3:
        template = f"how many {THINGS}{where} are {noun.colour}?"
    return QuestionAnswer("count", say(template, rng), str(len(noun.found(scene))))


def colour_of(scene: Scene, where: str, rng: Random) -> QuestionAnswer | None:
    """Ask for the colour of the only thing of a shape, of the thing at a place, or of the printed number."""
    if scene.number:
        template = f"(what|which) {COLOUR} (is the number|are the digits|does the number have){where}?"
        return QuestionAnswer("colour", say(template, rng), scene.ink)
    if rng.random() < 0.2:
        thing = rng.choice(scene.things)
        template = f"(what|which) {COLOUR} is the (shape|thing|object) {_at(thing.place)}{where}?"
        return QuestionAnswer("colour", say(template, rng), thing.colour)
    noun = definite_noun(scene, rng, shaped=1, coloured=0)
    if noun is None:
        return None
    template = (
        f"((what|which) {COLOUR} is the {noun}{where}?|(what|which) {COLOUR} does the {noun}{where} have?"
        f"|what is the {COLOUR} of the {noun}{where}?|tell me the {COLOUR} of the {noun}{where}.)"
    )
    found = noun.found(scene)
    return QuestionAnswer("colour", say(template, rng), found[0].colour if found else f"there is no {noun}")


def shape_of(scene: Scene, where: str, rng: Random) -> QuestionAnswer | None:
    """Ask for the shape of the only thing of a colour."""
    noun = definite_noun(scene, rng, shaped=0, coloured=1)
    if noun is None or not noun.found(scene):
        return None
    template = (
        f"((what|which) shape{where} is {noun.colour}?|what shape is the {noun.colour} (one|thing|object){where}?"
        f"|what {noun.colour} (shape|thing|object) (is there|do you see){where}?)"
    )
    return QuestionAnswer("shape", say(template, rng), a(noun.found(scene)[0].shape))


def where_is(scene: Scene, where: str, rng: Random) -> QuestionAnswer | None:
    """Ask for the place of the only thing that a noun describes."""
    noun = definite_noun(scene, rng)
    if noun is None:
        return None
    template = (
        f"(where is the {noun}{where}?|where is the {noun}{where}?|where's the {noun}{where}?"
        f"|where do you see the {noun}{where}?|what is the (place|position) of the {noun}{where}?"
        f"|where can i find the {noun}{where}?|in which (place|part) is the {noun}{where}?)"
    )
    found = noun.found(scene)
    return QuestionAnswer("where", say(template, rng), PLACES[found[0].place] if found else f"there is no {noun}")


def what_is_at(scene: Scene, where: str, rng: Random) -> QuestionAnswer | None:
    """Ask for the thing at a place; the answer is "nothing" if the place is empty."""
    if scene.number:
        return None
    place = rng.randrange(9) if rng.random() < 0.25 else rng.choice(scene.things).place
    template = f"(what is|what is|what's|what do you see|what can you see|which shape is) {_at(place)}{where}?"
    found = [thing for thing in scene.things if thing.place == place]
    return QuestionAnswer("place", say(template, rng), a(str(found[0])) if found else "nothing")


def is_there(scene: Scene, where: str, rng: Random) -> QuestionAnswer:
    """Ask whether a thing exists."""
    noun = some_noun(scene, rng)
    template = (
        f"(is there {a(str(noun))}{where}?|is there any {noun}{where}?|are there any {noun.plural}{where}?"
        f"|(do|can) you see {a(str(noun))}{where}?)"
    )
    return QuestionAnswer("exists", say(template, rng), "yes" if noun.found(scene) else "no")


def read_number(scene: Scene, where: str, rng: Random) -> QuestionAnswer:
    """Ask for the printed number."""
    template = rng.choice(
        (
            f"(what|which) number (is (this|shown|printed|written|there)|do you see|can you read){where}?",
            f"(what|which) number is{where or f' in (the|this) {PICTURE}'}?",
            f"(read|tell me|give me) the number{where}.",
            f"what is the (number|number printed|printed number){where}?",
            f"what does {where.removeprefix(' in ') or f'(the|this) {PICTURE}'} say?",
        )
    )
    return QuestionAnswer("number", say(template, rng), scene.number or "there is no number")


def is_there_number(scene: Scene, where: str, rng: Random) -> QuestionAnswer:
    """Ask whether a number is printed."""
    template = f"(is there a number{where}?|(do|can) you see a number{where}?|is a number printed{where}?)"
    return QuestionAnswer("exists", say(template, rng), "yes" if scene.number else "no")


# The weight of each question, for shapes and for a printed number.
SHAPE_ASKERS: tuple[tuple[Asker, float], ...] = (
    *((describe, 4), (count, 5), (colour_of, 2.5), (shape_of, 1.2), (where_is, 4), (what_is_at, 3.5), (is_there, 2.5)),
    *((read_number, 0.3), (is_there_number, 0.3)),
)
NUMBER_ASKERS: tuple[tuple[Asker, float], ...] = (
    *((read_number, 6), (describe, 1.5), (colour_of, 1.5), (is_there_number, 0.4), (is_there, 0.2), (count, 0.3)),
)


def ask(scene: Scene, where: str, rng: Random) -> QuestionAnswer:
    """Return a random question that makes sense for the scene."""
    askers, chances = zip(*(NUMBER_ASKERS if scene.number else SHAPE_ASKERS), strict=True)
    while True:
        asker: Asker = rng.choices(askers, chances)[0]
        if (asked := asker(scene, where, rng)) is not None:
            return asked


def _at(place: int) -> str:
    name = PLACES[place].replace("center", "(center|centre|middle)")
    return f"(in|at|in) the {name}" + ("" if place == 4 else "( corner|)" if place in (0, 2, 6, 8) else "")
