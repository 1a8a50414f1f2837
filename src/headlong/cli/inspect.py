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

    from headlong.cli.facts import Facts, StateCost
    from headlong.cli.modules import Module

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
    parser.add_argument(
        "--context",
        type=options.whole,
        metavar="N",
        help="count the state of sequences this long (default: all)",
    )
    parser.add_argument("--batch", type=options.whole, metavar="N", help="and this many of them (default: 1)")
    options.add_chat_template(parser)
    options.add_generation_config(parser)
    options.add_engine(parser)
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    from headlong.cli.facts import gather
    from headlong.config import EngineConfig
    from headlong.errors import ConfigError

    config = EngineConfig(**options.engine_options(args))
    config.resolve_device()
    config.resolve_draft_device()
    for name in ("context", "batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(args, name)}")
    facts = gather(
        args.model, config, default_progress(), every=args.all, context=args.context, batch=args.batch or 1
    )
    if args.json:
        print(json.dumps(as_json(facts), indent=2))
    else:
        _print(facts, every=args.all)
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
                "bits": round(module.bits, 3),
                "shape": list(module.shape),
                "count": module.count,
                "bytes": module.nbytes,
                "kernel": module.kernel,
                "device": module.device,
                "reason": module.reason,
            }
            for module in facts.modules
        ],
        "skipped": [
            {"reason": skipped.reason, "count": skipped.count, "bytes": skipped.nbytes}
            for skipped in facts.skipped
        ],
        "state": None if facts.state is None else _state(facts.state),
        "head": asdict(facts.head) | {"verdict": _verdict(facts)},
        "sampling": facts.sampling,
    }


def _state(state: "StateCost") -> dict[str, Any]:
    return asdict(state) | {"kv_bytes": state.kv_bytes, "recurrent_bytes": state.recurrent_bytes}


def _verdict(facts: "Facts") -> str:
    """The head in one sentence."""
    if not facts.head.usable:
        return f"no drafting: {facts.head.reason}"
    from rich.filesize import decimal

    modules = [module for module in facts.modules if module.in_head]
    formats = sorted({module.format for module in modules if module.kernel is not None})
    size, drafts = decimal(facts.nbytes(head=True)), facts.state.max_drafts if facts.state else 0
    return f"usable head, {size} ({', '.join(formats)}), drafts up to {drafts} tokens a step"


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


def _print(facts: "Facts", *, every: bool) -> None:
    from rich.filesize import decimal

    from headlong.checkpoint.generation import in_words

    out = console()
    out.print(str(facts.folder))
    out.print(_architecture_line(facts))
    # Of a model that does not fit every tensor is a row of its own, and what is wrong shall stay on the screen.
    if facts.modules and (every or facts.config is not None):
        out.print(_table(facts.modules))
    elif facts.modules:
        out.print(f"{summary.counted(len(facts.modules), 'tensor')}, which --all lists")
    for reason, names in _reasons(facts).items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        out.print(f"why:    {names[0]}{others}: {reason}")
    for part, in_head in (("target", False), ("head", True)):
        nbytes, count = facts.nbytes(head=in_head), facts.parameters(head=in_head)
        out.print(f"{part + ':':<8}{decimal(nbytes)}, {count:,} parameters")
    for skipped in facts.skipped:
        out.print(
            f"skipped: {summary.counted(skipped.count, 'tensor')}, {decimal(skipped.nbytes)} ({skipped.reason})"
        )
    if facts.state is not None:
        state, weights = facts.state, facts.nbytes(head=False) + facts.nbytes(head=True)
        out.print(
            f"state:  {decimal(state.kv_bytes_per_token)} of keys and values per token, "
            f"{decimal(state.recurrent_bytes_per_sequence)} of recurrent state per sequence "
            f"(in {state.dtype}, drafts up to {state.max_drafts})"
        )
        out.print(
            f"memory: {decimal(weights + state.kv_bytes + state.recurrent_bytes)} = {decimal(weights)} weights + "
            f"{decimal(state.kv_bytes)} keys and values + {decimal(state.recurrent_bytes)} recurrent state, "
            f"for {summary.counted(state.batch, 'sequence')} of {state.context} tokens on {facts.device}"
        )
    out.print(f"MTP:    {_verdict(facts)}")
    if facts.sampling is not None:
        told = in_words(facts.sampling) if facts.sampling else "nothing recommended"
        out.print(f"sampling where nobody says: {told}")
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


def _reasons(facts: "Facts") -> dict[str, list[str]]:
    """Every reason once, with the modules it holds for."""
    found: dict[str, list[str]] = {}
    for module in facts.modules:
        if module.reason:
            found.setdefault(module.reason, []).append(module.name)
    return found


def _table(modules: "list[Module]") -> "Table":
    from rich.filesize import decimal
    from rich.table import Table

    columns = ("module", "format", "bits", "shape", "count", "bytes", "kernel")
    table = Table(*columns)
    for column in table.columns:
        column.justify = "right" if column.header in ("bits", "count", "bytes") else "left"
        column.overflow = "fold"
    before = None
    for module in modules:
        if before is not None and module.group != before:
            table.add_section()
        before = module.group
        shape = " x ".join(str(size) for size in module.shape)
        table.add_row(
            module.name,
            module.format,
            f"{module.bits:.4g}",
            shape,
            str(module.count),
            decimal(module.nbytes),
            module.kernel or "",
        )
    return table
