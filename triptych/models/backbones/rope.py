"""Reads the rotary settings of a text config."""

from triptych.errors import CheckpointError
from triptych.layers.specs import RopeConfig
from triptych.models.backbones.base import TextConfig


def parse_rope_config(text_config: TextConfig, default: RopeConfig) -> RopeConfig:
    """Return the rotary settings of a text config.

    Reads either spelling: ``rope_parameters`` (transformers 5), or ``rope_scaling`` and ``rope_theta`` (published
    files). ``default`` provides omitted values, and decides whether there are three axes and in which order. Raises
    CheckpointError for a rope type other than ``default`` (``mrope`` in older files), for axes in the other order, and
    for values of the wrong type.
    """
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"config.json: the rope settings must be an object, not {rope!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default" and (rope_type != "mrope" or default.mrope_section is None):
        raise CheckpointError(f"config.json: rope type {rope_type!r} is not served; only 'default' is")
    theta = rope.get("rope_theta", text_config.get("rope_theta", default.theta))
    if not isinstance(theta, int | float):
        raise CheckpointError(f"config.json: rope_theta must be a number, not {theta!r}")
    if default.mrope_section is None:
        return RopeConfig(float(theta))
    if rope.get("mrope_interleaved", default.interleaved) != default.interleaved:
        order = "interleaved" if default.interleaved else "not interleaved"
        raise CheckpointError(f"config.json: mrope_interleaved: only M-RoPE that is {order} is served for this model")
    match rope.get("mrope_section", default.mrope_section):
        case [int(temporal), int(height), int(width)] if min(temporal, height, width) > 0:
            return RopeConfig(float(theta), (temporal, height, width), default.interleaved)
        case section:
            raise CheckpointError(f"config.json: mrope_section must be three positive counts, not {section!r}")
