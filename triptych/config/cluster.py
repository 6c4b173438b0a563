"""Settings of the control sockets between the processes of a service."""

from dataclasses import dataclass

from triptych.config.addresses import is_loopback, is_unspecified
from triptych.config.private_files import read_private
from triptych.config.settings import Settings, setting
from triptych.errors import ConfigError

MIN_SECRET_BYTES = 16
"""Minimum length of a cluster secret: 16 random bytes can't be guessed."""
MAX_SECRET_BYTES = 4096
"""Maximum length of a cluster secret: a longer file was probably given by mistake."""


@dataclass(frozen=True)
class ClusterConfig(Settings):
    """Cluster: addresses and trust between processes."""

    cluster_host: str = setting(
        "127.0.0.1",
        "address that the control socket of this process listens on, and at which the other processes reach it",
    )
    # the secret itself is never a setting: other users of a machine can read command lines
    cluster_secret_file: str = setting(
        "",
        f"file with the secret that all processes of the service share, at least {MIN_SECRET_BYTES} bytes; needed for "
        "a --cluster-host that isn't loopback",
        path=True,
    )

    def check_together(self) -> None:
        if is_unspecified(self.cluster_host):
            raise ConfigError(
                f"--cluster-host {self.cluster_host} stands for all addresses of this machine; give the one that the "
                "other processes reach this process at"
            )
        if not is_loopback(self.cluster_host) and not self.cluster_secret_file:
            raise ConfigError(
                f"--cluster-host {self.cluster_host} can be reached from other machines; that needs a secret, given "
                "with --cluster-secret-file"
            )

    def secret(self) -> bytes | None:
        """Return the file's content without the white space around it, or None when no file is given. Raises
        ConfigError when it can't be read, others can read it too, or its length is wrong."""
        if not self.cluster_secret_file:
            return None
        name = f"--cluster-secret-file {self.cluster_secret_file}"
        secret = read_private(self.cluster_secret_file, name, MAX_SECRET_BYTES).strip()
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise ConfigError(f"{name} must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes")
        return secret
