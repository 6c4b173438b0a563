"""What runs in an instance's process."""

import logging
import signal

import torch

from triptych.config import ServeConfig
from triptych.messages.channel import Channel
from triptych.models.checkpoint import Checkpoint
from triptych.roles.build import Model, build_instance
from triptych.topology import Role
from triptych.types import Address

log = logging.getLogger(__name__)


def run_instance(config: ServeConfig, role: Role, join: str, name: str, threads: int) -> None:
    """Loads the role's part of the model, joins the front door at ``join`` (HOST:PORT) and serves until it is told to
    stop. Raises StartError when it can't."""
    torch.set_num_threads(threads)
    channel = Channel()
    try:
        model = Model(Checkpoint(config.model), config.engine.dtype)
        instance = build_instance(
            model=model,
            name=name,
            role=role,
            channel=channel,
            front_door=Address(f"tcp://{join}"),
            engine=config.engine,
            transfer=config.transfer,
            cluster_host="127.0.0.1",
            lease=config.lease,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: instance.stop())
        instance.run()
    finally:
        channel.close()
