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
from triptych.layers.encoder import Encoder
from triptych.layers.pinned import to_cpu
from triptych.models.base import EncoderInput
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


def workers_factory(model: ModelBundle, encode: EncodeConfig, num_threads: int) -> Callable[[], PreprocessWorkers]:
    """Start the workers of the first encode loop, which import while the encoder is loaded. Return a function that
    returns these, and starts others for each later loop; it doesn't wait for them."""
    limits = Limits(memory_bytes=encode.decode_memory_mb * 2**20, seconds=encode.decode_timeout)
    # one worker keeps several threads of the encoder busy, which compute while it decodes
    num_workers = encode.decode_workers or max(1, num_threads // 4)

    def start() -> PreprocessWorkers:
        return PreprocessWorkers(model.checkpoint.folder, num_workers, limits)

    first = [start()]
    return lambda: first.pop() if first else start()


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
