"""One checking of one upload: step after step, each noted as it passes, to a version or to reasons.

Knows the order of the steps and what a failure of each means for the report; refuses to know how a
step is made and what becomes of the upload afterwards.
"""

import copy
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import anyio
from anyio import to_thread

from loraplex.engine.client import EngineClient
from loraplex.platform import canary
from loraplex.platform.compiling import Compiled
from loraplex.platform.db.models import AdapterVersion
from loraplex.platform.errors import (
    AdapterRejected,
    ApiError,
    EngineRestarted,
    EngineUnavailable,
    ImageUnusable,
    StorageFull,
    Unavailable,
)
from loraplex.platform.text import Vocabulary
from loraplex.platform.upload_hold import Hold, HoldLost
from loraplex.platform.upload_jobs import fresh_images
from loraplex.platform.upload_parts import FILES, PARTS, PartFolder
from loraplex.platform.upload_report import Check, Reason, ReportSoFar
from loraplex.platform.uploads import Gate, Images

_OURS: Final = {
    "code": "internal_error",
    "message": "The server failed to check the adapter. Upload it again; its log has the cause.",
}
_DEADLY: Final = (
    "engine_died",
    "The engine ended twice while it ran the adapter, so it is not tried again. If the engine has "
    "ended for another reason, which its log tells, upload the adapter again.",
)
OF_VARIANT: Final = ("digest", "bytes", "parity")  # what the compiler says of one image
RETRY_S: Final = 0.5  # between two looks at an engine that is away


class Trial(Protocol):
    """Tries an image in the live engine; raises `AdapterRejected` or `EngineUnavailable`."""

    async def __call__(self, digest: str, invocation: tuple[int, ...]) -> dict[str, Any]:
        """What was found, as plain JSON values."""


@dataclass(frozen=True)
class LiveTrial:
    """A `Trial` in the engine that serves requests."""

    engine: EngineClient
    vocabulary: Vocabulary
    base_name: str

    async def __call__(self, digest: str, invocation: tuple[int, ...]) -> dict[str, Any]:
        """See `canary.try_image`."""
        report = await canary.try_image(
            self.engine, self.vocabulary, digest, invocation, base_name=self.base_name
        )
        return report.plain()


class Run:
    """Checks the upload that `hold` holds; `report` tells how far it came."""

    def __init__(
        self, gate: Gate, trial: Trial, hold: Hold, folder: PartFolder, *, patience_s: float
    ) -> None:
        """`patience_s` is how long to wait for an engine to try the image in."""
        self._gate, self._trial, self._hold, self._folder = gate, trial, hold, folder
        self._patience_s = patience_s
        self._fresh = fresh_images(hold.row)
        self.report = ReportSoFar()

    async def go(self) -> AdapterVersion:
        """Take every step, and publish; what was put into the store goes again if that fails.

        Raises `ApiError` for what is wrong with the adapter, or keeps us from going on.
        """
        try:
            async with self._step("received"):
                await to_thread.run_sync(self._check_digests)
            async with self._step("unpacked"):
                await to_thread.run_sync(self._gate.unpack, self._folder)
            images = await self._compile()
            async with self._step("canary"):
                await self._try(images)
            return await self._publish(images)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._gate.discard(self._fresh)
            raise

    @asynccontextmanager
    async def _step(self, name: Check) -> AsyncIterator[None]:
        started = time.monotonic()
        try:
            yield
        except ApiError as error:
            if is_the_adapters(error):
                self.report.failed(name, time.monotonic() - started, _now(), reasons_of(error))
            raise
        self.report.passed(name, time.monotonic() - started, _now())
        await self._hold.note_progress(self.report.plain)

    def _check_digests(self) -> None:
        told = self._hold.row.parts
        for part in PARTS:
            wanted = told.get(part, {}).get("sha256")
            if wanted is not None and wanted != self._folder.digest(part):
                raise AdapterRejected(
                    [
                        (
                            "part_corrupt",
                            f"The SHA-256 of {FILES[part]} is not what was announced: it was "
                            "damaged on its way, or is another file. Begin a new upload.",
                        )
                    ]
                )

    async def _compile(self) -> Images:
        started = time.monotonic()
        try:
            dtypes = self._hold.row.options["variants"]
            images = await self._gate.compile(self._folder, dtypes)
        except AdapterRejected as error:
            self.report.compiler_failed(error.reasons, time.monotonic() - started, _now())
            raise
        own = next(iter(images.values())).compiled
        self.report.tell(own.report)
        for dtype, built in images.items():
            said = {name: built.compiled.report.get(name) for name in OF_VARIANT}
            self.report.tell_variant(dtype, {k: v for k, v in said.items() if v is not None})
        self.report.compiler_passed(own.report, time.monotonic() - started, _now())
        await self._hold.note_progress(self.report.plain)
        return images

    async def _try(self, images: Images) -> None:
        """Try every image, the version's own first."""
        await self._keep(images)
        with anyio.move_on_after(self._patience_s) as limit:
            for number, (dtype, built) in enumerate(images.items()):
                found = await self._try_one(images, built.compiled)
                if number == 0:
                    self.report.tell({"canary": found})
                else:
                    self.report.tell_variant(dtype, {"canary": found})
        if limit.cancelled_caught:
            raise EngineUnavailable(
                f"No engine could try the adapter within {self._patience_s:g} s. Upload it again "
                "once GET /readyz answers 200."
            )

    async def _try_one(self, images: Images, built: Compiled) -> dict[str, Any]:
        died = False
        while True:
            try:
                return await self._trial(built.digest, built.invocation)
            except EngineRestarted:
                if died:
                    raise AdapterRejected([_DEADLY]) from None
                died = True
            except EngineUnavailable:
                await anyio.sleep(RETRY_S)
            except ImageUnusable:  # another upload of the same image was refused meanwhile
                if built.digest in self._gate.store:
                    raise
                await self._keep(images)

    async def _keep(self, images: Images) -> None:
        """Put images into the store; the row tells first which are new there.

        So they go if nothing comes of them, whichever process goes on with the upload.
        """
        new = await to_thread.run_sync(self._gate.missing, images)
        if not new <= self._fresh:
            self._fresh |= new
            await self._hold.note_fresh(self._fresh)
        await to_thread.run_sync(self._gate.keep, images)

    async def _publish(self, images: Images) -> AdapterVersion:
        started, options = time.monotonic(), self._hold.row.options
        final = copy.deepcopy(self.report)
        final.passed("published", 0.0, _now())
        try:
            async with self._hold.change() as (session, row):
                version = await self._gate.publish(
                    session,
                    row.tenant_id,
                    row.name,
                    images,
                    final.plain,
                    alias=options["alias"],
                    actor=self._hold.actor,
                )
                row.state, row.number, row.report = "ready", version.number, final.plain
        except ApiError as error:
            if is_the_adapters(error):
                seconds = time.monotonic() - started
                self.report.failed("published", seconds, _now(), reasons_of(error))
            raise
        self.report, self._fresh = final, set()
        return version


async def settle(hold: Hold, run: Run, error: BaseException) -> bool:
    """Write down how a checking ended that published nothing; whether the upload is closed now."""
    report = run.report.plain
    match error:
        case HoldLost():
            return False
        case StorageFull():
            await hold.reopen(report | {"reasons": reasons_of(error)})
            return False
        case ApiError() if is_the_adapters(error):
            await hold.end("rejected", report)
        case ApiError() if error.code != Unavailable.code:
            await hold.end("failed", report | {"reasons": reasons_of(error)})
        case Exception() if not isinstance(error, ApiError):
            await hold.end("failed", report | {"reasons": [_OURS]})
        case _:
            await hold.let_go()
            return False
    return True


def is_the_adapters(error: ApiError) -> bool:
    """Whether the same upload would fail again, so that it is refused and not tried later."""
    return error.status < 500 and not isinstance(error, HoldLost)


def reasons_of(error: ApiError) -> list[Reason]:
    """An error as reasons of a report."""
    if isinstance(error, AdapterRejected):
        return list(error.reasons)
    return [{"code": error.code or "invalid_request", "message": error.message}]


def _now() -> int:
    return int(time.time())
