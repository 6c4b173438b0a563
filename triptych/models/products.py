"""What the products with packed weights share."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.models.rounding import rounded

Product = Callable[[Tensor], Tensor]
"""``x W^T + b``: float32 activations [T, in] to [T, out]."""

AT_ONCE = 2**19
"""Weights that are laid out together: few enough to stay in a processor's cache meanwhile."""


def in_panels(weight: Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """``weight`` [N, K] as the compiled kernels read it, in panels of so many outputs:
    [ceil(N / outputs), ceil(K / inputs), outputs, inputs], ``rounded`` to ``dtype``; zeros fill it up."""
    num_outputs, num_inputs = weight.shape
    panels = torch.empty((-(-num_outputs // outputs), -(-num_inputs // inputs), outputs, inputs), dtype=dtype)
    together = max(1, AT_ONCE // max(1, outputs * num_inputs))
    for some, rows in zip(panels.split(together), weight.split(together * outputs), strict=True):
        full = F.pad(rounded(rows, dtype), (0, -num_inputs % inputs, 0, -len(rows) % outputs))
        some.copy_(full.unflatten(1, (-1, inputs)).unflatten(0, (-1, outputs)).transpose(1, 2))
    return panels
