"""Keys: who is let in, who is an admin, and that no key or hash is ever told."""

import hashlib
import hmac
import json

import pytest
from starlette.datastructures import Headers

from headlong.server import keys
from headlong.server.auth import ANONYMOUS, Auth, is_loopback
from headlong.server.errors import ApiError
from support.serving import RunningServer

USER, OTHER_USER, ADMIN = "user-key-user-key", "another-user-key", "admin-key-admin-key"
HERE = {"host": "127.0.0.1:8000"}


def hashes(*plain: str) -> tuple[str, ...]:
    return tuple(keys.hash_key(key) for key in plain)


@pytest.fixture
def auth() -> Auth:
    return Auth(hashes(USER, OTHER_USER), hashes(ADMIN), exposed=True)


def headers(**values: str) -> Headers:
    return Headers({name.replace("_", "-"): value for name, value in values.items()})


def refusal(auth: Auth, given: Headers) -> ApiError:
    with pytest.raises(ApiError) as error:
        auth.check(given)
    return error.value


def test_hashes_are_sha256():
    assert keys.hash_key(USER) == "sha256:" + hashlib.sha256(USER.encode()).hexdigest()
    assert keys.is_hash(keys.hash_key(USER)) and not keys.is_hash(USER)
    assert keys.digest_of(keys.hash_key(USER)) == keys.digest(USER)


def test_generated_keys():
    made = {keys.generate() for _ in range(100)}
    assert len(made) == 100
    assert all(keys.is_usable(key) and len(key) >= 43 for key in made)


@pytest.mark.parametrize("key", [USER, OTHER_USER])
def test_users(auth, key):
    for given in (
        headers(authorization=f"Bearer {key}"),
        headers(x_api_key=key),
        headers(authorization=f"bearer  {key}"),
    ):
        caller = auth.check(given)
        assert not caller.admin and caller.name.startswith("key-")
    assert auth.check(headers(x_api_key=USER)).name != auth.check(headers(x_api_key=OTHER_USER)).name


def test_admins(auth):
    for given in (
        headers(x_admin_key=ADMIN),
        headers(authorization=f"Bearer {ADMIN}"),
        headers(x_api_key=ADMIN),
        headers(x_admin_key=ADMIN, authorization="Bearer whatever"),
    ):
        caller = auth.check(given)
        assert caller.admin
        auth.require_admin(caller)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": f"Basic {USER}"},
        {"authorization": USER},
        {"authorization": f"Bearer {USER}x"},
        {"authorization": f"Bearer {USER[:-1]}"},
        {"authorization": f"Bearer {keys.hash_key(USER)}"},
        {"x_api_key": "\xff\xfe not ascii"},
        {"x_api_key": "x" * 60_000},
        {"x_admin_key": USER},
        {"x_admin_key": USER, "authorization": f"Bearer {USER}"},
    ],
)
def test_refusals(auth, given):
    error = refusal(auth, headers(**given))
    assert (error.status, error.code, error.headers) == (
        401,
        "invalid_api_key",
        {"www-authenticate": "Bearer"},
    )
    assert USER not in error.message and "sha256" not in error.message


def test_every_key_is_compared(monkeypatch):
    """No early exit: the number of comparisons is the same whichever key it was, and in constant time each."""
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    auth = Auth(hashes(*(f"user-key-{n}" for n in range(10))), hashes(ADMIN), exposed=True)
    counts = set()
    for key in ("user-key-0", "user-key-9", ADMIN, "nobody-s-key"):
        compared.clear()
        try:
            auth.check(headers(x_api_key=key))
        except ApiError:
            assert key == "nobody-s-key"
        counts.add(len(compared))
        assert all(len(a) == len(b) == 32 for a, b in compared)
    assert counts == {11}


def test_without_keys_on_loopback_everybody_is_an_admin():
    auth = Auth((), (), exposed=False)
    for given in (
        HERE,
        {"host": "localhost"},
        {"host": "[::1]:80"},
        HERE | {"authorization": "Bearer anything"},
    ):
        caller = auth.check(Headers(given))
        assert (caller.name, caller.admin) == (ANONYMOUS, True)
    assert auth.check(Headers(HERE | {"origin": "http://127.0.0.1:8000"})).admin


@pytest.mark.parametrize(
    "given",
    [
        HERE | {"origin": "https://evil.example"},
        HERE | {"origin": "null"},
        HERE | {"origin": "http://127.0.0.1:9999"},
        HERE | {"origin": "http://[broken"},
        {"host": "evil.example:8000"},  # a name made to point here
        {"host": "127.0.0.1.evil.example"},
        {"host": "[broken"},
        {"host": ""},
        {},
    ],
)
def test_web_pages_are_no_admins(given):
    auth = Auth((), (), exposed=False)
    caller = auth.check(Headers(given))
    assert not caller.admin
    with pytest.raises(ApiError) as error:
        auth.require_admin(caller)
    assert error.value.status == 403


@pytest.mark.parametrize(
    ("auth", "given", "fix"),
    [
        (Auth((), (), exposed=True), HERE, "start it with admin_keys"),
        (Auth(hashes(USER), (), exposed=False), {"x-api-key": USER}, "start it with admin_keys"),
        (Auth((), hashes(ADMIN), exposed=True), {}, "send an admin key as `x-admin-key`"),
        (Auth(hashes(USER), hashes(ADMIN), exposed=True), {"x-api-key": USER}, "send an admin key"),
    ],
)
def test_what_an_admin_would_need(auth, given, fix):
    caller = auth.check(Headers(given))
    assert not caller.admin
    with pytest.raises(ApiError) as error:
        auth.require_admin(caller)
    assert (error.value.status, error.value.code) == (403, "admin_required")
    assert fix in error.value.message


def test_admin_keys_alone_leave_use_open():
    auth = Auth((), hashes(ADMIN), exposed=True)
    assert auth.check(headers(authorization="Bearer none")).name == ANONYMOUS
    assert refusal(auth, headers(x_admin_key="wrong-wrong-wrong")).status == 401


def test_nothing_tells_a_key(auth):
    for given in (headers(x_api_key=USER), headers(x_admin_key=ADMIN)):
        told = json.dumps(vars(auth.check(given)))
        for secret in (USER, ADMIN):
            digest = keys.digest(secret).hex()
            assert secret not in told
            assert not any(digest[i : i + 8] in told for i in range(56))


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("LocalHost.", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_loopback(host, wanted):
    assert is_loopback(host) is wanted


@pytest.mark.parametrize("has_admin", [True, False])
def test_a_web_page_reaches_no_server_without_api_keys(has_admin):
    """An admin key opens administration; it does not close what needs no key."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    admin_keys = (keys.hash_key(ADMIN),) if has_admin else ()
    with RunningServer(max_rows=1, admin_keys=admin_keys) as running, running.client() as http:
        for given, wanted in (
            ({}, 200),
            ({"origin": running.url}, 200),
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"host": "evil.example"}, 403),
        ):
            answer = http.post("/v1/chat/completions", json=body, headers=given)
            assert answer.status_code == wanted, (given, answer.text)
