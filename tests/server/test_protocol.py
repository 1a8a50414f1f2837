"""The guard at the socket, over raw sockets: what a client may do wrong, and that others are served meanwhile."""

import asyncio.selector_events
import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from raw_http import (
    GET,
    LIMITS,
    Running,
    assert_refused,
    is_closed,
    read_answer,
    running,
    send_until_stopped,
    until,
)

from headlong.server import protocol

pytestmark = pytest.mark.serial  # clients that are too slow by tenths of a second, and others that are not


@pytest.fixture(scope="module", autouse=True)
def impatience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "LINGER_SECONDS", 0.5)
        patch.setattr(protocol, "BODY_GRACE_SECONDS", 0.1)
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as one:
        yield one


def test_ordinary_requests_on_one_connection(server: Running) -> None:
    with server.connect() as client:
        for number in range(5):
            body = b"b" * number * 30_000
            client.sendall(
                b"POST /%d HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (number, len(body)) + body
            )
            status, echo = read_answer(client)
            assert (status, echo["path"], echo["body"].encode()) == (200, f"/{number}", body)


def test_a_byte_at_a_time_within_the_deadline(server: Running) -> None:
    with server.connect() as client:
        for byte in GET:
            client.sendall(bytes([byte]))
            time.sleep(0.003)
        assert read_answer(client)[0] == 200


def test_a_byte_at_a_time_past_the_deadline(server: Running) -> None:
    with server.connect() as client:
        started = time.monotonic()

        def drip() -> Iterator[bytes]:
            for byte in GET + GET:
                yield bytes([byte])
                time.sleep(0.05)
                if time.monotonic() - started > 1.2:
                    return

        send_until_stopped(client, drip())
        assert_refused(client, 408, "request_timeout")
        assert time.monotonic() - started < 5
    server.is_well()


def test_many_slow_clients_do_not_stop_a_quick_one(server: Running) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(40)]
        for client in slow:
            client.sendall(b"GET / HT")
        server.is_well()
        for client in slow:
            assert_refused(client, 408, "request_timeout")
    until(lambda: server.connections == 0)


def test_a_silent_connection_is_closed_without_a_word(server: Running) -> None:
    with server.connect() as client:
        assert is_closed(client)


def test_an_idle_connection_is_closed(server: Running) -> None:
    with server.connect() as client:
        client.sendall(GET)
        read_answer(client)
        assert is_closed(client)


def test_a_slow_second_request_on_a_connection(server: Running) -> None:
    with server.connect() as client:
        client.sendall(GET)
        read_answer(client)
        client.sendall(b"GE")
        assert_refused(client, 408, "request_timeout")


@pytest.mark.parametrize("value", [b"x: " + b"v" * 10_000_000, b"x: y\r\n" * 1_600_000, b"n" * 10_000_000])
def test_header_floods(server: Running, value: bytes) -> None:
    with server.connect() as client:
        flood = b"GET / HTTP/1.1\r\nHost: h\r\n" + value
        send_until_stopped(client, (flood[i : i + 65536] for i in range(0, len(flood), 65536)))
        assert_refused(client, 431, "headers_too_large")
    server.is_well()


def test_the_limit_on_heads_is_exact_enough(server: Running) -> None:
    def status(size: int) -> int:
        with server.connect() as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"v" * size + b"\r\n\r\n")
            return read_answer(client)[0]

    assert status(LIMITS.max_header_bytes - 100) == 200
    assert status(LIMITS.max_header_bytes + 1) == 431


def test_many_small_headers(server: Running) -> None:
    def status(count: int) -> int:
        with server.connect() as client:
            client.sendall(b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * count + b"\r\n")
            return read_answer(client)[0]

    assert status(protocol.MAX_HEADERS) == 200
    assert status(protocol.MAX_HEADERS + 1) == 431


def test_blank_lines_without_end(server: Running) -> None:
    with server.connect() as client:
        send_until_stopped(client, [b"\r\n" * 8192] * 100)
        assert_refused(client, 431, "headers_too_large")


def test_trailers_without_end(server: Running) -> None:
    with server.connect() as client:
        head = b"POST /hello HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX: "
        send_until_stopped(client, [head, *([b"v" * 65536] * 100)])
        assert_refused(client, 431, "headers_too_large")
    until(lambda: server.app.open == 0)


def test_trailers_are_dropped(server: Running) -> None:
    with server.connect() as client:
        head = b"POST /hello HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head + b"2\r\nab\r\n0\r\nX-Admin-Key: later\r\n\r\n")
        status, echo = read_answer(client)
        assert (status, echo["body"], echo["headers"]) == (200, "ab", ["host", "transfer-encoding"])


def test_long_targets() -> None:
    def status(size: int) -> tuple[int, dict]:
        with server.connect() as client:
            client.sendall(b"GET /" + b"p" * (size - 1) + b" HTTP/1.1\r\nHost: h\r\n\r\n")
            return read_answer(client)

    with running(replace(LIMITS, max_header_bytes=65536)) as server:
        assert status(protocol.MAX_TARGET_BYTES)[0] == 200
        found, body = status(protocol.MAX_TARGET_BYTES + 1)
        assert (found, body["error"]["code"]) == (414, "target_too_long")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02\x03",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # TLS ClientHello
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost h\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\n : empty\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\r\n\r\n\r\n\xde\xad\xbe\xef",
    ],
)
def test_no_http(server: Running, garbage: bytes) -> None:
    with server.connect() as client:
        client.sendall(garbage)
        assert_refused(client, 400, "invalid_http")
    server.is_well()
    until(lambda: server.app.open == 0)


def test_half_closed_clients_are_gone(server: Running) -> None:
    with server.connect() as client:
        client.sendall(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n")
        until(lambda: server.app.open == 1)
        client.shutdown(socket.SHUT_WR)
        until(lambda: server.app.open == 0)
        assert is_closed(client)


@pytest.mark.parametrize("part", [b"", b"GET ", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nab"])
def test_half_closed_in_the_middle(server: Running, part: bytes) -> None:
    with server.connect() as client:
        client.sendall(part)
        client.shutdown(socket.SHUT_WR)
        assert is_closed(client)
    until(lambda: server.app.open == 0 and server.connections == 0)
    assert server.lingering == 0


def test_a_body_that_stops_coming(server: Running) -> None:
    with server.connect() as client:
        client.sendall(b"POST /hello HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nabc")
        assert_refused(client, 408, "request_timeout")
    until(lambda: server.app.open == 0)


def test_an_answer_before_the_body_is_through_is_readable(server: Running) -> None:
    """The client goes on sending long after the server has answered and wants to leave."""
    with server.connect() as client:
        client.sendall(b"POST /early HTTP/1.1\r\nHost: h\r\nContent-Length: 40000000\r\n\r\n")
        send_until_stopped(client, [b"b" * 65536] * 600)
        assert read_answer(client)[0] == 413
        assert is_closed(client)
    until(lambda: server.connections == 0)


def test_a_body_nobody_reads_does_not_hold_the_connection() -> None:
    """Answered already, then a byte now and then."""
    with running(replace(LIMITS, body_timeout=0.2), keep_alive=30) as own, own.connect() as client:
        own.app.answer = _answer_at_once  # type: ignore[method-assign]
        client.sendall(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n")
        assert read_answer(client)[0] == 200
        send_until_stopped(client, (time.sleep(0.05) or b"b" for _ in range(40)))
        assert is_closed(client)
        until(lambda: own.connections == 0)


async def _answer_at_once(scope, receive, send) -> None:  # noqa: ARG001
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


def test_a_reader_that_does_not_read(server: Running) -> None:
    with server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /large HTTP/1.1\r\nHost: h\r\n\r\n")
        until(lambda: server.app.open == 1)
        until(lambda: server.app.open == 0 and server.connections == 0)


@pytest.mark.parametrize("more", [GET, GET * 3000, b"\x00 no http", b"GET / HT"])
def test_pipelining_is_answered_once(server: Running, more: bytes) -> None:
    with server.connect() as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(b"POST /first HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nab" + more)
        if len(more) < LIMITS.max_header_bytes:
            status, echo = read_answer(client)
            assert (status, echo["path"], echo["body"]) == (200, "/first", "ab")
            assert is_closed(client)
    until(lambda: server.connections == 0)
    server.is_well()


@pytest.mark.parametrize("more", [b"\r\n", GET, b"GE", b"\xff", b"\r\n" * 2_000_000])
def test_what_comes_during_an_answer_does_not_harm_it(server: Running, more: bytes) -> None:
    """The answer takes longer than a head may; old clients end a body with a line break too many."""
    with server.connect() as client:
        client.sendall(b"POST /slow HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nab")
        until(lambda: server.app.open == 1)
        send_until_stopped(client, [more])
        if len(more) < LIMITS.max_header_bytes:
            status, echo = read_answer(client)
            assert (status, echo["body"]) == (200, "ab")
        else:
            assert is_closed(client), "a flood ends the connection without a word"
    until(lambda: server.connections == 0 and server.app.open == 0)


def test_leaving_while_pipelining_is_noticed(server: Running) -> None:
    with server.connect() as client:
        client.sendall(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n" + GET)
        until(lambda: server.app.open == 1)
    until(lambda: server.app.open == 0)


@pytest.mark.parametrize("offer", [b"websocket", b"h2c"])
def test_offers_to_upgrade_are_declined(server: Running, offer: bytes) -> None:
    head = b"Host: h\r\nConnection: Upgrade\r\nUpgrade: " + offer + b"\r\n"
    with server.connect() as client:
        for _ in range(2):
            client.sendall(b"POST /up HTTP/1.1\r\n" + head + b"Content-Length: 5\r\n\r\nhello")
            status, echo = read_answer(client)
            assert (status, echo["path"], echo["body"]) == (200, "/up", "hello")
        client.sendall(b"GET /ws HTTP/1.1\r\n" + head + b"\r\n")
        assert read_answer(client)[0] == 200


def test_too_many_connections() -> None:
    limits = replace(LIMITS, max_connections=4, header_timeout=30)
    with running(limits) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(server.connect()) for _ in range(4)]
        until(lambda: server.connections == 4)
        for _ in range(8):
            with server.connect() as client:
                with contextlib.suppress(ConnectionError):
                    client.sendall(GET)
                assert_refused(client, 503, "too_many_connections")
        held[0].sendall(GET)
        assert read_answer(held[0])[0] == 200
        held[0].close()
        until(lambda: server.connections == 3)
        server.is_well()


def test_refusals_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that linger are bounded; the others are closed at once."""
    monkeypatch.setattr(protocol, "MAX_LINGERING", 5)
    with (
        running(replace(LIMITS, max_connections=1, header_timeout=30)) as server,
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(server.connect())
        until(lambda: server.connections == 1)
        clients = [stack.enter_context(server.connect()) for _ in range(40)]
        for client in clients:
            assert read_answer(client)[0] == 503
        assert server.lingering <= 5
        stack.close()
        until(lambda: server.lingering == 0)


SEEDS = (
    GET,
    b"POST /hello HTTP/1.1\r\nHost: h\r\nContent-Length: 11\r\n\r\nhello world",
    b"POST /hello HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\nX: y\r\n\r\n",
    b"POST /hello HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi",
    b"GET /wait HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n\r\n",
)


def mutated(random: Random) -> bytes:
    """A request, or two, with a few bytes changed, lost, repeated or cut off."""
    data = bytearray(random.choice(SEEDS) + random.choice([b"", *SEEDS]))
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(data))
        match random.randrange(5):
            case 0:
                data[place] = random.randrange(256)
            case 1:
                del data[place : place + random.randint(1, 8)]
            case 2:
                data[place:place] = data[place : place + 20] * random.randint(1, 50)
            case 3:
                data[place:place] = random.randbytes(random.randint(1, 30))
            case 4:
                del data[max(1, place) :]
        data = data or bytearray(b"x")
    return bytes(data)


def test_a_client_that_is_gone_when_its_half_is_closed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its system may have dropped the connection before ours was told."""
    closed = []

    def gone(_transport: object) -> None:
        closed.append(1)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with running() as server:
        with monkeypatch.context() as patch, server.connect() as client:
            patch.setattr(asyncio.selector_events._SelectorSocketTransport, "write_eof", gone)
            client.sendall(b"POST /early HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n")
            assert read_answer(client)[0] == 413
            until(lambda: bool(closed) and server.lingering == 0)
        server.is_well()
    assert not [record for record in caplog.records if record.exc_info]


def test_mutated_requests_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    random = Random(0)
    with running(replace(LIMITS, max_connections=1000)) as server, contextlib.ExitStack() as stack:
        for number in range(400):
            client = stack.enter_context(server.connect())
            data = mutated(random)
            with contextlib.suppress(ConnectionError):
                cut = random.randrange(len(data))
                client.sendall(data[:cut])
                client.sendall(data[cut:])
                if number % 4 == 0:
                    client.shutdown(socket.SHUT_WR)
            if number % 4 == 1:
                client.close()
        server.is_well()
        stack.close()
        until(lambda: server.connections == 0 and server.app.open == 0)
        server.is_well()
        until(lambda: server.lingering == 0)
    assert not [record for record in caplog.records if record.exc_info]
