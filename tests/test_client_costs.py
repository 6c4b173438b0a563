"""Costs by client, beside sums over all clients."""

from hypothesis import given
from hypothesis import strategies as st

from triptych.client_costs import ClientCosts

COST = st.one_of(st.just(0.0), st.floats(1e-3, 1e9))


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), COST)), st.sampled_from("abcx"), COST, st.sets(st.sampled_from("abc"))
)
def test_a_capped_sum_is_at_most_a_fifth_above_the_exact_one(
    added: list[tuple[str, float]], without: str, limit: float, dropped: set[str]
) -> None:
    costs, exact = ClientCosts(), dict[str, float]()
    for client, cost in added:
        costs.add(client, cost)
        exact[client] = exact.get(client, 0.0) + cost
    for client in dropped & exact.keys():
        costs.drop(client)
        del exact[client]
    wanted = sum(min(cost, limit) for client, cost in exact.items() if client != without)
    slack = 1e-9 * (1 + sum(cost for _, cost in added))
    assert wanted - slack <= costs.capped(limit, without) <= 1.2 * wanted + slack
    assert costs.of(without) == exact.get(without, 0.0)
    assert abs(costs.total - sum(exact.values())) <= slack


def test_nothing_is_left_of_clients_that_are_dropped() -> None:
    costs = ClientCosts()
    for number in range(100):
        costs.add(f"client {number}", 0.1 * number)
    for number in range(100):
        costs.drop(f"client {number}")
    assert (bool(costs), costs.total, costs.capped(1e9, "")) == (False, 0.0, 0.0)
