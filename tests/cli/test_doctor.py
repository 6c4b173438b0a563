"""``triptych doctor`` finds what would keep a service from starting."""

import json
import math
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.backbones import BACKBONES, MORE_BACKBONES
from tests.support.checkpoints import load_adapter, make_checkpoint
from tests.support.exits import exit_code
from tests.support.families import ANSWERED_IMAGES
from tests.support.minicpm import make_minicpm
from tests.support.published_files import make_original_internvl, make_published_phi4
from tests.support.quantized import quantized_pair
from tests.support.stored_formats import FORMATS
from tests.support.tiny import HEARING, SHARED, make_tiny
from triptych.cli import main
from triptych.cli.choices import size
from triptych.layers import devices, native
from triptych.layers.specs import AttentionSpec
from triptych.layers.stored.pack_quantized import GroupQuantization
from triptych.models.quantize import quantize_checkpoint
from triptych.models.registry import identity_of

PUBLISHED_FILES: dict[str, Callable[[Path], Path]] = {
    "qwen3_vl": make_checkpoint,
    "qwen3_vl_moe": partial(make_checkpoint, moe=True),
    "internvl_chat": make_original_internvl,
    "phi4mm": make_published_phi4,
    "minicpmv": partial(make_minicpm, version=4.5),
}
"""Families whose checkpoints are made otherwise than ``TINY``'s."""
UNREAD = ("llava", "llava_next", "llava_onevision", "phi4_multimodal", "phi4mm", "qwen2_5_omni", "qwen2_5_omni_thinker")
"""Families whose towers have tensors that nothing reads: layers after the one whose states are used, or embeddings."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("doctor") / "tiny")


def examined(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, str]]:
    """The exit code, and each check's line."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *map(str, arguments)])
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line.startswith("│")]
    checks: dict[str, str] = {}
    last = ""
    for row in (row for row in rows if len(row) == 3):
        last = row[1] or last
        checks[last] = " ".join(filter(None, [checks.get(last, ""), row[0], row[2]]))
    return int(str(ended.value.code)), checks


def test_a_machine_that_can_serve(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = examined(capsys, folder, "--device", "cpu", "--port", "0")
    assert code == 0, checks
    assert {"cores", "memory", "device", "fabric shm", "--port", "--control-port", "open files"} <= checks.keys()
    assert all(line.startswith("ok") for line in checks.values())
    assert checks["kernels for CPUs"] == f"ok {native.kernels().description}"


def verdict(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The last line of what it says."""
    with pytest.raises(SystemExit):
        main(["doctor", *map(str, arguments)])
    return capsys.readouterr().out.splitlines()[-1]


def test_the_last_line_is_the_verdict_with_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (folder, "--device", "cpu", "--port", "0", "--fabric", "shm")
    served = f"This machine can serve it: triptych serve {folder} --device cpu --port 0 --fabric shm"
    assert verdict(capsys, *given) == served
    assert verdict(capsys, *given, "--api-key", "secret-1", "--api-key=secret-1").endswith("'--api-key=…'")
    monkeypatch.setattr("triptych.cli.doctor.available_bytes", lambda: 2**10)
    refused = verdict(capsys, *given, "--max-model-len", "99999999")
    assert refused == "This machine can't serve it so: see memory, tokenizer, chat template above."


def test_a_model_without_a_chat_template_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = make_tiny(tmp_path / "base", MORE_BACKBONES["qwen3"])
    (base / "chat_template.jinja").unlink()
    code, checks = examined(capsys, base, "--device", "cpu", "--port", "0", "--fabric", "shm")
    assert code == 0, checks
    assert "only /v1/completions" in checks["tokenizer, chat template"]


def test_what_a_token_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In int8, a byte per value and four per scale."""
    decoder = load_adapter(folder).decoder_config
    mixer = decoder.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    heads = 2 * decoder.num_layers * mixer.num_kv_heads
    for dtype, head in (("float16", 2 * mixer.head_dim), ("int8", mixer.head_dim + 4)):
        _, checks = examined(capsys, folder, "--device", "cpu", "--port", "0", "--kv-cache-dtype", dtype)
        assert checks["KV cache"] == f"ok {dtype}, {heads * head / 2**10:.1f} KiB per token"


def test_layers_that_attend_in_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chunked = make_tiny(tmp_path, BACKBONES["llama4"])
    _, checks = examined(capsys, chunked, "--device", "cpu", "--port", "0", "--kv-cache-dtype", "float32")
    shown = "ok float32, 1.2 KiB per token, 0.9 KiB of them only for a chunk of 12"
    assert checks["KV cache"].split() == shown.split()


def test_what_a_requests_state_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each of three layers: 12 heads of 12 × 20 values, and 3 tokens of 336 channels."""
    hybrid = make_tiny(tmp_path, BACKBONES["qwen3_5"])
    settings = ("--dtype", "float32", "--max-num-seqs", "3")
    _, checks = examined(capsys, hybrid, "--device", "cpu", "--port", "0", *settings)
    state = 3 * 4 * (12 * 12 * 20 + 3 * 336) / 2**20
    shown = f"ok float32, 0.8 KiB per token; {state:.2f} MiB of state per request, for 19 requests and snapshots"
    assert checks["KV cache"].split() == shown.split()


def test_a_format_is_named_before_its_weights_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without its tensors."""
    config = BACKBONES["gpt_oss"].config | {
        "quantization_config": {"quant_method": "hqq", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert exit_code(["doctor", str(tmp_path), "--port", "0", "--device", "cpu"]) == 78
    assert "quant_method 'hqq' is not served" in " ".join(capsys.readouterr().err.split())


def made(folder: Path, family: str) -> Path:
    """A checkpoint of a family, in transformers' files or in the published ones."""
    if family in PUBLISHED_FILES:
        return PUBLISHED_FILES[family](folder)
    return make_tiny(folder, *SHARED[family]) if family in SHARED else make_tiny(folder, family)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name == "internvl" else [pytest.mark.slow])
        for name in (*ANSWERED_IMAGES, *HEARING, *SHARED, *PUBLISHED_FILES)
    ],
)
def test_a_folder_with_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str) -> None:
    """What each role would load is that of the whole checkpoint, whose table counts unread tensors, too."""
    whole, alone = made(tmp_path / "whole", family), tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((whole / "config.json").read_bytes())
    loaded, wrong = {}, {}
    for folder in (whole, alone):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", str(folder), "--device", "cpu", "--port", "0"])
        lines = capsys.readouterr().out.splitlines()
        loaded[folder] = [line for line in lines if line.startswith(("│ E", "│ P", "│ D"))]
        wrong[folder] = [line.split("│")[2].strip() for line in lines if line.startswith("│ wrong")]
        assert ended.value.code == (folder == alone)
    assert len(loaded[alone]) == 6
    assert (loaded[whole] == loaded[alone]) == (family not in UNREAD)
    for one, other in zip(loaded[whole], loaded[alone], strict=True):
        assert one == other or "E" in one
    assert wrong == {whole: [], alone: ["weights", "tokenizer, chat template"]}


def test_a_folder_with_a_config_alone_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, alone = make_tiny(tmp_path / "whole", "internvl"), tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((whole / "config.json").read_bytes())
    for command in ("serve", "run"):
        assert exit_code([command, str(alone), *(["a question"] if command == "run" else [])]) == 78
        assert "neither model.safetensors nor" in " ".join(capsys.readouterr().err.split())


def test_tensors_that_no_part_of_the_model_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    folder = make_tiny(tmp_path, "internvl")
    whole = load_file(folder / "model.safetensors")
    layer = next(name for name in whole if name.endswith("language_model.model.layers.0.input_layernorm.weight"))
    layer = layer.removesuffix("input_layernorm.weight")

    def tensors(changes: dict[str, torch.Tensor], without: str = "") -> str:
        kept = {name: tensor for name, tensor in whole.items() if name != without}
        save_file(kept | changes, folder / "model.safetensors")
        _, checks = examined(capsys, folder, "--device", "cpu", "--port", "0", "--fabric", "shm")
        return checks["tensors"]

    one, other, count = torch.ones(4), torch.ones(4), len(whole)
    buffer, odd, norm = (f"{layer}{name}" for name in ("rotary_emb.inv_freq", "odd.weight", "input_layernorm.weight"))
    assert tensors({}) == f"ok all {count} are read"
    assert tensors({buffer: one}) == f"ok {count} of {count + 1} are read; the model doesn't need {buffer}"
    assert tensors({odd: one, f"{odd}2": other}).endswith(f"has no place for tensor '{odd}' and 1 more")
    assert tensors({}, without=norm).endswith(f"tensor '{norm}' is missing")


@pytest.mark.parametrize("has_zeros", [False, True])
def test_tensors_of_a_quantized_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, has_zeros: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    folder = tmp_path / "quantized"
    list(quantize_checkpoint(make_checkpoint(tmp_path / "whole"), folder, GroupQuantization(32, has_zeros)))
    whole = load_file(folder / "model.safetensors")
    packed = next(name for name in whole if name.endswith("down_proj.weight_packed"))

    def tensors(changes: dict[str, torch.Tensor]) -> str:
        save_file(whole | changes, folder / "model.safetensors")
        found = examined(capsys, folder, "--device", "cpu", "--port", "0", "--fabric", "shm")[1]
        zeros = ", with zero points" if has_zeros else ""
        assert found["formats"].endswith(f"compressed-tensors pack-quantized, 4 bits in groups of 32{zeros}")
        assert "decoder int4, LM head" in found["formats"]
        return found["tensors"]

    assert tensors({}) == f"ok all {len(whole)} are read"
    assert "weight_packed' has shape" in tensors({packed: whole[packed][:-1].clone()})
    assert "is float32, not int32" in tensors({packed: whole[packed].float()})
    shape = packed.replace("packed", "shape")
    assert "weight_shape is [3, 5]" in tensors({shape: torch.tensor([3, 5])})


def test_the_models_identity_is_shown_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", str(folder), "--device", "cpu", "--port", "0"])
    model = identity_of(folder)
    [line] = [line for line in capsys.readouterr().out.splitlines() if model.digest in line]
    assert line.endswith(
        f"weights {model.weights[:12]}, config {model.config[:12]}, tokenizer {model.tokenizer[:12]}, adapter Qwen3VL"
    )


def test_formats_that_the_settings_choose(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    arguments = (folder, "--port", "0", "--encoder-quantization", "int8", "--dtype", "float32")
    code, checks = examined(capsys, *arguments, "--device", "cpu")
    assert code == 0
    assert checks["formats"] == "ok towers int8, decoder float32, LM head float32"
    assert checks["KV cache"].startswith("ok float32, ")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "free_bytes", lambda _: 2**40)
    code, checks = examined(capsys, *arguments, "--device", "cuda")
    assert code == 1
    assert checks["formats"] == "wrong --encoder-quantization int8 is for CPUs only; this instance runs on cuda:0"


def test_a_port_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, checks = examined(capsys, folder, "--port", str(port), "--device", "cpu")
    assert code == 1
    assert checks["--port"].startswith("wrong")
    assert checks["--control-port"].startswith("ok")


def test_a_device_and_a_secret_that_are_not_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = examined(
        capsys, folder, "--port", "0", "--device", "cuda:999", "--cluster-secret-file", str(tmp_path / "none")
    )
    assert code == 1
    assert checks["device"].startswith("wrong")
    assert "can't be read" in checks["cluster secret"]


def test_a_fabric_that_is_asked_for_must_be_there(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", None)
    arguments = (folder, "--port", "0", "--device", "cpu")
    assert examined(capsys, *arguments)[0] == 0, "auto does without"
    code, checks = examined(capsys, *arguments, "--fabric", "mooncake")
    assert code == 1
    assert checks["fabric mooncake"].startswith("wrong")


@pytest.mark.parametrize(
    ("arguments", "check", "says"),
    [
        (["--cpus", "9999"], "cores", "core 9999"),
        (["--tensor-parallel-size", "7"], "tensor parallelism", "doesn't divide"),
        (["--max-model-len", "99999999"], "tokenizer, chat template", "exceeds the"),
        (["--api-key-file", "empty"], "API keys", "has no key"),
        (["--api-key-file", "missing"], "API keys", "can't be read"),
        (["--ssl-certfile", "empty", "--ssl-keyfile", "empty"], "TLS", "--ssl-certfile"),
        (["--allowed-local-media-path", "missing"], "where media may come from", "is not a folder"),
        (["--allowed-media-domains", "http://x"], "where media may come from", "is not HOST"),
        (["--enable-log-requests", "--request-log-file", "missing/log"], "request log", "there is no folder"),
        (["--enable-log-requests", "--request-log-file", "folder"], "request log", "it is a folder"),
        (["--host", "no.such.host.invalid"], "--port", "ame"),
    ],
)
def test_what_would_keep_a_service_from_starting(
    folder: Path,
    tmp_path: Path,
    *,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    check: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch(0o600)
    code, checks = examined(capsys, folder, "--port", "0", "--device", "cpu", "--dtype", "float32", *arguments)
    assert code == 1
    assert {what for what, line in checks.items() if line.startswith("wrong")} == {check}
    assert says in checks[check]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", "{", "config.json"),
        ("config.json", "[1]", "config.json"),
        ("config.json", "\udcff", "config.json"),
        ("config.json", '{"model_type": "qwen3_vl", "text_config": 5}', "text_config must be a dict"),
        ("model.safetensors", "short", "model.safetensors"),
        ("model.safetensors", "\2" + "\0" * 7 + "[]", "must hold a JSON object"),
        ("tokenizer.json", "{", "wrong tokenizer, chat template"),
        ("chat_template.jinja", "{% if", "wrong tokenizer, chat template"),
    ],
)
def test_a_folder_with_a_file_that_is_broken(
    tmp_path: Path,
    *,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str,
    says: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    broken = make_checkpoint(tmp_path / "broken")
    (broken / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert exit_code(["doctor", str(broken), "--port", "0", "--device", "cpu"]) in (1, 78)
    said = capsys.readouterr()
    assert says in " ".join((said.out + said.err).replace("│", " ").split())
    assert "Traceback" not in said.err


ODD_VALUES: tuple[Any, ...] = (None, "x", -1, 0, 7, 2**70, 1.5, math.nan, True, [], {}, ["x"], [None], [[1]], {"a": 1})


def with_odd_values(folder: Path, chance: random.Random) -> str:
    """Change or delete a value or two anywhere in one of the folder's JSON files; return what was changed."""
    path = chance.choice([folder / "config.json", *sorted(folder.glob("*config.json"))])
    whole = json.loads(path.read_text())
    changes = []
    for _ in range(chance.choice((1, 1, 2))):
        *parents, last = chance.choice([place for place in places(whole) if place])
        owner = whole
        for key in parents:
            owner = owner[key]
        changes.append(f"{path.name} {[*parents, last]}")
        if chance.random() < 0.3:
            del owner[last]
        else:
            owner[last] = chance.choice(ODD_VALUES)
    path.write_text(json.dumps(whole))
    return ", ".join(changes)


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of a JSON value and of all within it."""
    yield here
    within = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in within:
        yield from places(member, (*here, key))


def set_in_config(**settings: Any) -> Callable[[Path], None]:
    """What sets values of config.json; ``__`` separates sections."""

    def change(folder: Path) -> None:
        whole = json.loads((folder / "config.json").read_text())
        for name, value in settings.items():
            *sections, key = name.split("__")
            section = whole
            for one in sections:
                section = section[one]
            section[key] = value
        (folder / "config.json").write_text(json.dumps(whole))

    return change


def written(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


ODD_CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "tied, with a head of its own": set_in_config(tie_word_embeddings=True),
    "an activation that isn't known": set_in_config(vision_config__hidden_act="x"),
    "a negative size": set_in_config(vision_config__in_channels=-1),
    "no heads": set_in_config(vision_config__num_heads=0),
    "layers that aren't numbers": set_in_config(vision_config__deepstack_visual_indexes=[["x"]]),
    "a config that is a list": written("config.json", b"[]"),
    "a config that is nested deeply": written("config.json", b"[" * 100_000),
    "an empty config": written("config.json", b""),
    "empty weights": written("model.safetensors", b""),
    "weights without a header": written("model.safetensors", b"\xff" * 64),
    "a header that is a list": written("model.safetensors", b"\x02" + 7 * b"\0" + b"[]"),
    "an index that is a list": written("model.safetensors.index.json", b"[]"),
    "an index of odd shards": written("model.safetensors.index.json", b'{"weight_map": {"a": 1, "b": "../x"}}'),
    "a tokenizer that is a list": written("tokenizer.json", b"[]"),
    "a tokenizer without a vocabulary": written("tokenizer.json", b'{"model": {"type": "BPE"}}'),
    "a template that isn't text": written("chat_template.jinja", b"\xff\xfe"),
    "a template that doesn't parse": written("chat_template.jinja", b"{% for %}"),
    "a template without an end": written("chat_template.jinja", b"{% for x in range(10**12) %}{{ x }}{% endfor %}"),
    "sampling that is a list": written("generation_config.json", b"[]"),
    "an end token that isn't one": written("generation_config.json", b'{"eos_token_id": [[1]]}'),
}


@pytest.mark.parametrize("name", ODD_CHECKPOINTS)
def test_odd_checkpoints(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    odd = shutil.copytree(folder, tmp_path / "odd")
    ODD_CHECKPOINTS[name](odd)
    _ends_without_a_traceback(odd, capsys)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 400))])
def test_checkpoints_with_odd_values(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    odd = shutil.copytree(folder, tmp_path / "odd")
    changed = with_odd_values(odd, random.Random(seed))
    print(changed)
    _ends_without_a_traceback(odd, capsys)


def _ends_without_a_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every exception but SystemExit fails the test; what is wrong is said."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(folder), "--device", "cpu", "--port", "0", "--fabric", "shm"])
    shown = capsys.readouterr()
    assert ended.value.code == 0 or "wrong" in shown.out or shown.err.strip()


@pytest.mark.parametrize(
    ("name", "words", "bits"), [("fp8, blocks", "dequantized at load", 16), ("int-quantized", "kept in int8", 8)]
)
def test_what_quantized_weights_take(  # noqa: PLR0917 (fixtures)
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    words: str,
    bits: int,
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    one, source = FORMATS[name], make_tiny(tmp_path / "source", "qwen2_5_vl")
    weights = {key: one.numel() for key, one in load_file(source / "model.safetensors").items() if "visual" not in key}
    layers = sum(number for key, number in weights.items() if key.endswith("_proj.weight"))
    outputs = sum(
        load_file(source / "model.safetensors")[key].shape[0] for key in weights if key.endswith("_proj.weight")
    )
    stored, _ = quantized_pair(source, tmp_path, one.section | {"ignore": ["down_proj"]}, one.encode)
    code, checks = examined(capsys, stored, "--device", "cpu", "--port", "0", "--dtype", "float16")
    assert code == 0, checks
    scales = 4 * outputs if bits == 8 else 0
    expected = layers * bits // 8 + scales + 2 * weights["lm_head.weight"]
    assert f"take {size(expected)} in memory" in checks["quantized weights"]
    assert words in checks["quantized weights"]
    assert "layers.0.mlp.down_proj" in checks["quantized weights"]
    assert "aren't quantized, but the checkpoint has them quantized" in checks["quantized weights"]
