"""Runs real clients, unchanged, against a service whose model's answers are known, and writes the table of the docs.

Each file of ``clients/`` is one client. Its first lines name the packages that it needs:

    # needs: pip openai>=3,<4            (or npm, or system for commands that are on the machine)
    # needs: own torch                   (Triptych's own packages: those of the client would be gigabytes)
    # needs: without torchvision         (packages that don't load beside these, and that the client does without)

They are installed once in ``.compat/NAME``. A client prints a line for each check: ``text: ok``, ``image: failed
REASON`` or ``tool: n/a REASON``. A check without a line has failed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from compat.model import CONTEXT, build
from compat.service import ROOT, serve
from triptych.measure.load.pictures import picture

CLIENTS = ROOT / "compat" / "clients"
INSTALLED = ROOT / ".compat"
DOC = ROOT / "docs" / "clients.md"
CHECKS = ("text", "image", "stream", "turns", "tool", "context")
SECONDS = 900
"""For all checks of a client."""
LONG = "1" * 60_000
"""A text of as many tokens, more than the model's context."""
_LINE = re.compile(rf"({'|'.join(CHECKS)}): (ok|failed|n/a)\b[ ]?(.*)")
_ROW = re.compile(r"^\| (\w[\w-]*) \|.*\|$", re.MULTILINE)


@dataclass(frozen=True)
class Client:
    """A file of ``clients/``."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def needs(self) -> list[tuple[str, list[str]]]:
        """The installers and the packages that each installs."""
        lines = self.path.read_text().splitlines()[:12]
        found = (line.lstrip("#/ ").removeprefix("needs: ").split() for line in lines if "needs: " in line[:12])
        return [(words[0], words[1:]) for words in found]

    @property
    def folder(self) -> Path:
        return INSTALLED / self.name

    @property
    def bin(self) -> Path:
        """The folder of its commands."""
        uses_npm = any(installer == "npm" for installer, _ in self.needs)
        return self.folder / ("node_modules/.bin" if uses_npm else "bin")

    @property
    def command(self) -> list[str]:
        own = self.folder / "clients" / self.path.name
        python = self.bin / "python" if self.bin.exists() else sys.executable
        # -P: a file named as the package that it imports isn't taken for it
        interpreter = {".py": [str(python), "-P"], ".mjs": ["node"], ".sh": ["bash"]}[self.path.suffix]
        return [*interpreter, str(own)]

    def install(self) -> None:
        """Install what it needs, unless that is there. Raises CalledProcessError."""
        stamp = self.folder / "needs.json"
        wanted = json.dumps(self.needs)
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            for installer, packages in self.needs:
                if installer in ("own", "pip"):
                    subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
                if installer == "own":
                    packages_of(self.folder).joinpath("triptych.pth").write_text(sysconfig.get_path("purelib"))
                elif installer == "pip":
                    pip = [str(self.folder / "bin" / "python"), "-m", "pip", "install", "-q", *packages]
                    subprocess.run(pip, check=True)
                elif installer == "without":
                    pip = [str(self.folder / "bin" / "python"), "-m", "pip", "uninstall", "-q", "--yes", *packages]
                    subprocess.run(pip, check=True)
                elif installer == "npm":
                    subprocess.run(["npm", "install", "--silent", *packages], cwd=self.folder, check=True)
            stamp.write_text(wanted)
        # Node looks for packages beside the file
        for part in ("clients", "shared"):
            shutil.rmtree(self.folder / part, ignore_errors=True)
            (self.folder / part).mkdir()
        shutil.copy(self.path, self.folder / "clients")
        shutil.copytree(CLIENTS.parent / "shared", self.folder / "shared", dirs_exist_ok=True)

    def version(self) -> str:
        """The installed versions of the packages, or of the command, that it names."""
        found = []
        removed = [package for installer, packages in self.needs for package in packages if installer == "without"]
        for installer, packages in self.needs:
            if installer == "system" and shutil.which(packages[0]):
                shown = subprocess.run([packages[0], "--version"], capture_output=True, text=True, check=True)
                found.append(f"{packages[0]} {shown.stdout.split()[-1]}")
                continue
            for package in packages:
                name = re.sub(r"(?<=.)(@|\[|[<>=!~]).*", "", package)
                if installer == "npm":
                    text = (self.folder / "node_modules" / name / "package.json").read_text()
                    found.append(f"{name} {json.loads(text)['version']}")
                elif installer == "pip" and name not in removed:
                    asked = f"import importlib.metadata as m; print(m.version({name!r}))"
                    python = str(self.folder / "bin" / "python")
                    shown = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
                    found.append(f"{name} {shown.stdout.strip()}")
        return ", ".join(found)

    def run(self, environment: dict[str, str]) -> dict[str, tuple[str, str]]:
        """Return of each check how it ended, and why."""
        with tempfile.TemporaryDirectory(prefix=f"compat-{self.name}-") as folder:
            own = environment | {"COMPAT_FOLDER": folder, "HOME": folder}
            own["PATH"] = f"{self.bin}:{environment['PATH']}"
            own["PYTHONPATH"] = str(self.folder / "shared")
            log = self.folder / "log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    self.command, env=own, cwd=folder, stdout=output, stderr=output, start_new_session=True
                )
                try:
                    process.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    output.write(f"\nended after {SECONDS} s\n".encode())
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # also what it has left running
                    process.wait()
        lines = log.read_text(errors="replace").splitlines()
        ended = {match[1]: (match[2], match[3]) for line in lines if (match := _LINE.fullmatch(line.strip()))}
        return {check: ended.get(check, ("failed", f"no result; see {log.relative_to(ROOT)}")) for check in CHECKS}


def packages_of(environment: Path) -> Path:
    """The folder of a virtual environment's packages."""
    variables = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", "venv", vars=variables))


@contextmanager
def service(folder: Path) -> Iterator[dict[str, str]]:
    """Serve the scripted model. Yields the variables that clients get."""
    build(folder / "scripted")
    (folder / "picture.png").write_bytes(picture(1))
    (folder / "long.txt").write_text(LONG)
    serving = serve(sys.executable, folder / "scripted", folder / "service.log", "--served-model-name", "scripted")
    with serving as url:
        shown = {name: os.environ[name] for name in ("PATH", "LANG", "PIP_CONFIG_FILE") if name in os.environ}
        yield shown | {
            "COMPAT_URL": url,
            "COMPAT_MODEL": "scripted",
            "COMPAT_CONTEXT": str(CONTEXT),
            "COMPAT_CHECKPOINT": str(folder / "scripted"),
            "COMPAT_IMAGE": str(folder / "picture.png"),
            "COMPAT_LONG": str(folder / "long.txt"),
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "sk-compat",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "sk-compat",
            "no_proxy": "127.0.0.1",
        }


def row(client: Client, ended: dict[str, tuple[str, str]]) -> str:
    """A client's row of the table, with its remarks."""
    cells = [how for how, _ in ended.values()]
    remarks = "; ".join(f"{check}: {why}" for check, (_, why) in ended.items() if why).replace("|", "\\|")
    return f"| {client.name} | {client.version()} | {' | '.join(cells)} | {remarks} |"


def write(rows: dict[str, str]) -> None:
    """Put rows in the table of the docs, in place of those of the same clients."""
    text = DOC.read_text()
    begin, end = "<!-- begin clients -->\n", "<!-- end clients -->"
    before, _, rest = text.partition(begin)
    table, _, after = rest.partition(end)
    head = f"| client | versions | {' | '.join(CHECKS)} | remarks |\n|{' --- |' * (len(CHECKS) + 3)}\n"
    known = {match[1]: match[0] for match in _ROW.finditer(table) if match[1] not in ("client", "---")} | rows
    body = "".join(known[name] + "\n" for name in sorted(known))
    DOC.write_text(f"{before}{begin}{head}{body}{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/compat", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CLIENT", help="clients to run; default: all")
    parser.add_argument("--write", action="store_true", help="write the rows of these clients in docs/clients.md")
    parser.add_argument("--list", action="store_true", help="list the clients and what they need, and run none")
    arguments = parser.parse_args()
    clients = {client.name: client for client in map(Client, sorted(CLIENTS.glob("*.*")))}
    if unknown := [name for name in arguments.names if name not in clients]:
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(clients)}")
    chosen = [clients[name] for name in arguments.names or clients]
    if arguments.list:
        for client in chosen:
            print(client.name, *(" ".join([installer, *packages]) for installer, packages in client.needs), sep="  ")
        return 0
    failed = False
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as environment:
        for client in chosen:
            client.install()
            ended = client.run(environment)
            for check, (how, why) in ended.items():
                print(f"{client.name:16} {check:8} {how:7} {why}", flush=True)
                failed |= how == "failed"
            if arguments.write:
                write({client.name: row(client, ended)})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
