"""The language half of a model: one parametrised decoder, over a paged KV cache, for packed batches of sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.checkpoint.reader import Checkpoint
from triptych.layers.attention.base import AttentionBackend, AttentionBatch, KVTensors
from triptych.layers.blocks import DecoderLayer, LayerContext
from triptych.layers.decoder_config import DecoderConfig, MoEConfig
from triptych.layers.devices import attention_for
from triptych.layers.linear import WeightFormat, frozen
from triptych.layers.parallel import SINGLE_RANK, Dimension, Group
from triptych.layers.rope import Rope
from triptych.layers.weights import HEAD, DecoderKeys, WeightReader

__all__ = ["Decoder", "DecoderConfig", "DecoderKeys", "ForwardBatch", "MoEConfig"]


@dataclass(frozen=True)
class ForwardBatch:
    """One step: T tokens, of which M stand for media and L have their logits taken."""

    tokens: Tensor
    """int64 [T]; a media token's id must be in the vocabulary, but isn't looked at."""
    positions: Tensor
    """float64 [3, T]: temporal, height, width."""
    media_index: Tensor
    """int64 [M]: which of the T tokens are media tokens; M may be 0."""
    media_embeddings: Tensor
    """[M, hidden * (1 + num_deepstack_layers)]: embedding, then the features added after layers 0, 1, …"""
    logits_index: Tensor
    """int64 [L]: the tokens whose logits are wanted, in ascending order, each once; L may be 0."""
    attention: AttentionBatch
    num_largest: Sequence[int] = ()
    """For each of the L tokens how many of its largest logits are wanted, 0 for all; the others may come out as minus
    infinity. Empty where all logits of all tokens are wanted."""

    def __post_init__(self) -> None:
        if self.positions.dtype != torch.float64:  # graphs and other ranks take its bits for that
            raise ValueError(f"positions are {self.positions.dtype}, not float64")


AfterLayer = Callable[[int], object]
"""Is told the number of each layer of a step once its keys and values are in the cache: those of all ranks, because a
rank has its part of the sums that end a layer only from ranks that have written theirs."""


class Decoder(nn.Module):
    """Tokens and media rows in, logits out. Holds no state between steps: that is in the ``KVTensors``.

    ``config`` is this rank's shard, and so are all weights but the embedding, the norms and the routers.
    ``num_logits`` is how many of a token's logits ``forward`` returns here: on rank 0 all of the vocabulary's.
    ``embedding`` [vocab, hidden] keeps the checkpoint's dtype, and on CPUs its memory mapping: a step needs few rows.
    """

    def __init__(self, config: DecoderConfig, reader: WeightReader, backend: AttentionBackend) -> None:
        super().__init__()
        self.config = config.shard(reader.group.size)
        self._group_size = reader.group.size
        self.dtype = reader.weights.activations
        vocab_and_hidden = (config.vocab_size, config.hidden_size)
        embedding = reader.tensor("embed_tokens.weight", vocab_and_hidden)
        self.embedding = frozen(embedding.to(reader.device))
        self.rope = Rope(config.head_dim, config.rope, reader.device)
        self.layers = nn.ModuleList(DecoderLayer(config, reader, index, backend) for index in range(config.num_layers))
        self.norm = reader.norm("norm", config.hidden_size, config.rms_norm_eps)
        if config.tie_embeddings:
            reader.ignore(HEAD)  # some tied checkpoints store it all the same
        part = Dimension(config.vocab_size).part(reader.group)
        self.num_logits = config.vocab_size if reader.group.rank == 0 else part.stop - part.start
        self.head = reader.head(self.embedding if config.tie_embeddings else reader.tensor(HEAD, vocab_and_hidden))

    @classmethod
    def load(
        cls,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        keys: DecoderKeys,
        weights: WeightFormat,
        device: torch.device,
        *,
        backend: AttentionBackend | None = None,
        group: Group = SINGLE_RANK,
    ) -> "Decoder":
        """The decoder with a checkpoint's weights, ready for inference.

        Built layer by layer from memory-mapped tensors: beyond the result, memory holds one layer's weights.
        ``backend`` defaults to the device's own. ``group`` are the ranks that share the decoder, by default this
        process alone.
        Raises CheckpointError for a tensor that is missing, misshapen or has no place in the decoder, and ConfigError
        for a weight format that the device can't use and a group whose size doesn't divide the decoder.
        """
        reader = WeightReader(checkpoint, keys, weights, device, group)
        with torch.inference_mode():
            decoder = cls(config, reader, backend or attention_for(device))
        reader.finish()
        return decoder.eval()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVTensors, after_layer: AfterLayer | None = None) -> Tensor:
        """Runs one step, at the same time on all ranks; writes every layer's K and V of the T tokens. Returns logits,
        float32 [L, vocab], on rank 0, those that ``num_largest`` leaves out minus infinity; on the others their part of
        them, [L, num_logits].

        Raises ValueError for media rows of the wrong width.
        """
        media = self._media_features(batch)
        hidden = F.embedding(batch.tokens, self.embedding).to(self.dtype)  # [T, hidden]
        hidden.index_copy_(0, batch.media_index, media[0])
        cos, sin = self.rope(batch.positions, self.dtype)
        context = LayerContext(cos, sin, batch.attention)
        wanted, last = batch.logits_index, len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            rows = self._last_rows(batch) if index == last else None
            hidden = layer(hidden, cache.keys[index], cache.values[index], context, rows)
            if after_layer is not None:
                after_layer(index)
            if index < self.config.num_deepstack_layers:
                hidden.index_add_(0, batch.media_index, media[1 + index])
        if len(wanted) == 0:
            return hidden.new_empty((0, self.num_logits), dtype=torch.float32)
        if len(hidden) != len(wanted):
            hidden = hidden[wanted]
        return self.head(self.norm(hidden), batch.num_largest)

    def _last_rows(self, batch: ForwardBatch) -> Tensor | None:
        """The tokens, int64, with which the last layer goes on after its attention: only those whose logits are wanted;
        None for all. Of several ranks always some, since the sum of theirs tells that all have written K and V."""
        wanted = batch.logits_index
        adds_features = self.config.num_deepstack_layers >= self.config.num_layers  # by their place among all tokens
        if adds_features or len(wanted) == len(batch.tokens):
            return None
        return wanted if len(wanted) or self._group_size == 1 else wanted.new_zeros(1)

    def _media_features(self, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """The media rows cut into the embedding and each deepstack layer's features, every one [M, hidden]."""
        num_features = 1 + self.config.num_deepstack_layers
        shape = (batch.media_index.shape[0], num_features * self.config.hidden_size)
        if batch.media_embeddings.shape != shape:
            raise ValueError(f"media rows have shape {list(batch.media_embeddings.shape)}, not {list(shape)}")
        return batch.media_embeddings.to(self.dtype).chunk(num_features, dim=1)
