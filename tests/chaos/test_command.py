"""The faults of ``triptych chaos``, with fewer requests: what is asked is answered, rightly, and all is back after it.

Times aren't compared here, since other tests share the machine: the command compares them.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.measure.chaos.bench import Bench
from triptych.measure.chaos.faults import FAULTS, Fault
from triptych.measure.chaos.measure import run_faults

BY_DEFAULT = ("kill-e",)
FEW, MANY = 12, 64
"""Requests of the default tests, and of the slow ones."""
REPEATS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("faults") / "tiny")


def by_topology(faults: Sequence[Fault]) -> dict[str, list[Fault]]:
    """Faults that share a service, without their limits of time."""
    found = defaultdict(list)
    for fault in faults:
        found[fault.topology].append(replace(fault, limits={}))
    return found


SHORT = by_topology([fault for fault in FAULTS if fault.name in BY_DEFAULT])
LONG = by_topology([again for fault in FAULTS for again in fault.repeated(REPEATS)])


def check(folder: Path, faults: Sequence[Fault], num_requests: int) -> None:
    config = ServeConfig(
        model=folder,
        engine=EngineConfig(threads=1, dtype="float32", kv_cache_tokens=32768),
        frontend=FrontendConfig.of(port=0),
    )
    lines: list[str] = []
    results = asyncio.run(run_faults(Bench(config, "tiny", num_requests, lines.append), faults, lambda _: None))
    log = "\n".join(lines)
    assert {one.fault.name: one.failures for one in results} == {fault.name: [] for fault in faults}, log
    assert all(one.outcomes for one in results)
    assert "Traceback" not in log, log
    assert "while idle" not in log, log


@pytest.mark.slow
@pytest.mark.parametrize("topology", SHORT)
def test_few_requests(folder: Path, topology: str) -> None:
    check(folder, SHORT[topology], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("topology", LONG)
def test_many_requests(folder: Path, topology: str) -> None:
    check(folder, LONG[topology], MANY)
