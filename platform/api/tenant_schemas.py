"""What the routes of tenants take and give: limits, the engine's policy, and its service."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from loraplex.engine.protocol import Service
from loraplex.platform.api.schemas import Body, Named, seconds
from loraplex.platform.db.models import Tenant
from loraplex.platform.tenants import BOUNDS, TenantLimits


def _within(name: str, example: float, description: str) -> Any:
    """A limit's field, with its bounds."""
    least, most = BOUNDS[name]
    return Field(ge=least, le=most, description=description, examples=[example])


Requests = Annotated[int, _within("requests_per_minute", 120, "Requests in any minute.")]
Tokens = Annotated[int, _within("tokens_per_minute", 50_000, "Tokens, in and out, in a minute.")]
Concurrency = Annotated[int, _within("max_concurrency", 8, "Requests at the same time.")]
Weight = Annotated[float, _within("weight", 2.0, "Of its share of the engine's service.")]
Running = Annotated[int, _within("max_running", 16, "Sequences that the engine runs at once.")]
KvShare = Annotated[float, _within("kv_share", 0.5, "Of the KV cache, the most that it may hold.")]


class TenantLimitsIn(Body):
    """Limits that a body may set; null is no limit."""

    requests_per_minute: Requests | None = None
    tokens_per_minute: Tokens | None = None
    max_concurrency: Concurrency | None = None
    weight: Weight = 1.0
    max_running: Running | None = None
    kv_share: KvShare = 1.0


class TenantIn(TenantLimitsIn):
    """A new tenant."""

    name: Annotated[str, Field(max_length=256)]


class TenantChange(TenantLimitsIn):
    """What is given is changed; the rest stays."""

    suspended: bool | None = None


class TenantOut(Named):
    """A tenant and its limits; null is no limit."""

    object: Literal["tenant"] = "tenant"
    name: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrency: int | None
    weight: float
    max_running: int | None
    kv_share: float
    suspended: bool
    created_at: int

    @classmethod
    def fields_of(cls, tenant: Tenant) -> dict[str, Any]:
        """What a row tells."""
        return {
            "id": tenant.id,
            "name": tenant.name,
            **vars(TenantLimits.of(tenant)),
            "suspended": tenant.suspended_at is not None,
            "created_at": seconds(tenant.created_at),
        }

    @classmethod
    def of(cls, tenant: Tenant) -> "TenantOut":
        """From a row."""
        return cls(**cls.fields_of(tenant))


class ServiceOut(BaseModel):
    """What the engine has done for a tenant since it started, and holds for it now."""

    prompt_tokens: int = Field(description="Computed; those found in the cache left out.")
    generated_tokens: int
    cached_tokens: int
    running: int = Field(description="Sequences in the batch.")
    waiting: int = Field(description="Requests that wait for room in it.")
    kv_blocks: int = Field(description="KV blocks that its running sequences hold.")


class TenantDetail(TenantOut):
    """A tenant with its live service."""

    service: ServiceOut | None = Field(description="Null for one that had none lately.")

    @classmethod
    def with_service(cls, tenant: Tenant, services: Iterable[Service]) -> "TenantDetail":
        """From a row, and what the engine tells of all tenants."""
        found = next((each for each in services if each.tenant == tenant.id), None)
        service = None if found is None else ServiceOut.model_validate(found, from_attributes=True)
        return cls(**cls.fields_of(tenant), service=service)
