"""Runs the tests that peers publish of their APIs, unchanged, against Triptych, and writes docs/suites.md.

vLLM's tests come from its source distribution, of which only ``tests/`` is unpacked; SGLang's has none, so its tests
come from a checkout. They run in an environment of their own, with Triptych's packages and those that the tests need.
A test has passed if it passes with one of the scripted models: one whose answers end, one whose answers go on until a
limit, or one that thinks.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from compat.__main__ import INSTALLED, packages_of
from compat.model import build
from compat.service import ROOT
from compat.suites.peers import SGLANG, VLLM, Peer
from compat.suites.reasons import EXTENSION, LEFT, reason
from scripts.generated import DOCS, table, with_region

VERSION = "0.33.0"
FOLDER = INSTALLED / "suites"
PAGE = DOCS / "suites.md"
PACKAGES = (
    "unearth pytest pytest-asyncio requests regex pybase64 tblib openai anthropic cloudpickle openai-harmony jsonschema"
)
SECONDS = 3600
"""For one model's run."""


@dataclass(frozen=True)
class Suite:
    """A peer's tests in a folder, and of which version they are."""

    peer: Peer
    source: Path
    version: str

    @property
    def results(self) -> Path:
        return FOLDER / f"{self.peer.name.lower()}.json"

    def known(self) -> "Results":
        """The results of earlier runs, too."""
        return json.loads(self.results.read_text()) if self.results.exists() else {}

    def save(self, results: "Results") -> None:
        self.results.write_text(json.dumps(self.known() | results))


@dataclass(frozen=True)
class Kind:
    """A scripted model."""

    name: str
    context: int
    endless: bool = False
    thinks: bool = False
    flags: tuple[str, ...] = ()


KINDS = (
    Kind("answers that end", 32768),
    Kind("answers without an end", 5120, endless=True),
    Kind("answers behind reasoning", 32768, thinks=True, flags=("--reasoning-parser", "qwen3")),
)
Results = dict[str, tuple[str, str]]
"""Of each test: how it ended, and the message of its failure."""


def install() -> None:
    """Install what the tests need, unless that is there. Raises CalledProcessError."""
    stamp = FOLDER / "needs"
    if stamp.exists() and stamp.read_text() == PACKAGES:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    packages_of(FOLDER).joinpath("triptych.pth").write_text(sysconfig.get_path("purelib"))
    # pip finds the packages of the line above, and installs what is missing beside them
    subprocess.run([str(FOLDER / "bin" / "python"), "-m", "pip", "install", "-q", *PACKAGES.split()], check=True)
    stamp.write_text(PACKAGES)


def vllm() -> Suite:
    """vLLM's tests, which are fetched unless they are there. Raises CalledProcessError."""
    source = FOLDER / f"vllm-{VERSION}"
    if not source.exists():
        python = str(FOLDER / "bin" / "python")
        fetch = [python, "-m", "unearth", "--no-binary", f"vllm=={VERSION}", "-d", str(FOLDER)]
        subprocess.run(fetch, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(FOLDER / f"vllm-{VERSION}.tar.gz") as archive:
            wanted = [one for one in archive.getmembers() if one.name.startswith(f"vllm-{VERSION}/tests/")]
            archive.extractall(FOLDER, wanted, filter="data")
    return Suite(VLLM, source, VERSION)


def sglang(checkout: Path) -> Suite:
    """SGLang's tests of a checkout, whose version is its commit's date. Raises CalledProcessError."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=main of %cs"]
    return Suite(SGLANG, checkout.resolve(), subprocess.check_output(command, text=True).strip())


def run(suite: Suite, kind: Kind, paths: list[str], wanted: list[str] | None) -> Results:
    """Run tests with a scripted model: those of ``paths`` or, of these, only the wanted."""
    source = suite.source
    command = [str(FOLDER / "bin" / "python"), "-m", "pytest", "-c", os.devnull, "--rootdir=.", "-q", "--tb=no"]
    command += ["-p", "pytest_asyncio.plugin", "-p", "compat.suites.plugin", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["--continue-on-collection-errors", *paths]
    for part, options in suite.peer.options.items():
        if any(part in path for path in paths):
            command += options
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        build(folder / "model", suite.peer.script, context=kind.context, endless=kind.endless, thinks=kind.thinks)
        (folder / "logs").mkdir()
        own = {
            "SUITES_PEER": suite.peer.name,
            "SUITES_FOLDER": str(folder / "logs"),
            "SUITES_MODEL": str(folder / "model"),
            "SUITES_PYTHON": sys.executable,
            "SUITES_FLAGS": json.dumps(kind.flags),
            "SUITES_WANTED": json.dumps(wanted),
            "PYTHONPATH": f"{source}:{ROOT}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "HF_HUB_OFFLINE": "1",
        }
        subprocess.run(command, cwd=source, env=os.environ | own, timeout=SECONDS, check=False)
        lines = (folder / "logs" / "report.jsonl").read_text().splitlines()
    results: Results = {}
    for test, outcome, message in map(json.loads, lines):
        if outcome != "passed" or test not in results:  # a test may also fail when it begins or ends
            results[test] = outcome, message
    return results


def run_all(suite: Suite, paths: list[str]) -> None:
    """Run tests with each scripted model until they pass, but what no other answer can make pass. Saves the results."""
    results: Results = {}
    for kind in KINDS:
        again = [test for test, ended in results.items() if ended[0] == "failed" and reason(test, ended[1])[0] == LEFT]
        if results and not again:
            break
        for test, (outcome, message) in run(suite, kind, paths, again or None).items():
            earlier = f"{results[test][1]}\n" if test in again and outcome == "failed" else ""
            results[test] = outcome, earlier + message
        print(kind.name, dict(Counter(outcome for outcome, _ in results.values())), flush=True)
        suite.save(results)


def region(suite: Suite, results: Results) -> str:
    """A part of the page, with the counts and the table of what doesn't pass."""
    counts = Counter(outcome for outcome, _ in results.values())
    left: dict[tuple[str, str], list[str]] = {}
    for test, (outcome, message) in results.items():
        if outcome in ("failed", "uncollected"):
            left.setdefault(reason(test, message), []).append(test)
    kinds = Counter({kind: sum(len(tests) for (one, _), tests in left.items() if one == kind) for kind, _ in left})
    passed = counts["passed"]
    counted = passed + kinds[LEFT]
    summary = [
        ["start a server", str(passed + sum(kinds.values()))],
        ["pass", str(passed)],
        *([kind, str(number)] for kind, number in sorted(kinds.items())),
        ["skipped by their own marks", str(counts["skipped"])],
    ]
    share = f"{passed} of {counted} pass ({passed / counted:.1%}), besides those of extensions and of other models."
    body = f"{suite.peer.name} {suite.version}: {share}\n\n{table(['tests that', 'number'], summary)}\n\n"
    rows = [
        [kind, why, str(len(tests)), ", ".join(f"`{name}`" for name in _names(tests)) if kind == LEFT else ""]
        for (kind, why), tests in sorted(left.items(), key=lambda item: (item[0][0] != LEFT, item[0]))
        if kind != EXTENSION  # the page of the API lists them
    ]
    return body + table(["kind", "reason", "tests", "names"], rows)


def _names(tests: list[str]) -> list[str]:
    """Names without their parameters; of a file without names, the file's."""
    names = (re.sub(r"\[.*", "", test.rpartition("::")[2]) for test in tests)
    return sorted({name.rpartition("/")[2].removesuffix(".py") for name in names})


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/suites", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help="tests, as tests/… of vLLM; default: all")
    parser.add_argument("--sglang", type=Path, metavar="FOLDER", help="run SGLang's tests of this checkout")
    parser.add_argument("--write", action="store_true", help="write docs/suites.md, also of earlier runs' tests")
    arguments = parser.parse_args()
    install()
    suite = sglang(arguments.sglang) if arguments.sglang else vllm()
    run_all(suite, arguments.paths or list(suite.peer.paths))
    results = suite.known()
    unexplained = 0
    for test, (outcome, message) in results.items():
        if outcome in ("failed", "uncollected"):
            kind, why = reason(test, message)
            unexplained += not why
            print(f"{test}: {kind}: {why or message}")
    if arguments.write:
        PAGE.write_text(with_region(PAGE.read_text(), suite.peer.name, region(suite, results)))
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
