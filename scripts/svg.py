"""Small SVG drawings for the documentation: sequence diagrams, and boxes with arrows. They need no network, no font
and no library, and have a background of their own, so that they are readable on light and dark pages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

FONT = "font-family='system-ui, sans-serif' font-size='13'"
INK, LINE, FILL, NOTE, BULK = "#1f2937", "#6b7280", "#e0e7ff", "#fef3c7", "#4f46e5"
MARGIN, LANE_TOP, STEP = 16, 62, 36


@dataclass(frozen=True)
class Message:
    """An arrow between two lanes. ``bulk`` arrows carry rows: they are drawn thick."""

    sender: int
    receiver: int
    text: str
    bulk: bool = False


@dataclass(frozen=True)
class Work:
    """What happens in one lane between messages."""

    lane: int
    text: str


def sequence(title: str, lanes: Sequence[str], steps: Sequence[Message | Work], spacing: int = 210) -> str:
    """A sequence diagram: one lane a process, time runs down."""
    width = 2 * MARGIN + spacing * len(lanes)
    height = LANE_TOP + STEP * (len(steps) + 1) + MARGIN
    centres = [MARGIN + spacing // 2 + spacing * lane for lane in range(len(lanes))]
    parts = list(_lanes(lanes, centres, spacing, height))
    for index, step in enumerate(steps):
        y = LANE_TOP + STEP * (index + 1)
        if isinstance(step, Work):
            parts += _work(step, centres[step.lane], y, spacing)
        else:
            parts += _message(step, centres, y)
    return _document(title, width, height, parts)


@dataclass(frozen=True)
class Box:
    """A rectangle with a name; ``x`` and ``y`` are its centre."""

    name: str
    x: int
    y: int
    width: int = 170


@dataclass(frozen=True)
class Arrow:
    """An arrow through ``points``; its ``text`` stands centred at ``at``."""

    points: tuple[tuple[int, int], ...]
    text: str = ""
    at: tuple[int, int] = (0, 0)


def chart(title: str, width: int, height: int, boxes: Sequence[Box], arrows: Sequence[Arrow]) -> str:
    """Boxes and arrows at given places."""
    parts = []
    for box in boxes:
        parts.append(_rect(box.x - box.width // 2, box.y - 17, box.width, 34, FILL))
        parts.append(_text(box.x, box.y + 5, box.name, weight="600"))
    for arrow in arrows:
        points = " ".join(f"{x},{y}" for x, y in arrow.points)
        parts.append(f"<polyline points='{points}' fill='none' stroke='{LINE}' stroke-width='1.5' {_HEAD}/>")
        if arrow.text:
            parts.append(_label(*arrow.at, arrow.text))
    return _document(title, width, height, parts)


_HEAD = "marker-end='url(#head)'"


def _lanes(lanes: Sequence[str], centres: Sequence[int], spacing: int, height: int) -> Iterator[str]:
    for name, x in zip(lanes, centres, strict=True):
        yield f"<line x1='{x}' y1='{LANE_TOP}' x2='{x}' y2='{height - MARGIN}' stroke='{LINE}' stroke-dasharray='4 4'/>"
        yield _rect(x - spacing // 2 + 10, MARGIN, spacing - 20, 34, FILL)
        yield _text(x, MARGIN + 22, name, weight="600")


def _work(step: Work, x: int, y: int, spacing: int) -> Iterator[str]:
    width = min(spacing - 12, 16 + 7 * len(step.text))
    yield _rect(x - width // 2, y - 15, width, 26, NOTE)
    yield _text(x, y + 3, step.text)


def _message(step: Message, centres: Sequence[int], y: int) -> Iterator[str]:
    start, end = centres[step.sender], centres[step.receiver]
    tip = end - 4 if end > start else end + 4
    colour, weight = (BULK, 4) if step.bulk else (INK, 1.5)
    head = "marker-end='url(#bulk)'" if step.bulk else _HEAD
    yield f"<line x1='{start}' y1='{y}' x2='{tip}' y2='{y}' stroke='{colour}' stroke-width='{weight}' {head}/>"
    yield _label((start + end) // 2, y - 7, step.text)


def _rect(x: int, y: int, width: int, height: int, fill: str) -> str:
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='5' fill='{fill}' stroke='{LINE}'/>"


def _text(x: int, y: int, text: str, weight: str = "400") -> str:
    return f"<text x='{x}' y='{y}' text-anchor='middle' font-weight='{weight}' fill='{INK}'>{escape(text)}</text>"


def _label(x: int, y: int, text: str) -> str:
    """Text with a white outline, readable across lines."""
    outline = "stroke='#ffffff' stroke-width='4' stroke-linejoin='round'"
    return f"<text x='{x}' y='{y}' text-anchor='middle' {outline}>{escape(text)}</text>{_text(x, y, text)}"


def _document(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    heads = "".join(
        f"<marker id='{name}' markerUnits='userSpaceOnUse' markerWidth='12' markerHeight='12' refX='8' refY='5' "
        f"orient='auto'><path d='M0,0 L10,5 L0,10 z' fill='{colour}'/></marker>"
        for name, colour in (("head", INK), ("bulk", BULK))
    )
    size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT} role='img' aria-label='{escape(title)}'>\n"
        f"<title>{escape(title)}</title>\n<defs>{heads}</defs>\n"
        f"<rect width='{width}' height='{height}' rx='8' fill='#ffffff'/>\n{body}\n</svg>\n"
    )
