"""What the routes of uploads take and give; times are whole seconds since the epoch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from loraplex.platform.api.schemas import Body, Named, seconds
from loraplex.platform.db.models import Upload
from loraplex.platform.model_names import ALIAS
from loraplex.platform.upload_jobs import Bounds, Dtype, State, Wish, expires_at
from loraplex.platform.upload_parts import PARTS, Part
from loraplex.platform.upload_report import Check, Outcome

Size = Annotated[int, Field(ge=0, le=1 << 50)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DIGEST = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"


class UploadIn(Body):
    """An upload to begin; what `sizes` and `sha256` tell of parts is checked when it is finished.

    Bytes that are told count against the tenant's storage from now on.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"name": "support", "alias": "prod"},
                {
                    "name": "support",
                    "variants": ["bf16", "int8"],
                    "sizes": {"adapter_config": 840, "adapter_model": 9_240_832},
                    "sha256": {"adapter_model": DIGEST},
                },
            ]
        }
    )

    name: Annotated[str, Field(max_length=256, description="The adapter's name.")]
    variants: Annotated[
        list[Dtype],
        Field(min_length=1, max_length=2, description="Images to make; the first is its own."),
    ] = ["bf16"]  # noqa: RUF012 (pydantic copies it)
    alias: Annotated[
        str | None,
        Field(
            max_length=63,
            pattern=f"^{ALIAS.pattern}$",
            description="An alias to move to the new version, such as `prod`.",
        ),
    ] = None
    sizes: Annotated[dict[Part, Size], Field(description="Bytes of each part.")] = {}  # noqa: RUF012
    sha256: Annotated[dict[Part, Sha256], Field(description="Of each part, in hex.")] = {}  # noqa: RUF012

    def wish(self) -> Wish:
        """As the service takes it."""
        return Wish(
            name=self.name,
            variants=tuple(dict.fromkeys(self.variants)),
            alias=self.alias,
            sizes={str(part): size for part, size in self.sizes.items()},
            sha256={str(part): digest for part, digest in self.sha256.items()},
        )


class PartOut(BaseModel):
    """One part of an upload, as far as it has come."""

    part: Part
    offset: int = Field(description="Bytes that are on the server's disk: go on from here.")
    size: int | None = Field(default=None, description="Bytes that it will have, if that was told.")
    sha256: str | None = None


class CheckOut(BaseModel):
    """A check that was made; the first that fails is the last."""

    name: Check
    state: Outcome
    seconds: float
    at: int
    detail: dict[str, Any]


class ReasonOut(BaseModel):
    """Why an upload is refused, and what to do about it."""

    code: str
    message: str


class UploadOut(Named):
    """An upload: what it is to become, how far it is, and what came of it."""

    object: Literal["upload"] = "upload"
    name: str = Field(description="The adapter's name; empty while a form is being received.")
    state: State
    variants: list[Dtype]
    alias: str | None
    created_at: int
    expires_at: int = Field(description="When it is given up, unless it is finished.")
    parts: list[PartOut] = Field(description="Empty once the upload is closed, and in lists.")
    checks: list[CheckOut]
    reasons: list[ReasonOut]
    version: str | None = Field(description="The immutable id of what it became.")
    report: dict[str, Any] | None = Field(description="All that was found out so far.")

    @classmethod
    def of(cls, row: Upload, bounds: Bounds, offsets: Mapping[Part, int]) -> "UploadOut":
        """From a row, and where its parts end on disk."""
        report = row.report or {}
        return cls(
            id=row.id,
            name=row.name,
            state=cast("State", row.state),
            variants=row.options["variants"],
            alias=row.options["alias"],
            created_at=seconds(row.created_at),
            expires_at=seconds(expires_at(row, bounds)),
            parts=[part_of(row, part, at) for part, at in offsets.items()],
            checks=report.get("checks", []),
            reasons=report.get("reasons", []),
            version=None if row.number is None else f"{row.name}@{row.number}",
            report=row.report,
        )


def part_of(row: Upload, part: Part, offset: int) -> PartOut:
    """One part of a row's."""
    told = row.parts.get(part, {})
    return PartOut(part=part, offset=offset, size=told.get("size"), sha256=told.get("sha256"))


FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}}
                    | {part: {"type": "string", "format": "binary"} for part in PARTS},
                }
            }
        },
    }
}
BYTES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
OFFSET_HEADER: dict[str, Any] = {
    "Upload-Offset": {
        "description": "Where the part ends now: go on from here.",
        "schema": {"type": "integer", "minimum": 0},
    }
}
