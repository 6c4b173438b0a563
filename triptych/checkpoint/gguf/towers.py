"""Reads ``mmproj`` files: towers and projectors of models whose language model is another file.

What settings and tensors mean: llama.cpp's ``conversion`` and ``tools/mtmd``, with its ``legacy-models``.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from triptych.checkpoint.gguf.architectures import Config, ModelSettings
from triptych.checkpoint.gguf.file import GgufFile, GgufTensor, is_served
from triptych.checkpoint.gguf.index import Entry, joined
from triptych.errors import CheckpointError

CLIP = "clip"
"""The architecture that the files name."""


@dataclass(frozen=True)
class ModelFiles:
    """What a projector's config is made of."""

    clip: ModelSettings
    """Settings for all towers."""
    vision: ModelSettings
    audio: ModelSettings
    text: ModelSettings
    """Those of the language model."""
    text_config: Config
    """Its ``config.json``."""

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        """The towers' tensors."""
        return self.vision.file.tensors

    @property
    def image(self) -> Config:
        """What all image processors are told."""
        return {f"image_{name}": self.vision.numbers(f"image_{name}") for name in ("mean", "std")}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises CheckpointError, naming it, if it is missing."""
        if (found := self.tensors.get(name)) is None:
            raise CheckpointError(f"{self.vision.file.path}: tensor {name!r} is missing")
        return found.shape


@dataclass(frozen=True)
class Projector:
    """How files of one ``clip.projector_type`` are read."""

    config: Callable[[ModelFiles], Config]
    """What ``config.json`` has besides ``text_config`` and ``tokens``."""
    processors: Callable[[ModelFiles], Mapping[str, Config]]
    """The files of the processors, by name."""
    names: Mapping[str, str]
    """By a tensor's name, without or with what follows the last dot: what transformers calls it. ``{}`` is a layer's
    number. Tensors of one name are joined in this order, along the first dimension or, if ``stacked``, another one."""
    output: tuple[str, int]
    """A tensor of the projector, and which of its dimensions is the width of the language model's states."""
    tokens: Mapping[str, tuple[str, ...]]
    """By setting: the token that it is the number of, or other ones that may stand for it."""
    text: str = "model.language_model."
    """What the names of the language model's tensors begin with, in place of ``model.``"""
    head: str = ""
    """What stands before the name of its output projection."""
    stacked: Mapping[str, int] = field(default_factory=dict)
    """By transformers' name: the new dimension along which tensors are joined."""
    dimensions: Mapping[str, int] = field(default_factory=dict)
    """By transformers' name: the number of dimensions of a tensor that files have with more or fewer of length one."""
    rotated: tuple[str, ...] = ()
    """Transformers' names of tensors whose rows are in the order of pairs."""
    shifts: Mapping[str, int] = field(default_factory=dict)
    """By transformers' name: what files have been added to."""
    template: str = ""
    """Chat template for files without one; ``IMAGE`` stands for an image's placeholder."""
    unused: tuple[str, ...] = ()
    """Beginnings of the names of tensors that say nothing else."""


@dataclass(frozen=True)
class Tower:
    """What a ``mmproj`` file adds to a language model's checkpoint folder."""

    config: Config
    processors: Mapping[str, Config]
    projector: Projector
    model: ModelFiles

    @property
    def template(self) -> str:
        """The chat template for language models whose file has none; empty if there is none for them either."""
        tokens = self.model.text.file.settings["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list), "the placeholder was found among them"
        return self.projector.template.replace(IMAGE, tokens[self.config[next(iter(self.projector.tokens))]])

    def within(self, key: str) -> str:
        """Return the name, in the whole model, of the tensor that the language model has as ``key``."""
        own, is_inner = key.removeprefix("model."), key.startswith("model.")
        return f"{self.projector.text if is_inner else self.projector.head}{own}"

    def entries(self, name: str) -> dict[str, Entry]:
        """Return the places of the tensors; the file is called ``name`` in the folder. Raises CheckpointError for a
        tensor that has no place, or whose values can't be read."""
        parts: dict[str, list[tuple[int, Entry]]] = {}
        for tensor in self.model.tensors.values():
            if tensor.name.startswith(self.projector.unused or ("\0",)):
                continue
            if not is_served(tensor.kind):
                raise self._wrong(f"tensor {tensor.name!r} is of type {tensor.kind.name}, not served")
            key, order = self._place(tensor)
            parts.setdefault(key, []).append((order, self._entry(tensor, key, name)))
        found = {}
        for key, some in parts.items():
            axis = self.projector.stacked.get(re.sub(r"\.\d+\.", ".{}.", key), 0)
            try:
                found[key] = joined([entry for _, entry in sorted(some, key=lambda pair: pair[0])], axis)
            except ValueError as error:
                raise self._wrong(f"{key!r}: {error}") from error
        return found

    @cached_property
    def _places(self) -> Mapping[str, Mapping[int, int]]:
        """By the number of each kind of layer: its place among them."""
        found: dict[str, set[int]] = {}
        for name in self.model.tensors:
            if layer := LAYER.match(name):
                found.setdefault(layer[1], set()).add(int(layer[2]))
        return {
            kind: {number: place for place, number in enumerate(sorted(numbers))} for kind, numbers in found.items()
        }

    def _place(self, tensor: GgufTensor) -> tuple[str, int]:
        """Return transformers' name of a tensor, and its place among those of that name."""
        if layer := LAYER.match(tensor.name):
            plain, number = f"{layer[1]}.{{}}.{layer[3]}", str(self._places[layer[1]][int(layer[2])])
            plain = self._unswapped(plain, tensor)
        else:
            plain, number = tensor.name, ""
        names, (part, _, kind) = self.projector.names, plain.rpartition(".")
        found, theirs = (plain, names.get(plain)) if plain in names else (part, names.get(part))
        if theirs is None:
            raise self._wrong(f"tensor {tensor.name!r} has no place in {self.config['model_type']}")
        key = theirs if found == plain else f"{theirs}.{kind}"
        return key.replace("{}", number, 1), list(names).index(found)

    def _unswapped(self, name: str, tensor: GgufTensor) -> str:
        """Return the name of a layer of an MLP, which older files call by that of the other one."""
        if (found := MLP.match(name)) is None:
            return name
        down = tensor.name.replace("ffn_up", "ffn_down").rpartition(".")[0] + ".weight"
        shape, hidden = self.model.shape(down), self.model.vision.number("embedding_length")
        if shape[0] == hidden or shape[-1] != hidden:
            return name
        return f"v.blk.{{}}.ffn_{'up' if found[1] == 'down' else 'down'}.{found[2]}"

    def _entry(self, tensor: GgufTensor, key: str, name: str) -> Entry:
        plain = re.sub(r"\.\d+\.", ".{}.", key)
        shape = list(tensor.shape)
        if (dimensions := self.projector.dimensions.get(plain)) is not None:
            long = [size for size in shape if size != 1]
            shape = [1] * (dimensions - len(long)) + long
        if (axis := self.projector.stacked.get(plain)) is not None:
            shape.insert(axis, 1)
        row_bytes = tensor.num_bytes // prod(shape[:-1])
        heads = self.model.vision.number("attention.head_count") if plain in self.projector.rotated else 0
        if heads and (heads < 1 or tensor.shape[0] % (2 * heads)):
            raise self._wrong(f"tensor {tensor.name!r} has no {heads} heads")
        shift = self.projector.shifts.get(plain, 0)
        return Entry(name, tensor.kind.name, shape, tensor.offset, row_bytes, heads, -shift)

    def _wrong(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.model.vision.file.path}: {problem}")


IMAGE = "IMAGE"
LAYER = re.compile(r"([va]\.[a-z_]+)\.(\d+)\.(.+)")
MLP = re.compile(r"v\.blk\.\{\}\.ffn_(up|down)\.(.+)")


def tower_of(
    file: GgufFile, text: ModelSettings, text_config: Config, projectors: Mapping[str, Mapping[str, Projector]]
) -> Tower:
    """Return what ``file``, a ``mmproj`` file, adds to a language model of this config. ``projectors`` are by
    ``clip.projector_type``, then by the language model's architecture. Raises CheckpointError for a file that isn't
    one, a projector that isn't served, and one of another model."""
    if (name := file.settings.get("general.architecture")) != CLIP:
        raise CheckpointError(f"{file.path}: general.architecture is {name!r}: it is no mmproj file")
    kind = str(file.settings.get("clip.projector_type") or file.settings.get("clip.vision.projector_type", "mlp"))
    if (found := projectors.get(kind)) is None:
        served = ", ".join(projectors)
        raise CheckpointError(f"{file.path}: clip.projector_type {kind!r} is not served; served: {served}")
    architecture = str(text.file.settings.get("general.architecture"))
    if (projector := found.get(architecture)) is None:
        raise CheckpointError(
            f"{file.path}: projector {kind!r} is that of {', '.join(found)}, and {text.file.path} is {architecture!r}"
        )
    clip, vision, audio = (ModelSettings(file, one) for one in (CLIP, f"{CLIP}.vision", f"{CLIP}.audio"))
    model = ModelFiles(clip, vision, audio, text, text_config)
    tensor, axis = projector.output
    shape, width = model.shape(tensor), text_config["hidden_size"]
    if len(shape) <= axis or shape[axis] != width:
        raise CheckpointError(
            f"{file.path}: the projector's tensor {tensor!r} of shape {list(shape)} makes no embeddings of {width} "
            f"values, which {text.file.path} takes: they are files of two models"
        )
    config = {
        **projector.config(model),
        **dict(_token_ids(file, text, projector)),
        "tie_word_embeddings": text_config["tie_word_embeddings"],
    }
    config.setdefault("text_config", text_config)
    return Tower(config, projector.processors(model), projector, model)


def _token_ids(file: GgufFile, text: ModelSettings, projector: Projector) -> Iterator[tuple[str, Any]]:
    known = text.file.settings.get("tokenizer.ggml.tokens")
    ids = {token: number for number, token in enumerate(known)} if isinstance(known, list) else {}
    for setting, tokens in projector.tokens.items():
        if (token := next((one for one in tokens if one in ids), None)) is None:
            raise CheckpointError(
                f"{text.file.path}: its vocabulary has no token {tokens[0]!r}, which the tower of {file.path} needs"
            )
        yield setting, ids[token]
