"""What the soak benchmark calls the beginning, against whose memory it holds the end."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from soak import is_a_fifth


@pytest.mark.parametrize(
    ("ended", "seconds", "minutes", "expected"),
    [
        (19, 1000.0, 0.0, False),
        (20, 0.0, 0.0, True),
        (20, 0.0, 5.0, True),
        (0, 59.0, 5.0, False),
        (0, 60.0, 5.0, True),
    ],
)
def test_a_fifth_of_the_requests_or_of_the_time(ended, seconds, minutes, expected):
    assert is_a_fifth(ended, 100, seconds, 60 * minutes) == expected
