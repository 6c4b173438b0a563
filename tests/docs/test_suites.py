"""The tables of peers' tests that don't pass count as extensions only what the documentation names."""

from compat.suites.reasons import EXTENSIONS
from scripts.generated import DOCS


def test_extensions_are_named_on_the_page_of_the_api() -> None:
    page = (DOCS / "api-fields.md").read_text()
    section = page[page.index("## Extensions that aren't served") :]
    assert [name for name in EXTENSIONS if name not in section] == []
