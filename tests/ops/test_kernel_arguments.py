"""What a kernel is given the address of lives until the kernel returns, whoever else uses the process meanwhile.

An address holds nothing. Memory that is freed before the kernel reads it still has the old numbers in it, mostly: they
change once another thread, or the collector of garbage, allocates in between. So memory that is freed too early is
looked for in the source, and written over on purpose.
"""

import ast
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import headlong
from headlong.engine.build import Built
from headlong.ops import native
from support import tiny, tiny_v4
from support.steps import Driver, Result, load
from support.tiny import random_tokens

ROOT = Path(headlong.__file__).parent
LENGTH = 24
MODELS: dict[str, Callable[[Path], Any]] = {
    "hybrid": lambda folder: tiny.make(folder, "dense"),
    "moe": lambda folder: tiny.make(folder, "moe"),
    "latent": lambda folder: tiny.make(folder, "deepseek_v3"),
    "sinks": lambda folder: tiny.make(folder, "gpt_oss"),
    "compressed": tiny_v4.make,
    "limited": lambda folder: tiny_v4.make(folder, seed=1, swiglu_limit=3.0),
}
built = pytest.mark.skipif(native.library() is None, reason="native kernels are not built or are turned off")


def is_held(node: ast.expr) -> bool:
    """Whether an expression is a name, or something that is reached from one without making anything."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant | ast.Slice):
            return False  # by a tensor of numbers: a copy
        node = node.value
    return isinstance(node, ast.Name)


def addressed(tree: ast.AST) -> list[ast.expr]:
    """Everything whose address is asked for: of a structure, of a tensor, or of what keeps one of its own."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, owner = node.func.attr, node.func.value
            if name == "addressof" or (name == "address" and ast.unparse(owner) == "native"):
                found.append(node.args[0])
            elif name in ("data_ptr", "address"):
                found.append(owner)
    return found


def kernels_callers() -> list[Path]:
    return [path for path in sorted((ROOT / "ops").rglob("*.py")) if addressed(ast.parse(path.read_text()))]


@pytest.mark.parametrize("path", kernels_callers(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_address_of_what_nobody_holds(path):
    loose = [ast.unparse(node) for node in addressed(ast.parse(path.read_text())) if not is_held(node)]
    assert not loose, f"freed before a kernel reads them: {loose}"


@pytest.mark.parametrize(
    ("source", "is_loose"),
    [
        ("f(ctypes.addressof(self.struct))", False),
        ("f(native.address(self.norms[0].weight), x[2:].data_ptr())", False),
        ("f(ctypes.addressof(Struct(1.0)))", True),
        ("f(native.address(x.contiguous()))", True),
        ("f(x[order].data_ptr())", True),
        ("f((x + 1).data_ptr())", True),
    ],
)
def test_what_the_test_above_takes_for_held(source, is_loose):
    assert any(not is_held(node) for node in addressed(ast.parse(source))) == is_loose


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Each model, loaded once it is wanted, with a row's tokens."""

    @cache
    def make(name: str) -> tuple[Built, list[int]]:
        made = MODELS[name](tmp_path_factory.mktemp("tiny"))
        return load(made.folder), random_tokens(made.vocab_size, LENGTH + 1, seed=1)

    return make


def written_over(kernel: Callable[..., None]) -> Callable[..., None]:
    """The same kernel, but between the evaluation of its arguments and the call, all memory that was freed lately is
    taken and filled with ones, which as floats are no numbers."""

    def call(*arguments: Any) -> None:
        objects = [b"\xff" * (16 * blocks - 33) for blocks in range(3, 33) for _ in range(8)]
        tensors = [torch.full((16 * lines,), torch.nan) for lines in range(1, 65)]
        kernel(*arguments)
        del objects, tensors

    return call


def steps(built: Built, script: list[int]) -> list[Result]:
    """A prompt, drafts of which some are right, and plain steps."""
    driver = Driver(built)
    driver.open("row", script)
    found = [driver.feed("row", [5])]
    for seed, (depth, accept) in enumerate(((3, 1), (0, 0), (5, 5), (2, 0))):
        found.append(driver.step(driver.draft("row", depth, accept, seed))["row"])
    return [*found, driver.decode("row", 2)]


def same(found: list[Result], truth: list[Result]) -> bool:
    return all(
        torch.equal(a.hidden, b.hidden) and torch.equal(a.logits, b.logits)
        for a, b in zip(found, truth, strict=True)
    )


@built
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_taken_by_others_before_a_kernel_reads_it(monkeypatch, models, name):
    made, script = models(name)
    truth, kernel = steps(made, script), native.kernel
    assert same(steps(made, script), truth)
    monkeypatch.setattr(native, "kernel", lambda name: written_over(kernel(name)))
    if made.model.program is not None:
        monkeypatch.setattr(made.model.program, "_kernel", written_over(made.model.program._kernel))
    assert same(steps(made, script), truth)


@built
def test_models_of_one_process_at_once(models):
    """Each in a thread of its own, which gives way to the others as often as Python can."""
    truths = {name: steps(*models(name)) for name in MODELS}
    wrong: list[str] = []

    def run(name: str) -> None:
        with torch.inference_mode():
            wrong.extend(name for _ in range(4) if not same(steps(*models(name)), truths[name]))

    threads = [threading.Thread(target=run, args=(name,)) for name in MODELS]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
