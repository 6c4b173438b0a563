"""``triptych quantize`` writes a model that is served, and refuses misuse in one line."""

import json
from pathlib import Path

import pytest

from tests.support.backbones import IDS
from tests.support.exits import exit_code
from tests.support.gguf_files import SOURCES
from tests.support.serving import image_part, served, text_part
from tests.support.tiny import make_tiny
from triptych.checkpoint.config_files import GENERATION_CONFIG
from triptych.checkpoint.gguf.file import read_gguf
from triptych.checkpoint.gguf.vocabulary import ENDS
from triptych.config import EngineConfig
from triptych.demo import MODEL_DIR, PICTURES_DIR
from triptych.prompt.template_files import MORE_TEMPLATES
from triptych.prompt.tokenizer import Tokenizer


def quantize(*arguments: str | Path) -> int:
    return exit_code(["quantize", *arguments])


def test_the_quantized_demo_model_answers_rightly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize("demo", tmp_path / "demo4", "--asymmetric") == 0
    assert f"triptych serve {tmp_path / 'demo4'}" in capsys.readouterr().err.replace("\n", "")
    assert exit_code(["doctor", str(tmp_path / "demo4"), "--device", "cpu", "--port", "0", "--fabric", "shm"]) == 0
    entries = json.loads((PICTURES_DIR / "questions.json").read_text())
    with served(tmp_path / "demo4", engine=EngineConfig(device="cpu", threads=1)) as service:
        for entry in entries[:3]:
            pictures = [image_part((PICTURES_DIR / name).read_bytes()) for name in entry["pictures"]]
            settings = {"temperature": 0, "max_tokens": 32, "ignore_eos": False}
            assert service.text([*pictures, text_part(entry["question"])], **settings) == entry["answer"]
    size = sum(file.stat().st_size for file in MODEL_DIR.glob("*.safetensors"))
    assert (tmp_path / "demo4" / "model.safetensors").stat().st_size < 0.75 * size  # the towers stay


def test_a_copy_in_gguf_ends_answers_as_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has one template: that there are others is said."""
    source = make_tiny(tmp_path / "source", SOURCES["llama"])
    (source / GENERATION_CONFIG).write_text(json.dumps({"eos_token_id": IDS["<|image_pad|>"]}))
    (source / MORE_TEMPLATES).mkdir()
    (source / MORE_TEMPLATES / "tool_use.jinja").write_text("")
    assert quantize(source, tmp_path / "copy.gguf", "--gguf-type", "Q8_0") == 0
    assert "templates that aren't written: tool_use" in capsys.readouterr().err
    settings = read_gguf(tmp_path / "copy.gguf").settings
    found = {settings.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS} - {None}
    assert found == Tokenizer(source).eos_token_ids
    assert IDS["<|image_pad|>"] in found
    (source / GENERATION_CONFIG).write_text(json.dumps({"eos_token_id": [2, -1]}))
    assert quantize(source, tmp_path / "other.gguf") != 0
    assert "eos_token_id must be a token id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "MODEL, OUT"),
        (("demo",), "OUT"),
        (("demo", "OUT", "--group-size", "48"), "--group-size"),
        (("demo", "OUT", "--bits", "3"), "there is no --bits"),
        (("nothing", "OUT"), "nothing: no such folder"),
        (("demo", "."), "exists; the copy needs a folder of its own"),
        (("demo", "OUT.gguf"), "GGUF files are written of text-only models"),
        (("demo", "OUT.gguf", "--gguf-type", "Q9"), "--gguf-type"),
        (("demo", "OUT", "--gguf-type", "Q8_0"), "--gguf-type is for files"),
        (("demo", "OUT.gguf", "--group-size", "32"), "--group-size and --asymmetric are for folders"),
        (("demo", "OUT.gguf", "--asymmetric"), "--group-size and --asymmetric are for folders"),
    ],
)
def test_misuse_is_one_line(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert quantize(*arguments) != 0
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
