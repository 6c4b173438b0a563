"""How many threads an instance's process has: OpenMP's teams can't be seen otherwise."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.commands import ROOT, picture_answer, triptych
from triptych.demo import MODEL_DIR
from triptych.server.build import use_threads

COMPUTES = """
import os, psutil, torch
from triptych.clock import SystemClock
from triptych.compute_thread import ComputeThread
from triptych.executor import started_executor
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
compute = ComputeThread(started_executor(1, "compute"), SystemClock(), lambda: None)
compute.submit(lambda: torch.ones(10**6).sum()).result()
print(psutil.Process().num_threads())
"""
"""A process in which one thread alone asks for others."""


def in_an_instance(threads: int) -> int:
    """Once it has loaded, encoded, prefilled and decoded."""
    arguments = ("--port", "0", "--topology", "1EPD", "--served-model-name", "demo", "--threads", str(threads))
    with triptych("serve", MODEL_DIR, *arguments, OPENBLAS_NUM_THREADS="1") as command:
        assert picture_answer(command.wait_until_ready(), "demo")
        return command.child("epd0").num_threads()


def in_a_process_that_computes(threads: int) -> int:
    # without NumPy's own threads, which a forked instance doesn't have
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}
    return int(subprocess.check_output([sys.executable, "-c", COMPUTES], cwd=ROOT, env=environment))


@pytest.mark.slow
def test_only_the_compute_thread_uses_an_openmp_team() -> None:
    """If the thread that loads kept a team, too, OpenMP would go to sleep between all of a step's operations."""
    more = in_a_process_that_computes(3) - in_a_process_that_computes(1)
    assert in_an_instance(3) - in_an_instance(1) == more


def test_a_thread_keeps_its_number_of_threads() -> None:
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(use_threads, 3).result()
        torch.set_num_threads(1)
        assert executor.submit(torch.get_num_threads).result() == 3
    torch.set_num_threads(before)
