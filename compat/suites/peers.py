"""The peers whose tests run here: which tests, what starts their services, and which of their modules are their own."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from compat.model import Answer
from compat.suites import script

Serve = Callable[..., str]
"""Serves a model by its name, with flags; returns the URL. ``most`` is how many services may run at a time."""


@dataclass(frozen=True)
class Peer:
    name: str
    paths: tuple[str, ...]
    """Of the tests, in the source."""
    starts: str
    """The call by which a test, its fixtures or its class start a service."""
    flags: dict[str, str]
    """Of those of the peer's service, which count here, too, and their names here. The others are about its engine or
    a model, or are extensions."""
    script: tuple[Answer, ...]
    """Of the model."""
    always: dict[str, str] = field(default_factory=dict, kw_only=True)
    """Flags of every service here."""
    hook: Callable[["Peer", Serve], None]
    """Makes the call start a service of Triptych."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of pytest, by a part of the paths that have them."""
    packages: tuple[str, ...] = ()
    """What a stand-in is imported for."""
    own: str = ""
    """A package of these that is imported as it is."""
    folder: str = "."
    """Where the packages are, in the source."""

    def taken(self, model: str, flags: Sequence[object]) -> dict[str, str]:
        """Flags of a service of Triptych for those of the peer's."""
        words = [str(flag) for flag in flags]
        return (
            {"--served-model-name": model}
            | self.always
            | {self.flags[flag]: value for flag, value in pairwise(words) if flag in self.flags}
        )


def _vllm(peer: Peer, serve: Serve) -> None:
    def start(self: Any, model: str, flags: list[str], *, env_dict: dict[str, str] | None = None, **_: Any) -> None:
        taken = peer.taken(model, flags)
        if "VLLM_ENABLE_RESPONSES_API_STORE" in (env_dict or {}):
            taken["--response-store"] = str(Path(os.environ["SUITES_FOLDER"]) / "responses.db")
        address = urlsplit(serve(taken, most=4))
        self.host, self.port, self.uds = address.hostname, address.port, None

    server: Any = import_module("tests.utils").RemoteVLLMServer
    server.__init__, server._shutdown = start, lambda self: None


def _sglang(peer: Peer, serve: Serve) -> None:
    def launch(model: str, base_url: str, *_: Any, other_args: Sequence[object] = (), **__: Any) -> Any:
        # all tests ask at one port
        serve(peer.taken(model, other_args or ()) | {"--port": str(urlsplit(base_url).port)}, most=1)
        return SimpleNamespace(pid=0)

    utils: Any = import_module("sglang.test.test_utils")
    utils.popen_launch_server = launch


VLLM = Peer(
    "vLLM",
    paths=("tests/entrypoints/openai", "tests/tool_use"),
    starts="RemoteOpenAIServer(",
    flags={name: name for name in ("--served-model-name", "--limit-mm-per-prompt")},
    script=script.VLLM,
    hook=_vllm,
    # the same tests for the forms of twelve models' calls: the scripted model has one form
    options={"tool_use": ("--models", "hermes")},
    packages=("vllm", "gpt_oss"),
)
SGLANG = Peer(
    "SGLang",
    paths=("test/registered/openai_server", "test/registered/reasoning", "test/manual/openai_server"),
    starts="popen_launch_server(",
    flags={"--context-length": "--max-model-len", "--context-len": "--max-model-len"},
    always={"--page-size": "1"},  # the peer's default
    script=script.SGLANG,
    hook=_sglang,
    # the same tests for the forms of four models' calls
    options={
        "": ("--import-mode=importlib",),
        "openai_server": ("-k", "not TestToolChoiceLlama32 and not TestToolChoiceMistral and not TestToolChoiceLfm2"),
    },
    packages=("sglang",),
    own="sglang.test",
    folder="python",
)
PEERS = {peer.name: peer for peer in (VLLM, SGLANG)}
