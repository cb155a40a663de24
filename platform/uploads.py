"""The upload gate: what an adapter passes on its way from a stranger's files to a version.

Knows the steps, one by one: unpacked, compiled, kept in the image store, published. Refuses to
trust a file name, and to know PEFT, HTTP and who waits for the outcome.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from anyio import to_thread
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.platform import archive, images_kept, registry, storage
from loraplex.platform.aliases import list_aliases, move_alias
from loraplex.platform.audit import Actor
from loraplex.platform.compiling import AdapterCompiler, Compiled
from loraplex.platform.db.models import Adapter, AdapterVersion
from loraplex.platform.db.session import Database
from loraplex.platform.errors import AdapterRejected
from loraplex.platform.upload_parts import FILES, PartFolder, raise_if_full

__all__ = ["AdapterCompiler", "Built", "Gate"]

SOURCE: Final = "source"


@dataclass(frozen=True)
class Built:
    """A compiled image, in a file that is not in the store yet."""

    path: Path
    compiled: Compiled


Images = Mapping[str, Built]  # by dtype; the first is the version's own


@dataclass(frozen=True)
class Gate:
    """The steps, and the collaborators that they need."""

    quarantine: Path
    max_bytes: int
    compiler: AdapterCompiler
    store: ImageStore
    db: Database
    base: BaseManifest
    max_rank: int = 512

    def folder(self, upload_id: str) -> PartFolder:
        """Where the parts of an upload lie, if they are on this server."""
        return PartFolder(self.quarantine / upload_id)

    def check_name(self, name: str) -> str:
        """Return `name` if an adapter may have it; raises `BadRequest` or `NameConflict`."""
        return registry.check_name(name, self.base.name)

    def unpack(self, folder: PartFolder) -> None:
        """Put the adapter's two files into a folder of their own, anew.

        The parts stay as they are. Raises `AdapterRejected`, `TooLarge` and `StorageFull`.
        """
        source = PartFolder(folder.path / SOURCE)
        source.remove()
        source.make()
        packed = folder.file("archive")
        if packed.exists():
            try:
                archive.unpack(packed, source.path, self.max_bytes)
            except OSError as error:
                raise_if_full(error)
                raise
            return
        for part in ("adapter_config", "adapter_model"):
            (source.path / FILES[part]).hardlink_to(folder.path / FILES[part])

    async def compile(self, folder: PartFolder, dtypes: Iterable[str]) -> dict[str, Built]:
        """Compile what `unpack` left, once for each dtype; raises `AdapterRejected`."""
        images = {}
        for dtype in dtypes:
            path = folder.path / f"image-{dtype}.safetensors"
            compiled = await self.compiler.compile(folder.path / SOURCE, path, dtype)
            self._check_rank(compiled.rank)
            images[dtype] = Built(path, compiled)
        return images

    def _check_rank(self, rank: int) -> None:
        if rank > self.max_rank:
            why = f"The adapter has rank {rank}; this server takes up to {self.max_rank}."
            raise AdapterRejected([("rank_too_large", f"{why} Train it with a smaller r.")])

    def missing(self, images: Images) -> set[str]:
        """The digests of images that are not in the store."""
        return {b.compiled.digest for b in images.values() if b.compiled.digest not in self.store}

    def keep(self, images: Images) -> None:
        """Put images into the store; raises `StorageFull`."""
        try:
            for built in images.values():
                self.store.put(built.path, built.compiled.digest)
        except OSError as error:
            raise_if_full(error)
            raise

    async def discard(self, digests: set[str]) -> None:
        """Remove those of `digests` from the store that no version names."""
        await images_kept.discard(self.db, self.store, digests)

    async def publish(
        self,
        session: AsyncSession,
        tenant_id: str,
        name: str,
        images: Images,
        report: Mapping[str, Any],
        *,
        alias: str | None,
        actor: Actor,
    ) -> AdapterVersion:
        """Charge the tenant, and add the next version of `name`, at which `alias` then is.

        Raises `QuotaExceeded`, and what `registry.add_version` and `aliases.move_alias` raise.
        """
        sizes = {b.compiled.digest: b.compiled.bytes for b in images.values()}
        live = select(Adapter.id).where(
            Adapter.tenant_id == tenant_id, Adapter.name == name, Adapter.deleted_at.is_(None)
        )
        is_new = await session.scalar(live) is None
        await storage.charge(session, tenant_id, sizes, new_adapter=is_new)
        (dtype, own), *others = images.items()
        version = await registry.add_version(
            session,
            tenant_id,
            name,
            digest=own.compiled.digest,
            base=self.base.fingerprint,
            base_name=self.base.name,
            report=report,
            actor=actor,
            dtype=dtype,
            variants={other: (b.compiled.digest, b.compiled.bytes) for other, b in others},
        )
        if alias is not None:
            await _move(session, tenant_id, name, alias, version.number, actor)
        await to_thread.run_sync(self.keep, images)  # if one was just deleted
        return version


async def _move(
    session: AsyncSession, tenant_id: str, name: str, alias: str, number: int, actor: Actor
) -> None:
    """Move an alias from wherever it is; the adapter's row is locked."""
    there = await list_aliases(session, tenant_id, name)
    seen = next((row.revision for row in there if row.name == alias), 0)
    await move_alias(session, tenant_id, name, alias, number, seen=seen, actor=actor)
