"""Writes the table of families in docs/deploy/vllm.md. A test fails when the page is out of date, and another one asks
vLLM whether it reads what the table says.

.venv/bin/python -m scripts.vllm_doc
"""

from scripts.generated import DOCS, table, with_region
from triptych.models.vllm_grids import FAMILIES, GRID_FAMILIES, refusal

PAGE = DOCS / "deploy/vllm.md"
HEAD = ["`model_type` begins with", "image", "video", "image, with the connector", "video, with the connector"]


def page() -> str:
    """The page with its table as the code has it."""
    return with_region(PAGE.read_text(), "families", table(HEAD, [_row(family) for family in FAMILIES]))


def _row(family: str) -> list[str]:
    has_grid, no_video = family in GRID_FAMILIES, refusal(family, "video")
    image = ("rows and grid", "grid") if has_grid else ("rows", "the file")
    video = ("refused", "refused") if no_video else ("rows and grid", "grid")
    return [f"`{family}`", image[0], video[0], image[1], video[1]]


if __name__ == "__main__":
    PAGE.write_text(page())
