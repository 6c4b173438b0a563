"""GGUF files that ``triptych quantize`` writes describe the same model, here and in llama.cpp."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from tests.support.checkpoints import load_adapter, make_checkpoint
from tests.support.doc_examples import free_port
from tests.support.forward import Pool, Prompt, Running, step
from tests.support.gguf_files import SIZES, SOURCES
from tests.support.tiny import Tiny, make_tiny
from triptych.checkpoint.gguf import folder
from triptych.checkpoint.gguf.file import GgufFile, Value
from triptych.checkpoint.gguf.folder import gguf_folder
from triptych.checkpoint.gguf.tokenizer import DEFAULT, PRE_TOKENIZERS, WHOLE_FIRST, tokenizer_json
from triptych.checkpoint.gguf.vocabulary import PROBE, PromptFiles, tokenizer_settings
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError, ConfigError
from triptych.layers.linear import PlainFormat
from triptych.models import gguf_copy
from triptych.models.gguf_copy import MIXES, GgufTypes, write_gguf
from triptych.models.quantize import Copied
from triptych.prompt import tokenizer as prompt_tokenizer

LLAMA_CPP = os.environ.get("TRIPTYCH_TEST_LLAMA_CPP", "")
PRECISE = ["--ctx-size", "256", "--no-repack", "--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]
TOKENS = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 1024}
REFUSED = ("phi3", "gpt-oss", "llama4", "deepseek2")
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512, "head_dim": 64}
"""Whole super-blocks."""
TINY: dict[str, Tiny] = SOURCES | {
    # of this base, one frequency that is read is rounded to five digits otherwise
    "llama 3": Tiny(SOURCES["llama"].config | {"rope_scaling": LLAMA3, "rope_theta": 10223.0}),
    "mistral": Tiny(SIZES | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "user_cache", lambda: tmp_path / "cache")
    monkeypatch.setitem(MIXES, "F32", GgufTypes("F32", "F32", "F32"))


def writing(source: Path, mix: str) -> Iterator[Copied]:
    template = (source / "chat_template.jinja").read_text()
    prompts = PromptFiles(TOKENS, prompt_tokenizer.Tokenizer(source).eos_token_ids, template)
    return write_gguf(source, target(source, mix), mix, prompts)


def target(source: Path, mix: str) -> Path:
    return source.with_name(f"{source.name}-{mix}.gguf")


def written(source: Path, mix: str) -> Path:
    assert list(writing(source, mix))
    return target(source, mix)


def decoder(place: Path) -> Any:
    return load_adapter(place).load_decoder(Checkpoint(place), PlainFormat(torch.float32), torch.device("cpu"))


def logits(place: Path) -> Tensor:
    places = torch.arange(40)
    loaded = decoder(place)
    rows = torch.zeros(0, loaded.config.hidden_size)
    prompt = Prompt(places + 3, places.double().expand(3, -1), places[:0], rows)
    return step(Pool(loaded), [(Running(prompt), len(places))])


@pytest.mark.parametrize("architecture", [name for name in TINY if name not in REFUSED])
def test_the_file_describes_the_same_model(tmp_path: Path, architecture: str) -> None:
    source = make_tiny(tmp_path / "source", TINY[architecture])
    made = gguf_folder(written(source, "F32"))
    ours, theirs = decoder(made).state_dict(), decoder(source).state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-6, rtol=0, msg=name)
    torch.testing.assert_close(logits(made), logits(source), atol=1e-4, rtol=0)
    assert (made / "chat_template.jinja").read_text() == (source / "chat_template.jinja").read_text()
    assert Tokenizer.from_file(str(made / "tokenizer.json")).encode(PROBE).ids
    ends, known = (prompt_tokenizer.Tokenizer(place).eos_token_ids for place in (made, source))
    assert ends >= known


@pytest.mark.parametrize(("mix", "apart"), [("Q8_0", 0.01), ("Q5_K", 0.04), ("Q4_K", 0.08)])
@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["blocks", "super-blocks"])
def test_rounded_weights_are_near(tmp_path: Path, mix: str, apart: float, sizes: dict[str, Any]) -> None:
    source = make_tiny(tmp_path / "source", SOURCES["llama"], config=sizes)
    made = gguf_folder(written(source, mix))
    kinds = {info.dtype for info in Checkpoint(made).tensors.values()}
    assert kinds == {"F32", "Q8_0", mix if sizes else mix.replace("_K", "_1")}
    exact, rounded = decoder(source).state_dict(), decoder(made).state_dict()
    for name, weight in exact.items():
        assert (rounded[name] - weight).norm() <= apart * weight.norm(), name


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_has_no_name_in_the_format_is_refused(tmp_path: Path, architecture: str) -> None:
    source = make_tiny(tmp_path / "source", SOURCES[architecture])
    with pytest.raises(CheckpointError, match="GGUF files") as refused:
        written(source, "F32")
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"], "nothing is left"


def test_what_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    seeing = make_checkpoint(tmp_path / "seeing")
    with pytest.raises(CheckpointError, match="Qwen3-VL has encoders"):
        written(seeing, "Q8_0")
    source = make_tiny(tmp_path / "source", SOURCES["llama"])
    path = written(source, "Q8_0")
    with pytest.raises(ConfigError, match="exists"):
        written(source, "Q8_0")
    path.unlink()
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"] = {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0}, "max_input_chars_per_word": 9}
    tokenizer["model"]["continuing_subword_prefix"] = "##"
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="vocabulary of kind 'WordPiece'"):
        written(source, "Q8_0")
    assert not path.exists()


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("mistral", {"sliding_window": 16}),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 3.0}}),
    ],
)
def test_a_decoder_that_settings_can_not_describe_is_refused_before_values_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, settings: dict[str, Any]
) -> None:
    monkeypatch.delattr(gguf_copy, "_write_values")
    source = make_tiny(tmp_path / "source", TINY[architecture], config=settings)
    with pytest.raises(CheckpointError, match=f"^{source}: GGUF files can't say") as refused:
        written(source, "F32")
    assert ".copy" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"], "nothing is left"


def test_a_file_that_comes_while_a_copy_is_written_stays(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", SOURCES["llama"])
    copying = writing(source, "F32")
    next(copying)
    target(source, "F32").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        list(copying)
    assert target(source, "F32").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"source", "source-F32.gguf"}


def _vocabulary(tokens: list[str], name: str) -> dict[str, Value]:
    types = np.array([3 if text == "<|end|>" else 1 for text in tokens])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.add_bos_token": False,
    }


def _byte_level(folder: Path, name: str) -> dict[str, Value]:
    """Make a folder of a tokenizer of 258 tokens."""
    settings = _vocabulary([*sorted(ByteLevel.alphabet()), "ab", "<|end|>"], name)
    (folder / "tokenizer.json").write_text(tokenizer_json(GgufFile(Path("x"), settings, {})))
    return settings


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS.keys() - {DEFAULT}))
def test_how_text_is_divided_is_found(tmp_path: Path, name: str) -> None:
    """By a name that divides in the same way: some are the same."""
    settings = _byte_level(tmp_path, name)
    found = tokenizer_settings(tmp_path, 260, PromptFiles({"eos_token": "<|end|>"}, [257], "template"))
    assert PRE_TOKENIZERS[str(found["tokenizer.ggml.pre"])] == PRE_TOKENIZERS[name]
    assert (found["tokenizer.ggml.pre"] in WHOLE_FIRST) == (name in WHOLE_FIRST)
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, np.ndarray)
    assert tokens[:258] == settings["tokenizer.ggml.tokens"]
    assert tokens[258:] == ["[PAD258]", "[PAD259]"]
    assert types[257:].tolist() == [3, 5, 5]
    assert found["tokenizer.ggml.merges"] == ["a b"]
    assert found["tokenizer.ggml.eos_token_id"] == 257
    assert found["tokenizer.chat_template"] == "template"


def test_how_models_are_not_trained_is_not_written(tmp_path: Path) -> None:
    """Llama.cpp divides text in a way of its own where a file doesn't say: digits by three, and punctuation apart."""
    settings = _byte_level(tmp_path, DEFAULT)
    del settings["tokenizer.ggml.pre"]
    divided = Tokenizer.from_str(tokenizer_json(GgufFile(Path("x"), settings, {}))).pre_tokenizer
    assert divided is not None
    words = divided.pre_tokenize_str("It's 12345 +~a")
    assert [word for word, _ in words] == ["It", "'", "s", "Ġ", "123", "45", "Ġ", "+~", "a"]
    with pytest.raises(CheckpointError, match="no name for how"):
        tokenizer_settings(tmp_path, 260, PromptFiles({}, [257], None))


@pytest.mark.parametrize(
    ("ends", "refused"),
    [
        ([], "not 0"),
        ([1, 2, 3, 4], "not 4"),
        ([257, 2**40], f"end token {2**40} has no row"),
        ([260], "end token 260 has no row in an embedding of 260"),
    ],
)
def test_end_tokens_that_settings_can_not_name(tmp_path: Path, ends: list[int], refused: str) -> None:
    _byte_level(tmp_path, "qwen2")
    with pytest.raises(CheckpointError, match=refused):
        tokenizer_settings(tmp_path, 260, PromptFiles({}, ends, None))


@pytest.mark.parametrize(("named", "ids"), [({"eos_token": "<|end|>"}, [257, 3, 5]), ({}, [3, 5, 257])])
def test_all_end_tokens_are_written(tmp_path: Path, named: dict[str, str], ids: list[int]) -> None:
    """The one that the tokenizer names is the first."""
    _byte_level(tmp_path, "qwen2")
    found = tokenizer_settings(tmp_path, 260, PromptFiles(named, {3, 5, 257}, None))
    assert [found[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == ids


@pytest.mark.parametrize("begins", [True, False])
def test_a_vocabulary_of_sentencepiece(tmp_path: Path, begins: bool) -> None:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"Helo",
        "lo",
        "▁H",
        "el",
        "ello",
    ]
    settings: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": np.array([2, 3, 3, *[6] * 256, *[1] * 9]),
        "tokenizer.ggml.scores": np.array([0.0] * 264 + [-1.0, -2.0, -3.0, -4.0]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": begins,
    }
    file = tokenizer_json(GgufFile(Path("x"), settings, {}))
    (tmp_path / "tokenizer.json").write_text(file)
    prompts = PromptFiles({"bos_token": "<s>", "unk_token": "<unk>"}, [2], None)
    found = tokenizer_settings(tmp_path, len(pieces), prompts)
    for name in ("token_type", "tokens", "add_bos_token", "add_space_prefix", "model"):
        assert np.array_equal(found[f"tokenizer.ggml.{name}"], settings[f"tokenizer.ggml.{name}"]), name
    texts = (PROBE, "Hello Hello", " lo ello H")
    again = Tokenizer.from_str(tokenizer_json(GgufFile(Path("x"), found, {})))
    assert [again.encode(text).ids for text in texts] == [Tokenizer.from_str(file).encode(text).ids for text in texts]


def add_merge(path: Path) -> None:
    """A file without merges isn't loaded."""
    tokenizer = json.loads(path.read_text())
    unused = tokenizer["added_tokens"].pop()["content"]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["ab"] = vocabulary.pop(unused)
    tokenizer["model"]["merges"] = [["a", "b"]]
    path.write_text(json.dumps(tokenizer))


@contextmanager
def llama_server(model: Path) -> Iterator[str]:
    port = free_port()
    command = [f"{LLAMA_CPP}/llama-server", "-m", str(model), "--port", str(port), "--threads", "1", "-ngl", "0"]
    with (model.with_suffix(".log")).open("w") as log:
        process = subprocess.Popen([*command, *PRECISE], stdout=log, stderr=log)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, model.with_suffix(".log").read_text()[-3000:]
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA_CPP, reason="TRIPTYCH_TEST_LLAMA_CPP names no folder with llama-server")
@pytest.mark.parametrize("mix", ["F32", "Q8_0", "Q5_K", "Q4_K"])
@pytest.mark.parametrize("architecture", [name for name in TINY if name not in REFUSED])
def test_llama_cpp_serves_the_file(tmp_path: Path, architecture: str, mix: str) -> None:
    """The likeliest next tokens and their probabilities are ours; llama.cpp rounds activations, unless in float32."""
    scale = {"query_pre_attn_scalar": 64} if architecture.startswith("gemma") else {}
    source = make_tiny(tmp_path / "source", TINY[architecture], config=WIDE | scale)
    add_merge(source / "tokenizer.json")
    path = written(source, mix)
    ours = logits(gguf_folder(path)).softmax(dim=1)
    with llama_server(path) as address:
        length, said = next(likeliest(address, range(len(ours), 0, -1)))
    assert len(said) == 20
    theirs = torch.tensor([one["logprob"] for one in said]).exp()
    apart = (theirs - ours[length - 1, [one["id"] for one in said]]).abs().max()
    assert apart < (1e-3 if mix == "F32" else 0.1)


def likeliest(address: str, lengths: Sequence[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The next tokens' log probabilities after prompts of these lengths, but for those that make no whole character."""
    for length in lengths:
        asked = {"prompt": list(range(3, 3 + length)), "n_predict": 1, "n_probs": 20, "temperature": 0}
        data = json.dumps(asked | {"ignore_eos": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{address}/completion", data), timeout=60) as response:
            if found := json.load(response).get("completion_probabilities"):
                yield length, found[0]["top_logprobs"]
