"""Functions of those files of transformers that can't be imported without torchvision."""

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def functions_of(file: str, functions: tuple[str, ...], names: Mapping[str, Any]) -> dict[str, Any]:
    """The functions at the top level of a file, a path within transformers' package; ``names`` are the other names that
    they use."""
    package = importlib.util.find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / file
    found = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") in functions]
    assert len(found) == len(functions)
    made = dict(names)
    exec(compile(ast.Module(found, []), str(path), "exec"), made)  # noqa: S102 (transformers' own code)
    return made
