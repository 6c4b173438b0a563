"""Rotary settings of GGUF files: what factors say that configs say otherwise, and factors that are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from tests.support.checkpoints import load_adapter
from tests.support.gguf_files import SIZES, write_gguf
from tests.support.tiny import Tiny, make_tiny
from triptych.checkpoint.gguf import folder
from triptych.checkpoint.gguf.architectures import config_of
from triptych.checkpoint.gguf.file import GgufFile, GgufTensor
from triptych.checkpoint.gguf.folder import gguf_folder
from triptych.errors import CheckpointError
from triptych.layers.rope import inverse_frequencies
from triptych.layers.specs import AttentionSpec

F32 = GGMLQuantizationType.F32


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "user_cache", lambda: tmp_path / "cache")


def frequencies(place: Path) -> tuple[torch.Tensor, float]:
    """Those of a checkpoint's first layer, and the factor of cosines and sines."""
    mixer = load_adapter(place).decoder_config.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    return inverse_frequencies(mixer.head_dim, mixer.rope)


def test_factors_of_llama_3(tmp_path: Path) -> None:
    """Frequencies of all three kinds: as they are, divided by the factor, and between."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 1024}
    tiny = Tiny(SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    source = make_tiny(tmp_path / "source", tiny, config={"rope_scaling": scaling})
    dense = write_gguf(source, tmp_path / "m.gguf", "llama", F32)
    ours, factor = frequencies(gguf_folder(tmp_path / "m.gguf"))
    theirs, _ = frequencies(dense)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=1e-6)
    assert factor == 1
    quotients = frequencies(make_tiny(tmp_path / "plain", tiny))[0] / ours
    assert (quotients < 1.01).any()
    assert ((quotients > 1.1) & (quotients < 7)).any()
    assert (quotients > 7.9).any()


@pytest.mark.parametrize(
    ("values", "kind", "says"),
    [
        ([1.0, 0.0], F32, "must be positive numbers"),
        ([1.0, np.inf], F32, "must be positive numbers"),
        ([1.0, 2.0], GGMLQuantizationType.F16, "numbers in float32"),
    ],
)
def test_factors_that_are_refused(tmp_path: Path, values: list[float], kind: GGMLQuantizationType, says: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(np.array(values, np.float32).tobytes())
    tensors = {
        "token_embd.weight": GgufTensor("token_embd.weight", F32, (8, 6), 0),
        "rope_freqs.weight": GgufTensor("rope_freqs.weight", kind, (2,), 0, path),
    }
    counts = {"attention.head_count": 3, "embedding_length": 6, "block_count": 1, "feed_forward_length": 8}
    counts |= {"context_length": 64, "attention.layer_norm_rms_epsilon": 1}
    settings = {"general.architecture": "llama"} | {f"llama.{name}": value for name, value in counts.items()}
    with pytest.raises(CheckpointError, match=says):
        config_of(GgufFile(path, {**settings}, tensors))
