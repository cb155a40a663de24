"""Identifiers sort; settings are read from the environment and show no secret."""

import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from loraplex.platform import ids
from loraplex.platform.ids import new_id
from loraplex.platform.settings import DataDirError, Settings, read_or_make_secret


def test_an_id_is_its_prefix_and_26_characters() -> None:
    prefix, _, rest = new_id("ten").partition("_")
    assert prefix == "ten"
    assert len(rest) == 26
    assert set(rest) <= set("0123456789abcdefghjkmnpqrstvwxyz")


def at(monkeypatch: pytest.MonkeyPatch, milliseconds: int) -> None:
    monkeypatch.setattr(ids.time, "time_ns", lambda: milliseconds * 1_000_000)


def test_ids_sort_by_the_time_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for milliseconds in (0, 1, 31, 32, 2**40, 2**48 - 1):
        monkeypatch.setattr(ids, "_ulids", ids.Ulids())  # as many processes would
        at(monkeypatch, milliseconds)
        made.append(new_id("x"))
    assert made == sorted(made)


@pytest.mark.parametrize("clock", [(7,) * 1000, range(1000, 0, -1), (7, 8, 7, 9) * 250])
def test_ids_of_one_process_sort_whatever_its_clock_does(
    monkeypatch: pytest.MonkeyPatch, clock: Sequence[int]
) -> None:
    monkeypatch.setattr(ids, "_ulids", ids.Ulids())
    made = []
    for milliseconds in clock:
        at(monkeypatch, milliseconds)
        made.append(new_id("x"))
    assert made == sorted(set(made))


def test_the_next_id_of_a_millisecond_is_not_to_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 7)
    ulids = ids.Ulids()
    numbers = [next(ulids) for _ in range(1000)]
    steps = [later - former for former, later in pairwise(numbers)]
    assert len(set(steps)) == len(steps)


def test_ids_of_many_threads_do_not_repeat() -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: [new_id("x") for _ in range(1000)], range(8)))
    assert all(of_one == sorted(of_one) for of_one in made)
    assert len({id for of_one in made for id in of_one}) == 8000


def test_defaults_live_in_the_data_directory(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert settings.database.render_as_string() == f"sqlite+aiosqlite:///{tmp_path}/loraplex.db"
    assert settings.image_store == str(tmp_path / "images")
    assert settings.run_dir == tmp_path / "run"


def test_the_environment_sets_fields_and_single_engine_knobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LORAPLEX_PORT", "9001")
    monkeypatch.setenv("LORAPLEX_MODEL", "")
    monkeypatch.setenv("LORAPLEX_ENGINE__MAX_NUM_SEQS", "32")
    settings = Settings()
    assert (settings.port, settings.model) == (9001, None)
    assert settings.engine == {"max_num_seqs": "32"}


def test_settings_are_frozen(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings(data_dir=tmp_path).port = 1


def test_no_secret_is_shown(tmp_path: Path) -> None:
    secret = "hunter2-hunter2-hunter2"
    settings = Settings(
        data_dir=tmp_path,
        database_url=f"postgresql+asyncpg://u:{secret}@db/x",
        redis_url=f"redis://:{secret}@cache/0",
        image_store_url=f"s3://key:{secret}@bucket",
        key_pepper=secret,
    )
    assert secret not in f"{settings} {settings!r} {settings.database}"
    with pytest.raises(ValidationError) as error:
        Settings(key_pepper="hunter2")
    assert "hunter2" not in str(error.value)


def test_the_data_directory_is_for_its_owner_only(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "new" / "data")
    settings.open_data_dir()
    settings.open_data_dir()
    modes = {stat.S_IMODE(os.stat(path).st_mode) for path in settings.data_dir.rglob("*")}
    assert modes == {0o700}


def test_a_data_directory_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirError, match=r"Not a directory.*LORAPLEX_DATA_DIR"):
        Settings(data_dir=tmp_path / "file" / "data").open_data_dir()


def test_the_pepper_is_made_once_and_kept(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    pepper = settings.pepper()
    assert len(pepper) >= 32
    assert settings.pepper() == Settings(data_dir=tmp_path).pepper() == pepper
    path = tmp_path / "secrets" / "pepper"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["pepper"]


def test_all_who_make_a_secret_at_once_read_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        read = set(pool.map(lambda _: read_or_make_secret(tmp_path / "s"), range(64)))
    assert len(read) == 1


def test_a_pepper_that_is_given_is_used(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, key_pepper="sixteen characters")
    assert settings.pepper() == b"sixteen characters"
    assert not (tmp_path / "secrets").exists()
