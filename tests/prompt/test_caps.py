from pathlib import Path

import pytest

from tests.support.prompt_parts import image_part, png, user
from triptych.errors import MediaTooLarge
from triptych.prompt.caps import MediaCaps
from triptych.prompt.prompt import PromptBuilder

CAPS = MediaCaps(pixels=2000, total_pixels=5000, tokens=31)


def build(folder: Path, *sizes: tuple[int, int]) -> int:
    builder = PromptBuilder(folder, caps=CAPS)
    return len(builder.build([user(*(image_part(png(*size)) for size in sizes))]).items)


def test_what_is_within_the_caps(shared_folder: Path) -> None:
    assert build(shared_folder, (50, 40)) == 1
    assert build(shared_folder, (50, 40), (40, 50), (25, 40)) == 3


@pytest.mark.parametrize(
    ("sizes", "message", "at"),
    [
        ([(51, 40)], "2040 pixels", 0),
        ([(10, 10), (2, 1001)], "2002 pixels", 1),
        ([(50, 40), (50, 40), (25, 41)], "5000 pixels together", 2),
        ([(40, 45), (63, 31)], "tokens", 1),
    ],
)
def test_what_is_beyond_them(shared_folder: Path, sizes: list[tuple[int, int]], message: str, at: int) -> None:
    with pytest.raises(MediaTooLarge, match=message) as caught:
        build(shared_folder, *sizes)
    assert caught.value.param == f"messages[0].content[{at}].image_url.url"
