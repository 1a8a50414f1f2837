"""What one key may take: 429s that say when to come back, headers that say what is left, others untouched."""

import concurrent.futures
import contextlib
import json
import time
from pathlib import Path

import pytest

from headlong.errors import ConfigError
from headlong.server import key_limits
from headlong.server.auth import Auth, Caller
from headlong.server.errors import ApiError
from headlong.server.key_limits import LIMIT_HEADERS, Bucket, KeyLimits
from headlong.server.keys import hash_key
from headlong.server.settings import Settings
from headlong.server.settings_sources import load
from support.serving import RunningServer

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
ONE, TWO, ADMIN = "first-key-of-a-user", "second-key-of-another", "the-key-of-an-admin"
KEYS = {"api_keys": (hash_key(ONE), hash_key(TWO)), "admin_keys": (hash_key(ADMIN),)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(key_limits.time, "monotonic", lambda: now[0])
    return now


def test_a_bucket_fills_evenly(clock: list[float]) -> None:
    bucket = Bucket(60)
    assert bucket.level == 60
    bucket.take(90)
    assert bucket.level == -30 and bucket.seconds_until(1) == 31
    clock[0] += 31
    assert bucket.level == 1 and bucket.seconds_until(1) == 0
    clock[0] += 10_000
    assert bucket.level == 60, "no more than a minute's worth is kept"


def test_one_key_does_not_spend_another_s(clock: list[float]) -> None:
    limits = KeyLimits(Settings.of(key_requests_per_minute=1))
    with (
        limits.hold(Caller("a", False), 1),
        limits.hold(Caller("b", False), 1),
        pytest.raises(ApiError) as refused,
        limits.hold(Caller("a", False), 1),
    ):
        pass
    assert refused.value.status == 429 and refused.value.headers["retry-after"] == "60"
    clock[0] += 60
    with limits.hold(Caller("a", False), 1):
        pass
    for _ in range(5):
        with limits.hold(Caller("admin", True), 100):
            pass


def test_a_refused_request_costs_nothing(clock: list[float]) -> None:  # noqa: ARG001 - stands still
    limits = KeyLimits(Settings.of(key_requests_per_minute=5, key_rows=2))
    caller = Caller("a", False)
    with limits.hold(caller, 2), contextlib.suppress(ApiError), limits.hold(caller, 1):
        pass
    account = limits.account(caller)
    assert account.rows == 0 and account.requests is not None and account.requests.level == 4


@pytest.mark.parametrize("name", ["key_requests_per_minute", "key_tokens_per_minute", "key_rows"])
def test_settings_have_ranges(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Settings.of(**{name: 0})


def test_a_key_has_limits_of_its_own(clock: list[float]) -> None:  # noqa: ARG001 - stands still
    """In place of those that it names; the others stay."""
    own = {
        hash_key(ONE).upper().replace("SHA", "sha"): {
            "rows": 3,
            "requests_per_minute": None,
            "grammar_seconds": 2,
        }
    }
    settings = Settings.of(
        **KEYS, key_limits=own, key_rows=1, key_requests_per_minute=1, key_grammar_seconds=1
    )
    limits = KeyLimits(settings)
    auth = Auth(settings.api_keys, settings.admin_keys, exposed=False)
    one, two = (auth.check({"x-api-key": key}) for key in (ONE, TWO))
    for _ in range(3):
        with limits.hold(one, 3):
            pass
    assert limits.account(one).grammar.per_minute == 2 and limits.account(two).grammar.per_minute == 1
    with pytest.raises(ApiError, match="more than a key may have"), limits.hold(two, 2):
        pass
    with limits.hold(two, 1):
        pass
    with pytest.raises(ApiError, match="1 requests a minute"), limits.hold(two, 1):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "key_limits must map hashes"),
        ({ONE: {}}, "must be named by a hash"),
        ({hash_key("not-among-the-keys"): {}}, "not among api_keys"),
        (
            {hash_key(ONE): 3},
            "of entry 0 must map requests_per_minute, tokens_per_minute, rows, grammar_seconds",
        ),
        ({hash_key(ONE): {"row": 3}}, "has no 'row'"),
        ({hash_key(ONE): {"rows": 0}}, "entry 0: rows must be a whole number from 1"),
        ({hash_key(ONE): {"grammar_seconds": "5"}}, "must be a number from 0.01"),
    ],
)
def test_limits_of_a_key_are_checked(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Settings.of(**KEYS, key_limits=given)
    assert ONE not in str(refused.value), "a key that was written in place of its hash is not repeated"


@pytest.fixture
def long_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fills up again while a test runs, however busy the machine is."""
    monkeypatch.setattr(key_limits, "MINUTE", 1e7)


@pytest.mark.usefixtures("long_minutes")
def test_over_http() -> None:
    limits = {"key_requests_per_minute": 3, "key_tokens_per_minute": 100_000, "key_rows": 2}
    with RunningServer(**KEYS, **limits) as running, running.client() as http:

        def ask(key: str, path: str = CHAT, **more: object):
            return http.post(path, json=BODY | more, headers={"authorization": f"Bearer {key}"})

        answer = ask(ONE)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        assert answer.headers["x-ratelimit-limit-tokens"] == "100000"
        assert set(LIMIT_HEADERS) <= set(answer.headers)
        used = answer.json()["usage"]["total_tokens"]
        with http.stream(
            "POST", CHAT, json=BODY | {"stream": True}, headers={"authorization": f"Bearer {ONE}"}
        ) as stream:
            stream.read()
            assert int(stream.headers["x-ratelimit-remaining-tokens"]) == 100_000 - used
        too_many = ask(ONE, n=3)
        assert too_many.status_code == 400 and "a key may have (2)" in too_many.json()["error"]["message"]
        assert ask(ONE, "/v1/messages").status_code == 200
        refused = ask(ONE)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "key_requests"
        assert int(refused.headers["retry-after"]) > 1
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert ask(ONE, "/v1/messages").json()["error"]["type"] == "rate_limit_error"
        assert ask(TWO).status_code == 200, "another key has its own"
        assert not set(LIMIT_HEADERS) & set(ask(ADMIN).headers)
        assert [ask(ADMIN).status_code for _ in range(4)] == [200] * 4


def test_a_key_s_own_limits_over_http(tmp_path: Path) -> None:
    """As a config.yml has them."""
    config = {
        "api_keys": KEYS["api_keys"],
        "key_rows": 1,
        "key_limits": {hash_key(ONE): {"rows": 2, "tokens_per_minute": 5000}},
    }
    file = tmp_path / "config.yml"
    file.write_text(json.dumps(config))
    settings = load({}, str(file))
    with (
        RunningServer(
            api_keys=settings.api_keys, key_rows=settings.key_rows, key_limits=settings.key_limits
        ) as running,
        running.client() as http,
    ):
        answers = [
            http.post(
                CHAT, json=BODY | {"n": 2}, headers={"x-api-key": key, "authorization": f"Bearer {key}"}
            )
            for key in (ONE, TWO)
        ]
    assert [answer.status_code for answer in answers] == [200, 400]
    assert answers[0].headers["x-ratelimit-limit-tokens"] == "5000"


@pytest.mark.usefixtures("long_minutes")
def test_tokens_rows_and_grammars_over_http() -> None:
    limits = {"key_tokens_per_minute": 250, "key_rows": 1, "key_grammar_seconds": 0.01}
    with RunningServer(**KEYS, **limits, max_rows=4) as running, running.client() as http:

        def ask(key: str, **more: object):
            return http.post(CHAT, json=BODY | more, headers={"authorization": f"Bearer {key}"})

        def slow(length: int) -> dict:
            schema = {f"field{n}": {"type": "string", "maxLength": length + n} for n in range(60)}
            return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": schema}}}

        assert ask(TWO, response_format=slow(40)).status_code == 200
        compiling = running.server.keys.account(_caller(running, TWO)).grammar
        assert compiling is not None and compiling.level < compiling.per_minute, "compiling was counted"
        compiling.take(1)
        refused = ask(TWO, response_format=slow(60))
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "key_grammar"
        assert int(refused.headers["retry-after"]) > 1
        assert ask(TWO, response_format=slow(40), max_tokens=1).status_code == 200, "compiled already"

        with concurrent.futures.ThreadPoolExecutor() as pool:
            long = pool.submit(ask, ONE, max_tokens=300, ignore_eos=True)
            deadline = time.monotonic() + 20
            while not running.server.keys.account(_caller(running, ONE)).rows and time.monotonic() < deadline:
                time.sleep(0.002)
            second = ask(ONE)
            assert long.result().status_code == 200
        assert second.status_code == 429 and second.json()["error"]["code"] == "key_rows"
        spent = ask(ONE)
        assert spent.status_code == 429 and spent.json()["error"]["code"] == "key_tokens"
        assert int(spent.headers["retry-after"]) > 60, "what was taken beyond the limit has to fill up again"


def _caller(running: RunningServer, key: str) -> Caller:
    return running.server.auth.check({"authorization": f"Bearer {key}"})
