"""Which weights a generating request means: `model`, `adapter_id` or `adapters`."""

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.engine.protocol import Part, composition_digest
from loraplex.platform.api.context import Context
from loraplex.platform.api.requests import AdapterPart, GenerationRequest
from loraplex.platform.errors import BadRequest, ModelNotFound
from loraplex.platform.registry import Resolved, resolve

COMPOSITION = "(composition)"  # no adapter may have such a name


@dataclass(frozen=True)
class Target(Resolved):
    """What to run: the base, an adapter's version, or a composition, which has `parts`."""

    parts: tuple[Part, ...] = ()


async def find_target(ctx: Context, tenant_id: str, body: GenerationRequest) -> Target:
    """The weights to run.

    `adapter_id` names an adapter where `model` is the base; beside an adapter's name it must name
    the same adapter, and either may say which version. `adapters` are composed on the base. Raises
    `ModelNotFound` (never the base instead), or `BadRequest` when the fields disagree.
    """
    if body.adapters is not None:
        return await _composed(ctx, tenant_id, body, body.adapters)
    base = ctx.base.name
    async with ctx.db.read(tenant_id) as session:
        chosen = await resolve(session, tenant_id, body.model, base)
        if body.adapter_id is None:
            return _target(chosen)
        try:
            adapter = await resolve(session, tenant_id, body.adapter_id, base)
        except ModelNotFound as error:
            raise ModelNotFound(body.adapter_id, "adapter_id") from error
    return _target(adapter if body.model == base else _agreed(body, chosen, adapter))


def _target(found: Resolved) -> Target:
    return Target(found.model_id, found.digest, found.adapter, found.version)


def _agreed(body: GenerationRequest, chosen: Resolved, adapter: Resolved) -> Resolved:
    named = ((body.model, chosen), (body.adapter_id or "", adapter))
    pinned = [each for name, each in named if "@" in name]
    versions = {each.version for each in pinned}
    if chosen.adapter != adapter.adapter or len(versions) > 1:
        raise BadRequest(
            "model and adapter_id name different adapters. Send the base's name as model, or leave "
            "adapter_id out.",
            param="adapter_id",
        )
    return pinned[0] if pinned else chosen


async def _composed(
    ctx: Context, tenant_id: str, body: GenerationRequest, adapters: Sequence[AdapterPart]
) -> Target:
    """A composition, whose model id tells it from all others, whatever the order of its parts."""
    if body.model != ctx.base.name or body.adapter_id is not None:
        raise BadRequest(
            "adapters are composed on the base: send its name as model, and no adapter_id.",
            param="adapters",
        )
    parts = [await _part(ctx, tenant_id, i, each) for i, each in enumerate(adapters)]
    if len({part.image for part in parts}) < len(parts):
        raise BadRequest("adapters has one adapter twice; add its weights.", param="adapters")
    digest = composition_digest(parts)
    return Target(f"composition-{digest[:16]}", digest, COMPOSITION, parts=tuple(parts))


async def _part(ctx: Context, tenant_id: str, index: int, adapter: AdapterPart) -> Part:
    param = f"adapters.{index}.id"
    async with ctx.db.read(tenant_id) as session:
        try:
            found = await resolve(session, tenant_id, adapter.id, ctx.base.name)
        except ModelNotFound as error:
            raise ModelNotFound(adapter.id, param) from error
    if found.digest is None:
        raise BadRequest("The base itself is no part of a composition.", param=param)
    return Part(found.digest, adapter.weight)
