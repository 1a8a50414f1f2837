"""Every error a user can cause, each naming the field or file and the fix.

    HeadlongError
    ├── ConfigError        an option or a model config that cannot work
    ├── CheckpointError    files on disk: missing, damaged, or not what the model needs
    │   └── HeadError      the MTP head alone: absent, incomplete or unusable
    ├── RequestError       a prompt or sampling parameter out of range, or too much for this engine
    ├── BusyError          no room for this request now; later it may be taken
    └── HarmfulError       a request that ends the engines it is given to

Broken invariants of our own are plain `assert`s, never one of these.
"""


class HeadlongError(Exception):
    """Base of every error Headlong raises on purpose."""


class ConfigError(HeadlongError, ValueError):
    """An engine option or model config is wrong or unsupported."""


class CheckpointError(HeadlongError):
    """A checkpoint cannot be found, read or matched with its model."""


class HeadError(CheckpointError):
    """MTP was required and the checkpoint's head cannot be used."""


class RequestError(HeadlongError, ValueError):
    """A prompt, message or sampling parameter is invalid."""


class HarmfulError(HeadlongError):
    """The request is what ended several engines, one after the other; it must not be sent again."""


class BusyError(HeadlongError):
    """There is no room for this now; the same request may be taken later."""
