"""Runs the encoder on an instance's compute thread. The only file of stage E that knows a device."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from triptych.compute_thread import ComputeThread
from triptych.encode.store import EmbeddingRows
from triptych.layers.cuda_graphs import recorder
from triptych.layers.encoder import Encoder
from triptych.layers.pinned import to_cpu
from triptych.models.base import EncoderInput
from triptych.models.shared.encoder import recordable_calls


class EncoderRunner:
    """Encodes one batch of parts after another."""

    def __init__(self, encoder: Encoder, dtype: torch.dtype, compute: ComputeThread) -> None:
        """Rows have ``dtype``, in which the decoder computes."""
        self._encoder = encoder
        self._dtype = dtype
        self._compute = compute
        self.busy_seconds = 0.0
        """Total time that batches have taken on the compute thread."""

    def start(self, inputs: Sequence[EncoderInput]) -> "Future[list[EmbeddingRows]]":
        """Encode a batch on the compute thread: the result of ``encode``."""
        return self._compute.submit(self.encode, inputs)

    def encode(self, inputs: Sequence[EncoderInput]) -> list[EmbeddingRows]:
        """Return the rows of each input, uint8 of shape (rows, row_bytes)."""
        began = self._compute.busy_seconds
        with torch.inference_mode():
            rows = [_as_bytes(rows) for rows in to_cpu([r.to(self._dtype) for r in self._encoder.encode(inputs)])]
        self.busy_seconds += self._compute.busy_seconds - began
        return rows


def record_towers(encoder: Encoder, device: torch.device) -> None:
    """On a GPU, let the calls of an encoder's towers be CUDA graphs, for the shapes of inputs that come often."""
    if device.type == "cuda":
        record = recorder(device)
        for calls in recordable_calls(encoder):
            calls.record = record


def _as_bytes(rows: torch.Tensor) -> EmbeddingRows:
    """Return a copy: a view would keep the whole batch in memory for as long as the cache keeps one item."""
    as_bytes: EmbeddingRows = rows.contiguous().view(torch.uint8).numpy()
    return np.array(as_bytes)
