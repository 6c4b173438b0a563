"""Embeddings that clients send in place of images."""

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.api.context import ApiContext
from triptych.api.generation import RequestContext
from triptych.api.schemas import ImageRowsPart
from triptych.errors import MediaMismatch, RequestError, UnsupportedMedia
from triptych.messages.rows import RowLayout
from triptych.prompt.prompt import MediaPart

ROWS_FIELD = "image_embeds.image_embeds"


async def given_rows(api: ApiContext, param: str, part: ImageRowsPart, context: RequestContext) -> MediaPart:
    """Return the rows of a part as the prompt builder takes them. Raises RequestError, naming ``param``, and
    Unavailable while no encode instance says what rows are like."""
    try:
        if not api.frontend.media.enable_mm_embeds:
            raise UnsupportedMedia("this service takes no embeddings: --enable-mm-embeds lets it")
        layout = api.lifecycle.row_layout()
        data = await context.media.decode(part.image_embeds.image_embeds)
        context.hold(2 * len(data))  # float16 may become float32
        rows = await api.executor.run(context.record.client, lambda: read_rows(data, layout))
    except RequestError as error:
        error.param = param
        raise
    in_time, height, width = part.image_embeds.image_grid_thw
    return MediaPart(
        type="image", data=rows.tobytes(), field=ROWS_FIELD, grid=(in_time, height, width), num_rows=len(rows)
    )


def read_rows(data: bytes, layout: RowLayout) -> NDArray[Any]:
    """Return the rows of a NumPy file in a layout's dtype; bfloat16 as its bits. Raises UnsupportedMedia for what isn't
    such a file, and MediaMismatch for rows of another width, and for values that aren't finite."""
    try:
        values = np.lib.format.read_array(BytesIO(data), allow_pickle=False)
    except Exception:  # noqa: BLE001 - NumPy evaluates the header as Python does, which fails in many ways
        raise UnsupportedMedia("not a NumPy file") from None
    if values.ndim != 2 or not len(values) or values.dtype not in (np.float32, np.float16):
        raise UnsupportedMedia("not rows of float32 or float16")
    if values.shape[1] != layout.width:
        raise MediaMismatch(f"rows of {values.shape[1]} values, and the model's have {layout.width}")
    if layout.dtype == "bfloat16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rows: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # ties to even
        finite = bool(np.isfinite(values).all())
    else:
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(values, dtype=layout.dtype)
        finite = bool(np.isfinite(rows).all())
    if not finite:
        raise MediaMismatch(f"values that aren't finite in {layout.dtype}")
    return rows
