"""MkDocs hooks: list the decision records and the families' pages, and publish the repository's files that pages link
to.

Pages link to files outside ``docs/`` (raw results, the dashboard) by relative path, which works in a checkout. The site
gets a copy of each such file under ``files/``, and the links point there.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PUBLISHED = "files"
"""The site's folder for files from outside ``docs/``."""

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the section "Decisions" with the records: the index, then the order of their numbers; and the section
    "Models" with the families' pages."""
    names = sorted(
        (path.name for path in (DOCS / "decisions").glob("*.md")), key=lambda name: (name != "index.md", name)
    )
    _fill(config.nav or [], "Decisions", [f"decisions/{name}" for name in names])
    families = sorted(path.name for path in (DOCS / "models").glob("*.md"))
    _fill(config.nav or [], "Models", ["models.md", *(f"models/{name}" for name in families)])
    return config


def _fill(items: list[Any], section: str, pages: list[str]) -> None:
    for item in items:
        for name, below in item.items() if isinstance(item, dict) else ():
            if name == section:
                item[name] = pages
            elif isinstance(below, list):
                _fill(below, section, pages)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add each file outside ``docs/`` that some page links to."""
    for page in DOCS.rglob("*.md"):
        for path in outside(page.read_text(), page.relative_to(DOCS).as_posix()):
            if (ROOT / path).is_file() and files.get_file_from_path(uri := published(path)) is None:
                files.append(File.generated(config, uri, content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Point links to files outside ``docs/`` at their copies."""
    uri = page.file.src_uri

    def replaced(match: re.Match[str]) -> str:
        path = outside_path(match[1], uri)
        if path is None or not (ROOT / path).is_file():
            return match[0]
        return posixpath.relpath(published(path), posixpath.dirname(uri) or ".")

    return _LINK.sub(replaced, markdown)


def outside(markdown: str, uri: str) -> set[str]:
    """The paths outside ``docs/`` that a page at ``uri`` links to, relative to the repository."""
    paths = (outside_path(match[1], uri) for match in _LINK.finditer(markdown))
    return {path for path in paths if path is not None}


def outside_path(target: str, uri: str) -> str | None:
    """The repository path of a relative link that leaves ``docs/``; None for any other link."""
    if ":" in target or target.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), target))
    return None if path.startswith(("docs/", "..")) or path == "docs" else path


def published(path: str) -> str:
    """Where the site has a file of the repository. Markdown is published as text, since it isn't a page."""
    return f"{PUBLISHED}/{path}" + (".txt" if path.endswith(".md") else "")
