"""Hundreds of damaged images: each gets an answer or a typed error, no decoder dies, memory stays bounded."""

import io
import os
import random
import signal
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.image_cases import picture
from tests.support.serving import Served, image_part, served
from triptych.encode.loop import EncodeLoop

FORMATS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 80},
    "JPEG progressive": {"progressive": True},
    "PNG": {},
    "PNG palette": {},
    "WEBP": {"quality": 80},
    "WEBP lossless": {"lossless": True},
    "WEBP animated": {"save_all": True},
    "GIF": {},
    "GIF animated": {"save_all": True},
    "BMP": {},
    "BMP palette": {},
}
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def whole(name: str, seed: int) -> bytes:
    """Return an image in that format, with EXIF if the format supports it."""
    shown = picture(72, 56, seed)
    if "palette" in name:
        shown = shown.quantize(16)
    settings = dict(FORMATS[name])
    if "animated" in name:
        settings["append_images"] = [picture(72, 56, seed + 1), picture(72, 56, seed + 2)]
    kind = name.split(maxsplit=1)[0]
    if kind in ("JPEG", "PNG", "WEBP"):
        exif = Image.Exif()
        exif[274] = seed % 8 + 1
        settings["exif"] = exif
    out = io.BytesIO()
    shown.save(out, kind, **settings)
    return out.getvalue()


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Damage a file in a random way."""
    broken = bytearray(data)
    where = chance.randrange(len(broken)) if chance.random() < 0.5 else chance.randrange(min(64, len(broken)))
    match chance.randrange(7):
        case 0:
            return bytes(broken[:where])
        case 1:
            for _ in range(chance.choice((1, 2, 8, 64))):
                broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        case 2:
            form = chance.choice(("<L", ">L"))
            struct.pack_into(form, broken, min(where, len(broken) - 4), chance.choice(NUMBERS))
        case 3:
            struct.pack_into(
                chance.choice(("<H", ">H")), broken, min(where, len(broken) - 2), chance.choice(NUMBERS[:6])
            )
        case 4:
            del broken[where : where + chance.choice((1, 4, 100))]
        case 5:
            broken[where:where] = chance.randbytes(chance.choice((1, 4, 100, 5000)))
        case 6:
            other = chance.randrange(len(broken))
            broken[where:where] = broken[other : other + chance.choice((4, 50, 500))]
    return bytes(broken)


@pytest.fixture(scope="module")
def decoding(folder: Path) -> Iterator[Served]:
    with served(folder) as service:
        yield service


def workers(service: Served) -> list[int]:
    hosts = [host for instance in service.running.instances for host in instance.loops]
    (host,) = [host for host in hosts if isinstance(host, EncodeLoop)]
    return host.preprocessing.preprocessors.pids


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


@pytest.mark.parametrize("number", [pytest.param(9, id="99"), pytest.param(91, id="1001", marks=pytest.mark.slow)])
def test_damaged_pictures(decoding: Served, number: int) -> None:
    chance = random.Random(number)
    expected = decoding.text([image_part(whole("PNG", 1))], max_tokens=2)
    before = workers(decoding)
    found: Counter[str] = Counter()
    for name in FORMATS:
        for seed in range(number):
            data = damaged(whole(name, seed), chance)
            response = decoding.post([image_part(data)], max_tokens=1)
            if response.status_code == 200:
                found["answered"] += 1
                continue
            error = response.json()["error"]
            assert response.status_code in (400, 413), (name, seed, response.text)
            assert error["param"] == "messages[0].content[0].image_url.url"
            assert error["code"].endswith(("_media", "media_too_large", "bad_media_size")), error
            assert "/" not in error["message"]
            found[error["code"]] += 1
    assert workers(decoding) == before, "no decoder was lost"
    assert max(map(peak_bytes, before)) < 256 * 2**20
    assert decoding.text([image_part(whole("PNG", 1))], max_tokens=2) == expected
    assert found["answered"] > number
    assert sum(found.values()) - found["answered"] > 3 * number, found


def test_a_killed_decoder_fails_no_request(decoding: Served) -> None:
    before = workers(decoding)
    expected = decoding.text([image_part(whole("PNG", 2))])
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert decoding.text([image_part(whole("PNG", 3))])
    assert decoding.text([image_part(whole("PNG", 2))]) == expected
    assert not set(before) & set(workers(decoding))
