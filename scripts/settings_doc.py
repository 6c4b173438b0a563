"""Writes the tables of docs/settings.md from the config dataclasses. A test fails when the page is out of date.

.venv/bin/python -m scripts.settings_doc
"""

import dataclasses
import inspect
from typing import Any

from scripts.generated import DOCS, table, with_region
from triptych.config import CONFIG_GROUPS, flag, public_fields, spellings

PAGE = DOCS / "settings.md"
HEAD = ["flag", "default", "meaning", "allowed"]
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """The page with its tables as the code has them."""
    return with_region(PAGE.read_text(), "settings", "\n\n".join(map(_group, CONFIG_GROUPS)))


def _group(group: type[Any]) -> str:
    title, _, rest = inspect.cleandoc(group.__doc__ or group.__name__).partition("\n")
    title = f"{title} {rest.partition(chr(10) * 2)[0]}".partition(". ")[0].strip().rstrip(".")
    rows = [_row(item) for item in public_fields(group)]
    return f"### {title}\n\n{table(HEAD, rows)}"


def _row(item: dataclasses.Field[Any]) -> list[str]:
    if isinstance(item.default, bool):
        flags = f"`{flag(item.name)}`, `--no-{_dashed(item.name)}`"
    else:
        flags = f"`{spellings(item.name)[0]}`"
    gpu = f"; `{item.metadata['gpu']}` on GPUs" if item.metadata["gpu"] else ""
    return [flags, _default(item) + gpu, item.metadata["help"], _allowed(item)]


def _default(item: dataclasses.Field[Any]) -> str:
    value = item.default
    if isinstance(value, bool):
        return "on" if value else "off"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"`{text}`" if text else "none"


def _allowed(item: dataclasses.Field[Any]) -> str:
    if choices := item.metadata.get("choices"):
        return ", ".join(f"`{choice}`" for choice in choices)
    bounds = ((sign, item.metadata.get(name)) for name, sign in BOUNDS.items())
    return ", ".join(f"{sign} {bound:,}" for sign, bound in bounds if bound is not None)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


if __name__ == "__main__":
    PAGE.write_text(page())
