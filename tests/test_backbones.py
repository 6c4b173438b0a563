"""``bench/backbones.py`` and ``bench/context_memory.py``: their models, and what they make of figures."""

import math

import pytest

from bench.backbone_checkpoints import BACKBONES, config_of
from bench.backbones import GOALS, markdown
from bench.context_memory import growth
from bench.peer_report import goals, summary
from tests.support.random_checkpoint import weight_shapes
from tests.test_peers import result, run
from triptych.config import EngineConfig
from triptych.models.registry import family_of, resolve


@pytest.mark.parametrize("name", BACKBONES)
def test_half_a_billion_parameters(name: str) -> None:
    total = sum(math.prod(shape) for shape in weight_shapes(config_of(name)).values())
    assert 0.45e9 < total < 0.55e9


def test_report() -> None:
    found = result()
    rows = {
        "Triptych --dtype float16": {"engine": "Triptych", "settings": "--dtype float16", "weights": "float16"},
        "Transformers f": {"engine": "Transformers", "settings": "f", "weights": "float16"},
        "llama.cpp F16": {"engine": "llama.cpp", "settings": "F16", "weights": "F16"},
    }
    ours, transformers, half = rows
    found["load"]["at_a_time"] = []
    found |= {"rows": rows, "left_out": []}
    found["runs"] = [
        run(ours, 0, [100.0], [10.0], 0.0, peak_mib=150.0),
        run(transformers, 0, [200.0], [20.0], 0.0, peak_mib=2500.0),
        run(ours, 1, [120.0], [10.0], 0.0, peak_mib=150.0),
        {"row": half, "round": 0, "failed": "it ended with 1"},
    ]
    found |= {"summary": summary(found), "goals": goals(found, GOALS)}
    whole = {key: found[key] for key in ("date", "machine", "versions", "load")}
    text = markdown(whole | {"left_out": ["qwen9 is left out: why"], "backbones": {"llama": found}})
    for line in (
        "- qwen9 is left out: why",
        "| llama | 483 M | Triptych | `--dtype float16` | 110 (100–120) | 10.0 (10.0–10.0) | 150 (150–150) | 345 |",
        "| llama | 483 M | llama.cpp | `F16` | – | – | – | – |",
        "- llama: llama.cpp F16, round 1: failed: it ended with 1",
        "| llama | `--dtype float16` | time per token (ms) | Transformers f | 0.50 | ≤ 0.45 | no |",
        "| llama | `--dtype float16` | time to first token (ms) | Transformers f | 0.55 | ≤ 0.6 | yes |",
    ):
        assert line in text.splitlines(), text


def test_windows_bound_what_a_request_holds() -> None:
    config = config_of("gemma3")
    engine = EngineConfig(max_num_batched_tokens=1024)
    points = {one["tokens"]: one for one in growth(resolve(family_of(config).adapter)(config).decoder_config, engine)}
    assert points[1024]["bytes"] == points[1024]["bytes_without_freeing"]
    assert points[16384]["pages"] == {"full": 1024, "window 512": points[131072]["pages"]["window 512"]}
    assert points[16384]["bytes"] < 0.3 * points[16384]["bytes_without_freeing"]
