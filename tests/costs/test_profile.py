"""Profiles as files: what is written is read again, and nothing else is taken for one."""

from pathlib import Path

import msgspec
import pytest

from tests.support.profiles import batch_seconds, example_profile, step_seconds
from triptych.costs import profile as profiles
from triptych.costs.profile import AtThreads, batch_values, step_values
from triptych.errors import ConfigError
from triptych.simulate.costs import ProfiledCosts


def test_a_written_profile_is_read_again(tmp_path: Path) -> None:
    profile, path = example_profile(), tmp_path / "profile.json"
    profiles.write(profile, path)
    assert profiles.read(path) == profile
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]


def test_costs_are_those_measured() -> None:
    profile = example_profile()
    chunks = [(200, 100), (1, 500), (1, 700)]
    assert profile.steps_at(1).seconds(step_values(chunks)) == pytest.approx(step_seconds(chunks), rel=1e-3)
    assert profile.steps_at(2).seconds(step_values(chunks)) == pytest.approx(step_seconds(chunks) / 1.6, rel=1e-3)
    assert profile.steps_at(64) == profile.steps_at(2)
    assert profile.encode_at(2).seconds(batch_values([300, 20])) == pytest.approx(batch_seconds([300, 20]), rel=1e-3)
    assert profile.item(460, 460).rows == 196
    assert profile.slowdown("decode", "encode", shared=False) == 1.2
    assert profile.slowdown("encode", "decode", shared=False) == 1.0
    assert profile.slowdown("encode", "decode", shared=True) == 2.0


def test_costs_between_two_numbers_of_threads_are_between_theirs() -> None:
    """A machine's profile has one thread, half of the cores and all of them."""
    one, two = example_profile().steps
    profile = msgspec.structs.replace(example_profile(), steps=(AtThreads(16, two.cost), one))
    values = step_values([(200, 100), (1, 500)])
    seconds = [profile.steps_at(threads).seconds(values) for threads in (1, 2, 4, 6, 8, 12, 16)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[2] == pytest.approx((seconds[0] * seconds[-1]) ** 0.5)
    assert seconds[0] / seconds[-1] == pytest.approx(1.6, rel=1e-3)
    assert ProfiledCosts(profile).of_instance(4).step([(200, 100), (1, 500)]) == seconds[2]


def test_step_values() -> None:
    assert step_values([(3, 10), (1, 4)]) == {
        "tokens": 3, "chunks": 1, "pairs": 11 + 12 + 13, "sequences": 1, "context": 5, "rows": 4
    }  # fmt: skip


CONTENT = msgspec.json.encode(example_profile())


def changed(part: str, **values: object) -> bytes:
    """The profile's content with other values in a part of it."""
    found = msgspec.json.decode(CONTENT)
    found[part] |= values
    return msgspec.json.encode(found)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no valid profile"),
        (b"\xff\xfe{}", "no valid profile"),
        (b"[" * 100_000, "no valid profile"),
        (b"{}", "is no profile: triptych profile"),
        (b'{"kind": "triptych-profile", "version": 7}', "has version 7, and this program reads 1"),
        (b'{"kind": "triptych-profile", "version": "%s"}' % (b"9" * 1000), r"has version 9{20}, and"),
        (CONTENT[:-1], "no valid profile"),
        (CONTENT.replace(b'"hop"', b'"hop2"'), "no valid profile: Object .* `hop2?`"),
        (CONTENT.replace(b'"median":0.0001,', b'"median":-1,'), r">= 0.0 - at `\$"),
        (CONTENT.replace(b'"median":0.0001,', b'"median":1e999,'), "no valid profile"),
        (CONTENT.replace(b'"median":0.0001,', b'"median":NaN,'), "no valid profile"),
        (CONTENT.replace(b'"variable":"pixels"', b'"variable":"other"'), "preprocess png: a point lacks other"),
        (b" " * (profiles.MAX_BYTES + 1), "larger than a profile can be"),
        (changed("settings", max_num_seqs="many"), r"settings: Expected `int`, got `str` - at `\$.max_num_seqs"),
        (changed("settings", kv_cache_tokens=10**12), r"at `\$.kv_cache_tokens"),
        (changed("settings", kv_cache_tokens=2**28), "KV cache of 16777216 pages is over the limit"),
        (changed("settings", page_size=0), r"at `\$.page_size"),
        (changed("model", context_length=10**12), r"at `\$.model.context_length"),
        (CONTENT.replace(b'"parts":1}', b'"parts":1000000000}'), r"at `\$.items"),
    ],
)
def test_other_content_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profiles.parse(content, "p.json")


def test_a_form_that_overflows_is_refused() -> None:
    huge = CONTENT.replace(b'"bytes":65536.0', b'"bytes":1e308').replace(b'"bytes":65536', b'"bytes":1e308')
    found = msgspec.json.decode(huge)
    found["transfers"]["shm"]["kv"]["form"]["terms"] = [{"seconds": 1e308, "factors": [{"variable": "bytes"}]}]
    with pytest.raises(ConfigError, match="transfer kv, shm: the form isn't finite"):
        profiles.parse(msgspec.json.encode(found), "p.json")


def test_files_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        profiles.read(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        profiles.read(tmp_path)
    with pytest.raises(ConfigError, match="can't be written: No such file"):
        profiles.write(example_profile(), tmp_path / "none" / "p.json")
