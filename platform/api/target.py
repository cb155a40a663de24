"""Which model a generating request means: `model`, `adapter_id`, or both where they agree."""

from loraplex.platform.api.context import Context
from loraplex.platform.errors import BadRequest, ModelNotFound
from loraplex.platform.registry import Resolved, resolve


async def find_target(
    ctx: Context, tenant_id: str, model: str, adapter_id: str | None = None
) -> Resolved:
    """The base or the adapter version to run.

    `adapter_id` names an adapter where `model` is the base; beside an adapter's name it must name
    the same adapter, and either may say which version. Raises `ModelNotFound` (never the base
    instead), or `BadRequest` when the two disagree.
    """
    base = ctx.base.name
    async with ctx.db.read(tenant_id) as session:
        chosen = await resolve(session, tenant_id, model, base)
        if adapter_id is None:
            return chosen
        try:
            adapter = await resolve(session, tenant_id, adapter_id, base)
        except ModelNotFound as error:
            raise ModelNotFound(adapter_id, "adapter_id") from error
    if model == base:
        return adapter
    return _agreed(model, chosen, adapter_id, adapter)


def _agreed(model: str, chosen: Resolved, adapter_id: str, adapter: Resolved) -> Resolved:
    pinned = [each for name, each in ((model, chosen), (adapter_id, adapter)) if "@" in name]
    versions = {each.version for each in pinned}
    if chosen.adapter != adapter.adapter or len(versions) > 1:
        raise BadRequest(
            "model and adapter_id name different adapters. Send the base's name as model, or leave "
            "adapter_id out.",
            param="adapter_id",
        )
    return pinned[0] if pinned else chosen
