"""Settings of how instances compute."""

import os
import re
from dataclasses import dataclass

from triptych.config.cpu_set import CpuSet
from triptych.config.memory_size import MemorySize
from triptych.config.rank_sizes import RankSizes
from triptych.config.settings import Settings, setting
from triptych.errors import ConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = ("none", "int8")

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?", re.ASCII)


@dataclass(frozen=True)
class EngineConfig(Settings):
    """How instances compute, prefill and decode."""

    device: str = setting(
        "auto",
        "device that an instance computes on: cpu, cuda, cuda:N, or auto: cuda where there is a GPU, otherwise cpu",
    )
    dtype: str = setting(
        "auto",
        "float16: weights in fp16, packed, but activations and sums in fp32 (on GPUs all in fp16); bfloat16, or "
        "float32 for exact comparison with a reference: weights and activations; auto: float16, whatever the "
        "checkpoint has (on GPUs: what it has)",
        choices=DTYPES,
    )
    quantization: str = setting(
        "none",
        "int8, on CPUs: the decoder's weights in int8, activations rounded as they come; its head stays in fp16",
        choices=QUANTIZATIONS,
    )
    tensor_parallel_size: RankSizes = setting(
        RankSizes(),
        "processes on this machine that share the decoder of a language instance, its weights and its KV cache: a "
        "number for all, or one for each role, as in P=2,D=1",
        parse=RankSizes.parse,
    )
    threads: int = setting(0, "threads that one process computes with; 0 shares the cores out evenly", ge=0)
    cpus: CpuSet = setting(
        CpuSet(),
        "cores that the processes of this command run on, such as 0-3,8; all that it may use unless given",
        parse=CpuSet.parse,
    )
    max_num_seqs: int = setting(32, "requests that one language instance works on at a time", ge=1)
    max_num_batched_tokens: int = setting(512, "tokens in one step: decodes first, then prefill chunks", ge=1)
    cuda_graphs: bool = setting(True, "on GPUs, run steps that only decode as CUDA graphs, recorded at the start")
    max_model_len: int = setting(0, "longest request in tokens; 0 takes what model and KV cache allow", ge=0)
    page_size: int = setting(16, "tokens in a page of the KV cache", ge=1, also=("block_size",))
    kv_cache_memory: MemorySize = setting(
        MemorySize(share=0.25),
        "memory for the KV cache: an amount for each language instance (8GiB, 500MB), or the share of the memory that "
        "is free once the weights are loaded (25%), divided among the instances of one command",
        parse=MemorySize.parse,
    )
    kv_cache_tokens: int = setting(
        0,
        "tokens that the KV cache of one language instance holds; 0 takes what --kv-cache-memory has room for",
        ge=0,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "format of keys and values in the KV cache: float16, bfloat16 or float32; auto: that of --dtype, and float16 "
        "with --dtype auto; on GPUs only auto, or the format of activations, which it stands for",
        choices=DTYPES,
    )
    enable_prefix_caching: bool = setting(True, "reuse KV cache pages for the common prefixes of prompts")
    receive_block_rows: int = setting(64, "embedding rows in a block of the receive pool", ge=1)
    receive_blocks: int = setting(64, "blocks in the receive pool of one language instance", ge=1)
    kv_receive_blocks: int = setting(
        1024,
        "blocks in the receive pool of one decode instance, whose rows are a token's keys or values in a layer",
        ge=1,
    )

    def check_together(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"--device {self.device} is not one of auto, cpu, cuda, cuda:N")
        if self.quantization != "none" and self.dtype != "auto":
            raise ConfigError(f"--quantization {self.quantization} and --dtype {self.dtype} exclude each other")
        if self.kv_cache_tokens and self.max_model_len > self.kv_cache_tokens:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} doesn't fit in --kv-cache-tokens {self.kv_cache_tokens}"
            )

    def threads_per_process(self, num_processes: int) -> int:
        """Return ``--threads``, or an even share of the cores that this process may use, at least one."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // num_processes)
