"""Tells of the fields that were left out of a request: in headers of its answer, and once for each client in the log.

Bounded whatever clients send: names are cut and escaped, headers have a length, and only so many clients are
remembered.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from urllib.parse import quote

from starlette.requests import Request

from headlong.server.auth import ANONYMOUS
from headlong.server.sifting import MAX_NOTED, Noted, Sifted

log = logging.getLogger(__name__)
IGNORED, UNKNOWN = "x-headlong-ignored", "x-headlong-unknown"
"""Headers of an answer: known fields without effect here, and fields that nobody knows."""
MAX_HEADER_CHARS = 1000
MAX_CLIENTS = 1000
MAX_AGENT_CHARS = 120


class LeftOut:
    """Tells clients and the log which fields of requests were left out. It is used on the event loop alone."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, str], set[str]] = OrderedDict()
        """What the log says of each client already, the one that was silent longest first."""

    def note(self, request: Request, sifted: Sifted) -> None:
        if not (sifted.ignored.places or sifted.unknown.places):
            return
        headers = {IGNORED: listed(sifted.ignored), UNKNOWN: listed(sifted.unknown)}
        request.state.field_headers = {name: value for name, value in headers.items() if value}
        client, agent = _client(request), request.headers.get("user-agent", "")[:MAX_AGENT_CHARS]
        told = self._told.pop((client, agent), set())
        self._told[client, agent] = told
        if len(self._told) > MAX_CLIENTS:
            self._told.popitem(last=False)
        new = {
            name: [place for place in noted.places if place not in told]
            for name, noted in (("ignored", sifted.ignored), ("unknown", sifted.unknown))
        }
        if not any(new.values()) or len(told) >= 2 * MAX_NOTED:
            return
        told.update(*new.values())
        fields = {"client": client, "agent": agent, "path": request.url.path}
        log.info(
            "fields left out", extra={"fields": fields | {name: one for name, one in new.items() if one}}
        )

    def name_tools(self, request: Request, types: Sequence[str]) -> None:
        """Names tools that are not offered to the model, beside the fields that were left out."""
        if types:
            headers = getattr(request.state, "field_headers", {})
            tools = listed(Noted([f"tools[{name}]" for name in types]))
            ignored = ", ".join(filter(None, [headers.get(IGNORED), tools]))[:MAX_HEADER_CHARS]
            request.state.field_headers = headers | {IGNORED: ignored}


def listed(noted: Noted) -> str:
    """Writes the names as a header holds them, and how many more there are."""
    shown, room, left = [], MAX_HEADER_CHARS, noted.more
    for place in noted.places:
        name = quote(place, safe="[].")
        room -= len(name) + 2
        if room < 0:
            left += 1
        else:
            shown.append(name)
    return ", ".join([*shown, f"and {left} more"] if left else shown)


def _client(request: Request) -> str:
    """The fingerprint of the client's key, or its address if it has no key."""
    caller = getattr(request.state, "caller", None)
    if caller is not None and caller.name != ANONYMOUS:
        return caller.name
    return "" if request.client is None else request.client.host
