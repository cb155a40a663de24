"""Which weights a generating request means: `model`, `adapter_id` or `adapters`."""

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.engine.protocol import Part, composition_digest
from loraplex.platform.api.auth import own_tenant
from loraplex.platform.api.context import Context
from loraplex.platform.api.conversation import conversation_of
from loraplex.platform.api.requests import AdapterPart, GenerationRequest
from loraplex.platform.errors import BadRequest, ModelNotFound
from loraplex.platform.keys import Principal
from loraplex.platform.resolving import Resolved, resolve, view

COMPOSITION = "(composition)"  # no adapter may have such a name


@dataclass(frozen=True)
class Target(Resolved):
    """What to run: the base, an adapter's version, or a composition, which has `parts`.

    `uses` are the adapters that take part, each with limits of its own.
    """

    parts: tuple[Part, ...] = ()
    uses: tuple[Resolved, ...] = ()


@dataclass(frozen=True)
class _Asker:
    """Who names adapters, and in which conversation."""

    ctx: Context
    principal: Principal
    body: GenerationRequest
    conversation: str | None

    async def find(self, *models: tuple[str, str]) -> list[Resolved]:
        """What names mean, of one moment, if this caller may use it; each with its field.

        A name that was just read is not read again; `Database.renamed` says when it may mean
        something else. Other servers' changes are seen within half a second.
        """
        tenant_id = own_tenant(self.principal)
        known = [self.ctx.names.get(f"{tenant_id}/{model}") for model, _ in models]
        found = [each for each in known if each is not None]
        if len(found) < len(models):
            found = await self._read(tenant_id, *models)
        for means, (model, param) in zip(found, models, strict=True):
            try:
                self.principal.check_adapter(means, model)
            except ModelNotFound as error:
                raise ModelNotFound(model, param) from error
        return found

    async def _read(self, tenant_id: str, *models: tuple[str, str]) -> list[Resolved]:
        """The same from the database, and kept where it is the same in every conversation."""
        names = self.ctx.names
        reading = names.begin()
        async with self.ctx.db.read(view(tenant_id, *(model for model, _ in models))) as session:
            found = []
            for model, param in models:
                try:
                    means = await resolve(
                        session,
                        tenant_id,
                        model,
                        self.ctx.base.name,
                        conversation=conversation_of(self.body, self.conversation),
                        dtype=self.ctx.settings.image_dtype,
                    )
                except ModelNotFound as error:
                    raise ModelNotFound(model, param) from error
                if means.arm is None:
                    names.put(f"{tenant_id}/{model}", means, reading)
                found.append(means)
        return found


async def find_target(
    ctx: Context, principal: Principal, body: GenerationRequest, conversation: str | None = None
) -> Target:
    """The weights to run, if the caller's key may use them.

    `adapter_id` names an adapter where `model` is the base; beside an adapter's name it must name
    the same adapter, and either may say which version. `adapters` are composed on the base.
    `conversation` is the conversation's id, if the caller named it. Raises `ModelNotFound` (never
    the base instead), or `BadRequest` when the fields disagree.
    """
    asker = _Asker(ctx, principal, body, conversation)
    if body.adapters is not None:
        return await _composed(asker, body, body.adapters)
    named = [(body.model, "model")]
    if body.adapter_id is not None:
        on_base = body.model == ctx.base.name
        named = [*(() if on_base else named), (body.adapter_id, "adapter_id")]
    return _target(_agreed(named, await asker.find(*named)))


def _target(found: Resolved) -> Target:
    return Target(**vars(found), uses=(found,) if found.adapter else ())


def _agreed(named: Sequence[tuple[str, str]], found: Sequence[Resolved]) -> Resolved:
    """The one that all mean; of two names for it, the one that says which version or image."""
    pairs = zip(named, found, strict=True)
    pinned = [means for (name, _), means in pairs if "@" in name or ":" in name]
    if len({each.adapter for each in found}) > 1 or len({each.model_id for each in pinned}) > 1:
        raise BadRequest(
            "model and adapter_id name different adapters. Send the base's name as model, or leave "
            "adapter_id out.",
            param="adapter_id",
        )
    return pinned[0] if pinned else found[0]


async def _composed(
    asker: _Asker, body: GenerationRequest, adapters: Sequence[AdapterPart]
) -> Target:
    """A composition, whose model id tells it from all others, whatever the order of its parts."""
    if body.model != asker.ctx.base.name or body.adapter_id is not None:
        raise BadRequest(
            "adapters are composed on the base: send its name as model, and no adapter_id.",
            param="adapters",
        )
    named = [(each.id, f"adapters.{index}.id") for index, each in enumerate(adapters)]
    found = await asker.find(*named)
    parts = tuple(map(_part, named, found, adapters))
    if len({part.image for part in parts}) < len(parts):
        raise BadRequest("adapters has one adapter twice; add its weights.", param="adapters")
    digest = composition_digest(parts)
    return Target(
        f"composition-{digest[:16]}",
        digest,
        COMPOSITION,
        public=all(each.public for each in found),
        parts=parts,
        uses=tuple(found),
    )


def _part(named: tuple[str, str], found: Resolved, asked: AdapterPart) -> Part:
    if found.digest is None:
        raise BadRequest("The base itself is no part of a composition.", param=named[1])
    return Part(found.digest, asked.weight)
