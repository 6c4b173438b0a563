"""``triptych quantize``: writes a copy of a model with 4-bit weights, which needn't be quantized at each start."""

import argparse
from pathlib import Path

from rich.console import Console

from triptych.cli import flags
from triptych.layers.stored.pack_quantized import GROUP_SIZES, GroupQuantization
from triptych.server.worker_extra import check_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write, which must not exist")
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
    from triptych.models.quantize import quantize_checkpoint  # here, because it imports PyTorch

    source, console = flags.model_folder(arguments.model, arguments.mmproj), Console(stderr=True)
    quantization = GroupQuantization(arguments.group_size, arguments.asymmetric)
    for copied in quantize_checkpoint(source, arguments.out, quantization):
        sizes = f"{copied.before / 2**30:.2f} GiB of weights are {copied.after / 2**30:.2f} GiB"
        console.print(f"{copied.file}: {sizes}", markup=False, highlight=False)
    console.print(f"triptych serve {arguments.out}", markup=False, highlight=False)
    return 0
