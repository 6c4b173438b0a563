"""The folder for files that can be made again."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return Triptych's folder in the user's cache folder, which may not exist. Raises RuntimeError for a user without
    a home directory."""
    return cache_home() / "triptych"


def cache_home() -> Path:
    """Return the user's cache folder: ``XDG_CACHE_HOME``, else ``~/.cache``. Raises RuntimeError as ``user_cache``."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG specification says to ignore a relative path
    if given.is_absolute():
        return given
    if not (home := Path.home()).is_dir():  # root could make it
        raise RuntimeError(f"the home directory {home} doesn't exist")
    return home / ".cache"
