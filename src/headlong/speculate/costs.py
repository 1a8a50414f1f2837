"""What a step costs on this machine, learned from the steps it takes.

Two tables of seconds: the target's pass by rows and drafts in it, and drafting by drafting rows and depth. A cell keeps
its last measurements; between cells, and against noise, a line through a row count's cells helps, and
where a row count is new, its neighbours speak for it. The machine's present speed is a factor of its own, so that a
slow minute does not look like an expensive depth. Knows no tokens and no acceptance.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

WINDOW = 16
"""Measurements a cell remembers."""
MAX_CELLS = 24
"""Cells of one row count; the one not measured for longest goes."""
FEW = 3
"""Measurements that make a cell, and cells that make a line, stand on its own."""
REFIT = 8
"""A line is drawn again after so many measurements."""
FAR = 4.0
"""Drafts of one row at which neighbours and guesses are asked."""
GUESS_VERIFY, GUESS_DRAFT = 0.1, 0.2
"""What one draft for every row adds to a plain step, and what drafting it takes, as parts of that step, as long as
nothing of the kind was measured."""
LEAST = 0.125
"""What any step is taken to cost at least, as a part of the cheapest of its row count: a line drawn through deep drafts
alone may cross zero before it comes to none."""
SURPRISE = 2.0
"""Times what was expected, at which a measurement is cut off: most of what is slower still is noise."""
SPEED_MEMORY = 0.96
"""What is left of the machine's present speed after each step, as a logarithm."""


class Cell:
    """One kind of step: the last measurements of it, and a value for all of them."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self.value = 0.0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)
        # The median; of two the lower, since what disturbs a step makes it slower.
        self.value = sorted(self._values)[(len(self._values) - 1) // 2]


class Line:
    """value = level + slope · x through weighted points; never falling, and nowhere below `least`."""

    def __init__(self, points: Iterable[tuple[float, float, float]], least: float = 1e-9) -> None:
        """`points` are (x, value, weight)."""
        self.least = least
        weight = sum_x = sum_y = sum_xx = sum_xy = 0.0
        for x, y, w in points:
            weight += w
            sum_x += w * x
            sum_y += w * y
            sum_xx += w * x * x
            sum_xy += w * x * y
        spread = weight * sum_xx - sum_x * sum_x
        self.slope = max(0.0, (weight * sum_xy - sum_x * sum_y) / spread) if spread > 0.0 else 0.0
        self.level = (sum_y - self.slope * sum_x) / weight

    def at(self, x: float) -> float:
        return max(self.level + self.slope * x, self.least)


class Table:
    """Seconds by (rows, x), x being the drafts of all rows, or the depth."""

    def __init__(self, level: float, slope: float, *, per_row: bool) -> None:
        """`level` and `slope` serve until something is measured; `per_row` says that x grows with the rows."""
        self._level = level
        self._slope = slope
        self._per_row = per_row
        self._cells: dict[int, OrderedDict[int, Cell]] = {}
        self._lines: dict[int, Line] = {}
        self._values: dict[int, dict[int, float]] = {}
        self._missing: dict[int, int] = {}
        """Measurements of a row count that its line and values do not know yet."""

    def add(self, rows: int, x: int, seconds: float) -> None:
        rows = bucket(rows)
        cells = self._cells.setdefault(rows, OrderedDict())
        cell = cells.setdefault(x, Cell())
        cells.move_to_end(x)
        cell.add(seconds)
        if len(cells) > MAX_CELLS:
            cells.popitem(last=False)
        self._missing[rows] = self._missing.get(rows, 0) + 1
        if self._missing[rows] >= REFIT or len(cell) <= FEW:
            self._missing[rows] = 0
            self._lines.pop(rows, None)
            self._values.pop(rows, None)

    def count(self, rows: int, x: int) -> int:
        """Measurements of just this."""
        cell = self._cells.get(bucket(rows), {}).get(x)
        return 0 if cell is None else len(cell)

    def at(self, rows: int, x: int) -> float:
        rows = bucket(rows)
        values = self._values.get(rows)
        if values is None:
            values = self._values[rows] = {}
        value = values.get(x)
        if value is None:
            value = values[x] = self._predict(rows, x)
        return value

    def most(self, rows: int, x: int) -> float:
        """What a measurement may say: anything as long as there is no other."""
        if not self._cells:
            return math.inf
        return SURPRISE * max(self.at(rows, x), self._level + self._slope * x / self._unit(rows))

    def slope(self, rows: int) -> float:
        """Seconds that one more x adds, on the whole."""
        return self._line(bucket(rows)).slope

    def _predict(self, rows: int, x: int) -> float:
        expected, cell = self._line(rows).at(x), self._cells.get(rows, {}).get(x)
        if cell is None:
            return expected
        own = len(cell) / (len(cell) + 1.0)
        return own * cell.value + (1.0 - own) * expected

    def _line(self, rows: int) -> Line:
        if rows not in self._lines:
            self._lines[rows] = self._draw(rows)
        return self._lines[rows]

    def _draw(self, rows: int) -> Line:
        """Through the row count's own cells, and while they are few, lightly through what its neighbours say."""
        cells = self._cells.get(rows, {})
        least = max(1e-9, LEAST * min((cell.value for cell in cells.values()), default=0.0))
        if len(cells) >= FEW:
            return Line(_points(cells), least)
        unit = self._unit(rows)
        near = [
            (x, value, 1.0) for x in (0.0, FAR * unit) if (value := self._neighbours(rows, x)) is not None
        ]
        if cells:
            return Line([*_points(cells), *(near or self._leaning(rows))], least)
        return Line(near or [(0.0, self._level, 1.0), (unit, self._level + self._slope, 1.0)])

    def _neighbours(self, rows: int, x: float) -> float | None:
        """Between the next smaller and the next larger row count that were measured; one alone speaks for itself."""
        below = max((known for known in self._cells if known < rows), default=None)
        above = min((known for known in self._cells if known > rows), default=None)
        found = []
        for known in (below, above):
            if known is not None:
                line = Line([*_points(self._cells[known]), *self._leaning(known)])
                found.append((known, line.at(x * known / rows if self._per_row else x)))
        if len(found) < 2:
            return found[0][1] if found else None
        (low, first), (high, second) = found
        return first + (second - first) * (rows - low) / (high - low)

    def _unit(self, rows: int) -> int:
        """What x grows by if every row drafts one more."""
        return rows if self._per_row else 1

    def _leaning(self, rows: int) -> list[tuple[float, float, float]]:
        """A point that gives a line through few cells the guessed slope, or that of drafts which all take the same
        time: to draft nothing takes none."""
        cells = self._cells[rows]
        if len(cells) >= FEW:
            return []
        if not self._per_row:
            return [(0.0, 0.0, 0.5)]
        x, cell = max(cells.items(), key=lambda entry: len(entry[1]))
        return [(x + self._unit(rows), cell.value + self._slope, 0.5)]


def _points(cells: Mapping[int, Cell]) -> list[tuple[float, float, float]]:
    return [(float(x), cell.value, float(len(cell))) for x, cell in cells.items()]


class Costs:
    """Seconds of a step whose rows draft so and so, at the machine's present speed."""

    def __init__(self) -> None:
        self.speed = 0.0
        """Logarithm of how much slower the machine is now than the tables say."""
        self._off = 0.0
        """How far the last step was off, as a logarithm."""
        self._guess_from(1.0)
        self._began = False

    def _begin(self, seconds: float) -> None:
        """The first step that is measured gives the guesses their unit."""
        if not self._began:
            self._began = True
            self._guess_from(seconds)

    def _guess_from(self, plain: float) -> None:
        self.verify = Table(plain, plain * GUESS_VERIFY, per_row=True)
        self.draft = Table(0.0, plain * GUESS_DRAFT, per_row=False)

    def seconds(self, rows: int, drafts: int, drafting: int, depth: int) -> float:
        """What the tables say of `drafts` tokens of `drafting` among `rows` rows, the deepest row having `depth`."""
        total = self.verify.at(rows, drafts)
        return total + self.draft.at(drafting, depth) if depth else total

    def at_par(self, seconds: float) -> float:
        """What was measured now, as the tables have it."""
        return seconds / math.exp(self.speed)

    def draft_share(self, rows: int, depth: int) -> float:
        """What one more row adds to drafting, for each of its drafts."""
        if rows < 2:
            return 0.0
        more = self.draft.at(rows, depth) - self.draft.at(1, depth)
        return max(0.0, more) / ((rows - 1) * depth)

    def seed(self, rows: int, depth: int, verify: float, draft: float) -> None:
        """A measurement made beforehand, of rows that all draft to one depth."""
        self._begin(verify)
        for _ in range(FEW):
            self.verify.add(rows, rows * depth, verify)
            if depth:
                self.draft.add(rows, depth, draft)

    def observe(
        self, rows: int, drafts: int, drafting: int, depth: int, verify: float, draft: float, *, regular: bool
    ) -> None:
        """A step as it was measured. `regular`: all of `drafting` rows drafted to `depth`, and nothing but that took
        the drafting's time."""
        if not depth:
            verify, draft = verify + draft, 0.0
        self._begin(verify)
        regular = regular and depth > 0
        known = self.verify.count(rows, drafts) >= FEW
        if known and regular:
            known = self.draft.count(drafting, depth) >= FEW
        if known:
            # Only what was often measured tells of the machine; a step of a new kind tells of that kind.
            expected, found = self.verify.at(rows, drafts), verify
            if regular:
                expected, found = expected + self.draft.at(drafting, depth), verify + draft
            self._follow(math.log(found / expected) - self.speed)
        if drafts or not depth:  # without the drafts that were dropped it is not a plain step's time
            self.verify.add(rows, drafts, min(self.at_par(verify), self.verify.most(rows, drafts)))
        if regular:
            self.draft.add(drafting, depth, min(self.at_par(draft), self.draft.most(drafting, depth)))

    def _follow(self, off: float) -> None:
        """Moves the speed by what two steps agree on: one alone is noise. Without the pull to 0 the speed and the
        cells could wander off together."""
        agreed = min(off, self._off, key=abs) if off * self._off > 0.0 else 0.0
        self._off = off
        self.speed = SPEED_MEMORY * (self.speed + 0.5 * agreed)


def bucket(rows: int) -> int:
    """Row counts that are taken for one another: each its own up to 16, then about an eighth apart."""
    if rows <= 16:
        return rows
    step = 1 << (int(math.log2(rows)) - 3)
    return rows - rows % step
