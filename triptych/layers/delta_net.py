"""Gated delta nets (arXiv:2412.06464), as mixers of layers. The references are ``Qwen3_5GatedDeltaNet`` and
``Qwen3NextGatedDeltaNet`` in transformers."""

from torch import Tensor, nn

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.delta_rule.base import DeltaHeads, DeltaState, DeltaWeights
from triptych.layers.devices import delta_rule_for
from triptych.layers.layer_context import LayerContext
from triptych.layers.linear import Linear, frozen
from triptych.layers.parallel import Segments, ShardedDimension
from triptych.layers.pointwise import gated_norm
from triptych.layers.specs import DeltaNetSpec
from triptych.layers.weights import WeightReader


class GatedDeltaNet(nn.Module):
    """A convolution and the gated delta rule over the states of sequences. ``forward`` ends before the output
    projection, ``output``, which the layer applies to the tokens it needs."""

    own_channels: Tensor | None  # int64 [channels]: this rank's among those of all ranks; None if they are all

    def __init__(self, spec: DeltaNetSpec, config: DecoderConfig, reader: WeightReader, prefix: str) -> None:
        super().__init__()
        group, own = reader.group, spec.shard(reader.group.size)
        heads = DeltaHeads(own.key_heads, own.value_heads, own.key_dim, own.value_dim)
        keys = ShardedDimension(spec.key_heads, spec.key_dim)
        values = ShardedDimension(spec.key_heads, spec.output_size // spec.key_heads)
        gates = ShardedDimension(spec.key_heads, spec.value_heads // spec.key_heads)
        channels = Segments((keys, keys, values))
        self.projection = _load_projection(spec, reader, prefix, config.hidden_size)
        self.output = reader.all_reduced(reader.row_parallel(f"{prefix}.out_proj", config.hidden_size, values))
        mine, own_gates = channels.index(group), gates.part(group)
        conv = reader.tensor(f"{prefix}.conv1d.weight", (channels.size, 1, spec.CONV_TOKENS + 1))[mine]
        rates, dt_bias = (reader.float32_vector(f"{prefix}.{name}", gates.size) for name in ("A_log", "dt_bias"))
        taps = conv.to(reader.device, reader.weights.activations)
        self.weights = DeltaWeights.of(heads, taps, rates[own_gates], dt_bias[own_gates])
        # stored as it is, also where the other norms' weights have an offset
        norm = reader.tensor(f"{prefix}.norm.weight", (spec.value_dim,))
        self.norm = frozen(norm.to(reader.device, reader.weights.activations))
        self.eps = config.rms_norm_eps
        self.sizes = [heads.channels, own.output_size, own.value_heads, own.value_heads]
        self.register_buffer("own_channels", None if group.size == 1 else mine.to(reader.device), persistent=False)
        self.rule = delta_rule_for(reader.device)

    def forward(self, hidden: Tensor, cache: tuple[Tensor, ...], context: LayerContext) -> Tensor:
        """Return the input of ``output``, [T, value_heads * value_dim], for ``hidden`` [T, hidden]. Updates the batch's
        slots in ``cache``: the heads' matrices, and the convolution's last inputs."""
        recurrent, conv = cache
        batch, mine = context.delta, self.own_channels
        assert batch is not None, "a decoder with state needs slots"
        mixed, gates, b, a = self.projection(hidden).split(self.sizes, dim=1)
        if mine is None or conv.shape[2] == len(mine):
            attended = self.rule(mixed, a, b, self.weights, DeltaState(recurrent, conv), batch)
        else:  # the memory of all ranks, where this rank's channels are three ranges
            held = conv.new_empty((*conv.shape[:2], len(mine)))
            for slot in batch.slots:
                held[slot] = conv[slot, :, mine]
            attended = self.rule(mixed, a, b, self.weights, DeltaState(recurrent, held), batch)
            for slot in batch.slots:
                conv[slot, :, mine] = held[slot]
        return gated_norm(attended, gates, self.norm, self.eps)


def _load_projection(spec: DeltaNetSpec, reader: WeightReader, prefix: str, hidden_size: int) -> Linear:
    """Load the projection to queries, keys, values, the output's gates, and the logits of β and of decays: each of all
    heads."""
    shared = spec.value_heads // spec.key_heads
    keys, values = (spec.key_dim, shared * spec.value_dim)
    if spec.is_grouped:
        parts = (keys, keys, values, values)
        layers: dict[str, ShardedDimension | Segments] = {
            f"{prefix}.in_proj_qkvz": ShardedDimension(spec.key_heads, sum(parts), parts=parts),
            f"{prefix}.in_proj_ba": ShardedDimension(spec.key_heads, 2 * shared, parts=(shared, shared)),
        }
    else:
        of_keys, of_values, of_heads = (ShardedDimension(spec.key_heads, size) for size in (keys, values, shared))
        layers = {
            f"{prefix}.in_proj_qkv": Segments((of_keys, of_keys, of_values)),
            f"{prefix}.in_proj_z": of_values,
            f"{prefix}.in_proj_b": of_heads,
            f"{prefix}.in_proj_a": of_heads,
        }
    return reader.column_parallel(layers, hidden_size)
