"""Value types of settings: what they read, what they refuse, and what they compute."""

import re
from pathlib import Path

import pytest

from triptych.config import CacheFolder, CpuSet, ItemLimits, MemorySize, RankSizes
from triptych.errors import ConfigError, TriptychError
from triptych.topology import Role

# ── folders ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("/var/rows,20GiB", CacheFolder("/var/rows", 20 * 2**30)),
        ("/var/a,b, 500 MB", CacheFolder("/var/a,b", 500_000_000)),
        (f"{Path.cwd()}/rows,1TiB", CacheFolder(f"{Path.cwd()}/rows", 2**40)),
        ("", CacheFolder()),
    ],
)
def test_a_folder_has_an_amount(text: str, folder: CacheFolder) -> None:
    assert CacheFolder.parse(text) == folder
    assert CacheFolder.parse(str(folder)) == folder
    assert CacheFolder.parse(text.replace(f"{Path.cwd()}/", "")) == folder


@pytest.mark.parametrize("text", ["/var/rows", ",1GiB", "/var/rows,", "/var/rows,10%", "/var/rows,lots"])
def test_a_folder_without_an_amount_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        CacheFolder.parse(text)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", MemorySize(8 * 2**30)),
        ("1.5 gb", MemorySize(1_500_000_000)),
        ("25%", MemorySize(share=0.25)),
        ("100%", MemorySize(share=1.0)),
        ("2kib", MemorySize(2048)),
    ],
)
def test_memory_is_an_amount_or_a_share(text: str, size: MemorySize) -> None:
    assert MemorySize.parse(text) == size
    assert MemorySize.parse(str(size)) == size


@pytest.mark.parametrize("text", ["", "8", "8G", "-1GiB", "0%", "0MiB", "101%", "lots", "1e9MB", "nan%", "٣GiB"])
def test_memory_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        MemorySize.parse(text)


def test_a_share_is_of_what_is_free_and_an_amount_is_not() -> None:
    assert MemorySize.parse("25%").of(1000) == 250
    assert MemorySize.parse("2kB").of(1000) == 2000


def test_instances_divide_a_share_but_not_an_amount() -> None:
    assert str(MemorySize.parse("30%").divided_by(3)) == "10%"
    assert MemorySize.parse("1GiB").divided_by(3) == MemorySize.parse("1GiB")


# ── cores ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "cores", "shown"),
    [
        ("", set(), ""),
        ("0", {0}, "0"),
        ("0-2, 5", {0, 1, 2, 5}, "0-2,5"),
        ("7-7", {7}, "7"),
        ("3,2,1", {1, 2, 3}, "1-3"),
    ],
)
def test_cores_are_named_as_for_taskset(text: str, cores: set[int], shown: str) -> None:
    assert CpuSet.parse(text).cores == cores
    assert str(CpuSet.parse(text)) == shown


@pytest.mark.parametrize("text", ["a", "3-1", "0,,1", "-1", "0-", "99999", "٣"])
def test_text_that_names_no_cores_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="doesn't name cores"):
        CpuSet.parse(text)


# ── tensor-parallel ranks ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "sizes", "shown"),
    [
        ("3", {"P": 3, "D": 3, "EP": 3, "PD": 3, "EPD": 3}, "3"),
        ("P=2,D=4", {"P": 2, "D": 4}, "P=2,D=4"),
        (" pd = 8 ", {"PD": 8}, "PD=8"),
    ],
)
def test_only_instances_that_have_a_decoder_are_several_processes(text: str, sizes: dict[str, int], shown: str) -> None:
    parsed = RankSizes.parse(text)
    assert [parsed.of(role) for role in Role] == [sizes.get(role, 1) for role in Role]
    assert parsed.largest == max(sizes.values())
    assert str(parsed) == shown


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "99999", "E=2", "P=2,P=2", "P=0", "P=", "P", "D=2,", "2,D=1", "٣"]
)
def test_text_that_gives_no_ranks_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="neither a number of processes nor one for each role"):
        RankSizes.parse(text)


def test_ranks_of_a_role_outside_the_topology_are_refused() -> None:
    RankSizes(2).check([Role.PD])
    RankSizes.parse("PD=2").check([Role.E, Role.PD])
    with pytest.raises(ConfigError, match="--tensor-parallel-size P=2 names P, but the topology has E, PD"):
        RankSizes.parse("P=2").check([Role.PD, Role.E])


# ── media items of a request ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("image=3", ItemLimits(image=3)),
        (" image = 3 , video=0", ItemLimits(image=3, video=0)),
        ('{"video": 7}', ItemLimits(video=7)),
        (' {"image": {"count": 2}, "audio": 1}', ItemLimits(image=2, audio=1)),
        ("{}", ItemLimits()),
    ],
)
def test_limits_of_media_in_both_spellings(text: str, limits: ItemLimits) -> None:
    assert ItemLimits.parse(text) == limits == ItemLimits.parse(str(limits))
    assert [limits.of(modality) for modality in ("image", "video", "audio")] == [
        limits.image,
        limits.video,
        limits.audio,
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "image",
        "image=",
        "image=-1",
        "image=1.5",
        "image=1,image=2",
        "images=3",
        "image=3 video=2",
        "image=1,",
        "text=1",
        "9",
        '{"image": 1',
        '{"image": "x"}',
        '{"image": true}',
        '{"image": null}',
        '{"picture": 1}',
        '{"image": 1, "image": 2}',
        '{"image": {"count": 1, "width": 5}}',
        '{"image": [1]}',
        '{"image": {"count": {"count": 1}}}',
        "{" * 9000,
        "image=" + "9" * 7,
    ],
)
def test_text_that_gives_no_limits_is_refused(text: str) -> None:
    with pytest.raises(TriptychError, match=r"doesn't give a number|is not one of image, video, audio"):
        ItemLimits.parse(text)


def test_a_plain_number_is_bytes_if_it_is_no_slip() -> None:
    assert MemorySize.parse("8589934592") == MemorySize.parse("8GiB")
    for text in ("8", "0000000", "999999"):
        with pytest.raises(ConfigError, match="neither an amount"):
            MemorySize.parse(text)
