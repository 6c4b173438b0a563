"""The dtype of the KV cache is an instance's own choice, and all that share KV have made the same one."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.harness import FLOAT32, make_instance, run_instance, running
from triptych.checkpoint.reader import Checkpoint
from triptych.config import EngineConfig, MemorySize, ServeConfig
from triptych.errors import StartError
from triptych.layers.attention.kv_format import SCALE_BYTES
from triptych.layers.parallel import SINGLE_RANK
from triptych.layers.specs import AttentionSpec
from triptych.messages.rows import RowKind
from triptych.server.model_bundle import ModelBundle
from triptych.topology import Role

DEFAULT = replace(FLOAT32, dtype="auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("kv") / "tiny")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_cache_and_rows_have_it(folder: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    model = ModelBundle(Checkpoint(folder), replace(DEFAULT, kv_cache_dtype=name))
    cache = model.make_cache(SINGLE_RANK, [3], "").whole
    assert {tensor.dtype for tensor in cache.tensors} == {dtype}
    layout = model.kv_layout
    assert (layout.dtype, layout.row_bytes) == (name, layout.width * dtype.itemsize)
    assert model.row_layout.dtype == "float32", "media rows have the dtype of activations"


def test_the_same_memory_holds_twice_as_much(folder: Path) -> None:
    async def pages(engine: EngineConfig) -> int:
        async with running(folder, "1PD", engine) as service:
            return service.engine_loops()[0].scheduler.cache.num_pages

    limited = replace(DEFAULT, kv_cache_tokens=0, kv_cache_memory=MemorySize(2**20))
    half, single, int8 = (
        asyncio.run(pages(replace(limited, kv_cache_dtype=name))) for name in ("float16", "float32", "int8")
    )
    assert half == 2 * single
    mixer = ModelBundle(Checkpoint(folder), limited).adapter.decoder_config.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    dim = mixer.head_dim
    assert int8 == pytest.approx(half * 2 * dim / (dim + SCALE_BYTES), abs=1), "but for the scales, twice as much"


@pytest.mark.parametrize("role", [Role.P, Role.D, Role.PD])
def test_an_instance_with_another_is_refused(folder: Path, role: Role) -> None:
    """In every role that has a KV cache: it may change its role later."""
    other_dtype = "int8" if role == Role.D else "float32"

    async def run() -> None:
        async with running(folder, "1PD", DEFAULT) as service:
            config = ServeConfig(model=folder, engine=replace(DEFAULT, kv_cache_dtype=other_dtype))
            other = make_instance(config, role, "other", service.frontend.control)
            asyncio.get_running_loop().call_later(30, other.stop)  # if it isn't refused
            with pytest.raises(
                StartError, match=f"the kv rows of other don't fit those of pd0: dtype {other_dtype} here, fl"
            ):
                await asyncio.to_thread(run_instance, other)

    asyncio.run(run())


def test_an_instance_registers_the_layouts_of_all_its_possible_roles(folder: Path) -> None:
    async def run() -> None:
        async with running(folder, "1EPD1E", DEFAULT) as service:
            whole, encoder = service.instances
            assert [layout.kind for layout in encoder.layouts] == [RowKind.MEDIA]
            assert [layout.kind for layout in whole.layouts] == [RowKind.MEDIA, RowKind.KV]
            assert whole.loop_builder is not None
            for role in (Role.E, Role.D):
                built = whole.loop_builder.build_loops(role)
                assert built.layouts == whole.layouts
                for host, _ in built.loops:
                    host.close()

    asyncio.run(run())
