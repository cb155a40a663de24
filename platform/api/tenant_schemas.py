"""What the routes of tenants take and give: limits, the engine's policy, and its service."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from loraplex.engine.protocol import Service
from loraplex.platform.api.limit_schemas import LimitsIn, LimitsOut, within
from loraplex.platform.api.schemas import Named, seconds
from loraplex.platform.db.models import Tenant
from loraplex.platform.quotas import TenantLimits

Weight = Annotated[float, within("weight", 2.0, "Of its share of the engine's service.")]
Running = Annotated[int, within("max_running", 16, "Sequences that the engine runs at once.")]
KvShare = Annotated[float, within("kv_share", 0.5, "Of the KV cache, the most that it may hold.")]
Resident = Annotated[int, within("resident_bytes", 1 << 30, "Of images in the engine's memory.")]
Storage = Annotated[int, within("storage_bytes", 10 << 30, "Of stored images, each counted once.")]
Adapters = Annotated[int, within("max_adapters", 1_000, "Adapters.")]


class TenantLimitsIn(LimitsIn):
    """Limits that a body may set; null is no limit."""

    weight: Weight = 1.0
    max_running: Running | None = None
    kv_share: KvShare = 1.0
    resident_bytes: Resident | None = None
    storage_bytes: Storage | None = None
    max_adapters: Adapters | None = None


class TenantIn(TenantLimitsIn):
    """A new tenant."""

    name: Annotated[str, Field(max_length=256)]


class TenantChange(TenantLimitsIn):
    """What is given is changed; the rest stays."""

    suspended: bool | None = None


class TenantOut(LimitsOut, Named):
    """A tenant and its limits; null is no limit."""

    object: Literal["tenant"] = "tenant"
    name: str
    weight: float
    max_running: int | None
    kv_share: float
    resident_bytes: int | None
    storage_bytes: int | None
    max_adapters: int | None
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
    image_bytes: int = Field(
        description="Bytes of images in the engine that it uses, or was the last to use."
    )


class TenantDetail(TenantOut):
    """A tenant with its live service."""

    service: ServiceOut | None = Field(description="Null for one that had none lately.")

    @classmethod
    def with_service(cls, tenant: Tenant, services: Iterable[Service]) -> "TenantDetail":
        """From a row, and what the engine tells of all tenants."""
        found = next((each for each in services if each.tenant == tenant.id), None)
        service = None if found is None else ServiceOut.model_validate(found, from_attributes=True)
        return cls(**cls.fields_of(tenant), service=service)
