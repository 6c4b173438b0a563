"""What the load generator makes of a server's answers."""

import asyncio
import json

import httpx
import pytest

from triptych.measure.load.client import ErrorAnswer, Sample, ask, chunks, closed_loop, open_loop


def line(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def token(text: str) -> str:
    return line(choices=[{"delta": {"content": text}}])


USAGE = line(choices=[], usage={"completion_tokens": 2, "prompt_tokens": 9}, timeline=[{"stage": "encode"}])
DONE = "data: [DONE]\n\n"
OVERLOADED = json.dumps({"error": {"code": "overloaded", "message": "try later"}})


def client(content: str, status: int = 200) -> httpx.AsyncClient:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=content))
    return httpx.AsyncClient(base_url="http://service", transport=transport)


def answer(content: str, status: int = 200) -> Sample:
    return asyncio.run(ask(client(content, status), b"{}"))


def test_a_whole_answer() -> None:
    sample = answer(
        line(choices=[{"delta": {"role": "assistant", "content": ""}}]) + token("a") + token("b") + USAGE + DONE
    )
    assert sample.error == ""
    assert (len(sample.token_times), sample.tokens, sample.prompt_tokens) == (2, 2, 9)
    assert 0 < sample.ttft <= sample.token_times[1] <= sample.total
    assert sample.tpot == pytest.approx(sample.token_times[1] - sample.ttft)
    assert sample.timeline == [{"stage": "encode"}]


def test_tokens_count_by_the_usage_so_far() -> None:
    """Those without text, too, and several in a chunk; not the role's chunk, nor one that only says how it ended."""

    def so_far(count: int, **delta: str) -> str:
        return line(choices=[{"delta": delta}], usage={"completion_tokens": count, "prompt_tokens": 9})

    made = [so_far(0, role="assistant", content=""), so_far(2), so_far(3, content="a"), so_far(7), so_far(7)]
    sample = answer("".join(made) + DONE)
    assert (sample.error, len(sample.token_times), sample.first_tokens, sample.tokens) == ("", 3, 2, 7)
    assert sample.tpot == pytest.approx((sample.token_times[-1] - sample.ttft) / 5)


def test_a_server_may_count_nothing() -> None:
    sample = answer(token("a") + token("b") + DONE)
    assert (len(sample.token_times), sample.tokens) == (2, 2)


@pytest.mark.parametrize(
    ("content", "status", "error"),
    [
        (OVERLOADED, 503, "503: try later"),
        ("<html>", 502, "502: <html>"),
        (token("a") + f"data: {OVERLOADED}\n\n", 200, "200: try later"),
        (token("a"), 200, "RemoteProtocolError: the stream ended early"),
        (USAGE + DONE, 200, "no token came"),
    ],
)
def test_a_failure_is_named(content: str, status: int, error: str) -> None:
    assert answer(content, status).error == error


def test_an_error_has_the_services_code() -> None:
    async def consume() -> None:
        async for _ in chunks(client(OVERLOADED, 503), b"{}"):
            pass

    with pytest.raises(ErrorAnswer) as caught:
        asyncio.run(consume())
    assert caught.value.code == "overloaded"


def test_loops_send_each_request_once() -> None:
    asked: list[bytes] = []
    running = most = 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        asked.append(request.content)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return httpx.Response(200, text=token("a") + DONE)

    async def both() -> None:
        http = httpx.AsyncClient(base_url="http://service", transport=httpx.MockTransport(handle))
        bodies = [b"%d" % number for number in range(6)]
        assert len(await closed_loop(http, bodies, 2)) == 6
        assert most == 2
        assert len(await open_loop(http, bodies, [0.0] * 6)) == 6

    asyncio.run(both())
    assert sorted(asked) == sorted([b"%d" % number for number in range(6)] * 2)
    assert most == 6
