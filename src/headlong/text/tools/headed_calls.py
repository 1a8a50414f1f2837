"""Calls that are a head with the name, and then the arguments as one JSON object, whatever stands around them.

The arguments are passed on as the model wrote them (see `json_stream` for the two faults that are mended). A head
makes a call certain once an object begins behind it, or once the call ends there: it then has no arguments. A fault in
them ends the call, and the text from the fault on is content.
"""

from abc import abstractmethod

from headlong.text.tools.json_stream import JsonObjectReader
from headlong.text.tools.scan import MAX_SPACE, CallScanner


class HeadedScanner(CallScanner):
    """Reads calls of a head and an object. What a head looks like is its format's affair."""

    empty_ends: tuple[str, ...] = ()
    """What may stand behind a head in place of the arguments, if there are none."""

    @abstractmethod
    def read_head(self) -> str | None:
        """The name in the head that begins at `at`, after stepping behind the head; "" if more text is needed, None if
        there is no call."""

    def begin(self) -> None:
        self._body: JsonObjectReader | None = None

    def read(self) -> bool:
        if self._body is None:
            return self._read_start()
        self.at = self._body.feed(self.text, self.at)
        self.arguments("".join(part.text for part in self._body.take() if part.kind == "value"))
        if self._body.done:
            self.close()
        elif self._body.failed:
            self.close()
            self.put_text(self._body.pending)
        elif self.final:
            self.arguments(self._body.pending)
            self.close()
        else:
            return False
        return True

    def _read_start(self) -> bool:
        """Reads the head and what is behind it, or nothing: until all are there, `at` stays at the head."""
        begin = self.at
        name = self.read_head()
        if name:
            near = self.skip_space() <= MAX_SPACE
            following = self.next_is("{", *self.empty_ends) if near else None
            if following:
                self.accept(name)
                self._body = JsonObjectReader(whole=True)
                if following != "{":
                    self.arguments("{}")
                    self.close()
                return True
            name = following
        self.at = begin
        if name is None:
            self.reject()
        return name is None
