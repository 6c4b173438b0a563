"""Writes a copy of a text model as one GGUF file, which llama.cpp and Triptych serve.

Settings are made of the decoder's parameters. Once the file has them, they are read again, and values are written only
if they describe the same decoder: what the format can't say, and this file doesn't know, is refused.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import isclose, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray
from torch import Tensor

from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.gguf.architectures import ARCHITECTURES, FACTORS, Architecture, config_of, tensor_name
from triptych.checkpoint.gguf.file import Value, read_gguf
from triptych.checkpoint.gguf.values import FLOATS
from triptych.checkpoint.gguf.vocabulary import PromptFiles, tokenizer_settings
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError, ConfigError
from triptych.layers.block_quantizer import quantized_blocks
from triptych.layers.block_weight import BlockType
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope import inverse_frequencies
from triptych.layers.rope_config import NO_POSITIONS, LinearScaling, Llama3Scaling, YarnScaling
from triptych.layers.specs import AttentionSpec, GatedMLPSpec, MoESpec
from triptych.layers.weights import SENSITIVE
from triptych.models.quantize import Copied, plain_checkpoint
from triptych.models.registry import family_of, resolve
from triptych.models.shared.settings import text_section
from triptych.models.text.adapter import TextAdapter

FALLBACKS = {"Q4_K": "Q4_1", "Q5_K": "Q5_1", "Q4_1": "F16", "Q5_1": "F16", "Q8_0": "F16"}
"""Types of matrices whose rows aren't whole blocks."""
_TYPES = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}
NEAR = 1e-5
"""Relative difference of numbers that are the same."""
SAME = {"mistral": "llama"}
"""Model types that llama.cpp's converter gives another's architecture."""


@dataclass(frozen=True)
class GgufTypes:
    """Types of weights, by what they are of."""

    linear: str
    sensitive: str
    """Layers that ``layers.weights.SENSITIVE`` names."""
    embedding: str
    """Embedding and output projection."""


MIXES = {
    "Q4_K": GgufTypes("Q4_K", "Q8_0", "Q8_0"),
    "Q5_K": GgufTypes("Q5_K", "Q8_0", "Q8_0"),
    "Q8_0": GgufTypes("Q8_0", "Q8_0", "Q8_0"),
}


@dataclass(frozen=True)
class _Planned:
    """A tensor of the file."""

    name: str
    keys: list[str]
    """The checkpoint's tensors that it is made of: one, or each expert's."""
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    heads: int = 0
    """Number of heads whose rows change their order; 0: they don't."""
    shift: int = 0


def write_gguf(source: Path, target: Path, mix: str, prompts: PromptFiles) -> Iterator[Copied]:
    """Write a copy of the folder ``source``, of a text-only model, to the file ``target``, which appears when it is
    whole; yields after each tensor. ``prompts`` is of the folder's files.

    The memory needed is that of one tensor. Raises CheckpointError for a checkpoint that can't be written, before any
    value is, unless one isn't finite; and ConfigError if ``target`` exists or can't be written.
    """
    config, checkpoint = load_config(source), plain_checkpoint(source)
    family = family_of(config)
    if family.takes_media:
        raise CheckpointError(f"{source}: GGUF files are written of text-only models; {family.name} has encoders")
    adapter: TextAdapter = resolve(family.adapter)(config)
    decoder, text = adapter.decoder_config, text_section(config)
    name, architecture = _architecture(source, str(text.get("model_type", config.get("model_type"))))
    settings: dict[str, Value] = {f"{name}.{key}": value for key, value in _settings(source, decoder, text).items()}
    vocabulary = tokenizer_settings(source, decoder.vocab_size, prompts)
    planned = _planned(checkpoint, adapter.decoder_keys(checkpoint.tensors), architecture, decoder, MIXES[mix])
    if target.exists():
        raise _taken(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            made = Path(scratch) / "copy.gguf"
            with contextlib.closing(GGUFWriter(made, name)) as writer:
                end = _write_settings(writer, settings | vocabulary, planned, _factors(decoder))
                os.truncate(made, end)  # as the reader expects it; the values follow
                _check(source, made, decoder)
                yield from _write_values(writer, checkpoint, planned)
            _claim(target)
            made.replace(target)
    except OSError as error:
        raise ConfigError(f"{target}: can't be written: {error}") from error


def _claim(target: Path) -> None:
    """Make an empty file, to be replaced. Raises ConfigError if there is one, though there was none at first."""
    try:
        target.touch(exist_ok=False)
    except FileExistsError as error:
        raise _taken(target) from error


def _taken(target: Path) -> ConfigError:
    return ConfigError(f"{target}: exists; the copy needs a file of its own")


def _architecture(source: Path, model_type: str) -> tuple[str, Architecture]:
    wanted = SAME.get(model_type, model_type)
    for name, one in ARCHITECTURES.items():
        if one.model_type == wanted and not one.transposed:
            return name, one
    raise CheckpointError(f"{source}: no architecture of GGUF files that are written is that of {model_type!r}")


def _settings(source: Path, decoder: DecoderConfig, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file says of a decoder, by names without the architecture's."""
    mixers = [layer.mixer for layer in decoder.layers if isinstance(layer.mixer, AttentionSpec)]
    if not mixers:
        raise CheckpointError(f"{source}: only decoders with attention are written to GGUF files")
    full = next((one for one in mixers if one.window is None), mixers[0])
    sliding = next((one for one in mixers if one.window is not None), None)
    found: dict[str, Any] = {
        "block_count": decoder.num_layers,
        "context_length": int(text.get("max_position_embeddings") or 2048),
        "embedding_length": decoder.hidden_size,
        "feed_forward_length": text.get("intermediate_size"),
        "vocab_size": decoder.vocab_size,
        "attention.head_count": full.num_heads,
        "attention.head_count_kv": full.num_kv_heads,
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.layer_norm_rms_epsilon": decoder.rms_norm_eps,
        "rope.dimension_count": 2 * full.rope.num_frequencies(full.head_dim),
        "rope.freq_base": full.rope.theta,
        "attn_logit_softcapping": full.softcap,
        "final_logit_softcapping": decoder.logit_softcap,
    }
    if sliding is not None:
        window = sliding.window if isinstance(sliding.window, int) else None
        found |= {"attention.sliding_window": window, "rope.freq_base_swa": sliding.rope.theta}
    for ffn in (layer.ffn for layer in decoder.layers):
        if isinstance(ffn, GatedMLPSpec):
            found["feed_forward_length"] = ffn.intermediate_size
        elif isinstance(ffn, MoESpec):
            found |= {
                "expert_count": ffn.num_experts,
                "expert_used_count": ffn.routing.experts_per_token,
                "expert_feed_forward_length": ffn.intermediate_size,
                "expert_shared_feed_forward_length": ffn.shared and ffn.shared.mlp.intermediate_size,
            }
    match full.rope.scaling:
        case LinearScaling(factor):
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case YarnScaling() as yarn:
            found |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": yarn.factor,
                "rope.scaling.original_context_length": yarn.original_length,
                "rope.scaling.yarn_beta_fast": yarn.beta_fast,
                "rope.scaling.yarn_beta_slow": yarn.beta_slow,
            }
    return {key: value for key, value in found.items() if value is not None}


def _factors(decoder: DecoderConfig) -> NDArray[np.float32] | None:
    """Return divisors of the rope's frequencies, float32, where settings have no other name for its scaling."""
    mixer = decoder.layers[0].mixer
    if not isinstance(mixer, AttentionSpec) or not isinstance(mixer.rope.scaling, Llama3Scaling):
        return None
    plain, _ = inverse_frequencies(mixer.head_dim, replace(mixer.rope, scaling=None))
    factors: NDArray[np.float32] = (plain / inverse_frequencies(mixer.head_dim, mixer.rope)[0]).float().numpy()
    return factors


def _planned(
    checkpoint: Checkpoint, keys: list[str], architecture: Architecture, decoder: DecoderConfig, mix: GgufTypes
) -> list[_Planned]:
    heads = {}
    if architecture.rotated and isinstance(mixer := decoder.layers[0].mixer, AttentionSpec):
        heads = {"attn_q": mixer.num_heads, "attn_k": mixer.num_kv_heads}
    stacks: dict[str, list[tuple[int, str]]] = {}
    for key in keys:
        name, expert = tensor_name(key, architecture)
        if name is None:
            raise CheckpointError(f"{checkpoint.folder}: tensor {key!r} has no name in GGUF files")
        stacks.setdefault(name, []).append((-1 if expert is None else expert, key))
    found = []
    for name, some in stacks.items():
        members = [key for _, key in sorted(some)]
        shapes = {checkpoint.info(key).shape for key in members}
        if len(shapes) > 1:
            raise CheckpointError(f"{checkpoint.folder}: experts of unlike shapes: {members[0]!r}")
        shape = next(iter(shapes))
        part = name.rpartition(".")[0].rpartition(".")[2] if name.startswith("blk.") else name.rpartition(".")[0]
        stack = (
            (len(members), *shape) if some[0][0] >= 0 else tuple(size for size in shape if size > 1 or len(shape) == 1)
        )
        shift = architecture.norm_offset if part.endswith("norm") and name.endswith(".weight") else 0
        found.append(_Planned(name, members, stack, _kind(members[0], shape, mix), heads.get(part, 0), shift))
    return found


def _kind(key: str, shape: tuple[int, ...], mix: GgufTypes) -> GGMLQuantizationType:
    """Vectors and routers stay in float32."""
    if len(shape) < 2 or min(shape) == 1 or key.endswith((".mlp.gate.weight", ".router.weight")):
        return GGMLQuantizationType.F32
    name = mix.embedding
    if "_proj." in key:
        name = mix.sensitive if key.removesuffix(".weight").endswith(SENSITIVE) else mix.linear
    while shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[name]][0]:
        name = FALLBACKS[name]
    return GGMLQuantizationType[name]


def _write_settings(
    writer: GGUFWriter,
    settings: Mapping[str, Value],
    planned: Sequence[_Planned],
    factors: NDArray[np.float32] | None,
) -> int:
    """Write all that precedes the checkpoint's values. Returns where those will end."""
    for name, value in settings.items():
        if isinstance(value, list | np.ndarray):
            writer.add_array(name, value if isinstance(value, list) else value.tolist())
        else:
            writer.add_key_value(name, value, _TYPES[type(value)])
    if factors is not None:
        writer.add_tensor_info(FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for one in planned:
        block, size = GGML_QUANT_SIZES[one.kind]
        writer.add_tensor_info(one.name, one.shape, np.dtype(np.float32), prod(one.shape) // block * size, one.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None, "it was opened for the header"
    (file,), (infos,) = writer.fout, writer.tensors
    sizes = [file.tell(), *(one.nbytes for one in infos.values())]
    if factors is not None:
        writer.write_tensor_data(factors)
    file.flush()
    return sum(writer.ggml_pad(size, writer.data_alignment) for size in sizes)


def _write_values(writer: GGUFWriter, checkpoint: Checkpoint, planned: Sequence[_Planned]) -> Iterator[Copied]:
    before = after = 0
    for one in planned:
        weights = [checkpoint.read([key])[key] for key in one.keys]
        raw = np.stack([_stored(weight, one) for weight in weights]) if len(weights) > 1 else _stored(weights[0], one)
        writer.write_tensor_data(raw)
        before, after = before + sum(weight.nbytes for weight in weights), after + raw.nbytes
        yield Copied(one.name, before, after)


def _stored(weight: Tensor, planned: _Planned) -> NDArray[Any]:
    """Return a weight's values in the order and type of the file. Raises CheckpointError for one that isn't finite."""
    if not torch.isfinite(weight).all():
        raise CheckpointError(f"tensor {planned.keys[0]!r} has values that aren't finite")
    found = weight.float() + planned.shift
    if planned.heads:
        rows = found.view(planned.heads, 2, -1, prod(found.shape[1:]))
        found = rows.transpose(1, 2).reshape(found.shape)
    if planned.kind.name in FLOATS:
        raw: NDArray[Any] = found.to(FLOATS[planned.kind.name]).numpy()
        return raw
    return quantized_blocks(found, BlockType[planned.kind.name]).numpy()


def _check(source: Path, made: Path, decoder: DecoderConfig) -> None:
    """Raise CheckpointError unless a file describes this decoder."""
    try:
        _, config = config_of(replace(read_gguf(made), path=source))
        found = resolve(family_of(config).adapter)(config).decoder_config
    except CheckpointError as error:
        raise CheckpointError(f"{source}: GGUF files can't say what its decoder is: {error}") from error
    if (place := _difference(_plain(decoder), _plain(found))) is not None:
        raise CheckpointError(f"{source}: GGUF files can't say what its decoder's {place}")


def _difference(ours: Any, theirs: Any) -> str | None:
    """Return where two decoders' parameters differ first, and ours there; None: nowhere. Numbers differ by more than
    rounding to float32, and computing frequencies from it, explains."""
    if ours == theirs or (type(ours) is type(theirs) is float and isclose(ours, theirs, rel_tol=NEAR)):
        return None
    if is_dataclass(ours) and type(ours) is type(theirs):
        parts = {one.name: (getattr(ours, one.name), getattr(theirs, one.name)) for one in fields(ours)}
    elif isinstance(ours, dict):
        parts = {name: (value, theirs[name]) for name, value in ours.items()}
    elif isinstance(ours, list | tuple) and len(ours) == len(theirs):
        parts = {str(number): pair for number, pair in enumerate(zip(ours, theirs, strict=True))}
    else:
        return f"is: {ours!r}"
    found = ((name, _difference(*pair)) for name, pair in parts.items())
    return next((f"{name} {place}" for name, place in found if place is not None), None)


def _plain(decoder: DecoderConfig) -> dict[str, object]:
    """Return a decoder's parameters, with rotary frequencies in place of what they follow from."""
    ropes = [inverse_frequencies(*one) for one in decoder.ropes]
    frequencies = [(values.tolist(), factor) for values, factor in ropes]
    layers = []
    for layer in decoder.layers:
        mixer = layer.mixer
        kept = replace(mixer, rope=NO_POSITIONS) if isinstance(mixer, AttentionSpec) else mixer
        layers.append((decoder.ropes.index(mixer.rotary) if mixer.rotary else None, replace(layer, mixer=kept)))
    own = {one.name: getattr(decoder, one.name) for one in fields(decoder)}
    return own | {"layers": layers, "rotary frequencies": frequencies}
