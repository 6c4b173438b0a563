"""The gated delta rule by PyTorch, on any device: one sequence at a time."""

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.layers.delta_rule.base import (
    BLOCK,
    KERNEL_SIZE,
    L2_EPS,
    DeltaBatch,
    DeltaHeads,
    DeltaState,
    DeltaWeights,
    check_slots,
)

LOWEST_DECAY = -1000.0
"""Lower bound of a decay's logarithm, whose exponential is 0 in any case: differences of sums stay accurate."""


class PyTorchDeltaRule:
    """``DeltaRule`` for tensors of any device and dtype."""

    def __call__(  # noqa: PLR0917 (a kernel's operands)
        self, mixed: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, state: DeltaState, batch: DeltaBatch
    ) -> Tensor:
        """See ``DeltaRule``."""
        check_slots(batch, state)
        heads = weights.heads
        output = mixed.new_empty((len(mixed), heads.value_heads, heads.value_dim))
        parts = zip(*(tensor.split(batch.query_lens) for tensor in (mixed, a, b, output)), strict=True)
        for slot, fresh, sequence in zip(batch.slots, batch.fresh, parts, strict=True):
            recurrent, past = state.recurrent[slot], state.conv[slot]
            if fresh:
                recurrent.zero_()
                past.zero_()
            # block by block from the start: elementwise operations, too, may round by where a value is in a tensor
            for block in zip(*(tensor.split(BLOCK) for tensor in sequence), strict=True):
                own, own_a, own_b, result = block
                _advance(own, own_a, own_b, result, weights, past, recurrent)
        return output


def _advance(  # noqa: PLR0917
    mixed: Tensor, a: Tensor, b: Tensor, output: Tensor, weights: DeltaWeights, past: Tensor, state: Tensor
) -> None:
    """Advance a sequence's state by a block of tokens, and write their outputs, [c, value_heads, value_dim]."""
    operands = _split(convolved(mixed, weights.taps, past).float(), weights.heads)
    log_decays = -weights.rates * F.softplus(a.float() + weights.dt_bias)  # [c, value_heads]
    advance = _one if len(mixed) == 1 else _several
    output.copy_(advance(*operands, log_decays.T, b.float().sigmoid().T, state).transpose(0, 1))


def convolved(mixed: Tensor, taps: Tensor, past: Tensor) -> Tensor:
    """Return SiLU of the causal convolution of a sequence's new tokens ``mixed`` [n, channels], after the tokens
    ``past`` [3, channels], which is updated in place."""
    history = torch.cat((past, mixed))
    sums = torch.zeros(mixed.shape, dtype=torch.float32, device=mixed.device)
    for index in range(KERNEL_SIZE):
        sums += history[index : index + len(mixed)].float() * taps[index].float()
    past.copy_(history[len(mixed) :])
    return F.silu(sums.to(mixed.dtype))


def _split(channels: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys [value_heads, n, key_dim], normalised, and values [value_heads, n, value_dim], of
    ``channels`` [n, channels]."""
    query, key, value = channels.split(heads.segments, dim=1)
    shared = heads.value_heads // heads.key_heads
    query, key = (_normed(one.unflatten(1, (heads.key_heads, -1))) for one in (query, key))
    query = query * heads.key_dim**-0.5
    query, key = (one.repeat_interleave(shared, dim=1).transpose(0, 1) for one in (query, key))
    return query, key, value.unflatten(1, (heads.value_heads, -1)).transpose(0, 1)


def _normed(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + L2_EPS)


def _one(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:  # noqa: PLR0917
    """Advance ``state`` [H, dk, dv] by one token, and return its output [H, 1, dv]; operands as in ``_several``."""
    state *= log_decay.exp()[..., None]
    change = (value - key @ state) * beta[..., None]
    state.baddbmm_(key.transpose(1, 2), change)
    return query @ state


def _several(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:  # noqa: PLR0917
    """Advance ``state`` [H, dk, dv] by a block of c tokens, and return their outputs [H, c, dv].

    ``query``, ``key`` [H, c, dk]; ``value`` [H, c, dv]; ``log_decay``, ``beta`` [H, c]. A token's change of the state
    depends on the changes before it, so they are the solution of a triangular system.
    """
    sums = log_decay.clamp(min=LOWEST_DECAY).double().cumsum(dim=1)  # [H, c]
    between = (sums[:, :, None] - sums[:, None]).tril_().exp_().float().tril_()  # decay from token j to token i
    start = sums.exp().float()[..., None]  # decay from before the block to each token
    system = (key @ key.transpose(1, 2) * between * beta[..., None]).tril_(-1)
    wanted = (value - key @ state * start) * beta[..., None]
    changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = query @ state * start + (query @ key.transpose(1, 2) * between) @ changes
    state *= start[:, -1:]
    state.baddbmm_((key * between[:, -1, :, None]).transpose(1, 2), changes)
    return output
