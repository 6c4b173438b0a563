"""Settings of how instances compute."""

import re
from dataclasses import dataclass

from triptych.config.cpu_set import CpuSet
from triptych.config.memory_size import MemorySize
from triptych.config.rank_sizes import RankSizes
from triptych.config.settings import Settings, setting
from triptych.control_groups import usable_cores
from triptych.errors import ConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = (*DTYPES, "int8")
QUANTIZATIONS = ("none", "int8", "int4")
ENCODER_QUANTIZATIONS = ("none", "int8")

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?", re.ASCII)


@dataclass(frozen=True)
class EngineConfig(Settings):
    """Compute, prefill and decode."""

    device: str = setting(
        "auto",
        "device that an instance computes on: cpu, cuda, cuda:N, or auto: cuda where there is a GPU, otherwise cpu; on "
        "Ray, auto is cpu",
        common=True,
    )
    dtype: str = setting(
        "auto",
        "dtype of weights and of products. On CPUs activations are fp32 between products: float16 multiplies fp16 "
        "weights in fp32, or with AMX to about 17 bits; bfloat16 multiplies weights and rounded activations in "
        "bfloat16 and adds in fp32; float32 is for exact comparison with a reference; auto is bfloat16 if the "
        "checkpoint is and the processor multiplies it faster (with AMX, or AMD's with AVX512-BF16), else float16. "
        "On GPUs activations have the dtype as well, and auto is the checkpoint's",
        choices=DTYPES,
        common=True,
    )
    quantization: str = setting(
        "none",
        "int8 or int4 (CPUs only): the decoder's weights in 8 bits, or in 4 and some layers in 8; activations "
        "are quantized dynamically to int8; encoders and the LM head stay in the format of --dtype auto",
        choices=QUANTIZATIONS,
        hint="; a checkpoint that is quantized needs no flag: its config says how",
        common=True,
    )
    encoder_quantization: str = setting(
        "none",
        "int8 (CPUs only): the encoders' linear layers in int8, activations quantized dynamically, with one scale per "
        "output and per token; their projections of patches and attention are as with --dtype alone",
        choices=ENCODER_QUANTIZATIONS,
        common=True,
    )
    tensor_parallel_size: RankSizes = setting(
        RankSizes(),
        "tensor-parallel processes of each instance with a decoder: a number for all roles, or one per role, as in "
        "P=2,D=1",
        parse=RankSizes.parse,
        also=("tp", "tp_size"),
        common=True,
    )
    threads: int = setting(
        0,
        "compute threads of one process; 0 divides the cores evenly, or those of the control group's CPU quota",
        ge=0,
        also=("t",),
        common=True,
    )
    cpus: CpuSet = setting(
        CpuSet(),
        "cores that the processes of this command are pinned to, such as 0-3,8; default: all available cores",
        parse=CpuSet.parse,
    )
    max_num_seqs: int = setting(
        32,
        "maximum requests that one language instance runs at a time",
        ge=1,
        gpu=128,
        also=("max_running_requests", "parallel", "np"),
        common=True,
    )
    max_num_batched_tokens: int = setting(
        512, "tokens in one step: decodes first, then prefill chunks", ge=1, gpu=8192, common=True
    )
    cuda_graphs: bool = setting(
        True, "on GPUs, run steps and encoders as CUDA graphs", off=("enforce_eager", "disable_cuda_graph")
    )
    max_model_len: int = setting(
        0,
        "maximum length of a request in tokens, prompt and answer; 0: the limit of model and KV cache",
        ge=0,
        also=("context_length",),
        common=True,
    )
    page_size: int = setting(16, "tokens in a page of the KV cache", ge=1, also=("block_size",))
    kv_cache_memory: MemorySize = setting(
        MemorySize(share=0.25),
        "KV cache memory: an amount per language instance (8GiB, 500MB), or a share of the memory that is free after "
        "loading (25%), divided among the instances of one command",
        parse=MemorySize.parse,
        gpu=MemorySize(share=0.7),
        also=("kv_cache_memory_bytes",),
        common=True,
    )
    kv_cache_tokens: int = setting(
        0,
        "capacity of one language instance's KV cache in tokens; 0: what fits in --kv-cache-memory",
        ge=0,
        also=("max_total_tokens",),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "format of keys and values in the KV cache: float16, bfloat16, float32, or int8 (CPUs only) with a scale per "
        "token and head, in about half the memory of float16; auto: float32 with --dtype float32, otherwise float16; "
        "on GPUs only auto, or the format of activations, which it stands for",
        choices=KV_CACHE_DTYPES,
        common=True,
    )
    enable_prefix_caching: bool = setting(
        True,
        "reuse KV cache pages for the common prefixes of prompts",
        off=("disable_radix_cache", "no_cache_prompt"),
    )
    state_snapshots: int = setting(
        16,
        "for models with recurrent state, such as Qwen3.5: how many requests' states the prefix cache keeps; a prompt "
        "reuses a prefix only where a state was kept",
        ge=0,
        internal=True,
    )
    state_snapshot_interval: int = setting(
        1024,
        "for models with recurrent state: tokens between two states that the prefix cache keeps, besides the one at a "
        "prompt's end",
        ge=1,
        internal=True,
    )
    receive_block_rows: int = setting(64, "embedding rows in a block of the receive pool", ge=1, internal=True)
    receive_blocks: int = setting(64, "blocks in the receive pool of one language instance", ge=1, internal=True)
    kv_receive_blocks: int = setting(
        1024,
        "blocks in the KV receive pool of one decode instance; a row is a token's keys or values in one layer",
        ge=1,
        internal=True,
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

    @property
    def num_state_snapshots(self) -> int:
        """How many snapshots of states there is room for, in a model with state."""
        return self.state_snapshots if self.enable_prefix_caching else 0

    def threads_per_process(self, num_processes: int) -> int:
        """Return ``--threads``, or an even share of the usable cores, at least one."""
        return self.threads or max(1, usable_cores() // num_processes)
