"""Questions about two pictures, with their answers."""

from collections.abc import Callable
from random import Random

from demo.pictures import Scene
from demo.single import QuestionAnswer, ask
from demo.wording import THINGS, a, say, some_noun

PICTURES = "(pictures|pictures|images|photos|drawings)"
WHICH = "(which|what) (picture|picture|image|photo|drawing)"

PairAsker = Callable[[Scene, Scene, Random], QuestionAnswer | None]


def one_of_two(first: Scene, second: Scene, rng: Random) -> QuestionAnswer:
    """Ask any question about one picture, of the first or of the second."""
    index = rng.randrange(2)
    name = rng.choice(
        (
            f"the {('(first|first|1st)', '(second|second|2nd)')[index]} (picture|picture|image|photo|drawing)",
            f"(picture|image) {('(1|one)', '(2|two)')[index]}",
        )
    )
    asked = ask((first, second)[index], f" in {name}", rng)
    return QuestionAnswer(f"pair: {asked.kind}", asked.question, asked.answer)


def more(first: Scene, second: Scene, rng: Random) -> QuestionAnswer | None:
    """Ask which picture has more (or fewer) things."""
    if first.number or second.number:
        return None
    counts = len(first.things), len(second.things)
    fewer = rng.random() < 0.3
    template = f"{WHICH} (has|has|shows|contains) {'fewer' if fewer else 'more'} {THINGS}?"
    if counts[0] == counts[1]:
        answer = "both have the same number"
    else:
        answer = "the first" if (counts[0] > counts[1]) != fewer else "the second"
    return QuestionAnswer("pair: more", say(template, rng), answer)


def both_show(first: Scene, second: Scene, rng: Random) -> QuestionAnswer:
    """Ask whether both pictures show a kind of thing."""
    noun = some_noun(rng.choice((first, second)), rng)
    template = (
        f"(do|do) (both|both|the two) {PICTURES} (show|have|contain) {a(str(noun))}?"
        f"|is there {a(str(noun))} in (both|the two) {PICTURES}?"
    )
    answer = "yes" if noun.found(first) and noun.found(second) else "no"
    return QuestionAnswer("pair: both", say(f"({template})", rng), answer)


def which_shows(first: Scene, second: Scene, rng: Random) -> QuestionAnswer:
    """Ask which of the pictures shows a kind of thing, or a number."""
    if first.number or second.number:
        name, found = "(number|printed number)", (bool(first.number), bool(second.number))
    else:
        noun = some_noun(rng.choice((first, second)), rng)
        name, found = str(noun), (bool(noun.found(first)), bool(noun.found(second)))
    answer = {(True, False): "the first", (False, True): "the second", (True, True): "both", (False, False): "neither"}
    template = (
        f"(in|in) {WHICH} is there {a(name)}?" if rng.random() < 0.2 else f"{WHICH} (shows|has|contains) {a(name)}?"
    )
    return QuestionAnswer("pair: which", say(template, rng), answer[found])


def same_count(first: Scene, second: Scene, rng: Random) -> QuestionAnswer | None:
    """Ask whether the pictures have the same number of things."""
    if first.number or second.number:
        return None
    template = (
        f"(do (the|both|the two) {PICTURES} have the same number of {THINGS}?"
        f"|are there (as many|equally many) {THINGS} in both {PICTURES}?)"
    )
    return QuestionAnswer("pair: same", say(template, rng), "yes" if len(first.things) == len(second.things) else "no")


def equal_numbers(first: Scene, second: Scene, rng: Random) -> QuestionAnswer | None:
    """Ask whether the printed numbers are equal."""
    if not (first.number and second.number):
        return None
    template = (
        "(are the (numbers|two numbers) (equal|the same)?|is it the same number in both pictures?"
        f"|do (both|the two) {PICTURES} show the same number?)"
    )
    return QuestionAnswer("pair: equal", say(template, rng), "yes" if first.number == second.number else "no")


def larger_number(first: Scene, second: Scene, rng: Random) -> QuestionAnswer | None:
    """Ask which printed number is larger (or smaller), or which picture has it."""
    if not (first.number and second.number) or first.number == second.number:
        return None
    smaller = rng.random() < 0.35
    word = "(smaller|lower)" if smaller else "(larger|larger|bigger|greater|higher)"
    wins = int((int(second.number) > int(first.number)) != smaller)
    if rng.random() < 0.6:
        template = (
            f"(which number is {word}?|which (one|of the numbers|of the two numbers) is {word}?"
            f"|what is the {word} number?)"
        )
        return QuestionAnswer("pair: larger", say(template, rng), (first.number, second.number)[wins])
    template = f"{WHICH} (has|shows) the {word} number?"
    return QuestionAnswer("pair: larger", say(template, rng), ("the first", "the second")[wins])


PAIR_ASKERS: tuple[tuple[PairAsker, float], ...] = (
    *((one_of_two, 6), (more, 2), (both_show, 1.7), (which_shows, 1.7), (same_count, 0.8)),
    *((equal_numbers, 2), (larger_number, 4)),
)


def ask_pair(first: Scene, second: Scene, rng: Random) -> QuestionAnswer:
    """Return a random question that makes sense for the two scenes."""
    askers, chances = zip(*PAIR_ASKERS, strict=True)
    while True:
        asker: PairAsker = rng.choices(askers, chances)[0]
        if (asked := asker(first, second, rng)) is not None:
            return asked
