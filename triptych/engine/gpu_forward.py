"""Forward passes on a GPU, of steps in host memory: inputs go there in one pinned copy, and steps that only decode are
replayed as CUDA graphs."""

from dataclasses import replace

import torch
from torch import Tensor

from triptych.engine.decode_graphs import DecodeGraphs
from triptych.layers.attention.base import KVTensors
from triptych.layers.decoder import AfterLayer, Decoder, ForwardBatch
from triptych.layers.pinned import to_device


class GpuForward:
    """``Forward`` for a decoder on ``device``: launches the step and doesn't wait for it. Whether a step is replayed
    depends on nothing but the step, so that all ranks of a group do the same."""

    def __init__(self, decoder: Decoder, device: torch.device, graphs: DecodeGraphs | None) -> None:
        """``graphs`` None: every step is launched kernel by kernel."""
        self._decoder = decoder
        self._device = device
        self._graphs = graphs

    def __call__(self, batch: ForwardBatch, cache: KVTensors, after_layer: AfterLayer | None = None) -> Tensor:
        """As ``Decoder.forward``; the logits hold until the next step."""
        if self._graphs is not None and self._graphs.suits(batch):
            return self._graphs.replay(batch)
        logits: Tensor = self._decoder(on_device(batch, self._device), cache, after_layer)
        return logits


def on_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """A step's tensors on a device, in one copy. Its page tables, which only the attention backend knows how to read,
    follow with the first layer."""
    attention = batch.attention
    tokens, positions, media_index, media_embeddings, logits_index, slots = to_device(
        [batch.tokens, batch.positions, batch.media_index, batch.media_embeddings, batch.logits_index, attention.slots],
        device,
    )
    return ForwardBatch(
        tokens, positions, media_index, media_embeddings, logits_index, attention=replace(attention, slots=slots)
    )
