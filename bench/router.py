"""CPU time of a request in the router, in microseconds, by the number of requests in flight. No socket, no instance:
the router is called with the messages that instances would send.

.venv/bin/python -m bench.router [--in-flight 100,1000,10000] [--clients 1,100] [--placement affinity]
    [--prompt-tokens 32] [--output FILE]
"""

import argparse
import gc
import statistics
import time
from pathlib import Path

import numpy as np

from bench.measuring import report
from triptych.clock import SystemClock
from triptych.config import AdmissionConfig, LeaseConfig
from triptych.config.admission import PLACEMENTS
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowLayout
from triptych.messages.work import Capacity, Generate, Heartbeat, Register, SamplingParams, Tokens
from triptych.models.base import Positions
from triptych.observe.requests import RequestRecord
from triptych.prompt.prompt import PlannedPrompt
from triptych.router.router import Router
from triptych.topology import Role
from triptych.types import Address, RequestId

INSTANCES = 8
TOKENS_PER_REQUEST = 4
ROUNDS = 5
REQUESTS_PER_ROUND = 500


class Service:
    """A router with ``INSTANCES`` language instances that have room for ``dispatched`` requests in all."""

    def __init__(self, dispatched: int, num_clients: int, placement: str, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._positions = Positions(np.zeros((3, prompt_tokens)), prompt_tokens)
        self.sent: list[Generate] = []
        self.records = [RequestRecord("id", "POST", SystemClock(), client=f"client {n}") for n in range(num_clients)]
        self.router = Router(
            address=Address("frontend"),
            send=self._take,
            disconnect=lambda _: None,
            identity=ModelIdentity(),
            admission=AdmissionConfig(max_queue=10**6, request_timeout=10**6, placement=placement),
            lease=LeaseConfig(heartbeat=10**5, lease_expiry=10**6),
            expects_encoders=False,
            clock=SystemClock(),
        )
        self.num_submitted = 0
        layout = RowLayout(ModelIdentity().digest, "float32", 4, 16)
        capacity = Capacity(max(1, dispatched * 4 // 5 // INSTANCES), 1024)
        for number in range(INSTANCES):
            name = f"pd{number}"
            self.router.handle(Register(name, Role.PD, Address(name), [layout], 1, 1, capacity, 2**20))

    def _take(self, _: Address, message: Message) -> None:
        if isinstance(message, Generate):
            self.sent.append(message)

    def submit(self) -> None:
        record = self.records[self.num_submitted % len(self.records)]
        record.generations.clear()
        self.num_submitted += 1
        prompt = PlannedPrompt([self.num_submitted] * self._prompt_tokens, self._positions)
        self.router.lifecycle.submit(record, prompt, SAMPLING, [])

    def answer(self, request: RequestId) -> None:
        for number in range(TOKENS_PER_REQUEST - 1):
            self.router.handle(Tokens(request, [1], number))
        self.router.handle(Tokens(request, [1], TOKENS_PER_REQUEST - 1, finish_reason="stop"))

    def turn(self) -> None:
        """One request is answered, and another is submitted."""
        self.answer(self.sent.pop(0).request)
        self.submit()


SAMPLING = SamplingParams(max_tokens=TOKENS_PER_REQUEST)


def measure(in_flight: int, num_clients: int, placement: str, prompt_tokens: int) -> dict[str, float]:
    """Return the median and the extremes of several rounds, in microseconds for a request; and for a tick."""
    service = Service(in_flight // 2, num_clients, placement, prompt_tokens)
    for _ in range(in_flight):
        service.submit()
    assert service.router.num_requests == in_flight
    gc.collect()
    rounds, ticks = [], []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(REQUESTS_PER_ROUND):
            service.turn()
        rounds.append((time.process_time() - began) / REQUESTS_PER_ROUND * 1e6)
        began = time.process_time()
        service.router.tick()
        ticks.append((time.process_time() - began) * 1e6)
        for number in range(INSTANCES):
            service.router.handle(Heartbeat(Address(f"pd{number}")))
    assert service.router.num_requests == in_flight
    return {
        "request_us": statistics.median(rounds),
        "request_us_min": min(rounds),
        "request_us_max": max(rounds),
        "tick_us": statistics.median(ticks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", default="100,1000,10000")
    parser.add_argument("--clients", default="1,100,10000")
    parser.add_argument("--placement", choices=PLACEMENTS, default=PLACEMENTS[0])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = []
    for clients in map(int, arguments.clients.split(",")):
        for in_flight in map(int, arguments.in_flight.split(",")):
            measured = measure(in_flight, clients, arguments.placement, arguments.prompt_tokens)
            results.append({"clients": clients, "in_flight": in_flight, **measured})
            print(
                f"{clients:6} clients, {in_flight:6} in flight: {measured['request_us']:7.0f} us a request "
                f"({measured['request_us_min']:.0f} to {measured['request_us_max']:.0f}), "
                f"{measured['tick_us']:7.0f} us a tick"
            )
    if arguments.output:
        report({"requests": results}, arguments.output)


if __name__ == "__main__":
    main()
