import mmap
import re
from pathlib import Path

import pytest
import torch

from triptych.layers.huge_pages import LINE, HugePages

MAPPING = re.compile("([0-9a-f]+)-([0-9a-f]+) ")


def test_tensors_share_a_chunk_until_it_is_full() -> None:
    pages = HugePages(chunk=4096)
    first, second = (pages.empty((10, 20), torch.int8) for _ in range(2))
    assert second.data_ptr() - first.data_ptr() == 256  # the next line after 200 bytes
    first.fill_(1)
    assert not second.any()
    third = pages.empty((1000,), torch.float32)
    assert third.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert pages.empty((3,), torch.float16).data_ptr() % LINE == 0


def test_a_large_tensor_takes_a_chunk_of_its_own() -> None:
    pages = HugePages(chunk=4096)
    small = pages.empty((64,), torch.int8)
    large = pages.empty((2, 4096), torch.float32)
    assert large.untyped_storage().nbytes() == 2**15
    assert pages.empty((64,), torch.int8).data_ptr() == small.data_ptr() + 64
    assert pages.empty((0, 7), torch.float32).shape == (0, 7)


def flags_at(address: int) -> list[str] | None:
    """Return the flags of the mapping with this address, if there is one."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := MAPPING.match(line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()
    return None


def test_huge_pages_are_asked_for_and_returned() -> None:
    pages = HugePages()
    tensors = [pages.empty((2**25,), torch.int8) for _ in range(3)]
    address = tensors[0].data_ptr()
    assert "hg" in (flags_at(address) or [])
    del tensors[0]
    assert flags_at(address)
    del tensors[0]
    assert flags_at(address) is None


def test_without_huge_pages_memory_is_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refused)
    assert HugePages().empty((3,), torch.float32).tolist() == [0, 0, 0]
