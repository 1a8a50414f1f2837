"""Reaches replicas through a handle of Ray Serve, whose router chooses among them. Knows nothing of what they do."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from grpc import RpcError
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from headlong.cluster.fleet import Item, ReplicaLost
from headlong.cluster.trouble import trouble
from headlong.cluster.wire import Report, Work

REPORT_SECONDS = 3.0
"""How long a replica may take to say how it is."""


class RayFleet:
    """The replicas behind a handle of Ray Serve. Any thread may ask."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        # By value: chunks come over gRPC, at a third of what Ray's object references cost the front for each.
        self._streaming = handle.options(method_name="stream", stream=True, _by_reference=False)

    async def stream(self, work: Work) -> AsyncGenerator[Item, None]:
        response: Any = self._streaming.remote(work)
        ended = False
        try:
            async for item in response:
                yield item
            ended = True
        except (RayError, RayServeException, RpcError, RuntimeError) as error:
            # Serve tells of a replica that dies while it accepts a call with a plain RuntimeError.
            raise ReplicaLost(_told(error)) from error
        finally:
            if not ended:
                # It may have to wait for the router, which an event loop must not.
                asyncio.get_running_loop().run_in_executor(None, _cancel, response)

    def reports(self) -> list[Report]:
        try:
            answers = self._handle.broadcast("report").results(
                timeout_s=REPORT_SECONDS, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError):
            return []
        return [answer for answer in answers if isinstance(answer, Report)]

    def trouble(self) -> str | None:
        try:
            return trouble(self._handle.app_name)
        except (RayError, RayServeException, TimeoutError):
            return None  # Serve itself begins anew

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._handle.broadcast("cancel", list(request_ids))


def _cancel(response: object) -> None:
    with contextlib.suppress(Exception):  # whoever was to be told is gone
        response.cancel()  # type: ignore[attr-defined]


def _told(error: Exception) -> str:
    """The first line of an error's words: Ray's go on for a page."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line[:200]}" if line else type(error).__name__
