"""`headlong ps`: what a running server serves and how busy it is, as the server tells it over HTTP."""

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from headlong.cli.summary import counted
from headlong.cli.terminal import console
from headlong.errors import ConfigError

if TYPE_CHECKING:
    import httpx

URL = "http://127.0.0.1:8000"
KEYS = ("HEADLONG_ADMIN_KEY", "HEADLONG_API_KEY")
SECONDS = 10.0
EPILOG = """\
Rows and pages are those of the model that answers where a request names none. Memory is told to admins alone.

examples:
  headlong ps
  headlong ps --url http://127.0.0.1:8080 --json
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "ps",
        usage="headlong ps [options]",
        help="show what a running server serves",
        description="Shows the models that a running server has loaded, their rows and their memory.",
        epilog=EPILOG,
    )
    parser.add_argument("--url", default=URL, metavar="URL", help=f"the server (default: {URL})")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"key to send (default: {' or '.join(KEYS)} of the environment)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    import httpx

    from headlong.cli.load.client import server_root

    key = args.api_key or next((value for name in KEYS if (value := os.environ.get(name))), None)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    root = server_root(args.url)
    with httpx.Client(base_url=root, headers=headers, timeout=SECONDS, trust_env=False) as client:
        models = _loaded(_get(client, "/v1/models")["data"])
        stats = _get(client, "/v1/stats")
    if args.json:
        print(json.dumps({"url": root, "models": models, "stats": stats}, indent=2))
    else:
        _print(root, models, stats)
    return 0


def _get(client: "httpx.Client", path: str) -> dict[str, Any]:
    """The JSON of one endpoint, or an error that says what to do."""
    import httpx

    try:
        answer = client.get(path)
        found = answer.json() if answer.status_code == httpx.codes.OK else None
    except httpx.HTTPError as error:
        raise ConfigError(
            f"--url {client.base_url}: nobody answers there ({type(error).__name__}); start `headlong serve`, or name "
            "its address"
        ) from None
    except ValueError:
        found, answer = None, httpx.Response(httpx.codes.BAD_GATEWAY)
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise ConfigError(f"--api-key: the server wants another one (status {answer.status_code} of {path})")
    if not isinstance(found, dict):
        raise ConfigError(f"--url {client.base_url}: {path} is not what `headlong serve` answers")
    return found


def _loaded(cards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The models that are loaded, each by its first name: the server lists a card for every name."""
    found: dict[tuple[Any, Any], dict[str, Any]] = {}
    for card in cards:
        if card.get("headlong", {}).get("loaded"):
            found.setdefault((card["root"], card["created"]), card)
    return list(found.values())


def _print(root: str, models: list[dict[str, Any]], stats: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    if not models:
        out.print(f"{root} serves no model")
        return
    table = Table("model", "device", "context", "MTP", "rows", "cache", "memory")
    for card in models:
        own = stats if card["id"] == stats.get("model") else {}
        details = card["headlong"]
        table.add_row(
            card["id"],
            f"{details['device']} {details['dtype']}",
            str(details["context"]),
            "on" if details["mtp"]["available"] else "off",
            _rows(own.get("rows"), details["max_rows"]),
            _pages(own.get("cache")),
            _memory(details.get("memory")),
        )
    out.print(table)
    out.print(f"up for {stats['uptime_s']:.0f} s, {counted(stats['totals']['requests'], 'request')}")


def _rows(rows: dict[str, int] | None, most: int) -> str:
    if rows is None:
        return f"at most {most}"
    waiting = f", {rows['waiting']} waiting" if rows["waiting"] else ""
    return f"{rows['running']} of {rows['max']}{waiting}"


def _pages(cache: dict[str, int] | None) -> str:
    return "-" if cache is None else f"{cache['pages_used']} of {cache['pages_total']} pages"


def _memory(memory: dict[str, Any] | None) -> str:
    from rich.filesize import decimal

    return "-" if memory is None else decimal(memory["total_bytes"])
