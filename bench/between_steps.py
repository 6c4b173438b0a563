"""What an engine loop computes between two decode steps, by the number of requests that decode.

    python -m bench.between_steps --requests 32 256 1024 --out bench/results/between-steps.json

The loop is the product's, with a decoder that returns the same logits for every row at once. Figures are the processor
time of the loop's thread for each step, in microseconds: results, scheduling, the next step's inputs and the messages'
encoding. The model's forward pass and sampling run on another thread and aren't in them.
"""

import argparse
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import torch

from bench.measuring import like_an_instance, report
from triptych.checkpoint.reader import Checkpoint
from triptych.clock import SystemClock
from triptych.config import EngineConfig, ServeConfig
from triptych.demo import MODEL_DIR
from triptych.engine.loop import EngineLoop
from triptych.layers.decoder import ForwardBatch
from triptych.measure.machine import machine
from triptych.messages.channel import Channel
from triptych.messages.codec import Message, encode
from triptych.messages.work import Generate, SamplingParams
from triptych.server.build import build_instance
from triptych.server.model_bundle import ModelBundle
from triptych.topology import Role
from triptych.types import Address, RequestId

FIRST = 8
"""Steps that are not counted: the loop has just begun with all of the requests."""
PROMPT = 64
"""Tokens of a prompt; no two prompts have a page in common."""


class _Sink(Channel):
    """A channel that encodes messages and drops them."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.woken = threading.Event()

    def send(self, to: Address, message: Message) -> None:
        encode(message)

    def wake(self) -> None:
        """Called when a step has ended."""
        self.woken.set()


def generate(number: int, max_tokens: int) -> Generate:
    tokens = np.random.default_rng(number).integers(0, 200, PROMPT).tolist()
    return Generate(
        request=RequestId(str(number)),
        tokens=tokens,
        positions=np.broadcast_to(np.arange(PROMPT, dtype="<f8"), (3, PROMPT)).tobytes(),
        next_position=PROMPT,
        items=[],
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        eos_token_ids=[],
        reply_to=Address("tcp://frontend:1"),
    )


def step_seconds(folder: Path, requests: int, steps: int) -> list[float]:
    """Return the processor time of the loop's thread for each of ``steps`` steps in which ``requests`` requests
    decode."""
    max_tokens = FIRST + steps + requests  # enough for those whose prompts come first
    engine = EngineConfig(
        max_num_seqs=requests,
        max_num_batched_tokens=max(requests, 1024),
        kv_cache_tokens=requests * (PROMPT + max_tokens + 64),
    )
    config = ServeConfig(model=folder, engine=engine)
    channel = _Sink()
    spec = config.instance(Role.PD, "pd", "127.0.0.1:1")
    instance = build_instance(spec, model=ModelBundle(Checkpoint(folder), engine), channel=channel, clock=SystemClock())
    (loop,) = (one for one in instance.loops if isinstance(one, EngineLoop))
    logits = torch.zeros(requests, 512)
    logits[:, 7] = 1.0

    def decoder(batch: ForwardBatch, *_: object) -> torch.Tensor:
        return logits[: len(batch.logits_index)]

    loop.runner.decoder = decoder
    handle = loop.handlers[Generate]
    try:
        for number in range(requests):
            handle(generate(number, max_tokens))
        found: list[float] = []
        loop.advance()
        while len(found) < FIRST + steps:
            channel.woken.wait()
            channel.woken.clear()
            decoding = all(one.decoding for one in loop.scheduler)
            began = time.thread_time()
            loop.advance()
            if decoding:
                found.append(time.thread_time() - began)
        return found[FIRST:]
    finally:
        instance.stop()
        instance.run()  # which ends at once
        channel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    like_an_instance(1)
    rows = []
    for requests in options.requests:
        seconds = step_seconds(MODEL_DIR, requests, options.steps)
        lowest, median, highest = min(seconds), statistics.median(seconds), max(seconds)
        rows.append(
            {
                "requests": requests,
                "step_us": {
                    "min": round(1e6 * lowest, 1),
                    "median": round(1e6 * median, 1),
                    "max": round(1e6 * highest, 1),
                },
                "us_per_request": round(1e6 * median / requests, 2),
            }
        )
    report({"machine": machine(), "steps": options.steps, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
