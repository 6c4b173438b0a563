"""Rollouts to another model and back, again and again, under streams: none is lost, and each is of one model."""

from pathlib import Path

import pytest

from triptych import running_time
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.demo import MODEL_DIR
from triptych.measure.chaos.acts import rolls_out
from triptych.measure.chaos.another_model import make_another
from triptych.measure.chaos.bench import Bench
from triptych.measure.chaos.walk import TOPOLOGIES, Ground, TimedAct
from triptych.measure.chaos.walking import SHARE, run_walk, walk_lines
from triptych.topology import Topology

STREAMS = 64
TIMES = 5
"""How often there and back."""


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_rollouts_to_another_model_and_back_lose_no_stream(tmp_path: Path, topology: str) -> None:
    other = make_another(MODEL_DIR, tmp_path / "other")
    ground = Ground(Topology.parse(topology), MODEL_DIR, other, (), tmp_path)
    config = ServeConfig(
        model=MODEL_DIR,
        engine=EngineConfig(threads=1, dtype="float32", kv_cache_tokens=32768),
        frontend=FrontendConfig.of(port=0),
    )
    lines: list[str] = []
    bench = Bench(config, "demo", STREAMS * SHARE, lines.append)
    steps = [TimedAct(1.0, rolls_out(*(other, MODEL_DIR) * TIMES))]
    result = running_time.run(run_walk(bench, steps, ground, None, lines.append))
    log = "\n".join([*lines, *walk_lines(result)])
    assert (result.undone, result.failures) == ([], []), log
    assert [mark.what for mark in result.marks].count("all replaced") == 2 * TIMES
    assert len(result.outcomes) > STREAMS, "there was hardly any load"
    assert "Traceback" not in log, log
