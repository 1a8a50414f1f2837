"""A small application behind the guard, in a thread, and clients that speak bytes."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn

from headlong.server.protocol import Limits, guarded

LIMITS = Limits(
    max_header_bytes=8192, max_connections=64, header_timeout=0.6, body_timeout=0.5, write_timeout=0.6
)
GET = b"GET /hello HTTP/1.1\r\nHost: here\r\n\r\n"
PATIENCE = 60
SLOW_SECONDS = 1.0
"""What `/slow` takes: longer than any limit above."""


class App:
    """Answers with what it was sent; counts what it has open."""

    def __init__(self) -> None:
        self.open = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        self.open += 1
        try:
            await self.answer(scope, receive, send)
        finally:
            self.open -= 1

    async def answer(self, scope, receive, send) -> None:
        body, status = b"", 200
        if scope["path"] == "/early":
            status = 413
        elif scope["path"] == "/wait":
            message = await receive()
            while message["type"] != "http.disconnect":
                message = await receive()
            return
        else:
            message = {"more_body": True}
            while message.get("more_body"):
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message["body"]
        if scope["path"] == "/slow":
            await asyncio.sleep(SLOW_SECONDS)
        reply = json.dumps(
            {
                "method": scope["method"],
                "path": scope["path"],
                "body": body.decode("latin-1"),
                "headers": [name.decode() for name, _ in scope["headers"]],
            }
        ).encode()
        if scope["path"] == "/large":
            reply = b"x" * 20_000_000
        headers = [(b"content-length", str(len(reply)).encode())]
        if status == 413:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for start in range(0, len(reply), 65536):
            part = reply[start : start + 65536]
            more = start + 65536 < len(reply)
            await send({"type": "http.response.body", "body": part, "more_body": more})


class Running:
    """A server in a thread of its own."""

    def __init__(self, limits: Limits, keep_alive: float) -> None:
        self.app = App()
        config = uvicorn.Config(
            self.app,
            loop="asyncio",
            http=guarded(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=keep_alive,  # type: ignore[arg-type]
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )

    def start(self) -> "Running":
        self._thread.start()
        until(lambda: self.server.started)
        return self

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def connect(self) -> socket.socket:
        client = socket.create_connection(self.address, timeout=PATIENCE)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client

    @property
    def lingering(self) -> int:
        return len(self.server.config.http_protocol_class.lingering)  # type: ignore[attr-defined]

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    def is_well(self) -> None:
        """A newcomer is served."""
        with self.connect() as client:
            client.sendall(GET)
            assert read_answer(client)[0] == 200


@contextlib.contextmanager
def running(limits: Limits = LIMITS, keep_alive: float = 0.6) -> Iterator[Running]:
    server = Running(limits, keep_alive).start()
    try:
        yield server
    finally:
        server.stop()


def until(true) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def read_answer(client: socket.socket) -> tuple[int, dict]:
    """Status and JSON body of one answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        assert part, f"closed after {data!r}"
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
    while len(body) < length:
        part = client.recv(65536)
        assert part, f"closed after {len(body)} of {length} bytes"
        body += part
    return int(head.split()[1]), json.loads(body[:length])


def is_closed(client: socket.socket) -> bool:
    """Waits for the server's end."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def send_until_stopped(client: socket.socket, pieces) -> None:
    """Keeps sending as an attacker would; the server may reset the connection."""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            client.sendall(piece)


def assert_refused(client: socket.socket, status: int, code: str) -> None:
    found, body = read_answer(client)
    assert (found, body["error"]["code"]) == (status, code)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert is_closed(client)
