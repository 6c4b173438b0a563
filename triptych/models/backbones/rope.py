"""Reads the rotary settings of a text config."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from triptych.errors import CheckpointError
from triptych.layers.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
)
from triptych.models.shared.settings import LARGEST, MAX_COUNT, positive_number, setting

LONGROPE = ("longrope", "su")
"""The second is its name in older files of Phi-3."""


def read_rope(text: Mapping[str, Any], default: RopeConfig) -> RopeConfig:
    """Return the rotary settings of a text config.

    Reads either spelling: ``rope_parameters`` (transformers 5), or ``rope_scaling``, ``rope_theta`` and
    ``partial_rotary_factor`` (published files). ``default`` provides omitted values, and decides whether there are
    three axes and in which order, and whether neighbours rotate together. Raises CheckpointError for an unknown rope
    type, for axes in the other order, and for invalid values.
    """
    rope = rope_settings(text)
    theta = positive_number(rope, "rope_theta", positive_number(text, "rope_theta", default.theta))
    partial = positive_number(
        rope, "partial_rotary_factor", positive_number(text, "partial_rotary_factor", default.partial)
    )
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta must be more than 1, not {theta}")
    if partial > 1:
        raise CheckpointError(f"config.json: partial_rotary_factor must be at most 1, not {partial}")
    found = replace(default, theta=theta, partial=partial, scaling=_scaling(_rope_type(rope, default), rope, text))
    if default.mrope_section is None:
        return found
    if found.length_rule is not None:
        raise CheckpointError(f"config.json: rope type {_rope_type(rope, default)!r} in three axes is not served")
    if rope.get("mrope_interleaved", default.interleaved) != default.interleaved:
        order = "interleaved" if default.interleaved else "not interleaved"
        raise CheckpointError(f"config.json: mrope_interleaved: only M-RoPE that is {order} is served for this model")
    match rope.get("mrope_section", default.mrope_section):
        case [int(temporal), int(height), int(width)] if min(temporal, height, width) > 0:
            return replace(found, mrope_section=(temporal, height, width))
        case section:
            raise CheckpointError(f"config.json: mrope_section must be three positive counts, not {section!r}")


def context_length(text: Mapping[str, Any]) -> int:
    """Return the longest request that a model of this text config is served with, in tokens: where the embedding of its
    positions grows with the request (``dynamic``), ``factor`` times the original length. Raises CheckpointError."""
    length, rope = setting(text, "max_position_embeddings", int), rope_settings(text)
    if _named_type(rope) != "dynamic":
        return length
    extended = length * max(1.0, positive_number(rope, "factor"))
    if extended > MAX_COUNT:
        raise CheckpointError(f"config.json: rope type 'dynamic' with a context of {extended} tokens can't be served")
    return int(extended)


def short_length(text: Mapping[str, Any]) -> int | None:
    """Return the computed tokens of prompt and answer up to which a request is short, where the embedding of its
    positions depends on that (LongRoPE, ``dynamic``); otherwise None."""
    rope = rope_settings(text)
    if _named_type(rope) == "dynamic":
        return setting(text, "max_position_embeddings", int)
    return _original_length(rope, text) if _named_type(rope) in LONGROPE else None


def rope_settings(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings as the config spells them; empty if there are none."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(
            f"config.json: rope_parameters or rope_scaling: the rope settings must be an object, not {rope!r}"
        )
    return rope


def _named_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope_type(rope: Mapping[str, Any], default: RopeConfig) -> str:
    found = _named_type(rope)
    is_known = found in ("default", "linear", "dynamic", "llama3", "yarn", "proportional", *LONGROPE)
    if not is_known and (found != "mrope" or default.mrope_section is None):
        raise CheckpointError(f"config.json: rope type {found!r} is not served")
    return str(found)


def _scaling(  # noqa: PLR0911 (one for each kind)
    rope_type: str, rope: Mapping[str, Any], text: Mapping[str, Any]
) -> Scaling | None:
    match rope_type:
        case "linear":
            return LinearScaling(positive_number(rope, "factor"))
        case "llama3":
            low, high = positive_number(rope, "low_freq_factor"), positive_number(rope, "high_freq_factor")
            if low > high:
                raise CheckpointError(f"config.json: low_freq_factor {low} must be at most high_freq_factor {high}")
            return Llama3Scaling(positive_number(rope, "factor"), low, high, _original_length(rope, text))
        case "yarn":
            return _yarn(rope, text)
        case "longrope" | "su":
            return _longrope(rope, text)
        case "dynamic":
            return DynamicScaling(positive_number(rope, "factor"), setting(text, "max_position_embeddings", int))
        case "proportional":
            return ProportionalScaling(positive_number(rope, "factor", 1.0))
    return None


def _yarn(rope: Mapping[str, Any], text: Mapping[str, Any]) -> YarnScaling:
    original = _original_length(rope, text)
    factor = _factor(rope, text, original)
    enlarged = magnitude(factor, 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # zeros count as absent
        enlarged = magnitude(factor, positive_number(rope, "mscale")) / magnitude(
            factor, positive_number(rope, "mscale_all_dim")
        )
    return YarnScaling(
        factor=factor,
        original_length=original,
        attention_factor=positive_number(rope, "attention_factor", enlarged),
        beta_fast=positive_number(rope, "beta_fast", 32.0),
        beta_slow=positive_number(rope, "beta_slow", 1.0),
        truncate=setting(rope, "truncate", bool, default=True),
    )


def magnitude(factor: float, mscale: float) -> float:
    """Return by how much YaRN enlarges cosines and sines, and DeepSeek also queries and keys."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: Mapping[str, Any], text: Mapping[str, Any]) -> LongRopeScaling:
    original = _original_length(rope, text)
    factor = _factor(rope, text, original)
    short, long = _divisors(rope, "short_factor"), _divisors(rope, "long_factor")
    enlarged = 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(short, long, original, positive_number(rope, "attention_factor", enlarged))


def _divisors(rope: Mapping[str, Any], name: str) -> tuple[float, ...]:
    factors = setting(rope, name, list)
    if not all(isinstance(one, int | float) and 1 / LARGEST <= one <= LARGEST for one in factors):
        raise CheckpointError(f"config.json: {name} must be positive numbers, not {factors!r}")
    return tuple(map(float, factors))


def _original_length(rope: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    """Return the context length before scaling. As in transformers, the top level takes precedence."""
    name = "original_max_position_embeddings"
    inner = setting(rope, name, int, default=setting(text, "max_position_embeddings", int))
    return setting(text, name, int, default=inner)


def _factor(rope: Mapping[str, Any], text: Mapping[str, Any], original: int) -> float:
    """Return the factor by which the context was extended."""
    return positive_number(rope, "factor", setting(text, "max_position_embeddings", int) / original)
