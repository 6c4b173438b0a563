import msgspec
import pytest

from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowKind, RowLayout
from triptych.messages.stats import InstanceStats
from triptych.messages.work import Heartbeat, Register
from triptych.router.placement import least_outstanding
from triptych.router.registry import InstanceLease, Registry
from triptych.topology import Role
from triptych.types import Address

MODEL = ModelIdentity("weights", "config", "adapter", "tokenizer")
LAYOUT = RowLayout(MODEL.digest, "float32", 4, 16)
BUSY = InstanceStats(resident_bytes=3)


def register(name: str, role: Role = Role.PD, pid: int = 1) -> Register:
    return Register(name, role, Address(name), [LAYOUT], pid, context_length=100, model=MODEL)


def lease(outstanding: int) -> InstanceLease:
    return InstanceLease("x", Role.E, Address("x"), 1, [LAYOUT], 100, 0.0, outstanding)


def test_the_least_outstanding_is_chosen_and_the_first_of_equals() -> None:
    leases = [lease(3), lease(1), lease(1)]
    assert least_outstanding(leases) is leases[1]
    assert least_outstanding([]) is None


def test_a_lease_lasts_as_long_as_its_heartbeats() -> None:
    registry = Registry(expiry=10.0)
    silent, alive = registry.add(register("silent"), 0.0), registry.add(register("alive"), 0.0)
    assert registry.refresh(Heartbeat(alive.address, BUSY), 9.0)
    assert (silent.stats, alive.stats) == (InstanceStats(), BUSY)
    assert registry.expired(10.0) == []
    assert registry.expired(10.1) == [silent]
    assert not registry.refresh(Heartbeat(Address("unknown"), BUSY), 9.0)


def test_instances_are_found_by_what_they_run() -> None:
    registry = Registry(expiry=10.0)
    e, pd, epd = (registry.add(register(role.value, role), 0.0) for role in (Role.E, Role.PD, Role.EPD))
    assert registry.encode_instances() == [e, epd]
    assert registry.decode_instances() == [pd, epd]
    assert registry.remove(e.address) is e
    assert registry.remove(e.address) is None
    assert (registry.get(pd.address), len(registry)) == (pd, 2)


def test_the_same_process_keeps_its_lease_and_another_starts_over() -> None:
    registry = Registry(expiry=10.0)
    first = registry.add(register("a"), 0.0)
    assert registry.add(register("a"), 5.0) is first
    assert first.last_seen == 5.0
    assert registry.add(register("a", pid=2), 6.0) is not first


def test_an_instance_whose_rows_differ_is_refused_with_the_difference() -> None:
    registry = Registry(expiry=10.0)
    registry.add(register("e0", Role.E), 0.0)
    same, other = (
        register("x"),
        msgspec.structs.replace(register("x"), layouts=[RowLayout(MODEL.digest, "float16", 4, 8)]),
    )
    assert registry.incompatibility(same, MODEL) == ""
    assert registry.incompatibility(other, MODEL).endswith(
        "those of e0: dtype float16 here, float32 there, row_bytes 8 here, 16 there (--dtype)"
    )
    registry.remove(Address("e0"))
    assert registry.incompatibility(other, MODEL) == ""


@pytest.mark.parametrize("part", ["weights", "config", "adapter", "tokenizer"])
def test_an_instance_of_another_model_is_refused_with_the_part_that_differs(part: str) -> None:
    frontends = msgspec.structs.replace(MODEL, **{part: "another"})
    refusal = Registry(expiry=10.0).incompatibility(register("x"), frontends)
    assert refusal == f"it serves another model than this frontend: {part} {part} here, another there"


def test_rows_must_be_of_the_model_that_an_instance_says_it_serves() -> None:
    lying = msgspec.structs.replace(register("x"), layouts=[RowLayout("another", "float32", 4, 16)])
    assert "aren't of the model" in Registry(expiry=10.0).incompatibility(lying, MODEL)


def test_rows_computed_with_weights_of_another_dtype_are_refused() -> None:
    registry = Registry(expiry=10.0)
    for kind, settings in ((RowKind.MEDIA, "(--dtype)"), (RowKind.KV, "--quantization, --kv-cache-dtype)")):
        half, whole = (RowLayout(MODEL.digest, "float32", 4, 16, kind, dtype) for dtype in ("float16", "float32"))
        registry.add(msgspec.structs.replace(register(kind.value), layouts=[half]), 0.0)
        refusal = registry.incompatibility(msgspec.structs.replace(register("x"), layouts=[whole]), MODEL)
        assert "weight_dtype float32 here, float16 there" in refusal
        assert refusal.endswith(settings)
