"""Scopes of cached prompts: one a tenant, unless the operator lets them share."""

import re
import stat
from pathlib import Path

import pytest

from loraplex.platform.scopes import Scopes
from loraplex.platform.settings import Settings

SECRET, IMAGE, OTHER = b"a secret of sixteen", "a" * 64, "b" * 64
CASES = [(None, False), (IMAGE, False), (IMAGE, True)]


@pytest.mark.parametrize(("image", "public"), CASES)
def test_two_tenants_never_share_by_default(image: str | None, public: bool) -> None:
    scopes = Scopes(SECRET, share_base=False, share_public=False)
    mine, theirs = (scopes.of(tenant, image, public) for tenant in ("ten_a", "ten_b"))
    assert mine != theirs
    assert re.fullmatch("[0-9a-f]{64}", mine)
    assert "ten_a" not in mine


@pytest.mark.parametrize(
    ("share", "shared"),
    [((False, False), []), ((True, False), CASES[:1]), ((False, True), CASES[2:])],
)
def test_sharing_is_only_where_the_operator_says_so(
    share: tuple[bool, bool], shared: list[tuple[str | None, bool]]
) -> None:
    scopes = Scopes(SECRET, *share)
    found = [case for case in CASES if scopes.of("ten_a", *case) == scopes.of("ten_b", *case)]
    assert found == shared


def test_a_tenant_s_requests_share_a_scope() -> None:
    scopes = Scopes(SECRET, share_base=False, share_public=False)
    assert len({scopes.of("ten_a", image, False) for image in (None, IMAGE, OTHER)}) == 1


def test_no_tenant_s_name_is_the_shared_scope() -> None:
    shared = Scopes(SECRET, share_base=True, share_public=True).of("ten_a", None, False)
    apart = Scopes(SECRET, share_base=False, share_public=False)
    names = ("", "shared", "shared\0", "\0shared", "tenant\0")
    assert shared not in {apart.of(name, None, False) for name in names}


def test_restarts_agree_and_servers_differ(tmp_path: Path) -> None:
    def scope(folder: str) -> str:
        settings = Settings(data_dir=tmp_path / folder)
        return Scopes(settings.scope_key(), False, False).of("ten_a", None, False)

    assert scope("one") == scope("one") != scope("two")
    mode = (tmp_path / "one" / "secrets" / "scopes").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_a_secret_that_is_given_is_used_and_not_shown(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, scope_secret="sixteen characters")
    assert settings.scope_key() == b"sixteen characters"
    assert "sixteen" not in repr(settings)
    assert not (tmp_path / "secrets").exists()
