"""Whose cached prompts a request may share: a name for the engine that no tenant can guess.

The engine mixes a request's scope into the hashes of its KV blocks, so that what is cached under
one scope is never found under another. This file knows tenants and what the operator allows; it
refuses to know the cache.
"""

import functools
import hmac


class Scopes:
    """Scopes under one server's `secret`; the same secret gives the same scopes.

    `share_base` lets all tenants share what is cached of the bare base, `share_public` what is
    cached of public adapters. Sharing tells a tenant, by the time to its first token, that another
    has sent the same prompt.
    """

    def __init__(self, secret: bytes, share_base: bool, share_public: bool) -> None:
        self._secret = secret
        self._digest = functools.lru_cache(maxsize=4096)(self._digested)
        self._share_base, self._share_public = share_base, share_public

    def of(self, tenant_id: str, image: str | None, public: bool) -> str:
        """The scope of a tenant's request under `image`, or the bare base: 64 hex digits.

        `public` says whether the image is one that every tenant may use.
        """
        if self._share_base if image is None else self._share_public and public:
            return self._digest("shared", "")
        return self._digest("tenant", tenant_id)

    def _digested(self, kind: str, name: str) -> str:
        return hmac.digest(self._secret, f"{kind}\0{name}".encode(), "sha256").hex()
