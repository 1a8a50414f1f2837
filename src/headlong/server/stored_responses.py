"""What can be done with a stored response of `/v1/responses`: read it, list what it was given, forget it."""

import json

from starlette.requests import Request
from starlette.responses import Response

from headlong.server.reply import JsonReply, JsonText
from headlong.server.response_store import Stored
from headlong.server.writing import beside


async def show(request: Request) -> Response:
    text = _stored(request).response
    return await beside(lambda: JsonText(text))


async def input_items(request: Request) -> Response:
    """Lists the items before the response, the last first unless `order` is asc, at most `limit` of them, `after`
    one."""
    stored, query = _stored(request), request.query_params
    ids = {f"item_{stored.id}_{place}": place for place in range(len(stored.given))}
    listed = list(ids) if query.get("order") == "asc" else list(ids)[::-1]
    after, limit = query.get("after", ""), query.get("limit", "")
    listed = listed[listed.index(after) + 1 if after in ids else 0 :]
    shown = listed[: min(max(int(limit), 1), 100) if limit.isdecimal() and len(limit) < 9 else 20]

    def reply() -> Response:
        data = [{"id": one, **json.loads(stored.given[ids[one]])} for one in shown]
        ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
        return JsonReply({"object": "list", "data": data, **ends, "has_more": len(listed) > len(shown)})

    return await beside(reply)


async def delete(request: Request) -> Response:
    response_id = request.path_params["response_id"]
    request.app.state.server.responses.forget(response_id, request.state.caller.name)
    return JsonReply({"id": response_id, "object": "response.deleted", "deleted": True})


def _stored(request: Request) -> Stored:
    owner = request.state.caller.name
    return request.app.state.server.responses.get(request.path_params["response_id"], owner)
