"""Reads the settings of mixtures of experts."""

from triptych.errors import CheckpointError
from triptych.layers.specs import ExpertGroups, FfnSpec, GatedMLPSpec, MoESpec, RoutingSpec, Score, SharedExpertSpec
from triptych.models.backbones.base import TextConfig, check_silu, gated_mlp, layers_up_to, listed_layers, num_layers
from triptych.models.shared.settings import positive_number, setting

DENSE, SPARSE = "dense", "sparse"
"""Layers' types in ``mlp_layer_types``."""


def qwen_experts(text: TextConfig, *, norm_topk_prob: bool) -> MoESpec:
    """Return Qwen's experts, chosen by a softmax; ``norm_topk_prob`` is a default. Raises CheckpointError."""
    check_silu(text)
    num_experts = "num_experts" if "num_experts" in text else "num_local_experts"  # as transformers saves it
    routing = RoutingSpec(
        setting(text, "num_experts_per_tok", int),
        normalised=setting(text, "norm_topk_prob", bool, default=norm_topk_prob),
    )
    return MoESpec(setting(text, num_experts, int), setting(text, "moe_intermediate_size", int), routing)


def qwen_ffns(text: TextConfig, experts: MoESpec) -> list[FfnSpec]:
    """Return each layer's ffn, which the config may make dense. Raises CheckpointError."""
    step = setting(text, "decoder_sparse_step", int, default=1)
    dense_layers = listed_layers(text, "mlp_only_layers", default=[])
    mixed = [(index + 1) % step == 0 and index not in dense_layers for index in range(num_layers(text))]
    return [experts if is_mixed else gated_mlp(text) for is_mixed in mixed]


def sigmoid_routing(text: TextConfig, *, groups: int, kept_groups: int, scale: float) -> RoutingSpec:
    """Return the routing of DeepSeek-V3 (arXiv:2412.19437): by sigmoids, in groups. Arguments are defaults. Raises
    CheckpointError."""
    groups = setting(text, "n_group", int, default=groups)
    kept_groups = setting(text, "topk_group", int, default=kept_groups)
    return RoutingSpec(
        setting(text, "num_experts_per_tok", int),
        Score.SIGMOID,
        normalised=setting(text, "norm_topk_prob", bool, default=True),
        scale=positive_number(text, "routed_scaling_factor", scale),
        groups=None if groups == kept_groups else ExpertGroups(groups, kept_groups, ranked_by=2),
    )


def deepseek_ffns(text: TextConfig, routing: RoutingSpec, *, shared: int, dense: int) -> list[FfnSpec]:
    """Return each layer's ffn, as in DeepSeek's models: the first ones are dense, and the others have experts, of which
    some are shared by all tokens. Sigmoid scores have a correction. ``shared`` and ``dense`` are default numbers of
    shared experts and of dense layers. Raises CheckpointError."""
    check_silu(text)
    shared, width = setting(text, "n_shared_experts", int, default=shared), setting(text, "moe_intermediate_size", int)
    experts = MoESpec(
        setting(text, "n_routed_experts", int),
        width,
        routing,
        correction="gate.e_score_correction_bias" if routing.score is Score.SIGMOID else None,
        shared=SharedExpertSpec("shared_experts", GatedMLPSpec(shared * width)),
    )
    return [gated_mlp(text) if is_dense else experts for is_dense in _dense_layers(text, dense)]


def _dense_layers(text: TextConfig, default: int) -> list[bool]:
    """Return whether each layer is dense: by its type or, if there are none, as one of the first. Raises
    CheckpointError."""
    count = num_layers(text)
    if text.get("mlp_layer_types") is None:
        first = layers_up_to(text, "first_k_dense_replace", default)
        return [index < first for index in range(count)]
    types = setting(text, "mlp_layer_types", list)
    if len(types) != count or not all(kind in (DENSE, SPARSE) for kind in types):
        raise CheckpointError(
            f"config.json: mlp_layer_types must name {DENSE!r} or {SPARSE!r} for each of {count} layers"
        )
    return [kind == DENSE for kind in types]


def next_token_layers(text: TextConfig) -> tuple[str, ...]:
    """Return the names of layers for multi-token prediction, which follow the decoder's and aren't served; see
    ``TensorNames.ignored_modules``. Raises CheckpointError."""
    name = "num_mtp_layers" if "num_mtp_layers" in text else "num_nextn_predict_layers"
    return tuple(f"layers.{num_layers(text) + index}." for index in range(layers_up_to(text, name, 0)))
