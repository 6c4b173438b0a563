"""Which actors have instances, wait for the next one, or are kept free, without Ray."""

from dataclasses import dataclass, field

import pytest

from triptych.cluster.on_ray.hosts import (
    KEPT_SECONDS,
    MAX_SPARE_PLACES,
    RETRY_SECONDS,
    UNFIT_SECONDS,
    RayHost,
    RayHosts,
)
from triptych.cluster.on_ray.messages import (
    Checking,
    FromSupervisor,
    Gone,
    Host,
    Release,
    Reserve,
    Reserved,
    Unfit,
    Waiting,
)
from triptych.messages.operations import SparePlace
from triptych.virtual_time import VirtualClock

CPU = {"CPU": 1.0}
GPU = {"CPU": 1.0, "GPU": 1.0}


@dataclass
class Instance:
    name: str
    node: str = ""
    pending: str = ""
    asked_again: int = 0

    def ask_again(self) -> None:
        self.asked_again += 1


@dataclass
class Cluster:
    """The actors of a service, what was asked of Ray since the last look, and the time."""

    spares: int = 0
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(0.0))
    sent: list[FromSupervisor] = field(default_factory=list)
    hosts: RayHosts = field(init=False)
    number: int = 0

    def __post_init__(self) -> None:
        self.hosts = RayHosts(self.spares, self.sent.append, self.clock)

    def start(
        self, name: str, resources: dict[str, float] = CPU, node: str = "", model: str = ""
    ) -> tuple[RayHost, Instance]:
        """Start an instance, on its node if that is known at once."""
        self.number += 1
        new = RayHost(Host(f"host-{self.number}", resources, (name + model).encode()), model)
        host, instance = self.hosts.choose(name, new), Instance(name, node)
        self.hosts.begin(host, instance)
        self.hosts.balance()
        return host, instance

    def end(self, host: RayHost, *, keep: bool) -> None:
        self.hosts.end(host.host.name, keep=keep)
        self.hosts.balance()

    def take(self, message: Waiting | Checking | Reserved | Unfit | Gone) -> None:
        self.hosts.take(message)
        self.hosts.balance()

    def asked(self) -> list[FromSupervisor]:
        sent = list(self.sent)
        self.sent.clear()
        return sent

    def reserved(self) -> list[Host]:
        """The actors without an instance that were asked for."""
        return [one.host for one in self.asked() if isinstance(one, Reserve)]


def test_the_next_instance_is_where_it_was() -> None:
    cluster = Cluster()
    e0, _ = cluster.start("e0", node="a")
    pd0, _ = cluster.start("pd0", node="b")
    for host in (e0, pd0):
        cluster.end(host, keep=True)
    assert cluster.asked() == [Reserve(e0.host, "a"), Reserve(pd0.host, "b")]  # so that they are watched, and stay
    assert cluster.start("pd0")[0] is pd0
    assert cluster.start("e0")[0] is e0
    assert cluster.asked() == []


def test_an_instance_that_was_never_ready_frees_its_place() -> None:
    cluster = Cluster()
    e0, _ = cluster.start("e0", node="a")
    cluster.end(e0, keep=False)
    assert cluster.asked() == [Release(e0.host.name)]
    assert cluster.start("e0")[0] is not e0


def test_a_place_is_kept_for_as_long_as_a_restart_may_wait() -> None:
    cluster = Cluster()
    e0, _ = cluster.start("e0", node="a")
    cluster.end(e0, keep=True)
    cluster.asked()
    cluster.clock.run_until(KEPT_SECONDS - 1)
    cluster.hosts.balance()
    assert cluster.asked() == []
    cluster.clock.run_until(KEPT_SECONDS)
    cluster.hosts.balance()
    assert cluster.asked() == [Release(e0.host.name)]


def test_spares_are_asked_for_once_all_instances_have_a_place() -> None:
    cluster = Cluster(spares=2)
    _, e0 = cluster.start("e0", GPU)
    cluster.start("pd0", node="b")
    assert cluster.reserved() == []
    e0.node = "a"
    cluster.hosts.balance()
    spares = cluster.reserved()
    assert [one.resources for one in spares] == [GPU, GPU, CPU, CPU]
    assert [one.example for one in spares] == [b"e0", b"e0", b"pd0", b"pd0"]
    assert len({one.name for one in spares}) == 4


def test_one_spare_serves_all_that_ask_for_the_same() -> None:
    cluster = Cluster(spares=1)
    _, pd0 = cluster.start("pd0")
    cluster.start("e0", node="a")
    pd0.node = "b"
    cluster.hosts.balance()
    [spare] = cluster.reserved()
    assert spare.example == b"pd0"
    lost = next(host for host in cluster.hosts if host.process is pd0)
    cluster.end(lost, keep=False)  # its machine is lost
    host, pd0 = cluster.start("pd0")
    assert host.host.name == spare.name
    assert cluster.reserved() == []
    pd0.node = "c"
    cluster.hosts.balance()
    assert len(cluster.reserved()) == 1, "the next one"


def test_spares_give_their_places_up_while_an_instance_waits(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(spares=1)
    e0, _ = cluster.start("e0", GPU, node="a")
    cluster.start("pd0", node="b")
    for_e0, for_pd0 = cluster.reserved()
    for spare in (for_e0, for_pd0):
        cluster.take(Reserved(spare.name, "c"))
    cluster.end(e0, keep=False)
    host, _ = cluster.start("e0", GPU, node="c")
    assert host.host.name == for_e0.name
    _, instance = cluster.start("e1", GPU)
    cluster.asked()
    cluster.hosts.balance()
    assert cluster.asked() == [], "it may get a place at once"
    instance.pending = "it asks for 1 CPU, 1 GPU"
    cluster.hosts.balance()
    assert cluster.asked() == [Release(for_pd0.name)]
    assert "a spare place is given up: instance e1 has no place" in caplog.text
    instance.node, instance.pending = "d", ""
    cluster.hosts.balance()
    assert [one.resources for one in cluster.reserved()] == [GPU, CPU]


def test_a_place_that_is_kept_is_no_spare_to_give_up() -> None:
    cluster = Cluster()
    e0, _ = cluster.start("e0", node="a")
    _, pd0 = cluster.start("pd0", GPU)
    cluster.end(e0, keep=True)
    pd0.pending = "it asks for 1 CPU, 1 GPU"
    cluster.hosts.balance()
    assert cluster.asked() == [Reserve(e0.host, "a")]


def test_a_spare_with_a_place_comes_before_one_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(spares=2)
    cluster.start("e0", node="a")
    waiting, placed = cluster.reserved()
    for _ in range(2):
        cluster.take(Waiting(waiting.name, "it asks for 1 CPU"))
    assert caplog.text.count("a spare place isn't free yet: it asks for 1 CPU") == 1
    cluster.take(Reserved(placed.name, "b"))
    assert cluster.start("e1")[0].host.name == placed.name
    assert cluster.start("e2")[0].host.name == waiting.name
    assert cluster.reserved() == []


def test_a_spare_on_the_node_of_a_lost_instance_is_the_last_to_be_chosen() -> None:
    cluster = Cluster(spares=2)
    e0, _ = cluster.start("e0", node="a")
    on_a, on_b = cluster.reserved()
    cluster.take(Reserved(on_a.name, "a"))
    cluster.take(Reserved(on_b.name, "b"))
    cluster.end(e0, keep=False)
    assert cluster.start("e0")[0].host.name == on_b.name
    assert cluster.start("e1")[0].host.name == on_a.name, "better than none"


def test_a_spare_comes_before_a_place_that_is_kept_for_another() -> None:
    cluster = Cluster(spares=1)
    e0, _ = cluster.start("e0", node="a")
    [spare] = cluster.reserved()
    cluster.take(Reserved(spare.name, "b"))
    cluster.end(e0, keep=True)
    assert cluster.start("e1")[0].host.name == spare.name
    assert cluster.start("e0")[0] is e0


def test_a_spare_that_is_lost_is_replaced_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(spares=1)
    cluster.start("e0", node="a")
    [spare] = cluster.reserved()
    cluster.take(Gone(spare.name, "its node died"))
    assert "a spare place is lost: its node died" in caplog.text
    assert cluster.asked() == []
    cluster.clock.run_until(RETRY_SECONDS)
    cluster.hosts.balance()
    [other] = cluster.reserved()
    assert other.name != spare.name
    cluster.take(Gone(spare.name, "said again"))
    assert cluster.asked() == []


def test_a_place_that_is_kept_counts_beside_the_spares() -> None:
    cluster = Cluster(spares=1)
    e0, _ = cluster.start("e0", node="a")
    [spare] = cluster.reserved()
    cluster.end(e0, keep=True)
    assert cluster.asked() == [Reserve(e0.host, "a")]
    assert cluster.start("e0")[0] is e0
    assert [host.host for host in cluster.hosts if host.process is None] == [spare]


def test_a_spare_is_kept_while_the_only_instance_is_started_again() -> None:
    cluster = Cluster(spares=1)
    e0, _ = cluster.start("e0", node="a")
    [spare] = cluster.reserved()
    cluster.end(e0, keep=False)
    assert cluster.asked() == [Release(e0.host.name)]
    cluster.clock.run_until(KEPT_SECONDS - 1)
    cluster.hosts.balance()
    assert cluster.start("e0")[0].host.name == spare.name
    cluster.end(next(iter(cluster.hosts)), keep=True)
    cluster.asked()
    cluster.clock.run_until(3 * KEPT_SECONDS)  # nothing asks for it any more
    cluster.hosts.balance()
    assert cluster.asked() == [Release(spare.name)]


def test_new_code_takes_new_places() -> None:
    cluster = Cluster(spares=1)
    e0, _ = cluster.start("e0", node="a")
    [spare] = cluster.reserved()
    cluster.hosts.renew()
    former, reserve = cluster.asked()
    assert former == Release(spare.name)
    assert isinstance(reserve, Reserve), "also if the rollout is given up now"
    new, _ = cluster.start("e0", node="b")
    assert new is not e0
    assert new.host.name == reserve.host.name
    assert len(cluster.reserved()) == 1
    cluster.end(e0, keep=True)
    assert cluster.asked() == [Release(e0.host.name)], "it has former code"


def test_spares_are_like_instances_of_current_code() -> None:
    cluster = Cluster(spares=1)
    cluster.start("e0", node="a")
    cluster.hosts.renew()
    cluster.start("e1", node="b")
    cluster.asked()
    cluster.start("e2", node="c")
    [spare] = cluster.reserved()
    assert spare.example == b"e1"


def test_spares_of_a_model_that_no_instance_has_any_more_are_replaced() -> None:
    cluster = Cluster(spares=2)
    old, _ = cluster.start("e0", node="a")
    cluster.hosts.renew()
    cluster.asked()
    new, _ = cluster.start("pd0", node="b", model="new")
    assert new.host.example == b"pd0new", "it is checked for the model that it has"
    assert [one.example for one in cluster.reserved()] == [b"pd0new"]
    [former] = [one.host for one in cluster.hosts if one.process is None and one.model != "new"]
    cluster.end(old, keep=False)
    *released, reserve = cluster.asked()
    assert released == [Release(old.host.name), Release(former.name)]
    assert isinstance(reserve, Reserve)
    assert reserve.host.example == b"pd0new"


def test_another_process_is_asked_for_all() -> None:
    cluster = Cluster(spares=1)
    _, e0 = cluster.start("e0", node="a")
    [spare] = cluster.reserved()
    cluster.hosts.ask_again([])
    assert e0.asked_again == 1
    assert cluster.asked() == [Reserve(spare)]
    cluster.take(Reserved(spare.name, "b"))
    cluster.hosts.ask_again([])
    assert cluster.asked() == [Reserve(spare, "b")], "it needs no other check"


def test_an_actor_that_was_released_without_a_connection_is_released_again() -> None:
    cluster = Cluster()
    e0, _ = cluster.start("e0", node="a")
    pd0, _ = cluster.start("pd0", node="b")
    cluster.end(e0, keep=False)
    cluster.asked()  # and lost
    cluster.hosts.ask_again([e0.host.name, pd0.host.name])
    assert cluster.asked() == [Release(e0.host.name)]


def test_spares_are_shown_with_their_nodes_and_what_they_wait_for() -> None:
    cluster = Cluster(spares=2)
    e0, _ = cluster.start("e0", GPU, node="a")
    placed, waiting = cluster.reserved()
    asks = "1 CPU, 1 GPU"
    assert cluster.hosts.spare_places() == [SparePlace(asks), SparePlace(asks)]
    for one in (placed, waiting):
        cluster.take(Waiting(one.name, "it asks for more than there is"))
    cluster.take(Reserved(placed.name, "b"))
    shown = [SparePlace(asks, "b"), SparePlace(asks, pending="it asks for more than there is")]
    assert cluster.hosts.spare_places() == shown
    cluster.end(e0, keep=True)
    assert cluster.hosts.spare_places() == shown, "the place of e0 is kept for e0"
    cluster.start("e0", GPU)
    cluster.start("e1", GPU)
    assert cluster.hosts.spare_places() == shown[1:], "e1 has the other one"


def test_many_spares_are_not_all_shown() -> None:
    cluster = Cluster(spares=MAX_SPARE_PLACES + 1)
    cluster.start("e0", node="a")
    assert len(cluster.reserved()) == MAX_SPARE_PLACES + 1
    assert len(cluster.hosts.spare_places()) == MAX_SPARE_PLACES


def test_a_spare_is_shown_as_being_checked(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(spares=1)
    cluster.start("e0", node="a")
    [spare] = cluster.reserved()
    cluster.take(Waiting(spare.name, "it asks for more than there is"))
    caplog.clear()
    cluster.take(Checking(spare.name, "b"))
    says = "b is checked for the version and the model"
    assert cluster.hosts.spare_places() == [SparePlace("1 CPU", pending=says)]
    assert caplog.text == "", "it waits for nothing"
    cluster.take(Reserved(spare.name, "b"))
    assert cluster.hosts.spare_places() == [SparePlace("1 CPU", "b")]


def test_a_spare_where_no_instance_can_run_is_named_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(spares=1)
    cluster.start("e0", node="a")
    [spare] = cluster.reserved()
    cluster.take(Unfit(spare.name, "b", "Triptych 0.2 is installed, and the service has 0.1"))
    assert "a spare place on b is not kept: Triptych 0.2 is installed, and the service has 0.1" in caplog.text
    assert cluster.asked() == [Release(spare.name)]
    cluster.clock.run_until(UNFIT_SECONDS - 1)
    cluster.hosts.balance()
    assert cluster.asked() == []
    cluster.clock.run_until(UNFIT_SECONDS)
    cluster.hosts.balance()
    assert len(cluster.reserved()) == 1
