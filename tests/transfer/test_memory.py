import gc
import os
from pathlib import Path

from triptych.transfer.memory import SHARED_NAME, TOKEN_BYTES, PlainMemory, SharedMemory


def maps() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count(SHARED_NAME)


def test_plain_memory_is_zeros() -> None:
    assert PlainMemory(5).bytes.tolist() == [0] * 5


def test_shared_memory_has_no_name_and_is_gone_when_closed() -> None:
    named, mapped, files = sorted(os.listdir("/dev/shm")), maps(), len(os.listdir("/proc/self/fd"))
    memory = SharedMemory(10_000)
    assert (memory.bytes.nbytes, memory.bytes.any()) == (10_000, False)
    assert os.fstat(memory.file).st_size == 10_000 + TOKEN_BYTES
    assert sorted(os.listdir("/dev/shm")) == named
    assert maps() == mapped + 1
    memory.close()
    memory.close()
    memory.bytes[:] = 1  # existing mappings stay valid
    del memory
    assert (maps(), len(os.listdir("/proc/self/fd"))) == (mapped, files)


def test_no_two_memories_have_one_token() -> None:
    memories = [SharedMemory(1) for _ in range(3)]
    assert len({memory.token for memory in memories}) == 3
    for memory in memories:
        memory.close()
