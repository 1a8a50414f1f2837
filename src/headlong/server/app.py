"""The application: which path leads where, who may use it, and what every answer has in common.

`ENDPOINTS` is the table of contents; routes and the OpenAPI description are made from it.
"""

from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from headlong.server import (
    llama_cpp,
    models,
    ollama_models,
    openapi,
    prometheus,
    stats,
    stored_responses,
    system,
    tokens,
)
from headlong.server.admission_limit import AdmissionLimit
from headlong.server.auth import Auth, is_loopback
from headlong.server.chat import chat_completions
from headlong.server.completions import completions
from headlong.server.context import Server
from headlong.server.embeddings import embeddings
from headlong.server.endpoint import Endpoint, Handler
from headlong.server.error_counts import ErrorCounts
from headlong.server.errors import ApiError
from headlong.server.guard import Guard
from headlong.server.key_limits import LIMIT_HEADERS, KeyLimits
from headlong.server.left_out import IGNORED, UNKNOWN
from headlong.server.messages import count_tokens, messages
from headlong.server.observer import Observer
from headlong.server.ollama import ollama_chat, ollama_generate
from headlong.server.pool import ModelPool
from headlong.server.response_store import ResponseStore
from headlong.server.responses import responses
from headlong.server.schemas.chat import ChatRequest
from headlong.server.schemas.completions import CompletionRequest, DecodeRequest, EncodeRequest
from headlong.server.schemas.embeddings import EmbeddingsRequest
from headlong.server.schemas.messages import CountTokensRequest, MessagesRequest
from headlong.server.schemas.ollama import GenerateRequest, NamedModel, OllamaChatRequest, PullRequest
from headlong.server.schemas.responses import ResponsesRequest
from headlong.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from headlong.server.settings import Settings

PAGE = Path(__file__).parent / "dashboard"

ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat_completions, "user", "OpenAI chat", ChatRequest),
    Endpoint("POST", "/v1/completions", completions, "user", "OpenAI completions", CompletionRequest),
    Endpoint("POST", "/v1/responses", responses, "user", "OpenAI responses", ResponsesRequest),
    Endpoint("GET", "/v1/responses/{response_id}", stored_responses.show, "user", "A stored response"),
    Endpoint("DELETE", "/v1/responses/{response_id}", stored_responses.delete, "user", "Forget a response"),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}/input_items",
        stored_responses.input_items,
        "user",
        "What a stored response was given",
    ),
    Endpoint("POST", "/v1/messages", messages, "user", "Anthropic messages", MessagesRequest),
    Endpoint(
        "POST", "/v1/messages/count_tokens", count_tokens, "user", "Tokens of a prompt", CountTokensRequest
    ),
    Endpoint("POST", "/api/chat", ollama_chat, "user", "Ollama's chat", OllamaChatRequest),
    Endpoint("POST", "/api/generate", ollama_generate, "user", "Ollama's completion", GenerateRequest),
    Endpoint("GET", "/api/tags", ollama_models.tags, "user", "Models, in Ollama's words"),
    Endpoint("POST", "/api/show", ollama_models.show, "user", "One of them", NamedModel),
    Endpoint("GET", "/api/ps", ollama_models.ps, "user", "Those that serve"),
    Endpoint("GET", "/api/version", ollama_models.version, "open", "The release of Ollama that is followed"),
    Endpoint("POST", "/api/pull", ollama_models.pull, "admin", "Fetch a model", PullRequest),
    Endpoint("GET", "/v1/models", models.list_models, "user", "Models and what they can do"),
    Endpoint("GET", "/v1/models/{model:path}", models.show_model, "user", "One model"),
    Endpoint("GET", "/v1/model", models.current_model, "user", "The model that serves by default"),
    Endpoint("POST", "/v1/model/load", models.load_model, "admin", "Load a model", models.LoadRequest),
    Endpoint(
        "POST",
        "/v1/model/unload",
        models.unload_model,
        "admin",
        "Unload a model",
        models.UnloadRequest,
        optional=True,
    ),
    Endpoint("GET", "/v1/model/list", models.list_models, "user", "Models, as tabbyAPI lists them"),
    Endpoint("GET", "/v1/auth/permission", system.permission, "user", "What the caller's key allows"),
    Endpoint("POST", "/v1/embeddings", embeddings, "user", "OpenAI embeddings", EmbeddingsRequest),
    Endpoint("POST", "/v1/token/encode", tokens.encode, "user", "Text to tokens", EncodeRequest),
    Endpoint("POST", "/v1/token/decode", tokens.decode, "user", "Tokens to text", DecodeRequest),
    Endpoint("POST", "/tokenize", tokens.tokenize, "user", "Text or messages to tokens", TokenizeRequest),
    Endpoint("POST", "/detokenize", tokens.detokenize, "user", "Tokens to text", DetokenizeRequest),
    Endpoint("GET", "/props", llama_cpp.props, "user", "The server as llama.cpp's describes itself"),
    Endpoint("GET", "/slots", llama_cpp.slots, "user", "What runs, as llama.cpp's server tells it"),
    Endpoint("GET", "/v1/stats", stats.stats, "user", "What the server is doing"),
    Endpoint("GET", "/v1/stats/stream", stats.stats_stream, "user", "The same, twice a second"),
    Endpoint("GET", "/metrics", prometheus.metrics, "user", "Prometheus metrics"),
    Endpoint("GET", "/health", system.health, "open", "Whether it serves"),
    Endpoint("GET", "/ping", system.ping, "open", "Whether it serves"),
    Endpoint("GET", "/version", system.version, "open", "Headlong's version"),
)


def build_app(settings: Settings, pool: ModelPool, auth: Auth) -> Starlette:
    registry, limit = CollectorRegistry(), AdmissionLimit(settings.max_queue)
    prometheus.EngineCollector(pool, registry)
    ProcessCollector(registry=registry)
    routes = [
        Route(one.path, _with_access(one.handler, one.access), methods=[one.method]) for one in ENDPOINTS
    ]
    description = openapi.describe(ENDPOINTS)
    routes.append(Route("/openapi.json", openapi.serve(description), methods=["GET"]))
    routes += [
        Route(path, _with_access(ollama_models.not_here, "user"), methods=["POST", "DELETE"])
        for path in ollama_models.NOT_HERE
    ]
    pages = [Route("/", _page), Mount("/static", StaticFiles(directory=PAGE))] if settings.page else []
    pages = pages or [Route("/", _no_page)]
    errors = ErrorCounts(registry)
    app = Starlette(
        routes=[*routes, *pages],
        middleware=_middleware(settings, auth, errors),
        exception_handlers={HTTPException: _as_api_error},
    )
    observer, store = Observer(settings, limit, registry), ResponseStore(settings.response_store_bytes)
    app.state.server = Server(
        settings, pool, auth, limit, observer, errors, registry, store, KeyLimits(settings)
    )
    return app


def _middleware(settings: Settings, auth: Auth, errors: ErrorCounts) -> list[Middleware]:
    layers = []
    if settings.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["authorization", "content-type", "x-api-key", "anthropic-version"],
                expose_headers=["x-request-id", "retry-after", IGNORED, UNKNOWN, *LIMIT_HEADERS],
            )
        )
    keyless = auth.is_keyless
    local_only = keyless and is_loopback(settings.host)
    given = {"origins": settings.cors_origins, "keyless": keyless, "local_only": local_only}
    return [*layers, Middleware(Guard, errors=errors, **given)]


def _with_access(handler: Handler, access: str) -> Handler:
    """Checks the caller's key before anything of the request is read."""

    async def checked(request: Request) -> Response:
        if access != "open":
            request.state.caller = request.app.state.server.auth.check(request.headers)
        if access == "admin":
            request.app.state.server.auth.require_admin(request.state.caller)
        response = await handler(request)
        if request.method == "HEAD" and "content-length" not in response.headers:
            # A stream has no length, and a client that wants its head alone does not wait for its end.
            return Response(status_code=response.status_code, headers=dict(response.headers))
        return response

    return checked


async def _page(_: Request) -> Response:
    return FileResponse(PAGE / "index.html")


async def _no_page(_: Request) -> Response:
    """What Ollama's clients look for to see whether anybody is there."""
    return PlainTextResponse("Ollama is running")


async def _as_api_error(_: Request, error: Exception) -> Response:
    """The router's own refusals, in the form of all others; the guard writes them."""
    assert isinstance(error, HTTPException)
    words = {404: "there is nothing at this path", 405: "this path does not take this method"}
    raise ApiError(
        error.status_code, words.get(error.status_code, error.detail), headers=dict(error.headers or {})
    )
