"""Who is calling, and whether they may: keys from headers against the hashes in the settings.

Knows headers, no endpoint. Neither a key nor its hash ever leaves this file.
"""

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from headlong.server import keys
from headlong.server.errors import ApiError

ANONYMOUS = "anonymous"


@dataclass(frozen=True)
class Caller:
    """`name` is fit for logs: a key's fingerprint, or `anonymous`."""

    name: str
    admin: bool


class Auth:
    """Checks keys in time that depends on how many there are, not on which of them matches.

    Without API keys everybody is a user. Without any key at all a caller on this machine is an admin, if the server
    is not `exposed` to others; and of what a browser sends only the server's own page counts as that caller, since
    any web page can make a browser send requests to this machine.
    """

    def __init__(self, api_keys: Sequence[str], admin_keys: Sequence[str], exposed: bool) -> None:
        self._api = tuple(keys.digest_of(key) for key in api_keys)
        self._admin = tuple(keys.digest_of(key) for key in admin_keys)
        self._exposed = exposed

    @property
    def has_keys(self) -> bool:
        return bool(self._api or self._admin)

    @property
    def is_keyless(self) -> bool:
        """Whether users need no key: any page that a browser shows could then be one."""
        return not self._api

    def check(self, headers: Mapping[str, str]) -> Caller:
        """Returns the caller, or raises a 401. `headers` looks names up in lower case, as Starlette's do."""
        if not self.has_keys:
            return Caller(ANONYMOUS, not self._exposed and _is_local(headers))
        admin_key = headers.get("x-admin-key")
        if admin_key is not None:
            return self._known(admin_key, self._admin, admin=True) or self._refuse("x-admin-key is wrong")
        presented = [key for key in (_bearer(headers), headers.get("x-api-key")) if key is not None]
        for key in presented:
            admin = self._known(key, self._admin, admin=True)
            user = self._known(key, self._api, admin=False)
            if admin or user:
                return admin or user  # type: ignore[return-value]
        if not self._api:
            return Caller(ANONYMOUS, False)
        return self._refuse("the API key is wrong" if presented else "an API key is needed")

    def require_admin(self, caller: Caller) -> None:
        """Raises a 403 that says how to become one."""
        if caller.admin:
            return
        if self._admin:
            fix = "send an admin key as `x-admin-key` or `Authorization: Bearer`"
        elif self._api or self._exposed:
            fix = "the server has none; start it with admin_keys (`headlong keys` makes one)"
        else:
            fix = "a web page of another origin is calling; start the server with admin_keys and send one"
        raise ApiError(403, f"this needs an admin key: {fix}", type="permission_error", code="admin_required")

    def _known(self, key: str, digests: Sequence[bytes], *, admin: bool) -> Caller | None:
        given = keys.digest(key)
        found = False
        for known in digests:  # all of them, always: no early exit to be timed
            found |= hmac.compare_digest(given, known)
        return Caller(keys.fingerprint(given), admin) if found else None

    def _refuse(self, what: str) -> Caller:
        raise ApiError(
            401,
            f"{what}; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def is_loopback(host: str) -> bool:
    """Whether a name or an address, with or without brackets, stands for this machine's loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]").split("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _bearer(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _is_local(headers: Mapping[str, str]) -> bool:
    """False for a page of another site, and for a name that was made to point at this machine."""
    host, origin = headers.get("host", ""), headers.get("origin")
    try:
        name = urlsplit(f"//{host}").hostname
        same = origin is None or urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # brackets that do not close
        return False
    return same and name is not None and is_loopback(name)
