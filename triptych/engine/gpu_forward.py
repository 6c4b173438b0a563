"""Forward passes on a GPU for steps in host memory. Inputs are moved in one pinned copy; most steps replay CUDA
graphs."""

from dataclasses import replace

import torch
from torch import Tensor

from triptych.engine.step_graphs import StepGraphs
from triptych.layers.attention.base import KVTensors
from triptych.layers.decoder import AfterLayer, Decoder, ForwardBatch
from triptych.layers.pinned import to_device


class GpuForward:
    """``Forward`` for a decoder on ``device``, asynchronous. Whether a step is replayed depends on the step alone, so
    that all ranks of a group do the same."""

    def __init__(self, decoder: Decoder, device: torch.device, graphs: StepGraphs | None) -> None:
        """Without ``graphs``, every step is launched kernel by kernel."""
        self._decoder = decoder
        self._device = device
        self._graphs = graphs

    def __call__(self, batch: ForwardBatch, cache: KVTensors, after_layer: AfterLayer | None = None) -> Tensor:
        """Launch a step, as ``Decoder.forward``. The logits are valid until the next step."""
        if self._graphs is not None and self._graphs.can_replay(batch):
            logits = self._graphs.replay(batch)
            if after_layer is not None:
                for layer in range(len(cache.layers)):
                    after_layer(layer)
            return logits
        launched: Tensor = self._decoder(on_device(batch, self._device), cache, after_layer)
        return launched


def on_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """Move a step's tensors to a device in one copy, except the page tables: the attention backend moves them with the
    first layer."""
    inputs = [batch.tokens, batch.positions, batch.media_index, batch.media_embeddings, batch.logits_index]
    tokens, positions, media_index, media_embeddings, logits_index, *slots = to_device(
        [*inputs, *(attention.slots for attention in batch.attention)], device
    )
    attention = [replace(one, slots=own) for one, own in zip(batch.attention, slots, strict=True)]
    choice = None if batch.choice is None else replace(batch.choice, device=device)
    return ForwardBatch(
        tokens,
        positions,
        media_index,
        media_embeddings,
        logits_index,
        attention,
        state=batch.state,
        choice=choice,
    )
