"""Runs one instance in this process."""

import signal
from pathlib import Path

import torch

from triptych.checkpoint.reader import Checkpoint
from triptych.config import InstanceSpec
from triptych.errors import BadAddress, StartError
from triptych.heap import gc_frozen, keep_freed_memory, share_heap
from triptych.messages.channel import Channel, endpoint
from triptych.server.build import build_instance
from triptych.server.model_bundle import ModelBundle


def run_instance(spec: InstanceSpec) -> None:
    """Load the role's part of the model, join the frontend and serve until ``Stop``. Raises StartError when the
    instance can't start."""
    share_heap()
    torch.set_num_threads(spec.engine.threads)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exception here wouldn't stop the thread that loads
    host, _, port = spec.join.rpartition(":")
    try:
        frontend = endpoint(host.strip("[]"), port)
        channel = Channel(spec.cluster.cluster_host, secret=spec.cluster.secret())
    except BadAddress as error:
        raise StartError(str(error)) from None
    try:
        model = ModelBundle(Checkpoint(Path(spec.model)), spec.engine)
        instance = build_instance(spec, model=model, channel=channel, frontend=frontend)
        torch.set_num_threads(1)  # from here on this thread runs the loop, and the compute thread has its own number
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: instance.stop())
        with gc_frozen():
            keep_freed_memory()
            instance.run()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # handlers would wake a closed channel
        channel.close()
