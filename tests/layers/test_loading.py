"""Each half loads alone, from both layouts; checkpoints that don't fit are refused, with the name of what is wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from tests.support.checkpoints import DENSE, MOE, edit_config, is_mapped, load_adapter, load_reference, make_checkpoint
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError, PlanMismatch
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.linear import WEIGHT_FORMATS, PackedLinear, PlainFormat, WeightFormat
from triptych.models.base import EncoderInput

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]
FP32 = PlainFormat(torch.float32)
"""Which shows what becomes of each tensor."""


def load_decoder(folder: Path, weights: WeightFormat = FP32) -> Any:
    return load_adapter(folder).load_decoder(Checkpoint(folder), weights, CPU)


def load_both(folder: Path) -> None:
    load_adapter(folder).load_encoder(Checkpoint(folder), FP32, CPU)
    load_decoder(folder)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Lets ``change`` edit the folder's tensors."""
    path = folder / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    return folder


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["saved", "published"])
def test_halves(checkpoint_folder: Callable[..., Path], moe: bool, tied: bool, layout: str) -> None:
    """Every key is in exactly one half, and each half holds its own parameters and no others."""
    folder = checkpoint_folder(moe=moe, tied=tied, layout=layout)
    model, checkpoint = load_adapter(folder), Checkpoint(folder)
    encoder_keys, decoder_keys = model.encoder_keys(checkpoint.tensors), model.decoder_keys(checkpoint.tensors)
    assert sorted(encoder_keys + decoder_keys) == sorted(checkpoint.tensors)
    assert all(key.startswith("model.visual.") for key in encoder_keys)

    reference = load_reference(folder)
    tower: Any = model.load_encoder(checkpoint, FP32, CPU)
    assert num_parameters(tower) == num_parameters(reference.model.visual)
    assert all(not tensor.is_meta for tensor in (*tower.parameters(), *tower.buffers()))
    # The fused query-key norm repeats its weight per head: 6 heads instead of 2 weights, in each layer.
    (_, cached_dim), *_ = (spec.dims for spec in model.decoder_config.cache_specs(cache_format(torch.float32)))
    repeated = model.decoder_config.num_layers * (6 - 2) * cached_dim
    head = model.decoder_config.vocab_size * model.decoder_config.hidden_size
    decoder = model.load_decoder(checkpoint, FP32, CPU)
    assert num_parameters(decoder) == num_parameters(reference.model.language_model) + head + repeated

    sizes = model.weight_bytes_by_stage(checkpoint.tensors)
    assert sizes["encoder"] == 4 * num_parameters(reference.model.visual)
    assert sizes["decoder"] == 4 * (num_parameters(reference.model.language_model) + (0 if tied else head))


def test_packed_decoder_keeps_packed_weights_only(checkpoint_folder: Callable[..., Path]) -> None:
    decoder = load_decoder(checkpoint_folder(), WEIGHT_FORMATS["float16"])
    packed = [module for module in decoder.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 4 * DENSE.layers + 1
    assert {
        name for name, parameter in decoder.named_parameters() if parameter.dim() == 2 and "qk_norm" not in name
    } == {"embedding"}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's account of mappings")
@pytest.mark.parametrize("layout", ["saved", "published"])
def test_weights_that_need_no_change_stay_in_the_file(checkpoint_folder: Callable[..., Path], layout: str) -> None:
    folder = checkpoint_folder(moe=True, layout=layout)
    file = folder / "model.safetensors"
    decoder = load_decoder(folder)
    assert is_mapped(decoder.embedding, file)
    assert is_mapped(decoder.head.linear.weight, file)
    assert is_mapped(decoder.layers[0].mlp.experts[3].gate_up.weight, file)
    assert not is_mapped(decoder.layers[0].mixer.qkv.weight, file)
    tower: Any = load_adapter(folder).load_encoder(Checkpoint(folder), FP32, CPU)
    assert all(is_mapped(parameter, file) for parameter in tower.parameters() if parameter.numel())


@pytest.mark.parametrize("hidden_over_intermediate", [1, 2])
@pytest.mark.parametrize("layout", ["saved", "published"])
def test_the_layout_of_square_experts_is_detected(tmp_path: Path, hidden_over_intermediate: int, layout: Any) -> None:
    """Where one of an expert's two weights is square, its shape doesn't tell the layouts apart; the other's does."""
    sizes = replace(MOE, expert_intermediate=MOE.hidden // hidden_over_intermediate)
    expected = load_decoder(make_checkpoint(tmp_path / "expected", sizes=sizes, layout="saved"))
    decoder = load_decoder(make_checkpoint(tmp_path / "tried", sizes=sizes, layout=layout))
    for ours, other in zip(decoder.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_saving_a_loaded_published_checkpoint_again(checkpoint_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Whichever layout transformers chooses then, we load the same weights."""
    folder = checkpoint_folder(moe=True, layout="published")
    load_reference(folder).save_pretrained(tmp_path)
    for ours, other in zip(load_decoder(folder).parameters(), load_decoder(tmp_path).parameters(), strict=True):
        assert torch.equal(ours, other)


def test_tied_checkpoint_that_stores_its_head(tmp_path: Path) -> None:
    """As in transformers, a head that differs isn't tied, whatever the config says, which may have it by default."""
    folder = make_checkpoint(tmp_path, tied=True)
    embedding = load_decoder(folder).embedding
    for stored in (embedding.clone(), torch.full_like(embedding, 3.0)):
        with_head = {"lm_head.weight": stored}
        rewrite(folder, lambda tensors: tensors.update(with_head))  # noqa: B023 (called at once)
        decoder = load_decoder(folder)
        assert torch.equal(decoder.head.linear.weight, stored)
        assert (decoder.head.linear.weight.data_ptr() == decoder.embedding.data_ptr()) == torch.equal(stored, embedding)


@pytest.mark.parametrize("tied", [False, True])
def test_tie_in_the_text_config_only(tmp_path: Path, tied: bool) -> None:
    folder = make_checkpoint(tmp_path, tied=tied)
    edit_config(folder, tie_word_embeddings=None)
    decoder = load_decoder(folder)
    assert torch.equal(decoder.head.linear.weight, decoder.embedding) == tied


def test_top_level_tie_takes_precedence(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, moe=True, tied=False)
    edit_config(folder, text_config={"tie_word_embeddings": True})
    decoder = load_decoder(folder)
    assert not torch.equal(decoder.head.linear.weight, decoder.embedding)


def test_attention_bias(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit_config(folder, text_config={"attention_bias": True})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.bias' is missing"):
        load_decoder(folder)

    def add_biases(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if "language_model" in key and key.endswith("_proj.weight")]:
            if "self_attn" in key:
                tensors[key.replace("weight", "bias")] = torch.ones(tensors[key].shape[0])

    decoder = load_decoder(rewrite(folder, add_biases))
    assert torch.equal(decoder.layers[0].mixer.qkv.bias, torch.ones(8 * 16))


@pytest.mark.parametrize(
    "key",
    [
        "lm_head.weight",
        "model.language_model.norm.weight",
        "model.language_model.layers.1.mlp.up_proj.weight",
        "model.language_model.layers.2.mlp.experts.down_proj",
        "model.language_model.layers.0.mlp.experts.down_proj",
        "model.language_model.layers.2.mlp.experts.gate_up_proj",
        "model.visual.merger.norm.bias",
    ],
)
def test_missing_tensor(tmp_path: Path, key: str) -> None:
    folder = rewrite(make_checkpoint(tmp_path, moe=True, tied=False), lambda tensors: tensors.pop(key))
    with pytest.raises(CheckpointError, match=key.removeprefix("model.visual.")):
        load_both(folder)


@pytest.mark.parametrize(
    "key",
    [
        "model.language_model.layers.4.mlp.up_proj.weight",
        "model.language_model.layers.0.mlp.up_proj.weight_scale",
        "model.visual.blocks.3.norm1.weight",
        "audio_tower.conv.weight",
    ],
)
def test_unknown_tensor(tmp_path: Path, key: str) -> None:
    folder = rewrite(make_checkpoint(tmp_path), lambda tensors: tensors.update({key: torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=key):
        load_both(folder)


@pytest.mark.parametrize(
    "key", ["model.language_model.layers.0.self_attn.k_proj.weight", "model.visual.merger.norm.bias"]
)
def test_misshapen_tensor(tmp_path: Path, key: str) -> None:
    folder = rewrite(make_checkpoint(tmp_path), lambda tensors: tensors.update({key: torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=rf"{key}' has shape \[3\]; the config makes it"):
        load_both(folder)


def test_reading_a_missing_key_or_a_vanished_shard(tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path, sharded=True))
    with pytest.raises(CheckpointError, match="'nothing' is missing"):
        checkpoint.read(["nothing"])
    shard = checkpoint.info("model.visual.pos_embed.weight").file
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        checkpoint.read(["model.visual.pos_embed.weight"])
    with pytest.raises(CheckpointError, match=f"{shard.name}: missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config must be a dict"),
        ({"text_config": {"hidden_size": None}}, "hidden_size must be a positive int"),
        ({"text_config": {"num_hidden_layers": 0}}, "num_hidden_layers must be a positive int"),
        ({"text_config": {"head_dim": "16"}}, "head_dim must be a positive int"),
        ({"text_config": {"hidden_act": "gelu"}}, "'gelu' is not served"),
        ({"text_config": {"rope_scaling": {"rope_type": "spiral"}}}, "'spiral' is not served"),
        ({"vision_config": {"deepstack_visual_indexes": [0, 3]}}, "in a tower of depth 3"),
        ({"vision_config": {"deepstack_visual_indexes": [1, 1]}}, "in a tower of depth 3"),
        ({"vision_config": {"out_hidden_size": 32}}, "out_hidden_size 32 isn't the hidden size 64"),
        ({"text_config": {"num_hidden_layers": 1}}, "2 deepstack features for a decoder of 1 layers"),
    ],
)
def test_unsupported_configs_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text((make_checkpoint(tmp_path) / "config.json").read_text())
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_adapter(tmp_path)


def test_a_vision_config_with_text_for_a_number(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit_config(folder, vision_config={"patch_size": "x"})
    with pytest.raises(CheckpointError, match=r"vision_config.*patch_size"):
        load_both(folder)


def test_a_config_of_another_size(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit_config(folder, text_config={"vocab_size": 300})
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight' has shape \[264, 64\]; the config makes it \[300, 64\]"
    ):
        load_decoder(folder)


def test_patches_that_do_not_fill_their_grid(checkpoint_folder: Callable[..., Path]) -> None:
    folder = checkpoint_folder()
    tower: Any = load_adapter(folder).load_encoder(Checkpoint(folder), FP32, CPU)
    with pytest.raises(PlanMismatch, match="7 patches"):
        tower.encode([EncoderInput(torch.zeros(7, 1536).numpy(), (1, 2, 4), "name")])


def test_the_rest_of_a_made_folder(checkpoint_folder: Callable[..., Path]) -> None:
    """The tokenizer round-trips any text, and the template has one placeholder per image."""
    folder = checkpoint_folder()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = "naïve 三 🎨\n"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    parts = [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is <|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer(rendered).input_ids.count(config["image_token_id"]) == 1
    assert max(tokenizer(rendered).input_ids) < config["text_config"]["vocab_size"]
