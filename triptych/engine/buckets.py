"""Batch sizes for which decode steps are recorded. A policy without tensors or a device."""

STEP = 8
"""Distance between the larger sizes. Padding rows are cheap, because reading the weights dominates a decode step."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return, ascending, 1, 2, 4, the multiples of 8 up to ``max_num_seqs``, and ``max_num_seqs`` itself."""
    sizes = {size for size in (1, 2, 4, *range(STEP, max_num_seqs, STEP)) if size < max_num_seqs}
    return sorted(sizes | {max_num_seqs})


def bucket_for(num_rows: int, sizes: list[int]) -> int | None:
    """Return the smallest of the ascending ``sizes`` that is at least ``num_rows``; None if there is none."""
    return next((size for size in sizes if size >= num_rows), None)
