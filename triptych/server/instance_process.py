"""Runs one instance in this process."""

import contextlib
import os
import signal
from pathlib import Path
from typing import NoReturn

import torch

from triptych.checkpoint.reader import Checkpoint
from triptych.clock import SystemClock
from triptych.config import InstanceSpec
from triptych.errors import BadAddress, InstanceBroken, StartError
from triptych.heap import gc_frozen, keep_freed_memory, share_heap
from triptych.messages.channel import Channel
from triptych.observe import logs
from triptych.server.build import build_instance
from triptych.server.faulty_device import FaultyDevice
from triptych.server.health import HealthServer
from triptych.server.model_bundle import ModelBundle
from triptych.server.pulse import Pulse


def run_instance(spec: InstanceSpec) -> None:
    """Load the role's part of the model, join the frontend and serve until ``Stop`` or the end of a drain. Raises
    StartError when the instance can't start."""
    share_heap()
    torch.set_num_threads(spec.engine.threads)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exception here wouldn't stop the thread that loads
    clock = SystemClock()
    with contextlib.ExitStack() as stack:
        loading = Pulse(spec.name, spec.role, clock)
        health = _open_health(spec, loading, stack)
        try:
            channel = Channel(clock, spec.cluster.cluster_host, secret=spec.cluster.secret())
        except BadAddress as error:
            raise StartError(str(error)) from None
        stack.callback(channel.close)
        stack.callback(_ignore_signals)
        model = ModelBundle(Checkpoint(Path(spec.model)), spec.engine)
        instance = build_instance(spec, model=model, channel=channel, clock=clock)
        if health:
            health.pulse = instance.pulse
        torch.set_num_threads(1)  # from here on this thread runs the loop, and the compute thread has its own number
        signal.signal(signal.SIGTERM, lambda *_: instance.drain())
        signal.signal(signal.SIGINT, lambda *_: instance.stop())
        if isinstance(device := instance.compute.device, FaultyDevice):
            signal.signal(signal.SIGUSR1, lambda *_: device.break_now())
        instance.on_broken = lambda error: _end_now(error, channel)
        with gc_frozen():
            keep_freed_memory()
            instance.run()


def _open_health(spec: InstanceSpec, pulse: Pulse, stack: contextlib.ExitStack) -> HealthServer | None:
    if not spec.lease.health_port:
        return None
    health = HealthServer(spec.cluster.cluster_host, spec.lease.health_port, pulse)
    stack.callback(health.close)
    return health


def _end_now(error: InstanceBroken, channel: Channel) -> NoReturn:
    """End the process once its messages are sent. Nothing else is closed, since the device may never let go of it."""
    _ignore_signals()
    channel.close()
    logs.fatal(str(error))
    os._exit(error.exit_code)


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # handlers would wake a closed channel
