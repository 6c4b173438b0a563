"""Opens the fabrics of an instance."""

import importlib.util

from triptych.clock import Clock
from triptych.config import TransferConfig, is_loopback
from triptych.config.injected_faults import InjectedFaults
from triptych.transfer.fabrics.base import Fabric
from triptych.transfer.fabrics.faulty import FaultyFabric
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.fabrics.shm import SharedMemoryFabric


def open_fabrics(config: TransferConfig, host: str, clock: Clock) -> list[Fabric]:
    """Open the fabrics of an instance, in order of preference. ``host`` is the address at which peers reach this
    process. Raises StartError when the fabric that the settings name isn't installed."""
    fabrics: list[Fabric] = [LocalFabric(), *(_open(name, config, host) for name in _names(config.fabric, host))]
    faults = InjectedFaults.parse(config.inject_faults)
    if not any(faults.probabilities.values()):
        return fabrics
    return [FaultyFabric(fabric, faults, clock) for fabric in fabrics]


def is_installed(name: str) -> bool:
    """Return whether the library of ``nixl`` or ``mooncake`` is installed, without importing it."""
    modules = {"nixl": ("nixl_cu12", "nixl_cu13", "nixl"), "mooncake": ("mooncake.engine",)}[name]
    return any(_found(module) for module in modules)


def _names(fabric: str, host: str) -> list[str]:
    if fabric != "auto":
        return [fabric]
    # with a loopback address, all peers are on this machine, so shared memory is enough
    network = [name for name in ("nixl", "mooncake") if not is_loopback(host) and is_installed(name)]
    return ["shm", *network]


def _open(name: str, config: TransferConfig, host: str) -> Fabric:
    match name:
        case "nixl":
            from triptych.transfer.fabrics.nixl import NixlFabric

            return NixlFabric(host)
        case "mooncake":
            from triptych.transfer.fabrics.mooncake import MooncakeFabric

            return MooncakeFabric(host, protocol=config.mooncake_protocol, devices=config.mooncake_devices)
        case _:
            return SharedMemoryFabric()


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
