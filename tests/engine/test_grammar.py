"""Grammars are compiled and matched in child processes, within a budget."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.forked_sandbox import forked_sandbox
from tests.support.processes import is_gone
from triptych.checkpoint.config_files import load_config
from triptych.demo import MODEL_DIR
from triptych.engine.grammar import budget, service
from triptych.engine.grammar import matching as matching_module
from triptych.engine.grammar.compilation import Compilation
from triptych.engine.grammar.matching import Matching
from triptych.engine.grammar.service import GrammarService
from triptych.errors import GrammarTooCostly, InternalError, InvalidRequest, TriptychError
from triptych.messages.work import GrammarKind, GrammarSpec
from triptych.sandbox.fork_client import ForkServer

FOLDER = Path(MODEL_DIR)
VOCABULARY = load_config(FOLDER)["text_config"]["vocab_size"]
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
END = frozenset({0})
SLOW = "(a*)*(a*)*(a*)*b"
"""Each "a" takes longer to match than the one before."""


class Service:
    """A grammar service, and how to wait for its results."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.grammars = GrammarService(FOLDER, VOCABULARY, self._done.set)

    def start(self, kind: str, text: str, tokens: list[int] | None = None, client: str = "") -> Matching:
        return self.grammars.start(GrammarSpec(GrammarKind(kind), text), END, tokens or [], client)

    def wait(self, matching: Matching, seconds: float = 20) -> TriptychError | None:
        """Until it is ready, or has failed, as a loop that ``on_done`` wakes does."""
        end = time.monotonic() + seconds
        while not matching.ready and matching.error is None:
            assert time.monotonic() < end
            self._done.wait(end - time.monotonic())
            self._done.clear()
        return matching.error

    def pids(self) -> list[int]:
        """Process ids of the processes that compile and match."""
        server = self.server_pid
        return [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]

    @property
    def server_pid(self) -> int:
        """Process id of the fork server."""
        pid = self.grammars.debug_state()["server_pid"]
        assert isinstance(pid, int)
        return pid

    @property
    def num_processes(self) -> int:
        """Number of processes forked so far."""
        return int(self.grammars.debug_state()["num_processes"])


@pytest.fixture
def made() -> Iterator[Service]:
    with forked_sandbox():
        made = Service()
        yield made
        made.grammars.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Service]:
    with forked_sandbox():
        made = Service()
        yield made
        made.grammars.close()


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


[A] = tokens_of("a")


def allowed(mask: bytes | None) -> set[int]:
    assert mask is not None
    words = memoryview(mask).cast("I")
    return {token for token in range(VOCABULARY) if words[token // 32] >> token % 32 & 1}


@pytest.fixture(scope="module")
def expected() -> Callable[..., list[set[int]]]:
    """The tokens that xgrammar allows before each token and after the last, computed in this process."""
    compilation = Compilation(FOLDER, VOCABULARY)

    def masks(kind: str, text: str, tokens: list[int]) -> list[set[int]]:
        matcher = compilation.matcher(compilation.compile(GrammarSpec(GrammarKind(kind), text)), sorted(END))
        found = [allowed(matcher.bitmask())]
        for token in tokens:
            assert matcher.accept(token)
            found.append(allowed(matcher.bitmask()))
        return found

    return masks


def masks_of(service: Service, matching: Matching, tokens: list[int]) -> list[set[int]]:
    assert service.wait(matching) is None
    found = [allowed(matching.mask())]
    for token in tokens:
        matching.accept(token)
        found.append(allowed(matching.mask(60)))
    return found


def nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


# ── compiling ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[a-z]+@[a-z]+"),
        ("json_object", ""),
        ("choice", '["yes", "no"]'),
        ("json_schema", json.dumps(nested(3))),
        ("json_schema", json.dumps({"enum": list(range(12_000))})),  # more than a message between processes has
        ("grammar", 'root ::= "a" | root root'),
    ],
)
def test_valid_grammars(shared: Service, kind: str, text: str) -> None:
    matching = shared.start(kind, text)
    assert shared.wait(matching) is None
    assert allowed(matching.mask())
    matching.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "("),
        ("regex", "(" * 30_000 + "a" + ")" * 30_000),
        ("json_schema", "["),
        ("json_schema", "[" * 60_000),
        ("json_schema", json.dumps({"type": "array", "minItems": 10**9})),
        ("grammar", "root ::="),
        ("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ],
)
def test_invalid_grammars_are_rejected(shared: Service, kind: str, text: str) -> None:
    error = shared.wait(shared.start(kind, text))
    assert isinstance(error, InvalidRequest)
    assert str(error).startswith(f"the {kind} can't be used: ")
    assert ".cc" not in str(error)
    assert shared.wait(shared.start("regex", "a+")) is None


def test_a_grammar_beyond_the_limits_fails_alone(monkeypatch: pytest.MonkeyPatch, made: Service) -> None:
    monkeypatch.setattr(service, "COMPILE_SECONDS", 0.2)
    other = made.start("regex", "a+")
    for kind, text in (("json_schema", json.dumps(nested(11))), ("regex", "(a*)*" * 8_000)):
        error = made.wait(made.start(kind, text))
        assert isinstance(error, GrammarTooCostly)
        assert "compiling it takes longer than 0.2 s" in str(error) or "more memory" in str(error)
    assert masks_of(made, other, [A])


def test_rejected_grammars_are_cached(made: Service) -> None:
    assert isinstance(made.wait(made.start("regex", "(")), InvalidRequest)
    before = made.num_processes
    again = made.start("regex", "(", client="another")
    assert isinstance(made.wait(again), InvalidRequest)
    assert str(again.error).endswith("The parenthesis is not closed.")
    assert made.num_processes == before


def test_a_grammar_is_compiled_once_and_kept_when_idle(monkeypatch: pytest.MonkeyPatch, made: Service) -> None:
    monkeypatch.setattr(service, "MAX_IDLE", 1)
    first, second = made.start("regex", "a+"), made.start("regex", "a+", client="another")
    assert made.wait(first) is made.wait(second) is None
    first.close()
    second.close()
    third = made.start("regex", "a+")
    assert made.wait(third) is None
    assert made.num_processes == 1
    third.close()
    fourth = made.start("regex", "b+")
    assert made.wait(fourth) is None
    fourth.close()
    assert made.wait(made.start("regex", "a+")) is None
    assert made.num_processes == 3


def test_a_client_with_many_grammars_delays_no_other(made: Service) -> None:
    """The second client's is ready while the first one's are being compiled or queued."""
    assert made.wait(made.start("regex", "a+")) is None
    costly = [made.start("json_schema", json.dumps(nested(9) | {"title": str(n)}), client="x") for n in range(6)]
    assert made.wait(made.start("choice", '["yes", "no"]', client="y")) is None
    assert not any(one.ready or one.error for one in costly)
    assert 2 <= len(made.pids()) <= 2 + budget.MAX_COMPILING_EACH
    for one in costly:
        one.close()
    assert made.wait(made.start("regex", "b+", client="x")) is None


def test_equal_grammars_of_several_clients_are_compiled_at_the_earliest_turn(made: Service) -> None:
    costly = [made.start("json_schema", json.dumps(nested(9) | {"title": str(n)}), client="x") for n in range(6)]
    last = made.start("regex", "b+", client="x")
    assert made.wait(made.start("regex", "b+", client="y")) is None
    assert made.wait(last) is None
    assert not any(one.ready or one.error for one in costly)


# ── matching ─────────────────────────────────────────────────────────────────────────────────────────────────

TEXT = "a red circle and a blue square"


def test_masks_equal_those_of_xgrammar(shared: Service, expected: Callable[..., list[set[int]]]) -> None:
    tokens = tokens_of(TEXT)
    want = expected("regex", r"([a-z]+ ?)+", tokens)
    assert masks_of(shared, shared.start("regex", r"([a-z]+ ?)+"), tokens) == want
    resumed = shared.start("regex", r"([a-z]+ ?)+", tokens[:4])
    assert masks_of(shared, resumed, tokens[4:]) == want[4:]


def test_after_the_end_comes_an_end_token(shared: Service) -> None:
    matching = shared.start("choice", '["a"]')
    assert masks_of(shared, matching, [A]) == [{A}, set(END)]


def test_a_token_that_is_not_allowed_is_an_internal_error(shared: Service) -> None:
    matching = shared.start("choice", '["a"]')
    assert shared.wait(matching) is None
    matching.accept(A + 1)
    error = shared.wait(matching)
    assert isinstance(error, InternalError)
    assert "rejected a token that it had allowed" in str(error)


def drive(service: Service, matching: Matching, token: int, most: int = 5000) -> TriptychError | None:
    """Accept the same token until the matching fails."""
    for _ in range(most):
        if service.wait(matching) is not None:
            break
        matching.accept(token)
    return matching.error


@pytest.mark.parametrize(
    ("constant", "seconds", "message"),
    [
        ("TOKEN_SECONDS", 0.01, r"matching one token took 0.\d\d s, more than 0.01 s"),
        ("TOTAL_SECONDS", 0.2, "matching the answer took longer than 0.2 s"),
        ("KILL_SECONDS", 0.02, "matching one token takes longer than 0.02 s"),
    ],
)
def test_a_costly_answer_fails_alone(  # noqa: PLR0917
    monkeypatch: pytest.MonkeyPatch,
    made: Service,
    expected: Callable[..., list[set[int]]],
    constant: str,
    seconds: float,
    message: str,
) -> None:
    monkeypatch.setattr(matching_module, constant, seconds)
    monkeypatch.setattr(service, "KILL_SECONDS", vars(matching_module)["KILL_SECONDS"])
    same, other = made.start("regex", SLOW), made.start("regex", "a+")
    want = expected("regex", SLOW, [A] * 4)
    assert masks_of(made, same, [A] * 2) == want[:3]
    error = drive(made, made.start("regex", SLOW), A)
    assert isinstance(error, GrammarTooCostly)
    assert re.fullmatch(f"the grammar is too costly: {message}", str(error))
    assert masks_of(made, other, [A, A])
    same.accept(A)
    same.accept(A)
    assert made.wait(same) is None
    assert allowed(same.mask()) == want[4]


@pytest.mark.parametrize("whom", ["process", "server"])
def test_killed_processes_are_replaced_without_loss(
    made: Service, expected: Callable[..., list[set[int]]], whom: str
) -> None:
    tokens = tokens_of(TEXT)
    matchings = [made.start("regex", r"([a-z]+ ?)+") for _ in range(3)]
    want = expected("regex", r"([a-z]+ ?)+", tokens)
    for number, matching in enumerate(matchings):
        assert masks_of(made, matching, tokens[: 3 * number]) == want[: 3 * number + 1]
    victim = made.server_pid if whom == "server" else made.pids()[0]
    os.kill(victim, signal.SIGKILL)
    assert is_gone(victim)
    for number, matching in enumerate(matchings):
        for place, token in enumerate(tokens[3 * number :], start=3 * number):
            matching.accept(token)
            assert made.wait(matching) is None
            assert allowed(matching.mask()) == want[place + 1]


@pytest.mark.parametrize("whom", ["process", "server"])
def test_a_mask_outlives_the_process_that_made_it(made: Service, whom: str) -> None:
    """A step that is running was scheduled because the mask is there."""
    matching = made.start("regex", "a+")
    assert made.wait(matching) is None
    want, before = allowed(matching.mask()), made.num_processes
    victim = made.server_pid if whom == "server" else made.pids()[0]
    os.kill(victim, signal.SIGKILL)
    assert is_gone(victim)
    while made.num_processes == before:
        assert allowed(matching.mask()) == want
        time.sleep(0.001)
    assert allowed(matching.mask()) == want


def test_a_request_whose_process_keeps_ending_fails(made: Service) -> None:
    matching = made.start("regex", "a+")
    for _ in range(budget.MAX_REBUILDS + 2):
        if made.wait(matching) is not None:
            break
        [pid] = made.pids()
        os.kill(pid, signal.SIGKILL)
        assert is_gone(pid)
        matching.accept(A)
    assert isinstance(made.wait(matching), InternalError)


def test_a_process_that_gets_no_processor_time_is_killed(monkeypatch: pytest.MonkeyPatch, made: Service) -> None:
    monkeypatch.setattr(matching_module, "TOKEN_TIMEOUT", 0.3)
    monkeypatch.setattr(service, "CHECK_INTERVAL", 0.1)
    slow, other = made.start("regex", "a+"), made.start("regex", "b+")
    assert made.wait(slow) is made.wait(other) is None
    number = made.grammars.debug_state()["process_numbers"][slow.spec]
    os.kill(made.pids()[number - 1], signal.SIGSTOP)
    slow.accept(A)
    assert slow.mask(0.05) is None
    assert isinstance(made.wait(slow), GrammarTooCostly)
    assert masks_of(made, other, tokens_of("b"))


def test_an_unresponsive_fork_server_is_replaced(monkeypatch: pytest.MonkeyPatch, made: Service) -> None:
    monkeypatch.setattr(service, "SERVER_TIMEOUT", 0.2)
    monkeypatch.setattr(service, "CHECK_INTERVAL", 0.1)
    old = made.start("regex", "a+")
    assert made.wait(old) is None
    pid = made.server_pid
    with monkeypatch.context() as patched:
        patched.setattr(service, "COMPILE_TIMEOUT", 0.2)
        os.kill(pid, signal.SIGSTOP)
        new = made.start("regex", "b+")
        assert is_gone(pid)
    assert isinstance(made.wait(new, 60), type(None) | GrammarTooCostly)
    assert made.wait(old, 60) is None
    assert allowed(old.mask())


@pytest.mark.parametrize("busy", [False, True])
def test_closing_leaves_no_process(busy: bool) -> None:
    made = Service()
    matching = made.start("regex", "a+")
    assert made.wait(matching) is None
    costly = [made.start("json_schema", json.dumps(nested(10)))] if busy else []
    end = time.monotonic() + 20
    while len(made.pids()) < 1 + busy:
        assert time.monotonic() < end
        time.sleep(0.001)
    pids = [*made.pids(), made.server_pid]
    began = time.monotonic()
    made.grammars.close()
    assert time.monotonic() - began < 10
    assert all(is_gone(pid) for pid in pids)
    for one in [matching, *costly]:
        one.close()


def test_processes_end_with_their_parent() -> None:
    program = f"""
import os, sys
from pathlib import Path
from triptych.engine.grammar.service import GrammarService
from triptych.messages.work import GrammarKind, GrammarSpec
if __name__ == "__main__":
    grammars = GrammarService(Path({str(FOLDER)!r}), {VOCABULARY}, lambda: None)
    matching = grammars.start(GrammarSpec(GrammarKind.REGEX, "a+"), frozenset({{0}}))
    assert matching.mask(60)
    assert not {{"xgrammar", "transformers"}} & set(sys.modules), "matching is others' work"
    server = grammars.debug_state()["server_pid"]
    print(server, Path(f"/proc/{{server}}/task/{{server}}/children").read_text(), flush=True)
    os.kill(os.getpid(), 9)
"""
    run = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert run.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)


def test_nothing_is_started_before_the_first_grammar() -> None:
    made = Service()
    assert not made.grammars.debug_state()["started"]
    made.grammars.close()


# ── what a machine can't do now ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", ["fork", "server"])
def test_a_process_that_cannot_be_started_fails_its_own_requests(
    monkeypatch: pytest.MonkeyPatch, made: Service, what: str
) -> None:
    live = made.start("regex", "a+")
    if what == "fork":
        assert made.wait(live) is None
    with monkeypatch.context() as broken:

        def fail(*_: Any) -> None:
            raise OSError("too many open files")

        broken.setattr(ForkServer, *(("fork", fail) if what == "fork" else ("__init__", fail)))
        failed = [made.start("regex", "b" * number, client="c") for number in range(1, 6)]
        assert all(isinstance(made.wait(one), InternalError) for one in failed)
        live.close()
    assert all(made.wait(made.start("regex", "b" * number, client="c")) is None for number in range(1, 6))


def test_a_thread_that_cannot_be_started_fails_its_own_request(monkeypatch: pytest.MonkeyPatch, made: Service) -> None:
    with monkeypatch.context() as broken:

        def fail(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        broken.setattr(threading.Thread, "start", fail)
        with pytest.raises(InternalError, match="can't start new thread"):
            made.start("regex", "a+")
    assert made.wait(made.start("regex", "a+")) is None


def test_a_compile_timeout_is_not_cached(monkeypatch: pytest.MonkeyPatch, made: Service) -> None:
    assert made.wait(made.start("regex", "a")) is None  # the server is there
    with monkeypatch.context() as patched:
        patched.setattr(service, "COMPILE_TIMEOUT", 0.0)
        patched.setattr(service, "CHECK_INTERVAL", 0.01)
        assert isinstance(made.wait(made.start("regex", "([a-z]{1,50}){1,200}")), GrammarTooCostly)
    assert made.wait(made.start("regex", "([a-z]{1,50}){1,200}")) is None


def test_a_mask_that_is_late_is_not_expected_soon(made: Service) -> None:
    matching = made.start("regex", "a+")
    assert made.wait(matching) is None
    matching.accept(A)
    assert matching.mask(20) is not None
    assert made.wait(matching) is None
    assert matching.mask_expected_soon
    [pid] = made.pids()
    os.kill(pid, signal.SIGSTOP)
    matching.accept(A)
    assert matching.mask(0.01) is None
    assert not matching.mask_expected_soon
    os.kill(pid, signal.SIGCONT)
    assert made.wait(matching) is None
