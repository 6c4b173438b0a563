"""Draws pictures of which each is unique, without an imaging library. Sizes are in pixels."""

import base64
import random
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 448, 384
COLOURS = ((220, 35, 35), (245, 215, 25), (40, 160, 60), (35, 85, 215), (135, 50, 165), (20, 20, 20))
_GIF_COLOURS = 128


def picture(seed: int, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """Return a PNG file with some coloured discs and squares on a light background, at random by ``seed``."""
    rng = random.Random(seed)
    pixels = np.full((height, width, 3), 235 + seed % 20, dtype=np.uint8)
    rows, columns = np.ogrid[:height, :width]
    radius = 2 * min(width, height) // 15
    for place in rng.sample(range(9), rng.randint(1, 4)):
        x, y = width * (1 + 2 * (place % 3)) // 6, height * (1 + 2 * (place // 3)) // 6
        far_x, far_y = np.abs(columns - x), np.abs(rows - y)
        disc, square = far_x**2 + far_y**2 < radius**2, np.maximum(far_x, far_y) < radius
        pixels[disc if rng.random() < 0.5 else square] = rng.choice(COLOURS)
    pixels[0, :4] = np.frombuffer(struct.pack(">3L", seed, seed, seed), np.uint8).reshape(4, 3)  # no two are equal
    return _png(pixels)


def animation(seed: int, frames: int = 6, width: int = 96, height: int = 64) -> bytes:
    """Return a GIF file in which a square moves, at random by ``seed``, ten frames a second."""
    rng = random.Random(seed)
    colours = np.random.default_rng(seed).integers(0, 256, (_GIF_COLOURS, 3), np.uint8).tobytes()
    x, y, side = rng.randrange(width // 2), rng.randrange(height // 2), rng.randint(8, 24)
    parts = [b"GIF89a", struct.pack("<HHBBB", width, height, 0xF6, 0, 0), colours]
    for number in range(frames):
        pixels = np.full((height, width), seed % 100, np.uint8)
        pixels[y : y + side, x + 4 * number : x + 4 * number + side] = 100 + number
        parts += [b"!\xf9\4\4\x0a\0\0\0", b",", struct.pack("<HHHHB", 0, 0, width, height, 0), _lzw(pixels.tobytes())]
    return b"".join([*parts, b";"])


def data_url(file: bytes, mime: str = "image/png") -> str:
    """Return a file as an inline URL."""
    return f"data:{mime};base64,{base64.b64encode(file).decode()}"


def _lzw(pixels: bytes) -> bytes:
    """Return pixels below ``_GIF_COLOURS`` in the form of LZW, uncompressed: codes keep their eight bits as long as the
    table is cleared early enough."""
    clear, end, before_nine_bits = b"\x80", b"\x81", 120
    pieces = (pixels[at : at + before_nine_bits] for at in range(0, len(pixels), before_nine_bits))
    codes = b"".join(clear + piece for piece in pieces) + end
    blocks = (codes[at : at + 255] for at in range(0, len(codes), 255))
    return b"\7" + b"".join(bytes([len(block)]) + block for block in blocks) + b"\0"


def _png(pixels: NDArray[np.uint8]) -> bytes:
    height, width, _ = pixels.shape
    lines = np.hstack([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)])  # each begins with its filter, 0
    header = struct.pack(">LLBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">L", len(data)) + kind + data + struct.pack(">L", zlib.crc32(kind + data)) for kind, data in chunks
    )
