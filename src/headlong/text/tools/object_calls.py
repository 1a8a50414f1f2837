"""Calls written as JSON objects, {"name": ..., "arguments": {...}}, whatever stands around them.

The arguments are passed on as the model wrote them (see `json_stream` for the two faults that are
mended). The members may come in any order; arguments that come before the name wait for it, and of two
members with one key the first counts. A call without arguments has the empty object. Once its arguments
have begun a call is certain: a fault in them ends it there, and the text from the fault on is content.
"""

import json

from headlong.text.tools.json_stream import JsonObjectReader, MemberPart
from headlong.text.tools.scan import CallScanner


class ObjectScanner(CallScanner):
    """Reads calls that are JSON objects. What stands before an object is its format's affair."""

    argument_keys: tuple[str, ...] = ("arguments",)
    needs_arguments = False
    """Whether an object without arguments is no call."""

    def fits(self, _name: str) -> bool:
        """Whether an object of this name may be a call."""
        return True

    def begin(self) -> None:
        """An object begins at `at`, behind white space perhaps."""
        self._reader = JsonObjectReader()
        self._keys: set[str] = set()
        self._key = ""  # of the member that is being read; empty for one that is skipped
        self._name: str | None = None
        self._name_text: list[str] = []
        self._waiting: list[str] = []  # arguments, until the name is known
        self._has_arguments = False
        self._accepted = False

    def read(self) -> bool:
        self.at = self._reader.feed(self.text, self.at)
        if not all(map(self._take_part, self._reader.take())):
            self.reject()
        elif self._reader.done:
            self._complete()
        elif self._reader.failed or self.final:
            self._break_off()
        else:
            return False
        return True

    def _take_part(self, part: MemberPart) -> bool:
        """Takes one part of the call's JSON; False once this can be no call any more."""
        if part.kind == "key":
            kind = "arguments" if part.text in self.argument_keys else part.text
            self._key = part.text if kind not in self._keys else ""
            self._keys.add(kind)
        elif self._key == "name":
            self._name_text.append(part.text)
            if part.kind == "end":
                return self._know_name("".join(self._name_text))
        elif self._key in self.argument_keys and part.kind == "value":
            if not self._has_arguments and not part.text.startswith("{"):
                return part.text == "null"
            self._has_arguments = True
            self._waiting.append(part.text)
            if self._name is not None:
                self._pass_on(self._name)
        return True

    def _know_name(self, text: str) -> bool:
        if not text.startswith('"') or text == '""':
            return False
        name: str = json.loads(text)
        if not self.fits(name):
            return False
        self._name = name
        if self._waiting:
            self._pass_on(name)
        return True

    def _pass_on(self, name: str) -> None:
        if not self._accepted:
            self.accept(name)
            self._accepted = True
        self.arguments("".join(self._waiting))
        self._waiting.clear()

    def _complete(self) -> None:
        if self._name is None or (self.needs_arguments and not self._has_arguments):
            self.reject()
            return
        if not self._has_arguments:
            self._waiting.append("{}")
        self._pass_on(self._name)
        self.close()

    def _break_off(self) -> None:
        """Ends the call because the output is over or is no longer JSON. What was read of the arguments is kept."""
        failed, rest = self._reader.failed, self._reader.pending
        if self._name is None or ((failed or self.needs_arguments) and not self._accepted):
            self.reject()
            return
        if not failed and self._has_arguments and self._key in self.argument_keys:
            self._waiting.append(rest)
        self._pass_on(self._name)
        self.close()
        if failed:
            self.put_text(rest)
