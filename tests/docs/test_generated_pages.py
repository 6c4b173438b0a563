"""Generated pages and diagrams are what the code says."""

from types import ModuleType
from typing import Any

import pytest
from transformers.models.auto import image_processing_auto

from scripts import (
    docs_check,
    errors_doc,
    family_pages,
    fields_doc,
    flags_doc,
    formats_doc,
    metrics_doc,
    models_doc,
    settings_doc,
    templates_doc,
    vllm_doc,
)
from scripts.diagrams_doc import FOLDER, diagrams
from scripts.generated import table, with_region


@pytest.mark.parametrize(
    "generator",
    [errors_doc, fields_doc, flags_doc, formats_doc, metrics_doc, models_doc, settings_doc, templates_doc, vllm_doc],
    ids=lambda m: m.__name__,
)
def test_a_page_is_up_to_date(generator: ModuleType) -> None:
    assert generator.PAGE.read_text() == generator.page(), f"run: python -m {generator.__name__}"


def test_the_pages_of_families_are_up_to_date() -> None:
    found = {path.name: path.read_text() for path in family_pages.FOLDER.glob("*.md")}
    assert found == family_pages.pages(), "run: python -m scripts.models_doc"


def test_the_page_of_glm_has_the_options_that_planners_take() -> None:
    [row] = [line for line in family_pages.pages()["glm-v.md"].splitlines() if "mm_processor_kwargs" in line]
    first, newer, moe = row.split(" | ")[1:]
    assert first == moe.removesuffix(" |") == "`fps`, `max_pixels`, `min_pixels`, `size`"
    assert newer == "`max_pixels`, `min_pixels`, `size`"


def test_images_said_to_be_a_pillow_processors_have_one() -> None:
    classes: dict[str, Any] = vars(image_processing_auto)["IMAGE_PROCESSOR_MAPPING_NAMES"]
    without = {name for name in models_doc.PILLOW_IMAGES if "pil" not in (classes.get(name.split("+")[0]) or {})}
    assert without == {"qwen3_vl_moe"}, "its files name that of qwen3_vl"


@pytest.mark.parametrize("name", diagrams())
def test_a_diagram_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == diagrams()[name], "run: python -m scripts.diagrams_doc"


def test_links_of_root_pages_and_paths_in_backticks_are_right() -> None:
    assert [*docs_check.links(), *docs_check.paths()] == []


@pytest.mark.parametrize(
    ("code", "is_there"),
    [
        ("api/http.py", True),
        ("triptych/transfer/", True),
        ("models/<family>/plan.py", True),
        ("docs/models.md", True),
        ("/v1/models", True),
        ("application/json", True),
        ("tests/parity", True),
        ("api/nothing.py", False),
        ("triptych/nothing/", False),
        ("tests/nothing", False),
    ],
)
def test_paths_are_distinguished_from_other_words(code: str, is_there: bool) -> None:
    assert docs_check.exists(code) is is_there


def test_a_region_is_replaced_and_must_exist() -> None:
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb"
    assert with_region(page, "x", "new") == "a\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nb"
    with pytest.raises(ValueError, match="0 regions"):
        with_region(page, "y", "new")


def test_bars_and_line_breaks_stay_within_cells() -> None:
    assert table(["a"], [["x |\n y"]]).splitlines()[2] == "| x \\| y |"
