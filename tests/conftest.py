"""Settings of all tests. Triton's kernels run for real on a GPU, elsewhere in its interpreter, on CPU tensors.

A run of several folders ends with a table of what each took, by which ``scripts/test`` divides them in three."""

import os
import time
from collections import defaultdict
from collections.abc import Generator

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which other libraries do as well

pytest.register_assert_rewrite("tests.support")

# how long one example takes says nothing on a machine that runs other tests at the same time
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")

taken: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
"""Seconds, and processor seconds with those of child processes that have ended, by folder."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    began = time.monotonic(), sum(os.times()[:4])
    try:
        return (yield)
    finally:
        folder = taken[item.nodeid.partition("::")[0].rpartition("/")[0]]
        folder[0] += time.monotonic() - began[0]
        folder[1] += sum(os.times()[:4]) - began[1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len(taken) > 1:
        terminalreporter.section("seconds, and processor seconds, by folder")
        for name, (seconds, processor) in sorted(taken.items(), key=lambda one: -one[1][0]):
            terminalreporter.write_line(f"{seconds:7.1f} {processor:7.1f}  {name}")
