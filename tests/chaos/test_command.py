"""The faults of ``triptych chaos``, with fewer requests: what is asked is answered, rightly, and all is back after it.

Times aren't compared here, since other tests share the machine: `triptych chaos` compares them.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from triptych.chaos.faults import FAULTS, Fault
from triptych.chaos.measure import Bench, run_faults
from triptych.config import EngineConfig, FrontendConfig, ServeConfig

BY_DEFAULT = ("kill-e", "kill-p", "drain-pd", "kill-frontend", "kill-only-e", "disconnects")
NUM_REQUESTS = 12
NUM_REQUESTS_SLOW = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("faults") / "tiny")


def check(folder: Path, fault: Fault, num_requests: int) -> None:
    config = ServeConfig(
        model=folder,
        engine=EngineConfig(threads=1, dtype="float32", kv_cache_tokens=32768),
        frontend=FrontendConfig.of(port=0),
    )
    lines: list[str] = []
    bench = Bench(config, "tiny", num_requests, lines.append)
    (result,) = asyncio.run(run_faults(bench, [replace(fault, limits={})], lambda _: None))
    log = "\n".join(lines)
    assert not result.failures, f"{result.failures}\n{log}"
    assert result.outcomes
    assert "Traceback" not in log, log
    assert "while idle" not in log, log


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in BY_DEFAULT], ids=lambda one: one.name)
def test_few_requests(folder: Path, fault: Fault) -> None:
    check(folder, fault, NUM_REQUESTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [again for fault in FAULTS for again in fault.repeated(2)], ids=lambda fault: fault.name
)
def test_many_requests(folder: Path, fault: Fault) -> None:
    check(folder, fault, NUM_REQUESTS_SLOW)
