"""MiniCPM-V 2.6 and 4.5, which transformers lacks: tiny checkpoints, and an implementation of its own written from the
published description. It shares no code with ``triptych``, and takes the language models from transformers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, SiglipVisionConfig, SiglipVisionModel

from tests.support.random_checkpoint import Sizes, random_weight, write_json, write_tokenizer
from tests.support.tiny import IDS, LLAMA_TEXT, SLICE_IDS, TEXT, VOCABULARY

OLD_IDS = SLICE_IDS | {"<unk>": len(SLICE_IDS) + 256}
WIDTH = 256
"""Two heads of the resampler."""
LANGUAGE_MODELS: dict[float, str] = {2.6: "Qwen2", 4.5: "Qwen3"}
TEXTS: dict[float, dict[str, Any]] = {2.6: TEXT, 4.5: LLAMA_TEXT | {"head_dim": 32, "attention_bias": False}}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 4}
PROCESSOR: dict[str, Any] = {"max_slice_nums": 5, "scale_resolution": 48, "patch_size": 4, "use_image_id": True}
PROCESSOR |= {"image_feature_size": 6, "norm_mean": [0.5, 0.4, 0.6], "norm_std": [0.5, 0.6, 0.4], "version": 2.6}
PROCESSOR |= {"image_processor_type": "MiniCPMVImageProcessor"}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Clip:
    """A video's sampled frames. Those of a group are shown together."""

    groups: list[list[Image.Image]]
    times: list[list[int]]
    """In tenths of a second; empty if the model doesn't see them."""
    slices: int
    """Of a frame, at most."""


Shown = Image.Image | Clip


def config_of(version: float) -> dict[str, Any]:
    """``config.json`` as published: the language model's settings at the top level."""
    text = TEXTS[version] | {"vocab_size": len(OLD_IDS) + 256, "hidden_size": WIDTH, "num_hidden_layers": 2}
    own = {"model_type": "minicpmv", "architectures": ["MiniCPMV"], "version": version, "tie_word_embeddings": False}
    own |= {"query_num": 6, "slice_mode": True, "drop_vision_last_layer": version == 2.6, "use_image_id": True}
    vision = VISION | {"model_type": "siglip" if version == 2.6 else "siglip_vision_model"}
    return text | own | {"rope_theta": 1e6, "vision_config": vision}


def make_minicpm(folder: Path, version: float, seed: int = 4) -> Path:
    """Writes a checkpoint folder and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(version)
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", PROCESSOR)
    write_json(folder / "generation_config.json", {"eos_token_id": [IDS["<|im_end|>"], IDS["<|endoftext|>"]]})
    write_tokenizer(folder, VOCABULARY, OLD_IDS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    hidden, queries = VISION["hidden_size"], config["query_num"]
    shapes = {f"llm.{name}": tuple(one.shape) for name, one in _language_model(config).state_dict().items()}
    shapes |= {f"vpm.{name}": tuple(one.shape) for name, one in _tower(config, 3).state_dict().items()}
    norms = {
        f"resampler.{name}.{kind}": (WIDTH,) for name in ("ln_q", "ln_kv", "ln_post") for kind in ("weight", "bias")
    }
    shapes |= norms | {"resampler.query": (queries, WIDTH), "resampler.proj": (WIDTH, WIDTH)}
    shapes |= {"resampler.kv_proj.weight": (WIDTH, hidden), "resampler.attn.in_proj_weight": (3 * WIDTH, WIDTH)}
    shapes |= {"resampler.attn.in_proj_bias": (3 * WIDTH,), "resampler.attn.out_proj.weight": (WIDTH, WIDTH)}
    shapes |= {"resampler.attn.out_proj.bias": (WIDTH,)}
    weights = {name: random_weight(name, shape, Sizes(), seed, torch.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _language_model(config: dict[str, Any]) -> PreTrainedModel:
    prefix = LANGUAGE_MODELS[config["version"]]
    settings = {name: it for name, it in config.items() if name not in ("model_type", "architectures", "vision_config")}
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(
        getattr(transformers, f"{prefix}Config")(**settings)
    )
    return model.float().eval()


def _tower(config: dict[str, Any], layers: int) -> Any:
    settings = {**config["vision_config"], "vision_use_head": False, "num_hidden_layers": layers}
    settings.pop("model_type")
    tower: Any = SiglipVisionModel(SiglipVisionConfig(**settings))
    return getattr(tower, "vision_model", tower).float().eval()


def grid_of(width: int, height: int, most: int, scale: int) -> tuple[int, int] | None:
    """Columns and rows, as the published processor finds them: the first of the best, one column first."""
    wanted = min(math.ceil(width * height / (scale * scale)), most)
    if wanted <= 1:
        return None
    grids = [
        (m, n // m) for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= most for m in range(1, n + 1) if n % m == 0
    ]
    errors = [abs(math.log(width / height) - math.log(columns / rows)) for columns, rows in grids]
    return grids[errors.index(min(errors))] if grids else (1, 1)


def _divided(length: float, by: int) -> int:
    return max(round(length / by) * by, by)


def _best_size(width: float, height: float, scale: int, patch: int, upscale: bool) -> tuple[int, int]:
    if width * height > scale * scale or upscale:
        ratio = width / height
        height = int(scale / math.sqrt(ratio))
        width = int(height * ratio)
    return _divided(width, patch), _divided(height, patch)


def pieces_of(image: Image.Image, processor: dict[str, Any]) -> list[Image.Image]:
    """The whole, and the slices line by line."""
    scale, patch = processor["scale_resolution"], processor["patch_size"]
    grid = grid_of(*image.size, processor["max_slice_nums"], scale)
    if grid is None:
        return [image.resize(_best_size(*image.size, scale, patch, True), Image.Resampling.BICUBIC)]
    columns, rows = grid
    whole = image.resize(_best_size(*image.size, scale, patch, False), Image.Resampling.BICUBIC)
    across, down = _divided(image.width, columns) / columns, _divided(image.height, rows) / rows
    width, height = _best_size(across, down, scale, patch, True)
    large = image.resize((width * columns, height * rows), Image.Resampling.BICUBIC)
    boxes = [(x * width, y * height, (x + 1) * width, (y + 1) * height) for y in range(rows) for x in range(columns)]
    return [whole, *map(large.crop, boxes)]


def pixels_of(piece: Image.Image, processor: dict[str, Any]) -> NDArray[np.float32]:
    """[3, height, width]"""
    values = np.asarray(piece, np.float32) / np.float32(255)
    mean, std = (np.array(processor[name], np.float32) for name in ("norm_mean", "norm_std"))
    pixels: NDArray[np.float32] = ((values - mean) / std).transpose(2, 0, 1)
    return pixels


class MiniCPMPixels:
    """``pixels_of`` an image's pieces as an image processor, one after the other."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def __call__(self, images: Sequence[Sequence[Image.Image]], return_tensors: str = "pt") -> dict[str, Any]:
        pieces = [piece for image in images[0] for piece in pieces_of(image, self.settings)]
        return {"pixel_values": np.concatenate([pixels_of(piece, self.settings).ravel() for piece in pieces])}


def text_of(image: Image.Image, number: int, processor: dict[str, Any], queries: int) -> str:
    """What stands for an image in the prompt."""
    grid, unknown = grid_of(*image.size, processor["max_slice_nums"], processor["scale_resolution"]), "<unk>" * queries
    text = f"<image_id>{number}</image_id><image>{unknown}</image>"
    if grid is None:
        return text
    return text + "\n".join(f"<slice>{unknown}</slice>" * grid[0] for _ in range(grid[1]))


def text_of_video(clip: Clip, size: tuple[int, int], processor: dict[str, Any], queries: int) -> str:
    """What stands for a video in the prompt: a line for each group, as of an image without a number."""
    settings = processor | {"max_slice_nums": clip.slices}
    line = text_of(Image.new("1", size), 0, settings, queries).removeprefix("<image_id>0</image_id>")
    return "\n".join([line] * len(clip.groups))


def _evenly(numbers: Sequence[int], count: int) -> list[int]:
    gap = len(numbers) / count
    return [numbers[int(i * gap + gap / 2)] for i in range(count)]


def grouped(total: int, rate: float, version: float, fps: float = 0) -> tuple[list[list[int]], list[list[int]]]:
    """The numbers and the times of a video's frames, in groups, as the descriptions of both versions sample them."""
    if version == 2.6:
        found = list(range(0, total, round(rate / (fps or 1))))
        found = _evenly(found, 64) if len(found) > 64 else found
        return [[number] for number in found], []
    wanted, seconds = fps or 3, total / rate
    if wanted * int(seconds) <= 180:
        packing, count = 1, round(min(wanted, round(rate)) * min(180, seconds))
    else:
        packing = math.ceil(seconds * wanted / 180)
        packing, count = (packing, round(seconds * wanted)) if packing <= 3 else (3, 540)
    found = _evenly(range(total), count)
    scale = np.arange(0, seconds, 0.1)
    nearest = [scale[np.abs(scale - number / rate).argmin()] for number in found]
    times = (np.array(nearest) / 0.1).astype(np.int32).tolist()
    first, second = ([some[i : i + packing] for i in range(0, count, packing)] for some in (found, times))
    return first, second


def sines(size: int, places: NDArray[np.float32]) -> NDArray[np.float32]:
    """[height, width] → [height, width, size]"""
    omega = 1.0 / 10000 ** (np.arange(size // 2, dtype=np.float32) / (size / 2.0))
    angles: NDArray[np.float32] = places[..., None] * omega.astype(np.float32)
    found: NDArray[np.float32] = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    return found


class MiniCPMReference:
    """A checkpoint folder's model, piece by piece."""

    def __init__(self, folder: Path, config: dict[str, Any], processor: dict[str, Any] = PROCESSOR) -> None:
        self.config, self.processor = config, processor
        self.weights = load_file(folder / "model.safetensors")
        layers = config["vision_config"]["num_hidden_layers"]
        self.tower: Any = _tower(config, layers)
        self.tower.load_state_dict(self._part("vpm."))
        self.tower.encoder.layers = self.tower.encoder.layers[: layers - config["drop_vision_last_layer"]]
        self.model: Any = _language_model(config)
        self.model.load_state_dict(self._part("llm."))
        self.attention = nn.MultiheadAttention(WIDTH, WIDTH // 128).eval()
        self.attention.load_state_dict(self._part("resampler.attn."))

    def _part(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): it for name, it in self.weights.items() if name.startswith(prefix)}

    @torch.inference_mode()
    def rows(self, shown: Shown) -> Tensor:
        """[pieces * queries, width]"""
        if isinstance(shown, Image.Image):
            return torch.cat([self._piece_rows([piece], []) for piece in pieces_of(shown, self.processor)])
        settings, found = self.processor | {"max_slice_nums": shown.slices}, []
        for number, frames in enumerate(shown.groups):
            times = shown.times[number] if shown.times else []
            cut = [pieces_of(frame, settings) for frame in frames]
            found += [self._piece_rows(pieces, times) for pieces in zip(*cut, strict=True)]
        return torch.cat(found)

    def _piece_rows(self, pieces: Sequence[Image.Image], times: Sequence[int]) -> Tensor:
        """Of one piece, or of the same piece of several frames."""
        keys, values = [], []
        for number, piece in enumerate(pieces):
            key, value = self._seen(torch.from_numpy(pixels_of(piece, self.processor)))
            if times:
                key = key + torch.from_numpy(sines(WIDTH, np.array(times[number], np.float32)))
            keys.append(key)
            values.append(value)
        query = self._norm("ln_q", self.weights["resampler.query"])
        found = self.attention(query, torch.cat(keys), torch.cat(values))[0]
        return self._norm("ln_post", found) @ self.weights["resampler.proj"]

    def _seen(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Of what keys and values are made: [patches, width]"""
        embeddings, size = self.tower.embeddings, self.config["vision_config"]["patch_size"]
        rows, columns = pixels.shape[1] // size, pixels.shape[2] // size
        patches = embeddings.patch_embedding(pixels[None]).flatten(2).transpose(1, 2)
        hidden = patches + embeddings.position_embedding(self.places(rows, columns))
        states = self.tower.post_layernorm(self.tower.encoder(inputs_embeds=hidden).last_hidden_state)[0]
        seen = self._norm("ln_kv", F.linear(states, self.weights["resampler.kv_proj.weight"]))
        across, down = np.meshgrid(np.arange(columns, dtype=np.float32), np.arange(rows, dtype=np.float32))
        positions = np.concatenate([sines(WIDTH // 2, across), sines(WIDTH // 2, down)], axis=-1).reshape(-1, WIDTH)
        return seen + torch.from_numpy(positions), seen

    def places(self, rows: int, columns: int) -> Tensor:
        """As the published tower puts patches into buckets: of counts that are integer tensors."""
        side = self.config["vision_config"]["image_size"] // self.config["vision_config"]["patch_size"]
        return places(torch.tensor(rows, dtype=torch.int32), torch.tensor(columns, dtype=torch.int32), side)

    def _norm(self, name: str, values: Tensor) -> Tensor:
        weight, bias = (self.weights[f"resampler.{name}.{kind}"] for kind in ("weight", "bias"))
        return F.layer_norm(values, values.shape[-1:], weight, bias, 1e-6)

    def embedded(self, tokens: Sequence[int], images: Sequence[Shown]) -> Tensor:
        """[1, tokens, width]: rows in place of each unknown token."""
        ids = torch.tensor([tokens])
        found: Tensor = self.model.get_input_embeddings()(ids)
        if images:
            found[ids == OLD_IDS["<unk>"]] = torch.cat([self.rows(image) for image in images])
        return found

    @torch.inference_mode()
    def generate(self, tokens: Sequence[int], images: Sequence[Shown]) -> list[int]:
        """32 greedy tokens, without regard to end-of-text tokens."""
        output = self.model.generate(
            inputs_embeds=self.embedded(tokens, images),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0].tolist()

    @torch.inference_mode()
    def first_logits(self, tokens: Sequence[int], images: Sequence[Shown]) -> Tensor:
        """Of the first generated token: float32 [vocab]."""
        logits: Tensor = self.model(inputs_embeds=self.embedded(tokens, images)).logits[0, -1]
        return logits


def places(rows: Tensor, columns: Tensor, side: int) -> Tensor:
    """Rows of the table of positions: int64 [rows * columns]."""
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    down, across = (
        torch.bucketize(torch.arange(0, 1 - 1e-6, (1 / count).item()), boundaries, right=True)
        for count in (rows, columns)
    )
    return (down[:, None] * side + across).flatten()
