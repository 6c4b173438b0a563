"""Builds what an instance encodes with."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from triptych.config import EncodeConfig
from triptych.encode.cache import EmbeddingRows, EncoderCache
from triptych.encode.jobs import EncodeQueue
from triptych.encode.loop import EncodeLoop
from triptych.encode.workers import PreprocessWorkers
from triptych.errors import StartError
from triptych.layers.cuda_graphs import recorder
from triptych.layers.encoder import Encoder
from triptych.layers.pinned import to_cpu
from triptych.models.base import EncoderInput
from triptych.models.shared.encoder import recordable_calls
from triptych.sandbox.protocol import Limits
from triptych.server.instance import Instance
from triptych.server.model_bundle import ModelBundle
from triptych.transfer.sender import Sender


class EncoderRunner:
    """The encoder as the encode loop sees it: inputs in, the bytes of embeddings out."""

    def __init__(self, encoder: Encoder, dtype: torch.dtype) -> None:
        self._encoder = encoder
        self._dtype = dtype

    def __call__(self, inputs: Sequence[EncoderInput]) -> list[EmbeddingRows]:
        """Return the embeddings of each input, uint8 of shape (rows, row_bytes)."""
        with torch.inference_mode():
            return [_as_bytes(rows) for rows in to_cpu([r.to(self._dtype) for r in self._encoder.encode(inputs)])]


def record_towers(encoder: Encoder, device: torch.device) -> None:
    """On a GPU, let the calls of an encoder's towers be CUDA graphs, for the shapes of inputs that come often."""
    if device.type == "cuda":
        record = recorder(device)
        for calls in recordable_calls(encoder):
            calls.record = record


def encode_loop_factory(
    model: ModelBundle,
    encoder: Encoder,
    instance: Instance,
    encode: EncodeConfig,
    sender: Sender,
    *,
    start_workers: Callable[[], PreprocessWorkers],
) -> Callable[[], EncodeLoop]:
    """Return a function that builds encode loops, one after another, which share one cache."""
    cache = EncoderCache(encode.encode_cache_mb * 2**20)
    return lambda: EncodeLoop(
        preprocessors=_ready(start_workers()),
        encoder=EncoderRunner(encoder, model.weights.activations),
        queue=EncodeQueue(encode.encode_batch_patches),
        cache=cache,
        sender=sender,
        layout=model.row_layout,
        compute=instance.compute,
        wake=instance.channel.wake,
        address=instance.channel.address,
        send=instance.send,
    )


class WorkerStarter:
    """Starts the workers of each encode loop: those of the first one at once, so that they import while the encoder is
    loaded."""

    def __init__(self, model: ModelBundle, encode: EncodeConfig, num_threads: int) -> None:
        self._limits = Limits(memory_bytes=encode.decode_memory_mb * 2**20, seconds=encode.decode_timeout)
        # one worker keeps several threads of the encoder busy, which compute while it decodes
        self._num_workers = encode.decode_workers or max(1, num_threads // 4)
        self._folder = model.checkpoint.folder
        self._first: PreprocessWorkers | None = self._start()

    def __call__(self) -> PreprocessWorkers:
        """Return new workers, which may not be ready yet."""
        first, self._first = self._first, None
        return first or self._start()

    def close(self) -> None:
        """End the first workers, unless a loop has them."""
        if self._first:
            self._first.close()
            self._first = None

    def _start(self) -> PreprocessWorkers:
        return PreprocessWorkers(self._folder, self._num_workers, self._limits)


def _ready(workers: PreprocessWorkers) -> PreprocessWorkers:
    try:
        workers.wait_until_ready()
    except StartError:
        workers.close()
        raise
    return workers


def _as_bytes(rows: torch.Tensor) -> EmbeddingRows:
    """Return a copy: a view would keep the whole batch in memory for as long as the cache keeps one item."""
    as_bytes: EmbeddingRows = rows.contiguous().view(torch.uint8).numpy()
    return np.array(as_bytes)
