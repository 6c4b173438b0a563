"""Each line of the table "What one client can use" has tests that hold it."""

import ast

import pytest

from tests.support.commands import ROOT

TESTS = {
    "queue of requests": [
        "api/test_overload.py::test_a_client_at_its_limit_gets_429_and_others_are_served",
        "api/test_overload.py::test_a_full_queue_refuses_requests_at_once",
        "api/test_overload.py::test_each_choice_counts_as_a_request_of_its_client",
    ],
    "share of instances": [
        "test_fair_queue.py::test_while_two_clients_have_work_neither_gets_ahead_by_more_than_a_piece",
        "router/test_admission.py::test_one_clients_backlog_is_not_anothers_wait_and_priorities_go_first",
    ],
    "memory of bodies, media and unread answers": [
        "api/test_memory_budget.py::test_a_refused_charge_is_not_counted",
        "api/test_memory_budget.py::test_log_probabilities_are_charged_until_the_client_has_them",
        "prompt/test_web.py::test_bytes_are_held_as_they_arrive_and_dropped_when_there_is_no_room",
    ],
    "media kept by `uuid`": ["api/test_uuid_cache.py::test_a_scope_below_its_share_keeps_its_items"],
    "sending a head": [
        "api/test_body.py::test_heads_that_are_too_long",
        "api/test_body.py::test_a_slow_head_times_out",
    ],
    "sending a body": [
        "api/test_body.py::test_a_slow_body_times_out",
        "api/test_body.py::test_a_body_of_unknown_length_is_refused_at_the_limit",
    ],
    "fetching media": [
        "prompt/test_web.py::test_a_client_whose_fetches_drip_does_not_hold_up_another",
        "prompt/test_web.py::test_a_slow_body_is_cut",
    ],
    "threads for planning and for checks of grammars": [
        "api/test_fair_executor.py::test_one_client_never_occupies_all_threads"
    ],
    "preparing media on encode instances": [
        "encode/test_batching.py::test_long_items_alternate_and_few_are_started",
        "router/test_admission.py::test_long_items_take_no_place_of_others_and_one_clients_leave_one_to_the_next",
    ],
    "reading a stream": ["api/test_disconnects.py::test_a_stream_whose_client_reads_nothing_ends"],
    "snapshots of `/ui`": [
        "api/test_ui_events.py::test_there_are_limits_to_viewers_and_those_that_leave_make_room",
        "api/test_ui_events.py::test_a_viewer_that_reads_nothing_delays_no_other_and_no_end",
    ],
    "stored responses": ["api/test_response_store.py::test_the_oldest_of_the_key_with_most_goes_first"],
    "connections to the control port": [
        "messages/test_channel.py::test_a_connection_that_does_not_authenticate_is_closed",
        "server/test_descriptors.py::test_connections_that_cannot_be_accepted_are_logged_once_in_a_while",
    ],
}


def test_each_line_has_tests() -> None:
    section = (ROOT / "docs" / "security.md").read_text().partition("\n## What one client can use\n")[2]
    table = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table]
    assert rows[2:] == list(TESTS)


@pytest.mark.parametrize("name", [name for names in TESTS.values() for name in names])
def test_a_test_that_is_named_exists(name: str) -> None:
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert function in [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
