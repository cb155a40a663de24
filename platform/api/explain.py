"""What an answer tells of how it came about: which weights, what was cached, and the times.

The same facts stand in the headers `x-loraplex-*` and, where a caller asks for it, in the object
`loraplex` of the body or of a stream's last event. Refuses to know how answers are shaped.
"""

from typing import Any, Final
from urllib.parse import quote

from loraplex.engine.protocol import Finished
from loraplex.platform.api.target import Target

Facts = dict[str, Any]
_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def weights(target: Target) -> Facts:
    """What ran. The base has no adapter, version and digest; most adapters have no canary."""
    return {
        "model": target.model_id,
        "adapter": target.adapter,
        "version": target.version,
        "digest": target.digest,
        "arm": target.arm,
    }


def timings(finished: Finished | None, cached_tokens: int) -> Facts:
    """What the engine tells of the first prompt; nothing where it died just after the end.

    Milliseconds since the engine took the request: until first scheduled, until the adapter's image
    was resident, until the first token, and in all.
    """
    if finished is None:
        return {}
    return {
        "cached_tokens": cached_tokens,
        "queue_ms": round(finished.queue_s * 1000, 1),
        "load_ms": round(finished.load_s * 1000, 1),
        "first_token_ms": round(finished.first_token_s * 1000, 1),
        "total_ms": round(finished.total_s * 1000, 1),
    }


def moments(finished: Finished | None) -> dict[str, float]:
    """When the engine reached what, in seconds since it took the request."""
    if finished is None:
        return {}
    return {
        "image loaded": finished.load_s,
        "scheduled": finished.queue_s,
        "first token": finished.first_token_s,
    }


def as_headers(facts: Facts) -> dict[str, str]:
    """One header for each fact that there is; the base's digest is "base"."""
    if "digest" in facts:
        facts = facts | {"digest": facts["digest"] or "base"}
    return {
        f"x-loraplex-{name.replace('_', '-')}": _quoted(str(value))
        for name, value in facts.items()
        if value is not None
    }


def _quoted(text: str) -> str:
    plain = text.isascii() and text.isprintable() and "%" not in text
    return text if plain else quote(text, safe=_PRINTABLE)
