"""Checks what MkDocs doesn't: links of the pages at the repository's root, and that files named in backticks exist.

.venv/bin/python -m scripts.docs_check
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
ELSEWHERE = ("~/", "/", "file:///")
"""How paths begin that are not of this repository."""
GENERATED = ("site/", ".venv")
"""What commands create."""

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.<>*-]+(?:/[\w.<>*-]+)+/?|[\w-]+\.(?:py|md)")
_FILE = re.compile(r"\.(?:py|c|md|json|toml|yml|sh|svg|png)$")


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    wrong = [*links(), *paths()]
    print("\n".join(wrong) or "links of the root pages and paths in backticks are right")
    return 1 if wrong else 0


def links() -> Iterator[str]:
    """Broken links of the root pages: missing files, missing headings."""
    for name in ROOT_PAGES:
        for target in _LINK.findall(_FENCE.sub("", (ROOT / name).read_text())):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = ROOT / path if path else ROOT / name
            if not file.exists():
                yield f"{name}: {target} is missing"
            elif anchor and anchor not in anchors(file):
                yield f"{name}: {path or name} has no heading #{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {slug(re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading)) for heading in headings}


def slug(heading: str) -> str:
    """A heading's anchor: lower case, without punctuation, with hyphens for spaces."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def paths() -> Iterator[str]:
    """Paths in backticks that are no files of the repository. Decision records may name what was there before."""
    pages = [ROOT / name for name in ROOT_PAGES]
    pages += [page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts]
    for page in pages:
        for code in _CODE.findall(_FENCE.sub("", page.read_text())):
            if not exists(code):
                yield f"{page.relative_to(ROOT)}: there is no `{code}`"


def exists(code: str) -> bool:
    """Whether ``code`` is no path, or is one below the repository or the package; ``<name>`` stands for any name."""
    if not _PATH.fullmatch(code) or code.startswith((*ELSEWHERE, *GENERATED)):
        return True
    if not _FILE.search(code) and not (ROOT / code.split("/", maxsplit=1)[0]).exists():
        return True  # a word with a slash, or an HTTP path
    pattern = re.sub(r"<\w+>", "*", code.rstrip("/"))
    names = (pattern, f"{pattern}.py")  # a package may be a module
    if any(next(base.glob(name), None) for base in (ROOT, ROOT / "triptych", ROOT / "docs") for name in names):
        return True
    return "/" not in code and next(ROOT.glob(f"triptych/**/{code}"), None) is not None


if __name__ == "__main__":
    sys.exit(main())
