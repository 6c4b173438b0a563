"""CogVLM2, which transformers doesn't have: written from its report (arXiv:2408.16500) and the description of its
published code, in PyTorch alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
THETA = 500_000.0


class EvaLayer(nn.Module):
    """Norms follow attention and MLP."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        width, inner, eps = vision["hidden_size"], vision["intermediate_size"], vision["layer_norm_eps"]
        self.heads = vision["num_heads"]
        self.attention = nn.ModuleDict(
            {"query_key_value": nn.Linear(width, 3 * width), "dense": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """[images, states, width]"""
        qkv = self.attention["query_key_value"](hidden).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = (one.transpose(1, 2) for one in qkv.unbind(2))
        scores = queries @ keys.transpose(2, 3) / queries.shape[-1] ** 0.5
        attended = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        hidden = hidden + self.input_layernorm(self.attention["dense"](attended))
        finished = self.mlp["fc2"](F.gelu(self.mlp["fc1"](hidden)))
        output: Tensor = hidden + self.post_attention_layernorm(finished)
        return output


class Embedding(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        width, patch = vision["hidden_size"], vision["patch_size"]
        self.proj = nn.Conv2d(3, width, patch, patch)
        self.cls_embedding = nn.Parameter(torch.zeros(1, width))
        self.position_embedding = nn.Embedding(vision["num_positions"], width)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.proj(pixels).flatten(2).transpose(1, 2)
        first = self.cls_embedding.expand(len(pixels), 1, -1)
        return torch.cat((first, patches), 1) + self.position_embedding.weight


class Glu(nn.Module):
    def __init__(self, inputs: int, width: int, inner: int) -> None:
        super().__init__()
        self.linear_proj = nn.Linear(inputs, width, bias=False)
        self.norm1 = nn.LayerNorm(width)
        self.dense_h_to_4h, self.gate_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.dense_4h_to_h = nn.Linear(inner, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        hidden = F.gelu(self.norm1(self.linear_proj(features)))
        output: Tensor = self.dense_4h_to_h(F.silu(self.gate_proj(hidden)) * self.dense_h_to_4h(hidden))
        return output


class Vision(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        vision, width = config["vision_config"], config["hidden_size"]
        self.patch_embedding = Embedding(vision)
        layers = nn.ModuleList(EvaLayer(vision) for _ in range(vision["num_hidden_layers"]))
        self.transformer: Any = nn.ModuleDict({"layers": layers})
        self.conv = nn.Conv2d(vision["hidden_size"], vision["hidden_size"], 2, 2)
        self.linear_proj = Glu(vision["hidden_size"], width, config["intermediate_size"])
        self.boi, self.eoi = (nn.Parameter(torch.zeros(1, 1, width)) for _ in range(2))

    def forward(self, pixels: Tensor) -> Tensor:
        """[images, 3, height, width] → [images, rows, hidden]"""
        hidden = self.patch_embedding(pixels)
        for layer in self.transformer["layers"]:
            hidden = layer(hidden)
        side = round((hidden.shape[1] - 1) ** 0.5)
        square = hidden[:, 1:].transpose(1, 2).unflatten(2, (side, side))
        rows = self.linear_proj(self.conv(square).flatten(2).transpose(1, 2))
        around = (one.expand(len(rows), 1, -1) for one in (self.boi, self.eoi))
        first, last = around
        return torch.cat((first, rows, last), 1)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class Layer(nn.Module):
    """A decoder layer. Both experts compute all tokens; each token takes what its own says."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_multi_query_heads"]
        sizes = width + 2 * self.kv_heads * (width // self.heads)
        self.self_attn = nn.ModuleDict()
        self.mlp = nn.ModuleDict()
        for expert in ("language", "vision"):
            self.self_attn[f"{expert}_expert_query_key_value"] = nn.Linear(width, sizes, bias=expert == "vision")
            self.self_attn[f"{expert}_expert_dense"] = nn.Linear(width, width, bias=False)
            self.mlp[f"{expert}_mlp"] = Mlp(width, config["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)

    def forward(self, hidden: Tensor, is_seen: Tensor, positions: Tensor, past: list[Tensor]) -> Tensor:
        """``hidden`` [tokens, width]; ``is_seen``, bool [tokens, 1]: of the visual expert. ``past`` has the keys and
        values of earlier tokens, and is replaced by those of all."""

        def product(name: str, inputs: Tensor) -> Tensor:
            modules = (self.self_attn[f"{expert}_expert_{name}"] for expert in ("vision", "language"))
            seen, other = (module(inputs) for module in modules)
            return torch.where(is_seen, seen, other)

        head = hidden.shape[1] // self.heads
        qkv = product("query_key_value", self.input_layernorm(hidden)).unflatten(1, (-1, head)).transpose(0, 1)
        queries, keys, values = qkv.split([self.heads, self.kv_heads, self.kv_heads])
        angles = torch.outer(positions, THETA ** -(torch.arange(0, head, 2) / head))
        turn = torch.cat((angles, angles), 1).to(hidden.dtype)
        queries, keys = (
            one * turn.cos() + torch.cat((-one[..., head // 2 :], one[..., : head // 2]), -1) * turn.sin()
            for one in (queries, keys)
        )
        if past:
            keys, values = (torch.cat(pair, 1) for pair in zip(past, (keys, values), strict=True))
        past[:] = [keys, values]
        keys, values = (one.repeat_interleave(self.heads // self.kv_heads, 0) for one in (keys, values))
        mask = torch.full((len(hidden), keys.shape[1]), -torch.inf).triu(1 + keys.shape[1] - len(hidden))
        attended = ((queries @ keys.transpose(1, 2) / head**0.5 + mask).softmax(-1) @ values).transpose(0, 1).flatten(1)
        hidden = hidden + product("dense", attended)
        normed = self.post_attention_layernorm(hidden)
        return hidden + torch.where(is_seen, self.mlp["vision_mlp"](normed), self.mlp["language_mlp"](normed))


def positions_of(is_image: Sequence[bool]) -> list[int]:
    """Rope positions: of an image's tokens all but the first and the last have the same."""
    found, position = list[int](), -1
    for number, image in enumerate(is_image):
        before, after = number > 0 and is_image[number - 1], number + 1 < len(is_image) and is_image[number + 1]
        within = image and before and after
        follows = within and number > 1 and is_image[number - 2]  # the token before is within the image, too
        position += not follows
        found.append(position)
    return found


class CogVLM2(nn.Module):
    """Named as the published files' tensors."""

    config_class = dict

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=config["model_type"], image_token_id=config["pad_token_id"])
        width = config["hidden_size"]
        self.model: Any = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config["vocab_size"], width),
                "layers": nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"])),
                "norm": Norm(width, config["rms_norm_eps"]),
                "vision": Vision(config),
            }
        )
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)

    @classmethod
    def from_pretrained(cls, folder: Path, dtype: torch.dtype) -> "CogVLM2":
        model = cls(json.loads((folder / "config.json").read_text())).to(dtype)
        weights = load_file(folder / "model.safetensors")
        model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()})
        return model

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """Rows [images, rows, hidden]."""
        rows: Tensor = self.model["vision"](pixel_values)
        return rows

    def _rows(self, input_ids: Tensor, pixel_values: Tensor | None) -> tuple[Tensor, Tensor]:
        """The prompt's embeddings, and which of its tokens are an image's."""
        if pixel_values is None:
            return self.model["embed_tokens"](input_ids), torch.zeros_like(input_ids, dtype=torch.bool)
        is_image, embedded = input_ids == self.config.image_token_id, self.model["embed_tokens"](input_ids)
        embedded[is_image] = self.get_image_features(pixel_values).flatten(0, 1)
        return embedded, is_image

    def _logits(self, embedded: Tensor, is_image: Tensor, past: list[list[Tensor]]) -> Tensor:
        """Logits of new tokens, [tokens, vocabulary]. ``is_image`` has earlier tokens, too, as ``past`` of each layer
        does."""
        new = len(embedded)
        positions = torch.tensor(positions_of(is_image.tolist()), dtype=torch.float32)[-new:]
        is_seen = (is_image & torch.cat((is_image[1:], torch.tensor([False]))))[-new:]
        hidden = embedded
        for layer, kept in zip(self.model["layers"], past, strict=True):
            hidden = layer(hidden, is_seen[:, None], positions, kept)
        logits: Tensor = self.lm_head(self.model["norm"](hidden))
        return logits

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor | None = None) -> Any:
        past: list[list[Tensor]] = [[] for _ in self.model["layers"]]
        return SimpleNamespace(logits=self._logits(*self._rows(input_ids[0], pixel_values), past)[None])

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor | None = None,
        *,
        max_new_tokens: int,
        **settings: Any,
    ) -> Tensor:
        """Greedy tokens after the prompt: [1, tokens]."""
        embedded, is_image = self._rows(input_ids[0], pixel_values)
        past: list[list[Tensor]] = [[] for _ in self.model["layers"]]
        tokens = input_ids[0].tolist()
        for _ in range(max_new_tokens):
            token = self._logits(embedded, is_image, past)[-1].argmax()
            tokens.append(int(token))
            embedded = self.model["embed_tokens"](token[None])
            is_image = torch.cat((is_image, torch.tensor([False])))
        return torch.tensor([tokens])


def pixels_of(image: Image.Image, side: int) -> Tensor:
    """float32 [3, side, side], as torchvision's ``Resize``, ``ToTensor`` and ``Normalize`` compute them."""
    resized = image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
    mean, std = (torch.tensor(one, dtype=torch.float32)[:, None, None] for one in (MEAN, STD))
    return pixels.sub(mean).div(std)


def question(turns: Sequence[tuple[str, str]], query: str) -> str:
    """The text after an image: earlier questions and answers, then the question."""
    history = "".join(f"Question: {asked} Answer: {answer}\n" for asked, answer in turns)
    return f"{history}Question: {query} Answer:"


class CogVLM2Pixels:
    """``pixels_of`` as an image processor."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.side = settings["size"]["height"]

    def __call__(self, images: Sequence[Sequence[Any]], return_tensors: str = "pt") -> dict[str, Tensor]:
        return {
            "pixel_values": torch.stack([pixels_of(Image.fromarray(np.asarray(one)), self.side) for one in images[0]])
        }
