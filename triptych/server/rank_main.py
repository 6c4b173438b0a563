"""Entry point of the process of a rank other than 0, which computes each step of rank 0 on its own shard."""

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
from triptych.server.model_bundle import ModelBundle
from triptych.server.ranks import RankSpec


def run_rank(spec: RankSpec) -> None:
    """Join the group, load this rank's shard and compute steps until rank 0 ends this process. Raises StartError for a
    checkpoint that can't be served, and RuntimeError when another rank has ended."""
    model = ModelBundle(Checkpoint(spec.model), spec.engine)
    device = rank_device(model.device, spec.rank)
    store = rendezvous(spec.rendezvous, spec.num_ranks)
    store.set(ready_key(spec.rank), "")
    store.wait([ready_key(0)], NO_TIMEOUT)
    group = ProcessGroup(store, spec.rank, spec.num_ranks, device)
    decoder = model.load_decoder(group)
    # the same collective operations as those of rank 0, in server/build_engine.py
    gather_memory(group, device)
    size = agree_on_size(group, len(model.kv_rows.layer_groups.windows))
    cache = model.make_cache(group, size.num_pages, spec.cache).own
    forward = make_forward(decoder, cache, spec.engine, size.context_length)
    keep_freed_memory()
    with torch.inference_mode():
        while True:
            forward(receive_step(group, model.adapter.embedding_width, decoder.dtype), cache, None)


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a terminal may signal the whole group; rank 0 decides
    end_with_parent(spec.parent)
    logs.set_up(spec.logs)
    share_heap()
    torch.set_num_threads(spec.threads)
    try:
        run_rank(spec)
    except StartError as error:
        logs.fatal(str(error))
        os._exit(error.exit_code)  # ends together with its sockets, so that rank 0 reports this cause and no other
    except RuntimeError:
        time.sleep(0.2)  # if rank 0 has ended, the kernel ends this process before it logs an error
        raise


if __name__ == "__main__":
    main()
