"""A real `headlong serve` process on a free port, its line, its log and its end."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

PATIENCE = 120
COMMAND = "import sys; from headlong.cli.main import main; sys.exit(main())"


class Serving:
    """A `headlong serve` process on a free port, or one of another command that serves; `before` is run first in it."""

    def __init__(self, *flags: str, before: str = "", command: str = "serve", **environment: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADLONG_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{before}\n{COMMAND}", command, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean | environment,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self.errors: list[str] = []
        self._reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True)  # type: ignore[arg-type]
        self._reader.start()
        self.line = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.line)
        assert found, f"{self.line!r}\n{''.join(self.errors)}"
        self.url = found.group()

    def ask(self, path: str, body: dict | None = None, **headers: str) -> tuple[int, dict]:
        data = None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, named)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> tuple[int, list[dict]]:
        """The exit code and the log's entries."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code, [json.loads(line) for line in self.errors]


@contextlib.contextmanager
def serving(*flags: str, before: str = "", command: str = "serve", **environment: str) -> Iterator[Serving]:
    server = Serving(*flags, before=before, command=command, **environment)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        server.process.stdout.close()  # type: ignore[union-attr]
        server.process.stderr.close()  # type: ignore[union-attr]
