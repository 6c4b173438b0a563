"""What formats of 4-bit floating point (E2M1) have in common."""

from triptych.layers.stored.format import LayerTensors

PER_BYTE = 2
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of codes 0 to 15."""


def check_inputs(tensors: LayerTensors, inputs: int, group: int) -> None:
    """Raise CheckpointError, naming the layer, unless its inputs are whole groups."""
    if inputs % group:
        raise tensors.wrong(f"{inputs} inputs aren't whole groups of {group}")
