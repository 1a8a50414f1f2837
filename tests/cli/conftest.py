"""Runs real commands in this process. Engines are built once for each set of options and used again."""

import functools
import logging
from collections.abc import Callable, Iterator

import pytest

from headlong.cli.main import main
from headlong.engine.service import Service
from headlong.server import logs
from support.command import Headlong, Outcome


@pytest.fixture(scope="session")
def shared_load() -> Callable[..., Service]:
    """`Service.load`, remembered; a finished engine is as good as a new one."""

    @functools.cache
    def load(model: object, config: object) -> Service:
        return original(model, config)

    original = Service.load
    return lambda model, config, progress=None: load(model, config)  # noqa: ARG005


@pytest.fixture
def headlong(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shared_load: Callable[..., Service],
) -> Headlong:
    """Calls `main` with the words of a command line."""
    monkeypatch.setattr(Service, "load", shared_load)

    def call(*words: str) -> Outcome:
        try:
            code = main(words)
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 1
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def loggers_put_back() -> Iterator[None]:
    """Commands in this process set up logs, too."""
    loggers = [logging.getLogger(name) for name in logs.LOGGERS]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
