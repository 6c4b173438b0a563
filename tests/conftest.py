"""Settings of all tests. Triton's kernels run for real on a GPU, elsewhere in its interpreter, on CPU tensors.

A run of many files ends with a table of what each folder took, by which ``scripts/test`` divides them into jobs, and
with one of what the costliest tests took."""

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

Taken = defaultdict[str, list[float]]
"""Seconds, and processor seconds with those of child processes that have ended, by name."""
by_folder: Taken = defaultdict(lambda: [0.0, 0.0])
by_test: Taken = defaultdict(lambda: [0.0, 0.0])
"""By file and function, all parameters together."""
MANY_FILES = 8


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    began = time.monotonic(), sum(os.times()[:4])
    try:
        return (yield)
    finally:
        seconds, processor = time.monotonic() - began[0], sum(os.times()[:4]) - began[1]
        for table, name in ((by_folder, item.nodeid.partition("::")[0].rpartition("/")[0]), (by_test, _function(item))):
            table[name][0] += seconds
            table[name][1] += processor


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len({name.partition("::")[0] for name in by_test}) >= MANY_FILES:
        for title, table in (("folder", by_folder), ("test", by_test)):
            terminalreporter.section(f"seconds, and processor seconds, by {title}")
            for name, (seconds, processor) in sorted(table.items(), key=lambda one: -one[1][1])[:25]:
                terminalreporter.write_line(f"{seconds:7.1f} {processor:7.1f}  {name}")


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
