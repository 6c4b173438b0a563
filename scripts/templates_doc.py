"""Writes the table of what templates can't take into docs/api.md: ``python -m scripts.templates_doc``."""

from scripts.generated import DOCS, table, with_region
from tests.support.conversations import CONVERSATIONS
from tests.support.templates import REFUSED, TEMPLATES

PAGE = DOCS / "api.md"


def page() -> str:
    """Return the page with the table as the tests' templates have it."""
    shapes = sorted({shape for refused in REFUSED.values() for shape in refused}, key=list(CONVERSATIONS).index)
    rows = [[name, *("no" if shape in REFUSED.get(name, ()) else "" for shape in shapes)] for name in TEMPLATES]
    return with_region(PAGE.read_text(), "templates", table(["template like that of", *shapes], rows))


if __name__ == "__main__":
    PAGE.write_text(page())
