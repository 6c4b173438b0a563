"""``--custom-encoder-class triptych_dynamo.TriptychEncoder``."""

import os
from pathlib import Path

import httpx
import torch
from dynamo.vllm.multimodal_utils.custom_encoder import Preprocessed, Qwen3VLImageEncoding, VisionEncoderBackend

from triptych.client import EncodeClient, EncodeError

URL, KEY_FILE = "TRIPTYCH_ENCODE_URL", "TRIPTYCH_ENCODE_KEY_FILE"
FAMILIES = ("qwen3_vl", "qwen3_5")
"""How the ``model_type`` of each family begins whose decoders Dynamo gives rows with a grid."""
AT_A_TIME = 32
"""Images that a worker asks for at a time. The service queues and batches them."""
_REFUSALS = (httpx.codes.BAD_REQUEST, httpx.codes.REQUEST_ENTITY_TOO_LARGE)


class TriptychEncoder(VisionEncoderBackend[str, Qwen3VLImageEncoding, Qwen3VLImageEncoding]):  # type: ignore[misc]
    """Asks a service's ``/v1/encode`` for each image.

    ``TRIPTYCH_ENCODE_URL`` is the service's, ``TRIPTYCH_ENCODE_KEY_FILE`` a file with a key that has the right
    ``encode``. Dynamo calls ``preprocess`` for each image by itself, and ``forward_batch`` for those of unrelated
    requests together, so that the first is where an image is asked for: its fault is its request's alone."""

    preprocess_concurrency = AT_A_TIME

    def build(self, model_id: str) -> None:
        """Connect. Raises RuntimeError without an address, and OSError for a file that can't be read."""
        if not (url := os.environ.get(URL)):
            raise RuntimeError(f"{URL} names no service")
        file = os.environ.get(KEY_FILE)
        self._client = EncodeClient(url, Path(file).read_text().strip() if file else "")

    def preprocess(self, raw: str) -> "Preprocessed[Qwen3VLImageEncoding]":
        """Return the rows of the image at a URL, on the CPU. Raises ValueError, which Dynamo makes a 400 of, for an
        image that the service refuses, and RuntimeError for all else."""
        try:
            (item,) = self._client.encode({"type": "image_url", "image_url": {"url": raw}})
        except EncodeError as error:
            if error.status in _REFUSALS:
                raise ValueError(str(error)) from None
            raise RuntimeError(f"the encode service answered {error.status}: {error}") from error
        except httpx.HTTPError as error:
            raise RuntimeError(f"the encode service can't be reached: {error!r}") from error
        if not item.model_type.startswith(FAMILIES):
            raise RuntimeError(f"the encode service has a {item.model_type}, and Dynamo takes {', '.join(FAMILIES)}")
        rows = torch.from_numpy(item.rows.copy())
        return Preprocessed(Qwen3VLImageEncoding(rows, item.grid_thw), cost=len(rows))

    def forward_batch(
        self, items: list[Qwen3VLImageEncoding], target_bucket: int | None = None
    ) -> list[Qwen3VLImageEncoding]:
        """Return what there is already."""
        return list(items)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
