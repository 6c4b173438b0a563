"""Loads what an instance's role needs and wires it into the role's stage loops."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from triptych.clock import Clock
from triptych.compute_thread import Device
from triptych.config import InstanceSpec
from triptych.config.injected_faults import InjectedFaults
from triptych.encode.runner import record_towers
from triptych.errors import StartError
from triptych.executor import started_executor
from triptych.layers.devices import check_ranks, use_device
from triptych.layers.parallel import rank_device
from triptych.layers.torch_device import TorchDevice
from triptych.messages.channel import Channel
from triptych.messages.work import Capacity
from triptych.server.build_encoder import WorkerStarter, encode_loop_factory
from triptych.server.build_engine import build_engine
from triptych.server.components import Components, layouts
from triptych.server.faulty_device import FaultyDevice
from triptych.server.instance import InstanceProcess
from triptych.server.load_progress import LoadProgress
from triptych.server.model_bundle import ModelBundle
from triptych.server.ranks import ChildRanks, NoChildRanks, Ranks
from triptych.topology import Role
from triptych.transfer.fabrics.opening import open_fabrics
from triptych.transfer.sender import Sender

log = logging.getLogger(__name__)

T = TypeVar("T")


def build_instance(spec: InstanceSpec, *, model: ModelBundle, channel: Channel, clock: Clock) -> InstanceProcess:
    """Load what the role needs, and nothing else, and return an instance that can be run.

    Takes as long as reading the weights takes. Call it on the process's main thread when an instance has several ranks.
    Raises CheckpointError for a checkpoint that can't be served, and StartError for settings that don't fit it.
    """
    role = spec.role
    if role.encodes and not model.family.takes_media:
        raise StartError(f"{role.value} instances encode, and {model.checkpoint.folder} is a text-only model")
    instance = InstanceProcess(
        name=spec.name,
        role=role,
        model=model.identity,
        layouts=layouts(model.row_layout, model.kv_layout, has_decoder=role.has_decoder),
        capacity=Capacity(spec.engine.max_num_seqs, spec.encode.encode_batch_patches),
        channel=channel,
        join=spec.joins,
        lease=spec.lease,
        clock=clock,
        start_executor=started_executor,
        incarnation=spec.incarnation,
    )
    ranks = _start_ranks(spec, model, instance)
    instance.at_end(ranks.close)
    try:
        instance.loop_builder = _load(spec, instance, model, ranks)
        instance.take_role(role)
    except BaseException:
        instance.compute.close()  # it wakes the channel, which the caller closes next
        instance.close_parts()
        raise
    return instance


def _load(spec: InstanceSpec, instance: InstanceProcess, model: ModelBundle, ranks: Ranks) -> Components:
    role = spec.role
    fabrics = open_fabrics(spec.transfer, spec.cluster.cluster_host, instance.clock)
    for fabric in fabrics:
        instance.at_end(fabric.close)
    num_threads = torch.get_num_threads()
    instance.compute.submit(use_threads, num_threads)
    use_device(rank_device(model.device, 0))
    instance.compute.submit(use_device, rank_device(model.device, 0))
    start_workers = WorkerStarter(model, spec.encode, num_threads) if role.encodes else None
    if start_workers:
        instance.at_end(start_workers.close)
    with LoadProgress(model.num_bytes(role), instance.clock) as progress:
        model.checkpoint.on_read = progress.advance
        encoder = _loaded("encoder", instance, model.load_encoder) if role.encodes else None
        group = ranks.connect(rank_device(model.device, 0))
        decoder = _loaded("decoder", instance, lambda: model.load_decoder(group)) if role.has_decoder else None
    model.check_unchanged()
    by_name = {fabric.name: fabric for fabric in fabrics}
    sender = Sender(by_name, instance.channel.address, instance.send, clock=instance.clock)
    engine = make_encode_loop = None
    if decoder is not None:
        engine = build_engine(
            model=model,
            decoder=decoder,
            instance=instance,
            role=role,
            engine=spec.engine,
            ranks=ranks,
            group=group,
            check_always=spec.transfer.checksum == "always",
        )
    if encoder is not None and start_workers is not None:
        if spec.engine.cuda_graphs:
            record_towers(encoder, rank_device(model.device, 0))
        make_encode_loop = encode_loop_factory(
            model, encoder, instance, spec.encode, sender, cluster=spec.cluster, start_workers=start_workers
        )
    instance.compute.device = _device(spec, model)
    return Components(
        instance=instance,
        check_device=lambda role: check_device(model, role, spec.num_ranks),
        embedding_layout=model.row_layout,
        kv_layout=model.kv_layout,
        fabrics=fabrics,
        sender=sender,
        make_encode_loop=make_encode_loop,
        engine=engine,
    )


def _device(spec: InstanceSpec, model: ModelBundle) -> Device:
    """Return what the compute thread computes on. Raises ConfigError for faults that can't be injected."""
    device = TorchDevice(rank_device(model.device, 0))
    faults = InjectedFaults.parse(spec.transfer.inject_faults)
    return device if faults.device is None else FaultyDevice(device, faults, f"{spec.name} {spec.incarnation}")


def use_threads(number: int) -> None:
    """Set the number of threads that the calling thread computes with, whatever others set later."""
    torch.set_num_threads(number)
    torch.get_num_threads()  # a thread adopts the process's number once, at its first parallel operation or here


def check_device(model: ModelBundle, role: Role, num_ranks: int) -> None:
    """Raise StartError for a role that an instance can't have on its devices."""
    if model.device.type != "cpu" and num_ranks > 1 and (role.sends_kv or role.takes_kv):
        raise StartError(
            f"--tensor-parallel-size {num_ranks}: on GPUs, {role.value} instances have one rank: each GPU has other "
            "heads, and transfers have all heads of a token"
        )


def _start_ranks(spec: InstanceSpec, model: ModelBundle, instance: InstanceProcess) -> Ranks:
    """Start the processes that share the decoder with this one, after checking that it can be sharded so."""
    check_device(model, spec.role, spec.num_ranks)
    if (size := spec.num_ranks) == 1:
        return NoChildRanks()
    check_ranks(model.device, size)
    model.adapter.decoder_config.shard(size)
    return ChildRanks(spec.model, spec.engine, size, instance.fail)


def _loaded(what: str, instance: InstanceProcess, load: Callable[[], T]) -> T:
    """Load something on the compute thread."""
    began = instance.clock.monotonic()
    loaded = instance.compute.submit(load).result()
    log.info("loaded the %s in %.1f s", what, instance.clock.monotonic() - began)
    return loaded
