"""Families of which vLLM takes the embedding of an image together with its grid."""

GRID_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2_5_omni", "qwen3_omni")
"""How the ``model_type`` of each begins."""
