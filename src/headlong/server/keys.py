"""What a key looks like, and how it is kept: as a SHA-256 hash, never in plain. Knows no request."""

import hashlib
import re
import secrets

MIN_LENGTH, MAX_LENGTH = 8, 512
_PREFIX = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")
_PLAIN = re.compile(f"[\x21-\x7e]{{{MIN_LENGTH},{MAX_LENGTH}}}")


def generate() -> str:
    """Generates a new key: 256 random bits, safe in headers, shells and YAML."""
    return f"hl-{secrets.token_urlsafe(32)}"


def is_hash(text: str) -> bool:
    return bool(_HASH.fullmatch(text))


def is_usable(key: str) -> bool:
    """Whether a plain key can be sent in a header, is not trivially short, and is no hash with a typing error."""
    return bool(_PLAIN.fullmatch(key)) and not key.startswith(_PREFIX)


def hash_key(key: str) -> str:
    """Returns what stands for the key in config.yml. Keys are random, so one round of SHA-256 without a salt protects
    them."""
    return _PREFIX + digest(key).hex()


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def digest_of(hashed: str) -> bytes:
    """Returns the digest that a hash written as `sha256:…` holds."""
    assert is_hash(hashed)
    return bytes.fromhex(hashed.removeprefix(_PREFIX))


def fingerprint(key_digest: bytes) -> str:
    """Returns a name of the key for logs. It is a hash of the hash: neither the stored hash nor a part of it."""
    return "key-" + hashlib.sha256(b"headlong fingerprint" + key_digest).hexdigest()[:8]
