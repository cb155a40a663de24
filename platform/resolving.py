"""What a request's `model` means: a version of an adapter, one of its images, or the bare base.

Chooses among the candidates that the caller may use: the side of a canary split, the image of a
dtype. Knows names and digests; refuses to know requests and weights, and changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform import canaries, candidates
from loraplex.platform.canaries import Arm
from loraplex.platform.candidates import Candidate
from loraplex.platform.errors import ModelNotFound
from loraplex.platform.model_names import ModelName, parse
from loraplex.platform.quotas import UNLIMITED, Limits


@dataclass(frozen=True)
class Resolved:
    """What a request's `model` means: the immutable id, and the image (None: the bare base).

    `adapter_id` is the id of the adapter's row and `limits` are its own; `owner` is the tenant that
    lets the caller use it, None for one of the caller's; `arm` is which side of a canary split was
    taken.
    """

    model_id: str
    digest: str | None = None
    adapter: str | None = None  # its name; "owner/name" for another tenant's
    version: int | None = None
    adapter_id: str | None = None
    limits: Limits = UNLIMITED
    owner: str | None = None
    public: bool = False
    arm: Arm | None = None


async def resolve(
    session: AsyncSession,
    tenant_id: str,
    model: str,
    base_name: str,
    *,
    conversation: str | None = None,
    dtype: str | None = None,
) -> Resolved:
    """What `model` means to this tenant, in a session that `view` says.

    It is the base, `name` (its newest version that is not retired), `name@number` or `name@alias`
    (the version that the alias is at; where it is split, the one for this `conversation`);
    `owner/name` is another tenant's. `:dtype` after it asks for the image of that dtype; without
    it, it is the server's preferred `dtype` where there is one, else the version's own. Raises
    `ModelNotFound` when it means nothing, another tenant's adapter among the reasons.
    """
    if model == base_name:
        return Resolved(model)
    wanted = parse(model)
    if wanted is None:
        raise ModelNotFound(model)
    found = await candidates.find(session, tenant_id, wanted, wanted.dtype or dtype)
    chosen, arm = _choose(found, wanted, conversation)
    image = _image(chosen, wanted.dtype) if chosen else None
    if chosen is None or image is None:
        raise ModelNotFound(model)
    return _resolved(tenant_id, wanted, chosen, image, arm)


def view(tenant_id: str, *models: str) -> str | None:
    """Whose session resolves these names: the tenant's own, an operator's where one has an owner.

    Only then are others' rows in sight; each must let this tenant use it.
    """
    return None if any("/" in model for model in models) else tenant_id


def _choose(
    found: Sequence[Candidate], wanted: ModelName, conversation: str | None
) -> tuple[Candidate | None, Arm | None]:
    """The candidate to take, and the side of the split that it is, where there is one."""
    first = found[0] if found else None
    if first is None or first.canary is None:
        return first, None
    side: Arm = "stable"
    if conversation is not None:
        key = f"{first.adapter_id}/{wanted.alias}"
        side = canaries.arm(key, conversation, first.canary.percent)
    number = first.canary.number if side == "canary" else first.stable
    return next((each for each in found if each.number == number), None), side


def _image(chosen: Candidate, dtype: str | None) -> tuple[str, str | None] | None:
    """A digest, and the dtype that its id must name; None where that dtype is not there."""
    if chosen.variant is not None:
        return chosen.variant
    return (chosen.digest, dtype) if dtype in (None, chosen.dtype) else None


def _resolved(
    tenant_id: str,
    wanted: ModelName,
    chosen: Candidate,
    image: tuple[str, str | None],
    arm: Arm | None,
) -> Resolved:
    owner = None if chosen.tenant_id == tenant_id else chosen.tenant_id
    name = wanted if owner else replace(wanted, owner=None)
    digest, dtype = image
    return Resolved(
        model_id=name.exactly(chosen.number, dtype),
        digest=digest,
        adapter=name.adapter,
        version=chosen.number,
        adapter_id=chosen.adapter_id,
        limits=chosen.limits,
        owner=owner,
        public=chosen.public,
        arm=arm,
    )
