"""``triptych quantize``: writes a copy of a model with quantized weights, as a folder or in GGUF."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from triptych.checkpoint.gguf.index import SUFFIX
from triptych.cli import flags
from triptych.errors import ConfigError
from triptych.layers.stored.pack_quantized import GROUP_SIZES, GroupQuantization
from triptych.prompt.template_files import DEFAULT, read_special_tokens, read_templates
from triptych.prompt.tokenizer import Tokenizer
from triptych.server.worker_extra import check_installed

if TYPE_CHECKING:
    from triptych.models.quantize import Copied

GGUF_TYPES = ("Q4_K", "Q5_K", "Q8_0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder, or FILE.gguf, to write; must not exist")
    parser.add_argument(
        "--gguf-type",
        choices=GGUF_TYPES,
        help=f"of linear layers in FILE.gguf; values and down projections have 8 bits (default: {GGUF_TYPES[0]})",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        help="in a folder, inputs that share a scale: more of them take less memory, and are less accurate "
        f"(default: {GROUP_SIZES[0]})",
    )
    parser.add_argument(
        "--asymmetric",
        action="store_true",
        help="in a folder, with a zero point for each group: more accurate, a little more memory and time "
        "(default: off)",
    )


def run(arguments: argparse.Namespace) -> int:
    check_installed("quantize")
    source, console = flags.model_folder(arguments.model, arguments.mmproj), Console(stderr=True)
    for copied in _copy(source, arguments, console):
        sizes = f"{copied.before / 2**30:.2f} GiB of weights are {copied.after / 2**30:.2f} GiB"
        console.print(f"{copied.file}: {sizes}", markup=False, highlight=False)
    console.print(f"triptych serve {arguments.out}", markup=False, highlight=False)
    return 0


def _copy(source: Path, arguments: argparse.Namespace, console: Console) -> Iterator["Copied"]:
    """Raises ConfigError for a flag that says nothing of such a copy."""
    from triptych.checkpoint.gguf.vocabulary import PromptFiles  # here, because they import what workers install
    from triptych.models.gguf_copy import write_gguf
    from triptych.models.quantize import quantize_checkpoint

    if arguments.out.suffix != SUFFIX:
        if arguments.gguf_type is not None:
            raise ConfigError(f"--gguf-type is for files: {arguments.out} is to be a folder; name it FILE{SUFFIX}")
        how = GroupQuantization(arguments.group_size or GROUP_SIZES[0], arguments.asymmetric)
        return quantize_checkpoint(source, arguments.out, how)
    if arguments.group_size is not None or arguments.asymmetric:
        raise ConfigError(f"--group-size and --asymmetric are for folders: {arguments.out} is to be a file")
    templates = read_templates(source, None, ignores_tokenizers=False)
    if more := sorted(templates.keys() - {DEFAULT}):
        console.print(f"templates that aren't written: {', '.join(more)}", markup=False, highlight=False)
    prompts = PromptFiles(read_special_tokens(source), Tokenizer(source).eos_token_ids, templates.get(DEFAULT))
    return write_gguf(source, arguments.out, arguments.gguf_type or GGUF_TYPES[0], prompts)
