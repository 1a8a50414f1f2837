"""`headlong bench serve`: load on any OpenAI-compatible server, and a table, a plot and a JSON line of it.

Flags, their limits and the record; the load itself is in load/. Imports no HTTP client: help must answer at once.
"""

import argparse
import json
import math
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headlong
from headlong.cli import options
from headlong.cli.load import flags
from headlong.cli.prompts import read_prompts
from headlong.cli.terminal import console, note
from headlong.errors import ConfigError, RequestError
from headlong.progress import default_progress

if TYPE_CHECKING:
    from headlong.cli.load.client import Client, Identity
    from headlong.cli.load.drive import Block
    from headlong.cli.load.stats import Cell
    from headlong.cli.load.workload import Mtp, Workload

MAX_TOKENS, TIMEOUT, DURATION, ROUNDS, RATE_STREAMS = 128, 300.0, 300.0, 3, 256
MOST_SECONDS = 3600.0
EXIT_NOTHING, EXIT_INTERRUPTED = 1, 130
KEYS = ("HEADLONG_API_KEY", "OPENAI_API_KEY")
EPILOG = """\
Every stream sends its next request when its last one has ended; with --rate requests come at random times
instead, and their latencies count from when they were due. Several --mtp settings take turns, round by round,
on the same requests; their ratio is taken within each round. Greedy unless --temperature says otherwise.
The last line of stdout is a JSON object with all numbers. Ctrl-C prints what was measured until then.

examples:
  headlong bench serve
  headlong bench serve --mtp off,1,3 --concurrency 1,4,16 --plot load.svg
  headlong bench serve --url http://127.0.0.1:8080 --rate 5 --duration 60 --json > result.json
  headlong bench serve --body '{"ignore_eos": true}' --prompts questions.jsonl
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench serve",
        usage="headlong bench serve [options]",
        help="put load on a server and measure it",
        description="Measures throughput, latency and acceptance of any OpenAI-compatible server under load.",
        epilog=EPILOG,
    )

    def add(flag: str, kind: Any, metavar: str, text: str, default: Any = None) -> None:
        parser.add_argument(flag, type=kind, metavar=metavar, default=default, help=text)

    add("--url", str, "URL", "the server (default: http://127.0.0.1:8000)", "http://127.0.0.1:8000")
    add("--model", str, "NAME", "model to ask for (default: the first that the server lists)")
    add("--api-key", str, "KEY", f"key to send (default: {' or '.join(KEYS)} of the environment)")
    choices = {"choices": ("chat", "completions"), "default": "chat", "metavar": "chat|completions"}
    parser.add_argument("--endpoint", **choices, help="which of the two to use (default: chat)")
    add(
        "--mtp",
        flags.settings,
        "LIST",
        "settings of drafting to compare, of auto, on, off and numbers of tokens, such as off,1,3; sent as the "
        "field `speculative`, which only Headlong knows (default: the field is not sent)",
    )
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    parser.add_argument("--json", action="store_true", help="print the JSON line alone, without the table")
    add("--plot", str, "FILE", "draw throughput and latency into this SVG file")
    parser.set_defaults(execute=execute)


def _add_load(group: Any) -> None:
    def add(flag: str, kind: Any, metavar: str, text: str) -> None:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)

    whole, positive = flags.whole, flags.positive
    each = "requests for each concurrency and setting (default: 3 a stream and round)"
    add("--concurrency", flags.streams, "LIST", "streams at once, such as 1,4,16 (default: 1)")
    add("--requests", whole(1), "N", each)
    add("--duration", positive(MOST_SECONDS), "S", "seconds for each, at most (default: 300)")
    add("--rate", positive(1000), "R", "requests per second, arriving as a Poisson process")
    add("--rounds", whole(1, 100), "N", "turns of each setting (default: 3 for several settings, else 1)")
    add("--warmup", whole(0, 1000), "N", "requests before, for each setting, that do not count (default: 1)")
    add("--timeout", positive(MOST_SECONDS), "S", "seconds a request may take (default: 300)")


def _add_requests(group: Any) -> None:
    def add(flag: str, kind: Any, metavar: str, text: str) -> None:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)

    add("--prompts", str, "FILE", "prompts to use (default: six of our own)")
    add("--max-tokens", flags.whole(1), "N", f"tokens of each answer, at most (default: {MAX_TOKENS})")
    add("--temperature", options.number, "X", "0 always takes the likeliest token (default: 0)")
    add("--seed", options.whole, "N", "seed of the first request (the next has N+1) and of arrivals")
    add("--body", flags.json_object, "JSON", "fields to add to every request; null takes one out")


def execute(args: argparse.Namespace) -> int:
    plot = _plot_file(args.plot)
    if args.temperature is not None and not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise RequestError(f"--temperature {args.temperature:g}: must be at least 0")
    import asyncio

    from headlong.cli.load.client import Client, server_root

    workload = _workload(args)
    key = args.api_key or next((value for name in KEYS if (value := os.environ.get(name))), None)
    client = Client(server_root(args.url), key, args.endpoint, args.timeout or TIMEOUT)
    run = Run(args, client, workload)
    interrupted = False
    try:
        asyncio.run(run.run())
    except KeyboardInterrupt:
        interrupted = True
        if not run.blocks:
            raise
    return run.report(plot, interrupted=interrupted)


def _plot_file(name: str | None) -> Path | None:
    """Refused before the run rather than after it."""
    if name is None:
        return None
    path = Path(name)
    if path.suffix.lower() != ".svg":
        raise RequestError(f"--plot {name}: only SVG is drawn; let the name end in .svg")
    if path.is_dir() or not path.parent.is_dir():
        raise RequestError(f"--plot {name}: there is no such folder to write a file into")
    return path


def _workload(args: argparse.Namespace) -> "Workload":
    from headlong.cli.load.workload import MAX_REQUESTS, Workload

    settings: list[Mtp] = args.mtp or [None]
    streams: list[int] = args.concurrency or [RATE_STREAMS if args.rate else 1]
    requests = args.requests
    if requests is None and args.duration is not None:
        requests = MAX_REQUESTS // (len(settings) * len(streams))
    return Workload(
        prompts=read_prompts(args.prompts),
        endpoint=args.endpoint,
        fields={"max_tokens": args.max_tokens or MAX_TOKENS, "temperature": args.temperature or 0.0},
        extra=args.body or {},
        seed=args.seed,
        concurrencies=streams,
        mtp=settings,
        rounds=args.rounds or (ROUNDS if len(settings) > 1 else 1),
        requests=requests,
        duration=args.duration or DURATION,
        rate=args.rate,
    )


class Run:
    """One run from the first question to the record; what was measured stays if it is interrupted."""

    def __init__(self, args: argparse.Namespace, client: "Client", workload: "Workload") -> None:
        self._args, self._client, self._workload = args, client, workload
        self._warmup: int = 1 if args.warmup is None else args.warmup
        self._server: Identity | None = None
        self.blocks: list[Block] = []

    async def run(self) -> None:
        from headlong.cli.load.drive import drive

        try:
            self._server = await self._client.identify()
            fields = self._workload.fields | {"model": self._model(self._server)}
            self._workload = replace(self._workload, fields=fields)
            await drive(self._client, self._workload, self._warmup, self.blocks, default_progress())
        finally:
            await self._client.close()

    def _model(self, server: "Identity") -> str:
        if self._args.model is not None:
            return self._args.model
        if not server.models:
            raise ConfigError("--model: the server lists no models; say which one to ask for")
        return server.models[0]["id"]

    def report(self, plot: Path | None, *, interrupted: bool) -> int:
        from headlong.cli.load import plot as drawing
        from headlong.cli.load import report, stats

        cells = stats.summarise(self.blocks, with_rate=self._workload.rate is not None)
        if not self._args.json:
            screen = console()
            for table in report.tables(cells, self._title(), screen):
                screen.print(table)
            for line in report.notes(cells, interrupted=interrupted):
                screen.print(line, soft_wrap=True)
        if plot is not None:
            _write(plot, drawing.svg(cells, self._title()))
        print(json.dumps(self._record(cells) | {"interrupted": interrupted}))
        if interrupted:
            return EXIT_INTERRUPTED
        return 0 if any(cell.completed for cell in cells) else EXIT_NOTHING

    def _title(self) -> str:
        from headlong.cli.load.answer import one_line

        rate = self._workload.rate
        load = "" if rate is None else f", {rate:g} requests/s"
        return f"{one_line(self._workload.fields['model'])} at {self._client.root}{load}"

    def _record(self, cells: "list[Cell]") -> dict[str, Any]:
        work, server = self._workload, self._server
        assert server is not None
        samples = (sample for block in self.blocks for sample in block.samples)
        return {
            "headlong": headlong.__version__,
            "command": command_line(self._args),
            "time": round(time.time(), 1),
            "url": self._client.root,
            "server": {
                "software": server.software,
                "version": server.version,
                "fingerprint": next((s.fingerprint for s in samples if s.fingerprint), None),
                "model": next((m for m in server.models if m["id"] == work.fields["model"]), None),
            },
            "model": work.fields["model"],
            "endpoint": work.endpoint,
            "prompts_from": self._args.prompts or "built-in",
            "prompts": len(work.prompts),
            "max_tokens": work.fields["max_tokens"],
            "temperature": work.fields["temperature"],
            "seed": work.seed,
            "body": work.extra,
            "rate": work.rate,
            "rounds": work.rounds,
            "warmup": self._warmup,
            "duration": work.duration,
            "timeout": self._client.timeout,
            "results": [cell.as_json() for cell in cells],
        }


def command_line(args: argparse.Namespace) -> str:
    """The command again, from what was understood of it; never the key."""
    words = ["headlong", "bench", "serve"]
    for name, value in vars(args).items():
        if name in ("command", "execute", "api_key") or value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, list):
            words.append(",".join(str(entry) for entry in value))
        elif isinstance(value, dict):
            words.append(json.dumps(value))
        elif value is not True:
            words.append(f"{value:g}" if isinstance(value, float) else str(value))
    return shlex.join(words)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        note(f"--plot {path}: cannot be written ({error.strerror})")
