"""Equal names mean equal KV: what may share a cached block, and what never does."""

import hashlib
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loraplex.engine.prefix_cache import BrokenCache, Chain, PrefixCache, extend_hashes, namespace

SIZE = 4
IMAGE = "1" * 64
OTHER = "2" * 64


def chain(image: str | None, scope: str = "s", adapter_start: int = 0) -> Chain:
    return Chain(namespace("b", None, scope), namespace("b", image, scope), adapter_start)


def hashes(token_ids: list[int], of: Chain) -> list[bytes]:
    names: list[bytes] = []
    extend_hashes(names, token_ids, of, SIZE)
    return names


def shared(left: list[bytes], right: list[bytes]) -> int:
    """Blocks of the longest common prefix; those after it have nothing in common."""
    count = next(
        (i for i, pair in enumerate(zip(left, right, strict=False)) if len({*pair}) == 2), None
    )
    count = min(len(left), len(right)) if count is None else count
    assert not {*left[count:]} & {*right[count:]}
    return count


def test_a_name_is_the_hash_of_namespace_predecessor_and_tokens() -> None:
    of, tokens = chain(IMAGE), [7, 1, 2, 3, 5, 5, 5, 2**31 - 1]
    first = hashlib.sha256(of.image + bytes(32) + struct.pack("<5i", 0, *tokens[:4])).digest()
    second = hashlib.sha256(of.image + first + struct.pack("<5i", 0, *tokens[4:])).digest()
    assert hashes(tokens, of) == [first, second]


def test_only_full_blocks_have_names_and_more_tokens_append() -> None:
    tokens, names = list(range(100)), list[bytes]()
    for count in (0, 3, 4, 5, 11, 12, 13, 40, 100):
        extend_hashes(names, tokens[:count], chain(None), SIZE)
        assert len(names) == count // SIZE
        assert names == hashes(tokens[:count], chain(None))


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_blocks_are_shared_as_far_as_tokens_agree(left: list[int], right: list[int]) -> None:
    agree = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), 20)
    expected = min(agree, len(left), len(right)) // SIZE
    assert shared(hashes(left, chain(None)), hashes(right, chain(None))) == expected


def test_a_foreign_scope_another_image_and_the_base_never_share() -> None:
    tokens = list(range(12))
    chains = [chain(i, s) for i in (None, IMAGE, OTHER) for s in ("", "s", "t")]
    names = [name for of in chains for name in hashes(tokens, of)]
    assert len({*names}) == len(chains) * 3


parts = st.tuples(
    st.text("ab\0:/1", max_size=4),
    st.none() | st.text("ab\0:/1", max_size=4),
    st.text("ab\0:/1", max_size=4),
)


@given(parts, parts)
@example(("a", "b", "c"), ("ab", "", "c"))
@example(("a", "", "c"), ("a", None, "c"))
@example(("a", "b:c", "d"), ("a:b", "c", "d"))
@example(("a", "b", "\0c"), ("a", "b\0", "c"))
def test_crafted_strings_do_not_collide(
    left: tuple[str, str | None, str], right: tuple[str, str | None, str]
) -> None:
    assert (namespace(*left) == namespace(*right)) == (left == right)


@pytest.mark.parametrize(("start", "expected"), [(0, 0), (3, 0), (4, 1), (9, 2), (12, 3), (99, 3)])
def test_an_activated_adapter_shares_the_base_before_its_start(start: int, expected: int) -> None:
    tokens = list(range(12))
    base, activated = hashes(tokens, chain(None)), hashes(tokens, chain(IMAGE, adapter_start=start))
    assert shared(base, activated) == expected
    assert shared(base, hashes(tokens, chain(IMAGE, "t", start))) == 0


@given(st.integers(0, 14), st.integers(0, 14))
def test_activated_chains_part_where_the_first_adapter_starts(one: int, other: int) -> None:
    tokens = list(range(12))
    first, second = (hashes(tokens, chain(IMAGE, adapter_start=start)) for start in (one, other))
    assert shared(first, second) == (3 if one == other else min(one // SIZE, other // SIZE, 3))


def test_two_activated_adapters_share_the_base_part_alone() -> None:
    tokens = list(range(12))
    one, other = (hashes(tokens, chain(image, adapter_start=6)) for image in (IMAGE, OTHER))
    assert shared(one, other) == 1


def test_a_block_has_one_name() -> None:
    cache = PrefixCache()
    assert cache.add(b"x", 0, "a") and not cache.add(b"x", 1, "a")
    with pytest.raises(BrokenCache):
        cache.add(b"y", 0, "a")
    assert cache.find(b"x") == 0 and cache.is_cached(0) and not cache.is_cached(1)


def test_integrity_sees_a_block_that_should_be_idle_and_one_that_should_not() -> None:
    cache = PrefixCache()
    cache.add(b"x", 0, "a")
    cache.check_integrity(set())
    with pytest.raises(BrokenCache):
        cache.check_integrity({0})
    assert cache.rest(0) and not cache.rest(1)
    cache.check_integrity({0})
    with pytest.raises(BrokenCache):
        cache.check_integrity(set())


def test_old_ranks_do_not_pile_up() -> None:
    cache = PrefixCache()
    cache.add(b"x", 0, "a")
    for _ in range(1000):
        cache.rest(0)
        cache.use(0)
    assert len(cache._ranks) < 100
    cache.rest(0)
    assert cache.evict() == (0, (b"x", "a"))
