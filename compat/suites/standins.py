"""Stand-ins for a peer's packages in its own tests, which import them for types, helpers and classes.

A test of the API needs little of that: what it needs has its real value here. Everything else is a ``StandIn``, which
takes any use and means nothing.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from compat.suites.peers import Peer


class StandIn:
    """Something of a peer's that no test of the API depends on."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        decorated = len(arguments) == 1 and callable(arguments[0]) and not isinstance(arguments[0], StandIn)
        return arguments[0] if decorated else StandIn()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: Any) -> Any:
        return StandIn()

    def __or__(self, other: Any) -> Any:
        return StandIn()

    __ror__ = __or__

    def __lt__(self, other: Any) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


def _tokenizer(*_: Any, **__: Any) -> Any:
    """The tokenizer of the served model, whatever the test asks for."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["SUITES_MODEL"])


class _ModelConfig:
    """The served model's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(_tokenizer())


class _ReasoningParser:
    """Ends reasoning with a token that the served model has."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.detector = SimpleNamespace(think_end_token="<|im_end|>")


class _Hub:
    """Knows a name for every model, adapter and data set, and has none."""

    def snapshot_download(self, repo_id: str, **_: Any) -> str:
        return repo_id


REAL: dict[str, Any] = {
    "get_tokenizer": _tokenizer,
    "cached_tokenizer_from_config": _tokenizer,
    "hf_api": _Hub,
    "ModelConfig": _ModelConfig,
    "ReasoningParser": _ReasoningParser,
    "retry": lambda function, **_: function(),
}
"""Names whose values the tests of the API use."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return REAL[name] if name in REAL else StandIn()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = fullname.partition(".")[0]
        own = self._peer.own and f"{fullname}.".startswith(f"{self._peer.own}.")
        if own or package not in self._peer.packages:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        spec.submodule_search_locations = [f"{self._peer.folder}/{fullname.replace('.', '/')}"]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(peer: Peer) -> None:
    """Make every import of a peer's packages and of their modules give a stand-in, but of its own ones."""
    sys.meta_path.insert(0, _Finder(peer))
