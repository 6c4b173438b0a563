"""A decoder layer, built from its spec."""

from torch import Tensor, nn

from triptych.layers.attention.base import AttentionBackend
from triptych.layers.compiled_layer import AttendLayer, FinishLayer, compiled
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.ffns import load_ffn
from triptych.layers.layer_context import LayerContext
from triptych.layers.linear import RMSNorm
from triptych.layers.mixers import Attention, load_mixer
from triptych.layers.mlp import GatedMLP
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
        self._rope_index = self.mixer.rope_index if isinstance(self.mixer, Attention) else 0
        self.mlp = load_ffn(spec.ffn, config.hidden_size, reader, f"{prefix}.mlp")
        self.compiled_attend, self.compiled_finish = self.in_compiled_calls()

    def in_compiled_calls(self) -> tuple[AttendLayer | None, FinishLayer | None]:
        """Return the layer's two halves as compiled calls, each None if the kernels don't support it: they are for
        attention whose queries and outputs aren't scaled, and for gated MLPs, without norms of either's output."""
        mixer, mlp = self.mixer, self.mlp
        attend, finish = None, None
        if isinstance(mixer, Attention) and mixer.query_scaling is None and not mixer.num_gates:
            attend = self._compiled_attend(mixer)
        if isinstance(mlp, GatedMLP) and self.mixed_norm is None and self.finished_norm is None:
            output, gate_up, down = (compiled(linear) for linear in (mixer.output, mlp.gate_up, mlp.down))
            if output is not None and gate_up is not None and down is not None:
                finish = FinishLayer(self.mlp_norm, output, gate_up, down, mlp.activation)
        return attend, finish

    def _compiled_attend(self, attention: Attention) -> AttendLayer | None:
        kernel, (heads, kv_heads, _) = getattr(attention.backend, "kernel", None), attention.head_counts
        shape, qkv = (heads, kv_heads, attention.head_dim), compiled(attention.qkv)
        if kernel is None or qkv is None or qkv.library is not kernel.library or not kernel.suits_heads(*shape):
            return None
        heads_norm = attention.qk_norm if isinstance(attention.qk_norm, RMSNorm) else None
        return AttendLayer(kernel, self.mixer_norm, qkv, heads_norm, shape, attention.options)

    def forward(
        self, hidden: Tensor, cache: tuple[Tensor, ...], context: LayerContext, rows: Tensor | None = None
    ) -> Tensor:
        """Return a new tensor [T, hidden] for ``hidden`` [T, hidden]; with ``rows``, int64 [R], only those tokens',
        [R, hidden]. What all T tokens leave in ``cache``, the layer's parts, is written."""
        if self.compiled_attend is not None and self.compiled_attend.takes(cache[0].dtype):
            keys, values = cache
            cos, sin = context.rotations[self._rope_index]
            mixed = self.compiled_attend(hidden, keys, values, cos, sin, context.attention)
        else:
            mixed = self.mixer(self.mixer_norm(hidden), cache, context)
        if rows is not None:
            hidden, mixed = hidden[rows], mixed[rows]
            if not len(rows):
                return hidden
        if self.compiled_finish is not None:
            return self.compiled_finish(hidden, mixed)
        mixed = self.mixer.output(mixed)
        hidden = hidden + (mixed if self.mixed_norm is None else self.mixed_norm(mixed))
        finished = self.mlp(self.mlp_norm(hidden))
        return hidden + (finished if self.finished_norm is None else self.finished_norm(finished))
