"""The protocols of encoders and model adapters, and loading of a tower by itself, from transformers' class and the
tower's own tensors."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import TensorInfo
from triptych.errors import CheckpointError
from triptych.layers import native
from triptych.layers.decoder import Decoder, DecoderConfig
from triptych.layers.linear import Linear, WeightFormat, frozen
from triptych.layers.parallel import SINGLE_RANK, Group
from triptych.layers.stored.linears import concatenate
from triptych.layers.stored.reader import StoredReader
from triptych.layers.tower_layer import gates_with_factors, use_our_modules

if TYPE_CHECKING:  # importing transformers costs time and memory that a language instance saves
    from transformers import PreTrainedConfig, PreTrainedModel


class PreprocessedPart(Protocol):
    """One preprocessed part of an item: the fields of ``triptych.models.base.EncoderInput`` that an encoder reads."""

    @property
    def patches(self) -> NDArray[np.float32]:
        """float32 [patches, values per patch]."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Number of patches in time, rows and columns."""

    @property
    def tower(self) -> str:
        """Name of the tower that encodes the part."""

    @property
    def layout(self) -> tuple[int, ...]:
        """What the tower needs to know of the part beyond its grid."""


class Encoder(Protocol):
    """Stage E's loaded model, or one of its towers."""

    embedding_width: int
    """Values per embedding: hidden size × (1 + number of deepstack layers)."""

    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """Return each input's embeddings [rows, embedding_width], in order, in the tower's dtype.

        A row holds the embedding, then the deepstack features. All inputs are one batch, whose composition affects an
        input's embeddings only by rounding. Raises PlanMismatch for an input whose patches don't fill its grid.
        """


class ModelAdapter(Protocol):
    """What a family provides to the engine, constructed from the checkpoint's config.

    It is the only code that knows the names of a checkpoint's tensors. All methods raise CheckpointError for an
    unsupported config or checkpoint.
    """

    embedding_width: int
    """Values per embedding: hidden size × (1 + number of deepstack layers)."""
    decoder_config: DecoderConfig
    """Parameters of the whole decoder, before it is divided among ranks."""

    def encoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """Return the keys of the encoder's tensors, sorted. Raises for a key of neither encoder nor decoder."""

    def decoder_keys(self, all_keys: Iterable[str]) -> list[str]:
        """Return the keys of the decoder's tensors, sorted. Raises like ``encoder_keys``."""

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """Load the encoder, and nothing of the decoder."""

    def load_decoder(
        self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device, group: Group = SINGLE_RANK
    ) -> Decoder:
        """Load a rank's shard of the decoder, and nothing of the encoder."""

    def weight_bytes_by_stage(self, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
        """Return the size of the weights in the checkpoint, in bytes: ``{"encoder": …, "decoder": …}``."""


Module = TypeVar("Module", bound="PreTrainedModel")


def load_module(
    module_class: type[Module],
    config: "PreTrainedConfig",
    checkpoint: Checkpoint,
    keys: Mapping[str, str],
    *,
    weights: WeightFormat,
    device: torch.device,
    replaced: Collection[str] = (),
) -> Module:
    """Load a transformers module for inference, with linear layers of a weight format and our own modules in place of
    those of the classes ``replaced`` (``tower_layer.use_our_modules``).

    ``keys`` maps the module's parameter names to the checkpoint's. Weights aren't initialised first, nor copied if the
    format uses them unchanged: those stay memory-mapped. Raises CheckpointError, naming one, for missing, misshapen or
    unknown weights, and ConfigError for a format that the device doesn't support.
    """
    if device.type == "cpu":
        native.library()  # builds the kernels now, if necessary, rather than while the first item waits
    module = _without_weights(module_class, config, weights.activations)
    # of a missing tensor, the error names the module's
    reader = StoredReader(checkpoint, lambda name: keys.get(name, name), weights, device)
    packed = _pack_linears(module, reader, replaced)
    plain = {name: tensor for name, tensor in module.state_dict().items() if not name.startswith(packed)}
    state = {name: reader.tensor(name, tensor.shape).to(device, weights.activations) for name, tensor in plain.items()}
    module.load_state_dict(state, assign=True, strict=False)
    reader.check_all_read(keys.values(), module_class.__name__)
    if device.type != "meta":
        _materialise_buffers(module, device)
    use_our_modules(module, weights.bf16_attention, replaced)
    return module.eval().requires_grad_(False)


def _without_weights(module_class: type[Module], config: "PreTrainedConfig", dtype: torch.dtype) -> Module:
    """Return the module on the device ``meta``. Raises CheckpointError for settings that transformers can't build it
    from, which it checks by using them."""
    try:
        with torch.device("meta"):
            return module_class._from_config(config, dtype=dtype)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"config.json: no {module_class.__name__} can be made of it: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _pack_linears(module: nn.Module, reader: StoredReader, replaced: Collection[str]) -> tuple[str, ...]:
    """Replace a module's linear layers by those of a weight format, gates and their factors by one layer. Returns the
    beginnings of the names of what they hold now. Raises as ``load_module`` does."""
    linears = {
        name: one
        for name, one in module.named_modules()
        # convolutions over an image or a sequence stay
        if isinstance(one, nn.Linear | nn.Conv3d) or (isinstance(one, nn.Conv2d) and _is_projection(one))
    }
    gates = gates_with_factors(module, replaced)
    for name, linear in linears.items():
        if name in gates.values():
            continue
        parts = [name, gates[name]] if name in gates else [name]
        vectors = {part: linears[part].bias for part in parts}
        biases = [reader.tensor(f"{part}.bias", one.shape) for part, one in vectors.items() if one is not None]
        bias = concatenate(biases) if biases else None
        if isinstance(linear, nn.Linear):
            stored = [reader.stored(part, *linears[part].weight.shape) for part in parts]
            module.set_submodule(name, reader.linear(stored, bias))
            continue
        if not _is_projection(linear):
            raise CheckpointError(f"{type(module).__name__}'s {name} is not a projection of patches")
        weight = reader.tensor(f"{name}.weight", linear.weight.shape).flatten(1)
        projection = reader.weights.high_precision(weight, bias, reader.device)
        module.set_submodule(name, PatchProjection(projection, reader.weights.activations, reader.device))
    for name in gates.values():
        parent, _, child = name.rpartition(".")
        delattr(module.get_submodule(parent), child)
    return tuple(f"{name}." for name in linears)


def _is_projection(convolution: nn.Conv2d | nn.Conv3d) -> bool:
    """Return whether a convolution's inputs are patches that don't overlap."""
    is_pointwise = set(convolution.kernel_size) == {1}
    return convolution.kernel_size == convolution.stride and not any(convolution.padding) and not is_pointwise


class PatchProjection(nn.Module):
    """A convolution whose inputs are single patches, as large as its kernel, computed as a matrix product.

    Convolutions of many such small inputs are slow. ``weight`` is empty: transformers' towers read its dtype and
    device.
    """

    def __init__(self, linear: Linear, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.linear = linear
        self.weight = frozen(torch.empty(0, dtype=dtype, device=device))

    def forward(self, patches: Tensor) -> Tensor:
        """[patches, channels, …, height, width] → [patches, out]"""
        return self.linear(patches.flatten(1))


def _materialise_buffers(module: "PreTrainedModel", device: torch.device) -> None:
    """Compute buffers that no checkpoint holds, such as rotary frequencies, whose values were lost on ``meta``.

    Since transformers 5, ``_init_weights`` must set every such buffer, because ``from_pretrained`` builds on ``meta``
    too. It is called only on modules without loaded weights.
    """
    for owner in module.modules():
        lost = {name: buffer for name, buffer in owner.named_buffers(recurse=False) if buffer.is_meta}
        if not lost:
            continue
        if list(owner.parameters(recurse=False)) or not all(buffer.is_floating_point() for buffer in lost.values()):
            raise CheckpointError(f"can't compute the buffers {sorted(lost)} of {type(owner).__name__}")
        for name, buffer in lost.items():
            setattr(owner, name, torch.full_like(buffer, torch.nan, device=device))
        module._init_weights(owner)
        for name in lost:
            if getattr(owner, name).isnan().any():
                raise CheckpointError(f"transformers doesn't set buffer {name!r} of {type(owner).__name__}")
