"""Into which numbers values are rounded that are kept in fewer bits."""

import torch
from torch import Tensor


def saturating_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` in ``dtype``. What float16 doesn't hold becomes the largest that it does; a NaN stays one."""
    if dtype == torch.float16 != values.dtype:
        largest = torch.finfo(dtype).max
        values = values.float().clamp(-largest, largest)
    return values.to(dtype)
