"""What services on a Ray cluster say of their instances."""

from tests.support.commands import Command, wait_for
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.messages.operations import LaunchedInstance, LaunchState, Status

NODE = {"CPU": 1.0}
"""Room for one instance."""


def control_flags(command: Command) -> list[str]:
    """The flags by which another command reaches the service."""
    return command.wait_for_line(r"triptych status (--control .*)$")[1].split()


def status(command: Command) -> Status:
    _, control, _, host, _, secret = control_flags(command)
    with ControlClient(control, ClusterConfig(cluster_host=host, cluster_secret_file=secret)) as client:
        return client.status()


def launched(command: Command, name: str) -> LaunchedInstance:
    return next(one for one in status(command).launched if one.name == name)


def pid_of(command: Command, name: str) -> int:
    """Waits until it has joined."""
    found: list[int] = []

    def look() -> bool:
        found.extend(one.pid for one in status(command).instances if one.name == name)
        return bool(found)

    wait_for(look, 60, command)
    return found[0]


def is_whole(command: Command) -> bool:
    processes = status(command).launched
    return bool(processes) and all(one.state is LaunchState.READY for one in processes)
