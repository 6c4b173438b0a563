"""What a rollout may change of a service's settings."""

from pathlib import Path

import pytest

from triptych.config import EngineConfig, ServeConfig, changed
from triptych.errors import ConfigError

CONFIG = ServeConfig(model=Path("/model"), engine=EngineConfig(dtype="float32", max_num_seqs=8))


def test_settings_of_instances_change_and_all_others_stay() -> None:
    after = changed(CONFIG, {"max-num-seqs": "16", "--block-size": "32", "encode_cache_mb": "0", "cuda_graphs": "off"})
    assert (after.engine.max_num_seqs, after.engine.page_size, after.engine.cuda_graphs) == (16, 32, False)
    assert after.encode.encode_cache_mb == 0
    assert after.engine.dtype == "float32"
    assert (after.frontend, after.model, after.lease) == (CONFIG.frontend, CONFIG.model, CONFIG.lease)
    assert changed(CONFIG, {}) == CONFIG


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "float16"}, "--dtype can't change in a rollout: old and new instances couldn't exchange rows"),
        ({"kv_cache_dtype": "float16"}, "--kv-cache-dtype can't change"),
        ({"quantization": "int8"}, "--quantization can't change"),
        ({"encoder_quantization": "int8"}, "--encoder-quantization can't change in a rollout: old and new instances"),
        ({"fabric": "nixl"}, "--fabric can't change"),
        ({"cpus": "0"}, "--cpus can't change in a rollout: the cores are those of the supervisor"),
        ({"port": "1"}, "--port is no setting of instances"),
        ({"nonsense": "1"}, "--nonsense is no setting of instances"),
        ({"": "1"}, "-- is no setting of instances"),
        ({"max_num_seqs": "0"}, "--max-num-seqs 0 is too small"),
        ({"max_num_seqs": "9" * 5000}, "is not a whole number"),
        ({"max_num_seqs": "many"}, "--max-num-seqs 'many' is not a whole number"),
        ({"kv_cache_memory": "lots"}, "--kv-cache-memory 'lots'"),
        ({"max_num_seqs": "1", "max-num-seqs": "2"}, "is there twice"),
        ({"page_size": "1", "block_size": "2"}, "is there twice"),
        ({"max_model_len": "64", "kv_cache_tokens": "32"}, "doesn't fit in --kv-cache-tokens 32"),
    ],
)
def test_what_cannot_change_is_refused(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        changed(CONFIG, settings)
    assert says in str(refused.value)


def test_a_setting_that_must_stay_may_be_repeated() -> None:
    assert changed(CONFIG, {"dtype": "float32"}) == CONFIG
