"""Snapshots of a service, made up."""

import msgspec

from triptych.observe.pipeline import (
    EventView,
    InstanceView,
    Pipeline,
    PoolView,
    RequestMark,
    ServiceView,
    StageView,
    Verdict,
)

NOW = 1_800_000_000.0
HOSTILE = "\x1b[2J\x07[red]a\u202eb[/]\nc\x9b"
"""Clears a terminal, rings, and reverses the direction of writing, where it is shown as it is."""

ENCODER = InstanceView("e0", "E", "serving", 0.97, 4, 14, 0.045, [], 0.0, 25e6, 0.31)
DECODER = InstanceView("pd0", "PD", "serving", 0.23, 3, 0, 0.012, [], 25e6, 0.0, None)

BUSY = Pipeline(
    time=NOW,
    service=ServiceView("demo", "0.1.0", "2E1PD", True, "", NOW - 11_530, 23),
    frontend=StageView("frontend", 2, 0.12, 0.34, 0.55),
    stages=[
        StageView("encode", 34, 2.1, 1.3, 0.96),
        StageView("prefill", 0, 0.0, 0.2, 0.23),
        StageView("decode", 0, 0.0, 0.2, 0.23),
    ],
    instances=[
        msgspec.structs.replace(ENCODER, pools=[PoolView("encode_cache_bytes", 512 * 10**6, 0, 410 * 10**6)]),
        msgspec.structs.replace(ENCODER, name="e1", busy=0.96, restarts=2),
        msgspec.structs.replace(
            DECODER, pools=[PoolView("kv_pages", 4096, 1917, 300), PoolView("media_blocks", 64, 2, 0)]
        ),
    ],
    requests=[
        RequestMark(
            f"{number:016x}",
            f"chatcmpl-{number:032x}",
            "encoding" if number < 20 else "decoding",
            ["e0"],
            NOW - 12.1 + number,
            2,
            1234 * (20 <= number < 22),
            "",
        )
        for number in range(23)
    ],
    events=[
        EventView(1, NOW - 40, "joined", "e1 joined as E"),
        EventView(2, NOW - 30, "lost", "e1 was lost; 3 items go to e0"),
        EventView(3, NOW - 20, "recovered", "chatcmpl-7 goes on at e0"),
    ],
    verdict=Verdict(
        "encode",
        "Encode binds: e0 and e1 97 % busy, 34 items queued for 2.1 s; prefill waits for embeddings 71 % of the time",
        "Add an encode instance: triptych scale E=3",
    ),
)


def large() -> Pipeline:
    """64 instances and 200 requests in flight, with names of the length that the service gives them."""
    instances = [
        msgspec.structs.replace(BUSY.instances[number % 3], name=f"{BUSY.instances[number % 3].role.lower()}{number}")
        for number in range(64)
    ]
    requests = [
        msgspec.structs.replace(BUSY.requests[0], key=f"{number:016x}", id=f"chatcmpl-{number:032x}")
        for number in range(200)
    ]
    return msgspec.structs.replace(BUSY, instances=instances, requests=requests)


def nothing() -> Pipeline:
    """A frontend that has just started."""
    service = ServiceView("demo", "0.1.0", "", False, "no instance of E has joined", NOW, 0)
    return Pipeline(NOW, service, StageView("frontend", 0, 0.0, 0.0, 0.0), [], [], [], [], Verdict("", "", ""))


def hostile() -> Pipeline:
    """Every text is meant to harm a terminal, and every number is nonsense."""
    fields = {name: _spoiled(msgspec.to_builtins(value)) for name, value in msgspec.structs.asdict(BUSY).items()}
    return msgspec.convert(fields, Pipeline)


def _spoiled(value: object) -> object:
    if isinstance(value, dict):
        return {name: _spoiled(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_spoiled(one) for one in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return HOSTILE + value + "漢" * 300
    return -(2**62) if isinstance(value, int) else 1e300
