"""What the routes of users take and give; no answer has a password or its hash."""

from typing import Annotated, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from loraplex.platform.api.schemas import Body, Named, seconds, seconds_or_none
from loraplex.platform.db.models import User
from loraplex.platform.passwords import LONGEST, SHORTEST
from loraplex.platform.sign_in import LONGEST as LONGEST_INVITATION
from loraplex.platform.users import NAME, Role

DAY_S = 86_400

UserId = Annotated[str, Path(max_length=64, examples=["usr_01kb8zp4q5w6x7y8z9a0b1c2d3"])]


class UserIn(Body):
    """A new user; without `tenant_id` it is of the caller's tenant, or an operator."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "ada@acme", "role": "viewer"}]}
    )

    name: Annotated[
        str,
        Field(
            max_length=256,
            description="What it signs in as. Names that a tenant's admin gives end in `@` and the"
            " tenant's name; an operator gives any.",
            json_schema_extra={"pattern": f"^{NAME.pattern}$"},
            examples=["ada@acme"],
        ),
    ]
    role: Role
    tenant_id: Annotated[str | None, Field(max_length=64, examples=[None])] = None


class UserChange(Body):
    """What is given, and not null, is changed."""

    role: Role | None = None
    disabled: bool | None = Field(default=None, description="Whether it is kept from signing in.")


class PasswordIn(Body):
    """A new password."""

    password: Annotated[
        SecretStr,
        Field(
            strict=False,
            json_schema_extra={"minLength": SHORTEST, "maxLength": LONGEST},
            examples=["correct horse battery staple"],
        ),
    ]


class InvitationIn(Body):
    """How long an invitation holds."""

    lasts_s: Annotated[
        int, Field(ge=1, le=int(LONGEST_INVITATION.total_seconds()), examples=[3600])
    ] = DAY_S


class InvitationOut(BaseModel):
    """What signs a user in once."""

    object: Literal["invitation"] = "invitation"
    user_id: str
    secret: str | None = Field(
        description="Dies when it is used, and when the user signs in or gets a password. Null"
        " where the request is a repetition (`Idempotency-Key`)."
    )
    expires_at: int


class UserOut(Named):
    """A user of the pages."""

    object: Literal["user"] = "user"
    name: str
    role: Role
    tenant_id: str | None = Field(description="Null for an operator.")
    has_password: bool
    created_at: int
    disabled_at: int | None
    signed_in_at: int | None = Field(description="The last time.")

    @classmethod
    def of(cls, user: User) -> "UserOut":
        """From a row."""
        return cls.model_validate(
            {
                "id": user.id,
                "name": user.name,
                "role": user.role,
                "tenant_id": user.tenant_id,
                "has_password": user.password is not None,
                "created_at": seconds(user.created_at),
                "disabled_at": seconds_or_none(user.disabled_at),
                "signed_in_at": seconds_or_none(user.signed_in_at),
            }
        )
