"""Towers and decoders of every family against transformers, from every layout of keys."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import edit_config, load_adapter, load_reference
from tests.support.families import LAYOUTS, WITH_IMAGES
from tests.support.forward import (
    Pool,
    Prompt,
    Running,
    assert_close,
    assert_rows,
    make_prompt,
    random_input,
    reference_logits,
    step,
)
from tests.support.tiny import GLM, TINY, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers import native
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS
from triptych.models.base import EncoderInput
from triptych.models.registry import FAMILIES

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
TEXT_ALONE = [name for name in TINY if not FAMILIES[name].takes_media]
PATCH_VALUES = 3 * 2 * 14 * 14
IMAGES = [random_input(grid, seed, PATCH_VALUES) for seed, grid in enumerate([(1, 4, 6), (1, 2, 2), (1, 18, 10)])]
"""An image of a whole window and a part of one, one smaller than a window, one of many windows."""

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """``make_tiny`` into a folder of its own, made once. Tests don't write to it."""
    return cache(lambda *options: make_tiny(tmp_path_factory.mktemp("tiny"), *options))


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_logits(tiny: Tiny, name: str, layout: str) -> None:
    """Of the towers' rows as transformers rounds them: gated delta nets enlarge the difference of ours."""
    folder = tiny(name, layout)
    adapter, checkpoint, reference = load_adapter(folder), Checkpoint(folder), load_reference(folder)
    pool = Pool(adapter.load_decoder(checkpoint, FP32, CPU))
    if name in TEXT_ALONE:
        tokens = torch.arange(3, 43)
        expected = reference(tokens[None]).logits[0]
        images, prompt = [], make_prompt_of_text(tokens, adapter.embedding_width)
    else:
        images = IMAGES
        ours = adapter.load_encoder(checkpoint, FP32, CPU).encode(images)
        theirs = reference_rows(folder, images, [item.grid for item in images])
        assert_rows(torch.cat(ours), theirs)
        rows = list(theirs.split([len(part) for part in ours]))
        prompt = make_prompt(reference, list(b"hello"), images, rows, adapter.embedding_width)
        expected = reference_logits(reference, prompt, images)
    assert_close(step(pool, [(Running(prompt), len(prompt.tokens))]), expected, 1e-4)
    assert len(set(expected.argmax(-1).tolist())) > 10


@pytest.mark.parametrize("name", ["qwen3_5"])
def test_logits_of_our_rows_are_as_exact_as_transformers(tiny: Tiny, name: str) -> None:
    """Gated delta nets enlarge rounding, that of transformers' rows as much as ours: by its error, against float64."""
    folder = tiny(name, "published")
    adapter, checkpoint, reference = load_adapter(folder), Checkpoint(folder), load_reference(folder)
    rows = adapter.load_encoder(checkpoint, FP32, CPU).encode(IMAGES)
    prompt = make_prompt(reference, list(b"hello"), IMAGES, rows, adapter.embedding_width)
    pool = Pool(adapter.load_decoder(checkpoint, FP32, CPU))
    ours = step(pool, [(Running(prompt), len(prompt.tokens))])
    theirs = reference_logits(reference, prompt, IMAGES)
    exact = reference_logits(load_reference(folder, torch.float64), prompt, IMAGES)
    our_error, their_error = ((logits - exact).square().mean().sqrt() for logits in (ours, theirs))
    assert 0 < our_error <= 1.5 * their_error


@pytest.mark.parametrize("name", ["qwen3_5"])
def test_layers_for_multi_token_prediction_are_not_read(tiny: Tiny, name: str, tmp_path: Path) -> None:
    """Neither by the tower's process nor by the decoder's."""
    folder = tiny(name, "published")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    adapter, checkpoint = load_adapter(tmp_path), Checkpoint(tmp_path)
    keys = adapter.encoder_keys(checkpoint.tensors) + adapter.decoder_keys(checkpoint.tensors)
    assert sorted(keys) == sorted(weights)
    adapter.load_encoder(checkpoint, FP32, CPU)
    adapter.load_decoder(checkpoint, FP32, CPU)


def make_prompt_of_text(tokens: torch.Tensor, width: int) -> Prompt:
    nothing = torch.arange(0), torch.zeros(0, width)
    return Prompt(tokens, torch.arange(len(tokens), dtype=torch.float64).expand(3, -1), *nothing)


@torch.inference_mode()
def reference_rows(
    folder: Path, inputs: list[EncoderInput], grids: list[tuple[int, int, int]], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Rows [rows, embedding_width] of transformers' tower for patches of these grids."""
    patches = torch.cat([torch.from_numpy(part.patches) for part in inputs]).to(dtype)
    model = load_reference(folder, dtype)
    if model.config.model_type in GLM:  # whose model splits videos before it calls the tower
        grids = [(1, rows, columns) for frames, rows, columns in grids for _ in range(frames)]
    output = model.model.visual(patches, grid_thw=torch.tensor(grids))
    features = getattr(output, "deepstack_features", None) or []
    return torch.cat((output.pooler_output, *features), dim=1)


@pytest.mark.parametrize("name", WITH_IMAGES)
@pytest.mark.parametrize("how", ["by the kernels", "without kernels", "in bfloat16"])
def test_tower_rows_are_as_exact_as_transformers(
    tiny: Tiny, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are measured against float64, in which some intermediate values are still rounded to float32."""
    if how == "without kernels":
        monkeypatch.setattr(native, "library", lambda: None)
        for found in ("pointwise.compiled_kernels", "attention.tower.paged_attention"):
            monkeypatch.setattr(f"triptych.layers.{found}", lambda *_: None)
    weights, dtype = (WEIGHT_FORMATS["bfloat16"], torch.bfloat16) if how == "in bfloat16" else (FP32, torch.float32)
    folder, grids = tiny(name, "published"), [item.grid for item in IMAGES]
    ours = torch.cat(load_adapter(folder).load_encoder(Checkpoint(folder), weights, CPU).encode(IMAGES))
    theirs = reference_rows(folder, IMAGES, grids, dtype)
    assert ours.dtype == torch.float32
    exact = reference_rows(folder, IMAGES, grids, torch.float64)
    our_error, their_error = ((rows - exact).square().mean().sqrt() for rows in (ours, theirs))
    assert 0 < our_error <= 1.5 * their_error


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_rows_of_videos(tiny: Tiny, name: str) -> None:
    """Temporal patches don't attend to each other: encoded separately, they yield the same rows."""
    folder = tiny(name, "published")
    tower = load_adapter(folder).load_encoder(Checkpoint(folder), FP32, CPU)
    parts = [random_input((1, *size), seed, PATCH_VALUES) for size in ((4, 6), (18, 10)) for seed in range(3)]
    whole = reference_rows(folder, parts, [(3, 4, 6), (3, 18, 10)])
    assert_rows(torch.cat(tower.encode(parts)), whole)
    assert_rows(torch.cat([tower.encode([part])[0] for part in parts]), whole)


@pytest.mark.parametrize("weights", [WEIGHT_FORMATS["float16"], QUANTIZED_FORMATS["int8"], QUANTIZED_FORMATS["int4"]])
def test_packed_experts(tiny: Tiny, weights: Any) -> None:
    """Separate experts are packed one by one, like stacked ones, to the same logits."""
    prompt = make_prompt_of_text(torch.arange(3, 43), 64)
    logits = []
    for layout in ("published", "stacked"):
        folder = tiny("qwen3_moe", layout)
        decoder = load_adapter(folder).load_decoder(Checkpoint(folder), weights, CPU)
        logits.append(step(Pool(decoder), [(Running(prompt), len(prompt.tokens))]))
    assert torch.equal(*logits)
    exact = load_adapter(folder).load_decoder(Checkpoint(folder), FP32, CPU)
    error = (logits[0] - step(Pool(exact), [(Running(prompt), len(prompt.tokens))])).abs().median()
    assert 0 < error < 0.5


def test_speech_output_is_not_loaded(tiny: Tiny, tmp_path: Path) -> None:
    """All other unknown tensors are errors."""
    folder = tiny("qwen3_omni_moe", "published")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    spoken = {"talker.model.norm.weight": torch.zeros(3), "code2wav.decoder.0.weight": torch.zeros(3)}
    save_file(weights | spoken, tmp_path / "model.safetensors")
    sizes = load_adapter(tmp_path).weight_bytes_by_stage(Checkpoint(tmp_path).tensors)
    assert sum(sizes.values()) == sum(weight.nbytes for weight in weights.values())
    of_towers = [
        weight.nbytes for key, weight in weights.items() if key.startswith(("thinker.visual", "thinker.audio"))
    ]
    assert sizes["encoder"] == sum(of_towers)
    with pytest.raises(
        CheckpointError, match=r"'thinker\.mouth\.x' is neither in thinker\.visual\.… nor in thinker\.audio"
    ):
        load_adapter(folder).encoder_keys([*weights, "thinker.mouth.x"])


def test_a_missing_expert_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("qwen3_moe", "published")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.5\.up_proj\.weight' is missing"):
        load_adapter(tmp_path).load_decoder(Checkpoint(tmp_path), FP32, CPU)


def test_text_only_models_have_no_encoder(tiny: Tiny) -> None:
    folder = tiny("qwen3", "published")
    adapter, checkpoint = load_adapter(folder), Checkpoint(folder)
    assert adapter.encoder_keys(checkpoint.tensors) == []
    assert adapter.weight_bytes_by_stage(checkpoint.tensors)["encoder"] == 0
    with pytest.raises(CheckpointError, match="has no encoder"):
        adapter.load_encoder(checkpoint, FP32, CPU)
    with pytest.raises(CheckpointError, match=r"'visual\.x' belongs to no part"):
        adapter.decoder_keys([*checkpoint.tensors, "visual.x"])


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("qwen2", {}, [None] * 4),
        ("qwen2", {"use_sliding_window": True}, [None, None, 16, 16]),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
            [16, None] * 2,
        ),
        ("qwen3_moe", {"use_sliding_window": True}, [16] * 6),
        ("qwen2_vl", {"use_sliding_window": True, "max_window_layers": 0}, [16] * 4),
    ],
)
def test_windowed_layers_follow_the_config(
    tmp_path: Path, name: str, changes: dict[str, object], windows: list[int | None]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY[name].config))
    edit_config(tmp_path, **changes)
    config = load_adapter(tmp_path).decoder_config
    assert [getattr(layer.mixer, "window", None) for layer in config.layers] == windows


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"head_dim": 0}, "head_dim must be a positive integer"),
        ("qwen2", {"hidden_act": "gelu"}, "'gelu' is not served"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "num_experts_per_tok must be"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "two"}, "max_window_layers must be a number"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2_vl", {"rope_scaling": {"type": "spiral"}}, "'spiral' is not served"),
        ("qwen2_vl", {"rope_scaling": {"mrope_interleaved": True}}, "only M-RoPE that is not interleaved"),
        ("qwen2_vl", {"vision_config": {"hidden_size": 32}}, "hidden_size 32 isn't the hidden size 64"),
        ("qwen2_5_vl", {"vision_config": {"out_hidden_size": 32}}, "out_hidden_size 32 isn't the hidden size 64"),
        ("qwen2_5_vl", {"vision_config": {"window_size": 27}}, "window_size must be at least 28"),
        ("qwen2_5_vl", {"vision_config": {"hidden_act": "relu"}}, "hidden_act 'relu' is not served"),
        ("qwen2_vl", {"vision_config": {"num_heads": 5}}, "5 heads don't divide"),
        ("qwen3_5", {"vision_config": {"num_heads": 16}}, "16 heads of 32 values"),
        ("qwen3_5", {"vision_config": {"depth": 10**6}}, "must be at most 1000"),
        ("glm4v", {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "'yarn'} is not served"),
    ],
)
def test_unsupported_configs_are_rejected(tmp_path: Path, name: str, changes: dict[str, object], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY[name].config))
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_adapter(tmp_path)
