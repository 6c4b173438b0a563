"""What the page is made of: small, and nothing that a strict Content-Security-Policy refuses."""

import re

from triptych.ui import FOLDER

MAX_BYTES = 300_000
OURS = [
    path for path in sorted(FOLDER.iterdir()) if path.suffix in (".js", ".css", ".html") and "uPlot" not in path.name
]


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < MAX_BYTES


def test_nothing_is_inline() -> None:
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", page) == []


def test_scripts_take_no_text_for_html_or_code() -> None:
    unsafe = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    )
    assert len(OURS) > 10
    assert [(path.name, found) for path in OURS for found in unsafe.findall(path.read_text())] == []


def test_nothing_names_another_host() -> None:
    elsewhere = re.compile(r"(?:https?:)?//[a-z0-9-]+\.[a-z]{2,}[^\s\"'`]*")
    found = [
        match for path in OURS for match in elsewhere.findall(path.read_text()) if "www.w3.org/2000/svg" not in match
    ]
    assert found == []
