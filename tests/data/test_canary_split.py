"""Canary splits: which side a conversation takes, and how an alias with a canary moves."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.platform import aliases, registry, resolving
from loraplex.platform.audit import SYSTEM, Actor
from loraplex.platform.canaries import Canary, arm
from loraplex.platform.db.models import Alias, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.errors import AliasMoved, ApiError, BadRequest, Conflict, ModelNotFound

KEY = "adp_1/prod"
CONVERSATIONS = [f"conversation {number}" for number in range(10_000)]
TEXT = st.text(max_size=40)
PERCENT = st.integers(1, 9_999).map(lambda step: step / 100)


@given(TEXT, TEXT, PERCENT, PERCENT)
def test_a_greater_percentage_only_adds_conversations(
    key: str, conversation: str, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    if arm(key, conversation, less) == "canary":
        assert arm(key, conversation, more) == "canary"


@given(TEXT, TEXT, PERCENT)
def test_a_conversation_keeps_its_side(key: str, conversation: str, percent: float) -> None:
    assert len({arm(key, conversation, percent) for _ in range(3)}) == 1


def test_conversations_fall_evenly_over_the_whole_range() -> None:
    """Chi-square over 100 cells of 1%: above 148.2 is one chance in a thousand of 99 degrees."""
    cells = [0] * 100
    for conversation in CONVERSATIONS:
        low, high = 0, 100  # the canary's least percentage is in (low, high]
        while high - low > 1:
            middle = (low + high) // 2
            if arm(KEY, conversation, middle) == "canary":
                high = middle
            else:
                low = middle
        cells[low] += 1
    expected = len(CONVERSATIONS) / 100
    assert sum((count - expected) ** 2 / expected for count in cells) < 148.2


def test_two_aliases_split_independently() -> None:
    """Chi-square over four cells: above 16.3 is one chance in a thousand of 3 degrees."""
    table = {(a, b): 0 for a in ("stable", "canary") for b in ("stable", "canary")}
    for conversation in CONVERSATIONS:
        table[arm(KEY, conversation, 50), arm("adp_1/beta", conversation, 50)] += 1
    expected = len(CONVERSATIONS) / 4
    assert sum((count - expected) ** 2 / expected for count in table.values()) < 16.3


@pytest.mark.parametrize("percent", [0, 100, -1, 100.01, 0.001, 12.345, float("nan")])
def test_a_percentage_that_splits_nothing_is_refused(percent: float) -> None:
    with pytest.raises(BadRequest) as caught:
        Canary(1, percent)
    assert caught.value.param == "canary.percent"


@pytest.mark.parametrize("percent", [0.01, 0.07, 1.15, 33.33, 57.99, 99.99])
def test_two_decimals_are_exact(percent: float) -> None:
    steps = sum(arm(KEY, each, Canary(1, percent).percent) == "canary" for each in CONVERSATIONS)
    assert abs(steps / 100 - percent) < 2


# --- aliases with a canary -------------------------------------------------------------------


@pytest.fixture
async def poet(db: Database, acme: Tenant) -> Tenant:
    """`poet` with three versions."""
    for number in (1, 2, 3):
        async with db.session(acme.id) as session:
            await registry.add_version(
                session,
                acme.id,
                "poet",
                digest=f"{number}" * 64,
                base="f" * 64,
                base_name="Base",
                report={"rank": 8, "bytes": 1024},
                actor=SYSTEM,
            )
    return acme


async def change(db: Database, tenant: Tenant, verb: str, *args: Any, seen: int) -> Alias:
    async with db.session(tenant.id) as session:
        call = getattr(aliases, verb)
        given = {"canary": args[1]} if verb == "move_alias" else {}
        return await call(
            session, tenant.id, "poet", "prod", *args[:1], seen=seen, actor=Actor("key_1"), **given
        )


async def meaning(db: Database, tenant: Tenant, conversation: str | None) -> tuple[str, Any]:
    async with db.read(tenant.id) as session:
        found = await resolving.resolve(
            session, tenant.id, "poet@prod", "Base", conversation=conversation
        )
    return found.model_id, found.arm


def place(row: Alias) -> tuple[int | None, Canary | None]:
    return row.number, aliases.canary_of(row)


@pytest.mark.anyio
async def test_each_conversation_gets_its_side(db: Database, poet: Tenant) -> None:
    row = await change(db, poet, "move_alias", 2, Canary(3, 25), seen=0)
    for conversation in CONVERSATIONS[:40]:
        side = arm(f"{row.adapter_id}/prod", conversation, 25)
        expected = ("poet@3", "canary") if side == "canary" else ("poet@2", "stable")
        assert await meaning(db, poet, conversation) == expected
    assert await meaning(db, poet, None) == ("poet@2", "stable")
    await change(db, poet, "promote", seen=1)
    assert await meaning(db, poet, CONVERSATIONS[0]) == ("poet@3", None)


@pytest.mark.anyio
async def test_a_canary_is_promoted_aborted_and_brought_back(db: Database, poet: Tenant) -> None:
    split = Canary(3, 12.5)
    assert place(await change(db, poet, "move_alias", 2, split, seen=0)) == (2, split)
    assert place(await change(db, poet, "promote", seen=1)) == (3, None)
    assert place(await change(db, poet, "roll_back", seen=2)) == (2, split)
    assert place(await change(db, poet, "abort", seen=3)) == (2, None)
    assert place(await change(db, poet, "roll_back", seen=4)) == (2, split)
    assert place(await change(db, poet, "move_alias", 1, None, seen=5)) == (1, None)
    for verb in ("promote", "abort"):
        with pytest.raises(Conflict, match="no canary"):
            await change(db, poet, verb, seen=6)
        with pytest.raises(AliasMoved):
            await change(db, poet, verb, seen=5)
    async with db.read(poet.id) as session:
        moves = await aliases.list_moves(session, poet.id, "poet", "prod")
    assert [(move.number, aliases.canary_of(move)) for move in moves] == [
        (1, None),
        (2, split),
        (2, None),
        (2, split),
        (3, None),
        (2, split),
    ]


@pytest.mark.anyio
async def test_a_canary_must_be_another_version_that_is_there(db: Database, poet: Tenant) -> None:
    with pytest.raises(BadRequest, match="the version itself"):
        await change(db, poet, "move_alias", 2, Canary(2, 10), seen=0)
    with pytest.raises(ModelNotFound) as caught:
        await change(db, poet, "move_alias", 2, Canary(4, 10), seen=0)
    assert caught.value.param == "canary.version"


Place = tuple[int | None, Canary | None]


@dataclass
class Model:
    """What an alias should be: its history of places, the last one now."""

    history: list[Place] = field(default_factory=lambda: [(None, None)])

    @property
    def now(self) -> Place:
        return self.history[-1]

    @property
    def revision(self) -> int:
        return 0 if self.now[0] is None else len(self.history) - 1

    def after(self, verb: str, number: int, canary: Canary | None) -> Place | type[ApiError]:
        """Where a change leads, or the error that refuses it."""
        at, split = self.now
        if verb == "move_alias":
            clash = canary is not None and canary.number == number
            return BadRequest if clash else (number, canary)
        if at is None:
            return ModelNotFound
        if verb == "remove_alias":
            return None, None
        if verb == "roll_back":
            before = self.history[-2]
            return Conflict if before[0] is None else before
        if split is None:
            return Conflict
        return (split.number, None) if verb == "promote" else (at, None)


VERBS = ("move_alias", "promote", "abort", "roll_back", "remove_alias")
STEP = st.tuples(
    st.sampled_from(("move_alias", *VERBS)),
    st.integers(1, 3),
    st.none() | st.builds(Canary, st.integers(1, 3), PERCENT),
)
PLANS: list[Sequence[tuple[str, int, Canary | None]]] = []


@settings(max_examples=12, database=None, derandomize=True)
@given(st.lists(STEP, min_size=8, max_size=16))
def plan(steps: Sequence[tuple[str, int, Canary | None]]) -> None:
    PLANS.append(steps)


@pytest.mark.anyio
async def test_any_changes_do_what_a_list_of_places_does(db: Database, poet: Tenant) -> None:
    PLANS.clear()
    plan()
    model = Model()
    for verb, number, canary in (step for steps in PLANS for step in steps):
        expected = model.after(verb, number, canary)
        args = (number, canary) if verb == "move_alias" else ()
        if isinstance(expected, tuple):
            row = await change(db, poet, verb, *args, seen=model.revision)
            model.history.append(expected)
            assert (place(row), row.revision) == (expected, len(model.history) - 1)
        else:
            with pytest.raises(expected):
                await change(db, poet, verb, *args, seen=model.revision)
    async with db.read(poet.id) as session:
        moves = await aliases.list_moves(session, poet.id, "poet", "prod", limit=1000)
    told = [(move.number, aliases.canary_of(move)) for move in reversed(moves)]
    assert told == model.history[1:]
