"""The files of the page at ``/ui``, in memory. What isn't in this table isn't served: no path is made of a request."""

import functools
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from triptych.ui import FOLDER

PAGE = "/ui"
"""Path of the page; its files are below it."""
INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
"""Suffixes of the files that are served."""
_MIN_GZIP = 1024


@dataclass(frozen=True)
class UiFile:
    """A file of the page."""

    content: bytes
    compressed: bytes
    """The content in gzip; empty if that isn't smaller."""
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> "UiFile":
        content = path.read_bytes()
        compressed = gzip.compress(content, mtime=0) if len(content) >= _MIN_GZIP else b""
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, compressed if len(compressed) < len(content) else b"", MEDIA_TYPES[path.suffix], etag)

    def response(self, request: Request) -> Response:
        """Return the answer to a request: 304 if the client has the file."""
        headers = {"ETag": self.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        body = self.content
        if self.compressed and takes_gzip(request):
            body, headers["Content-Encoding"] = self.compressed, "gzip"
        return Response(body, media_type=self.media_type, headers=headers)


def takes_gzip(request: Request) -> bool:
    """Return whether the client says that it takes answers in gzip."""
    return "gzip" in request.headers.get("accept-encoding", "")


@functools.cache
def ui_files() -> Mapping[str, UiFile]:
    """Return the files by their path: ``/ui`` for the page, ``/ui/ui.css``, …"""
    found = {
        f"{PAGE}/{path.relative_to(FOLDER).as_posix()}": UiFile.read(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in MEDIA_TYPES
    }
    return {PAGE: found.pop(f"{PAGE}/{INDEX}"), **found}
