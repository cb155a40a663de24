"""What an operator may choose, read once from variables and a file; and where data lives.

Knows names, defaults and folders. Refuses to know what the parts do with them: the engine's own
knobs pass through as they are. Nothing here is printed with a secret in it.
"""

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from loraplex.platform.config_file import FileSource, path_in
from loraplex.platform.logs import LogFormat, LogLevel

if TYPE_CHECKING:
    from sqlalchemy import URL

PEPPER_BYTES = 32


class DataDirError(RuntimeError):
    """The data directory cannot be used; the message says why and what to do."""


class Settings(BaseSettings):
    """One frozen set of choices; `LORAPLEX_PORT=9000` sets `port`, as `port = 9000` in a file does.

    Raises `ConfigFileError` for a file that cannot be used, `ValidationError` for a bad value.

    The knobs of the engine are set one by one (`LORAPLEX_ENGINE__MAX_NUM_SEQS=32`) or as one JSON
    object in `LORAPLEX_ENGINE`.
    """

    model_config = SettingsConfigDict(
        env_prefix="LORAPLEX_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        validate_default=True,
    )

    config: Annotated[
        Path | None,
        Field(description="TOML file with any of these settings; a variable wins over it."),
    ] = None
    data_dir: Annotated[
        Path, Field(description="Folder of everything that must survive a restart.")
    ] = Path("data")
    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="Port to listen on; 0: any.")] = 8000
    allowed_hosts: Annotated[
        str | None,
        Field(description="Host names to answer to besides that address, by commas; `*`: any."),
    ] = None
    model: Annotated[
        str | None,
        Field(description="Base model: a Hugging Face id, a directory or a `.gguf` file."),
    ] = None
    database_url: Annotated[
        str | None,
        Field(repr=False, description="`postgresql://` or `sqlite://`; default: SQLite here."),
    ] = None
    redis_url: Annotated[
        str | None,
        Field(repr=False, description="`redis://`, `rediss://` or `unix://`; default: embedded."),
    ] = None
    image_store_url: Annotated[
        str | None,
        Field(repr=False, description="fsspec URL of adapter images; default: `images/` here."),
    ] = None
    key_pepper: Annotated[
        SecretStr | None,
        Field(min_length=16, description="Secret that API keys are hashed with; default: a file."),
    ] = None
    key_peppers_old: Annotated[
        tuple[Annotated[SecretStr, Field(min_length=16)], ...],
        Field(
            default_factory=tuple,
            description="Earlier such secrets, as a JSON list; a key leaves them at its next use.",
        ),
    ]
    scope_secret: Annotated[
        SecretStr | None,
        Field(
            min_length=16, description="Secret that keeps tenants' caches apart; default: a file."
        ),
    ] = None
    share_base: Annotated[
        bool, Field(description="Let tenants share cached prompts of the bare base.")
    ] = False
    share_public: Annotated[
        bool, Field(description="Let tenants share cached prompts of public adapters.")
    ] = False
    image_dtype: Annotated[
        str | None,
        Field(
            pattern="^[a-z][a-z0-9]{0,7}$",
            description="Images to serve where a version has them: `int8`; default: its own.",
        ),
    ] = None
    image_cache_bytes: Annotated[
        int,
        Field(ge=0, description="Most bytes of images from a remote store to keep on local disk."),
    ] = 20 << 30
    adapter_dir: Annotated[
        Path | None,
        Field(description="Folder that `/v1/load_lora_adapter` may publish from; default: none."),
    ] = None
    max_upload_bytes: Annotated[
        int, Field(ge=1, description="Largest adapter upload, packed or unpacked.")
    ] = 512 << 20
    upload_ttl_s: Annotated[
        float, Field(gt=0, description="Seconds an upload in parts waits to be finished.")
    ] = 86_400.0
    max_uploads: Annotated[
        int, Field(ge=1, le=1000, description="Uploads that a tenant may have open at once.")
    ] = 8
    max_adapter_rank: Annotated[int, Field(ge=1, description="Largest LoRA rank accepted.")] = 512
    compile_timeout_s: Annotated[
        float, Field(gt=0, description="Seconds an upload may take to be checked and compiled.")
    ] = 300.0
    body_timeout_s: Annotated[
        float,
        Field(gt=0, description="Seconds a body may take to come; of an upload, its next bytes."),
    ] = 60.0
    request_timeout_s: Annotated[
        float, Field(gt=0, description="Seconds one generation may take from start to end.")
    ] = 600.0
    redis_timeout_s: Annotated[
        float, Field(gt=0, description="Seconds Redis has to answer before it counts as away.")
    ] = 0.25
    replicas: Annotated[
        int, Field(ge=1, description="Servers that share the rate limits while Redis is away.")
    ] = 1
    lease_s: Annotated[
        float, Field(gt=0, description="Seconds a crashed request keeps its concurrency slot.")
    ] = 45.0
    metrics_tenants: Annotated[
        int, Field(ge=0, le=1000, description="Tenants shown in `/metrics`, the busiest ones.")
    ] = 20
    metrics_adapters: Annotated[
        int, Field(ge=0, le=1000, description="Adapters shown in `/metrics`, the busiest ones.")
    ] = 20
    log_format: Annotated[
        LogFormat, Field(description="Lines of the log: `text` for people, `json` for machines.")
    ] = "text"
    log_level: Annotated[
        LogLevel, Field(description="Least level logged: `debug`, `info`, `warning`, `error`.")
    ] = "info"
    drain_s: Annotated[
        float, Field(ge=0, description="Seconds a stopping server gives to requests in flight.")
    ] = 25.0
    otlp_endpoint: Annotated[
        str | None,
        Field(repr=False, description="OTLP/HTTP URL that traces go to; needs `loraplex[otel]`."),
    ] = None
    engine: Annotated[
        dict[str, Any], Field(default_factory=dict, description="Knobs passed to the engine.")
    ]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What is given goes before variables, and they before the file."""
        path = path_in(init_settings(), env_settings())
        file = () if path is None else (FileSource(settings_cls, path),)
        return (init_settings, env_settings, *file)

    @property
    def database(self) -> "URL":
        """The database's URL; printing it hides the password."""
        from sqlalchemy import URL, make_url

        if self.database_url:
            return make_url(self.database_url)
        return URL.create("sqlite+aiosqlite", database=str(self._at("loraplex.db")))

    @property
    def image_store(self) -> str:
        """The fsspec URL, or the local folder, that holds adapter images."""
        return self.image_store_url or str(self._at("images"))

    @property
    def run_dir(self) -> Path:
        """Folder of sockets; only its owner can enter."""
        return self._at("run")

    @property
    def redis_dir(self) -> Path:
        """Folder of the embedded Redis."""
        return self._at("redis")

    @property
    def quarantine_dir(self) -> Path:
        """Folder of uploads that are not checked yet."""
        return self._at("quarantine")

    @property
    def journal(self) -> Path:
        """File of usage that neither the database nor Redis took yet."""
        return self._at("usage.journal")

    @property
    def cache_dir(self) -> Path:
        """Folder of what can be made again: fetched images, converted bases."""
        return self._at("cache")

    @property
    def image_cache(self) -> Path:
        """Folder of images that were fetched from a remote store."""
        return self.cache_dir / "images"

    @property
    def given_secrets(self) -> list[str | None]:
        """Every secret that is in these settings: nothing that is printed may hold one."""
        urls = (self.database_url, self.redis_url, self.image_store_url, self.otlp_endpoint)
        kept = (self.key_pepper, self.scope_secret, *self.key_peppers_old)
        return [
            *(secret.get_secret_value() for secret in kept if secret is not None),
            *(unquote(urlsplit(url).password or "") for url in urls if url),
        ]

    def open_data_dir(self) -> None:
        """Make the data directory and its folders, for their owner only; raises `DataDirError`."""
        folders = (self.run_dir, self.redis_dir, self.quarantine_dir, self.cache_dir)
        try:
            for folder in (self._at(), *folders):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _try_writing(self._at())
        except OSError as error:
            raise DataDirError(
                f"The data directory {self._at()} cannot be used: {error.strerror or error}. "
                "Choose another with LORAPLEX_DATA_DIR, or mend its owner and mode."
            ) from error

    def pepper(self) -> bytes:
        """The secret that keys are hashed with; made once, at `secrets/pepper`, mode 0600."""
        return self._secret(self.key_pepper, "pepper")

    def old_peppers(self) -> list[bytes]:
        """Secrets that keys may still be hashed with, but none is any more."""
        return [old.get_secret_value().encode() for old in self.key_peppers_old]

    def scope_key(self) -> bytes:
        """The secret that cache scopes are made with; made once, at `secrets/scopes`, mode 0600."""
        return self._secret(self.scope_secret, "scopes")

    def _secret(self, given: SecretStr | None, name: str) -> bytes:
        if given is not None:
            return given.get_secret_value().encode()
        return read_or_make_secret(self._at("secrets", name))

    def _at(self, *parts: str) -> Path:
        return self.data_dir.expanduser().absolute().joinpath(*parts)


def read_or_make_secret(path: Path) -> bytes:
    """The secret at `path`; the first of several processes makes it and all read the same."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_hex(PEPPER_BYTES).encode())
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path.read_bytes()


def _try_writing(folder: Path) -> None:
    probe = folder / f".probe.{secrets.token_hex(8)}"
    probe.touch(mode=0o600)
    probe.unlink()
