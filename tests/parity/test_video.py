"""Videos are answered as transformers answers them: whatever the container, the topology, the chunks and the pools; and
a long one is prefilled before its last frames are encoded."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.clips import clip
from tests.support.harness import FLOAT32, Messages, running
from tests.support.mp4_edits import with_matrix
from tests.support.stage_loops import answer_of_two_encoders, count_parts, encode_loops
from tests.support.video_cases import Model, answered, image_part, listed, user, video_part
from triptych.config import EncodeConfig
from triptych.encode.loop import EncodeLoop
from triptych.encode.store import EmbeddingRows
from triptych.models.base import EncoderInput
from triptych.server.instance import InstanceProcess

CASES: dict[str, Messages] = {
    "mp4": user(video_part(clip("mp4", frames=50)), "What happens?"),
    "webm": user("Look: ", video_part(clip("webm", frames=40, width=64, height=96))),
    "gif and an image": user(video_part(clip("gif", frames=9)), "or ", image_part(96, 64, 1), " which?"),
    "two videos": user(video_part(clip("mp4", frames=30, seed=3)), video_part(clip("mp4", frames=20, seed=4)), "Same?"),
    "a list of frames": user(image_part(64, 64, 2), video_part(listed([0, 1, 2, 3, 4], 1.0)), "And now?"),
    "frames that stand still": user(video_part(listed([7] * 8)), "Does it move?"),
    "one frame": user(video_part(clip("mp4", frames=1)), "What is it?"),
    "turned": user(video_part(with_matrix(clip("mp4", frames=25, seed=5), (0, 1, -1, 0))), "Which way is up?"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    torch.set_num_threads(1)
    yield Model(make_checkpoint(tmp_path_factory.mktemp("video")), CASES)
    asyncio.set_event_loop(None)


@pytest.mark.parametrize("topology", ["1EPD", "1E1PD", "1E1P1D", "2E2PD"])
def test_topologies(model: Model, topology: str) -> None:
    assert answered(model, topology) == model.answers


@pytest.mark.parametrize("topology", ["1EPD", "1E1P1D"])
@pytest.mark.parametrize("chunk", [7, 4096])
def test_prefill_chunks(model: Model, topology: str, chunk: int) -> None:
    assert answered(model, topology, replace(FLOAT32, max_num_batched_tokens=chunk)) == model.answers


@pytest.mark.parametrize("topology", ["1E1PD", "1E1P1D"])
@pytest.mark.parametrize("block_rows", [1, 8])
def test_receive_pool_of_one_block(model: Model, topology: str, block_rows: int) -> None:
    engine = replace(FLOAT32, receive_blocks=1, receive_block_rows=block_rows, kv_receive_blocks=4)
    assert answered(model, topology, engine) == model.answers


@pytest.mark.parametrize("patches", [1, 50, 10**6])
def test_batches(model: Model, patches: int) -> None:
    """However many parts go through the tower together, and however little is remembered of them."""
    encode = EncodeConfig(encode_batch_patches=patches, encode_cache_mb=0)
    assert answered(model, "1E1PD", encode=encode) == model.answers


@pytest.mark.slow
def test_an_encoder_that_is_lost_in_the_middle_of_a_video(model: Model) -> None:
    [item] = model.prompts[0].items
    assert answer_of_two_encoders(model.folder, CASES["mp4"], item.plan.rows) == model.answers[0]


def test_a_second_chat_turn_does_not_encode_the_video_again(model: Model) -> None:
    question = CASES["mp4"]
    more = [*question, {"role": "assistant", "content": "It moves."}, {"role": "user", "content": "And then?"}]

    async def run() -> None:
        async with running(model.folder, "1E1PD") as service:
            await service.answer(question, max_tokens=4)
            warm = await service.answer(more)
            assert [host.num_requested for host in encode_loops(service)] == [1]
            async with running(model.folder, "1E1PD") as fresh:
                assert await fresh.answer(more) == warm

    asyncio.run(run())


def test_clips_that_share_frames_share_the_work(model: Model) -> None:
    seen: list[int] = []
    first, second = listed([0, 1, 2, 3, 4, 5]), listed([0, 1, 2, 3, 8, 9])

    async def run() -> None:
        engine = replace(FLOAT32, enable_prefix_caching=False)
        async with running(model.folder, "1E1PD", engine, prepare=lambda one: count_parts(one, seen)) as service:
            await service.answer(user(video_part(first), "?"), max_tokens=1)
            assert sum(seen) == 3
            await service.answer(user(video_part(second), "?"), max_tokens=1)
            assert sum(seen) == 4, "two of three pairs of frames were known"
            await service.answer(user(video_part(first), "!"), max_tokens=1)
            await service.answer(user(video_part(listed([8, 9] * 4)), "!"), max_tokens=1)
            assert sum(seen) == 4

    asyncio.run(run())


def test_prefill_begins_before_the_last_frame_is_encoded(model: Model) -> None:
    """The tower stops after the first parts until prefill has computed tokens behind their rows."""
    go_on = threading.Event()
    stood = threading.Event()
    parts = 0

    def stop_midway(instance: InstanceProcess) -> None:
        for host in instance.loops:
            if isinstance(host, EncodeLoop):
                encode = host.runner.encode

                def slow(inputs: Sequence[EncoderInput], encode: Any = encode) -> list[EmbeddingRows]:
                    nonlocal parts
                    parts += len(inputs)
                    if parts > 4:
                        stood.set()
                        assert go_on.wait(20)
                    rows: list[EmbeddingRows] = encode(inputs)
                    return rows

                host.runner.encode = slow  # type: ignore[method-assign]

    async def run() -> None:
        prompt = model.prompts[0]
        engine = replace(FLOAT32, receive_block_rows=4)
        async with running(
            model.folder, "1E1PD", engine, encode=EncodeConfig(encode_batch_patches=1), prepare=stop_midway
        ) as service:
            asking = asyncio.create_task(service.answer(CASES["mp4"]))
            (host,) = service.engine_loops()
            spans = prompt.items[0].placement.spans
            assert len(spans) == 5
            async with asyncio.timeout(20):
                while not stood.is_set() or host.num_computed_tokens < spans[2].end:
                    await asyncio.sleep(0.005)
            assert host.num_computed_tokens < spans[4].end
            go_on.set()
            assert await asking == model.answers[0]

    asyncio.run(run())


def test_a_request_that_ends_while_its_video_is_encoded(model: Model) -> None:
    async def run() -> None:
        async with running(model.folder, "1E1PD", encode=EncodeConfig(encode_batch_patches=1)) as service:
            for delay in (0.0, 0.01, 0.03, 0.06, 0.1):
                asking = asyncio.create_task(service.answer(CASES["two videos"]))
                await asyncio.sleep(delay)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                for request in list(service.frontend.router.debug_state().dispatched):
                    service.frontend.router.lifecycle.cancel(request)
            assert await service.answer(CASES["mp4"]) == model.answers[0]
            (host,) = encode_loops(service)
            async with asyncio.timeout(20):
                while not host.idle or host.debug_state().parts:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_an_image_does_not_wait_for_all_of_a_long_video(model: Model) -> None:
    order = []

    async def run() -> None:
        async with running(model.folder, "1E1PD", encode=EncodeConfig(encode_batch_patches=1)) as service:

            async def ask(name: str, messages: Messages) -> None:
                await service.answer(messages, max_tokens=1)
                order.append(name)

            long = user(video_part(clip("mp4", frames=300)), "?")
            await asyncio.gather(ask("video", long), ask("image", user(image_part(64, 64, 9), "?")))

    asyncio.run(run())
    assert order == ["image", "video"]
