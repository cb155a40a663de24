"""Leaves budgets to the ledger after the embedded Redis was killed.

What Redis does is on disk up to two seconds later (`appendfsync everysec`), so a kill may cost it
the last charges. The ledger has them, and is asked as after a loss of everything
(`budget_seed.py`). Knows how to say so to a Redis of our own; refuses to know whether it was
killed.
"""

from pathlib import Path
from typing import Final

from redis.asyncio import Redis

_SCRIPT: Final = Path(__file__).with_suffix(".lua").read_text()


async def recount(redis: Redis) -> None:
    """Have each tenant's day and month counted anew: from the ledger, and then on.

    Raises `RedisError`.
    """
    await redis.register_script(_SCRIPT)()
