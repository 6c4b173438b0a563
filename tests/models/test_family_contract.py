"""What every family with images holds: one line for each, its rows against transformers' among it.

``test_edge_media.py`` has what holds of media alone, and each family's own file what is odd about it."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import load_adapter
from tests.support.equal_embeddings import check_equal
from tests.support.families import ANSWERED_IMAGES
from tests.support.family_parts import FP32, made, reference_rows, served_parts, tiny_of, tower_of, with_settings
from tests.support.forward import ROWS_TOLERANCE, assert_rows
from tests.support.image_cases import picture, png
from tests.support.tiny import Layout, Tiny, make_tiny
from triptych.checkpoint.config_files import with_text_config
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError, MediaError, PlanMismatch
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS
from triptych.models.base import EncoderInput
from triptych.models.registry import family_of, resolve
from triptych.models.shared.tower_adapter import TowerAdapter
from triptych.prompt.probe import probe_image
from triptych.types import ImageHeader

CPU = torch.device("cpu")
IMAGES = [picture(200, 150, 1), picture(40, 90, 2), picture(96, 64, 3)]
ERRORS = {"bfloat16": 0.05, "int8": 0.1, "int4": 0.6}
"""Norms of what a weight format may change, as shares of the norm of the rows."""


@dataclass(frozen=True)
class Held:
    """A family's line."""

    settings: Sequence[dict[str, Any]] = ()
    """Of its config, over the tiny checkpoint's: rows are compared with each of them, too."""
    nested: Callable[[str], str] | None = None
    """Renames a published tensor to the name of its module, under which some files have it."""
    saved: bool = True
    """Whether files that ``save_pretrained`` wrote are served."""
    costly: bool = False
    """Whether it is left to the slow suite: its tower is another's, or takes as long as all others together."""


def within_model(*also: tuple[str, str]) -> Callable[[str], str]:
    """Names of modules: ``model.`` before all but the head, and further replacements."""

    def rename(key: str) -> str:
        for old, new in (("language_model.model.", "language_model."), *also):
            key = key.replace(old, new)
        return "lm_head.weight" if "lm_head" in key else f"model.{key}"

    return rename


def as_the_modules(key: str) -> str:
    """As ``within_model``, of files that call the language model ``model.…``."""
    key = key.removeprefix("thinker.")
    tower = key.startswith(("visual.", "audio_tower."))
    return f"model.{key}" if tower else key.replace("model.", "model.language_model.", 1)


OTHER_NORM = {"vision_config": {"hidden_act": "gelu", "layer_norm_eps": 1e-3}}
SOME_LAYERS = {"vision_feature_layer": [1, -1], "projector_hidden_act": "silu"}
CONTRACT: dict[str, Held] = {
    "qwen2_vl": Held(nested=as_the_modules),
    "qwen2_5_vl": Held(nested=as_the_modules),
    "qwen2_5_omni": Held(nested=as_the_modules),
    "qwen3_omni_moe": Held(nested=as_the_modules),
    "qwen3_5": Held(),
    "qwen3_5_moe": Held(costly=True),
    "glm4v": Held(),
    "glm4v_moe": Held(costly=True),
    "gemma3": Held([OTHER_NORM]),
    "gemma4+gemma4_vision": Held(
        [
            {"vision_config": {"use_clipped_linears": False, "standardize": False, "head_dim": 16}},
            {"vision_config": {"rope_parameters": {"rope_theta": 500.0}}},
            {"vision_config": {"hidden_activation": "gelu", "num_attention_heads": 3, "num_key_value_heads": 3}},
        ]
    ),
    "llava": Held(
        [
            {"vision_feature_layer": [0, 3, -2], "vision_feature_select_strategy": "full"},
            {
                "vision_feature_layer": -1,
                "multimodal_projector_bias": False,
                "projector_hidden_act": "gelu_pytorch_tanh",
            },
        ],
        within_model(),
    ),
    "llava_next": Held([SOME_LAYERS], within_model(("vision_model.", ""))),
    "llava_onevision": Held([SOME_LAYERS], within_model(("vision_model.", ""))),
    "llava+pixtral": Held(
        [
            {"vision_feature_layer": -2, "projector_hidden_act": "silu", "multimodal_projector_bias": False},
            {"vision_config": {"hidden_act": "gelu", "rope_theta": 500.0}},
        ]
    ),
    "mistral3": Held(
        [
            {"vision_feature_layer": -2, "projector_hidden_act": "silu", "multimodal_projector_bias": True},
            {"vision_config": {"hidden_act": "gelu", "rope_parameters": {"rope_theta": 500.0}}},
        ],
        within_model(),
    ),
    "llama4": Held(
        [
            {"vision_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}},
            {"vision_config": {"pixel_shuffle_ratio": 0.25, "intermediate_size": 512}},
            {"vision_config": {"num_attention_heads": 1}},
        ]
    ),
    "kimi_vl": Held(saved=False),
    "kimi_k25": Held(saved=False),
    "deepseek_vl_v2": Held(saved=False),
    "deepseek_ocr2": Held(costly=True),
    "cogvlm2": Held(saved=False),
    "idefics3": Held([OTHER_NORM]),
    "smolvlm": Held([OTHER_NORM]),
    "phi4_multimodal": Held(),
    "minicpmv4_6": Held([{"insert_layer_id": 0}, {"insert_layer_id": 2, "vision_config": {"hidden_act": "gelu"}}]),
    "internvl": Held(
        [
            {"vision_config": {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}},
            {"vision_feature_layer": 2, "vision_config": {"hidden_act": "gelu_pytorch_tanh"}},
        ],
        within_model(),
    ),
}


def params(chosen: Callable[[Held], bool] = lambda _: True) -> list[Any]:
    """The families of these lines, as parameters."""
    return [
        pytest.param(family, marks=pytest.mark.slow) if held.costly else family
        for family, held in CONTRACT.items()
        if chosen(held)
    ]


CASES = [
    pytest.param(family, settings, marks=pytest.mark.slow if held.costly else (), id=f"{family}-{number}")
    for family, held in CONTRACT.items()
    for number, settings in enumerate(({}, *held.settings))
]


def test_every_family_has_its_line() -> None:
    assert sorted(CONTRACT) == sorted(ANSWERED_IMAGES)


class Folders:
    """Tiny checkpoints, each made once. Tests don't write to them."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    @cache  # noqa: B019 - as long as the tests of this file
    def of(self, family: str, layout: Layout = "published") -> Path:
        return make_tiny(self._parent / family / layout, family, layout)

    @cache  # noqa: B019
    def rows(self, family: str) -> Tensor:
        """What its tower makes of the images, in float32."""
        return torch.cat(tower_of(self.of(family)).encode(inputs_of(family)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("families"))


@cache
def inputs_of(family: str) -> list[EncoderInput]:
    planner, preprocess = served_parts(family)
    return [part for one in IMAGES for part in preprocess(png(one), planner.plan(probe_image(png(one))))]


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_rows(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    """Each image's are transformers', in a batch with other images and alone."""
    tiny = with_settings(family, settings)
    folder = make_tiny(tmp_path, tiny)
    planner, preprocess = made(tiny)
    plans = [planner.plan(probe_image(png(image))) for image in IMAGES]
    parts = [list(preprocess(png(image), plan)) for image, plan in zip(IMAGES, plans, strict=True)]
    tower = tower_of(folder)
    together = tower.encode([part for one in parts for part in one])
    for image, plan, inputs in zip(IMAGES, plans, parts, strict=True):
        found, together = together[: len(inputs)], together[len(inputs) :]
        check_equal(found, plan, reference_rows(folder, family, image), ROWS_TOLERANCE)
        assert_rows(tower.encode(inputs[-1:])[0], found[-1])


@pytest.mark.parametrize("family", params())
def test_weight_formats(folders: Folders, family: str) -> None:
    """Each changes rows a little."""
    expected = folders.rows(family)
    for name, error in ERRORS.items():
        tower = tower_of(folders.of(family), (WEIGHT_FORMATS | QUANTIZED_FORMATS)[name])
        found = torch.cat(tower.encode(inputs_of(family))).float()
        assert 0 < (found - expected).norm() < error * expected.norm(), name


def check_same_model(folder: Path, other: Path, family: str, expected: Tensor) -> None:
    """Hold that another file of the same weights is the same model: all its tensors are read, by one stage each."""
    adapter, keys = load_adapter(other), Checkpoint(other).tensors
    assert sorted(adapter.encoder_keys(keys) + adapter.decoder_keys(keys)) == sorted(keys)
    assert torch.equal(torch.cat(tower_of(other).encode(inputs_of(family))), expected)
    ours, theirs = (load_adapter(one).load_decoder(Checkpoint(one), FP32, CPU) for one in (folder, other))
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("family", params(lambda held: held.saved))
def test_names_that_save_pretrained_writes(folders: Folders, family: str) -> None:
    check_same_model(folders.of(family), folders.of(family, "saved"), family, folders.rows(family))


@pytest.mark.parametrize("family", params(lambda held: held.nested is not None))
def test_names_of_modules(folders: Folders, tmp_path: Path, family: str) -> None:
    """As some versions of transformers wrote them."""
    rename = CONTRACT[family].nested
    assert rename is not None
    weights = {rename(key): weight for key, weight in load_file(folders.of(family) / "model.safetensors").items()}
    folder = copied(folders.of(family), tmp_path, weights)
    check_same_model(folders.of(family), folder, family, folders.rows(family))


def copied(folder: Path, to: Path, weights: dict[str, Tensor]) -> Path:
    (to / "config.json").write_text((folder / "config.json").read_text())
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("family", params())
def test_bad_tensors(folders: Folders, tmp_path: Path, family: str) -> None:
    """Those of the tower that are missing or of another shape are refused by name, and so are those without a place."""
    folder = folders.of(family)
    weights = load_file(folder / "model.safetensors")
    adapter = load_adapter(folder)
    assert isinstance(adapter, TowerAdapter)
    read = {
        name.partition(".")[2]: key
        for name, key in adapter.tower_keys(weights).items()
        if not name.startswith(tuple(adapter.unread))
    }

    def refused(changed: dict[str, Tensor]) -> str:
        with pytest.raises(CheckpointError) as caught:
            tower_of(copied(folder, tmp_path, changed))
        return str(caught.value)

    for name in random.Random(family).sample(sorted(read), 4):
        message = refused({key: weight for key, weight in weights.items() if key != read[name]})
        assert f"{name}' is missing" in message
        message = refused(weights | {read[name]: torch.ones(3, 5, 2)})
        assert "shape" in message
        assert name in message
    odd = f"{max(read.values(), key=len).rpartition('.')[0]}.odd"
    assert f"no place for tensor '{odd}'" in refused(weights | {odd: torch.ones(3)})
    assert "'odd' is neither in" in refused(weights | {"odd": torch.ones(3)})


@pytest.mark.parametrize("family", params())
def test_patches_that_do_not_fill_their_grid(folders: Folders, family: str) -> None:
    tower = tower_of(folders.of(family))
    for part in inputs_of(family)[:2]:
        time, rows, columns = part.grid
        for grid in ((time, rows, columns + 1), (time, rows + 1, columns), (time + 1, rows, columns)):
            with pytest.raises(PlanMismatch):
                tower.encode([msgspec.structs.replace(part, grid=grid)])


HOSTILE = [None, "x", -1, 0, 1.5, 10**9, [], {}, True, float("nan"), [1, 2], {"a": 1}]
"""In place of a setting."""


def paths_of(settings: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The settings and sections, those within sections among them."""
    for name, value in settings.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *path) for path in paths_of(value))


def replaced(settings: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    name, *rest = path
    return {**settings, name: replaced(settings[name], rest, value) if rest else value}


@pytest.mark.parametrize("count", [3, pytest.param(len(HOSTILE), marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", CONTRACT)
def test_hostile_settings_are_refused_or_served(family: str, count: int) -> None:
    """In any file: a CheckpointError when the stages begin, or a plan."""
    tiny, chance, refused = tiny_of(family), random.Random(family), 0
    for file in ("config", "preprocessor", "video_preprocessor"):
        for path in paths_of(getattr(tiny, file) or {}):
            for value in chance.sample(HOSTILE, count):
                settings: dict[str, Any] = {file: replaced(getattr(tiny, file), path, value)}
                try:
                    plan_with(replace(tiny, **settings))
                except (CheckpointError, MediaError):
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"{file}: {path} of {value!r}") from error
    assert refused


def plan_with(tiny: Tiny) -> None:
    """Begin each stage with these settings, and plan an image."""
    config, processors = with_text_config(tiny.config), (tiny.preprocessor or {}, tiny.video_preprocessor or {})
    family = family_of(config)
    resolve(family.adapter)(config)
    if family.preprocessor is not None:
        resolve(family.preprocessor)(config, *processors)
    resolve(family.planner)(config, *processors).plan(ImageHeader("PNG", 64, 48))
