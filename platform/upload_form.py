"""An upload in one request: a multipart body to a name and files, written as it comes.

Files get names that we choose. Knows the form's parts; refuses to trust a file name, and to know
what comes after. The body's length is the caller's to bound.
"""

from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import Final, cast

from anyio import to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from loraplex.platform.errors import BadRequest
from loraplex.platform.upload_parts import PARTS, WHOLE, Part, PartFolder, Writer

MAX_NAME_BYTES: Final = 256
HOW: Final = (
    "Send multipart/form-data with the field name and either the files adapter_config and "
    "adapter_model or one zip as archive."
)
EVENTS: Final = (
    "on_part_begin",
    "on_header_field",
    "on_header_value",
    "on_header_end",
    "on_headers_finished",
    "on_part_data",
    "on_part_end",
)


@dataclass
class _Form:
    """Writes the parts of a multipart body as the parser finds them."""

    folder: PartFolder
    max_bytes: int
    name: bytearray = field(default_factory=bytearray)
    seen: set[str] = field(default_factory=set)
    _part: str = ""
    _out: Writer | None = None
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
        if options.get(b"filename") == b"" and self._part in PARTS:  # an input that was left empty
            self._part = ""
            return
        if self._part not in {"name", *PARTS}:
            raise BadRequest(f"The form has a part that is not known. {HOW}")
        if self._part in self.seen:
            raise BadRequest(f"The form has the part {self._part} twice. {HOW}", param=self._part)
        self.seen.add(self._part)
        if self._part != "name":
            self._out = self.folder.open(cast("Part", self._part), 0, self.max_bytes)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._out is not None:
            self._out.write(data[start:end])
        if self._part != "name":
            return
        self.name += data[start:end]
        if len(self.name) > MAX_NAME_BYTES:
            raise BadRequest("The name is too long.", param="name")

    def on_part_end(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file of the current part, if it has one."""
        out, self._out = self._out, None
        if out is not None:
            out.close()


async def receive(
    body: AsyncIterable[bytes], content_type: str, folder: PartFolder, max_bytes: int
) -> str:
    """Write a multipart body's files to `folder`, and return the name that it gives.

    Raises `BadRequest` for a form that is not as `HOW` says, and `StorageFull`.
    """
    form = _Form(folder, max_bytes)
    parser = _parser(content_type, form)
    try:
        async for chunk in body:
            await to_thread.run_sync(parser.write, chunk)
        parser.finalize()
    except FormParserError as error:
        raise BadRequest(f"The multipart body is broken or cut off. {HOW}") from error
    finally:
        form.close()
    _check_complete(form)
    return form.name.decode("utf-8", "replace")


def _parser(content_type: str, form: _Form) -> MultipartParser:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise BadRequest(HOW)
    callbacks = {event: getattr(form, event) for event in EVENTS}
    return MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]


def _check_complete(form: _Form) -> None:
    if "name" not in form.seen:
        raise BadRequest(f"The field name is missing. {HOW}", param="name")
    if frozenset(form.seen - {"name"}) not in WHOLE:
        raise BadRequest(f"The form has not the files of one adapter. {HOW}")
