"""What ``serve`` says that it chose."""

from pathlib import Path

from tests.support.checkpoints import make_checkpoint
from triptych.cli.choices import choices, size
from triptych.config import EngineConfig, FrontendConfig, MemorySize, ServeConfig
from triptych.topology import Topology


def test_five_lines_name_what_was_chosen_and_its_flags(tmp_path: Path) -> None:
    engine = EngineConfig(threads=3, kv_cache_memory=MemorySize.parse("8GiB"), max_num_seqs=7)
    frontend = FrontendConfig.of(served_model_name="tiny", api_key=("one-key", "two-keys"), max_queue=99)
    config = ServeConfig(model=make_checkpoint(tmp_path / "tiny"), engine=engine, frontend=frontend)
    model, processes, compute, load, access = choices(config, Topology.parse("1E2PD"))
    assert model.startswith("model: tiny, qwen3_vl, takes text, image, video, ")
    assert processes.startswith("processes: 1E2PD is 3, with 3 threads each on ")
    assert "dtype auto, quantization none" in compute
    assert "7 requests and 512 tokens a step in each language instance, KV caches of 8GiB, 99 requests" in load
    assert access.startswith("access: 2 API keys, media in requests or from nowhere ")
    assert "one-key" not in access
    assert (
        "KV caches of 25% of free memory" in list(choices(ServeConfig(model=config.model), Topology.parse("1EPD")))[3]
    )
    assert "without an API key" in list(choices(ServeConfig(model=config.model), Topology.parse("1EPD")))[4]


def test_sizes_have_few_digits() -> None:
    assert [size(number) for number in (1024, 10 * 2**20, 3 * 2**29)] == ["1.0 KiB", "10.0 MiB", "1.5 GiB"]
