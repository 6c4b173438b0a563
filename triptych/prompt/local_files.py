"""Reads media files under one folder, for ``file:`` URLs, safely against files being replaced meanwhile."""

import os
import stat
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from triptych.errors import ConfigError, InvalidRequest, MediaNotAllowed, MediaNotFetched, MediaTooLarge

_CANNOT_READ = "the file does not exist, or may not be read"


class MediaFolder:
    """The files under one folder; symbolic links are resolved when a file is read."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError if it isn't a folder."""
        self._root = Path(os.path.realpath(folder))
        if not self._root.is_dir() or self._root == Path("/"):
            raise ConfigError(f"--allowed-local-media-path {folder} is not a folder below /")

    def read(self, url: str, max_bytes: int) -> bytes:
        """Return the bytes of the file that a ``file:`` URL names.

        Raises InvalidRequest for a malformed URL, MediaNotAllowed for a path outside the folder, MediaNotFetched if it
        isn't a regular file within the folder, and MediaTooLarge."""
        path = os.path.normpath(_path(url))
        if not Path(path).is_relative_to(self._root):
            raise MediaNotAllowed("the file is not under the folder that files may be read from")
        with ExitStack() as closing:
            try:
                # O_PATH pins the file without opening it: opening a pipe or a device may block or have side effects
                found = os.open(path, os.O_PATH | os.O_CLOEXEC)
                closing.callback(os.close, found)
                real = Path(os.readlink(f"/proc/self/fd/{found}"))
                if not real.is_relative_to(self._root) or not stat.S_ISREG(os.fstat(found).st_mode):
                    raise MediaNotFetched(_CANNOT_READ)
                opened = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                raise MediaNotFetched(_CANNOT_READ) from None
            with open(opened, "rb") as file:
                data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise MediaTooLarge(f"the file has more than {max_bytes} bytes")
        return data


def _path(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidRequest("the URL can't be parsed") from None
    path = unquote_to_bytes(parts.path.encode("utf-8", "surrogatepass"))
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or b"\0" in path or path[:1] != b"/":
        raise InvalidRequest("a file: URL is file:// and an absolute path, and nothing else")
    return os.fsdecode(path)
