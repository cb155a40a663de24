"""Settings from a TOML file, and where each setting in force came from.

Knows files, names and the order of sources: options, then variables, then the file, then defaults.
Refuses to know what a setting means.
"""

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource

ENGINE = "engine"  # the one setting that is a table


class ConfigFileError(ValueError):
    """The file cannot be used; the message says why, and where in it."""


class FileSource(InitSettingsSource):
    """What a file sets, as a source of `settings_cls`; raises `ConfigFileError`."""

    def __init__(self, settings_cls: type[BaseSettings], path: Path) -> None:
        super().__init__(settings_cls, read(path, settings_cls.model_fields))


def read(path: Path, known: Iterable[str]) -> dict[str, Any]:
    """The settings in the file, every one of them `known`; raises `ConfigFileError`."""
    try:
        found = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(
            f"The file {path} of LORAPLEX_CONFIG or --config cannot be read: {error.strerror}."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path} is not TOML: {error}.") from error
    names = [name for name in known if name != "config"]
    for name in found:
        if name not in names:
            raise ConfigFileError(f"{path} has a setting {name!r}, {_nearest(name, names)}.")
    return found


def _nearest(name: str, names: list[str]) -> str:
    near = get_close_matches(name.lower().removeprefix("loraplex_"), names, n=1, cutoff=0.5)
    return f"which is none; {near[0]!r} is" if near else "which is none; docs/settings.md lists all"


def path_in(given: Mapping[str, Any], environment: Mapping[str, Any]) -> Path | None:
    """The file that an option names, else the one that a variable names."""
    named = given.get("config") or environment.get("config")
    return Path(named) if named else None


def origins(settings_cls: type[BaseSettings], given: Mapping[str, Any]) -> dict[str, str]:
    """Where each setting in force came from, by its name; one of the engine's is `engine.name`.

    Raises `ConfigFileError`.
    """
    environment = EnvSettingsSource(settings_cls)()
    path = path_in(given, environment)
    file = read(path, settings_cls.model_fields) if path else {}
    found = dict.fromkeys(settings_cls.model_fields, "default")
    found |= {name: str(path) for name in _flat(file)}
    found |= {name: _variable(name) for name in _flat(environment)}
    return found | dict.fromkeys(_flat(given), "option")


def _flat(values: Mapping[str, Any]) -> list[str]:
    knobs = [f"{ENGINE}.{name}" for name in values.get(ENGINE) or {}]
    return [*(name for name in values if name != ENGINE), *knobs]


def _variable(name: str) -> str:
    return f"LORAPLEX_{name.replace('.', '__').upper()}"
