"""What documents name exists: paths, linked files, `make` targets, scripts and flags. The picture is current."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import architecture
from test_import_law import ORDER

ROOT = Path(__file__).parents[1]

PACKAGE = ROOT / "src" / "headlong"
DOCUMENTS = [
    path for name in ("*.md", "docs/**/*.md", "src/headlong/**/*.md") for path in sorted(ROOT.glob(name))
]
HISTORY = {"CHANGELOG.md"}
"""These may name what is gone."""

NOT_PATHS = {"text/plain", "text/event-stream", "text/html"}
"""Media types, whose first part is also the name of a package."""

FILE = re.compile(r"[\w.*-]+(/[\w.*-]+)*\.(py|c|h|md|svg|png|toml|txt)")


def code_of(text: str) -> Iterator[str]:
    """The code of a document: fenced blocks, then inline spans, white space made single."""
    fenced = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    yield from fenced.findall(text)
    for span in re.findall(r"`([^`]+)`", fenced.sub("", text)):
        yield " ".join(span.split())


def paths_in(text: str) -> set[str]:
    """The words of a document's code that are paths of this repository, relative to it or to the package."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()}
    tops |= {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    found = set()
    for code in code_of(text):
        for word in re.findall(r"[^\s`'\"()\[\],;|=]+", code):
            path = word.split("::")[0].rstrip(".:/")
            if re.search(r"[<>{}$]", path) or path in NOT_PATHS or path.startswith(("/", "~", "http")):
                continue
            if "/" in path and (path.split("/")[0] in tops or FILE.fullmatch(path)):
                found.add(path)
    return found


def exists(path: str) -> bool:
    """Whether the path, a pattern, or a module without its suffix is in the repository or the package."""
    return any(
        next(base.glob(candidate), None) is not None
        for base in (ROOT, PACKAGE)
        for candidate in (path, f"{path}.py")
    )


def documents() -> list[Path]:
    return [path for path in DOCUMENTS if path.name not in HISTORY]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_exist(document: Path):
    assert [path for path in sorted(paths_in(document.read_text())) if not exists(path)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path):
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    local = [link.split("#")[0] for link in links if not re.match(r"\w+:", link)]
    assert [link for link in local if link and not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(document: Path):
    """`make` targets are in the Makefile; a benchmark has the flags that it is called with."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    faults = []
    for code in code_of(document.read_text()):
        faults += [name for name in re.findall(r"(?:^|\n)make ([a-z-]+)", code) if name not in targets]
        for script, arguments in re.findall(r"python (benchmarks/\w+\.py)([^\n#]*)", code):
            source = (ROOT / script).read_text()
            faults += [
                f"{script} {flag}"
                for flag in re.findall(r"--[a-z0-9-]+", arguments)
                if f'"{flag}"' not in source
            ]
    assert faults == []


def test_a_wrong_path_is_seen():
    text = "`engine/nowhere.py`, `tests/ops` and [this](docs/x.md)\n```\nengine/scheduler  -> Plan\n```\n"
    assert {path for path in paths_in(text) if not exists(path)} == {"engine/nowhere.py"}


def test_the_picture_is_current():
    told = (ROOT / "docs" / "architecture.svg").read_text()
    assert told == architecture.draw(), "run `python benchmarks/architecture.py`"


def test_the_picture_has_every_package_in_order():
    packages = [name for name in ORDER if (PACKAGE / name).is_dir()]
    drawn = [name for name, _ in reversed(architecture.PACKAGES)]
    assert [name for name in drawn if name in packages] == packages
