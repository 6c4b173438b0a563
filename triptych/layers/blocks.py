"""A decoder layer, built from its spec."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from triptych.layers.attention.base import AttentionBackend
from triptych.layers.compiled_layer import AttendLayer, FinishExtras, FinishLayer, compiled
from triptych.layers.compiled_layers import RunLayers
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.delta_net import GatedDeltaNet
from triptych.layers.ffns import load_ffn
from triptych.layers.layer_context import LayerContext
from triptych.layers.linear import RMSNorm
from triptych.layers.mixers import Attention, load_mixer
from triptych.layers.mixture import DenseAndExperts
from triptych.layers.mlp import GatedMLP
from triptych.layers.per_layer import PerLayerInput
from triptych.layers.token_choice import with_choice
from triptych.layers.weights import WeightReader


class DecoderLayer(nn.Module):
    """One decoder layer: a mixer and an ffn, each with its norms and added to the residual stream."""

    def __init__(self, config: DecoderConfig, reader: WeightReader, index: int, backend: AttentionBackend) -> None:
        super().__init__()
        prefix, spec = f"layers.{index}", config.layers[index]

        def norm(name: str) -> RMSNorm:
            return reader.norm(f"{prefix}.{name}", config.hidden_size, config.rms_norm_eps)

        self.mixer_norm, self.mlp_norm = norm(spec.norms.before_mixer), norm(spec.norms.before_ffn)
        after_mixer, after_ffn = spec.norms.after_mixer, spec.norms.after_ffn
        self.mixed_norm = None if after_mixer is None else norm(after_mixer)
        self.finished_norm = None if after_ffn is None else norm(after_ffn)
        self.mixer = load_mixer(config, reader, index, backend)
        # a submodule's takes longer to look up
        self.rope_index = 0 if isinstance(self.mixer, GatedDeltaNet) else self.mixer.rope_index
        self.mlp = load_ffn(config, reader, index)
        self.per_layer = None if config.per_layer is None else PerLayerInput(config, reader, prefix)
        self.factor = None if spec.factor is None else float(reader.tensor(f"{prefix}.{spec.factor}", (1,)))
        self._index = index
        self.compiled_attend, self.compiled_finish = self.in_compiled_calls()

    def in_compiled_calls(self) -> tuple[AttendLayer | None, FinishLayer | None]:
        """Return the layer's two halves as compiled calls, each None if the kernels don't support it: they are for
        attention whose queries and outputs aren't scaled, and for gated MLPs."""
        mixer, mlp, extras = self.mixer, self.mlp, self.extras_of_finish()
        attend, finish = None, None
        if isinstance(mixer, Attention) and mixer.query_scaling is None and not mixer.num_gates:
            attend = self._compiled_attend(mixer)
        if isinstance(mlp, GatedMLP) and extras is not None:
            output, gate_up, down = (compiled(linear) for linear in (mixer.output, mlp.gate_up, mlp.down))
            if output is not None and gate_up is not None and down is not None:
                finish = FinishLayer(self.mlp_norm, output, gate_up, down, mlp.activation, extras)
        return attend, finish

    def _compiled_attend(self, attention: Attention) -> AttendLayer | None:
        kernel, qkv = getattr(attention.backend, "kernel", None), compiled(attention.qkv)
        if (
            kernel is None
            or qkv is None
            or qkv.library is not kernel.library
            or not kernel.suits_heads(*attention.shape)
        ):
            return None
        heads_norm = attention.qk_norm if isinstance(attention.qk_norm, RMSNorm) else None
        return AttendLayer(kernel, self.mixer_norm, qkv, heads_norm, attention.shape, attention.options)

    def extras_of_finish(self) -> FinishExtras | None:
        """Return what the second half does besides; None if the kernels don't support it."""
        per_layer = None
        if self.per_layer is not None:
            gate, projection = compiled(self.per_layer.gate), compiled(self.per_layer.projection)
            activation = getattr(self.mlp, "activation", None)
            if gate is None or projection is None or self.per_layer.activation != activation:
                return None
            per_layer = gate, projection, self.per_layer.norm
        factor = 1.0 if self.factor is None else self.factor
        return FinishExtras(self.mixed_norm, self.finished_norm, per_layer, factor)

    def forward(
        self, hidden: Tensor, cache: tuple[Tensor, ...], context: LayerContext, rows: Tensor | None = None
    ) -> Tensor:
        """Return a new tensor [T, hidden] for ``hidden`` [T, hidden]; with ``rows``, int64 [R], only those tokens',
        [R, hidden]. What all T tokens leave in ``cache``, the layer's parts, is written."""
        choice = context.choice  # between products, where compiled calls can't take it
        if choice is None and self.compiled_attend is not None and self.compiled_attend.takes(cache[0].dtype):
            keys, values = cache
            cos, sin = context.rotations[self.rope_index]
            mixed = self.compiled_attend(hidden, keys, values, cos, sin, context.attention)
        else:
            mixed = self.mixer(self.mixer_norm(hidden), cache, context)
        if rows is not None:
            hidden, mixed = hidden[rows], mixed[rows]
            if not len(rows):
                return hidden
            choice = None if choice is None else choice.of_tokens(rows)
        per_layer = None if context.per_layer is None else context.per_layer[:, self._index]
        if rows is not None and per_layer is not None:
            per_layer = per_layer[rows]
        if choice is None and self.compiled_finish is not None:
            return self.compiled_finish(hidden, mixed, per_layer)
        mixed = with_choice(self.mixer.output, mixed, choice)
        hidden = hidden + (mixed if self.mixed_norm is None else self.mixed_norm(mixed))
        normed = self.mlp_norm(hidden)
        if isinstance(self.mlp, DenseAndExperts):
            finished = self.mlp(normed, hidden)
        else:
            finished = with_choice(self.mlp, normed, choice)
        hidden = hidden + (finished if self.finished_norm is None else self.finished_norm(finished))
        if self.per_layer is not None and per_layer is not None:
            hidden = self.per_layer(hidden, per_layer)
        return hidden if self.factor is None else hidden.mul_(self.factor)


def layers_in_one_call(layers: Iterable[nn.Module], groups: Sequence[int]) -> RunLayers | None:
    """Return a decoder's layers in one compiled call, or None if the kernels don't support it. ``groups`` are the
    layers' numbers of their group in the KV cache."""
    halves, rotations = [], []
    for layer in layers:
        assert isinstance(layer, DecoderLayer)
        if layer.compiled_attend is None or layer.compiled_finish is None:
            return None
        if layer.per_layer is not None or not layer.compiled_attend.writes:
            return None
        halves.append((layer.compiled_attend, layer.compiled_finish))
        rotations.append(layer.rope_index)
    return RunLayers(halves, rotations, groups)
