"""What may be limited, of whom, and within which bounds.

A tenant, each of its keys and each of its adapters have a rate, a budget and a number of requests
at once; a tenant has further shares of the machine. Knows numbers; refuses to know how they are
held.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypeVar

from loraplex.platform.errors import BadRequest

BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "requests_per_minute": (1, 1_000_000),
    "tokens_per_minute": (1, 1_000_000_000),
    "max_concurrency": (1, 1_000_000),
    "tokens_per_day": (1, 1_000_000_000_000),
    "tokens_per_month": (1, 10_000_000_000_000),
    "weight": (0.01, 100),
    "max_running": (1, 1_000_000),
    "kv_share": (0.001, 1),
    "resident_bytes": (1, 1_000_000_000_000_000),
    "storage_bytes": (0, 1_000_000_000_000_000),
    "max_adapters": (0, 1_000_000),
}
BucketKind = Literal["tenant", "key", "adapter"]
Some = TypeVar("Some", bound="Limits")


@dataclass(frozen=True)
class Limits:
    """What one bucket of requests may use; None is no limit. Raises `BadRequest` for a bad one."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None  # requests at once
    tokens_per_day: int | None = field(default=None, kw_only=True)  # a UTC day
    tokens_per_month: int | None = field(default=None, kw_only=True)  # a UTC month

    def __post_init__(self) -> None:
        for each in fields(self):
            value, (least, most) = getattr(self, each.name), BOUNDS[each.name]
            if value is not None and not least <= value <= most:
                unless = ", or null for no limit" if each.default is None else ""
                raise BadRequest(
                    f"{each.name} must be between {least} and {most}{unless}.", param=each.name
                )

    @classmethod
    def of(cls: type[Some], row: Any) -> Some:
        """The limits that a row holds in columns of the same names."""
        return cls(**{each.name: getattr(row, each.name) for each in fields(cls)})

    def put(self, row: Any) -> None:
        """Write them into a row's columns."""
        for each in fields(self):
            setattr(row, each.name, getattr(self, each.name))

    @property
    def held(self) -> tuple[int | None, int | None, int | None, int | None, int | None]:
        """What requests are held to, in the order of `LimitName`."""
        return (
            self.requests_per_minute,
            self.tokens_per_minute,
            self.max_concurrency,
            self.tokens_per_day,
            self.tokens_per_month,
        )

    @property
    def has_budget(self) -> bool:
        """Whether a day's or a month's tokens are limited."""
        return self.tokens_per_day is not None or self.tokens_per_month is not None


UNLIMITED: Final = Limits()


@dataclass(frozen=True)
class TenantLimits(Limits):
    """A tenant's limits, and what the engine and the registry grant it.

    A tenant that runs nothing may always start one request, however many sequences, KV blocks and
    bytes of images that takes.
    """

    weight: float = 1.0  # of its share of the service
    max_running: int | None = None  # sequences at once
    kv_share: float = 1.0  # of the KV blocks, at most
    resident_bytes: int | None = field(default=None, kw_only=True)  # of its images, in the engine
    storage_bytes: int | None = field(default=None, kw_only=True)  # of its images, each once
    max_adapters: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Bucket:
    """Whom limits hold: the tenant itself, or one key or adapter of its requests, by id."""

    kind: BucketKind
    id: str
    limits: Limits
