"""Differences between CPUs and GPUs: discovery, weight formats, KV cache dtypes, attention backends, memory."""

from collections import Counter
from collections.abc import Mapping

import torch

from triptych.checkpoint.safetensors_header import TensorInfo
from triptych.config import KV_CACHE_DTYPES, EngineConfig
from triptych.errors import ConfigError, StartError
from triptych.layers.attention.base import AttentionBackend
from triptych.layers.attention.compiled import paged_attention
from triptych.layers.attention.cpu import CpuAttention
from triptych.layers.block_weight import BlockType
from triptych.layers.delta_rule.base import DeltaRule
from triptych.layers.delta_rule.compiled import cpu_delta_rule
from triptych.layers.float_product import has_bf16
from triptych.layers.linear import CUDA_FORMATS, QUANTIZED_FORMATS, WEIGHT_FORMATS, PackedFormat, WeightFormat
from triptych.layers.parallel import rank_device
from triptych.layers.stored.registry import StoredFormats
from triptych.observe.machine import available_bytes, resident_bytes

_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_KV_DTYPES = {name: getattr(torch, name) for name in KV_CACHE_DTYPES if name != "auto"}
WHOLE = ("embed_tokens.weight", "lm_head.weight")
"""What the names end with of tensors that aren't linear layers', or that the LM head dequantizes."""


def find_device(name: str) -> torch.device:
    """Return the device of the setting ``EngineConfig.device``, a GPU always with its index. Raises StartError if it
    doesn't exist."""
    count = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if not count:
        built = torch.version.cuda or "no CUDA"
        raise StartError(f"--device {name}: PyTorch {torch.__version__} (built for {built}) finds no GPU")
    device = torch.device("cuda" if name == "auto" else name)
    index = device.index or 0
    if index >= count:
        raise StartError(f"--device {name}: there are {count} GPUs, so the last one is cuda:{count - 1}")
    return torch.device("cuda", index)


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's, on which Triton launches and CUDA acts where no device is named. Convolutions in
    float32 aren't rounded to TF32 in this process, as matrix products aren't by default."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False


def check_ranks(device: torch.device, size: int) -> None:
    """Raise StartError if there are too few GPUs for ``size`` ranks, the first of them on ``device``."""
    if device.type == "cuda" and (last := rank_device(device, size - 1)).index >= (count := torch.cuda.device_count()):
        raise StartError(
            f"--tensor-parallel-size {size} on {device} takes the GPUs {device} to {last}, a rank each, but there "
            f"are {count} GPUs"
        )


def weight_format(
    engine: EngineConfig,
    device: torch.device,
    tensors: Mapping[str, TensorInfo],
    stored: StoredFormats | None = None,
) -> WeightFormat:
    """Return the decoder's weight format for the settings, a device and a checkpoint's tensors, whose quantized weights
    are ``stored`` like that.

    Those that can stay as they are do, on CPUs, and so do those of GGUF files unless a dtype or a quantization is
    chosen; others are dequantized when they are loaded. Raises ConfigError for a format that the device or the
    checkpoint doesn't support.
    """
    plain, quantization = _dtype_format(engine.dtype, device, tensors), engine.quantization
    chosen = _quantized("--quantization", quantization, plain, device)
    is_free = (engine.dtype, quantization) == ("auto", "none")
    if is_free and isinstance(chosen, PackedFormat) and (types := block_types(tensors)):
        return chosen.keeping_blocks(types)
    kept = () if stored is None else stored.kept_as
    if stored is None or not kept:
        return chosen
    name = " and ".join(kept)
    if quantization not in ("none", *kept) and not stored.has_dequantized:
        raise ConfigError(f"--quantization {quantization}: the checkpoint's weights are quantized already, to {name}")
    return chosen.keeping(name) if isinstance(chosen, PackedFormat) else chosen


def block_types(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the types of a GGUF file's linear layers that CPUs keep as they are."""
    layers = [info for key, info in tensors.items() if info.entry is not None and not key.endswith(WHOLE)]
    found = {info.dtype for info in layers if len(info.shape) == 2}
    return [name for name in BlockType.__members__ if name in found]


def tower_format(engine: EngineConfig, device: torch.device, tensors: Mapping[str, TensorInfo]) -> WeightFormat:
    """Return the towers' weight format; arguments and errors as in ``weight_format``."""
    plain = _dtype_format(engine.dtype, device, tensors)
    return _quantized("--encoder-quantization", engine.encoder_quantization, plain, device)


def _dtype_format(dtype: str, device: torch.device, tensors: Mapping[str, TensorInfo]) -> WeightFormat:
    """Return the format of ``--dtype``.

    "auto" is the checkpoint's dtype on GPUs. On CPUs it is bfloat16 on processors that multiply it faster than float32,
    for a checkpoint in bfloat16, and float16 on others.
    """
    if device.type != "cpu":
        return CUDA_FORMATS[dtype if dtype != "auto" else stored_dtype(tensors)]
    if dtype == "auto":
        dtype = "bfloat16" if _most_common(tensors) == "BF16" and has_bf16() else "float16"
    return WEIGHT_FORMATS[dtype]


def _quantized(flag: str, name: str, plain: WeightFormat, device: torch.device) -> WeightFormat:
    """Return the quantized format ``name`` beside ``plain``; for "none", ``plain`` itself."""
    if name == "none":
        return plain
    if not isinstance(plain, PackedFormat):
        raise ConfigError(f"{flag} {name} is for CPUs only; this instance runs on {device}")
    return QUANTIZED_FORMATS[name].beside(plain)


def kv_dtype(engine: EngineConfig, device: torch.device, weights: WeightFormat) -> torch.dtype:
    """Return the dtype of the KV cache for the settings and a device. Raises ConfigError for an unsupported one.

    The default on CPUs is float32 for weights in float32 and float16 for others, and on GPUs that of activations.
    """
    if device.type == "cpu":
        if engine.kv_cache_dtype != "auto":
            return _KV_DTYPES[engine.kv_cache_dtype]
        return torch.float32 if engine.dtype == "float32" else torch.float16
    named = engine.kv_cache_dtype
    if named != "auto" and _KV_DTYPES[named] != weights.activations:
        raise ConfigError(
            f"--kv-cache-dtype {named}: on {device} the KV cache has the dtype of activations, "
            f"{dtype_name(weights.activations)}"
        )
    return weights.activations


def widens_kv(activations: torch.dtype, kv: torch.dtype, device: torch.device) -> bool:
    """Return whether attention first converts keys and values to the activations' dtype. It does on CPUs if the dtypes
    differ and the compiled kernel is missing or doesn't support them."""
    if kv == activations or device.type != "cpu":
        return False
    kernel = paged_attention()
    return activations != torch.float32 or kernel is None or not kernel.takes(kv)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name as in the settings."""
    return str(dtype).removeprefix("torch.")


def stored_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the dtype of most of a checkpoint's bytes. Raises ConfigError for one that isn't supported."""
    if (most := _most_common(tensors)) not in _STORED:
        raise ConfigError(
            f"the checkpoint holds {most} tensors: --dtype auto supports {', '.join(_STORED)}; set another dtype"
        )
    return _STORED[most]


def _most_common(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the dtype of most of a checkpoint's bytes, as named in its files, but for quantized weights; empty if it
    has no others."""
    num_bytes = Counter[str]()
    for info in tensors.values():
        if not info.dtype.startswith(("I", "U", "F8")):
            num_bytes[info.dtype] += info.num_bytes
    return max(num_bytes, key=num_bytes.__getitem__, default="")


def attention_for(device: torch.device, in_bf16: bool = False) -> AttentionBackend:
    """Return the attention backend of a device; ``in_bf16`` is as in ``PagedAttention``. Raises ConfigError for a
    GPU without Triton."""
    if device.type != "cuda":
        return CpuAttention(paged_attention(in_bf16))
    try:
        from triptych.layers.attention.triton_backend import TritonAttention
    except ImportError as error:
        raise ConfigError(f"attention on {device} needs Triton: {error}") from None
    return TritonAttention(torch.cuda.get_device_properties(device).multi_processor_count)


def delta_rule_for(device: torch.device) -> DeltaRule:
    """Return the backend of the gated delta rule for a device. Raises ConfigError for a GPU without Triton."""
    if device.type != "cuda":
        return cpu_delta_rule()
    try:
        from triptych.layers.delta_rule.triton_backend import TritonDeltaRule
    except ImportError as error:
        raise ConfigError(f"the gated delta rule on {device} needs Triton: {error}") from None
    return TritonDeltaRule()


def free_bytes(device: torch.device) -> int:
    """Return the available memory of a device, in bytes."""
    if device.type == "cpu":
        return available_bytes()
    torch.cuda.empty_cache()  # memory freed after loading counts as available
    return torch.cuda.mem_get_info(device)[0]


def used_bytes(device: torch.device) -> int:
    """Return the memory of a device that this process uses, in bytes."""
    return resident_bytes() if device.type == "cpu" else torch.cuda.memory_reserved(device)
