"""Which kernels are loaded: the environment's variables, invalid values of them, prebuilt variants and damaged files. A
short source takes the kernels' place, because compiling those takes seconds."""

import errno
import logging
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from triptych.layers import kernel_variants, native
from triptych.layers.kernel_variants import Variant, compile_variants, compiled, find_compiler, variants
from triptych.sandbox.workers import START_SECONDS

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
FASTEST = native.usable_variants()[0]
BASE = variants(platform.machine())[-1]


@pytest.fixture(autouse=True)
def _asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Load the library with temporary folders and a cache of its own: what other tests have loaded is the process's."""
    for name in ("cache", "prebuilt", "sources"):
        (tmp_path / name).mkdir()
    (tmp_path / "sources" / "answer.c").write_text("int answer(void) { return 42; }")
    monkeypatch.setattr(kernel_variants, "SOURCES", tmp_path / "sources")
    monkeypatch.setattr(native, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(native, "kernels", cache(native.kernels.__wrapped__))


@needs_compiler
def test_kernels_for_pixels_are_compiled_once_and_need_no_pytorch(tmp_path: Path) -> None:
    script = "from triptych.layers import native; assert native.pixel_kernels()"
    files = set()
    for _ in range(2):
        subprocess.run([sys.executable, "-c", f"{script}; import sys; assert 'torch' not in sys.modules"], check=True)
        [made] = (tmp_path / "cache" / "triptych").iterdir()
        assert made.name.startswith("kernels-pixels-")
        files.add(made.stat().st_ino)
    assert len(files) == 1


def test_without_a_compiler_there_are_no_kernels_for_pixels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(native, "pixel_kernels", cache(native.pixel_kernels.__wrapped__))
    assert native.pixel_kernels() is None
    assert "there is no C compiler 'no-such-compiler'" in caplog.text


def test_a_compiler_that_hangs_leaves_numpy_in_time_for_a_worker_to_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert 3 * kernel_variants.PIXELS_TIMEOUT < START_SECONDS
    monkeypatch.setattr(kernel_variants, "PIXELS_TIMEOUT", 1)
    monkeypatch.setattr(native, "pixel_kernels", cache(native.pixel_kernels.__wrapped__))
    (tmp_path / "sources" / "pixels.c").write_text("int answer(void) { return 42; }")
    compiler = tmp_path / "hangs"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert native.pixel_kernels() is None
    assert "no compiled kernels for pixels" in caplog.text
    assert "timed out after 1 seconds" in caplog.text


def answer() -> int:
    library = native.library()
    assert library is not None
    return int(library.answer())


@needs_compiler
def test_the_fastest_variant_is_compiled_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert answer() == 42
    (made,) = (tmp_path / "cache" / "triptych").iterdir()
    assert caplog.messages[0].startswith(f"kernels: {FASTEST.name}, compiled on this machine")
    native.kernels.cache_clear()
    before = made.stat()
    assert answer() == 42
    assert made.stat() == before


@needs_compiler
@pytest.mark.parametrize(("value", "reason"), [("", "it is empty"), ("  ", "it is empty"), ("'gcc", "No closing quot")])
def test_cc_without_a_command_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str, reason: str
) -> None:
    monkeypatch.setenv("CC", value)
    assert answer() == 42
    assert caplog.messages[0].startswith(f"the variable CC={value!r} names no compiler ({reason}")


@pytest.mark.parametrize("value", ["no-such-compiler -O2", "/", "false"])
def test_broken_compiler_leaves_pytorchs_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    monkeypatch.setenv("CC", value)
    assert native.library() is None
    (line,) = caplog.messages
    assert line.startswith("no compiled kernels, so PyTorch's slower ones are used: ")
    assert native.kernels().description == line


@needs_compiler
def test_a_source_that_does_not_compile_shows_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "sources" / "broken.c").write_text("int broken(")
    assert native.library() is None
    assert "broken.c:1:" in caplog.text


@needs_compiler
def test_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert answer() == 42
    assert list((tmp_path / "home" / ".cache" / "triptych").glob("*.so"))
    assert not (tmp_path / "relative").exists()


@needs_compiler
@pytest.mark.parametrize("trouble", ["a file", "full", "no home"])
def test_kernels_are_compiled_for_this_start_alone_where_none_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if trouble == "a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    elif trouble == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "none"))
    else:
        check = native.check_room

        def fill(folder: Path) -> None:
            if not folder.is_relative_to(temporary):
                raise OSError(errno.ENOSPC, "No space left on device")
            check(folder)

        monkeypatch.setattr(native, "check_room", fill)
    assert answer() == 42
    assert "each start compiles them" in caplog.text
    assert not list(temporary.iterdir())
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not (tmp_path / "none").exists()


@needs_compiler
def test_without_room_anywhere_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "NEEDED_BYTES", 2**60)
    monkeypatch.setattr(native, "compiled", lambda *_: pytest.fail("it compiles in vain"))
    assert native.library() is None
    assert "no compiled kernels" in caplog.text


@needs_compiler
@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"x" * 9000])
def test_a_damaged_file_in_the_cache_is_made_again(tmp_path: Path, content: bytes) -> None:
    made = compiled(find_compiler(), FASTEST, tmp_path / "cache" / "triptych")
    made.write_bytes(content)
    assert answer() == 42


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one variant")
def test_variants_share_a_file_that_asks_for_none_of_what_tells_them_apart(tmp_path: Path) -> None:
    """``answer.c`` is compiled for AVX-512 and for AVX2, and another file for each of their four variants."""
    header = kernel_variants.SOURCES / "dots.h"
    header.write_text("#if defined __AVX512VNNI__ || defined __AVXVNNI__\n#endif\n")
    (kernel_variants.SOURCES / "dots.c").write_text('#include "dots.h"\nint dots(void) { return 1; }')
    log, script = tmp_path / "log", tmp_path / "cc"
    script.write_text(f'#!/bin/sh\necho "$*" >>{log}\nexec cc "$@"\n')
    script.chmod(0o755)
    wanted = [one for one in variants("x86_64") if one.name in ("avx512-vnni", "avx512", "avx2-vnni", "avx2")]
    made = [path for _, path in compile_variants([str(script)], wanted, tmp_path / "made") if isinstance(path, Path)]
    assert [native.load(path).answer() for path in made] == [42] * 4
    commands = log.read_text().splitlines()
    assert sum("answer.c" in command for command in commands) == 2
    assert sum("dots.c" in command for command in commands) == 4
    assert len(set(made)) == 4


def prebuild(folder: Path, variant: Variant, value: int) -> Path:
    """Put a variant whose answer is ``value`` where a wheel has it."""
    source = kernel_variants.SOURCES / "answer.c"
    source.write_text(f"int answer(void) {{ return {value}; }}")
    made = shutil.move(compiled(find_compiler(), variant, folder), folder / "prebuilt" / f"{variant.name}.so")
    return Path(made)


@needs_compiler
def test_prebuilt_kernels_need_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prebuild(tmp_path, BASE, 1)
    prebuild(tmp_path, FASTEST, 2)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert answer() == 2
    assert caplog.messages[0].startswith(f"kernels: {FASTEST.name}, prebuilt")


@needs_compiler
@pytest.mark.skipif(FASTEST == BASE, reason="this processor has one variant")
@pytest.mark.parametrize("harm", ["truncated", "foreign"])
def test_a_prebuilt_variant_that_cannot_be_loaded_is_replaced_by_the_next(
    harm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prebuild(tmp_path, BASE, 1)
    broken = prebuild(tmp_path, FASTEST, 2)
    content = broken.read_bytes()[: -kernel_variants.SEAL_BYTES]
    content = content[:18] + b"\xff" + content[19:]  # the ELF header's machine
    broken.write_bytes(content[:4096] if harm == "truncated" else content + kernel_variants.seal(content))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert answer() == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"kernels: {BASE.name}, prebuilt; ")
    assert str(broken) in record.getMessage()


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one variant")
def test_only_instructions_that_the_processor_has_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    avx2 = next(variant for variant in variants("x86_64") if variant.name == "avx2")
    for features, name in (
        (avx2.features.keys(), "avx2; avx2-vnni needs avx_vnni"),
        ({"fma"}, "x86-64; avx2 needs avx2, bmi1"),
    ):
        monkeypatch.setattr(native, "processor_features", lambda features=features: frozenset(features))
        native.kernels.cache_clear()
        assert answer() == 42
        assert name.replace(";", ", compiled on this machine;") in caplog.messages[-1]


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one variant")
@pytest.mark.parametrize(
    ("maker", "grants_tiles", "description"),
    [
        ("GenuineIntel", True, "amx, compiled on this machine"),
        (
            "GenuineIntel",
            False,
            "avx512-vnni, compiled on this machine; amx needs amx_tile; avx512-bf16 is slower on this processor",
        ),
        ("AuthenticAMD", False, "avx512-bf16, compiled on this machine; amx needs amx_tile"),
        ("", False, "avx512-bf16, compiled on this machine; amx needs amx_tile"),
    ],
)
def test_instructions_that_are_slower_or_refused_are_not_used(
    maker: str, grants_tiles: bool, description: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    amx = variants("x86_64")[0]
    if not kernel_variants.accepts(find_compiler(), amx):
        pytest.skip("the compiler doesn't know AMX")
    monkeypatch.setattr(native, "processor_features", lambda: frozenset(amx.features))
    monkeypatch.setattr(native, "processor_maker", lambda: maker)
    monkeypatch.setattr(native, "grants_tiles", lambda: grants_tiles)
    assert native.kernels().description == description
