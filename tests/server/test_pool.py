"""The pool of models: names, loading beside running requests, retiring, and what a failed load changes (nothing)."""

import asyncio
import contextlib
import gc
import threading
import weakref
from pathlib import Path

import pytest
from model_folders import place_model

from headlong import LLM, AsyncLLM, SamplingParams
from headlong.engine.local import LocalEngine, LocalEngines
from headlong.errors import CheckpointError, ConfigError, HeadlongError
from headlong.server import model as model_module
from headlong.server.errors import ApiError
from headlong.server.library import Library, Source
from headlong.server.pool import ModelPool
from headlong.server.settings import Settings

PATIENCE = 60
EMBEDDED = "tale-20m"
PROMPT = "Once upon a time"
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
# As long as the model's context allows: such a stream is open until something ends it.
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`one`, `owner/two` and `broken`, and links that lead out."""
    root = tmp_path_factory.mktemp("library")
    outside = place_model(tmp_path_factory.mktemp("outside") / "secret")
    models = root / "models"
    place_model(models / "one")
    place_model(models / "owner" / "two")
    broken = place_model(models / "broken")
    (broken / "config.json").write_text('{"model_type": "nonsense"}')
    (models / "escape").symlink_to(outside)
    (models / "way").symlink_to(outside.parent)
    (models / "loop").symlink_to(models / "loop")
    (models / "inside").symlink_to(models / "one")
    (models / "empty").mkdir()
    (models / "file").write_text("")
    place_model(root / "sibling")
    return models


@pytest.fixture(scope="module")
def truth() -> dict[int, tuple[int, ...]]:
    llm = LLM(max_rows=2)
    return {params.max_tokens: llm.generate(PROMPT, params).token_ids for params in (LONG, SHORT)}


def running(body, **options):
    """Runs `body(pool)` with a pool that has started."""

    async def whole():
        pool = ModelPool(Settings.of(max_rows=4, **options), LocalEngines())
        await pool.start()
        try:
            return await asyncio.wait_for(body(pool), PATIENCE)
        finally:
            await pool.close()
            assert pool.loaded() == []

    return asyncio.run(whole())


async def tokens_of(pool: ModelPool, name: str | None = None, params=SHORT, admin=True) -> tuple[int, ...]:
    async with pool.lease(name, admin=admin) as model:
        return (await AsyncLLM(model.client).generate(PROMPT, params)).token_ids


def error_of(status: int, code: str, call) -> ApiError:
    with pytest.raises(ApiError) as error:
        call()
    assert (error.value.status, error.value.code) == (status, code)
    return error.value


async def async_error_of(status: int, code: str, awaitable) -> ApiError:
    with pytest.raises(ApiError) as error:
        await awaitable
    assert (error.value.status, error.value.code) == (status, code)
    return error.value


class SlowLoad:
    """Holds every load until it is released."""

    def __init__(self, monkeypatch) -> None:
        self.release = threading.Event()
        self.begun: list[str] = []
        real = model_module.load

        def load(source, *args):
            self.begun.append(source.id)
            assert self.release.wait(PATIENCE)
            return real(source, *args)

        monkeypatch.setattr(model_module, "load", load)


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "headlong-engine"}


async def until(true) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../sibling",
        "one/../one",
        "one/..",
        "./one",
        "one/",
        "/one",
        "one//",
        "owner",
        "owner/two/",
        "a/b/c",
        "escape",
        "way/secret",
        "loop",
        "empty",
        "file",
        "nothing",
        "one\x00",
        "one\n",
        "~",
        "~root",
        "%2e%2e/sibling",
        "..\\sibling",
        "x" * 5000,
        "o\u0301ne",
    ],
)
def test_names_lead_nowhere_else(folder, name):
    library = Library(str(folder))
    assert library.find(name) is None
    assert library.by_name(name) is None


def test_absolute_names_lead_nowhere(folder):
    library = Library(str(folder))
    for path in (folder / "one", folder.parent / "sibling"):
        assert library.find(str(path)) is None and library.by_admin(str(path)) is None


def test_what_is_in_a_library(folder):
    library = Library(str(folder))
    assert library.names() == ["broken", "inside", "one", "owner/two"]
    assert library.by_name("owner/two") == Source("owner/two", folder / "owner" / "two")
    assert library.by_name(EMBEDDED) == Source(EMBEDDED, None)
    assert Library(None).names() == [] and Library(None).find("one") is None
    with pytest.raises(ConfigError, match="model_dir"):
        Library(str(folder / "nowhere"))


def test_repositories_are_for_admins(folder, monkeypatch):
    library = Library(str(folder))
    assert library.by_name("Qwen/Some-Model") is None
    assert library.by_admin("Qwen/Some-Model") == Source("Qwen/Some-Model", "Qwen/Some-Model")
    assert library.by_admin("smollm2") == Source("smollm2", "smollm2") and library.by_name("smollm2") is None
    monkeypatch.chdir(folder.parent)
    assert Path("models/one").is_dir() and library.by_admin("models/one") is None


def test_what_the_operator_names_at_start(folder):
    library = Library(str(folder))
    assert library.at_start(None) == library.at_start(EMBEDDED) == Source(EMBEDDED, None)
    assert library.at_start("one") == Source("one", folder / "one")
    sibling = folder.parent / "sibling"
    assert library.at_start(str(sibling)) == Source("sibling", sibling)
    assert library.at_start("Qwen/X") == Source("Qwen/X", "Qwen/X")


def test_serving(truth):
    async def body(pool: ModelPool):
        assert await tokens_of(pool) == await tokens_of(pool, EMBEDDED, admin=False) == truth[8]
        assert pool.current is pool.find(EMBEDDED) is pool.loaded()[0]
        return pool.loaded()[0].card(admin=False), pool.loaded()[0].card(admin=True)

    card, admin_card = running(body)
    assert (card["id"], card["object"], card["owned_by"]) == (EMBEDDED, "model", "headlong")
    assert card["native_mtp"] == {"default_k": 3, "max_k": 8}
    details = card["headlong"]
    assert details["mtp"] == {
        "available": True,
        "reason": None,
        "default_k": 3,
        "max_k": 8,
        "verify": ["coupled", "ratio", "block"],
    }
    assert details["formats"]["reasoning"] is None and "json_schema" in details["formats"]["grammar"]
    assert card["max_model_len"] == details["context"] > 1000
    assert "folder" not in details and admin_card["headlong"]["folder"].endswith(EMBEDDED)


def test_the_warm_up_is_not_counted():
    async def body(pool: ModelPool):
        assert pool.current is not None and (pool.current.client.description.plain_tokens_per_second or 0) > 0
        before = pool.current.client.stats().totals.generated_tokens
        await tokens_of(pool)
        return before, pool.current.client.stats().totals.generated_tokens

    assert running(body) == (0, 8)


def test_served_names_replace_the_own():
    async def body(pool: ModelPool):
        for name in (None, "gpt", "tale"):
            await tokens_of(pool, name)
        assert pool.current is not None and pool.current.id == "gpt"
        error = await async_error_of(404, "model_not_found", tokens_of(pool, EMBEDDED))
        assert error.message.endswith("served: gpt, tale") and error.param == "model"
        model = await pool.load(EMBEDDED)
        assert model.names == ("gpt", "tale")

    running(body, served_names=("gpt", "tale"))


def test_unknown_names_tell_nothing_of_the_disk(folder):
    async def body(pool: ModelPool):
        for name, admin in (("one", False), ("owner/two", False), ("no-such", True), ("../sibling", True)):
            error = await async_error_of(404, "model_not_found", tokens_of(pool, name, admin=admin))
            assert error.message == f"model: there is no {name!r} here; served: {EMBEDDED}"
        error = await async_error_of(404, "model_not_found", tokens_of(pool, "n" * 5000))
        assert len(error.message) < 400
        assert [model.id for model in pool.loaded()] == [EMBEDDED]

    running(body, model_dir=str(folder), inline_loading=True)


def test_inline_loading_is_off_by_default(folder):
    async def body(pool: ModelPool):
        await async_error_of(404, "model_not_found", tokens_of(pool, "one"))

    running(body, model_dir=str(folder))


def test_inline_loading_drops_no_request(folder, truth):
    """The stream on the old engine goes on to its end; then the old engine is gone, memory and all."""

    async def body(pool: ModelPool):
        assert pool.current is not None
        old = weakref.ref(pool.current.client.service.engine)
        long = asyncio.create_task(tokens_of(pool, EMBEDDED, LONG))
        await until(lambda: pool.current is not None and pool.current.users == 1)
        assert await tokens_of(pool, "owner/two") == truth[8]
        assert [model.id for model in pool.loaded()] == ["owner/two"]
        assert not long.done(), "the old engine is still at it"
        await async_error_of(404, "model_not_found", tokens_of(pool, EMBEDDED, admin=False))
        assert old() is not None
        assert await long == truth[300]
        del long
        await until(lambda: gc.collect() >= 0 and old() is None)
        assert await tokens_of(pool, EMBEDDED) == truth[8]
        assert pool.available() == ["broken", "inside", "one", "owner/two"]

    running(body, model_dir=str(folder), inline_loading=True)


def test_a_failed_load_changes_nothing(folder, truth):
    async def body(pool: ModelPool):
        before = pool.current
        error = await async_error_of(400, "model_load_failed", pool.load("broken"))
        assert "broken could not be loaded" in error.message and "nonsense" in error.message
        await async_error_of(400, "model_load_failed", tokens_of(pool, "broken"))
        error = await async_error_of(400, "model_load_failed", pool.load("one", {"max_rows": 0}))
        assert "max_rows must be a whole number" in error.message
        await async_error_of(404, "model_not_found", pool.load("/etc"))
        await async_error_of(404, "model_not_found", pool.load("../sibling"))
        assert pool.current is before and await tokens_of(pool) == truth[8]

    running(body, model_dir=str(folder), inline_loading=True)


def test_unforeseen_failures_of_a_load(folder, truth, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA out of memory, at 0xdeadbeef")

    async def body(pool: ModelPool):
        with monkeypatch.context() as patch:
            patch.setattr(model_module, "load", fail)
            error = await async_error_of(503, "model_load_failed", pool.load("one"))
        assert "RuntimeError" in error.message and "deadbeef" not in error.message
        assert await tokens_of(pool) == truth[8]
        assert (await pool.load("one")).id == "one"

    running(body, model_dir=str(folder))


def test_one_load_at_a_time(folder, monkeypatch):
    async def body(pool: ModelPool):
        slow = SlowLoad(monkeypatch)
        first, second = (asyncio.create_task(pool.load("one")) for _ in range(2))
        third = asyncio.create_task(tokens_of(pool, "one"))
        await until(lambda: slow.begun)
        for other in (
            pool.load("owner/two"),
            pool.load("one", {"draft_tokens": 1}),
            tokens_of(pool, "owner/two"),
        ):
            error = await async_error_of(409, "model_loading", other)
            assert error.headers == {"retry-after": "5"}
        assert await tokens_of(pool, EMBEDDED), "others are served meanwhile"
        slow.release.set()
        assert await first is await second
        await third
        assert slow.begun == ["one"]

    running(body, model_dir=str(folder), inline_loading=True)


def test_who_asked_may_leave(folder, monkeypatch):
    async def body(pool: ModelPool):
        slow = SlowLoad(monkeypatch)
        asking = asyncio.create_task(tokens_of(pool, "one"))
        await until(lambda: slow.begun)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        slow.release.set()
        await until(lambda: pool.find("one"))
        assert pool.current is not None and pool.current.users == 0

    running(body, model_dir=str(folder), inline_loading=True)


def test_several_models_and_who_has_to_go(folder):
    async def body(pool: ModelPool):
        await pool.load("one")
        assert pool.current is not None and pool.current.id == EMBEDDED, "the default stays"
        await tokens_of(pool, "one")
        await tokens_of(pool, EMBEDDED)
        await pool.load("owner/two")
        assert [model.id for model in pool.loaded()] == [EMBEDDED, "owner/two"]
        reloaded = await pool.load(EMBEDDED, {"draft_tokens": 5})
        assert [model.id for model in pool.loaded()] == [EMBEDDED, "owner/two"]
        assert pool.current is reloaded and reloaded.card(True)["native_mtp"]["default_k"] == 5

    running(body, model_dir=str(folder), max_models=2)


def test_unloading(truth):
    async def body(pool: ModelPool):
        async with pool.lease(None, admin=False) as model:
            assert pool.unload(EMBEDDED) is model
            assert (await AsyncLLM(model.client).generate(PROMPT, SHORT)).token_ids == truth[8]
            await async_error_of(503, "no_model", tokens_of(pool))
        error_of(404, "model_not_found", lambda: pool.unload(EMBEDDED))
        error_of(503, "no_model", lambda: pool.unload(None))
        assert pool.current is None and pool.available() == [EMBEDDED]
        await pool.load(EMBEDDED)
        assert await tokens_of(pool) == truth[8]
        pool.unload(None)

    running(body)


def test_closing_ends_what_runs():
    async def body(pool: ModelPool):
        retired = asyncio.create_task(tokens_of(pool, None, ENDLESS))
        await until(lambda: pool.current and pool.current.users)
        await pool.load(EMBEDDED, {"draft_tokens": 1})
        current = asyncio.create_task(tokens_of(pool, None, ENDLESS))
        await until(lambda: pool.current and pool.current.users)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pool.idle()
        await pool.close()
        for stream in (retired, current):
            with pytest.raises(HeadlongError, match="closed before"):
                await stream
        await pool.idle()

    running(body)


def test_closing_while_loading_does_not_wait(folder, monkeypatch):
    async def body(pool: ModelPool):
        slow = SlowLoad(monkeypatch)
        loading = asyncio.create_task(pool.load("one"))
        await until(lambda: slow.begun)
        async with asyncio.timeout(5):
            await pool.close()
        with pytest.raises(asyncio.CancelledError):
            await loading
        slow.release.set()

    running(body, model_dir=str(folder))


def test_a_first_model_that_cannot_be_loaded(folder):
    async def start():
        pool = ModelPool(Settings(model=str(folder / "broken")), LocalEngines())
        with pytest.raises((CheckpointError, ConfigError), match="nonsense"):
            await pool.start()
        await pool.close()

    asyncio.run(start())


def test_swapping_under_load(folder, truth):
    """Requests come all the time while models come and go; every one gets its own right answer."""
    names = [EMBEDDED, "one", "owner/two"]

    async def ask(pool: ModelPool, results: list) -> None:
        for _ in range(6):
            async with pool.lease(None, admin=False) as model:
                results.append((await AsyncLLM(model.client).generate(PROMPT, SHORT)).token_ids)

    async def body(pool: ModelPool):
        results: list = []
        asking = [asyncio.create_task(ask(pool, results)) for _ in range(6)]
        for name in (*names, *names):
            await pool.load(name)
        await asyncio.gather(*asking)
        await pool.idle()
        assert set(results) == {truth[8]} and len(results) == 36
        assert len(pool.loaded()) == 1
        assert pool.current is not None
        pool.current.client.service.engine.check_integrity()

    before = engine_threads()
    running(body, model_dir=str(folder))
    assert engine_threads() <= before


def test_files_are_read_not_mapped(monkeypatch):
    configs = []

    def load(self, model, config, progress):  # noqa: ARG001 - a method
        configs.append(config)
        return LocalEngine.load(model, config, progress)

    monkeypatch.setattr(LocalEngines, "load", load)

    async def body(pool):
        assert pool.find(EMBEDDED) is not None

    running(body)
    assert [config.map_files for config in configs] == [False]
