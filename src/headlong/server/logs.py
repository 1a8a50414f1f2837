"""One line for each thing worth knowing, as JSON or text, with every control character made harmless.

Routes uvicorn's loggers and our own through one handler. What people write, and what models answer, is dropped here
unless the settings ask for it, whoever passes it in.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

from headlong.printable import printable

LOGGERS = ("headlong", "uvicorn", "asyncio")
PRIVATE = frozenset({"prompt", "output"})
"""Fields that hold people's text."""
_request_log = logging.getLogger("headlong.request")


def setup(
    *, level: str = "info", format: str = "auto", prompts: bool = False, stream: IO[str] | None = None
) -> None:
    """Sends all logs of the server to `stream`, by default stderr; replaces what was set up before."""
    target: IO[str] = stream or sys.stderr
    handler = logging.StreamHandler(target)
    as_text = format == "text" or (format == "auto" and target.isatty())
    handler.setFormatter(TextFormatter(prompts) if as_text else JsonFormatter(prompts))
    handler.addFilter(_worth_telling)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    if level == "info":
        # "Started server process" and the like: the line with the address says all that.
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def log_request(**fields: Any) -> None:
    """Logs one finished request: request_id, caller, method, path, status, model, token counts, times,
    finish_reason."""
    status = fields.get("status", 200)
    level = logging.ERROR if isinstance(status, int) and status >= 500 else logging.INFO
    _request_log.log(level, "request", extra={"fields": fields})


def _worth_telling(record: logging.LogRecord) -> bool:
    """Whether a record of the HTTP server belongs in the log: a request that shutdown or its client cut off is no
    failure of the application."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


class _Formatter(logging.Formatter):
    def __init__(self, prompts: bool) -> None:
        super().__init__()
        self._prompts = prompts

    def fields(self, record: logging.LogRecord) -> Mapping[str, Any]:
        given: Mapping[str, Any] = getattr(record, "fields", {})
        return {
            name: value
            for name, value in given.items()
            if value is not None and (self._prompts or name not in PRIVATE)
        }


class JsonFormatter(_Formatter):
    """Formats a record as one JSON object on one line, ASCII only."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(_Formatter):
    """Formats a record as time, level and message, then `name=value` pairs."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower():<7} {printable(record.getMessage())}"
        for name, value in self.fields(record).items():
            line += f" {name}={_shown(value)}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            line = "\n    ".join([line, *map(printable, trace)])
        return line


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, str):
        return printable(json.dumps(value, ensure_ascii=False, default=str))
    plain = value and value.isprintable() and not any(c in value for c in ' "=')
    return value if plain else printable(json.dumps(value, ensure_ascii=False))
