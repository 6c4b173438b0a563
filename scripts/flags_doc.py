"""Writes the table of flags in docs/coming-from-vllm.md from the code. A test fails when the page is out of date.

.venv/bin/python -m scripts.flags_doc
"""

from collections.abc import Iterable
from itertools import groupby

from scripts.generated import DOCS, table, with_region
from triptych.cli.other_projects import COMMANDS_INSTEAD, INSTEAD
from triptych.config import CONFIG_GROUPS, flag, public_fields, spellings

PAGE = DOCS / "coming-from-vllm.md"


def page() -> str:
    """The page with its table as the code has it."""
    groups = groupby(COMMANDS_INSTEAD, key=lambda name: COMMANDS_INSTEAD[name])
    commands = [[", ".join(f"`{name}`" for name in names), sentence] for sentence, names in groups]
    tables = table(["flag there", "here"], [*_names(), *_sentences()]), table(["command there", "here"], commands)
    return with_region(PAGE.read_text(), "flags", "\n\n".join(tables))


def _names() -> list[list[str]]:
    items = [item for group in CONFIG_GROUPS for item in public_fields(group)]
    also = [(item.metadata["also"], f"another name of `{flag(item.name)}`") for item in items]
    off = [(item.metadata["off"], f"another name of `--no-{flag(item.name)[2:]}`") for item in items]
    return [[_shown(names), meaning] for names, meaning in also + off if names]


def _sentences() -> list[list[str]]:
    groups = groupby(INSTEAD, key=lambda name: INSTEAD[name])
    return [[_shown(names), sentence[0].upper() + sentence[1:]] for sentence, names in groups]


def _shown(names: Iterable[str]) -> str:
    return ", ".join(f"`{spellings(name)[0]}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page())
