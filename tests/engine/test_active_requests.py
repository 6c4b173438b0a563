"""Which requests of a loop are overdue or have become ready, over any history."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine_instances import generate
from triptych.engine.active_request import ActiveRequest, Timings
from triptych.engine.active_requests import ActiveRequests
from triptych.engine.request import make_request

CONTEXT, VOCABULARY = 100, 200


def active(name: str, deadline: float) -> ActiveRequest:
    message = generate(name, prompt=4)
    return ActiveRequest(
        make_request(message, [], CONTEXT, VOCABULARY), message, deadline, num_given=4, timings=Timings(0.0)
    )


@given(data=st.data())
def test_every_request_is_overdue_at_its_deadline_and_ready_once(data: st.DataObject) -> None:
    requests = ActiveRequests()
    here: dict[str, ActiveRequest] = {}
    ready: set[str] = set()
    told: list[str] = []
    for now in range(data.draw(st.integers(1, 30))):
        for action in data.draw(st.lists(st.sampled_from(["add", "remove", "ready", "fail"]), max_size=4)):
            name = f"r{data.draw(st.integers(0, 9))}"
            if action == "add" and name not in here:
                here[name] = active(name, now + data.draw(st.integers(0, 6)))
                requests.add(here[name])
                ready.discard(name)
                told = [one for one in told if one != name]
            elif action == "remove" and name in here:
                requests.end(here[name])
                requests.remove(here.pop(name))
            elif action == "ready":
                ready.add(name)
            elif name in here:
                here[name].failed = True
                requests.end(here[name])
        told += [one.id for one in requests.take_ready(lambda one: one.id in ready)]
        assert len(told) == len(set(told)), "each is told once"
        assert {one for one in here if one in ready and not here[one].failed} <= set(told)
        overdue = requests.overdue(now)
        assert {one.id for one in overdue} == {
            name for name, one in here.items() if one.deadline <= now and not one.failed
        }
        for one in overdue:
            one.failed = True
            requests.end(one)
        assert {one.id for one in requests} == set(here)
