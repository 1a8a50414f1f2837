"""`headlong keys`: makes a key and the hash that config.yml keeps of it. Stores nothing."""

import argparse
import json
import sys
from typing import Any

from headlong.errors import ConfigError

EPILOG = """\
Clients send the key; config.yml holds the hash, under api_keys or admin_keys. The key is shown once.

examples:
  headlong keys
  headlong keys --json
  printf %s "$KEY" | headlong keys --stdin
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "keys",
        usage="headlong keys [--stdin] [--json]",
        help="make a key for the server",
        description="Makes a key for `headlong serve`, and the hash that is kept in its place.",
        epilog=EPILOG,
    )
    parser.add_argument("--stdin", action="store_true", help="hash the key on stdin instead of making one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    from headlong.server import keys

    key = sys.stdin.read().rstrip("\r\n") if args.stdin else keys.generate()
    if not keys.is_usable(key):
        raise ConfigError(
            f"the key on stdin must have {keys.MIN_LENGTH} to {keys.MAX_LENGTH} visible ASCII characters; "
            "`headlong keys` makes one"
        )
    found = {"hash": keys.hash_key(key), "name": keys.fingerprint(keys.digest(key))}
    if not args.stdin:
        found = {"key": key} | found
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<5} {value}")
    return 0
