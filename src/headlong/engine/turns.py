"""The order in which those who share an engine take turns: each gets its place, however much one of them asks for.

Start-time fair queueing over rows: a tenant's rows are one turn apart, and a tenant that had nothing waiting begins at
the turn that is served. With a single tenant turns are the order of coming. Knows no rows and no tokens.
"""

MAX_IDLE_TENANTS = 256


class Turns:
    """Gives a turn to each row that comes."""

    def __init__(self) -> None:
        self._served = 0
        """The latest turn that was let in."""
        self._next: dict[str, int] = {}
        """The turn after each tenant's last one."""

    def next(self, tenant: str) -> int:
        turn = max(self._served, self._next.get(tenant, 0))
        self._next[tenant] = turn + 1
        if len(self._next) > MAX_IDLE_TENANTS:
            self._next = {name: after for name, after in self._next.items() if after > self._served}
        return turn

    def now(self) -> int:
        """The turn that is served: for a row that had its own elsewhere."""
        return self._served

    def serve(self, turn: int) -> None:
        """A row of this turn was let in."""
        self._served = max(self._served, turn)
