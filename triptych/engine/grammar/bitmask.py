"""What a grammar's bitmask means for logits, by PyTorch alone, on any device."""

import torch
from torch import Tensor


def bitmask_tensor(mask: bytes) -> Tensor:
    """A bitmask as its process sent it: int32 [words], in host memory."""
    return torch.frombuffer(bytearray(mask), dtype=torch.int32)


def constrain(logits: Tensor, bitmask: Tensor) -> None:
    """Puts the logits [vocabulary] of all tokens that the bitmask, int32 [words] on the same device, rules out at minus
    infinity, in place."""
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask[:, None] >> places & 1).flatten()[: logits.shape[0]]
    logits.masked_fill_(allowed == 0, float("-inf"))
