"""Tables of a plan: all that a service fills is there, and cores are divided evenly."""

import os
from dataclasses import replace

import pytest

from triptych.config import EngineConfig, ServeConfig
from triptych.demo import MODEL_DIR
from triptych.measure.split.plan import FULL, QUICK, TEXT_TOPOLOGIES, SplitPlan, division, threads_of
from triptych.measure.split.tables import EMBEDDINGS, KV, rows_of, tables_of
from triptych.measure.split.transfers import RowsPerToken, TransferSizes
from triptych.measure.transfer.measure import FABRICS

SIZES = TransferSizes({KV: RowsPerToken(10, 192), EMBEDDINGS: RowsPerToken(1, 2304)}, 64)
TEXT_PLAN = replace(QUICK, takes_media=False, topologies=TEXT_TOPOLOGIES, tables=("throughput", "first-use", "resumes"))


@pytest.mark.parametrize("plan", [FULL, QUICK, TEXT_PLAN])
def test_each_row_is_filled_by_one_service_or_one_fabric(plan: SplitPlan) -> None:
    sizes = SIZES if plan.takes_media else TransferSizes({KV: RowsPerToken(10, 192)}, 64)
    for table in tables_of(plan, {}, sizes):
        filled = [row for setup in plan.setups for row in rows_of(table, setup)]
        filled += [row for fabric in FABRICS for row in table.rows if fabric in row]
        assert sorted(filled) == sorted(table.rows)
        assert len(set(table.rows)) == len(table.rows) > 0
        assert {len(row) for row in table.rows} == {len(table.labels)}


def test_the_full_plan_has_what_the_designs_ask_for() -> None:
    tables = {table.name: table for table in tables_of(FULL, {}, SIZES)}
    assert set(tables) == {
        "alone", "closed", "arrivals", "processes", "images", "cache", "first-use", "transfers", "resumes",
    }  # fmt: skip
    assert {(kind, tokens) for kind, tokens, _ in tables["transfers"].rows} == {
        (kind, tokens)
        for kind in (KV, EMBEDDINGS)
        for tokens in ("1,024", "2,048", "4,096", "8,192", "16,384", "32,768")
    }
    assert {tokens for tokens, _ in tables["resumes"].rows} == {"10,240", "20,480", "32,768"}
    assert {(count, topology) for _, count, topology in tables["images"].rows} == {
        (count, topology) for count in "1248" for topology in FULL.topologies
    }
    names = {row[2:] for row in tables["processes"].rows if row[1] == "1E1P1D"}
    assert names == {
        ("client", "load generator"), ("frontend", "frontend"), ("others", "fork server"),
        ("e0", "encode"), ("p0", "prefill"), ("d0", "decode"),
    }  # fmt: skip


@pytest.mark.parametrize(("plan", "minutes"), [(FULL, 20), (QUICK, 4)])
def test_plans_fit_their_budgets(plan: SplitPlan, minutes: float) -> None:
    assert 1 < plan.minutes <= minutes


@pytest.mark.parametrize(
    ("topology", "cores", "threads"),
    [
        ("1EPD", 4, [4]),
        ("1E1PD", 4, [2, 2]),
        ("2EPD", 4, [2, 2]),
        ("1E1P1D", 4, [1, 1, 1]),
        ("1E1P1D", 2, [1, 1, 1]),
    ],
)
def test_instances_divide_the_cores(
    topology: str, cores: int, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert threads_of(ServeConfig(model=MODEL_DIR), topology) == threads
    assert threads_of(ServeConfig(model=MODEL_DIR, engine=EngineConfig(threads=7)), topology) == [7] * len(threads)


def test_an_uneven_division_is_named() -> None:
    assert division([1, 1], 2) == "1 + 1"
    assert division([1, 1, 1], 2) == "1 + 1 + 1, more than the 2 cores"
    assert division([1, 1, 1], 4) == "1 + 1 + 1, fewer than the 4 cores"


def test_a_token_has_the_models_own_bytes() -> None:
    # 5 layers of 3 heads of 32 in float16; hidden size 192, with two deepstack layers, in float32
    sizes = TransferSizes.of(ServeConfig(model=MODEL_DIR), KV, EMBEDDINGS)
    assert sizes.kinds[KV].num_bytes == 2 * 5 * 3 * 32 * 2
    assert sizes.kinds[EMBEDDINGS].num_bytes == 3 * 192 * 4
    assert sizes.kinds[KV].payload(1024).num_bytes == 1024 * sizes.kinds[KV].num_bytes
    assert str(sizes) == "A token's rows: KV 1.875 KiB, embeddings 2.25 KiB"
