"""Quantized checkpoints in a service: the tokens are those of the dequantized weights, in one instance and split."""

import asyncio
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.harness import FLOAT32, running
from tests.support.image_cases import CASES
from tests.support.quantized import quantized_pair
from tests.support.stored_formats import FORMATS

REQUESTS = [case.messages for case in CASES[:3]]
DEQUANTIZED = ("nvfp4-pack-quantized", "gptq, ordered", "bitsandbytes nf4, nested", "fp8, blocks", "modelopt")
"""Formats whose products in float32 are those of the dequantized weights."""


def answered(folder: Path, topology: str) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(folder, topology, FLOAT32) as service:
            return await service.answers(REQUESTS)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "name", [DEQUANTIZED[0], *(pytest.param(one, marks=pytest.mark.slow) for one in DEQUANTIZED[1:])]
)
def test_tokens_are_those_of_the_dequantized_weights(tmp_path: Path, name: str) -> None:
    one = FORMATS[name]
    stored, dense = quantized_pair(make_checkpoint(tmp_path / "source"), tmp_path, one.section, one.encode)
    expected = answered(dense, "1EPD")
    assert len({token for tokens in expected for token in tokens}) > 5
    for topology in ("1EPD", "1E1P1D"):
        assert answered(stored, topology) == expected


@pytest.mark.parametrize("name", ["int-quantized", pytest.param("awq", marks=pytest.mark.slow)])
def test_kept_weights_give_the_same_tokens_in_each_topology(tmp_path: Path, name: str) -> None:
    one = FORMATS[name]
    stored, _ = quantized_pair(make_checkpoint(tmp_path / "source"), tmp_path, one.section, one.encode)
    assert answered(stored, "1E1P1D") == answered(stored, "1EPD")
