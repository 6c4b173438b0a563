"""What each role holds in memory, from the running instances' own objects; and what the frontend imports."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch

from tests.support.checkpoints import DENSE
from tests.support.harness import FLOAT32, running
from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import TensorInfo
from triptych.config import EngineConfig
from triptych.layers.linear import PackedLinear
from triptych.layers.products import CompiledProduct

_FOREIGN = (type, ModuleType, FunctionType)


def reachable(root: Any, seen: set[int]) -> Iterator[Any]:
    """Everything that an object refers to, whatever it is wrapped in, but for code, and the process's globals."""
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or (isinstance(thing, _FOREIGN) and not getattr(thing, "__closure__", None)):
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, MethodType):
            waiting += [thing.__self__, thing.__func__]
        elif isinstance(thing, FunctionType):
            waiting += [cell.cell_contents for cell in thing.__closure__ or () if cell != type(cell)()]
        else:
            waiting += gc.get_referents(thing)
            waiting += list(vars(thing).values()) if hasattr(thing, "__dict__") else []


def weight_elements(host: Any) -> tuple[int, list[torch.Tensor]]:
    """How many weights a host holds: parameters of its modules, each storage once, and packed matrices."""
    things = list(reachable(host, set()))
    modules = {id(thing): thing for thing in things if isinstance(thing, torch.nn.Module)}.values()
    assert modules, "the walk finds the model"
    parameters = {p.data_ptr(): p for module in modules for p in module.parameters(recurse=False)}
    packed = [tensor for module in modules for tensor in _unpacked(module)]
    loose = {t.data_ptr(): t for t in things if isinstance(t, torch.nn.Parameter)}
    tensors = [*(parameters | loose).values(), *packed]
    return sum(tensor.numel() for tensor in tensors), tensors


def _unpacked(module: torch.nn.Module) -> list[torch.Tensor]:
    """A packed layer's weight and bias."""
    if not isinstance(module, PackedLinear):
        return []
    product = module.product
    assert isinstance(product, CompiledProduct), "the tests run where there is a compiler"
    weight = product.panels.transpose(1, 2).flatten(2).flatten(0, 1)[: product.outputs, : product.inputs]
    return [weight, *([] if product.bias is None else [product.bias])]


def elements(tensors: dict[str, TensorInfo], tower: bool) -> int:
    half = [info for key, info in tensors.items() if key.startswith("model.visual.") == tower]
    assert half
    return sum(torch.Size(info.shape).numel() for info in half)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_an_encode_instance_holds_the_tower_alone_and_a_language_instance_the_decoder_alone(
    folder: Path, dtype: str
) -> None:
    checkpoint = Checkpoint(folder)
    tensors = checkpoint.tensors
    tower, decoder = elements(tensors, tower=True), elements(tensors, tower=False)
    assert tower != decoder
    engine = EngineConfig(**(vars(FLOAT32) | {"dtype": dtype}))

    async def check() -> None:
        async with running(folder, "1E1PD", engine) as service:
            encode, language = (instance.loops for instance in service.instances)
            in_encode, encode_weights = weight_elements(encode)
            in_language, language_weights = weight_elements(language)
            assert in_encode == tower
            assert in_language == decoder + _repeated_norms() + _packed_head(tensors)
            assert not _holds(encode_weights, checkpoint, tower=False)
            assert not _holds(language_weights, checkpoint, tower=True)
            assert _holds(encode_weights, checkpoint, tower=True)
            assert _holds(language_weights, checkpoint, tower=False)

    asyncio.run(check())
    asyncio.set_event_loop(None)


def _repeated_norms() -> int:
    """The norms of queries and keys are kept once for every head."""
    return DENSE.layers * (DENSE.heads + DENSE.kv_heads - 2) * DENSE.head_dim


def _packed_head(tensors: dict[str, TensorInfo]) -> int:
    """The tied matrix is kept twice: as a table, and packed as the head."""
    table = next(info for key, info in tensors.items() if key.endswith("embed_tokens.weight"))
    return torch.Size(table.shape).numel()


def _holds(weights: list[torch.Tensor], checkpoint: Checkpoint, *, tower: bool) -> bool:
    """Whether any matrix among the weights has the values of one of the checkpoint's half. fp16 at the least exact."""
    keys = [key for key, info in checkpoint.tensors.items() if key.startswith("model.visual.") == tower]
    known = {tuple(t.flatten()[:8].half().tolist()) for t in checkpoint.read(keys).values() if t.dim() > 1}
    return any(tuple(w.flatten()[:8].half().tolist()) in known for w in weights if w.dim() > 1)


def test_the_frontend_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, triptych.cli, triptych.server.frontend, triptych.cluster.service;"
        "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == "[]"
