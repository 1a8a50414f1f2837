"""Layers, models and the engine ask the backend, and never who it is."""

import ast
from pathlib import Path

import pytest

import headlong

ROOT = Path(headlong.__file__).parent
ABOVE = ("layers", "models", "sampling", "speculate", "engine")
BACKENDS = ("native", "triton", "reference")


def sources():
    return [path for package in ABOVE for path in sorted((ROOT / package).rglob("*.py"))]


def classes_of_backends() -> set[str]:
    """Names of classes that one backend alone has."""
    found = set()
    for path in sorted((ROOT / "ops").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.startswith(("Native", "Triton", "Reference")):
                found.add(node.name)
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_asks_who_computes(path):
    tree, classes = ast.parse(path.read_text()), classes_of_backends()
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    told = classes - {"TritonStep"}  # rows of a step that begins on the device, which `engine.step` makes
    assert not names & told, f"names {sorted(names & told)}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            about = ast.unparse(node.args[0])
            assert not any(word in about for word in ("ops", "lm_head", "linear", "backend", "norm")), about


def test_there_are_such_classes():
    assert {"NativeLinear", "TritonLinear", "ReferenceLinear", "NativeBackend"} <= classes_of_backends()
