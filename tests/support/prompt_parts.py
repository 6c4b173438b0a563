"""Messages as the prompt builder takes them."""

import io
from typing import Any

from PIL import Image


def png(width: int, height: int, color: str = "red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, "PNG")
    return out.getvalue()


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image", "data": data}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}
