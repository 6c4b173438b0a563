"""Writes the table of what templates can't take into docs/api-tools.md: ``python -m scripts.templates_doc``."""

from scripts.generated import DOCS, table, with_region
from tests.support.conversations import CONVERSATIONS
from tests.support.templates import TEMPLATES, made, serve
from triptych.errors import InvalidRequest

PAGE = DOCS / "api-tools.md"


def page() -> str:
    """Return the page with the table, which is what the service does with the tests' templates."""
    names: dict[str, list[str]] = {}
    for name in TEMPLATES:
        names.setdefault(_refused(name), []).append(name)
    rows = [[", ".join(each), refused] for refused, each in sorted(names.items())]
    return with_region(PAGE.read_text(), "templates", table(["templates like those of", "refused"], rows))


def _refused(name: str) -> str:
    shapes = []
    for shape, messages in CONVERSATIONS.items():
        try:
            serve(*made(name), messages)
        except InvalidRequest:
            shapes.append(shape)
    with_results = [
        shape for shape, messages in CONVERSATIONS.items() if any(one["role"] == "tool" for one in messages)
    ]
    return "calls and results" if shapes == with_results else ", ".join(shapes) or "nothing"


if __name__ == "__main__":
    PAGE.write_text(page())
