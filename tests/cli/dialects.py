"""A small real HTTP server that streams as several kinds of servers do; the model's name chooses the dialect.

Serves on 127.0.0.1 from a thread of its own, records what it was asked, and stops with its `with` block.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from support.command import Outcome

WORDS = ("One", " two", " three", " four", " five")
CRLF_EVENT = "data: {}\r\n\r\n"


def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> str:
    delta = {"role": "assistant", "content": None} if text is None and finish is None else {"content": text}
    choice = {"index": 0, "delta": delta if finish is None else {}, "finish_reason": finish}
    return json.dumps({"choices": [choice]} | more)


def events(*datas: str) -> str:
    return "".join(f"data: {data}\n\n" for data in datas)


def usage(tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens} | more


def spoken(*, last: dict[str, Any] | None = None, words: tuple[str, ...] = WORDS) -> list[str]:
    """A role, the words, the reason for the end, and what comes with it."""
    return [chunk(), *(chunk(word) for word in words), chunk(finish="stop", **(last or {}))]


def mtp(body: dict[str, Any]) -> Any:
    return (body.get("speculative") or {}).get("mtp")


async def plain(_: dict[str, Any]) -> AsyncIterator[str]:
    """No usage, whatever was asked."""
    for data in [*spoken(), "[DONE]"]:
        yield events(data)


async def untidy(_: dict[str, Any]) -> AsyncIterator[str]:
    """CRLF, comments, other fields, data over two lines, usage in a chunk of its own, no blank line at the end."""
    yield ": hello\r\n\r\nretry: 100\r\n"
    for data in spoken():
        first, comma, rest = data.partition(", ")
        yield f": ping\r\nid: 1\r\ndata: {first}{comma}\r\ndata:{rest}\r\n\r\n"
    yield CRLF_EVENT.format(json.dumps({"choices": [], "usage": usage(9)}))
    yield "data: [DONE]"


async def byte_by_byte(_: dict[str, Any]) -> AsyncIterator[str]:
    for character in events(*spoken(words=("Ünï", "cödé 🌊"), last={"usage": usage(4)}), "[DONE]").replace(
        "\n", "\r"
    ):
        yield character


async def steady(body: dict[str, Any]) -> AsyncIterator[str]:
    """50 ms to the first word, then 20 ms a word; without drafting, four times that."""
    slow = 4 if mtp(body) == "off" else 1
    await asyncio.sleep(0.05)
    for data in spoken(last={"usage": usage(5)}):
        yield events(data)
        await asyncio.sleep(0.02 * slow)
    yield events("[DONE]")


async def drafting(body: dict[str, Any]) -> AsyncIterator[str]:
    """llama.cpp's timings: 9 tokens, of which 4 of 6 drafts, unless drafting is off."""
    drafts = {} if mtp(body) == "off" else {"draft_n": 6, "draft_n_accepted": 4}
    yield events(*spoken(last={"usage": usage(9), "timings": {"predicted_n": 9} | drafts}), "[DONE]")


async def measuring(_: dict[str, Any]) -> AsyncIterator[str]:
    """vLLM's metrics, beside others that say less."""
    spec = {"num_draft_tokens": 12, "num_accepted_draft_tokens": 3, "num_spec_steps": 4}
    last = {
        "usage": usage(8),
        "metrics": {"speculative_decoding": spec},
        "timings": {"draft_n": 1, "draft_n_accepted": 1},
    }
    yield events(*spoken(last=last), "[DONE]")


async def predicting(_: dict[str, Any]) -> AsyncIterator[str]:
    details = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 6}
    yield events(*spoken(last={"usage": usage(6, completion_tokens_details=details)}), "[DONE]")


async def complaining(_: dict[str, Any]) -> AsyncIterator[str]:
    yield events(*spoken()[:3])
    yield 'event: error\ndata: {"error": {"message": "out of\\u001b[31m pages"}}\n\n'


async def cut(_: dict[str, Any]) -> AsyncIterator[str]:
    yield events(*spoken()[:3])


async def hanging(_: dict[str, Any]) -> AsyncIterator[str]:
    yield events(*spoken()[:3])
    await asyncio.sleep(60)


async def lingering(_: dict[str, Any]) -> AsyncIterator[str]:
    """Says that it is done and does not end the body."""
    yield events(*spoken(last={"usage": usage(5)}), "[DONE]")
    await asyncio.sleep(60)


async def single(_: dict[str, Any]) -> AsyncIterator[str]:
    """No stream at all."""
    yield json.dumps({"choices": [{"message": {"content": "Hello"}}], "usage": usage(1)})


Dialect = Callable[[dict[str, Any]], AsyncIterator[str]]
DIALECTS: dict[str, Dialect] = {
    f.__name__: f
    for f in (
        *(plain, untidy, byte_by_byte, steady, drafting, measuring, predicting),
        *(complaining, cut, hanging, lingering, single),
    )
} | {"counting": plain, "fussy": plain, "busy": plain, "rude": plain, "dead": plain}


class DialectServer:
    """`with DialectServer() as server:` serves at `server.url`."""

    def __init__(self, *, key: str | None = None) -> None:
        self._key = key
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> "DialectServer":
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            used = 0
            while await self._exchange(reader, writer, used):
                used += 1
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, used: int) -> bool:
        """One request and its answer; whether the connection goes on. `used`: how often it was used before."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        lines = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        if self._key is not None and headers.get("authorization") != f"Bearer {self._key}":
            return _answer(writer, 401, {"error": {"message": "Incorrect API key"}})
        path = lines[0].split()[1]
        if not content:
            return self._look(writer, path)
        body = json.loads(content)
        self.bodies.append(body)
        if body["model"] == "dead" or (body["model"] == "rude" and used):
            return False
        return await self._generate(writer, body)

    def _look(self, writer: asyncio.StreamWriter, path: str) -> bool:
        if path == "/v1/models":
            return _answer(writer, 200, {"data": [{"id": name, "object": "model"} for name in DIALECTS]})
        if path == "/version":
            return _answer(writer, 200, {"version": "9.8.7"})
        if path == "/metrics" and any(body["model"] == "counting" for body in self.bodies):
            # Two engines of one server: the counters are the sum over the labels.
            total = sum(body["model"] == "counting" for body in self.bodies)
            names = {"draft": 2 * total, "accepted": total}
            samples = [
                f'vllm:spec_decode_num_{kind}_tokens_total{{engine="{engine}",name="a b"}} {value:.1f}'
                for kind, value in names.items()
                for engine in (0, 1)
            ]
            page = "\n".join(["# TYPE vllm:spec_decode_num_draft_tokens_total counter", *samples, ""])
            return _answer(writer, 200, page)
        return _answer(writer, 404, {"error": {"message": "File Not Found"}})

    async def _generate(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> bool:
        model = body["model"]
        if model not in DIALECTS:
            return _answer(writer, 404, {"error": {"message": f"The model `{model}` does not exist."}})
        if model == "fussy" and (refused := {"stream_options", "speculative"} & set(body)):
            return _answer(writer, 400, {"detail": f"extra fields not permitted: {sorted(refused)}"})
        if model == "busy" and len(self.bodies) % 2 == 0:
            return _answer(writer, 429, {"error": {"message": "queue full"}}, "Retry-After: 0\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            async for text in DIALECTS[model](body):
                content = text.encode()
                # A character's bytes may come apart, as on any network.
                for part in (
                    [content[i : i + 1] for i in range(len(content))] if len(content) < 5 else [content]
                ):
                    writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    await writer.drain()
        finally:
            self._running -= 1
        if model == "cut":
            return False
        writer.write(b"0\r\n\r\n")
        return True


def _answer(writer: asyncio.StreamWriter, status: int, body: dict[str, Any] | str, headers: str = "") -> bool:
    content = (body if isinstance(body, str) else json.dumps(body)).encode()
    head = f"HTTP/1.1 {status} X\r\nServer: dialects\r\n{headers}Content-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    return True


def record(done: Outcome) -> dict[str, Any]:
    return json.loads(done.out.splitlines()[-1])


def only(done: Outcome) -> dict[str, Any]:
    (result,) = record(done)["results"]
    return result
