"""Makes a checkpoint folder of GGUF files: settings and tokenizer as transformers' files have them, links to the files,
and an index that says where in them each tensor is. Values are read from the files as they are.

Folders are in the user's cache and named after the files' state, so that each is made once.
"""

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from triptych.checkpoint.config_files import GENERATION_CONFIG
from triptych.checkpoint.gguf.architectures import UNPLACED, WHOLE, Architecture, Config, ModelSettings, config_of
from triptych.checkpoint.gguf.file import GgufFile, GgufTensor, is_served, read_gguf
from triptych.checkpoint.gguf.index import INDEX, SUFFIX, WITHOUT_TOWERS, Entry, joined, written
from triptych.checkpoint.gguf.projectors import PROJECTORS
from triptych.checkpoint.gguf.tokenizer import CONTROL, tokenizer_json
from triptych.checkpoint.gguf.towers import tower_of
from triptych.errors import CheckpointError
from triptych.user_cache import user_cache

TEMPLATE = "chat_template.jinja"
LAYOUT = "5"
"""Changes when folders are made otherwise."""
MAX_PLACES = 2**18
"""Most tensors of a model, each expert's counted."""
LAYER = re.compile(r"blk\.(\d+)\.(.+)")
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")
"""Tokens that end a turn, whatever the settings name."""


def gguf_folder(path: Path, mmproj: Path | None = None) -> Path:
    """Return the checkpoint folder of a model in GGUF, of one file or split, given by its first; ``mmproj`` has its
    towers. Raises CheckpointError for a damaged or missing file, for what isn't served, and for towers of another
    model."""
    paths = _parts(path)
    more = [] if mmproj is None else [mmproj]
    if missing := next((one for one in more if not one.is_file()), None):
        raise CheckpointError(f"{missing}: no such file")
    try:
        home = user_cache()
    except RuntimeError as error:
        raise CheckpointError(f"{path}: there is no place for its settings: {error}; set XDG_CACHE_HOME") from error
    try:
        files = [(str(one.resolve()), one.stat().st_size, one.stat().st_mtime_ns) for one in (*paths, *more)]
        name = f"{path.stem}-{blake3(json.dumps([LAYOUT, len(more), files]).encode()).hexdigest()[:16]}"
        folder = home / "gguf" / name
        if not (folder / INDEX).is_file():
            folder.parent.mkdir(parents=True, exist_ok=True)
            _make(folder, [read_gguf(one) for one in paths], [read_gguf(one) for one in more])
    except OSError as error:
        raise CheckpointError(f"{path}: can't be made a checkpoint folder: {error}") from error
    return folder


def _parts(path: Path) -> list[Path]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    if (found := PART.fullmatch(path.name)) is None:
        return [path]
    paths = [path.with_name(f"{found[1]}-{number:05}-of-{found[3]}.gguf") for number in range(1, int(found[3]) + 1)]
    if missing := next((one for one in paths if not one.is_file()), None):
        raise CheckpointError(f"{missing}: missing; it is a part of {path.name}")
    return paths


def _make(folder: Path, files: Sequence[GgufFile], towers: Sequence[GgufFile]) -> None:
    """Write the folder whole or not at all: other processes may make it at the same time."""
    # any part of a split file may hold a tensor that settings follow from
    first = replace(files[0], tensors={name: one for file in files for name, one in file.tensors.items()})
    architecture, config = config_of(first)
    entries, more = _entries(files, architecture, config), dict[str, str]()
    if towers:
        tower = tower_of(
            towers[0], ModelSettings(first, str(first.settings["general.architecture"])), config, PROJECTORS
        )
        entries = {tower.within(key): one for key, one in entries.items()}
        entries |= tower.entries(f"{len(files)}{SUFFIX}")
        config = tower.config
        more = {name: json.dumps(one, indent=1) for name, one in tower.processors.items()}
        more |= {TEMPLATE: tower.template} if tower.template else {}
    else:
        config = config | {WITHOUT_TOWERS: True}
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".made-"))
    try:
        texts = {"config.json": json.dumps(config, indent=1), "tokenizer.json": tokenizer_json(first)}
        texts |= more | _prompt_files(first)
        for number, file in enumerate((*files, *towers)):
            (made / f"{number}{SUFFIX}").symlink_to(file.path.resolve())
        for name, text in texts.items():
            (made / name).write_text(text)
        (made / INDEX).write_bytes(written(entries))
        with contextlib.suppress(OSError):  # another process was first
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _entries(files: Sequence[GgufFile], architecture: Architecture, config: Config) -> dict[str, Entry]:
    parts: dict[str, list[Entry]] = {}
    served = {one.kind: is_served(one.kind) for file in files for one in file.tensors.values()}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    count = 0
    for number, file in enumerate(files):
        for tensor in file.tensors.values():
            if tensor.name in UNPLACED:
                continue
            part, _, kind = tensor.name.rpartition(".")
            part = layer[2] if (layer := LAYER.fullmatch(part)) else part
            rotated = heads.get(part, 0) if architecture.rotated else 0
            if not served[tensor.kind]:
                raise CheckpointError(f"{file.path}: tensor {tensor.name!r} is of type {tensor.kind.name}, not served")
            if rotated and tensor.shape[0] % (2 * rotated):
                raise CheckpointError(f"{file.path}: tensor {tensor.name!r} has no {rotated} heads")
            shift = -architecture.norm_offset if part.endswith("norm") and kind == "weight" else 0
            for key, offset, shape in _places(file, tensor, architecture):
                where = (f"{number}{SUFFIX}", tensor.kind.name, list(shape), offset, tensor.row_bytes)
                entry = Entry(*where, rotated, shift, transposed=part in architecture.transposed)
                parts.setdefault(key, []).append(entry)
                if (count := count + 1) > MAX_PLACES:
                    raise CheckpointError(f"{file.path}: over {MAX_PLACES} tensors, with each expert's")
    try:
        return {key: some[0] if len(some) == 1 else _by_head(some) for key, some in parts.items()}
    except ValueError as error:
        raise CheckpointError(f"{files[0].path}: {error}") from error


def _by_head(parts: list[Entry]) -> Entry:
    """Return a matrix whose rows are those of the parts, for one head after another."""
    found = joined(sorted(parts, key=lambda one: not one.transposed), 1)
    return msgspec.structs.replace(found, shape=[prod(found.shape[:-1]), found.shape[-1]])


def _places(file: GgufFile, tensor: GgufTensor, architecture: Architecture) -> Iterator[tuple[str, int, Sequence[int]]]:
    """Yield names of a tensor, each with where it begins and its shape: one, or one for each expert of a stack."""
    part, _, kind = tensor.name.rpartition(".")
    found = LAYER.fullmatch(part)
    if found is not None and (whole := architecture.names.get(f"{found[2]}.{kind}")) is not None:
        yield f"model.layers.{found[1]}.{whole}", tensor.offset, tensor.shape
        return
    name = WHOLE.get(part) if found is None else architecture.names.get(found[2])
    if name is None:
        raise CheckpointError(f"{file.path}: tensor {tensor.name!r} has no place in {architecture.model_type}")
    key = name if found is None else f"model.layers.{found[1]}.{name}"
    if "{}" not in key:
        shape = (1, *tensor.shape) if key.endswith("shared_expert_gate") and len(tensor.shape) == 1 else tensor.shape
        yield f"{key}.{kind}", tensor.offset, shape
        return
    bytes_each = tensor.num_bytes // tensor.shape[0]
    for expert in range(tensor.shape[0]):
        yield f"{key.format(expert)}.{kind}", tensor.offset + expert * bytes_each, tensor.shape[1:]


def _prompt_files(file: GgufFile) -> dict[str, str]:
    """Return the files that say which tokens begin and end texts, and how conversations are written."""
    settings = file.settings
    tokens = settings["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list), "the tokenizer was made of them"
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    ids = {name: settings.get(f"tokenizer.ggml.{setting}") for name, setting in names.items()}
    known = {name: one for name, one in ids.items() if isinstance(one, int) and 0 <= one < len(tokens)}
    types = settings["tokenizer.ggml.token_type"]
    controls = {tokens[number] for number in np.flatnonzero(np.asarray(types) == CONTROL)}
    ends = {tokens.index(text) for text in ENDS if text in controls}
    ends |= {known["eos_token"]} if "eos_token" in known else set()
    more = [settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    ends |= {one for one in more if isinstance(one, int) and 0 <= one < len(tokens)}
    made = {
        "tokenizer_config.json": json.dumps({name: tokens[number] for name, number in known.items()}),
        GENERATION_CONFIG: json.dumps({"eos_token_id": sorted(ends)}),
    }
    if isinstance(template := settings.get("tokenizer.chat_template"), str):
        made[TEMPLATE] = template
    return made
