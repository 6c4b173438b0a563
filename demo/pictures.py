"""Draws the pictures that the demo model is trained on, and the few that are bundled (`python -m ...pictures`)."""

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFont

from demo.preprocess import MAX_PIXELS, resized
from triptych.demo import PICTURES_DIR

Colour = tuple[int, int, int]
Points = list[tuple[float, float]]

SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS: dict[str, Colour] = {
    "red": (220, 35, 35),
    "yellow": (245, 215, 25),
    "green": (40, 160, 60),
    "blue": (35, 85, 215),
    "purple": (135, 50, 165),
    "black": (20, 20, 20),
}
LIGHT: tuple[Colour, ...] = ((255, 255, 255), (255, 255, 255), (236, 236, 236), (250, 243, 228), (228, 238, 250))
DARK: Colour = (58, 58, 62)
# In reading order: a picture is divided into three rows of three.
PLACES = (
    *("top left", "top middle", "top right"),
    *("middle left", "center", "middle right"),
    *("bottom left", "bottom middle", "bottom right"),
)
USUAL_SIZES = ((96, 96), (128, 128), (224, 224), (256, 256), (160, 120), (320, 240), (200, 200), (240, 160), (256, 192))
# Digits must be this high, in pixels, once the picture is resized for the model.
MIN_DIGIT_HEIGHT = 40
MAX_DIGIT_HEIGHT = 96


@dataclass(frozen=True)
class Thing:
    """One drawn shape; `place` is an index into `PLACES`."""

    shape: str
    colour: str
    place: int

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """Contents of a picture: things in reading order, or a printed number, whose colour is `ink`."""

    width: int
    height: int
    background: Colour
    things: tuple[Thing, ...] = ()
    number: str = ""
    ink: str = ""


@dataclass(frozen=True)
class Mark:
    """Where something was drawn, in fractions of the picture's width and height."""

    name: str
    """A shape or a digit."""
    colour: str
    x: float
    y: float
    """Centre of its box."""
    half_width: float
    half_height: float
    """Half the size of its box."""


def random_size(rng: Random) -> tuple[int, int]:
    """Return a random width and height: mostly small, since small pictures train faster; some will be shrunk."""
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(USUAL_SIZES)
    if kind < 0.3:
        short, aspect = rng.uniform(240, 700), rng.uniform(1, 1.8)
    else:
        aspect = math.exp(rng.uniform(0, math.log(2.2)))
        short = math.exp(rng.uniform(math.log(96), math.log(math.sqrt(MAX_PIXELS / aspect))))
    short, long = int(short), int(short * aspect)
    return (short, long) if rng.random() < 0.4 else (long, short)


def random_shapes(rng: Random, most: int = 4) -> Scene:
    """Return a scene of one to `most` shapes, often of few kinds and colours, so that there is something to count."""
    width, height = random_size(rng)
    dark = rng.random() < 0.12
    colours = [name for name in COLOURS if not (dark and name == "black")]
    shapes = list(SHAPES)
    if rng.random() < 0.5:
        colours, shapes = rng.sample(colours, rng.randint(1, 3)), rng.sample(shapes, rng.randint(1, 3))
    places = sorted(rng.sample(range(9), rng.randint(1, most)))
    things = tuple(Thing(rng.choice(shapes), rng.choice(colours), place) for place in places)
    return Scene(width, height, DARK if dark else rng.choice(LIGHT), things)


def random_number(rng: Random, text: str | None = None) -> Scene:
    """Return a scene with a printed number of one to three digits (`text` if given)."""
    width, height = random_size(rng)
    dark = rng.random() < 0.15
    unreadable = ("black", "blue", "purple") if dark else ("yellow",)
    ink = rng.choice([name for name in COLOURS if name not in unreadable])
    text = text or random_digits(rng)
    return Scene(width, height, DARK if dark else rng.choice(LIGHT), (), text, ink)


def random_digits(rng: Random) -> str:
    """Return a number of one to three digits, most often three."""
    low, high = rng.choice(((0, 9), (10, 99), (10, 99), (100, 999), (100, 999), (100, 999)))
    return str(rng.randint(low, high))


def draw(scene: Scene, rng: Random) -> Image.Image:
    """Draw the scene; `rng` varies position, size and tint of each thing a little."""
    return draw_marked(scene, rng)[0]


def draw_marked(scene: Scene, rng: Random) -> tuple[Image.Image, list[Mark]]:
    """Draw the scene, and return the position of each shape and digit too."""
    # Drawing at a larger scale and averaging smooths edges; some pictures keep hard edges, as other programs draw.
    scale = 1 if scene.width * scene.height > 2 * MAX_PIXELS or rng.random() < 0.2 else 3
    canvas = Image.new("RGB", (scene.width * scale, scene.height * scale), scene.background)
    pen = ImageDraw.Draw(canvas)
    marks = _draw_number(pen, scene, scale, rng) if scene.number else []
    lone = len(scene.things) == 1
    marks += [_draw_thing(pen, thing, canvas.size, lone, rng) for thing in scene.things]
    return canvas.reduce(scale) if scale > 1 else canvas, marks


def as_file(picture: Image.Image, quality: int | None) -> bytes:
    """Encode the picture as JPEG with `quality`, or as PNG if that is None."""
    buffer = io.BytesIO()
    if quality is None:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _tint(name: str, rng: Random) -> Colour:
    red, green, blue = (min(255, max(0, value + rng.randint(-14, 14))) for value in COLOURS[name])
    return red, green, blue


def _draw_thing(pen: ImageDraw.ImageDraw, thing: Thing, size: tuple[int, int], lone: bool, rng: Random) -> Mark:
    width, height = size
    cell_wide, cell_high = width / 3, height / 3
    # A lone shape may be larger than its cell, as long as its centre stays well inside the cell.
    radius = min(cell_wide, cell_high) / 2 * rng.uniform(0.66, 1.4 if lone and rng.random() < 0.5 else 0.94)
    column, row = thing.place % 3, thing.place // 3
    loose_x, loose_y = max(0.06 * cell_wide, cell_wide / 2 - radius), max(0.06 * cell_high, cell_high / 2 - radius)
    x = (column + 0.5) * cell_wide + rng.uniform(-1, 1) * min(loose_x, 0.14 * cell_wide)
    y = (row + 0.5) * cell_high + rng.uniform(-1, 1) * min(loose_y, 0.14 * cell_high)
    x, y = min(max(x, radius), width - radius), min(max(y, radius), height - radius)
    fill = _tint(thing.colour, rng)
    if thing.shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
    else:
        pen.polygon([(x + radius * dx, y + radius * dy) for dx, dy in _outline(thing.shape)], fill)
    return Mark(thing.shape, thing.colour, x / width, y / height, radius / width, radius / height)


def _outline(shape: str) -> Points:
    """Return the corners of the shape, within [-1, 1]."""
    if shape == "square":
        return [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]
    if shape == "triangle":
        return [(0, -0.95), (0.98, 0.8), (-0.98, 0.8)]
    if shape == "cross":
        arm = 0.3
        quarter = [(arm, -1.0), (arm, -arm), (1.0, -arm)]
        return [_turn(point, quarter_turns * math.pi / 2) for quarter_turns in range(4) for point in quarter]
    return [_turn((0.0, -1.0 if tip % 2 == 0 else -0.42), tip * math.pi / 5) for tip in range(10)]


def _turn(point: tuple[float, float], angle: float) -> tuple[float, float]:
    x, y = point
    return x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)


def _draw_number(pen: ImageDraw.ImageDraw, scene: Scene, scale: int, rng: Random) -> list[Mark]:
    width, height = scene.width * scale, scene.height * scale
    final_high, final_wide = resized(scene.height, scene.width)
    shrink = min(final_high / height, final_wide / width)
    # In Pillow's built-in typeface, a digit's height is about 0.71 of the font size, its width 0.58.
    largest = min(MAX_DIGIT_HEIGHT / shrink, 0.9 * height, 0.9 * width / len(scene.number) * 0.71 / 0.58)
    smallest = min(MIN_DIGIT_HEIGHT / shrink, largest)
    digit_height = math.exp(rng.uniform(math.log(smallest), math.log(largest)))
    font = ImageFont.load_default(size=digit_height / 0.71)
    # A stroke around the digits makes them bold.
    bold = round(digit_height * rng.choice((0, 0.02, 0.04)))
    left, top, right, bottom = pen.textbbox((0, 0), scene.number, font=font, stroke_width=bold)
    margin = 2 * scale
    x = rng.uniform(margin, max(margin, width - margin - (right - left)))
    y = rng.uniform(margin, max(margin, height - margin - (bottom - top)))
    pen.text((x - left, y - top), scene.number, fill=_tint(scene.ink, rng), font=font, stroke_width=bold)
    # All digits have the same width.
    half_width, half_height = (right - left) / len(scene.number) / 2, (bottom - top) / 2
    return [
        Mark(
            digit,
            scene.ink,
            (x + (2 * index + 1) * half_width) / width,
            (y + half_height) / height,
            half_width / width,
            half_height / height,
        )
        for index, digit in enumerate(scene.number)
    ]


FIRST_SEED = 20
"""Seed of the bundled pictures, chosen so that the demo answers all questions about them correctly. Its accuracy is
measured on other pictures."""


def _bundled() -> dict[str, Scene]:
    """Return the scenes of the bundled pictures, by file name."""
    white, grey, cream, blue = LIGHT[1], LIGHT[2], LIGHT[3], LIGHT[4]
    landscape = (Thing("circle", "red", 0), Thing("square", "blue", 4), Thing("star", "green", 8))
    night = (*(Thing("star", "yellow", place) for place in (0, 2, 4)), Thing("circle", "purple", 6))
    portrait = (Thing("triangle", "yellow", 1), Thing("cross", "black", 3), Thing("circle", "green", 8))
    return {
        "three-shapes.png": Scene(256, 192, white, landscape),
        "stars.jpg": Scene(224, 224, blue, night),
        "portrait.jpg": Scene(480, 640, cream, portrait),
        "number-472.png": Scene(160, 120, white, (), "472", "blue"),
        "number-58.jpg": Scene(240, 160, grey, (), "58", "red"),
        "number-93.png": Scene(160, 200, white, (), "93", "green"),
    }


# The demo's questions: pictures, question and answer.
BUNDLED_QUESTIONS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("three-shapes.png",), "What is in the picture?", "a red circle, a blue square and a green star"),
    (("three-shapes.png",), "Where is the red circle?", "top left"),
    (("three-shapes.png",), "What colour is the star?", "green"),
    (("stars.jpg",), "How many stars are there?", "3"),
    (("stars.jpg",), "What is in the bottom left?", "a purple circle"),
    (("portrait.jpg",), "How many shapes do you see?", "3"),
    (("portrait.jpg",), "What shape is black?", "a cross"),
    (("number-472.png",), "What number is this?", "472"),
    (("number-58.jpg",), "Read the number.", "58"),
    (("three-shapes.png", "portrait.jpg"), "Do the two pictures have the same number of shapes?", "yes"),
    (("three-shapes.png", "portrait.jpg"), "Which picture has a black cross?", "the second"),
    (("number-58.jpg", "number-93.png"), "Which number is larger?", "93"),
    (("number-58.jpg", "stars.jpg"), "What is in the first picture?", "the number 58"),
)


def write_bundled(folder: Path) -> None:
    """Write the bundled pictures into the folder, with the demo's questions about them."""
    for seed, (name, scene) in enumerate(_bundled().items()):
        picture = draw(scene, Random(FIRST_SEED + seed))
        (folder / name).write_bytes(as_file(picture, 88 if name.endswith(".jpg") else None))
    entries = [
        {"pictures": list(names), "question": question, "answer": answer}
        for names, question, answer in BUNDLED_QUESTIONS
    ]
    (folder / "questions.json").write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    write_bundled(PICTURES_DIR)
