"""LoRA (arXiv:2106.09685): low-rank matrices that a decoder's linear layers add for the tokens of some requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import LoraSpec
from triptych.layers.linear import Linear
from triptych.layers.stored.linears import concatenate
from triptych.layers.token_choice import TokenChoice
from triptych.layers.weights import ParallelLinear, WeightReader


class LoraLinear(Linear):
    """A linear layer with LoRAs: ``y = x W^T + b``, plus ``scale x A^T B^T`` for tokens of a LoRA with A [rank, in] and
    B [out, rank]."""

    def __init__(self, linear: Linear, downs: Sequence[Linear], ups: Sequence[Linear]) -> None:
        """``downs`` and ``ups`` are each LoRA's A and scaled B, in the order of ``DecoderConfig.loras``."""
        super().__init__()
        self.linear = linear
        self.downs, self.ups = nn.ModuleList(downs), nn.ModuleList(ups)

    def forward(self, activations: Tensor, choice: TokenChoice | None = None) -> Tensor:
        """[T, in] → [T, out]; ``choice`` has the LoRAs of the T tokens."""
        outputs: Tensor = self.linear(activations)  # a new tensor
        for number, rows in () if choice is None else choice.rows:
            down, up = self.downs[number], self.ups[number]
            if rows is None:
                outputs += up(down(activations))
            else:
                outputs.index_add_(0, rows, up(down(activations[rows])))
        return outputs


@dataclass(frozen=True)
class LoraAddition:
    """``Addition`` of a decoder's LoRAs, which are never quantized."""

    loras: Sequence[LoraSpec]

    def added(self, linear: Linear, layer: ParallelLinear, reader: WeightReader) -> Linear:
        """See ``Addition``. Raises CheckpointError for a LoRA without matrices of the layer."""
        parts, columns = reader.parts(layer), layer.inputs.part(reader.group)
        downs, ups = [], []
        for lora in self.loras:
            if missing := [one.name for one in parts if not one.name.endswith(lora.layers)]:
                raise CheckpointError(f"LoRA {lora.name!r} lacks {missing[0]!r}; a LoRA is served if it has all layers")
            names = [{kind: f"{one.name}.lora_{kind}.{lora.name}.weight" for kind in "AB"} for one in parts]
            down = [reader.tensor(one["A"], (lora.rank, layer.inputs.size))[:, columns] for one in names]
            up = [
                reader.tensor(one["B"], (part.size, lora.rank))[part.rows].float() * lora.scale
                for one, part in zip(names, parts, strict=True)
            ]
            downs.append(reader.weights.high_precision(concatenate(down), None, reader.device))
            ups.append(reader.weights.high_precision(torch.block_diag(*up), None, reader.device))
        return LoraLinear(linear, downs, ups)
