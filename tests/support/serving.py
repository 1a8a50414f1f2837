"""A real server on a loopback port, in a thread of this process, which stops when the test is done with it."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from headlong.checkpoint.source import EMBEDDED
from headlong.engine.client import EngineLoader
from headlong.engine.local import LocalEngines
from headlong.server.app import build_app
from headlong.server.auth import Auth, is_loopback
from headlong.server.context import Server
from headlong.server.pool import ModelPool
from headlong.server.protocol import Limits, guarded
from headlong.server.run import bind
from headlong.server.settings import Settings

SAMPLING = {"temperature": 0.6, "top_k": 40, "top_p": 1.0, "repetition_penalty": 1.0}


class RunningServer:
    """`with RunningServer(max_rows=4) as server:`; keywords are settings. Engines are real unless a loader is given;
    requests that say nothing are then sampled as `SAMPLING` has it, whatever the embedded model recommends."""

    def __init__(self, *, loader: EngineLoader | None = None, **options: Any) -> None:
        if loader is None and "generation_config" not in options:
            options.setdefault("sampling", SAMPLING)
        self.settings = Settings.of(port=0, **options)
        self._loader = loader or LocalEngines()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="test-server", daemon=True)

    def __enter__(self) -> "RunningServer":
        self._thread.start()
        assert self._ready.wait(60), "the server did not start"
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not stop"

    @property
    def server_thread(self) -> str:
        """The name of the thread of the event loop."""
        return self._thread.name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def server(self) -> Server:
        """What its handlers share."""
        return self.app.state.server

    @property
    def engine(self) -> Any:
        assert self.server.pool.current is not None
        return self.server.pool.current.client.service.engine  # type: ignore[attr-defined]

    @property
    def connections(self) -> set[Any]:
        """The protocols of the connections that are open."""
        return self._uvicorn.server_state.connections

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def wrapped(self, app: ASGIApp) -> ASGIApp:
        """The app as it is served; for servers that stand between it and the socket."""
        return app

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _serve(self) -> None:
        settings = self.settings
        auth = Auth(settings.api_keys, settings.admin_keys, exposed=not is_loopback(settings.host))
        pool = ModelPool(settings, self._loader)
        await pool.start()
        self.app = build_app(settings, pool, auth)
        protocol = guarded(Limits.of(settings), self.server.errors.count)
        config = uvicorn.Config(
            self.wrapped(self.app), loop="asyncio", http=protocol, log_config=None, ws="none"
        )
        self._uvicorn = uvicorn.Server(config)
        listener = bind(settings)
        self.port = listener.getsockname()[1]
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))
        while not self._uvicorn.started and not serving.done():
            await asyncio.sleep(0.01)
        self._ready.set()
        await serving
        await pool.close()


def model_with_template(folder: Path, template: str) -> Path:
    """The embedded weights with another chat template."""
    folder.mkdir(parents=True)
    for file in Path(EMBEDDED).iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy(file, folder / file.name)
    (folder / "chat_template.jinja").write_text(template)
    return folder
