"""What runs in the process of a rank other than 0: the steps that rank 0 hands on, each on this rank's shard."""

import os
import signal
import sys
import time

import msgspec
import torch

from triptych.checkpoint.reader import Checkpoint
from triptych.engine.group import agree_on_size, gather_memory, make_forward
from triptych.engine.step_broadcast import receive_step
from triptych.errors import StartError
from triptych.heap import keep_freed_memory, share_heap
from triptych.layers.parallel import NO_TIMEOUT, ProcessGroup, rank_device, ready_key, rendezvous
from triptych.observe import logs
from triptych.observe.machine import end_with_parent
from triptych.server.build import Model
from triptych.server.ranks import RankConfig


def run_rank(config: RankConfig) -> None:
    """Joins the group, loads this rank's shard and computes steps until rank 0 ends this process. Raises StartError for
    a checkpoint that can't be served, and RuntimeError when another rank is gone."""
    model = Model(Checkpoint(config.model), config.engine)
    device = rank_device(model.device, config.rank)
    store = rendezvous(config.rendezvous, config.num_ranks)
    store.set(ready_key(config.rank), "")
    store.wait([ready_key(0)], NO_TIMEOUT)
    group = ProcessGroup(store, config.rank, config.num_ranks, device)
    decoder = model.load_decoder(group)
    # as rank 0 does in roles/build.py
    gather_memory(group, device)
    size = agree_on_size(group)
    cache = model.make_cache(group, size.num_pages, config.cache).own
    forward = make_forward(decoder, cache, config.engine, size.context_length)
    keep_freed_memory()
    with torch.inference_mode():
        while True:
            forward(receive_step(group, model.adapter.embedding_width, decoder.dtype), cache, None)


def main(argument: str) -> None:
    """``argument`` is a ``RankConfig`` in JSON."""
    config = msgspec.json.decode(argument, type=RankConfig)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a terminal or a service manager may signal all of us; rank 0 decides
    end_with_parent(config.parent)
    logs.set_up(config.logs)
    share_heap()
    torch.set_num_threads(config.threads)
    try:
        run_rank(config)
    except StartError as error:
        logs.fatal(str(error))
        os._exit(1)  # the process is gone when its sockets are, so that rank 0 finds no other cause
    except RuntimeError:
        time.sleep(0.2)  # if rank 0 is gone, the kernel ends this process before it can complain
        raise


if __name__ == "__main__":
    main(sys.argv[1])
