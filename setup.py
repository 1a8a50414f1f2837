"""What pyproject.toml cannot say: the native library is loaded through ctypes, so it bears a plain name and one wheel
serves every Python; and a released package's links lead to the repository that released it.

REPOSITORY_URL (the release workflow sets it) is where relative links of the README and the project's URLs lead.
"""

import os
import re
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

OPS = Path(__file__).parent / "src/headlong/ops"
REPOSITORY = os.environ.get("REPOSITORY_URL", "").rstrip("/")


class PlainName(build_ext):
    """Names the library `_native.so`: it has nothing of a Python's ABI."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{Path(*fullname.split('.'))}.so"

    def build_extension(self, ext: Extension) -> None:
        """Tells the library which sources it was built from, so that another one is not taken for it."""
        digest_of = runpy.run_path(str(OPS / "native_sources.py"))["digest_of"]
        ext.define_macros.append(("HEADLONG_SOURCES", f'"{digest_of(OPS / "csrc")}"'))
        super().build_extension(ext)

    def get_export_symbols(self, ext: object) -> list[str]:
        """A module of Python's would export `PyInit_...`; this library has no such function."""
        del ext
        return []


class AnyPython(bdist_wheel):
    """Any Python on this platform; any platform, where no compiler built the library."""

    def get_tag(self) -> tuple[str, str, str]:
        built = any(Path(self.bdist_dir).rglob("_native.*"))
        return "py3", "none", super().get_tag()[2] if built else "any"


def description() -> str:
    """The README; pages elsewhere cannot follow relative links."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return text
    text = re.sub(r"!\[([^]]*)\]\((?!\w+:)([^)\s]+)\)", rf"![\1]({REPOSITORY}/raw/HEAD/\2)", text)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!\w+:|#)([^)\s]+)\)", rf"[\1]({REPOSITORY}/blob/HEAD/\2)", text)


def urls() -> dict[str, str]:
    if not REPOSITORY:
        return {}
    return {
        "Repository": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/HEAD/README.md",
        "Changelog": f"{REPOSITORY}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }


setup(
    cmdclass={"build_ext": PlainName, "bdist_wheel": AnyPython},
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls=urls(),
)
