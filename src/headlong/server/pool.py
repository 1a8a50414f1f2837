"""The models that serve: which one answers to a name, and how they come and go without dropping a request.

A new model is loaded beside the old ones, one at a time, off the event loop. Where there is one too many, the longest
unused retires: it takes no new requests, finishes those it has, and gives its memory back. A load that fails changes
nothing. Used on the event loop alone; knows no HTTP but for the errors.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from headlong.checkpoint.packages import PACKAGES
from headlong.checkpoint.source import EMBEDDED
from headlong.engine.client import EngineLoader
from headlong.errors import HeadlongError
from headlong.progress import ProgressFn, silent
from headlong.server import model as models
from headlong.server.errors import MAX_SHOWN, ApiError
from headlong.server.library import EMBEDDED_SOURCE, Library, Source
from headlong.server.model import Model
from headlong.server.settings import Settings

__all__ = ["Model", "ModelPool"]
log = logging.getLogger(__name__)
IDLE_POLL_SECONDS = 0.05
Value = TypeVar("Value")


@dataclass(frozen=True)
class _Loading:
    source: Source
    options: Mapping[str, Any]
    task: "asyncio.Task[Model]"


class ModelPool:
    """The models that serve. Start it with `await start()`, end it with `await close()`. The loader makes the models'
    engines."""

    def __init__(self, settings: Settings, loader: EngineLoader) -> None:
        self._settings = settings
        self._loader = loader
        self._library = Library(settings.model_dir)
        self._aliases = settings.model_of_alias
        self._first = self._library.at_start(settings.model)
        self._serving: list[Model] = []
        self._loading: _Loading | None = None
        self._retiring: set[Model] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self, progress: ProgressFn = silent) -> Model:
        """Loads the model the settings name."""
        return await self._begin(self._first, self._settings.engine_with({}), progress)

    async def close(self) -> None:
        """Closes all models; streams that are still open end with an error."""
        if self._loading is not None:
            self._loading.task.cancel()
            await asyncio.gather(self._loading.task, return_exceptions=True)
        for model in list(self._serving):
            self._retire(model)
        for model in list(self._retiring):
            self._close_later(model)
        await asyncio.gather(*self._closing)

    async def idle(self) -> None:
        """Returns when no request holds a model."""
        while any(model.users for model in (*self._serving, *self._retiring)):
            await asyncio.sleep(IDLE_POLL_SECONDS)

    def hung(self) -> list[str]:
        """Names of models whose engines hang; nothing frees what they hold but the end of the process."""
        return [model.id for model in (*self._serving, *self._retiring) if model.client.hung]

    @property
    def current(self) -> Model | None:
        """The model that answers requests which name none: the one that has served longest."""
        return self._serving[0] if self._serving else None

    def loaded(self) -> list[Model]:
        return list(self._serving)

    def find(self, name: str) -> Model | None:
        """The model that serves under this name or alias."""
        for known in (name, self._aliases.get(name)):
            model = next((model for model in self._serving if known in model.names), None)
            if model is not None:
                return model
        return None

    def answering(self, name: str | None) -> Model | None:
        """The model that answers requests for this name as it is, without loading anything."""
        found = self.current if name is None else self.find(name)
        return self.current if found is None and self._settings.any_model else found

    def aliases_of(self, model: Model) -> list[str]:
        """Names that the settings give a model besides its own."""
        return [name for name in self._aliases if name not in model.names and self.find(name) is model]

    def available(self) -> list[str]:
        """Names of models that are not loaded and could be. For admins: it tells what is on the disk."""
        known = dict.fromkeys([self._first.id, EMBEDDED_SOURCE.id, *self._library.names()])
        loaded = {model.source.id for model in self._serving}
        return [name for name in known if name not in loaded]

    @contextlib.asynccontextmanager
    async def lease(self, name: str | None, *, admin: bool) -> AsyncIterator[Model]:
        """The model of that name, held until the block ends; None is whichever serves by default."""
        model = await self._choose(name, admin)
        model.users += 1
        model.last_used = time.monotonic()
        try:
            yield model
        finally:
            model.users -= 1
            if not model.users:
                self._close_later(model)

    async def load(
        self, name: str, options: Mapping[str, Any] | None = None, progress: ProgressFn = silent
    ) -> Model:
        """Loads or reloads a model for an admin: one that serves, one of the library, a package's, or a repository.
        `options` are those of its engine that differ from the settings'."""
        source = self.source(name)
        if source is None:
            raise ApiError(
                404,
                f"model_name: {_shown(name)} is neither under model_dir nor a repository id `owner/name`, "
                f"nor {' or '.join(PACKAGES)}",
                param="model_name",
                code="model_not_found",
            )
        return await self._load(source, self._with_drafter(options or {}), progress)

    def _with_drafter(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options with the draft model's path in place of its name, which is looked up as a model's is: whatever
        else lies on this machine is no draft model, and the answer does not tell whether it is there."""
        name = options.get("drafter")
        if name is None or name == self._settings.engine_options.get("drafter"):
            return options
        source = self._library.by_admin(name)
        if source is None:
            raise ApiError(
                404,
                f"drafter: {_shown(name)} is neither under model_dir nor a repository id `owner/name`, "
                f"nor {' or '.join(PACKAGES)}",
                param="drafter",
                code="model_not_found",
            )
        return {**options, "drafter": str(EMBEDDED if source.model is None else source.model)}

    def source(self, name: str) -> Source | None:
        """What loads the model that an admin names; None where there is no such model."""
        return self._known(name) or self._library.by_admin(name)

    def unload(self, name: str | None) -> Model:
        """Retires a model; what runs on it goes on to its end."""
        model = self.current if name is None else self.find(name)
        if model is None:
            raise self.not_found(name)
        self._retire(model)
        return model

    async def _choose(self, name: str | None, admin: bool) -> Model:
        found = self.current if name is None else self.find(name)
        if found is not None:
            return found
        if name is not None and admin and self._settings.inline_loading:
            meant = self._aliases.get(name, name)
            source = self._known(meant) or self._library.by_name(meant)
            if source is not None:
                return await self._load(source, {}, silent)
        if (model := self.answering(name)) is not None:
            return model
        raise self.not_found(name)

    def _known(self, name: str) -> Source | None:
        """The source of a model that serves now or was served first; such models may lie outside the library."""
        served = self.find(name)
        if served is not None:
            return served.source
        return self._first if name in (self._first.id, *self._settings.served_names) else None

    def not_found(self, name: str | None) -> ApiError:
        names = [name for model in self._serving for name in (*model.names, *self.aliases_of(model))]
        if name is None:
            return ApiError(
                503,
                "no model is loaded; an admin can load one at /v1/model/load",
                type="server_error",
                code="no_model",
            )
        served = f"served: {', '.join(names)}" if names else "none is loaded"
        return ApiError(
            404, f"model: there is no {_shown(name)} here; {served}", param="model", code="model_not_found"
        )

    async def _load(self, source: Source, changes: Mapping[str, Any], progress: ProgressFn) -> Model:
        """Loads a model, or joins a load of the same model that is under way; a load of another one waits for its
        turn."""
        options = self._settings.engine_with(changes)
        running = self._loading
        if running is not None and (running.source, running.options) == (source, options):
            return await _outcome(running.task, source)
        if running is not None:
            raise ApiError(
                409,
                f"{running.source.id} is being loaded; try again when it is ready",
                code="model_loading",
                headers={"retry-after": "5"},
            )
        return await _outcome(self._begin(source, options, progress), source)

    def _begin(
        self, source: Source, options: Mapping[str, Any], progress: ProgressFn
    ) -> "asyncio.Task[Model]":
        task = asyncio.create_task(self._exchange(source, options, progress))
        # Whoever asked may have left: the failure is in the log, and nobody has to fetch it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._loading = _Loading(source, options, task)
        return task

    async def _exchange(self, source: Source, options: Mapping[str, Any], progress: ProgressFn) -> Model:
        """Loads the new model, then retires the one that has to go. It goes on even if the client that asked has
        left."""
        log.info("loading %s", source.id)
        started = time.monotonic()
        names = (self._settings.served_names if source == self._first else ()) or (source.id,)
        try:
            model = await in_thread(
                models.load, source, names, self._settings, options, self._loader, progress
            )
        except Exception as error:
            log.warning("%s could not be loaded: %s", source.id, error)
            raise
        finally:
            self._loading = None
        log.info("loaded %s in %.1f s", source.id, time.monotonic() - started)
        self._admit(model)
        return model

    def _admit(self, model: Model) -> None:
        """Lists the new model among those that serve, in the place of its predecessor if it has one."""
        place = next((n for n, one in enumerate(self._serving) if one.id == model.id), None)
        if place is None:
            self._serving.append(model)
        else:
            self._retire(self._serving[place])
            self._serving.insert(place, model)
        while len(self._serving) > self._settings.max_models:
            others = [one for one in self._serving if one is not model]
            self._retire(min(others, key=lambda one: one.last_used))

    def _retire(self, model: Model) -> None:
        self._serving.remove(model)
        self._retiring.add(model)
        log.info("%s retires; %d requests run on it", model.id, model.users)
        if not model.users:
            self._close_later(model)

    def _close_later(self, model: Model) -> None:
        if model in self._retiring:
            self._retiring.remove(model)
            task = asyncio.create_task(self._close(model))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close(self, model: Model) -> None:
        await model.client.close()
        name = model.id
        del model
        await asyncio.to_thread(self._loader.reclaim)
        log.info("unloaded %s", name)


async def _outcome(task: "asyncio.Task[Model]", source: Source) -> Model:
    """Waits for a load and returns its model or raises its error. Whoever stops waiting does not stop the load."""
    try:
        return await asyncio.shield(task)
    except HeadlongError as error:
        raise ApiError(400, f"{source.id} could not be loaded: {error}", code="model_load_failed") from error
    except (RuntimeError, MemoryError, OSError) as error:
        raise ApiError(
            503,
            f"{source.id} could not be loaded ({type(error).__name__}); the server's log says why",
            type="server_error",
            code="model_load_failed",
        ) from error


async def in_thread(function: Callable[..., Value], *args: Any) -> Value:
    """Like `asyncio.to_thread`, in a thread that the end of the program does not wait for: loads can take hours."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Value] = loop.create_future()

    def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            answer = (future.set_result, function(*args))
        except Exception as error:
            answer = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(finish, *answer)

    threading.Thread(target=run, name="headlong-load", daemon=True).start()
    return await future


def _shown(name: str) -> str:
    return repr(name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}…")
