"""Batch sizes for which a decode step is recorded ahead. A policy: no tensors, no device."""

STEP = 8
"""Between the larger sizes. Weights are read once whatever the batch, so a few rows of padding cost next to nothing."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Ascending: 1, 2, 4, the multiples of 8 up to ``max_num_seqs``, and that."""
    sizes = {size for size in (1, 2, 4, *range(STEP, max_num_seqs, STEP)) if size < max_num_seqs}
    return sorted(sizes | {max_num_seqs})


def bucket_for(num_rows: int, sizes: list[int]) -> int | None:
    """The smallest of the ascending ``sizes`` that holds so many rows; None when none does."""
    return next((size for size in sizes if size >= num_rows), None)
