"""Writes the tables of formats in docs/api-tools.md from the formats. A test fails when the page is out of date.

.venv/bin/python -m scripts.formats_doc
"""

from scripts.generated import DOCS, table, with_region
from triptych.prompt.formats.catalog import FORMATS
from triptych.prompt.formats.reasoning import TAGS

PAGE = DOCS / "api-tools.md"


def page() -> str:
    """The page with its tables as the code has them."""
    calls = [[one.families, _code(one.parsers), _code((*one.openers, *one.first_openers))] for one in FORMATS]
    reasoning = [[_code(one.parsers), _code((one.open.strip(), one.close))] for one in TAGS]
    written = with_region(
        PAGE.read_text(), "calls", table(["families", "`--tool-call-parser`", "calls begin with"], calls)
    )
    return with_region(written, "reasoning", table(["`--reasoning-parser`", "tags"], reasoning))


def _code(texts: tuple[str, ...]) -> str:
    return ", ".join(f"`` {text} ``" if "`" in text else f"`{text}`" for text in texts)


if __name__ == "__main__":
    PAGE.write_text(page())
