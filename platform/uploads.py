"""The upload gate: a multipart body to files in quarantine, to an image, to a published version.

A body is written as it comes to a folder of its own (mode 0700) under names that this file
chooses; the folder is gone when the upload ends, however it ends. Knows the form's parts and the
order of the steps; refuses to trust a file name, and to know PEFT and HTTP.
"""

import shutil
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import anyio
from anyio import to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.platform import archive, registry
from loraplex.platform.compiling import AdapterCompiler
from loraplex.platform.db.models import AdapterVersion
from loraplex.platform.db.session import Database
from loraplex.platform.errors import AdapterRejected, BadRequest
from loraplex.platform.ids import new_id

__all__ = ["AdapterCompiler", "Gate", "Upload", "receive"]

FILES: Final = {
    "adapter_config": "adapter_config.json",
    "adapter_model": "adapter_model.safetensors",
    "archive": "adapter.zip",
}
MAX_NAME_BYTES: Final = 256
HOW: Final = (
    "Send multipart/form-data with the field name and either the files adapter_config and "
    "adapter_model or one zip as archive."
)


@dataclass(frozen=True)
class Upload:
    """A received upload: the adapter's name, and which of `FILES` are in `folder`."""

    name: str
    folder: Path
    parts: frozenset[str]


@dataclass
class _Form:
    """Writes the parts of a multipart body as the parser finds them."""

    folder: Path
    name: bytearray = field(default_factory=bytearray)
    seen: set[str] = field(default_factory=set)
    _part: str = ""
    _out: BinaryIO | None = None
    _header: bytearray = field(default_factory=bytearray)
    _value: bytearray = field(default_factory=bytearray)
    _disposition: bytes = b""

    def on_part_begin(self) -> None:
        self._disposition = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._part = options.get(b"name", b"").decode("ascii", "replace")
        if self._part not in {"name", *FILES}:
            raise BadRequest(f"The form has a part that is not known. {HOW}")
        if self._part in self.seen:
            raise BadRequest(f"The form has the part {self._part} twice. {HOW}", param=self._part)
        self.seen.add(self._part)
        if self._part in FILES:
            self._out = (self.folder / FILES[self._part]).open("xb")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._out is not None:
            self._out.write(memoryview(data)[start:end])
            return
        self.name += data[start:end]
        if len(self.name) > MAX_NAME_BYTES:
            raise BadRequest("The name is too long.", param="name")

    def on_part_end(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file of the current part, if it has one."""
        if self._out is not None:
            self._out.close()
            self._out = None


async def receive(body: AsyncIterable[bytes], content_type: str, folder: Path) -> Upload:
    """Write a multipart body to `folder`; raises `BadRequest` for a form that is not as `HOW` says.

    The body's length is the caller's to bound.
    """
    form = _Form(folder)
    parser = _parser(content_type, form)
    try:
        async for chunk in body:
            await to_thread.run_sync(parser.write, chunk)
        parser.finalize()
    except FormParserError as error:
        raise BadRequest(f"The multipart body is broken or cut off. {HOW}") from error
    finally:
        form.close()
    return _complete(form)


def _parser(content_type: str, form: _Form) -> MultipartParser:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise BadRequest(HOW)
    events = (
        "on_part_begin",
        "on_header_field",
        "on_header_value",
        "on_header_end",
        "on_headers_finished",
        "on_part_data",
        "on_part_end",
    )
    callbacks = {event: getattr(form, event) for event in events}
    return MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]


def _complete(form: _Form) -> Upload:
    if "name" not in form.seen:
        raise BadRequest(f"The field name is missing. {HOW}", param="name")
    parts = frozenset(form.seen - {"name"})
    if parts not in ({"archive"}, {"adapter_config", "adapter_model"}):
        raise BadRequest(f"The form has not the files of one adapter. {HOW}")
    return Upload(form.name.decode("utf-8", "replace"), form.folder, parts)


@dataclass(frozen=True)
class Gate:
    """What an upload passes: quarantine, compiler, image store, registry."""

    quarantine: Path
    max_bytes: int
    compiler: AdapterCompiler
    store: ImageStore
    db: Database
    base: BaseManifest
    max_rank: int = 512

    @asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        """A fresh folder for one upload, removed with all that is in it."""
        folder = self.quarantine / new_id("upl")
        folder.mkdir(mode=0o700, parents=True)
        try:
            yield folder
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(shutil.rmtree, folder)

    def sweep(self) -> None:
        """Remove what uploads left behind that a crash cut off; call it before the first one."""
        for folder in self.quarantine.glob("upl_*"):
            shutil.rmtree(folder)

    def check_name(self, name: str) -> str:
        """Return `name` if an adapter may have it; raises `BadRequest` or `NameConflict`."""
        return registry.check_name(name, self.base.name)

    async def publish(self, tenant_id: str, upload: Upload) -> AdapterVersion:
        """Unpack, compile and publish an upload as its name's next version.

        Raises `AdapterRejected` with every reason, `TooLarge`, or what `check_name` raises.
        """
        name = self.check_name(upload.name)
        source, image = upload.folder / "source", upload.folder / "image.safetensors"
        await to_thread.run_sync(self._unpack, upload, source)
        compiled = await self.compiler.compile(source, image)
        self._check_rank(compiled.rank)
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self.store.put, image, compiled.digest)
            async with self.db.session(tenant_id) as session:
                version = await registry.add_version(
                    session,
                    tenant_id,
                    name,
                    digest=compiled.digest,
                    base=self.base.fingerprint,
                    base_name=self.base.name,
                    report=compiled.report(),
                )
                await to_thread.run_sync(self.store.put, image, compiled.digest)  # if just deleted
        return version

    def _check_rank(self, rank: int) -> None:
        if rank > self.max_rank:
            raise AdapterRejected(
                [
                    (
                        "rank_too_large",
                        f"The adapter has rank {rank}; this server takes up to {self.max_rank}.",
                    )
                ]
            )

    def _unpack(self, upload: Upload, source: Path) -> None:
        source.mkdir(mode=0o700)
        if "archive" in upload.parts:
            archive.unpack(upload.folder / FILES["archive"], source, self.max_bytes)
            return
        for part in upload.parts:
            (upload.folder / FILES[part]).rename(source / FILES[part])
