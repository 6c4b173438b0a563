"""Adapter of Qwen3-VL and Qwen3-VL-MoE: vision tower, decoder parameters and tensor names.

Names are the same in the published files and in those that ``save_pretrained`` of transformers 5 writes:
``model.visual.…``, ``model.language_model.…``, ``lm_head.weight`` (absent when tied). Only stacked expert weights
differ. Published: ``gate_up_proj`` [experts, hidden, 2 * intermediate], ``down_proj`` [experts, intermediate, hidden];
saved, as the modules hold them: [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate].
"""

from dataclasses import replace

from triptych.models.shared.encoder import MultimodalAdapter
from triptych.models.shared.vision_tower import DEEPSTACK, QWEN3_TOWER


class Qwen3VL(MultimodalAdapter):
    """``ModelAdapter`` for model types ``qwen3_vl`` and ``qwen3_vl_moe``."""

    towers = "Qwen3VLVisionModel and deepstack features"
    spec = replace(QWEN3_TOWER, settings={**QWEN3_TOWER.settings, DEEPSTACK: None}, deepstack="deepstack_merger_list")
