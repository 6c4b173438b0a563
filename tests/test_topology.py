import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import TopologyError
from triptych.topology import Role, Topology


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("1EPD", [Role.EPD]),
        (" 1e1pd ", [Role.E, Role.PD]),
        ("2E1PD", [Role.E, Role.E, Role.PD]),
        ("1PD2E1EPD", [Role.PD, Role.E, Role.E, Role.EPD]),
        ("32E32PD", [Role.E] * 32 + [Role.PD] * 32),
        ("1E1P1D", [Role.E, Role.P, Role.D]),
        ("1EP2D", [Role.EP, Role.D, Role.D]),
        ("1P1D", [Role.P, Role.D]),
        ("1PD", [Role.PD]),
        ("1E1PD1P1D", [Role.E, Role.PD, Role.P, Role.D]),
    ],
)
def test_reads_what_makes_sense(text: str, roles: list[Role]) -> None:
    topology = Topology.parse(text)
    assert topology.roles == roles
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a sequence"),
        ("EPD", "is not a sequence"),
        ("1E-1PD", "is not a sequence"),
        ("1E 1PD", "is not a sequence"),
        ("9" * 5000 + "EPD", "is not a sequence"),
        ("1ED1P", "'ED' is not a role"),
        ("0E1PD", "zero instances"),
        ("1E1PD1E", "twice"),
        ("33E32PD", "more than 64"),
        ("999999999EPD", "more than 64"),
        ("2E", "no instance that decodes"),
        ("1E1D", "no prefill instance for"),
        ("1E1PD1D", "no prefill instance for"),
        ("1E1P", "no instance that decodes"),
        ("1E1PD1P", "no decode instance for"),
    ],
)
def test_invalid_topologies_are_rejected_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(TopologyError, match=reason):
        Topology.parse(text)


@given(st.text(alphabet="0123EPDx ٣", max_size=12))
def test_any_text_is_a_topology_that_serves_or_a_typed_error(text: str) -> None:
    try:
        topology = Topology.parse(text)
    except TopologyError:
        return
    assert any(role.decodes for role in topology.roles)
    assert any(role.takes_kv for role in topology.roles) == any(role.sends_kv for role in topology.roles)
