"""What the commands share: whom to ask, with which key, and how answers and errors are shown.

Knows the REST API's address, its error body and its lists; refuses to know tables and queries. It
imports HTTP only when a command runs, so that `--help` is quick.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from loraplex.platform import credentials

if TYPE_CHECKING:
    import httpx

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="LORAPLEX_URL", help="Where the platform answers.", metavar="URL"),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="LORAPLEX_API_KEY",
        help="The key to act with; by default the one kept in the data directory.",
        metavar="KEY",
        show_default=False,
    ),
]
DataDir = Annotated[
    Path,
    typer.Option("--data-dir", envvar="LORAPLEX_DATA_DIR", help="Where `serve` keeps its data."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]

DEFAULT_DATA_DIR = Path("data")
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0
DIGEST_SHOWN = 12  # characters
Row = Mapping[str, Any]


class Role(Enum):
    """Whose key of the data directory a command acts with when it is given none."""

    TENANT = "tenant"
    OPERATOR = "operator"


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with one message on standard error."""
    typer.secho(message, fg=typer.colors.RED, err=True)
    raise typer.Exit(code)


class Api:
    """The platform's REST API under one key; every error ends the command with its message."""

    def __init__(self, client: "httpx.Client") -> None:
        self._client = client

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """Send one request and return the decoded answer, None for an empty one."""
        import httpx

        try:
            response = self.send(method, path, **options)
        except httpx.ConnectError:
            fail(f"Nothing answers at {self._client.base_url}; start it with `loraplex serve`.")
        except httpx.HTTPError as error:
            fail(f"The request to {self._client.base_url} failed: {error}")
        if not response.is_success:
            fail(error_message(response))
        return response.json() if response.content else None

    def send(self, method: str, path: str, **options: Any) -> "httpx.Response":
        """Send one request and return the response, whatever it says; raises `httpx.HTTPError`."""
        return self._client.request(method, path, **options)

    def list(self, path: str, **params: Any) -> list[Row]:
        """Return every row of a list, page by page."""
        rows: list[Row] = []
        more = True
        while more:
            page = self.call("GET", path, params=params)
            rows += page["data"]
            more = page.get("has_more", False) and bool(page["data"])
            params["after"] = page.get("last_id")
        return rows


def connect(url: str | None, api_key: str | None, data_dir: Path, role: Role) -> Api:
    """Return a client that acts with `api_key`, else with the role's key of the data directory."""
    import httpx

    kept = credentials.read(data_dir)
    if api_key is None and kept is not None:
        api_key = kept.api_key if role is Role.TENANT else kept.operator_key
    if api_key is None:
        fail(
            f"No API key: {data_dir / credentials.FILE_NAME} is not there. "
            "Set LORAPLEX_API_KEY, or give --data-dir."
        )
    base = url or (kept.url if kept else DEFAULT_URL)
    headers = {"Authorization": f"Bearer {api_key}"}
    return Api(httpx.Client(base_url=base.removesuffix("/v1"), headers=headers, timeout=TIMEOUT_S))


def asks(
    role: Role, columns: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a command of a function that asks the API, its first parameter, for an answer.

    The command has the function's other parameters and the options of every client: `--url`,
    `--api-key`, `--data-dir`, and `--json` where the answer is shown by `columns`. An answer that
    is text is printed as it is. Whoever names a tenant acts as the operator.
    """
    options = _OPTIONS if columns else _OPTIONS[:-1]

    def command_of(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            url, api_key, data_dir = (given.pop(name) for name in ("url", "api_key", "data_dir"))
            as_json = given.pop("as_json", False)
            acting = Role.OPERATOR if given.get("tenant") else role
            with closing(connect(url, api_key, data_dir, acting)) as api:
                answer = function(api, **given)
            if isinstance(answer, str):
                typer.echo(answer)
            else:
                show(answer, as_json, columns)

        _, *own = inspect.signature(function).parameters.values()
        parameters = [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *options]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return command_of


def _option(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


_OPTIONS = (
    _option("url", Url),
    _option("api_key", ApiKey),
    _option("data_dir", DataDir, DEFAULT_DATA_DIR),
    _option("as_json", Json, False),
)


def error_message(response: "httpx.Response") -> str:
    """What an error's body says: every reason, each on a line, or its message."""
    try:
        error = response.json()["error"]
        reasons = error.get("reasons") or []
        lines = [f"- {reason['message']}" for reason in reasons] or [error["message"]]
        return "\n".join(lines)
    except (ValueError, KeyError, TypeError):
        return f"The server answered {response.status_code} without saying why."


def show(value: Any, as_json: bool, columns: Sequence[str] = ()) -> None:
    """Print the columns of a list as a table, or of one object line by line; or all as JSON."""
    if as_json:
        import json

        typer.echo(json.dumps(value, indent=2))
        return
    titles = [name.replace("_", " ") for name in columns]
    if isinstance(value, list):
        rows = [[_cell(name, row.get(name)) for name in columns] for row in value]
        _print_table([titles, *rows])
    else:
        cells = [_cell(name, value.get(name)) for name in columns]
        _print_table([[f"{t}:", cell] for t, cell in zip(titles, cells, strict=True)])


def _print_table(table: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        padded = (f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


def _cell(column: str, value: Any) -> str:
    """A value as people read it; `--json` has digests whole and moments in seconds."""
    if value is None:
        return "–"
    if column.endswith("_at"):
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M}Z"
    if column == "digest":
        return str(value)[:DIGEST_SHOWN]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, list):
        return ",".join(_cell("", each) for each in value)
    if isinstance(value, dict):
        return " ".join(f"{key}={_nested(key, each)}" for key, each in value.items())
    return str(value)


def _nested(key: str, value: Any) -> str:
    return f"({_cell(key, value)})" if isinstance(value, dict) else _cell(key, value)
