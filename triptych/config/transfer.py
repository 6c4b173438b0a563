"""Settings of transfers between instances."""

from dataclasses import dataclass

from triptych.config.settings import Settings, setting

FABRICS = ("auto", "shm", "nixl", "mooncake")


@dataclass(frozen=True)
class TransferConfig(Settings):
    """Transfer of rows between instances."""

    fabric: str = setting(
        "auto",
        "fabric that moves rows between processes: shm, nixl, mooncake, or auto: shm within a machine, otherwise one "
        "that both sides have installed",
        choices=FABRICS,
    )
    checksum: str = setting(
        "auto",
        "check rows end to end: auto (over fabrics that cross machines) or always",
        choices=("auto", "always"),
    )
    mooncake_protocol: str = setting("tcp", "protocol of Mooncake: tcp or rdma", choices=("tcp", "rdma"))
    mooncake_devices: str = setting("", "network devices for Mooncake's rdma, separated by commas")
    inject_faults: str = setting(
        "",
        "for tests: inject faults into a share of writes, as in drop=0.01,corrupt=0.05,delay=0.1, or break the "
        "device: at a share of jobs (device=0.001), or at SIGUSR1 alone (device=0)",
        internal=True,
    )
