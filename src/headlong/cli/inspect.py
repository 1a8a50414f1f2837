"""`headlong inspect`: what a checkpoint holds and whether it can be served. Prints facts, finds none."""

import argparse
import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headlong.cli import options, summary
from headlong.cli.terminal import console
from headlong.progress import default_progress

if TYPE_CHECKING:
    from rich.table import Table

    from headlong.cli.facts import Facts

EXIT_NOT_SERVABLE = 1
EPILOG = """\
Reads the headers of the weight files, not the weights. The exit code is 0 if `headlong run` could serve the
model with the same engine options, 1 if not; the reason is the last thing printed.

examples:
  headlong inspect
  headlong inspect Qwen/Qwen3.5-0.8B --all
  headlong inspect ./my-model --json | jq .head
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        usage="headlong inspect [options] [MODEL]",
        help="show what a checkpoint holds and whether it can be served",
        description="Shows what a checkpoint holds, what it costs and whether its MTP head is usable.",
        epilog=EPILOG,
    )
    options.add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--all", action="store_true", help="list every tensor, not one line per kind of layer"
    )
    options.add_engine(parser)
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    from headlong.cli.facts import gather
    from headlong.config import EngineConfig

    config = EngineConfig(**options.engine_options(args))
    config.resolve_device()
    facts = gather(args.model, config, default_progress(), every=args.all)
    if args.json:
        print(json.dumps(as_json(facts), indent=2))
    else:
        _print(facts)
    return 0 if facts.servable else EXIT_NOT_SERVABLE


def as_json(facts: "Facts") -> dict[str, Any]:
    return {
        "path": str(facts.folder),
        "servable": facts.servable,
        "reason": facts.reason,
        "architecture": _architecture(facts),
        "bytes": {"target": facts.nbytes(head=False), "head": facts.nbytes(head=True)},
        "parameters": {"target": facts.parameters(head=False), "head": facts.parameters(head=True)},
        "modules": [
            {
                "name": module.name,
                "part": "head" if module.in_head else "target",
                "format": module.format,
                "shape": list(module.shape),
                "count": module.count,
                "bytes": module.nbytes,
            }
            for module in facts.modules
        ],
        "skipped": [
            {"reason": skipped.reason, "count": skipped.count, "bytes": skipped.nbytes}
            for skipped in facts.skipped
        ],
        "state": None if facts.state is None else asdict(facts.state),
        "head": asdict(facts.head),
    }


def _architecture(facts: "Facts") -> dict[str, Any] | None:
    if facts.config is None:
        return None if facts.model_type is None else {"model_type": facts.model_type}
    config = facts.config
    return {
        "model_type": facts.model_type,
        "layers": dict(Counter(config.layer_types)),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position": config.max_position,
        "tied_embedding": config.tied,
        "experts": None if config.moe is None else config.moe.num_experts,
        "active_experts": None if config.moe is None else config.moe.num_active,
    }


def _print(facts: "Facts") -> None:
    from rich.filesize import decimal

    out = console()
    out.print(str(facts.folder))
    out.print(_architecture_line(facts))
    if facts.modules:
        out.print(_table(facts))
    for part, in_head in (("target", False), ("head", True)):
        nbytes, count = facts.nbytes(head=in_head), facts.parameters(head=in_head)
        out.print(f"{part + ':':<8}{decimal(nbytes)}, {count:,} parameters")
    for skipped in facts.skipped:
        out.print(
            f"skipped: {summary.counted(skipped.count, 'tensor')}, {decimal(skipped.nbytes)} ({skipped.reason})"
        )
    if facts.state is not None:
        state = facts.state
        out.print(
            f"state:  {decimal(state.kv_bytes_per_token)} of keys and values per token, "
            f"{decimal(state.recurrent_bytes_per_sequence)} of recurrent state per sequence "
            f"(in {state.dtype}, drafts up to {state.max_drafts})"
        )
    out.print("MTP:    usable head" if facts.head.usable else f"MTP:    no drafting: {facts.head.reason}")
    out.print("can be served" if facts.servable else f"cannot be served: {facts.reason}")


def _architecture_line(facts: "Facts") -> str:
    found = _architecture(facts)
    if found is None:
        return "architecture unknown"
    if "layers" not in found:
        return f"{found['model_type']}"
    layers = " + ".join(f"{count} {kind}" for kind, count in found["layers"].items())
    experts = f", {found['experts']} experts ({found['active_experts']} active)" if found["experts"] else ""
    tied = ", tied embedding" if found["tied_embedding"] else ""
    return (
        f"{found['model_type']}: {layers} layers, hidden {found['hidden_size']}, "
        f"vocabulary {found['vocab_size']}, context {found['max_position']}{experts}{tied}"
    )


def _table(facts: "Facts") -> "Table":
    from rich.filesize import decimal
    from rich.table import Table

    table = Table("module", "format", "shape", "count", "bytes")
    for column, justify in zip(table.columns, ("left", "left", "left", "right", "right"), strict=True):
        column.justify = justify
        column.overflow = "fold"
    before = None
    for module in facts.modules:
        if before is not None and module.group != before:
            table.add_section()
        before = module.group
        shape = " x ".join(str(size) for size in module.shape)
        table.add_row(module.name, module.format, shape, str(module.count), decimal(module.nbytes))
    return table
