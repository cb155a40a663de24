"""Patterns for days and times: they match what there is, and schemas are changed nowhere else."""

import re
from datetime import date, datetime

from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.guide_dates import PATTERNS, with_real_dates

YEARS = st.integers(0, 9999)


@given(year=YEARS, month=st.integers(0, 13), day=st.integers(0, 32))
def test_days_that_match_are_those_that_there_are(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    try:
        expected = 1000 <= date.fromisoformat(text).year <= 2999
    except ValueError:
        expected = False
    assert bool(re.search(PATTERNS["date"], text)) == expected


@given(year=st.integers(1000, 2999))
def test_leap_days(year: int) -> None:
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    assert bool(re.search(PATTERNS["date"], f"{year}-02-29")) == leap


@given(st.datetimes(datetime(1000, 1, 1), datetime(2999, 12, 31)))
def test_times_match(moment: datetime) -> None:
    assert re.search(PATTERNS["date-time"], moment.isoformat() + "Z")
    assert not re.search(PATTERNS["date-time"], moment.isoformat())


def test_only_the_format_of_strings_becomes_a_pattern() -> None:
    schema = {
        "properties": {
            "format": {"const": {"format": "date"}},
            "born": {"type": "string", "format": "date"},
            "at": {"anyOf": [{"type": "string", "format": "date-time"}, {"format": "uuid"}]},
            "own": {"format": "date", "pattern": "^2"},
        },
        "enum": [{"format": "date"}],
    }
    changed = with_real_dates(schema)
    inner = changed["properties"]
    assert inner["born"] == {"type": "string", "pattern": PATTERNS["date"]}
    assert inner["at"]["anyOf"] == [
        {"type": "string", "pattern": PATTERNS["date-time"]},
        {"format": "uuid"},
    ]
    assert (inner["format"], inner["own"]) == (
        schema["properties"]["format"],
        schema["properties"]["own"],
    )
    assert changed["enum"] == schema["enum"]
