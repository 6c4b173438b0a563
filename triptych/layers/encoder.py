"""Builds a media tower alone, out of transformers' class and only the tower's own tensors; and what a family's
``tower.py`` provides."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import TensorInfo
from triptych.errors import CheckpointError
from triptych.layers import native
from triptych.layers.attention.tower import TowerAttention
from triptych.layers.decoder import Decoder, DecoderConfig
from triptych.layers.linear import Linear, WeightFormat, frozen
from triptych.layers.parallel import SINGLE_RANK, Group
from triptych.layers.pointwise import GeluTanh

if TYPE_CHECKING:  # importing transformers takes seconds and 100 MiB, which a language instance does without
    from transformers import PreTrainedConfig, PreTrainedModel


class PreprocessedPart(Protocol):
    """One preprocessed item, ``triptych.models.base.EncoderInput``: patches [patches, patch values], their grid, and
    which tower takes them."""

    @property
    def patches(self) -> NDArray[np.float32]: ...

    @property
    def grid(self) -> tuple[int, int, int]: ...

    @property
    def tower(self) -> str: ...


class Encoder(Protocol):
    """A loaded tower."""

    embedding_width: int
    """Values per row: hidden size × (1 + number of deepstack layers)."""

    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """Each item's rows [rows, embedding_width], in order, in the tower's dtype: embedding, then deepstack features.

        One call of the tower for all; what an item's rows are doesn't depend on the others, but for rounding.
        Raises PlanMismatch for an item whose patches don't fill its grid.
        """


class ModelAdapter(Protocol):
    """What ``families/<family>/tower.py`` provides, constructed with the checkpoint's config: the only code that knows
    the names in the checkpoint. All raise CheckpointError for a config or checkpoint that can't be served."""

    embedding_width: int
    decoder_config: DecoderConfig

    def encoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """The keys of the tower's half, sorted. Every key is in one half; raises for a key that is in neither."""

    def decoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """The keys of the decoder's half, sorted. Raises as ``encoder_keys``."""

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """The tower, and nothing of the decoder."""

    def load_decoder(
        self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device, group: Group = SINGLE_RANK
    ) -> Decoder:
        """A rank's shard of the decoder, and nothing of the tower."""

    def weight_bytes_by_stage(self, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
        """Bytes in the checkpoint of each half: ``{"tower": …, "decoder": …}``."""


Module = TypeVar("Module", bound="PreTrainedModel")


def load_module(
    module_class: type[Module],
    config: "PreTrainedConfig",
    checkpoint: Checkpoint,
    keys: Mapping[str, str],
    *,
    weights: WeightFormat,
    device: torch.device,
) -> Module:
    """A transformers module with a checkpoint's weights, for inference, with linear layers of a weight format, and
    attention and GELU of ours.

    ``keys`` maps the module's parameter names to the checkpoint's. Built without initialising or copying weights:
    those that the format takes as they are stay memory-mapped. Raises CheckpointError, naming one, for weights that
    are missing, misshapen or that the module has no place for, and ConfigError for a format that the device can't use.
    """
    from transformers.activations import GELUTanh

    if device.type == "cpu":
        native.library()  # if it has to be built, now, not when the first item waits
    dtype = weights.activations
    with torch.device("meta"):
        module = module_class._from_config(config, dtype=dtype)
    expected = module.state_dict()
    for name in sorted(expected.keys() ^ keys.keys()):
        if name in keys:
            raise CheckpointError(f"{checkpoint.folder}: {module_class.__name__} has no place for {keys[name]!r}")
        raise CheckpointError(f"{checkpoint.folder}: the tensor for {name!r} of {module_class.__name__} is missing")
    for name, key in keys.items():
        if (found := checkpoint.info(key).shape) != (shape := tuple(expected[name].shape)):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {key!r} has shape {list(found)}; the config makes it {list(shape)}"
            )
    tensors = checkpoint.read(keys.values())
    linears = {name: one for name, one in module.named_modules() if isinstance(one, nn.Linear | nn.Conv3d)}
    within = {f"{name}.{kind}" for name in linears for kind in ("weight", "bias")}
    state = {name: tensors[key].to(device, dtype) for name, key in keys.items() if name not in within}
    for name, linear in linears.items():
        bias = None if linear.bias is None else tensors[keys[f"{name}.bias"]]
        if isinstance(linear, nn.Conv3d) and (linear.kernel_size != linear.stride or any(linear.padding)):
            raise CheckpointError(f"{module_class.__name__}'s {name} is not a projection of patches")
        ours = weights.high_precision(tensors[keys[f"{name}.weight"]].flatten(1), bias, device)
        module.set_submodule(name, ours if isinstance(linear, nn.Linear) else PatchProjection(ours, dtype))
    for name, one in list(module.named_modules()):
        replacement = GeluTanh() if isinstance(one, GELUTanh) else TowerAttention.in_place_of(one)
        if replacement is not None:
            module.set_submodule(name, replacement)
    module.load_state_dict(state, assign=True, strict=False)
    _materialise_buffers(module, device)
    return module.eval().requires_grad_(False)


class PatchProjection(nn.Module):
    """What a convolution comes to where each input is one patch, as large as its kernel: a product. Convolutions of so
    many small inputs are slow.

    ``weight`` holds nothing: transformers' towers ask for its dtype.
    """

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = linear
        self.weight = frozen(torch.empty(0, dtype=dtype))

    def forward(self, patches: Tensor) -> Tensor:
        """[patches, channels, frames, height, width] → [patches, out]"""
        return self.linear(patches.flatten(1))


def _materialise_buffers(module: "PreTrainedModel", device: torch.device) -> None:
    """Gives buffers that no checkpoint holds, such as rotary frequencies, their values.

    On ``meta`` their values were lost. Since transformers 5, ``_init_weights`` must set every such buffer, because
    ``from_pretrained`` builds on ``meta`` too; it is called here on nothing that holds a loaded weight.
    """
    for owner in module.modules():
        lost = {name: buffer for name, buffer in owner.named_buffers(recurse=False) if buffer.is_meta}
        if not lost:
            continue
        if list(owner.parameters(recurse=False)) or not all(buffer.is_floating_point() for buffer in lost.values()):
            raise CheckpointError(f"don't know how to set the buffers {sorted(lost)} of {type(owner).__name__}")
        for name, buffer in lost.items():
            setattr(owner, name, torch.full_like(buffer, torch.nan, device=device))
        module._init_weights(owner)
        for name in lost:
            if getattr(owner, name).isnan().any():
                raise CheckpointError(f"transformers doesn't set buffer {name!r} of {type(owner).__name__}")
