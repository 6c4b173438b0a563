"""Takes the screenshots of docs/ui.md: of the demo model in several instances, under a gentle load.

.venv/bin/python -m scripts.ui_pictures [FOLDER]     default: docs/pictures
"""

import io
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from triptych.measure.load.pictures import data_url, picture

TOPOLOGY = "2E1P2D"
CLIENTS = 20
WARM_UP = 75
"""Seconds of load before the first picture: curves show the last 60."""
QUESTIONS = ("What is in the picture?", "How many shapes are there?", "Where is the red circle?")
WIDE: ViewportSize = {"width": 1440, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}


def main() -> int:
    """Write the pictures."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    folder.mkdir(parents=True, exist_ok=True)
    browser = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if browser is None:
        sys.exit("Install chromium-headless-shell first")
    with serving() as url, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        take_all(chromium, url, folder)
        chromium.close()
    return 0


@contextmanager
def serving() -> Iterator[str]:
    """The URL of a service that ends with the block."""
    words = [sys.executable, "-m", "triptych", "serve", "demo", "--topology", TOPOLOGY, "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.search(r"^ready: .* on (https?://\S+)/v1", line):
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield match[1]
                return
        sys.exit("the service didn't start")
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def loaded(url: str) -> Iterator[None]:
    """Keeps some requests in flight while the block runs."""
    ended = threading.Event()

    def ask(client: int) -> None:
        number = client
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
            while not ended.is_set():
                number += CLIENTS
                # some of the pictures are asked about again
                seeds = [4 * (number - number % 7) + index for index in range(1 + number % 4)]
                parts = [{"type": "image_url", "image_url": {"url": data_url(picture(seed))}} for seed in seeds]
                content = [*parts, {"type": "text", "text": QUESTIONS[number % len(QUESTIONS)]}]
                body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 48}
                http.post("/v1/chat/completions", json=body | {"ignore_eos": number % 2 == 0})

    threads = [threading.Thread(target=ask, args=[client], daemon=True) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)


def take_all(browser: Browser, url: str, folder: Path) -> None:
    """Open the page in all looks, wait until its curves are full, and take pictures of its views."""
    light = browser.new_page(viewport=WIDE, color_scheme="light")
    dark = browser.new_page(viewport=WIDE, color_scheme="dark")
    phone = browser.new_page(viewport=PHONE, color_scheme="light", device_scale_factor=1.5)
    pages = {"light": light, "dark": dark, "phone": phone}
    for page in pages.values():
        page.goto(f"{url}/ui#pipeline")
    with loaded(url):
        time.sleep(WARM_UP)
        for name, page in pages.items():
            take(page, folder / f"ui-pipeline-{name}.png")
    show_playground(light)
    take(light, folder / "ui-playground.png")
    show_requests(light)
    take(light, folder / "ui-requests.png")
    dark.locator("nav a[data-view=figures]").click()
    dark.wait_for_selector(".uplot")
    take(dark, folder / "ui-figures.png")


def show_playground(page: Page) -> None:
    page.locator("nav a[data-view=playground]").click()
    pictures = Path(__file__).parents[1] / "triptych" / "demo" / "pictures"
    page.set_input_files("#files", [pictures / "three-shapes.png"])
    page.get_by_label("Question").fill("What is in the picture?")
    page.locator("#plan", has_text="media").wait_for()
    page.locator("#send").click()
    page.locator("#answer-state", has_text="complete").wait_for()


def show_requests(page: Page) -> None:
    page.locator("nav a[data-view=requests]").click()
    page.locator("#request-rows tr", has_text="item").locator("a").nth(6).click()
    page.wait_for_selector(".waterfall")
    page.wait_for_timeout(500)


def take(page: Page, file: Path) -> None:
    """Write what the page shows, with 256 colours: a third of the size."""
    with Image.open(io.BytesIO(page.screenshot())) as image:
        image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            file, optimize=True
        )
    print(file)


if __name__ == "__main__":
    sys.exit(main())
