"""``triptych doctor``: what a checkpoint would load where, without loading it."""

import argparse
import os

from rich.console import Console
from rich.table import Table

from triptych.cli import flags
from triptych.families.registry import family_of, resolve
from triptych.models.config_files import load_config
from triptych.models.safetensors_header import read_folder
from triptych.topology import Role

SUMMARY = "show what each role would load of a model, in bytes, without loading it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser)


def run(arguments: argparse.Namespace) -> int:
    folder = flags.model_folder(arguments.model)
    config = load_config(folder)
    files = family_of(config)
    family = resolve(files.tower)(config)
    stages = family.stage_bytes(read_folder(folder))
    console = Console()
    console.print(f"{arguments.model}: {config['model_type']}, rows of {family.row_width} values", markup=False)
    console.print(f"this machine: {len(os.sched_getaffinity(0))} cores")
    console.print(_table(stages, [role for role in Role if files.takes_media or not role.encodes]))
    return 0


def _table(stages: dict[str, int], roles: list[Role]) -> Table:
    table = Table("role", "vision tower", "decoder", "bytes", title="bytes each role loads from the checkpoint")
    for column in table.columns[1:]:
        column.justify = "right"
    for role in roles:
        tower = stages["tower"] if role.encodes else 0
        decoder = stages["decoder"] if role.has_decoder else 0
        table.add_row(role.value, f"{tower:,}", f"{decoder:,}", f"{tower + decoder:,}")
    return table
