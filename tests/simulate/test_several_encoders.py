"""Several encode instances for one request, in virtual time: more than a machine here has cores, at measured costs."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.plans import plan_of
from triptych.config import EngineConfig
from triptych.simulate.costs import LinearCosts
from triptych.simulate.instance import InstanceSettings, SimulatedModel
from triptych.simulate.load import Asked, ItemAsked, SimulatedLoad
from triptych.simulate.service import SimulatedService
from triptych.topology import Role
from triptych.types import ItemPlan

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "several-encoders.json"
"""What ``bench.several_encoders`` took with one encode instance, and with two."""
PLANS = {
    "16 images": [plan_of(196, patches=[784], cost=917.0)] * 16,
    "60 s of video": [plan_of(*[80] * 60, patches=[320] * 60, cost=20533.0)],
    "12 tiles": [plan_of(*[256] * 13, patches=[1024] * 13, cost=17306.0)],  # and the whole image as a thirteenth
}
"""As the checkpoints of that benchmark have them."""


def seconds(plans: Sequence[ItemPlan], encoders: int, per_patch: float) -> float:
    """The time to the first token of one request, which takes no longer than its rows."""
    costs = LinearCosts(per_step=1e-4, per_token=0.0, per_patch=per_patch, per_patch_preprocessed=1e-5, per_byte=1e-9)
    engine = EngineConfig(threads=1, receive_blocks=512, max_num_batched_tokens=8192, kv_cache_tokens=2**16)
    roles = {f"e{number}": Role.E for number in range(encoders)} | {"pd": Role.PD}
    model = SimulatedModel(context_length=2**15, embedding_bytes=8192)
    service = SimulatedService(1, roles, costs, model=model, settings=InstanceSettings(engine))
    try:
        items = tuple(ItemAsked(str(number), plan) for number, plan in enumerate(plans))
        load = SimulatedLoad(service, [Asked(0.0, [1] * 16, 1, items)])
        assert load.run(60.0)
    finally:
        service.close()
    (outcome,) = load.outcomes
    assert not outcome.error
    return outcome.ttft


@pytest.mark.parametrize(
    ("case", "encoders", "most"),
    [
        ("16 images", 2, 0.55), ("16 images", 4, 0.29), ("16 images", 8, 0.16),
        ("60 s of video", 2, 0.55), ("60 s of video", 4, 0.29), ("60 s of video", 8, 0.16),
        ("12 tiles", 2, 0.55), ("12 tiles", 4, 0.32), ("12 tiles", 8, 0.165),  # 4 of 13 tiles are 0.31
    ],
)  # fmt: skip
def test_a_request_s_media_are_shared_by_all(case: str, encoders: int, most: float) -> None:
    measured, plans = json.loads(MEASURED.read_text())["cases"][case]["seconds"]["one"], PLANS[case]
    per_patch = measured / sum(plan.patches for plan in plans)
    alone = seconds(plans, 1, per_patch)
    assert alone == pytest.approx(measured, rel=0.05)
    assert 1 / encoders <= seconds(plans, encoders, per_patch) / alone <= most
