"""Sizes of the steps that are recorded. A policy without tensors or a device."""

STEP = 8
"""Distance between the larger numbers of decodes. Padding rows are cheap, because reading the weights dominates."""
SMALLEST_MIXED = 64
"""Tokens of the smallest step with prompts: up to there, reading the weights dominates, too."""
LARGEST_MIXED = 2048
"""Tokens of the largest one: a step of as many takes about as long to compute as to launch."""


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return, ascending, 1, 2, 4, the multiples of 8 up to ``max_num_seqs``, and ``max_num_seqs`` itself."""
    sizes = {size for size in (1, 2, 4, *range(STEP, max_num_seqs, STEP)) if size < max_num_seqs}
    return sorted(sizes | {max_num_seqs})


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return, ascending, powers of two and numbers halfway between them, up to ``max_num_batched_tokens`` itself or
    ``LARGEST_MIXED``: at most a third of a step is padding, but for the smallest. None if steps have one token."""
    most, size, sizes = min(max_num_batched_tokens, LARGEST_MIXED), SMALLEST_MIXED, list[int]()
    if most < 2:
        return []
    while size < most:
        sizes += [one for one in (size, size * 3 // 2) if one < most]
        size *= 2
    return [*sizes, most]


def bucket_for(num_rows: int, sizes: list[int]) -> int | None:
    """Return the smallest of the ascending ``sizes`` that is at least ``num_rows``; None if there is none."""
    return next((size for size in sizes if size >= num_rows), None)
