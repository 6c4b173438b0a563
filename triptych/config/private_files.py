"""Files with secrets in them."""

import os
import stat

from triptych.errors import ConfigError


def read_private(path: str, name: str, max_bytes: int) -> bytes:
    """Return a file's first bytes, one more than ``max_bytes`` if it has them. Raises ConfigError, calling the file
    ``name``, when it can't be read or others can read it too.

    A group may read a file that root gives to another user: so do systemd's credentials, whose list of users shows as
    the group's mode, mounts with Kubernetes' ``fsGroup``, and keys for TLS that a group of services shares."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{name} can't be read: {error.strerror}") from None
    mode, given_by_root = stat.S_IMODE(found.st_mode), found.st_uid == 0 != os.geteuid()
    if mode & (0o037 if given_by_root else 0o077):
        raise ConfigError(f"{name} has mode {mode:04o}: others can use it; make it readable by its owner alone")
    return content
