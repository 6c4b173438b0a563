"""The bundled demo model, a very small Qwen3-VL that answers questions about drawn shapes and printed numbers."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
PICTURES_DIR = Path(__file__).parent / "pictures"
