"""Transfers of a model's keys, values and embeddings between two processes, over each fabric."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from triptych.config import ServeConfig
from triptych.errors import StartError
from triptych.measure.split.figures import Results, Row
from triptych.measure.split.plan import SplitPlan
from triptych.measure.transfer.ends import ConsumeMode, Pair, Payload, PoolSpec
from triptych.measure.transfer.measure import COPIES, FABRICS, MEMORY_HEADROOM
from triptych.observe.machine import available_bytes

MIB = 2**20
STEP_TOKENS = 512
"""Tokens whose rows the receiver copies out at a time."""
WARM_UP, REPEATS = 2, 5
"""Transfers of each size in each round: not counted, and counted."""

Show = Callable[[str], None]


@dataclass(frozen=True)
class RowsPerToken:
    """What is sent for each token."""

    rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    def payload(self, tokens: int) -> Payload:
        """Return what is sent for these tokens: rows of two-byte elements."""
        return Payload(tokens * self.rows, self.row_bytes // 2)


Piece = tuple[Row, RowsPerToken, int]
"""What is measured once in a round: row of the table, what a token has, tokens."""


@dataclass(frozen=True)
class TransferSizes:
    """The sizes of what a model sends between its stages."""

    kinds: dict[str, RowsPerToken]
    """By name: what prefill sends to decode and, if the model takes media, what encode sends to prefill."""
    block_rows: int
    """Rows of a block of a receive pool."""

    @classmethod
    def of(cls, config: ServeConfig, kv: str, embeddings: str) -> "TransferSizes":
        """Read the sizes from a checkpoint. The names are those of the two kinds. Raises CheckpointError and
        StartError."""
        from triptych.checkpoint.reader import Checkpoint
        from triptych.server.model_bundle import ModelBundle

        bundle = ModelBundle(Checkpoint(config.model), config.engine)
        kinds = {kv: RowsPerToken(bundle.kv_rows.in_all_layers, bundle.kv_layout.row_bytes)}
        if bundle.family.takes_media:
            kinds[embeddings] = RowsPerToken(1, bundle.row_layout.row_bytes)
        return cls(kinds, config.engine.receive_block_rows)

    def pool(self, rows: int) -> PoolSpec:
        """Return a pool for at least these rows."""
        return PoolSpec(-(-rows // self.block_rows), self.block_rows)

    def __str__(self) -> str:
        sizes = ", ".join(f"{kind} {rows.num_bytes / 1024:,.4g} KiB" for kind, rows in self.kinds.items())
        return f"A token's rows: {sizes}"


def measure_transfers(plan: SplitPlan, sizes: TransferSizes, results: Results, show: Show) -> None:
    """Fill the table of transfers, and that of resumes, where they are measured. A fabric that can't be used is a
    reason in each of its rows."""
    for fabric in FABRICS:
        show(f"transfers over {fabric}")
        try:
            with Pair(fabric) as pair:
                for _ in range(plan.rounds):
                    for row, rows, tokens in _transfers(fabric, plan, sizes, results):
                        if _fits(results, "transfers", row, rows.payload(tokens)):
                            results.add("transfers", row, **_transfer(pair, sizes, rows.payload(tokens)))
                    for row, rows, tokens in _resumes(fabric, plan, sizes, results):
                        if _fits(results, "resumes", row, rows.payload(tokens)):
                            results.add("resumes", row, **_resume(pair, sizes, rows, tokens, plan.pool_tokens))
        except StartError as error:
            for table in results.tables:
                results.fail(str(error), table.name, [row for row in table.rows if fabric in row])


def _transfers(fabric: str, plan: SplitPlan, sizes: TransferSizes, results: Results) -> Iterator[Piece]:
    if results.table("transfers") is not None:
        for kind, rows in sizes.kinds.items():
            yield from (((kind, f"{tokens:,}", fabric), rows, tokens) for tokens in plan.tokens)


def _resumes(fabric: str, plan: SplitPlan, sizes: TransferSizes, results: Results) -> Iterator[Piece]:
    if results.table("resumes") is not None:
        kv = next(iter(sizes.kinds.values()))
        yield from (((f"{tokens:,}", fabric), kv, tokens) for tokens in plan.resumed)


def _fits(results: Results, table: str, row: Row, payload: Payload) -> bool:
    """Return whether there is memory for a payload's copies. If not, that is the row's reason."""
    needed, available = int(payload.num_bytes * COPIES * MEMORY_HEADROOM), available_bytes()
    if needed > available:
        gib = 2**30
        results.fail(f"needs {needed / gib:.1f} GiB of memory, and {available / gib:.1f} are available", table, [row])
    return needed <= available


def _transfer(pair: Pair, sizes: TransferSizes, payload: Payload) -> dict[str, float]:
    pair.configure(payload, sizes.pool(payload.rows))
    first = pair.transfer().landed
    for _ in range(WARM_UP):
        pair.memcpy()
        pair.transfer()
    landed, copied = [], []
    for _ in range(REPEATS):
        copied.append(pair.memcpy())
        landed.append(pair.transfer().landed)
    seconds = statistics.median(landed)
    return {
        "mib": payload.num_bytes / MIB,
        "ms": 1e3 * seconds,
        "gb_per_s": payload.num_bytes / seconds / 1e9,
        "of_memcpy": statistics.median(copied) / seconds,
        "first": 1e3 * first,
    }


def _resume(pair: Pair, sizes: TransferSizes, rows: RowsPerToken, tokens: int, pool_tokens: int) -> dict[str, float]:
    payload, consuming = rows.payload(tokens), ConsumeMode(STEP_TOKENS * rows.rows)
    pools = {"limited": sizes.pool(pool_tokens * rows.rows), "whole": sizes.pool(payload.rows)}
    seconds, resumes = {}, 0.0
    for name, blocks in pools.items():
        pair.configure(payload, blocks)
        for _ in range(WARM_UP):
            pair.transfer(consuming)
        timed = [pair.transfer(consuming) for _ in range(REPEATS)]
        seconds[name] = statistics.median(one.consumed for one in timed)
        if name == "limited":
            resumes = statistics.median(one.resumes for one in timed)
    return {
        "resumes": resumes,
        "ms": 1e3 * seconds["limited"],
        "whole_ms": 1e3 * seconds["whole"],
        "ratio": seconds["limited"] / seconds["whole"],
    }
