"""Reads JSON whose text is Unicode, which Python's own reader does not ask for.

A lone surrogate, such as "\\ud800", is half a character: no tokenizer takes it and no answer can
tell it. Python's parser lets it through, and so does pydantic wherever a text has no bounds.
Refuses to know what a body means.
"""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request
from starlette.responses import Response

from loraplex.platform.api.short_way import ShortRoute
from loraplex.platform.errors import BadRequest

SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


class JsonRoute(ShortRoute):
    """A route whose body is read by `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, given a request that parses its body so."""
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return strictly


class _Request(Request):
    async def json(self) -> Any:
        """The body, parsed anew at each call; FastAPI calls once."""
        return parse(await self.body())


def parse(body: bytes) -> Any:
    """What a body in UTF-8, UTF-16 or UTF-32 says.

    Raises `BadRequest` for half a character, `json.JSONDecodeError`, `UnicodeDecodeError` and
    `RecursionError` for what Python cannot read either.
    """
    text = body.decode(json.detect_encoding(body))
    value = json.loads(text)
    if SURROGATE.search(text):
        for name, each in value.items() if isinstance(value, dict) else ():
            _check(name, None)
            _check(each, name[:64])
    return value


def _check(value: Any, param: str | None) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest(
            f"{param or 'The name of a field'} has half of a surrogate pair, such as \\ud800, "
            "which is no character.",
            param=param,
        ) from None
