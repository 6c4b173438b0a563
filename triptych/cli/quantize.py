"""``triptych quantize``: writes a copy of a model with quantized weights, as a folder or in GGUF."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from triptych.checkpoint.gguf.index import SUFFIX
from triptych.cli import flags
from triptych.layers.stored.pack_quantized import GROUP_SIZES, GroupQuantization
from triptych.prompt.template_files import DEFAULT, read_special_tokens, read_templates
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
        default=GGUF_TYPES[0],
        help="of linear layers in FILE.gguf; values and down projections have 8 bits (default: %(default)s)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=GROUP_SIZES[0],
        help="inputs that share a scale: more of them take less memory, and are less accurate (default: %(default)s)",
    )
    parser.add_argument(
        "--asymmetric",
        action="store_true",
        help="with a zero point for each group: more accurate, a little more memory and time (default: off)",
    )


def run(arguments: argparse.Namespace) -> int:
    check_installed("quantize")
    source, console = flags.model_folder(arguments.model, arguments.mmproj), Console(stderr=True)
    for copied in _copy(source, arguments):
        sizes = f"{copied.before / 2**30:.2f} GiB of weights are {copied.after / 2**30:.2f} GiB"
        console.print(f"{copied.file}: {sizes}", markup=False, highlight=False)
    console.print(f"triptych serve {arguments.out}", markup=False, highlight=False)
    return 0


def _copy(source: Path, arguments: argparse.Namespace) -> Iterator["Copied"]:
    from triptych.models.gguf_copy import write_gguf  # here, because they import PyTorch
    from triptych.models.quantize import quantize_checkpoint

    if arguments.out.suffix != SUFFIX:
        return quantize_checkpoint(source, arguments.out, GroupQuantization(arguments.group_size, arguments.asymmetric))
    templates = read_templates(source, None, ignores_tokenizers=False)
    tokens = read_special_tokens(source)
    return write_gguf(source, arguments.out, arguments.gguf_type, tokens, templates.get(DEFAULT))
