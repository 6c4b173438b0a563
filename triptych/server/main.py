"""What runs in an instance's process."""

import logging
import signal

import torch

from triptych.checkpoint.reader import Checkpoint
from triptych.config import ServeConfig
from triptych.errors import BadAddress, StartError
from triptych.heap import gc_frozen, keep_freed_memory, share_heap
from triptych.messages.channel import Channel, endpoint
from triptych.server.build import Model, build_instance
from triptych.topology import Role

log = logging.getLogger(__name__)


def run_instance(config: ServeConfig, role: Role, join: str, name: str, threads: int) -> None:
    """Loads the role's part of the model, joins the frontend at ``join`` (HOST:PORT) and serves until it is told to
    stop. Raises StartError when it can't."""
    share_heap()
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exception here wouldn't stop the thread that loads
    host, _, port = join.rpartition(":")
    try:
        frontend = endpoint(host.strip("[]"), port)
        channel = Channel(config.cluster.cluster_host, secret=config.cluster.secret())
    except BadAddress as error:
        raise StartError(str(error)) from None
    try:
        model = Model(Checkpoint(config.model), config.engine)
        instance = build_instance(
            model=model,
            name=name,
            role=role,
            channel=channel,
            frontend=frontend,
            engine=config.engine,
            transfer=config.transfer,
            cluster_host=config.cluster.cluster_host,
            lease=config.lease,
        )
        torch.set_num_threads(1)  # from here on this thread is the loop, and the compute thread has its own
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: instance.stop())
        with gc_frozen():
            keep_freed_memory()
            instance.run()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # they would wake a channel that is closed
        channel.close()
