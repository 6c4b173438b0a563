"""Checks that pages are short: the words of docs, and in a browser the height of each page of the built site.

.venv/bin/python -m scripts.docs_sizes
"""

import re
import shutil
import sys
from collections.abc import Iterator

from playwright.sync_api import sync_playwright

from scripts.generated import DOCS

SITE = DOCS.parent / "site"
MOST_WORDS = 40_000
"""Besides decision records, which have 250 words or fewer each."""
MOST_SCREENS = 8
WIDTH, HEIGHT = 1440, 900
"""Of a screen, in CSS pixels."""
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")

_WORD = re.compile(r"\S*\w\S*")


def main() -> int:
    """Print the longest pages, and what is too long; 1 if anything is."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    count = words()
    wrong = [f"docs has {count:,} words, {MOST_WORDS:,} at most"] if count > MOST_WORDS else []
    if browser is None:
        print("no browser: heights of pages aren't checked")
    else:
        found = sorted(heights(browser), reverse=True)
        print("highest pages, in screens:", ", ".join(f"{page} {screens:.1f}" for screens, page in found[:5]))
        wrong += [
            f"{page} has {screens:.1f} screens, {MOST_SCREENS} at most"
            for screens, page in found
            if screens > MOST_SCREENS
        ]
    print("\n".join(wrong) or f"docs has {count:,} words, and no page is too long")
    return 1 if wrong else 0


def words() -> int:
    """Words with a letter or a digit, so not the bars of tables, of all pages but decision records."""
    return sum(len(_WORD.findall(page.read_text())) for page in DOCS.rglob("*.md") if page.parent.name != "decisions")


def heights(browser: str) -> Iterator[tuple[float, str]]:
    """Height in screens and name of each page of the built site. Raises playwright's errors."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        for file in sorted(SITE.rglob("*.html")):
            if file.name == "404.html":
                continue
            page.goto(file.resolve().as_uri())
            height = page.evaluate("document.documentElement.scrollHeight")
            yield height / HEIGHT, file.relative_to(SITE).as_posix()
        chromium.close()


if __name__ == "__main__":
    sys.exit(main())
