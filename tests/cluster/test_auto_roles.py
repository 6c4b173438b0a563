"""A real service whose roles follow its load."""

import asyncio
import contextlib
import time

import httpx
import pytest

from triptych.cluster.control_client import ControlClient
from triptych.cluster.service import Service
from triptych.config import ClusterConfig, ServeConfig
from triptych.demo import MODEL_DIR
from triptych.measure.load.client import Sample, ask
from triptych.measure.load.pictures import picture
from triptych.measure.load.questions import chat_body, content, words
from triptych.topology import Role, Topology

PATIENCE = 180.0
"""Seconds in which roles must have followed."""
CONCURRENCY = 12


def _roles(control: str) -> dict[str, Role]:
    with ControlClient(control, ClusterConfig()) as client:
        return {one.name: one.role for one in client.status().instances}


async def _load(http: httpx.AsyncClient, samples: list[Sample], pictures: int, length: int) -> None:
    """Keep requests running until cancelled."""

    async def client(number: int) -> None:
        for seed in range(number, 10**6, CONCURRENCY):
            files = [picture(8 * seed + place, 224, 224) for place in range(pictures)]
            body = chat_body("demo", content(files, words(seed, length)), 8 if pictures else 64)
            samples.append(await ask(http, body))

    await asyncio.gather(*(client(number) for number in range(CONCURRENCY)))


@pytest.mark.slow
def test_pictures_split_a_service_and_text_joins_it() -> None:
    async def run() -> None:
        config = ServeConfig(model=MODEL_DIR).having(
            {
                "port": 0,
                "control_port": 0,
                "threads": 1,
                "auto_roles": True,
                "lease_expiry": 30.0,
                "served_model_name": "demo",
            }
        )
        samples: list[Sample] = []
        async with Service(config, Topology.parse("4EPD"), lambda _: None, restart=False) as service:
            await service.wait_until_ready()
            async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=None) as http:
                for pictures, length, is_split in ((6, 16, True), (0, 512, False)):
                    load = asyncio.create_task(_load(http, samples, pictures, length))
                    began = time.monotonic()
                    while (Role.EPD not in (await asyncio.to_thread(_roles, service.control)).values()) is not is_split:
                        assert time.monotonic() < began + PATIENCE, await asyncio.to_thread(_roles, service.control)
                        assert not load.done()
                        await asyncio.sleep(0.5)
                    load.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await load
        assert len(samples) > CONCURRENCY
        assert [one.error for one in samples if one.error] == []

    asyncio.run(run())
