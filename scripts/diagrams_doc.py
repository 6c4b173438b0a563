"""Draws the diagrams of the documentation into docs/pictures. A test fails when one of them is out of date.

.venv/bin/python -m scripts.diagrams_doc
"""

from scripts.generated import DOCS
from scripts.svg import Arrow, Box, Message, Work, chart, sequence

FOLDER = DOCS / "pictures"


def diagrams() -> dict[str, str]:
    """Each diagram's file name and content."""
    return {
        "request.svg": _request(),
        "request-split.svg": _request_split(),
        "transfer.svg": _transfer(),
        "transfer-states.svg": _transfer_states(),
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


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in diagrams().items():
        (FOLDER / name).write_text(drawing)
