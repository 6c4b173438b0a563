"""Lists of modules in configs, beside what a checkpoint holds."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.quantized import quantized_pair
from tests.support.stored_formats import FORMATS
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.config import EngineConfig
from triptych.layers.stored.lists import disagreements
from triptych.server.model_bundle import ModelBundle

MARKERS = ("qweight",)
LAYERS = [f"model.language_model.layers.{number}" for number in range(3)]
QUANTIZED = [f"{layer}.mlp.{name}.qweight" for layer in LAYERS for name in ("gate_proj", "down_proj")]
DENSE = [
    *(f"{layer}.mlp.gate.weight" for layer in LAYERS),
    "model.visual.blocks.0.mlp.down_proj.weight",
    "model.language_model.embed_tokens.weight",
    "lm_head.weight",
]


def found(section: dict[str, Any], *, dense: str = "") -> str:
    """What is said of tensors of which one more module isn't quantized."""
    names = [name.replace("qweight", "weight") if dense and name.startswith(dense) else name for name in QUANTIZED]
    other = disagreements(section, names + DENSE, MARKERS)
    return "" if other is None else str(other)


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"modules_to_not_convert": None},
        {"modules_to_not_convert": ["visual", "mlp.gate"]},
        {"modules_to_not_convert": ["visual.blocks.0.mlp.down_proj", "lm_head"]},
        {"ignore": ["lm_head", "re:visual.*", r"re:.*\.mlp\.gate$"]},
        {"ignored_layers": ["model.layers.*.mlp.gate"]},
        {"exclude_modules": ["*visual*", "lm_head", "*mlp.gate"]},
        {"dynamic": {"-:.*visual.*": {}, r"+:.*down_proj": {"bits": 8}}},
        {"llm_int8_skip_modules": ["lm_head", 7]},
        {"ignore": ["lm_head", r"re:.*(visual|vision)+.*", r"re:^model\..*\.layers\..*\.(mlp|ffn)?\.gate$"]},
        {"exclude_modules": ["*visual*", "lm_head", "*.layers.[0-9].mlp.g?te", "*.mlp.[!gd]*"]},
    ],
)
def test_lists_that_agree_in_other_words(section: dict[str, Any]) -> None:
    assert not found(section)


@pytest.mark.parametrize(
    "section",
    [
        {"modules_to_not_convert": ["down_proj"]},
        {"modules_to_not_convert": [f"language_model.model.layers.{number}.mlp.down_proj" for number in range(3)]},
        {"ignore": [r"re:model\.layers\.\d+\.mlp\.down_proj", r"re:language_model\.model\..*down_proj"]},
        {"exclude_modules": ["*.down_proj"]},
        {"exclude_modules": ["*.layers.[0-9].mlp.d?wn_p*"]},
        {"ignore": [r"re:^.*\.(mlp|ffn)+\..*(up|down)?n_proj.*$", "re:x(a|a)*"]},
        {"dynamic": {"-:.*down_proj": {}}},
    ],
)
def test_modules_that_are_quantized_against_the_list(section: dict[str, Any]) -> None:
    words = found(section)
    assert words.startswith(f"config.json says that {LAYERS[0]}.mlp.down_proj, {LAYERS[1]}.mlp.down_proj, ")
    assert "aren't quantized, but the checkpoint has them quantized" in words
    assert "gate_proj" not in words


def test_modules_that_are_not_quantized_against_the_list() -> None:
    for section in ({}, {"modules_to_not_convert": ["layers.2"]}):
        words = found(section, dense=f"{LAYERS[1]}.mlp.down_proj")
        assert f"{LAYERS[1]}.mlp.down_proj are quantized, but the checkpoint doesn't have them quantized" in words
    assert not found({"modules_to_not_convert": ["layers.1.mlp.down_proj"]}, dense=f"{LAYERS[1]}.mlp.down_proj")


@pytest.mark.parametrize(
    "pattern",
    [
        *("re:(a+)+$", "re:(.*)*b", "re:.*.*.*.*x", "re:(?P<", "re:[", "re:" + "a" * 10**6, r"re:(a|a)*\1", "*a" * 90),
        *("re:.*" + "(a|a)" * 38 + "b", "re:.*" + "a?" * 60 + "a" * 60 + "b", "re:.*(a|a|a|a|a|a|a)*(aa|a|a)*b"),
        *("re:((((((a{99}){99}){99}){99}){99}){99}){99}", r"re:(\w{1,99}){1,99}!", "re:" + r"\w" * 90 + "!"),
        *("re:\ud800*", "re:(?x)a #", "re:a)|(b", "re:" + "(" * 190),
    ],
)
def test_patterns_that_take_long_or_are_none(pattern: str) -> None:
    names = [f"model.{'a' * 150}{number}.qweight" for number in range(3000)]
    begun = time.monotonic()
    disagreements({"ignore": [pattern]}, names, MARKERS)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("pattern", ["re:.*a.*(b|c)?d{}", "*a*b?c*{}"])
def test_many_patterns_take_little_time(pattern: str) -> None:
    names = [f"model.{'a' * 150}{number}.qweight" for number in range(3000)]
    begun = time.monotonic()
    disagreements({"ignore": [pattern.format(number) for number in range(100_000)]}, names, MARKERS)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("section", [None, 3, {"ignore": 5}, {"ignore": [None]}, {"dynamic": [1]}])
def test_what_is_no_list_is_left_out(section: Any) -> None:
    assert disagreements(section, QUANTIZED + DENSE, MARKERS) is None


@pytest.mark.parametrize("listed", ["lm_head", "up_proj"])
def test_an_instance_warns_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture, listed: str) -> None:
    one, source = FORMATS["awq"], make_tiny(tmp_path / "source", "qwen2_5_vl")
    stored, _ = quantized_pair(source, tmp_path, one.section | {"modules_to_not_convert": [listed]}, one.encode)
    bundle = ModelBundle(Checkpoint(stored), EngineConfig(device="cpu"))
    said = [record.getMessage() for record in caplog.records if "config.json says" in record.getMessage()]
    assert bundle.weights.linear_dtype == "int4"
    assert len(said) == (listed == "up_proj")
