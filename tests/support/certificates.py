"""Certificates for HTTPS, signed by themselves."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path, *names: str) -> tuple[Path, Path]:
    """The files of a new certificate, for names such as ``DNS:localhost`` or ``IP:127.0.0.1``, and of its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    about = ["-subj", "/CN=test", "-addext", f"subjectAltName={','.join(names)}"]
    command = ["openssl", "req", *kind, *about, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return cert, key
