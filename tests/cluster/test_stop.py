"""``triptych stop`` ends a whole service, and says what becomes of it."""

from pathlib import Path

from tests.support.commands import FAST, one_line_error, stream_of, triptych
from tests.support.steady_load import control_of
from triptych import exit_codes


def test_a_service_is_drained_and_ended(folder: Path) -> None:
    with triptych("serve", folder, *FAST, "--topology", "1PD") as service:
        url, control = service.wait_until_ready(), control_of(service)
        with stream_of(url, "tiny", 600) as lines, triptych("stop", "--control", control) as stop:
            stop.wait_for_line("0 of 2 ended: waiting for frontend, pd0")
            assert list(lines)[-1] == "data: [DONE]", "an answer that has begun is finished"
            assert stop.end(60) == 0, stop.text
        assert stop.lines[-1] == "the service has ended"
        assert "warning" not in stop.text
        assert service.end() == 0, service.text
        assert "an operator stops the service" in service.text
        assert "Traceback" not in service.text
    with triptych("stop", "--control", control) as again:
        assert "no answer from the frontend" in one_line_error(again, exit_codes.NO_FRONTEND)
