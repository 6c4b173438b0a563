"""Draws the diagrams of the documentation into docs/pictures. A test fails when one of them is out of date.

.venv/bin/python -m scripts.diagrams_doc
"""

from scripts.generated import DOCS
from scripts.svg import Arrow, Box, Message, Work, chart, sequence
from triptych.server.life import TRANSITIONS, LifeState

FOLDER = DOCS / "pictures"


def diagrams() -> dict[str, str]:
    """Each diagram's file name and content."""
    return {
        "request.svg": _request(),
        "request-split.svg": _request_split(),
        "transfer.svg": _transfer(),
        "transfer-states.svg": _transfer_states(),
        "instance-life.svg": _instance_life(),
    }


def _request() -> str:
    client, frontend, encode, language = range(4)
    return sequence(
        "A request with one image in topology 1E1PD",
        ["client", "frontend", "encode instance", "language instance"],
        [
            Message(client, frontend, "POST (HTTP)"),
            Work(frontend, "parse, fetch, plan, tokenize"),
            Work(frontend, "admit, place"),
            Message(frontend, language, "Generate"),
            Work(language, "look up prefix cache"),
            Message(language, frontend, "EncodeNeeded"),
            Message(frontend, encode, "Encode"),
            Work(encode, "look up encoder cache"),
            Message(encode, frontend, "FetchMedia"),
            Message(frontend, encode, "MediaBytes", bulk=True),
            Work(encode, "preprocess, encode"),
            Message(encode, language, "Offer"),
            Message(language, encode, "Grant"),
            Message(encode, language, "rows", bulk=True),
            Message(encode, language, "Wrote"),
            Work(language, "prefill landed rows"),
            Message(language, encode, "Done"),
            Work(language, "decode, sample"),
            Message(language, frontend, "Tokens"),
            Message(frontend, client, "text (SSE)"),
        ],
    )


def _request_split() -> str:
    frontend, prefill, decode = range(3)
    return sequence(
        "Prefill and decode on separate instances, topology 1E1P1D",
        ["frontend", "prefill instance", "decode instance"],
        [
            Message(frontend, decode, "Generate"),
            Message(decode, frontend, "PrefillNeeded"),
            Message(frontend, prefill, "Prefill"),
            Work(prefill, "fetch embeddings, prefill"),
            Message(prefill, decode, "Offer (KV rows)"),
            Message(decode, prefill, "Grant"),
            Message(prefill, decode, "rows, layer by layer", bulk=True),
            Message(prefill, decode, "Wrote"),
            Message(prefill, decode, "Prefilled (first token)"),
            Message(decode, prefill, "Done"),
            Work(decode, "decode, sample"),
            Message(decode, frontend, "Tokens"),
        ],
        spacing=250,
    )


def _transfer() -> str:
    producer, consumer = range(2)
    return sequence(
        "One transfer",
        ["producer", "consumer"],
        [
            Work(consumer, "expect: join the queue"),
            Message(producer, consumer, "Offer(rows, layout, fabrics)"),
            Work(consumer, "check layout, choose fabric"),
            Message(consumer, producer, "Grant(rows 0–15, extents)"),
            Message(producer, consumer, "bytes, over the fabric", bulk=True),
            Message(producer, consumer, "Wrote(rows 0–15, checksum)"),
            Work(consumer, "verify, prefill, reuse blocks"),
            Message(consumer, producer, "Grant(rows 16–31, extents)"),
            Message(producer, consumer, "bytes, over the fabric", bulk=True),
            Message(producer, consumer, "Wrote(rows 16–31, checksum)"),
            Message(consumer, producer, "Done"),
            Work(producer, "release rows"),
        ],
        spacing=330,
    )


def _transfer_states() -> str:
    left, middle, right, end = 110, 350, 590, 800
    top, bottom = 70, 190
    boxes = [
        Box("BOOTSTRAPPING", left, top),
        Box("WAITING_FOR_INPUT", middle, top),
        Box("TRANSFERRING", right, top),
        Box("SUCCESS", end, top, 110),
        Box("FAILED", middle, bottom, 110),
    ]
    arrows = [
        Arrow(((left + 85, top), (middle - 85, top)), "Offer", (230, top - 8)),
        Arrow(((middle + 85, top), (right - 85, top)), "Grant", (470, top - 8)),
        Arrow(((right + 85, top), (end - 55, top)), "last row read", (710, top - 24)),
        Arrow(((right, top - 17), (right, 24), (middle, 24), (middle, top - 17)), "rows revoked", (470, 18)),
        Arrow(((left, top + 17), (left, bottom), (middle - 55, bottom)), "deadline, Abort", (200, bottom - 8)),
        Arrow(((middle, top + 17), (middle, bottom - 17)), "deadline, Abort", (middle, 128)),
        Arrow(((right, top + 17), (right, bottom), (middle + 55, bottom)), "deadline, Abort", (500, bottom - 8)),
    ]
    return chart("States of a transfer, as the consumer sees it", 880, 230, boxes, arrows)


def _instance_life() -> str:
    starting, registering, serving, changing, draining, leaving, ended = LifeState
    places = {
        starting: (100, 110),
        registering: (330, 110),
        serving: (570, 110),
        changing: (880, 110),
        draining: (570, 210),
        leaving: (570, 310),
        ended: (100, 310),
    }
    # the line of each transition, and where its label is; some have the label of another
    lines: dict[tuple[LifeState, LifeState], tuple[tuple[tuple[int, int], ...], tuple[int, int] | None]] = {
        (starting, registering): (((185, 110), (245, 110)), (215, 100)),
        (starting, ended): (((100, 127), (100, 293)), (100, 210)),
        (registering, serving): (((415, 104), (485, 104)), (450, 94)),
        (registering, draining): (((370, 127), (370, 210), (485, 210)), (430, 202)),
        (registering, leaving): (((290, 127), (290, 302), (485, 302)), (387, 292)),
        (serving, registering): (((485, 118), (415, 118)), (450, 136)),
        (serving, changing): (((655, 104), (795, 104)), (725, 94)),
        (serving, draining): (((570, 127), (570, 193)), (570, 165)),
        (serving, leaving): (((640, 127), (640, 165), (700, 165), (700, 303), (655, 303)), None),
        (changing, registering): (((880, 93), (880, 50), (330, 50), (330, 93)), (600, 44)),
        (changing, serving): (((795, 118), (655, 118)), (725, 136)),
        (changing, draining): (((840, 127), (840, 210), (655, 210)), (770, 202)),
        (changing, leaving): (((920, 127), (920, 318), (655, 318)), (800, 310)),
        (draining, leaving): (((570, 227), (570, 293)), (570, 262)),
        (leaving, ended): (((485, 318), (185, 318)), (330, 336)),
    }
    arrows = []
    for before, following in TRANSITIONS.items():
        for after, why in following.items():
            points, at = lines[before, after]
            arrows.append(Arrow(points, why if at else "", at or (0, 0)))
    boxes = [Box(str(state), *place) for state, place in places.items()]
    return chart("The life of an instance", 1000, 350, boxes, arrows)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in diagrams().items():
        (FOLDER / name).write_text(drawing)
