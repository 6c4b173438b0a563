"""The Grafana dashboard asks for metrics that exist, by labels that they have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from triptych.observe.metrics import PREFIX, Metrics
from triptych.router.instance_metrics import SERIES
from triptych.router.stage_metrics import STAGE_LABELS, STAGE_SERIES

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/triptych.json"
RULES = DASHBOARD.parents[1] / "prometheus/vllm-names.rules.yml"
SCRAPED = "instance"
"""The label by which Prometheus tells the frontends apart."""
_NAME = re.compile(r"(?:triptych:|process_)\w+")
_BY = re.compile(r"by \(([\w, ]+)\)")
_LEGEND = re.compile(r"{{(\w+)}}")


def exposed() -> dict[str, set[str]]:
    """Every sample's name, and the labels that it can have."""
    metrics = Metrics()
    names: dict[str, set[str]] = {}
    for collector, own in metrics.registry._collector_to_names.items():
        labels = set(getattr(collector, "_labelnames", ()))
        for name in (one for one in own if not one.endswith("_created")):
            names[name] = labels | ({"le"} if name.endswith("_bucket") else set())
    for series in SERIES:
        name = PREFIX + series.name + ("_total" if series.counts else "")
        names[name] = {"instance_name", "role", *([series.label] if series.label else [])}
    return names | {PREFIX + name: set(STAGE_LABELS) for name in STAGE_SERIES}


def targets() -> list[dict[str, Any]]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target for panel in panels for target in panel.get("targets", [])]


@pytest.mark.parametrize("target", targets(), ids=lambda target: target["expr"][:60])
def test_every_expression_names_metrics_and_labels_that_exist(target: dict[str, Any]) -> None:
    names = exposed()
    asked = _NAME.findall(target["expr"])
    assert asked
    for name in asked:
        assert name in names
        by = {label for group in _BY.findall(target["expr"]) for label in group.split(", ")}
        assert by <= names[name] | {SCRAPED}
        if not by:
            assert set(_LEGEND.findall(target["legendFormat"])) <= names[name]
    if by:
        assert set(_LEGEND.findall(target["legendFormat"])) <= by


def test_every_metric_is_on_the_dashboard_or_listed_as_omitted() -> None:
    shown = set(_NAME.findall(DASHBOARD.read_text()))
    left_out = {
        "instance_computed_tokens", "instance_outstanding", "instance_steps", "kv_cache_pages", "mm_fetched_bytes",
        "mm_items", "mm_items_encoded", "mm_single_flight_waits",
        "request_generation_tokens",
        "request_prompt_tokens", "request_time_per_output_token_seconds", "state_slots", "state_slots_used",
        "stage_outstanding", "state_snapshots_cached", "transfer_received", "transfer_revoked",
        "transfer_sent", "transfer_sent_bytes",
    }  # fmt: skip
    families = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in exposed() if name.startswith(PREFIX)}
    families -= {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in shown}
    assert families == {PREFIX + name for name in left_out}


def test_rules_that_record_vllm_names_ask_for_metrics_and_labels_that_exist() -> None:
    names, [group] = exposed() | {"triptych:num_requests_queued": set()}, yaml.safe_load(RULES.read_text())["groups"]
    assert len(group["rules"]) > 30
    for rule in group["rules"]:
        assert re.fullmatch(r"vllm:\w+", rule["record"])
        [asked] = _NAME.findall(rule["expr"])
        by = {label for group in _BY.findall(rule["expr"]) for label in group.split(", ")}
        assert by <= names[asked] | {SCRAPED, "job"}
        if "{" in rule["expr"]:
            assert "stage" in names[asked]
