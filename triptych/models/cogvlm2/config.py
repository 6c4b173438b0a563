"""The settings of CogVLM2. No torch."""

from dataclasses import dataclass

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.clip_config import MAX_SIDE
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.settings import positive_number, setting
from triptych.models.shared.tower_limits import check_heads, check_layers

IMAGE_TOKEN = 128_002
"""The published code's ``pad_token_id``, which stands for the rows of an image."""


@dataclass(frozen=True)
class EvaConfig:
    """The tower's parameters: EVA2-CLIP-E, whose patches a convolution makes four times fewer."""

    image_size: int
    """Side of the square images that the tower takes, in pixels."""
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    eps: float

    @property
    def side(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch_size

    @property
    def rows(self) -> int:
        """Rows of an image: a square of two by two patches becomes one, between one that begins the image and one that
        ends it."""
        return (self.side // 2) ** 2 + 2

    @property
    def cost(self) -> float:
        """Work of encoding an image; see ``VisionCostModel``."""
        return VisionCostModel(self.hidden_size, self.intermediate_size).cost(self.side**2 + 1)


def eva_config(config: ModelConfig) -> EvaConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    vision = setting(config, "vision_config", dict)
    names = ("image_size", "patch_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_heads")
    size, patch, hidden, intermediate, layers, heads = (setting(config, f"vision_config.{name}", int) for name in names)
    for name, served in (("hidden_act", "gelu"), ("in_channels", 3)):
        if vision.get(name, served) != served:
            raise CheckpointError(f"config.json: vision_config.{name} must be {served!r}, not {vision[name]!r}")
    check_heads(hidden, heads)
    if not 2 * patch <= size <= MAX_SIDE or size % (2 * patch):
        raise CheckpointError(
            f"config.json: vision_config.image_size must be an even number of patches, up to {MAX_SIDE} pixels"
        )
    check_layers(layers)
    found = EvaConfig(size, patch, hidden, intermediate, layers, heads, positive_number(vision, "layer_norm_eps"))
    if setting(config, "vision_config.num_positions", int) != found.side**2 + 1:
        raise CheckpointError(f"config.json: vision_config.num_positions must be {found.side**2 + 1}, one per patch")
    return found


def check_template(config: ModelConfig) -> None:
    """Raise CheckpointError for prompts of another form than ``template.TEMPLATE`` makes."""
    if (version := config.get("template_version", "chat")) != "chat":
        raise CheckpointError(f"config.json: template_version {version!r} is not served; only 'chat' is")


def image_token(config: ModelConfig) -> int:
    """Return the placeholder's id. Raises CheckpointError if it is invalid."""
    return setting(config, "pad_token_id", int, default=IMAGE_TOKEN)
