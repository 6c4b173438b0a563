"""The comparison of predictions with real runs."""

from pathlib import Path
from typing import Any

import pytest

from bench.plan_truth import TOPOLOGIES, TruthRuns, compared, mixes, run_key, table, verdicts
from tests.support.profiles import example_profile


def test_mixes_follow_from_the_seed_and_the_model() -> None:
    assert mixes("demo") == mixes("demo")
    assert mixes("demo") != mixes("mid")
    requests = [list(mix.workload.requests(2.0, 30, 1)) for mix in mixes("demo")]
    assert [len(one) for one in requests] == [30] * len(requests)
    assert len(mixes("demo")) * len(TOPOLOGIES) >= 12


def row(mix: str, topology: str, measured: float, predicted: float) -> dict[str, Any]:
    return {
        "model": "m", "mix": mix, "topology": topology,
        "measured": {"goodput": measured}, "predicted": {"goodput": predicted},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "predicted", "right", "wrong"),
    [
        ((1.0, 2.0, 3.0, 1.0), (1.0, 2.0, 2.5, 1.0), True, False),
        ((1.0, 3.0, 2.9, 1.0), (1.0, 2.0, 2.1, 1.0), True, False),  # they come close
        ((1.0, 3.0, 2.0, 1.0), (1.0, 2.0, 2.5, 1.0), False, True),
        ((1.0, 2.0, 3.0, 1.0), (1.0, 2.0, 1.0, 1.0), False, True),
        ((2.0, 3.0, 1.0, 1.0), (3.0, 2.0, 1.0, 1.0), False, False),
    ],
)
def test_verdicts(measured: tuple[float, ...], predicted: tuple[float, ...], right: bool, wrong: bool) -> None:
    rows = [row("a", *one) for one in zip(TOPOLOGIES, measured, predicted, strict=True)]
    (found,) = verdicts(rows)
    assert (found["right"], found["wrong_verdict"]) == (right, wrong)
    assert [*verdicts(rows[:3])] == [], "a topology is missing"


def test_recorded_runs_are_predicted(tmp_path: Path) -> None:
    runs = TruthRuns.at(tmp_path / "truth.json")
    one: dict[str, Any] = {
        "prompt": 250,
        "answer": 8,
        "media": [[448, 448, 3000]],
        "ttft": 0.1,
        "tpot": 0.01,
        "error": "",
    }
    requests = [one | {"at": 0.1 * number} for number in range(20)]
    (mix, *_) = mixes("example")
    for topology in TOPOLOGIES:
        found = {"threads": 1, "client_share": 0.1, "requests": requests}
        runs.found["runs"][run_key("example", mix.name, topology)] = found
    runs.found["bases"]["example"] = {mix.name: {"rate": 10.0, "slo_ttft": 1.0, "slo_tpot": 0.1}}
    runs.save()
    rows: list[dict[str, Any]] = list(compared(TruthRuns.at(tmp_path / "truth.json"), "example", example_profile()))
    assert [one["topology"] for one in rows] == list(TOPOLOGIES)
    for one in rows:
        assert one["measured"]["goodput"] == pytest.approx(one["offered"])
        assert 0 < one["predicted"]["ttft_p50"] <= one["predicted"]["ttft_p99"] < 10
    assert len(list(table(rows, list(verdicts(rows))))) == 2 + len(rows) + 1 + 4
