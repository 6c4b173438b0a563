"""``triptych pull``: downloads a model by its name on the Hugging Face Hub, without serving it."""

import argparse

from triptych.cli import flags
from triptych.errors import ConfigError
from triptych.hub import HubName


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name on the Hugging Face Hub: ORG/NAME, or ORG/NAME@REVISION")


def run(arguments: argparse.Namespace) -> int:
    if HubName.parse(arguments.model) is None:
        raise ConfigError(f"{arguments.model}: not a name on the Hugging Face Hub, as ORG/NAME or ORG/NAME@REVISION")
    print(flags.model_folder(arguments.model))
    return 0
