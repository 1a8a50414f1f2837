"""Logs: one line per event, no text of people's, no way to forge a line."""

import asyncio
import io
import json
import logging

import pytest

from headlong.server import logs

NASTY = [
    "\n2030-01-01 error forged=1",
    "\r\nforged",
    "\x1b[2J\x1b[31mred",
    "\u2028forged",
    "\u202egnp.exe",
    "\x00\x07\x7f\x9b",
    'quote" and = and space',
    "\ud800 lone",
]


pytestmark = pytest.mark.usefixtures("loggers_as_before")


def lines(**options) -> "tuple[io.StringIO, callable]":  # type: ignore[valid-type]
    stream = io.StringIO()
    logs.setup(stream=stream, **options)
    return stream, lambda: stream.getvalue().splitlines()


def test_one_json_line_per_request():
    _, read = lines(format="json")
    logs.log_request(
        request_id="r1", caller="anonymous", path="/v1/x", status=200, model="m", ttft_ms=None, seconds=0.5
    )
    (line,) = read()
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "info",
        "logger": "headlong.request",
        "message": "request",
        "request_id": "r1",
        "caller": "anonymous",
        "path": "/v1/x",
        "status": 200,
        "model": "m",
        "seconds": 0.5,
    }


@pytest.mark.parametrize(("status", "level"), [(200, "info"), (404, "info"), (499, "info"), (500, "error")])
def test_level_of_a_request(status, level):
    _, read = lines(format="json")
    logs.log_request(status=status)
    assert json.loads(read()[0])["level"] == level


@pytest.mark.parametrize("format", ["json", "text"])
@pytest.mark.parametrize("nasty", NASTY)
def test_nothing_forges_a_line(format, nasty):
    stream, read = lines(format=format)
    logs.log_request(request_id=nasty, path=f"/{nasty}", status=200)
    logging.getLogger("headlong.x").warning("message with %s", nasty)
    logging.getLogger("uvicorn.error").warning("message with %s", nasty)
    text = stream.getvalue()
    assert len(read()) == text.count("\n") == 3
    assert all(line.isprintable() for line in text.split("\n"))
    if format == "json":
        assert json.loads(read()[0])["path"] == f"/{nasty}"


def test_text_pairs_can_be_told_apart():
    _, read = lines(format="text")
    logs.log_request(path="/a b", caller='x" status=500', seconds=0.123456, status=200, done=True)
    assert read()[0].endswith(
        r"""request path="/a b" caller="x\" status=500" seconds=0.1235 status=200 done=true"""
    )


@pytest.mark.parametrize("format", ["json", "text"])
@pytest.mark.parametrize("prompts", [False, True])
def test_people_s_text_only_if_asked(format, prompts):
    stream, _ = lines(format=format, prompts=prompts)
    logs.log_request(status=200, prompt="a secret wish", output=["a secret answer"])
    assert ("secret wish" in stream.getvalue()) is ("secret answer" in stream.getvalue()) is prompts


@pytest.mark.parametrize("format", ["json", "text"])
def test_exceptions_stay_one_event(format):
    stream, read = lines(format=format)
    try:
        raise ValueError("bad\nerror forged\x1b[2J")
    except ValueError:
        logging.getLogger("headlong.x").exception("failed")
    if format == "json":
        (line,) = read()
        assert "ValueError" in json.loads(line)["exception"]
    else:
        first, *rest = read()
        assert first.endswith("failed") and rest and all(line.startswith("    ") for line in rest)
        assert "\x1b" not in stream.getvalue()


def test_cancelled_requests_are_no_failures():
    _, read = lines(format="json")
    logging.getLogger("uvicorn.error").error(
        "Exception in ASGI application", exc_info=asyncio.CancelledError()
    )
    assert read() == []


def test_levels():
    _, read = lines(format="json", level="warning")
    logs.log_request(status=200)
    logging.getLogger("headlong.x").warning("told")
    assert [json.loads(line)["message"] for line in read()] == ["told"]


def test_uvicorn_says_little():
    _, read = lines(format="json")
    logging.getLogger("uvicorn.error").info("Started server process [%d]", 1)
    logging.getLogger("uvicorn.error").warning("something odd")
    assert [json.loads(line)["message"] for line in read()] == ["something odd"]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_json"), [(Screen(), False), (io.StringIO(), True)])
def test_text_for_people_and_json_for_programs(stream, is_json):
    logs.setup(stream=stream)
    logs.log_request(status=200)
    assert stream.getvalue().startswith("{") is is_json


def test_setting_up_again_replaces(capsys):
    first, _ = lines(format="json")
    second, _ = lines(format="json")
    logs.log_request(status=200)
    assert first.getvalue() == "" and second.getvalue().count("\n") == 1
    assert capsys.readouterr().err == ""
