"""Conversion to dtypes of lower precision."""

import torch
from torch import Tensor


def saturating_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``values`` to ``dtype``. Values beyond float16's range become its largest; NaN stays NaN."""
    if dtype == torch.float16 != values.dtype:
        largest = torch.finfo(dtype).max
        values = values.float().clamp(-largest, largest)
    return values.to(dtype)
