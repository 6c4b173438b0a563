"""Writes a copy of a checkpoint folder with the decoder's linear layers in 4 bits, as compressed-tensors stores
them."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from triptych.checkpoint.config_files import QUANTIZATION, load_config, lora_folders
from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import INDEX_FILE, TensorInfo
from triptych.errors import CheckpointError, ConfigError
from triptych.layers.encoder import ModelAdapter
from triptych.layers.grouped_weight import quantize_groups
from triptych.layers.stored.pack_quantized import GroupQuantization, quantization_config, stored_tensors
from triptych.layers.stored.registry import read_formats
from triptych.models.registry import family_of, resolve

_LAYER = re.compile(r".*\blayers\.\d+\..*_proj\.weight")
"""Keys of a decoder's linear layers, which are quantized; routers and the head are not."""
_KEPT = re.compile(
    r".*\.(mlp\.gate|mlp\.router|mlp\.shared_expert_gate|per_layer_(?:input_gate|model_projection|projection))\.weight"
)
"""Keys of routers, of gates of shared experts, and of the layers around embeddings per layer."""
_STACKED = re.compile(r".*\.experts\.(gate_up|down)_proj")
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
"""Suffixes of files with the weights that aren't copied."""


@dataclass(frozen=True)
class Copied:
    """What has been written so far, in bytes of the weights as they were and as they are."""

    file: str
    before: int
    after: int


def quantize_checkpoint(source: Path, target: Path, quantization: GroupQuantization) -> Iterator[Copied]:
    """Write a quantized copy of the folder ``source``, which a family serves, to the folder ``target``; yields after
    each file of weights.

    ``target`` appears when all is written. The memory needed is that of one file of the copy. Raises CheckpointError
    for a checkpoint that can't be quantized, and ConfigError if ``target`` exists or can't be written.
    """
    config, checkpoint = load_config(source), plain_checkpoint(source)
    adapter: ModelAdapter = resolve(family_of(config).adapter)(config)
    layers = _layers(checkpoint, adapter, quantization)
    config[QUANTIZATION] = quantization_config(quantization, _ignored(checkpoint, adapter, layers))
    if target.exists():
        raise ConfigError(f"{target}: exists; the copy needs a folder of its own")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            folder = Path(scratch) / "copy"
            folder.mkdir()
            yield from _write_weights(checkpoint, folder, layers, quantization)
            for file in source.iterdir():
                if file.is_file() and file.suffix not in _OTHER_WEIGHTS and file.name != INDEX_FILE:
                    shutil.copyfile(file, folder / file.name)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            folder.rename(target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{target}: can't be written: {error}") from error


def plain_checkpoint(source: Path) -> Checkpoint:
    """Return a checkpoint whose weights can be quantized. Raises CheckpointError for one that has quantized weights, or
    LoRAs in folders."""
    checkpoint = Checkpoint(source)
    if read_formats(checkpoint.quantization, checkpoint.tensors) is not None:
        raise CheckpointError(f"{source}: its weights are quantized already")
    if lora_folders(source):
        raise CheckpointError(
            f"{source}: a model with LoRAs in folders can't be copied; quantize when it is loaded, with "
            "--quantization int4"
        )
    return checkpoint


def _layers(checkpoint: Checkpoint, adapter: ModelAdapter, quantization: GroupQuantization) -> set[str]:
    """Return the keys of the weights to quantize. Raises CheckpointError."""
    decoder = adapter.decoder_keys(checkpoint.tensors)
    if stacked := [key for key in decoder if _STACKED.fullmatch(key)]:
        raise CheckpointError(
            f"{checkpoint.folder}: {stacked[0]!r} has the weights of all experts, for which the format has no name: "
            "quantize when the model is loaded, with --quantization int4"
        )
    found = {key for key in decoder if _LAYER.fullmatch(key)}
    for key in sorted(found):
        shape = checkpoint.info(key).shape
        if len(shape) != 2 or shape[1] % quantization.group:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {key!r} has shape {list(shape)}, which isn't in whole groups of "
                f"{quantization.group} inputs"
            )
    if not found:
        raise CheckpointError(f"{checkpoint.folder}: there are no weights to quantize")
    return found


def _ignored(checkpoint: Checkpoint, adapter: ModelAdapter, layers: set[str]) -> list[str]:
    """Return the modules that stay as they are: the towers and parts that aren't served, by the first part of their
    names that the quantized layers' don't have, routers and other layers that aren't quantized, and the head."""
    decoder = set(adapter.decoder_keys(checkpoint.tensors))
    prefixes = {".".join(parts[:count]) for key in layers for parts in [key.split(".")] for count in range(len(parts))}
    names = set()
    for key in checkpoint.tensors:
        if key not in decoder:
            parts = key.split(".")
            own = next(count for count in range(1, len(parts) + 1) if ".".join(parts[:count]) not in prefixes)
            # a number is that of a layer
            first = next((index - 1 for index in range(own) if parts[index].isdigit()), own - 1)
            names.add(f"re:(.*\\.)?{re.escape('.'.join(parts[first:own]))}\\..*")
    names |= {rf"re:.*\.{re.escape(found[1])}$" for key in decoder if (found := _KEPT.fullmatch(key))}
    return ["lm_head", *sorted(names)]


def _write_weights(
    checkpoint: Checkpoint, folder: Path, layers: set[str], quantization: GroupQuantization
) -> Iterator[Copied]:
    """Write each file of weights under its own name, and the index if there are several."""
    by_file: dict[Path, dict[str, TensorInfo]] = {}
    for key, info in checkpoint.tensors.items():
        by_file.setdefault(info.file, {})[key] = info
    weight_map: dict[str, str] = {}
    before = after = 0
    for file, infos in sorted(by_file.items()):
        tensors: dict[str, Tensor] = {}
        for key in infos:
            tensors |= _quantized(checkpoint, key, quantization) if key in layers else checkpoint.read([key])
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
        shutil.copymode(file, folder / file.name)  # save_file lets only its own user read
        weight_map |= dict.fromkeys(tensors, file.name)
        before += sum(info.num_bytes for info in infos.values())
        after += sum(tensor.nbytes for tensor in tensors.values())
        yield Copied(file.name, before, after)
    if len(by_file) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _quantized(checkpoint: Checkpoint, key: str, quantization: GroupQuantization) -> Mapping[str, Tensor]:
    """Return the tensors that replace a weight. Raises CheckpointError for one that isn't finite."""
    weight = checkpoint.read([key])[key]
    if not weight.is_floating_point():
        raise CheckpointError(f"{checkpoint.folder}: tensor {key!r} is {weight.dtype}, which can't be quantized")
    quantized = quantize_groups(weight, quantization.group, has_zeros=quantization.has_zeros)
    if not torch.isfinite(quantized.scales).all():
        raise CheckpointError(f"{checkpoint.folder}: tensor {key!r} has values that aren't finite")
    module = key.removesuffix("weight")
    return {module + name: tensor for name, tensor in stored_tensors(quantized, weight.dtype).items()}
