import msgspec
import pytest

from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowKind, RowLayout
from triptych.messages.stats import InstanceStats
from triptych.messages.work import Capacity, Heartbeat, Register
from triptych.router.instance import Assignment, Instance, WorkKind
from triptych.router.membership import Membership, is_before
from triptych.router.placement import Work, least_loaded
from triptych.topology import Role
from triptych.types import Address, RequestId

MODEL = ModelIdentity("weights", "config", "adapter", "tokenizer")
LAYOUT = RowLayout(MODEL.digest, "float32", 4, 16)
BUSY = InstanceStats(resident_bytes=3)


def register(name: str, role: Role = Role.PD, pid: int = 1) -> Register:
    return Register(name, role, Address(name), [LAYOUT], pid, pid, Capacity(32, 1024), 100, model=MODEL)


def lease(outstanding: int) -> Instance:
    found = Instance("x", Role.E, Address("x"), 1, 1, [LAYOUT], Capacity(), 100, 0.0)
    kind, request = WorkKind.ITEM, RequestId("r")
    found.account.charge(Assignment(instance=found, request=request, client="", kind=kind, cost=outstanding))
    return found


def test_the_least_outstanding_is_chosen_and_the_first_of_equals() -> None:
    leases = [lease(3), lease(1), lease(1)]
    assert least_loaded(leases, Work(1)) is leases[1]
    assert least_loaded([], Work(1)) is None


def test_a_lease_lasts_as_long_as_its_heartbeats() -> None:
    membership = Membership(expiry=10.0)
    silent, alive = membership.add(register("silent"), 0.0), membership.add(register("alive"), 0.0)
    assert membership.refresh(Heartbeat(alive.address, BUSY), 9.0)
    assert (silent.stats, alive.stats) == (InstanceStats(), BUSY)
    assert membership.expired(10.0) == []
    assert membership.expired(10.1) == [silent]
    assert not membership.refresh(Heartbeat(Address("unknown"), BUSY), 9.0)


def test_instances_are_found_by_what_they_run() -> None:
    membership = Membership(expiry=10.0)
    e, pd, epd = (membership.add(register(role.value, role), 0.0) for role in (Role.E, Role.PD, Role.EPD))
    assert membership.encode_instances() == [e, epd]
    assert membership.decode_instances() == [pd, epd]
    membership.remove(e, 0.0)
    assert membership.encode_instances() == [epd]
    assert (membership.get(pd.address), len(membership)) == (pd, 2)


def test_the_same_process_keeps_its_lease_and_another_starts_over() -> None:
    membership = Membership(expiry=10.0)
    first = membership.add(register("a"), 0.0)
    assert membership.add(register("a"), 5.0) is first
    assert first.last_seen == 5.0
    assert membership.add(register("a", pid=2), 6.0) is not first


def test_a_registration_that_was_overtaken_is_known() -> None:
    first = register("a")
    later = msgspec.structs.replace(first, resets=1)
    held = Membership(expiry=10.0).add(later, 0.0)
    assert is_before(held, first)
    assert not is_before(held, later)
    assert not is_before(held, register("a", pid=2)), "another process counts its own losses"


def test_an_instance_whose_rows_differ_is_refused_with_the_difference() -> None:
    membership = Membership(expiry=10.0)
    e0 = membership.add(register("e0", Role.E), 0.0)
    same, other = (
        register("x"),
        msgspec.structs.replace(register("x"), layouts=[RowLayout(MODEL.digest, "float16", 4, 8)]),
    )
    assert membership.incompatibility(same, MODEL) == ""
    assert membership.incompatibility(other, MODEL).endswith(
        "those of e0: dtype float16 here, float32 there, row_bytes 8 here, 16 there (--dtype, --encoder-quantization)"
    )
    membership.remove(e0, 0.0)
    assert membership.incompatibility(other, MODEL) == ""


@pytest.mark.parametrize("part", ["weights", "config", "adapter", "tokenizer"])
def test_an_instance_of_another_model_is_refused_with_the_part_that_differs(part: str) -> None:
    frontends = msgspec.structs.replace(MODEL, **{part: "another"})
    refusal = Membership(expiry=10.0).incompatibility(register("x"), frontends)
    assert refusal == f"it serves another model than this frontend: {part} {part} here, another there"


def test_rows_must_be_of_the_model_that_an_instance_says_it_serves() -> None:
    lying = msgspec.structs.replace(register("x"), layouts=[RowLayout("another", "float32", 4, 16)])
    assert "aren't of the model" in Membership(expiry=10.0).incompatibility(lying, MODEL)


def test_rows_computed_with_weights_of_another_dtype_are_refused() -> None:
    membership = Membership(expiry=10.0)
    for kind, settings in (
        (RowKind.MEDIA, "(--dtype, --encoder-quantization)"),
        (RowKind.KV, "--quantization, --kv-cache-dtype)"),
    ):
        half, whole = (RowLayout(MODEL.digest, "float32", 4, 16, kind, dtype) for dtype in ("float16", "float32"))
        membership.add(msgspec.structs.replace(register(kind.value), layouts=[half]), 0.0)
        refusal = membership.incompatibility(msgspec.structs.replace(register("x"), layouts=[whole]), MODEL)
        assert "weight_dtype float32 here, float16 there" in refusal
        assert refusal.endswith(settings)
