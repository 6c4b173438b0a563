"""Reads the JSON files of a checkpoint folder. No torch, because the frontend and the supervisor use this too."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.errors import CheckpointError

GENERATION_CONFIG = "generation_config.json"
PREPROCESSOR_CONFIG = "preprocessor_config.json"
MISTRAL_CONFIG = "params.json"
"""What Mistral's own format, with ``consolidated.safetensors`` and ``tekken.json``, has for a config."""
LORA_CONFIG, LORA_FILE = "adapter_config.json", "adapter_model.safetensors"
LORAS = ("vision", "speech")
"""Names of LoRAs that may be in folders of their own, ``NAME-lora``, as peft writes them."""
LORA_SETTINGS: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layer_replication"), (None, [])),
}
"""Settings in ``LORA_CONFIG``, each with the values that are served. A missing setting has the first of them."""
QUANTIZATION = "quantization_config"
"""The section of ``config.json`` that describes quantized weights."""
QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files that describe quantized weights where ``config.json`` doesn't, and the methods of those who write them."""
AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
"""Settings of AutoAWQ's own files, and what ``config.json`` calls them."""
TEXT_CONFIG_NAMES = ("llm_config", "language_config")
"""What original files of InternVL and of DeepSeek-OCR call ``text_config``."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError, naming the file, if there is none."""
    try:
        return parse_json_object(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error


def parse_json_object(data: bytes, path: Path) -> dict[str, Any]:
    """Parse ``data``, read from ``path``, as a JSON object. Raises CheckpointError if it isn't one."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are both ValueErrors
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def quantization_section(config: Mapping[str, Any]) -> object:
    """Return what a ``config.json`` says of quantized weights, or None."""
    section = config.get(QUANTIZATION)
    if section is None and isinstance(text := config.get("text_config"), Mapping):
        section = text.get(QUANTIZATION)
    return section


def load_preprocessor_config(folder: Path | str) -> dict[str, Any]:
    """Return a checkpoint's settings for preprocessing images and audio, from where transformers looks for them.

    Those are the ``image_processor`` of ``processor_config.json`` or, without one, ``preprocessor_config.json``, merged
    with the former's ``feature_extractor``, if there is one. Empty if there are none. Raises CheckpointError for an
    unreadable file.
    """
    folder = Path(folder)
    processors = _read_if_there(folder / "processor_config.json")
    images, audio = (processors.get(name) for name in ("image_processor", "feature_extractor"))
    found = images if isinstance(images, dict) else _read_if_there(folder / PREPROCESSOR_CONFIG)
    return found | audio if isinstance(audio, dict) else found


def load_video_config(folder: Path | str) -> dict[str, Any]:
    """Return a checkpoint's settings for preprocessing videos, from where transformers looks for them.

    Those are the ``video_processor`` of ``processor_config.json``, else ``video_preprocessor_config.json``, else
    ``preprocessor_config.json``. Empty if there are none. Raises CheckpointError for an unreadable file.
    """
    folder = Path(folder)
    nested = _read_if_there(folder / "processor_config.json").get("video_processor")
    if isinstance(nested, dict):
        return nested
    path = folder / "video_preprocessor_config.json"
    return read_json_object(path) if path.is_file() else _read_if_there(folder / PREPROCESSOR_CONFIG)


def load_generation_config(folder: Path | str) -> dict[str, Any]:
    """Return a checkpoint's ``generation_config.json``; empty if missing. Raises CheckpointError if unreadable."""
    return _read_if_there(Path(folder) / GENERATION_CONFIG)


def load_config(folder: Path | str) -> dict[str, Any]:
    """Return a checkpoint's ``config.json``. The language model's section is ``text_config``, whatever the file calls
    it, and a LoRA in a folder of its own has a section ``NAME_lora``. Raises CheckpointError if the file is missing,
    unreadable or not an object, and for a LoRA that isn't served."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        if (path.parent / MISTRAL_CONFIG).is_file():
            raise CheckpointError(
                f"{path}: no such file; the folder has {MISTRAL_CONFIG}, so it is in Mistral's own format, which isn't "
                "served: use the model's files for Transformers"
            )
        raise CheckpointError(f"{path}: no such file; a checkpoint folder has a config.json")
    sections = {f"{name}_lora": _lora_section(place / LORA_CONFIG) for name, place in lora_folders(folder).items()}
    config = with_text_config(read_json_object(path)) | sections
    return config if quantization_section(config) is not None else config | _other_quantization(Path(folder))


def quantization_file(folder: Path | str) -> Path | None:
    """Return the file beside ``config.json`` that describes quantized weights, or None."""
    paths = (Path(folder) / name for name in QUANTIZATION_FILES)
    return next((path for path in paths if path.is_file()), None)


def _other_quantization(folder: Path) -> dict[str, Any]:
    """Return what ``config.json`` would say of quantized weights that another file describes. Raises CheckpointError
    for an unreadable one."""
    if (path := quantization_file(folder)) is None:
        return {}
    found = read_json_object(path)
    inner = found.get("quantization")  # ModelOpt's
    settings = inner if isinstance(inner, dict) else found
    renamed = {AWQ_NAMES.get(name, name): value for name, value in settings.items()}
    return {QUANTIZATION: {"quant_method": QUANTIZATION_FILES[path.name]} | renamed}


def lora_folders(folder: Path | str) -> dict[str, Path]:
    """Return the folders of LoRAs beside a checkpoint's files, by the LoRA's name. Those that ``config.json`` has a
    section for are left out: their tensors are among the checkpoint's. Raises CheckpointError for an unreadable config,
    and for a LoRA without ``LORA_FILE``."""
    places = {name: Path(folder) / f"{name}-lora" for name in LORAS}
    found = {name: place for name, place in places.items() if (place / LORA_CONFIG).is_file()}
    config = _read_if_there(Path(folder) / "config.json") if found else {}
    found = {name: place for name, place in found.items() if f"{name}_lora" not in config}
    for place in found.values():
        if not (place / LORA_FILE).is_file():
            raise CheckpointError(
                f"{place}: no {LORA_FILE}; save the LoRA as safetensors, or move the folder away to serve the model "
                "without it"
            )
    return found


def _lora_section(path: Path) -> dict[str, Any]:
    """Return what config.json would have of a LoRA. Raises CheckpointError for settings that aren't served."""
    settings = read_json_object(path)
    for name, served in LORA_SETTINGS.items():
        if (value := settings.get(name, served[0])) not in served:
            raise CheckpointError(
                f"{path}: {name} {value!r} is not served; merge the LoRA into the weights, or move its folder away"
            )
    return {"r": settings.get("r"), "lora_alpha": settings.get("lora_alpha")}


def with_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` whose language model's section is ``text_config``."""
    section = next((config[name] for name in TEXT_CONFIG_NAMES if name in config), None)
    return config if section is None else {"text_config": section, **config}


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
