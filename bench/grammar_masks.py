"""What grammars cost: masks of a large vocabulary by themselves, and the time per token of services of two checkouts.

    git worktree add /tmp/before HEAD~1
    python -m bench.grammar_masks triptych/demo/model /tmp/before --out bench/results/grammar-masks.json

A mask's figure is the processor time of one thread to match a token and compute the next mask, as the mean over ROWS
answers at the same place of a text. The vocabulary is synthetic, byte-level, with VOCABULARY tokens. xgrammar, if it is
installed, does the same in turns, for one answer: its answers share nothing.
Both services need nothing but ``triptych serve``. They are sent as many requests at a time as given by ``--batches``,
in turns, so that other work on the machine slows both.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
from importlib import import_module, util
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench import peer_engines
from bench.checkouts import HERE, commit, compared, in_turn, parsed, parser_of
from bench.measuring import report
from bench.serve import STREAMED
from bench.served_checkouts import services
from triptych.engine.grammar.compiler import Compiler
from triptych.measure.machine import machine
from triptych.prompt import lark

VOCABULARY = 150_000
ROWS = 32
STEPS = 12
"""Tokens of a text that are matched."""
TOKENS = 128
"""Tokens of an answer of the services."""
WARM = 1
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string", "maxLength": 20}}
_FOUR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
_PERSON = '{"name": "the old man", "age": 12, "tags": ["sea", "long story"], "kind": "green"}'
WORDS = "([a-z]+ ?)+"
GRAMMARS: dict[str, tuple[str | dict[str, Any], str]] = {
    "JSON": ({"type": "object"}, _PERSON),
    "schema of four properties": (_FOUR, _PERSON),
    "strings of at most 20 characters": (_STRINGS, '["a long story", "the old man", "and the sea"]'),
    WORDS: (WORDS, "the old man told a long story and the sea was calm"),
}
"""Schemas or regular expressions, and texts that match."""
FORMATS: dict[str, dict[str, Any]] = {"none": {}, WORDS: {"structured_outputs": {"regex": WORDS}}}


class Rows(Protocol):
    """Answers of one grammar."""

    rows: list[Any]

    def step(self, token: int) -> None:
        """Match a token and compute the next mask, in each row."""


class Ours:
    """Rows of this checkout's grammars."""

    def __init__(self, compiler: Compiler, grammar: str | dict[str, Any]) -> None:
        text = lark.regex(grammar) if isinstance(grammar, str) else lark.json_schema(grammar)
        first = compiler.compile(f"start: {text}")
        self._compiler, self.rows = compiler, [first.deep_copy() for _ in range(ROWS)]

    def step(self, token: int) -> None:
        for row in self.rows:
            assert row.consume_token(token)
            self._compiler.bitmask(row, [0])


class Xgrammar:
    """A row of xgrammar."""

    def __init__(self, compiler: Any, grammar: str | dict[str, Any]) -> None:
        xgrammar = import_module("xgrammar")
        compiled = (
            compiler.compile_regex(grammar)
            if isinstance(grammar, str)
            else compiler.compile_json_schema(json.dumps(grammar))
        )
        self.rows = [xgrammar.GrammarMatcher(compiled)]
        self._mask = xgrammar.allocate_token_bitmask(1, VOCABULARY)

    def step(self, token: int) -> None:
        for row in self.rows:
            assert row.accept_token(token)
            row.fill_next_token_bitmask(self._mask)


def make_tokenizer(folder: Path) -> list[bytes]:
    """Write a synthetic tokenizer, and return what its tokens spell."""
    rng, names = random.Random(1), dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(names) < VOCABULARY:
        names["Ġ" * rng.randrange(2) + "".join(rng.choices(LETTERS, k=rng.randint(2, 9)))] = None
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return [name.replace("Ġ", " ").encode() for name in names]


def tokenize(spelled: dict[bytes, int], text: str) -> list[int]:
    """Take the longest token at each place."""
    data, tokens = text.encode(), []
    while data:
        length = next(length for length in range(len(data), 0, -1) if data[:length] in spelled)
        tokens.append(spelled[data[:length]])
        data = data[length:]
    return tokens


def masks(rounds: int) -> dict[str, dict[str, float]]:
    """Return by grammar and library the milliseconds to compile it, and for a token and its mask."""
    with tempfile.TemporaryDirectory() as folder:
        texts = make_tokenizer(Path(folder))
        began = time.process_time()
        compiler = Compiler(Path(folder), VOCABULARY)
        found = {"loading the vocabulary": {"llguidance": _ms(time.process_time() - began)}}
    ways: dict[str, Any] = {"llguidance": lambda grammar: Ours(compiler, grammar)}
    if util.find_spec("xgrammar"):
        xgrammar = import_module("xgrammar")
        info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=VOCABULARY, stop_token_ids=[0])
        theirs = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        ways["xgrammar"] = lambda grammar: Xgrammar(theirs, grammar)
    spelled = {text: number for number, text in enumerate(texts)}
    for name, (grammar, text) in GRAMMARS.items():
        tokens = tokenize(spelled, text)[:STEPS]
        compiling: dict[str, list[float]] = {library: [] for library in ways}
        stepping: dict[str, list[float]] = {library: [] for library in ways}
        peaks: dict[str, list[float]] = {library: [] for library in ways}
        for _ in range(rounds):
            for library, make in ways.items():
                times = [time.process_time()]
                rows: Rows = make(grammar)
                times.append(time.process_time())
                for token in tokens:
                    rows.step(token)
                    times.append(time.process_time())
                first, *steps = [later - earlier for earlier, later in pairwise(times)]
                compiling[library].append(first)
                peaks[library].append(max(steps) / len(rows.rows))
                stepping[library].append(statistics.median(steps) / len(rows.rows))
        found[f"{name}: slowest token"] = {library: _ms(statistics.median(taken)) for library, taken in peaks.items()}
        found[f"{name}: compile"] = {library: _ms(statistics.median(taken)) for library, taken in compiling.items()}
        found[f"{name}: token"] = {library: _ms(statistics.median(taken)) for library, taken in stepping.items()}
    return found


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def body(format: dict[str, Any], number: int) -> dict[str, Any]:
    """One streaming request for TOKENS tokens."""
    return {
        "model": peer_engines.MODEL,
        "messages": [{"role": "user", "content": f"Tell story {number}"}],
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "temperature": 1,
        "seed": number,
        **STREAMED,
        **format,
    }


async def served(model: Path, checkouts: list[Path], batches: list[int], rounds: int) -> dict[str, Any]:
    """Return ``compared`` times per token, by format and requests at a time. Raises RuntimeError for one that fails."""
    taken: dict[str, list[list[float]]] = {}
    async with services(model, checkouts, f"--max-num-seqs {max(batches)}") as running:
        for turn in range(WARM + rounds):
            for name, format in FORMATS.items():
                for batch in batches:
                    both = taken.setdefault(f"grammar {name}, {batch} at a time", [[], []])
                    for service, seconds in in_turn(list(zip(running, both, strict=True)), turn):
                        requests = [body(format, turn * batch + number) for number in range(batch)]
                        samples = await service.answers(requests)
                        seconds.append(statistics.median(sample.tpot for sample in samples))
    return {name: compared(*(seconds[WARM:] for seconds in both)) for name, both in taken.items()}


async def main() -> None:
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    options = parsed(parser)
    checkouts = [options.other.absolute(), HERE]
    found: dict[str, Any] = {
        "machine": machine(),
        "checkouts": [commit(one) for one in checkouts],
        "rows": ROWS,
        "vocabulary": VOCABULARY,
        "masks_ms": masks(options.rounds),
        "per_token": await served(options.model.absolute(), checkouts, options.batches, options.rounds),
    }
    report(found, options.out)


if __name__ == "__main__":
    asyncio.run(main())
