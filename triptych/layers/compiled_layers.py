"""Several layers of a decoder in one call of the compiled kernels.

With few tokens, what Python does between two layers takes as long as reading a tenth of the weights.
"""

import ctypes
import weakref
from collections.abc import Sequence

from torch import Tensor

from triptych.layers.attention.base import AttentionBatch, KVTensors
from triptych.layers.attention.compiled import AttentionOperands, raise_failure, set_layer
from triptych.layers.compiled_layer import AttendLayer, AttendLayerOperands, FinishLayer, FinishLayerOperands


class LayerOperands(ctypes.Structure):
    """``Layer`` in ``kernels/cpu/layer.c``."""

    _fields_ = (
        ("before", AttendLayerOperands),
        ("after", FinishLayerOperands),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "sinks")),
        *((name, ctypes.c_int64) for name in ("num_pages", "page_size", "cache_stride", "window", "chunked", "format")),
        ("spans", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        *((name, ctypes.c_int64) for name in ("step", "rotation")),
    )


class RunLayers:
    """All layers of a decoder, of which a call runs some that follow each other. Results are bit-identical to the
    layers' own calls."""

    def __init__(
        self, halves: Sequence[tuple[AttendLayer, FinishLayer]], rotations: Sequence[int], groups: Sequence[int]
    ):
        """``rotations`` and ``groups`` are each layer's number of its rope and of its group in the KV cache."""
        self._halves, self._rotations = halves, rotations
        kinds = [(group, attend.kernel, attend.shape) for group, (attend, _) in zip(groups, halves, strict=True)]
        self._kinds = list(dict.fromkeys(kinds))
        """Kinds of steps: of one group of the cache, with the same heads."""
        self._steps = [self._kinds.index(kind) for kind in kinds]
        self._layers = (LayerOperands * len(halves))()
        self._cache: weakref.ref[KVTensors] | None = None
        """Whose addresses ``_layers`` has."""
        self._run = halves[0][0].kernel.library.run_layers
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [pointer, integer, *[pointer] * 4, integer, pointer]
        self._run.restype = ctypes.c_int

    def takes(self, cache: KVTensors) -> bool:
        """Return whether the kernels support the cache's formats."""
        return all(attend.takes(parts[0].dtype) for (attend, _), parts in zip(self._halves, cache.layers, strict=True))

    def __call__(
        self,
        some: range,
        hidden: Tensor,
        cache: KVTensors,
        rotations: Sequence[tuple[Tensor, Tensor]],
        batches: Sequence[AttentionBatch],
    ) -> Tensor:
        """Return a new tensor [T, hidden] for ``hidden`` [T, hidden], after the layers ``some``, at least one of them.

        ``rotations`` are the cosines and sines of each rope, [T, 1, head_dim], and ``batches`` are those of each group
        of the cache. All tensors are contiguous float32. Raises as ``PagedAttention`` does.
        """
        self._point_to(cache)
        operands = [kernel.shared_operands(batches[group], shape) for group, kernel, shape in self._kinds]
        steps = (AttentionOperands * len(operands))(*operands)
        pointers = ctypes.c_void_p * len(rotations)
        cos, sin = (pointers(*(pair[part].data_ptr() for pair in rotations)) for part in range(2))
        outputs = hidden.new_empty((2, *hidden.shape))
        first, tensors = self._layers[some.start], (hidden.data_ptr(), outputs.data_ptr())
        done = self._run(ctypes.byref(first), len(some), *tensors, cos, sin, len(hidden), steps)
        if done != 1:
            steps[first.step].num_pages = first.num_pages
            raise_failure(done, steps[first.step])
        return outputs[(len(some) - 1) % 2]

    def _point_to(self, cache: KVTensors) -> None:
        if self._cache is not None and self._cache() is cache:
            return
        numbers = zip(self._steps, self._rotations, strict=True)
        for layer, (attend, finish), parts, (step, rotation) in zip(
            self._layers, self._halves, cache.layers, numbers, strict=True
        ):
            layer.before, layer.after, layer.step, layer.rotation = attend.operands, finish.operands, step, rotation
            keys, values = parts
            set_layer(layer, keys, values, attend.options, attend.shape[2])
        self._cache = weakref.ref(cache)
