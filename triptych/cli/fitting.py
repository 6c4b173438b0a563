"""Whether a model's weights fit in this machine's memory, before they are downloaded."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from triptych.checkpoint.config_files import load_config, quantization_section
from triptych.config import EngineConfig
from triptych.errors import ConfigError, StartError
from triptych.observe.machine import available_bytes

DEVICES = Path("/dev")
GPUS = ("nvidia*", "nvhost*", "dxg", "kfd")
"""Files in ``DEVICES`` where there is a driver: NVIDIA's, that of its embedded GPUs, Windows' for Linux, AMD's."""
SHARES = {"none": 1.0, "int8": 0.52, "int4": 0.4}
"""About the share of 16-bit weights that a layer's weights take, with scales, by ``--quantization``."""


def check_memory(name: str, engine: EngineConfig, folder: Path, num_bytes: int) -> None:
    """Raise StartError if weights of ``num_bytes`` don't fit in free memory; ``folder`` has the model's config. On a
    GPU nothing is checked: its memory is known only when an instance starts."""
    if not computes_on_cpus(engine.device):
        return
    free, config = available_bytes(), load_config(folder)
    needed = {method: _needed(config, num_bytes, share) for method, share in SHARES.items()}
    if engine.dtype == "float32" and not quantization_section(config):
        needed["none"] = 2 * num_bytes
    if needed[engine.quantization] <= free:
        return
    raise StartError(
        f"{name}: this machine can't serve it: {needed[engine.quantization] / 1e9:.1f} GB of weights, {free / 1e9:.1f} "
        f"GB of memory free{smaller(config, num_bytes, free)}"
    )


def smaller(config: Mapping[str, Any], num_bytes: int, free: int) -> str:
    """Return the end of an error message: by which flag weights of ``num_bytes`` would fit, if by any."""
    for method, share in SHARES.items():
        if method != "none" and (size := _needed(config, num_bytes, share)) <= free:
            return f"; --quantization {method} needs about {size / 1e9:.1f} GB"
    return ""


def _needed(config: Mapping[str, Any], num_bytes: int, share: float) -> int:
    """Return about how many bytes weights take if a share is left of the decoder's layers."""
    if quantization_section(config):
        return num_bytes  # it stays as it is stored
    text = config.get("text_config", config)
    values = [text.get(name) for name in ("vocab_size", "hidden_size")]
    embeddings = 2 * values[0] * values[1] if all(type(value) is int for value in values) else 0
    kept = min(num_bytes, embeddings if text.get("tie_word_embeddings") else 2 * embeddings)
    return int(kept + share * (num_bytes - kept))


def check_device(engine: EngineConfig) -> None:
    """Raise ConfigError if a GPU is asked for and this machine has none, before any process is started for it."""
    if engine.device.startswith("cuda") and not _has_gpu():
        raise ConfigError(f"--device {engine.device}: this machine has no GPU, or no driver for it: /dev has none")


def computes_on_cpus(device: str) -> bool:
    """Return whether ``--device`` is a CPU on this machine, as far as that is known without PyTorch."""
    return device == "cpu" or (device == "auto" and (not _has_gpu() or _is_cpu_build()))


def _is_cpu_build() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def _has_gpu() -> bool:
    return any(next(DEVICES.glob(pattern), None) for pattern in GPUS)
