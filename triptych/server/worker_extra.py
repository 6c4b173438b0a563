"""What only instances need: the packages of the extra ``worker``."""

import importlib.util

from triptych.errors import StartError

PACKAGES = ("torch", "safetensors", "PIL", "av", "setproctitle", "gguf")
"""Modules that the extra ``worker`` installs."""


def check_installed(what: str) -> None:
    """Raise StartError, naming the extra, when ``what`` needs packages that aren't installed."""
    if missing := [name for name in PACKAGES if not _is_installed(name)]:
        raise StartError(f"{what} needs {', '.join(missing)}: pip install '.[worker]' in a checkout")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
