"""Settings of transfers between instances."""

from dataclasses import dataclass

from triptych.config.settings import Settings, setting

FABRICS = ("auto", "shm", "nixl", "mooncake")


@dataclass(frozen=True)
class TransferConfig(Settings):
    """How rows are transferred between instances."""

    fabric: str = setting(
        "auto",
        "transport of rows between processes: shm, nixl, mooncake, or auto: shm within a machine, otherwise what both "
        "ends have installed",
        choices=FABRICS,
    )
    checksum: str = setting(
        "auto",
        "check rows end to end: auto (over fabrics that cross machines) or always",
        choices=("auto", "always"),
    )
    mooncake_protocol: str = setting("tcp", "what Mooncake sends over: tcp or rdma", choices=("tcp", "rdma"))
    mooncake_devices: str = setting("", "network devices for Mooncake's rdma, separated by commas")
    inject_faults: str = setting(
        "", "for tests: break that share of writes on purpose, as in drop=0.01,corrupt=0.05,delay=0.1"
    )
