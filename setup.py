"""Compiles the kernels when a wheel is built. All other settings are in pyproject.toml."""

import platform
import re
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from triptych.layers.kernel_variants import compile_all, find_compiler
from triptych.user_cache import user_cache


class BuildPy(build_py):
    """Adds every variant of the kernels that the compiler knows, unless the installation is editable."""

    def run(self) -> None:
        super().run()
        folder = self.prebuilt()
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        if self.editable_mode:
            return
        try:
            found = list(compile_all(find_compiler(), user_cache()))
        except (OSError, RuntimeError) as error:
            warnings.warn(f"the wheel has no kernels: {error}", stacklevel=1)
            return
        for variant, made in found:
            if isinstance(made, Exception):
                warnings.warn(f"the wheel lacks the kernels {variant.name}: {made}", stacklevel=1)
                continue
            folder.mkdir(exist_ok=True)
            shutil.copyfile(made, folder / f"{variant.name}.so")

    def prebuilt(self) -> Path:
        return Path(self.build_lib, "triptych", "layers", "kernels", "prebuilt")


class BdistWheel(bdist_wheel):
    """Names the platform if there are kernels. They are for any Python."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.kernels: list[Path] = []  # an editable installation never runs this command

    def run(self) -> None:
        self.run_command("build")
        self.kernels = sorted(self.get_finalized_command("build_py").prebuilt().glob("*.so"))
        if self.kernels:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", platform_of(self.kernels) if self.kernels else "any")


def platform_of(libraries: list[Path]) -> str:
    """Return the tag of platforms with a glibc that is recent enough; its symbols' versions are in the files."""
    contents = [library.read_bytes() for library in libraries]
    versions = [int(minor) for content in contents for minor in re.findall(rb"GLIBC_2\.(\d+)", content)]
    if not versions:
        return re.sub(r"\W", "_", sysconfig.get_platform())
    return f"manylinux_2_{max(17, *versions)}_{platform.machine()}"


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
