"""The decoder: one parametrised transformer over a paged KV cache, for packed batches of sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.checkpoint.reader import Checkpoint
from triptych.layers.attention.base import AttentionBackend, AttentionBatch, KVTensors
from triptych.layers.blocks import DecoderLayer, layers_in_one_call
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.devices import attention_for
from triptych.layers.layer_context import LayerContext
from triptych.layers.linear import WeightFormat, frozen
from triptych.layers.lora import LoraAddition
from triptych.layers.parallel import SINGLE_RANK, Group, ShardedDimension
from triptych.layers.per_layer import PerLayerEmbeddings
from triptych.layers.rope import Rope
from triptych.layers.second_weights import SecondAddition
from triptych.layers.state_tensors import StateBatch
from triptych.layers.token_choice import TokenChoice
from triptych.layers.weights import HEAD, Addition, DecoderKeys, WeightReader

__all__ = ["Decoder", "DecoderConfig", "DecoderKeys", "ForwardBatch"]


@dataclass(frozen=True)
class ForwardBatch:
    """One step of T tokens: M of them are media tokens, and L need logits."""

    tokens: Tensor
    """int64 [T]; a media token's id must be in the vocabulary, but its embedding isn't used."""
    positions: Tensor
    """float64 [3, T]: temporal, height, width. Where ropes depend on a request's length, the axis ``LENGTH_AXIS`` of
    ``rope_config`` holds that of each token's request."""
    media_index: Tensor
    """int64 [M]: indices of the media tokens; M may be 0."""
    media_embeddings: Tensor
    """[M, hidden * (1 + num_deepstack_layers)]: embedding, then the features added after layers 0, 1, …"""
    logits_index: Tensor
    """int64 [L]: indices of the tokens whose logits are computed, strictly ascending; L may be 0."""
    attention: Sequence[AttentionBatch]
    """Lengths, page tables and slots of the T tokens in each group of layers that share page tables."""
    num_largest: Sequence[int] = ()
    """[L]: how many of a token's largest logits are needed, 0 for all; the others may be minus infinity. Empty if all
    logits of all tokens are needed."""

    state: StateBatch | None = None
    """Slots of the sequences' states; None for a decoder without state."""
    choice: TokenChoice | None = None
    """The T tokens' LoRAs or second weights; None if none has any."""

    def __post_init__(self) -> None:
        if self.positions.dtype != torch.float64:  # graphs and other ranks copy the bits, whatever the dtype
            raise ValueError(f"positions are {self.positions.dtype}, not float64")


AfterLayer = Callable[[int], object]
"""Called with a cache's index (``KVTensors.layers``) once the step's keys and values are in it on every rank. The
all-reduce at the end of the layer that writes them guarantees this, because a rank contributes only after writing."""


class Decoder(nn.Module):
    """Maps tokens and media embeddings to logits. Holds no state between steps, which is in the ``KVTensors``.

    ``config`` is this rank's shard, and so are all weights except the embedding, the norms and the routers.
    ``num_logits`` is the number of logits per token that ``forward`` returns on this rank: on rank 0 the whole
    vocabulary. ``embedding`` [vocab, hidden] keeps the checkpoint's dtype and, on CPUs, its memory mapping, because a
    step reads few of its rows.
    """

    def __init__(self, config: DecoderConfig, reader: WeightReader, backend: AttentionBackend) -> None:
        super().__init__()
        self.config = config.shard(reader.group.size)
        self._group_size = reader.group.size
        self.dtype = reader.weights.activations
        vocab_and_hidden = (config.vocab_size, config.hidden_size)
        embedding = reader.tensor("embed_tokens.weight", vocab_and_hidden)
        self.embedding = frozen(embedding.to(reader.device))
        self.ropes = nn.ModuleList(Rope(head_dim, rope, reader.device) for head_dim, rope in config.ropes)
        self.per_layer = None if config.per_layer is None else PerLayerEmbeddings(config, reader)
        self.layers = nn.ModuleList(DecoderLayer(config, reader, index, backend) for index in range(config.num_layers))
        self.run_layers = layers_in_one_call(self.layers, self.config.cache_groups.of_layer)
        self.norm = reader.norm("norm", config.hidden_size, config.rms_norm_eps)
        part = ShardedDimension(config.vocab_size).part(reader.group)
        self.num_logits = config.vocab_size if reader.group.rank == 0 else part.stop - part.start
        self.head = reader.head(self._head_weight(config, reader, embedding))

    def _head_weight(self, config: DecoderConfig, reader: WeightReader, embedding: Tensor) -> Tensor:
        """Return the weight of the projection to the vocabulary.

        A config may tie it to the embedding only because that is the default. As in transformers 5, a checkpoint's own
        one is used if it differs.
        """
        outputs, inputs = embedding.shape
        if config.tie_embeddings and not reader.stored.has_layer(HEAD):
            return self.embedding
        stored = reader.stored.stored(HEAD, outputs, inputs).dequantized()
        if not config.tie_embeddings:
            return stored
        # an outline has no values to compare
        return self.embedding if stored.is_meta or torch.equal(stored, embedding) else stored

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
        """Load this rank's shard of a checkpoint's decoder, ready for inference.

        Loads layer by layer from memory-mapped tensors, so that no more than one layer's weights exist twice.
        ``backend`` defaults to the device's; ``group``, the ranks that share the decoder, to this process alone. Raises
        CheckpointError for missing, misshapen or unknown tensors, and ConfigError for a weight format that the device
        doesn't support or a group size that doesn't divide the decoder.
        """
        additions: list[Addition] = [LoraAddition(config.loras)] if config.loras else []
        if config.second is not None:
            additions.append(SecondAddition(config.second))
        reader = WeightReader(checkpoint, keys, weights, device, group, additions=additions)
        with torch.inference_mode():
            decoder = cls(config, reader, backend or attention_for(device, weights.bf16_attention))
        reader.finish()
        return decoder.eval()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVTensors, after_layer: AfterLayer | None = None) -> Tensor:
        """Run one step, on all ranks at the same time, and write the T tokens' keys and values of every layer.

        Returns the logits, float32 [L, vocab], on rank 0, where logits that ``num_largest`` excludes may be minus
        infinity; on other ranks their part, [L, num_logits]. Raises ValueError for media embeddings of the wrong width.
        """
        media = self._media_features(batch)
        tokens = self._embedded(batch.tokens)
        hidden = self._lookup(tokens)
        if media:
            hidden.index_copy_(0, batch.media_index, media[0])
        rotations = [rope(batch.positions, self.dtype) for rope in self.ropes]
        per_layer = None if self.per_layer is None else self.per_layer(tokens, hidden)
        delta = None if batch.state is None else batch.state.delta
        contexts = [
            LayerContext(batch.positions, rotations, attention, per_layer, delta, batch.choice)
            for attention in batch.attention
        ]
        wanted, last, kept = batch.logits_index, self.config.last_keeping_layer, self._kept(cache)
        together = self._together(batch, cache, after_layer)
        for index, layer in enumerate(self.layers):
            if index in together:
                if self.run_layers is not None and index == together.start:
                    hidden = self.run_layers(together, hidden, cache, rotations, batch.attention)
                continue
            rows = self._last_rows(batch) if index == last else None
            place = self.config.caches[index]
            context = contexts[0 if place is None else self.config.cache_groups.of_layer[place]]
            hidden = layer(hidden, kept[index], context, rows)
            if after_layer is not None and place is not None and self.config.layers[index].keeps_tokens:
                after_layer(place)
            if media and index < self.config.num_deepstack_layers:
                hidden.index_add_(0, batch.media_index, media[1 + index])
            if rows is not None and index < len(self.layers) - 1:
                if len(wanted) == 0:
                    break
                contexts = [context.of_tokens(rows) for context in contexts]
        if len(wanted) == 0:
            return hidden.new_empty((0, self.num_logits), dtype=torch.float32)
        if len(hidden) != len(wanted):
            hidden = hidden[wanted]
        logits: Tensor = self.head(self.norm(hidden), batch.num_largest)
        return logits if self.config.logit_softcap is None else soft_capped(logits, self.config.logit_softcap)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [T, hidden] of ``tokens``, int64 [T], as the first layer takes them."""
        return self._lookup(self._embedded(tokens))

    def _lookup(self, tokens: Tensor) -> Tensor:
        hidden = F.embedding(tokens, self.embedding).to(self.dtype)
        if self.config.embedding_scale != 1:
            hidden *= torch.tensor(self.config.embedding_scale, dtype=self.dtype)  # rounded, as in transformers
        return hidden

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return the tokens [T] by whose embeddings ``tokens`` [T] are represented."""
        for padding in self.config.padding_tokens:
            tokens = tokens.masked_fill(tokens == padding, self.config.pad_token)
        return tokens

    def _kept(self, cache: KVTensors) -> list[tuple[Tensor, ...]]:
        """Return what each layer reads and writes: its own or an earlier layer's pages, or its states."""
        states = iter([] if cache.states is None else cache.states.layers)
        return [next(states) if place is None else cache.layers[place] for place in self.config.caches]

    def _together(self, batch: ForwardBatch, cache: KVTensors, after_layer: AfterLayer | None) -> range:
        """Return the layers that one call can run: those of the compiled kernels without anything in between."""
        between = after_layer is not None or batch.choice is not None
        if self.run_layers is None or between or not self.run_layers.takes(cache):
            return range(0)
        first = self.config.num_deepstack_layers if len(batch.media_index) else 0
        return range(first, len(self.layers) - (self._last_rows(batch) is not None))

    def _last_rows(self, batch: ForwardBatch) -> Tensor | None:
        """Return the tokens, int64, that continue after the mixer of the last layer that keeps something: those that
        need logits; None for all. With several ranks there is always at least one, because the layer's all-reduce
        also signals that all ranks have written their keys and values."""
        wanted, last = batch.logits_index, self.config.last_keeping_layer
        adds_features = self.config.num_deepstack_layers > last  # these index all T tokens
        if adds_features or len(wanted) == len(batch.tokens):
            return None
        if last < len(self.layers) - 1 and len(wanted) > len(batch.attention[0].query_lens):
            return None  # later layers attend from each token by itself, which costs more than a sequence at once
        return wanted if len(wanted) or self._group_size == 1 else wanted.new_zeros(1)

    def _media_features(self, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """Split the media embeddings into the embedding and each deepstack layer's features, each [M, hidden]; none if
        M is 0."""
        num_features = 1 + self.config.num_deepstack_layers
        shape = (batch.media_index.shape[0], num_features * self.config.hidden_size)
        if batch.media_embeddings.shape != shape:
            raise ValueError(f"media embeddings have shape {list(batch.media_embeddings.shape)}, not {list(shape)}")
        if len(batch.media_index) == 0:
            return ()
        return batch.media_embeddings.to(self.dtype).chunk(num_features, dim=1)


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(logit / cap)``, float32. Logits of minus infinity, which weren't computed, stay."""
    capped = (logits / cap).tanh_().mul_(cap)
    return capped.masked_fill_(logits == -torch.inf, -torch.inf)
