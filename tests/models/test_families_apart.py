"""No code outside ``triptych/models`` knows a family: neither a model type nor a family's module. Formats of reasoning
and calls are named after those who write them, which several families do; GGUF files name their own architectures."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import triptych
from triptych.models.registry import FAMILIES, WITH_TOWER

ROOT = Path(triptych.__file__).parent
FORMATS = ("formats", "gguf")
"""Folders of formats, which have names that are models', too."""
SHARED = ("shared", "backbones", "text")
"""Folders that aren't a multimodal family's."""
FOLDERS = {path.name for path in (ROOT / "models").iterdir() if path.is_dir() and path.name not in SHARED}
MODEL_TYPES = {part for name in FAMILIES for part in name.split(WITH_TOWER)}
MODULE = re.compile(rf"triptych\.models\.({'|'.join(sorted(FOLDERS))})\b")


def known_families(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in MODEL_TYPES | FOLDERS:
            yield f"{path.relative_to(ROOT)}:{node.lineno} names {node.value!r}"
        if isinstance(node, ast.ImportFrom) and MODULE.match(node.module or ""):
            yield f"{path.relative_to(ROOT)}:{node.lineno} imports {node.module}"


def test_only_models_knows_families() -> None:
    apart = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "models"]
    known = [found for path in apart if path.parent.name not in FORMATS for found in known_families(path)]
    assert len(apart) > 300, "nothing was read"
    assert not known
    assert any(known_families(ROOT / "models" / "registry.py")), "what families are called is in the registry"
