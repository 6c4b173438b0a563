"""Files with secrets in them."""

import os
import stat

from triptych.errors import ConfigError


def read_private(path: str, name: str, max_bytes: int) -> bytes:
    """Return a file's first bytes, one more than ``max_bytes`` if it has them. Raises ConfigError, calling the file
    ``name``, when it can't be read or others can read it too."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{name} can't be read: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"{name} has mode {mode:04o}: others can use it; make it readable by its owner alone")
    return content
