"""What tests of written checkpoints share: tensors by meaning, an interrupt in the middle, and a command line."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headlong import LLM, SamplingParams
from headlong.cli import head, quantize
from headlong.cli.options import Parser
from headlong.convert.head import open_artifact
from headlong.models import registry

PROMPTS = (
    "Write a short story about a shy dragon who learns to share.",
    "Explain rain to a child.",
    "Give me three tips for sleeping better.",
    "Write a letter to a friend about a rainy day.",
)
DEPTH = 3


def tensors(path: Path) -> dict[str, tuple[str, Tensor]]:
    """Every tensor by canonical name, with its stored type and its bytes; those stored in a way of their own (MLX) as
    the values they stand for."""
    checkpoint = open_artifact(path)
    names = registry.names_of(checkpoint)
    found = {}
    for name, info in names.sources.items():
        tensor = checkpoint.read(info.name)
        if name in names.transforms and not checkpoint.is_gguf:
            tensor = names.transforms[name].to_model(tensor).to(tensor.dtype)
        found[name] = (info.dtype, tensor.contiguous().view(-1).view(torch.uint8))
    return found


def assert_same(one: Path, other: Path) -> None:
    left, right = tensors(one), tensors(other)
    assert left.keys() == right.keys()
    for name, (dtype, data) in left.items():
        assert right[name][0] == dtype, name
        assert torch.equal(right[name][1], data), name


class Interrupt:
    """A progress callback that is interrupted at its n-th call."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, _label: str, _done: int, _total: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def assert_interruptible(work: Callable[..., object], out: Path) -> None:
    """`work(out, progress=)`, interrupted at its first report, in the middle and at its last, leaves nothing behind."""
    reports: list[str] = []
    work(out.with_name(f"counted-{out.name}"), progress=lambda label, *_: reports.append(label))
    before = sorted(out.parent.rglob("*"))
    for at in {0, len(reports) // 2, len(reports) - 1}:
        with pytest.raises(KeyboardInterrupt):
            work(out, progress=Interrupt(at))
        assert sorted(out.parent.rglob("*")) == before


def command(*words: str) -> int:
    """Runs one of the commands, without the outermost `headlong`."""
    parser = Parser(prog="headlong")
    commands = parser.add_subparsers(parser_class=Parser)
    for module in (head, quantize):
        module.add_parser(commands)
    args = parser.parse_args(words)
    return args.execute(args)


@cache
def greedy(model: Path, mtp: str) -> tuple[list[tuple[int, ...]], float]:
    """Tokens of every prompt, and the share of drafts that was accepted."""
    llm = LLM(model, mtp=mtp, dtype="float32", draft_tokens=DEPTH)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=48, temperature=0.0)
    done = llm.chat([[{"role": "user", "content": prompt}] for prompt in PROMPTS], params)
    drafted = sum(one.stats.drafted for one in done)
    accepted = sum(one.stats.accepted for one in done)
    return [one.token_ids for one in done], accepted / drafted if drafted else 0.0
