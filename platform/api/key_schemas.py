"""What the routes of keys take and give; a secret is in one answer only, that of its making."""

from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import AfterValidator, AwareDatetime, ConfigDict, Field

from loraplex.platform.api.limit_schemas import LimitsIn, LimitsOut
from loraplex.platform.api.moments import in_utc
from loraplex.platform.api.schemas import Body, Named, seconds, seconds_or_none
from loraplex.platform.db.models import MODEL_LENGTH, NAME_LENGTH, ApiKey
from loraplex.platform.key_terms import MAX_ADAPTERS, MAX_OVERLAP, SCOPES, Scope
from loraplex.platform.quotas import Limits

DAY_S = 86_400
PLAIN = "^[^\\s@:]+$"
MAX_OVERLAP_S = int(MAX_OVERLAP.total_seconds())

KeyId = Annotated[str, Path(max_length=64, examples=["key_01kb8zp4q5w6x7y8z9a0b1c2d3"])]
Name = Annotated[
    str,
    Field(
        max_length=256,
        json_schema_extra={"minLength": 1, "maxLength": NAME_LENGTH},
        description="What the key is for.",
        examples=["ci"],
    ),
]
Scopes = Annotated[
    list[Annotated[str, Field(max_length=32, json_schema_extra={"enum": [*SCOPES]})]],
    Field(max_length=16, json_schema_extra={"minItems": 1}, examples=[["infer"]]),
]
Expiry = Annotated[
    AwareDatetime,
    AfterValidator(in_utc),
    Field(strict=False, description="ISO 8601 with a timezone.", examples=["2030-01-31T12:00:00Z"]),
]
AdapterNames = Annotated[
    list[Annotated[str, Field(max_length=MODEL_LENGTH, json_schema_extra={"pattern": PLAIN})]],
    Field(
        min_length=1,
        max_length=MAX_ADAPTERS,
        description="All that it may use, without versions: adapters' names, `owner/name` for a"
        " shared one, the base by its own. Null: everything. With `adapters:read` and"
        " `adapters:write` it sees these of its tenant's, publishes their versions and retires,"
        " restores and deletes them, and moves their aliases.",
        examples=[["support", "acme/translate"]],
    ),
]


class KeyIn(LimitsIn):
    """A new key; without `tenant_id` it is of the caller's tenant, or an operator's.

    Its limits hold beside those of its tenant.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"name": "support desk", "scopes": ["infer"], "adapters": ["support"]},
                {
                    "name": "ci",
                    "scopes": ["adapters:read", "adapters:write"],
                    "adapters": ["support"],
                },
            ]
        }
    )

    name: Name
    scopes: Scopes
    tenant_id: Annotated[str | None, Field(max_length=64, examples=[None])] = None
    expires_at: Expiry | None = None
    adapters: AdapterNames | None = None


class KeyChange(LimitsIn):
    """What is given is changed; the rest stays. A name of null stays too."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"requests_per_minute": 60, "adapters": None}]}
    )

    name: Name | None = None
    expires_at: Expiry | None = None
    adapters: AdapterNames | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What is to be changed."""
        given = self.model_dump(exclude_unset=True)
        return {key: value for key, value in given.items() if (key, value) != ("name", None)}


class RotateIn(Body):
    """How a key is replaced."""

    overlap_s: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_OVERLAP_S,
            description="Seconds for which the old key works beside the new one.",
            examples=[3600],
        ),
    ] = DAY_S


class KeyOut(LimitsOut, Named):
    """A key without its secret; a limit of null is none."""

    object: Literal["api_key"] = "api_key"
    name: str
    tenant_id: str | None = Field(description="Null for an operator's key.")
    scopes: list[Scope]
    adapters: list[str] | None = Field(description="All that it may use; null is everything.")
    redacted: str = Field(description="The first characters of the secret.")
    rotated_from: str | None = Field(description="The key that it replaces.")
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None = Field(description="To the minute.")

    @classmethod
    def fields_of(cls, key: ApiKey) -> dict[str, Any]:
        """What a row tells."""
        return {
            "id": key.id,
            "name": key.name,
            "tenant_id": key.tenant_id,
            "scopes": key.scopes,
            "adapters": key.adapters,
            "redacted": key.redacted,
            "rotated_from": key.rotated_from,
            "created_at": seconds(key.created_at),
            "expires_at": seconds_or_none(key.expires_at),
            "revoked_at": seconds_or_none(key.revoked_at),
            "last_used_at": seconds_or_none(key.last_used_at),
            **vars(Limits.of(key)),
        }

    @classmethod
    def of(cls, key: ApiKey) -> "KeyOut":
        """From a row."""
        return cls(**cls.fields_of(key))


class NewKeyOut(KeyOut):
    """A key with its secret, which is told this once."""

    secret: str | None = Field(
        description="`lpx_…`. Null where the request is a repetition (`Idempotency-Key`).",
    )

    @classmethod
    def with_secret(cls, key: ApiKey, secret: str) -> "NewKeyOut":
        """From a row that was just made, and what it was made of."""
        return cls(**cls.fields_of(key), secret=secret)
