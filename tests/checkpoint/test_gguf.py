"""Checkpoint folders of GGUF files: they are the checkpoints that the files were made of, and damaged files are refused
by one line."""

import json
import random
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from tokenizers import Tokenizer
from torch import Tensor

from tests.support import gguf_files
from tests.support.checkpoints import load_adapter
from tests.support.forward import Pool, Prompt, Running, step
from tests.support.gguf_files import SIZES, SOURCES, write_gguf
from tests.support.tiny import make_tiny
from triptych.checkpoint.gguf import folder, values
from triptych.checkpoint.gguf.architectures import config_of
from triptych.checkpoint.gguf.file import MAX_COUNT, GgufFile, GgufTensor, is_served, read_gguf
from triptych.checkpoint.gguf.folder import gguf_folder
from triptych.checkpoint.gguf.index import Entry
from triptych.checkpoint.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_json
from triptych.checkpoint.identity import model_identity
from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import read_folder
from triptych.cli.flags import model_folder
from triptych.config import EngineConfig
from triptych.errors import CheckpointError
from triptych.layers.linear import PlainFormat
from triptych.layers.parallel import SINGLE_RANK
from triptych.server.model_bundle import ModelBundle

CPU, FP32 = torch.device("cpu"), PlainFormat(torch.float32)
F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "user_cache", lambda: tmp_path / "cache")  # kernels stay where they are


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the first architecture."""
    made = tmp_path_factory.mktemp("gguf")
    write_gguf(make_tiny(made / "source", SOURCES["llama"]), made / "m.gguf", "llama", Q8_0)
    return made / "m.gguf"


def decoders(*folders: Path) -> list[Any]:
    return [load_adapter(one).load_decoder(Checkpoint(one), FP32, CPU) for one in folders]


@pytest.mark.parametrize("architecture", SOURCES)
def test_a_model_is_what_the_file_was_made_of(tmp_path: Path, architecture: str) -> None:
    source = make_tiny(tmp_path / "source", SOURCES[architecture])
    dense = write_gguf(source, tmp_path / "m.gguf", architecture, F32)
    ours, theirs = decoders(gguf_folder(tmp_path / "m.gguf"), dense)
    assert ours.config == theirs.config
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("architecture", ["llama", "mistral3"])
def test_biases_of_queries_and_keys_are_in_the_order_of_their_rows(tmp_path: Path, architecture: str) -> None:
    """The converter changes the order of both, which it does for these architectures alone."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = {"attention_bias": True, "rope_scaling": yarn}
    source = make_tiny(tmp_path / "source", SOURCES["llama"], config=config)
    dense = write_gguf(source, tmp_path / "m.gguf", architecture, Q8_0)
    made = gguf_folder(tmp_path / "m.gguf")
    keys = [key for key in read_folder(dense) if "bias" in key]
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= {key.split(".")[-2] for key in keys}
    for key, expected in Checkpoint(dense).read(keys).items():
        assert torch.equal(Checkpoint(made).read([key])[key], expected), key
    assert json.loads((made / "config.json").read_text())["attention_bias"]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_values_are_the_dequantized_ones(tmp_path: Path, architecture: str, kind: str) -> None:
    """Rows of queries and keys are in another order in the first, experts are stacked in the second."""
    source = make_tiny(tmp_path / "source", SOURCES[architecture])
    dense = write_gguf(source, tmp_path / "m.gguf", architecture, GGMLQuantizationType[kind])
    ours, theirs = decoders(gguf_folder(tmp_path / "m.gguf"), dense)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name].float(), weight), name


def log_probabilities(bundle: ModelBundle) -> Tensor:
    places = torch.arange(60)
    prompt = Prompt(places + 3, places.double().expand(3, -1), places[:0], torch.zeros(0, SIZES["hidden_size"]))
    decoder = bundle.load_decoder(SINGLE_RANK)
    return step(Pool(decoder), [(Running(prompt), len(prompt.tokens))]).log_softmax(dim=1)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3moe"])
def test_values_stay_as_they_are_unless_a_format_is_chosen(tmp_path: Path, architecture: str, kind: str) -> None:
    """Outputs are near those of the dequantized model: activations are rounded, the weights no more."""
    source = make_tiny(tmp_path / "source", SOURCES[architecture])
    dense = write_gguf(source, tmp_path / "m.gguf", architecture, GGMLQuantizationType[kind])
    file = Checkpoint(gguf_folder(tmp_path / "m.gguf"))
    kept, chosen = (ModelBundle(file, EngineConfig(device="cpu", dtype=dtype)) for dtype in ("auto", "float32"))
    exact = log_probabilities(ModelBundle(Checkpoint(dense), EngineConfig(device="cpu", dtype="float32")))
    assert kept.weights.linear_dtype == kind
    assert (log_probabilities(kept) - exact).norm() < 0.03 * exact.norm()
    assert chosen.weights.linear_dtype == "float32"
    torch.testing.assert_close(log_probabilities(chosen), exact, atol=1e-4, rtol=0)
    assert ModelBundle(file, EngineConfig(device="cpu", quantization="int8")).weights.linear_dtype == "int8"


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_types_that_no_test_can_write(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of any bits, read a few rows at a time, are what the library makes of all of them."""
    monkeypatch.setattr(values, "AT_ONCE", 500)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = np.random.default_rng(3).integers(0, 60, (7, 2 * size), np.uint8)  # such bytes are finite numbers as halves
    (tmp_path / "0.gguf").write_bytes(b"\0" * 32 + raw.tobytes())
    found = values.read_tensor(tmp_path / "0.gguf", Entry("0.gguf", kind, [7, 2 * block], 32, 2 * size))
    assert np.array_equal(found.numpy(), dequantize(raw, GGMLQuantizationType[kind]))


def file_with(tensors: dict[str, GgufTensor], **settings: Any) -> GgufFile:
    known = {"llama.attention.head_count": 3, "llama.embedding_length": 6, "llama.block_count": 1}
    return GgufFile(Path("x.gguf"), {"general.architecture": "llama", **known, **settings}, tensors)


def test_what_is_refused_by_name() -> None:
    embedding = {"token_embd.weight": GgufTensor("token_embd.weight", F32, (8, 6), 0)}
    for settings, says in (
        ({"llama.attention.head_count": np.array([3, 4])}, "head_count must be a number"),
        ({"llama.embedding_length": np.nan}, "embedding_length must be a number"),
        ({"general.architecture": "rwkv"}, "'rwkv' is not served"),
    ):
        with pytest.raises(CheckpointError, match=says):
            config_of(file_with(embedding, **settings))
    assert is_served(Q8_0)
    assert not is_served(GGMLQuantizationType.Q8_1)


def test_a_file_is_named_in_place_of_a_folder(whole: Path) -> None:
    made = model_folder(str(whole))
    assert model_folder(str(whole)) == made, "it is made once"
    assert json.loads((made / "generation_config.json").read_text())["eos_token_id"]
    assert (made / "chat_template.jinja").read_text() == (whole.parent / "source" / "chat_template.jinja").read_text()
    theirs = Tokenizer.from_file(str(whole.parent / "source" / "tokenizer.json"))
    ours = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in ("Hello, wörld 你好 🙂\n\n  x1234", "<|im_start|>user", "don't  "):
        assert ours.encode(text).ids == theirs.encode(text).ids
    before = model_identity(made, "a")
    data = bytearray(whole.read_bytes())
    data[-1] ^= 1
    changed = whole.with_name("changed.gguf")
    changed.write_bytes(data)
    assert model_identity(model_folder(str(changed)), "a").weights != before.weights


def test_a_file_that_is_replaced_is_read_again(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "c.gguf"
    copy.write_bytes(whole.read_bytes())
    first = gguf_folder(copy)
    copy.write_bytes(whole.read_bytes() + b"\0")
    assert gguf_folder(copy) != first


SPM_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab", "<x>"]


def sentencepiece(**settings: Any) -> GgufFile:
    number = len(SPM_PIECES)
    types = [2, 3, 3, *[6] * 256, *[1] * (number - 260), 4]
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -0.5, -0.25, 0.0]
    return GgufFile(
        Path("spm.gguf"),
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": SPM_PIECES,
            "tokenizer.ggml.token_type": np.array(types),
            "tokenizer.ggml.scores": np.array(scores),
            "tokenizer.ggml.bos_token_id": 1,
            **settings,
        },
        {},
    )


@pytest.mark.parametrize(
    ("settings", "text", "tokens", "decoded"),
    [
        ({}, "ab a", ["<s>", "▁ab", "▁", "a"], "ab a"),
        ({"tokenizer.ggml.add_bos_token": False}, "é<x>", ["▁", "<0xC3>", "<0xA9>", "<x>"], "é<x>"),
        ({"tokenizer.ggml.add_space_prefix": False}, "ab", ["<s>", "ab"], "ab"),
    ],
)
def test_sentencepiece(settings: dict[str, Any], text: str, tokens: list[str], decoded: str) -> None:
    made = Tokenizer.from_str(tokenizer_json(sentencepiece(**settings)))
    found = made.encode(text)
    assert found.tokens == tokens
    assert made.decode(found.ids, skip_special_tokens=True) == decoded


def byte_level(name: str, **settings: Any) -> Tokenizer:
    """A tokenizer of bytes that divides text as ``name`` says."""
    alphabet = sorted(set(map(chr, range(33, 127))))
    file = GgufFile(
        Path("x"),
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.tokens": alphabet,
            "tokenizer.ggml.token_type": np.ones(len(alphabet)),
            "tokenizer.ggml.merges": [],
            **settings,
        },
        {},
    )
    return Tokenizer.from_str(tokenizer_json(file))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_each_way_to_divide_text_loads(name: str) -> None:
    assert byte_level(name).encode("it's 12").tokens


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tekken", "HelloWorld don't 123", ["Hello", "World", "Ġdon", "'t", "Ġ", "1", "2", "3"]),
        ("gpt-4o", "HelloWorld don't 1234", ["Hello", "World", "Ġdon't", "Ġ", "123", "4"]),
        ("llama4", "a/\n\nb", ["a", "/ĊĊ", "b"]),
        ("glm4", "HelloWorld's 1234", ["HelloWorld", "'s", "Ġ", "123", "4"]),
        ("qwen35", "cafe\u0301 x12", ["cafeÌģ", "Ġx", "1", "2"]),
        ("qwen2", "cafe\u0301 x12", ["cafe", "Ìģ", "Ġx", "1", "2"]),
        ("deepseek-v3", "x1234你好.abc", ["x", "123", "4", "ä½łå¥½", ".abc"]),
        ("smollm", "Hi 12", ["Hi", "Ġ", "1", "2"]),
    ],
)
def test_where_text_is_divided(name: str, text: str, words: list[str]) -> None:
    """As the models' own tokenizers divide it."""
    divides = byte_level(name).pre_tokenizer
    assert divides is not None
    assert [word for word, _ in divides.pre_tokenize_str(text)] == words


@pytest.mark.parametrize("name", ["llama-bpe", "tekken", "qwen2"])
def test_which_tokenizers_begin_with_a_token(name: str) -> None:
    begins = byte_level(name, **{"tokenizer.ggml.bos_token_id": 0}).encode("a").ids[0] == 0
    assert begins == (name != "qwen2")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv' is not served"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "different texts"),
        ({"tokenizer.ggml.tokens": [*SPM_PIECES[:-2], "a" * 2000, "<x>"]}, "a piece of over 1024 characters"),
        ({"tokenizer.ggml.scores": np.ones(1)}, "must be 265 numbers"),
        ({"tokenizer.ggml.scores": ["a"] * 265}, "must be 265 numbers"),
        ({"tokenizer.ggml.token_type": np.full(265, np.inf)}, "must be 265 numbers"),
        ({"tokenizer.ggml.unknown_token_id": 10**6}, "is no token"),
    ],
)
def test_tokenizers_that_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        tokenizer_json(sentencepiece(**settings))


# ── hostile files ────────────────────────────────────────────────────────────────────────────────────────────────


def header(tensors: int = 0, settings: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, settings) + rest


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(*shape: int, kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return text(b"t") + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "GGUF"),
        (b"GGML" + b"\0" * 40, "begin with GGUF"),
        (header(version=9), "version 9"),
        (header(tensors=2**60), "over the limit"),
        (header(settings=10**12), "over the limit"),
        (header(settings=1, rest=text(b"k", 2**60)), "truncated"),
        (header(settings=1, rest=text(b"k") + struct.pack("<I", 77)), "type 77"),
        (header(settings=1, rest=text(b"k") + struct.pack("<IIQ", 9, 0, MAX_COUNT)), "truncated"),
        (header(settings=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "array is of type 9"),
        (header(settings=1, rest=text(b"\xff") + struct.pack("<IB", 0, 0)), "utf-8"),
        (header(1, 1, text(b"general.alignment") + struct.pack("<II", 4, 3) + tensor(1)), "power of two"),
        (header(1, rest=tensor(2**40)), "ends at byte"),
        (header(1, rest=tensor(1, offset=2**62)), "ends at byte"),
        (header(1, rest=tensor(32, 0, 2**40) + b"\0" * 64), "has no values"),
        (header(1, rest=text(b"v.blk." + b"9" * 5000) + tensor(1)), "name of a tensor is over 64 bytes"),
        (header(1, rest=tensor(1, dimensions=2**31)), "dimensions"),
        (header(1, rest=tensor(33, kind=8) + b"\0" * 64), "no blocks of 32"),
        (header(1, rest=tensor(32, kind=99) + b"\0" * 64), "type 99"),
        (header(2, rest=tensor(1) * 2 + b"\0" * 64), "two tensors"),
        (header(1, rest=tensor(1) + b"\0" * 64), "general.architecture None is not served"),
    ],
)
def test_hostile_headers(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=says) as refused:
        gguf_folder(path)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("cache/gguf/*")), "nothing is left"


def test_a_file_has_no_more_experts_than_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes can stand for many: tensors may lie over each other."""
    monkeypatch.setattr(folder, "MAX_PLACES", 40)
    write_gguf(make_tiny(tmp_path / "source", SOURCES["qwen3moe"]), tmp_path / "m.gguf", "qwen3moe", F32)
    with pytest.raises(CheckpointError, match="over 40 tensors"):
        gguf_folder(tmp_path / "m.gguf")


def test_damaged_files_are_refused_or_read(whole: Path, tmp_path: Path) -> None:
    """A few bytes changed anywhere before the values, or the end cut off."""
    data, source = whole.read_bytes(), random.Random(7)
    begin = min(one.offset for one in read_gguf(whole).tensors.values())
    path = tmp_path / "m.gguf"
    refused = 0
    for number in range(60):
        damaged = bytearray(data[: source.randrange(len(data))] if number % 5 == 0 else data)
        for _ in range(source.randint(1, 3)):
            if damaged:
                damaged[source.randrange(min(begin, len(damaged)))] = source.randrange(256)
        path.write_bytes(damaged)
        try:
            read_folder(gguf_folder(path))
        except CheckpointError as error:
            refused += "\n" not in str(error)
    assert refused > 20


def test_a_split_file_is_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that settings follow from, such as the output projection, may be in any part."""
    monkeypatch.setattr(gguf_files, "GGUFWriter", partial(GGUFWriter, split_max_tensors=9))
    source = make_tiny(tmp_path / "source", SOURCES["llama"])
    dense = write_gguf(source, tmp_path / "m.gguf", "llama", F32)
    first, *others = sorted(tmp_path.glob("m-*.gguf"))
    assert len(others) > 1
    ours, theirs = decoders(gguf_folder(first), dense)
    assert ours.config == theirs.config
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name


def test_a_split_file_needs_all_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(header())
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf: missing"):
        gguf_folder(path)


def test_an_index_cannot_name_other_files(whole: Path, tmp_path: Path) -> None:
    made = gguf_folder(whole)
    index = made / "gguf.json"
    entries = json.loads(index.read_text())
    key = next(iter(entries))
    changes: tuple[dict[int, Any], ...] = ({0: "../secret.gguf"}, {3: 2**50}, {2: []}, {2: [0, 96]}, {4: -1})
    for change in changes:
        changed = [change.get(place, value) for place, value in enumerate(entries[key])]
        index.write_text(json.dumps(entries | {key: changed}))
        with pytest.raises(CheckpointError):
            read_folder(made)
