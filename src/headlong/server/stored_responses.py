"""What can be done with a stored response of `/v1/responses`: read it, list what it was given, forget it."""

from starlette.requests import Request
from starlette.responses import Response

from headlong.server.reply import JsonReply
from headlong.server.response_store import Stored


async def show(request: Request) -> Response:
    return JsonReply(_stored(request).response)


async def input_items(request: Request) -> Response:
    """Lists the items before the response, the last first unless `order` is asc, at most `limit` of them, `after`
    one."""
    stored, query = _stored(request), request.query_params
    items = [
        {"id": f"item_{stored.response['id']}_{place}", **item.model_dump(exclude_none=True)}
        for place, item in enumerate(stored.given)
    ]
    if query.get("order") != "asc":
        items.reverse()
    ids = [item["id"] for item in items]
    after = query.get("after")
    items = items[ids.index(after) + 1 if after in ids else 0 :]
    limit = query.get("limit", "")
    count = min(max(int(limit), 1), 100) if limit.isdecimal() and len(limit) < 9 else 20
    shown = items[:count]
    return JsonReply(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(items) > len(shown),
        }
    )


async def delete(request: Request) -> Response:
    response_id = request.path_params["response_id"]
    request.app.state.server.responses.forget(response_id, request.state.caller.name)
    return JsonReply({"id": response_id, "object": "response.deleted", "deleted": True})


def _stored(request: Request) -> Stored:
    owner = request.state.caller.name
    return request.app.state.server.responses.get(request.path_params["response_id"], owner)
