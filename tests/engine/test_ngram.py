"""Prompt lookup: what it proposes, and that its index finds what a search of all tokens finds."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.ngram import Lookup


def search(token_ids: Sequence[int], most: int, shortest: int, longest: int) -> list[int]:
    """The same by definition, in time of the sequence's length."""
    for size in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for place in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[place - size : place] == token_ids[-size:]:
                known = list(token_ids)
                for i in range(most):
                    known.append(known[place + i])
                return known[len(token_ids) :]
    return []


def propose(token_ids: Sequence[int], most: int) -> list[int]:
    return Lookup().propose(token_ids, most)


def test_what_followed_the_same_tokens():
    assert propose([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 3) == [4, 5, 6]


def test_the_longest_match_wins_over_the_latest():
    assert propose([1, 2, 3, 4, 9, 9, 3, 4, 8, 8, 1, 2, 3, 4], 1) == [9]


def test_of_equal_matches_the_latest_wins():
    assert propose([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_a_period_goes_on():
    assert propose([5, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert propose([4, 4, 4], 3) == [4, 4, 4]


def test_nothing_is_known():
    assert propose([], 4) == []
    assert propose([1], 4) == []
    assert propose([1, 1], 4) == []
    assert propose([1, 2, 3, 4, 5, 4], 4) == []


def test_nothing_is_asked_for():
    assert propose([1, 2, 3, 1, 2], 0) == []


@given(
    parts=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8),
    most=st.integers(0, 6),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_equals_a_search_of_all_tokens(parts: list[list[int]], most: int, shortest: int, more: int):
    lookup = Lookup(shortest, shortest + more)
    token_ids: list[int] = []
    for part in parts:
        token_ids += part
        expected = search(token_ids, most, shortest, shortest + more)
        assert lookup.propose(token_ids, most) == expected
