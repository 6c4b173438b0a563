"""What transformers answers, with the same weights and the same prompt."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from tests.support import deepseek_ocr
from tests.support.checkpoints import load_reference
from tests.support.cogvlm2 import CogVLM2Pixels
from tests.support.forward import media_types
from tests.support.kimi import KimiK25Pixels, KimiVLPixels
from tests.support.llama4 import Llama4Pixels, projected
from tests.support.minicpm import MiniCPMPixels
from tests.support.phi4 import Phi4Pixels, phi4_rows
from triptych.checkpoint.config_files import load_config
from triptych.prompt.prompt import PlannedPrompt

UNUSED = ("num_patches", "num_soft_tokens_per_image", "num_crops", "num_patches_per_image", "grids")
"""What image processors return, and models don't take."""
OWN_PROCESSORS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "Phi4MultimodalImageProcessor": Phi4Pixels,
    "Llama4ImageProcessor": Llama4Pixels,
    "CogVLM2ImageProcessor": CogVLM2Pixels,
    "KimiVLImageProcessor": KimiVLPixels,
    "Kimi_K25ImageProcessor": KimiK25Pixels,
    "MiniCPMVImageProcessor": MiniCPMPixels,
}
"""By ``image_processor_type``: those that transformers doesn't have, or of which its classes need torchvision."""


def image_processor(folder: Path) -> Any:
    """Transformers' Pillow processor of a checkpoint or, where it has none, the tests' own."""
    settings, config = json.loads((folder / "preprocessor_config.json").read_text()), load_config(folder)
    if config["model_type"] == deepseek_ocr.PUBLISHED:
        return deepseek_ocr.OCRPixels(settings, config)
    if (own := OWN_PROCESSORS.get(settings.get("image_processor_type"))) is not None:
        return own(settings)
    return AutoImageProcessor.from_pretrained(folder, backend="pil")


def image_features(model: Any, inputs: dict[str, Tensor]) -> Any:
    """What transformers makes of images for the language model."""
    own = {"llama4": projected, "phi4_multimodal": phi4_rows}.get(model.config.model_type)
    return model.get_image_features(**inputs) if own is None else own(model, inputs)


@dataclass(frozen=True)
class Reference:
    """A checkpoint folder's model as transformers runs it, in float32."""

    folder: Path

    @cached_property
    def model(self) -> Any:
        return load_reference(self.folder)

    def generate(self, prompt: PlannedPrompt, images: Sequence[Image.Image], max_new_tokens: int = 32) -> list[int]:
        """Greedy tokens, without regard to end-of-text tokens."""
        with torch.inference_mode():
            output = self.model.generate(
                **self.reference_inputs(prompt, images),
                max_new_tokens=max_new_tokens,
                min_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return output[0, len(prompt.tokens) :].tolist()

    def first_logits(self, prompt: PlannedPrompt, images: Sequence[Image.Image]) -> Tensor:
        """Logits of the first generated token, float32 [vocab]."""
        return self.logits(prompt, images)[-1]

    def logits(self, prompt: PlannedPrompt, images: Sequence[Image.Image]) -> Tensor:
        """Those at each of the prompt's tokens, of the one after it: float32 [tokens, vocab]."""
        with torch.inference_mode():
            logits: Tensor = self.model(**self.reference_inputs(prompt, images)).logits[0]
        return logits

    def reference_inputs(self, prompt: PlannedPrompt, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        tokens = torch.tensor([prompt.tokens])
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if (image := getattr(self.model.config, "image_token_id", None)) is not None:
            inputs |= media_types(self.model, tokens == image)
        if images:
            processor = image_processor(self.folder)
            processed = processor([[image.convert("RGB") for image in images]], return_tensors="pt")
            inputs |= {name: value for name, value in processed.items() if name not in UNUSED}
        return inputs
