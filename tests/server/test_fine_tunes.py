"""Two fine-tunes of one model differ in the values of a tensor alone: same configuration, names, shapes and file sizes.
They never exchange an embedding or a page of the KV cache."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import make_checkpoint
from tests.support.harness import FLOAT32, make_instance, run_instance, running
from tests.support.prompt_parts import image_part, png, user
from tests.support.stage_loops import encode_loops
from triptych.checkpoint.reader import Checkpoint
from triptych.config import EncodeConfig, EngineConfig, FrontendConfig, ServeConfig
from triptych.encode.store import MemoryStore
from triptych.errors import CheckpointError, StartError
from triptych.messages.stats import InstanceStats
from triptych.prompt.prompt import PromptBuilder
from triptych.server import build_encoder
from triptych.server.frontend import Frontend
from triptych.server.model_bundle import ModelBundle
from triptych.topology import Role

PICTURE = [user(image_part(png(64, 96, "red"))), user({"type": "text", "text": "What?"})]


def negate(folder: Path, part: str) -> None:
    """Change the sign of the first tensor whose name has this part."""
    file = folder / "model.safetensors"
    size, tensors = file.stat().st_size, load_file(file)
    key = min(key for key in tensors if part in key)
    save_file(tensors | {key: -tensors[key]}, file, {"format": "pt"})
    assert file.stat().st_size == size


@pytest.fixture(scope="module")
def fine_tunes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    first = make_checkpoint(tmp_path_factory.mktemp("fine_tunes") / "first")
    second = first.with_name("second")
    shutil.copytree(first, second)
    negate(second, "visual.merger")
    return first, second


def bundle(folder: Path, **engine: str) -> ModelBundle:
    return ModelBundle(Checkpoint(folder), replace(EngineConfig(device="cpu", threads=1), **engine))  # type: ignore[arg-type]


def test_a_frontend_refuses_an_instance_of_the_other(fine_tunes: Sequence[Path]) -> None:
    async def refused(frontends: Path, instances: Path, role: Role) -> None:
        configs = [
            ServeConfig(model=folder, engine=FLOAT32, frontend=FrontendConfig.of(port=0))
            for folder in (frontends, instances)
        ]
        async with Frontend(configs[0]) as frontend:
            instance = make_instance(configs[1], role, "stranger", frontend.control)
            with pytest.raises(
                StartError, match=r"another model than this frontend: weights \w{12} here, \w{12} there"
            ):
                await asyncio.to_thread(run_instance, instance)
            assert len(frontend.router.membership) == 0

    first, second = fine_tunes
    asyncio.run(refused(first, second, Role.E))
    asyncio.run(refused(second, first, Role.PD))


def test_keys_and_layouts_differ(fine_tunes: Sequence[Path]) -> None:
    first, second = fine_tunes
    one, other = (PromptBuilder(folder).build(PICTURE).items[0].key for folder in fine_tunes)
    assert one != other
    assert bundle(first).row_layout.digest != bundle(second).row_layout.digest
    assert bundle(first).kv_layout.digest != bundle(second).kv_layout.digest


def test_layouts_cover_the_dtypes_of_weights_and_of_rows(fine_tunes: Sequence[Path]) -> None:
    first, _ = fine_tunes
    half, auto, whole = bundle(first, dtype="float16"), bundle(first), bundle(first, dtype="float32")
    quantized, brief = bundle(first, quantization="int8"), bundle(first, dtype="bfloat16")
    assert half.row_layout == auto.row_layout == quantized.row_layout  # the towers aren't quantized
    towers, brief_towers = (bundle(first, encoder_quantization="int8", dtype=name) for name in ("auto", "bfloat16"))
    assert len({one.row_layout.digest for one in (half, whole, brief, towers, brief_towers)}) == 5
    assert towers.kv_layout == half.kv_layout
    wide = bundle(first, kv_cache_dtype="float32")
    assert half.kv_layout == auto.kv_layout
    assert len({one.kv_layout.digest for one in (half, whole, quantized, brief, wide)}) == 5


def test_a_cache_that_one_has_filled_gives_the_other_nothing(
    fine_tunes: Sequence[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []

    async def answer(folder: Path, engine: EngineConfig = FLOAT32) -> list[int]:
        async with running(folder, "1E1PD", engine, encode=EncodeConfig(decode_workers=1)) as service:
            tokens = await service.answer(PICTURE, max_tokens=8)
            (loop,), stats = encode_loops(service), InstanceStats()
            loop.add_stats(stats)
            assert stats.encode is not None
            found.append((stats.encode.cache_queries, stats.encode.cache_hits))
            return tokens

    alone = [asyncio.run(answer(folder)) for folder in fine_tunes]
    assert alone[0] != alone[1]
    shared = MemoryStore(2**20)
    monkeypatch.setattr(build_encoder, "MemoryStore", lambda _: shared)
    found.clear()
    for _ in range(2):
        assert [asyncio.run(answer(folder)) for folder in fine_tunes] == alone
    for change in ({"dtype": "float16"}, {"encoder_quantization": "int8"}):
        asyncio.run(answer(fine_tunes[0], replace(FLOAT32, **change)))  # type: ignore[arg-type]
    assert found == [(1, 0), (1, 0), (1, 1), (1, 1), (1, 0), (1, 0)]


def test_weights_that_are_replaced_while_they_are_loaded(fine_tunes: Sequence[Path], tmp_path: Path) -> None:
    folder = tmp_path / "replaced"
    shutil.copytree(fine_tunes[0], folder)
    model = bundle(folder)
    model.check_unchanged()
    assert model.row_layout
    negate(folder, "embed_tokens")
    with pytest.raises(CheckpointError, match="changed while it was loaded: weights"):
        model.check_unchanged()
