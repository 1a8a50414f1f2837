"""Who may import whom. Read from the syntax trees, imports inside functions included."""

import ast
from pathlib import Path

import pytest

import headlong

ROOT = Path(headlong.__file__).parent
MAX_LINES = 450

ORDER = (
    "version",
    "errors",
    "option",
    "env",
    "printable",
    "small_files",
    "tracing",
    "progress",
    "params",
    "types",
    "completion",
    "config",
    "quant",
    "ops",
    "checkpoint",
    "state",
    "layers",
    "models",
    "sampling",
    "speculate",
    "text",
    "engine",
    "llm",
    "async_llm",
    "convert",
    "server",
    "cluster",
    "cli",
)
"""Import only from the left. `__init__` may import everything but the command line."""

ONLY = {
    "text": {"errors", "params", "small_files", "types"},
    "quant": {"errors"},
    "ops": {"errors", "env", "types", "quant"},
    "checkpoint": {"errors", "env", "progress", "quant", "small_files"},
}
"""These may import even less than what is left of them."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in ("headlong", *parts) if part != "__init__")


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports_of(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """The headlong modules a syntax tree imports, by full name."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + is_package
                base = ".".join([*parts[:keep], *([base] if base else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in FILES else base)
    return {name for name in found if name.split(".")[0] == "headlong"}


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def breaches(module: str, imported: set[str]) -> list[str]:
    own = package_of(module)
    found = []
    for other in sorted(package_of(name) for name in imported):
        if own == "__init__":
            allowed = other != "cli"
        elif other == own:
            allowed = True
        elif other == "__init__":
            # The version and the public names; only the outermost may see them.
            allowed = own == "cli"
        elif own in ONLY:
            allowed = other in ONLY[own]
        else:
            allowed = ORDER.index(other) < ORDER.index(own)
        if not allowed:
            found.append(f"{module} imports {other}")
    return found


GRAPH = {
    module: imports_of(ast.parse(path.read_text()), module, path.name == "__init__.py")
    for module, path in FILES.items()
}


def test_every_part_has_its_place():
    parts = {package_of(module) for module in FILES} - {"__init__"}
    assert parts - set(ORDER) == set(), "give the new package a place in ORDER"
    assert set(ORDER) - parts == set(), "ORDER names a package that is gone"


@pytest.mark.parametrize("module", FILES)
def test_imports_point_left(module):
    assert breaches(module, GRAPH[module]) == []


def test_no_import_cycles():
    """Between modules, packages' own `__init__` included."""
    state: dict[str, str] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert state.get(module) != "open", " -> ".join((*path, module))
        if module in state:
            return
        state[module] = "open"
        for other in sorted(GRAPH[module]):
            visit(other, (*path, module))
        state[module] = "done"

    for module in GRAPH:
        visit(module, ())


@pytest.mark.parametrize("module", FILES)
def test_files(module):
    path = FILES[module]
    assert path.name not in ("utils.py", "util.py", "common.py", "helpers.py", "misc.py")
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "a file begins with its duty"


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("headlong.ops.x", "def f():\n    from headlong.engine import engine"),
        ("headlong.checkpoint.x", "import headlong.models.config"),
        ("headlong.text.x", "from headlong.config import EngineConfig"),
        ("headlong.state.x", "from ..models import registry"),
        ("headlong.sampling.x", "if True:\n    import headlong.speculate.verify as v"),
        ("headlong.engine.x", "from headlong import LLM"),
    ],
)
def test_breaches_are_seen(module, code):
    assert breaches(module, imports_of(ast.parse(code), module, is_package=False))
