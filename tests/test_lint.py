"""The linter refuses what would run code from outside, or open ports to all addresses; and rules that it lacks."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def refused(source: str) -> list[str]:
    """The codes of the rules that a file of the package would break."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--stdin-filename=triptych/x.py", "-"]
    result = subprocess.run(command, input=source, capture_output=True, text=True, cwd=ROOT, check=False)
    return re.findall(r"triptych/x\.py:\d+:\d+: (\S+)", result.stdout)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import pickle\n", "TID251"),
        ("from pickle import loads\n", "TID251"),
        ("import cloudpickle\n", "TID251"),
        ("import dill\n", "TID251"),
        ("import marshal\n", "TID251"),
        ("import shelve\n", "TID251"),
        ("import torch\n\ntorch.load('x')\n", "TID251"),
        ("import numpy as np\n\nnp.load('x')\n", "TID251"),
        ("import yaml\n\nyaml.load('x')\n", "TID251"),
        ("from yaml import unsafe_load\n\nunsafe_load('x')\n", "TID251"),
        ("eval('x')\n", "S307"),
        ("exec('x')\n", "S102"),
        ("import subprocess\n\nsubprocess.run('x', shell=True, check=True)\n", "S602"),
        ("import os\n\nos.system('x')\n", "S605"),
        ("HOST = '0.0.0.0'\n", "S104"),
        ("import tarfile\n\ntarfile.open('x').extractall()\n", "S202"),
    ],
)
def test_what_is_refused(source: str, code: str) -> None:
    assert code in refused(source)


def test_nothing_else_is() -> None:
    assert refused('"""Nothing."""\n\nHOST = "127.0.0.1"\n') == []


def test_no_socket_is_bound_to_all_addresses_and_no_remote_code_is_trusted() -> None:
    wrong = re.compile(r"tcp://(\*|0\.0\.0\.0|\[::\])|trust_remote_code\s*=\s*True|weights_only\s*=\s*False")
    sources = {path: path.read_text() for path in (ROOT / "triptych").rglob("*.py")}
    assert len(sources) > 100
    assert [str(path) for path, source in sources.items() if wrong.search(source)] == []


def imported(source: str) -> set[str]:
    """The modules that a file imports, or imports something from; ``from a import b`` counts as ``a`` and ``a.b``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def test_tests_import_neither_test_modules_nor_benchmarks() -> None:
    """What several tests share is in tests/support."""
    paths = {path: imported(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    assert len(paths) > 100
    forbidden = re.compile(r"bench(\..*)?|tests\.(.*\.)?test_\w+")
    wrong = [(str(path.relative_to(ROOT)), name) for path, names in paths.items() for name in names]
    assert [(path, name) for path, name in wrong if forbidden.fullmatch(name)] == []


def test_the_package_does_not_import_transformers() -> None:
    """Nor names one of its modules for an import. ``tests/support/commands.py`` watches processes of services."""
    named = re.compile(r"transformers(\.\w+)*:[A-Z]|transformers\.models")
    for path in (ROOT / "triptych").rglob("*.py"):
        assert "transformers" not in {name.split(".")[0] for name in imported(path.read_text())}, path
        assert not named.search(path.read_text()), path


MAX_PRIVATE = 12
"""Private attributes that tests read: those of libraries, and of config classes of transformers."""


def private_attributes(source: str) -> list[tuple[int, str]]:
    """Line and text of each ``x._name`` where ``x`` is neither ``self``, ``cls`` nor ``super()``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not re.match(r"_(?!_)", node.attr):
            continue
        owner = node.value.func if isinstance(node.value, ast.Call) else node.value
        if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls", "super")):
            found.append((node.lineno, ast.unparse(node)))
    return found


def test_private_attributes_are_found() -> None:
    source = "self._a; cls._b; super()._c; x.__d__; x._e; f(y)._g; self.h._i"
    assert [text for _, text in private_attributes(source)] == ["x._e", "f(y)._g", "self.h._i"]


def test_tests_do_not_read_private_attributes_of_other_objects() -> None:
    """What a test must see, the object offers: ``debug_state()``, a property, or a collaborator that it is given."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, text in private_attributes(path.read_text())
    ]
    assert len(found) <= MAX_PRIVATE, "\n".join(found)


# ── time and threads are passed in ───────────────────────────────────────────────────────────────────────────────────

BELOW_THE_API = ("router", "engine", "encode", "transfer", "messages", "server", "cluster")
MAY_START_THREADS = {
    "transfer/fabrics/mooncake.py": "waits for a peer, within a library",
    "server/health.py": "answers while the instance's loop is stuck",
    "server/name_lookup.py": "waits for a name server",
    "server/ranks.py": "waits for the end of a process",
    "cluster/on_ray/actor.py": "runs an event loop beside Ray's threads",
    "cluster/on_ray/driver.py": "ends the process if all else hangs",
}
MAY_READ_CLOCKS = {
    "engine/step_graphs.py": "says how long a GPU took at the start",
    "server/rank_main.py": "waits for the kernel, at the end of a process",
}
MAKES_CLOCKS = {
    "server/frontend.py",
    "server/instance_process.py",
    "cluster/control_client.py",
    "cluster/service.py",
    "cluster/on_ray/actor.py",
    "cluster/on_ray/launcher.py",
}
"""What builds a process, or a client."""
MAY_READ_THE_WALL_CLOCK = {
    "server/instance.py": "numbers its incarnation",
    "cluster/supervisor.py": "numbers incarnations",
    "router/pipeline_view.py": "says when the service began",
}
"""It may be set at any time, so what it says is for people, and no duration."""
_TIME = re.compile(
    r"time\.(time|monotonic|perf_counter)(_ns)?|time\.sleep|(datetime\.)+(now|utcnow|today)"
    r"|triptych\.running_time\.(running_time|RunningClock)"
)
_THREADS = re.compile(r"threading\.(Thread|Timer)|(.*\.)?(ThreadPoolExecutor|run_in_executor)")


def names(source: str) -> list[tuple[int, str]]:
    """Line and name of all that a file calls, imports with ``from``, or takes from a module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            found.append((node.lineno, ast.unparse(node.func)))
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{name.name}") for name in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.append((node.lineno, f"{node.value.id}.{node.attr}"))
    return found


def kinds_of_reads(source: str) -> set[tuple[int, str, str]]:
    """Line, kind and name of all that reads a clock, starts threads, or makes a clock."""
    kinds = {"time": _TIME, "threads": _THREADS, "makes": re.compile("SystemClock"), "wall": re.compile(r".*\.wall")}
    return {(line, kind, name) for line, name in names(source) for kind in kinds if kinds[kind].fullmatch(name)}


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("from time import sleep", "time"),
        ("x = field(default_factory=time.monotonic)", "time"),
        ("time.time_ns()", "time"),
        ("from triptych.running_time import MAX_WAIT, running_time", "time"),
        ("datetime.now()", "time"),
        ("threading.Thread(target=f).start()", "threads"),
        ("from concurrent.futures import Future, ThreadPoolExecutor", "threads"),
        ("await loop.run_in_executor(None, f)", "threads"),
        ("clock = SystemClock()", "makes"),
        ("began = self._clock.wall()", "wall"),
    ],
)
def test_reads_of_clocks_are_found(source: str, kind: str) -> None:
    assert {found for _, found, _ in kinds_of_reads(source)} == {kind}


def test_other_names_are_none() -> None:
    source = "self._clock.sleep(1)\ntime.thread_time()\nfrom triptych.running_time import MAX_WAIT\nasyncio.sleep(1)"
    assert kinds_of_reads(source) == set()


def test_below_the_api_clocks_and_threads_are_passed_in() -> None:
    """Time comes from a ``Clock``, and threads from a ``StartExecutor``. Event loops have timers of their own."""
    may = {
        "time": MAY_READ_CLOCKS.keys(),
        "threads": MAY_START_THREADS.keys(),
        "makes": MAKES_CLOCKS,
        "wall": MAY_READ_THE_WALL_CLOCK.keys(),
    }
    used: dict[str, set[str]] = {kind: set() for kind in may}
    paths = [path for folder in BELOW_THE_API for path in (ROOT / "triptych" / folder).rglob("*.py")]
    for path in sorted([*paths, ROOT / "triptych" / "compute_thread.py"]):
        place = path.relative_to(ROOT / "triptych").as_posix()
        for line, kind, name in sorted(kinds_of_reads(path.read_text())):
            assert place in may[kind], f"{place}:{line}: {name}; take a Clock, or a StartExecutor"
            used[kind].add(place)
    assert used == {kind: set(places) for kind, places in may.items()}, "an exception that is left over"
