"""Every error that a caller of the API can meet, as one tree; each has OpenAI's body.

    ApiError                      status  type                    code
    ├── BadRequest                400     invalid_request_error   (null)
    │   └── ContextLengthExceeded 400     invalid_request_error   context_length_exceeded
    ├── InvalidKey                401     authentication_error    invalid_api_key
    ├── Forbidden                 403     permission_error        insufficient_permissions
    ├── NotFound                  404     invalid_request_error   not_found
    │   └── ModelNotFound         404     invalid_request_error   model_not_found
    ├── MethodNotAllowed          405     invalid_request_error   method_not_allowed
    ├── BodyTimedOut              408     invalid_request_error   body_timeout
    ├── Conflict                  409     invalid_request_error   conflict
    │   ├── NameConflict          409     invalid_request_error   name_conflict
    │   ├── AliasMoved            409     invalid_request_error   alias_moved
    │   ├── ImageMismatch         409     invalid_request_error   image_mismatch
    │   ├── WrongOffset           409     invalid_request_error   wrong_offset
    │   ├── IdempotencyMismatch   409     invalid_request_error   idempotency_mismatch
    │   └── StillRunning          409     invalid_request_error   still_running
    ├── TooLarge                  413     invalid_request_error   request_too_large
    ├── AdapterRejected           422     invalid_request_error   adapter_rejected
    ├── RateLimited               429     rate_limit_error        rate_limit_exceeded
    ├── QuotaExceeded             429     insufficient_quota      insufficient_quota
    │   └── BudgetSpent           429     insufficient_quota      insufficient_quota
    ├── InternalError             500     server_error            internal_error
    ├── ImageUnusable             500     server_error            image_missing, image_corrupt
    ├── TimedOut                  504     server_error            request_timeout
    ├── StorageFull               507     server_error            storage_full
    └── Unavailable               503     server_error            unavailable
        ├── EngineUnavailable     503     server_error            engine_unavailable
        │   └── EngineRestarted   503     server_error            engine_restarted
        ├── LimiterDown           503     server_error            limiter_down
        ├── ServerStopping        503     server_error            server_stopping
        └── Overloaded            503     server_error            overloaded

This file knows what went wrong and what the caller may do about it. It refuses to know HTTP
frameworks and databases; messages never hold a secret or an internal path.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Literal

LimitName = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrency",
    "tokens_per_day",
    "tokens_per_month",
]


class ApiError(Exception):
    """The root: a status, the four keys of OpenAI's error body, and headers.

    A subclass sets `status`, `type` and `code`; one error may override its `code` and names the
    request's field at fault in `param`. `retry` is what the client should do by itself: True and
    False are sent as `x-should-retry`, None leaves it to the status. `wait_s` is when, if known.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    retry: ClassVar[bool | None] = None
    wait_s: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param = message, param
        self.code = code or type(self).code
        self.retry_after_s = self.wait_s if retry_after_s is None else retry_after_s
        self._headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`, all four keys always there."""
        return {"error": self.fields()}

    def fields(self) -> dict[str, Any]:
        """The object under "error"."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Send these too, where the error has none of the same name."""
        self._headers = {**headers, **self._headers}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response; `retry-after` is whole seconds rounded up, `-ms` is exact."""
        headers = dict(self._headers)
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, math.ceil(self.retry_after_s * 1000)))
        return headers


class BadRequest(ApiError):
    """A field has a value that can never work; the message says which would."""

    status, type = 400, "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """The prompt and the completion asked for do not fit the model's context."""

    code = "context_length_exceeded"

    def __init__(self, limit: int, prompt_tokens: int, max_tokens: int, param: str) -> None:
        total = prompt_tokens + max_tokens
        super().__init__(
            f"This model's context is {limit} tokens, but {total} were asked for: "
            f"{prompt_tokens} in the prompt and {max_tokens} for the completion. "
            "Shorten the prompt or lower max_tokens.",
            param=param,
        )


class InvalidKey(ApiError):
    """No key, or a malformed, unknown, expired or revoked one: all look the same."""

    status, type, code = 401, "authentication_error", "invalid_api_key"

    def __init__(self) -> None:
        super().__init__(
            "The API key is missing or not valid. Send it as 'Authorization: Bearer lpx_…'.",
            headers={"www-authenticate": "Bearer"},
        )


class Forbidden(ApiError):
    """The key is valid but may not do this; the message names the scope it lacks."""

    status, type, code = 403, "permission_error", "insufficient_permissions"


class NotFound(ApiError):
    """Nothing of this name is there for this caller: absent and foreign look the same."""

    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    """The model named in a request is no model of this caller."""

    code = "model_not_found"

    def __init__(self, model: str, param: str = "model") -> None:
        super().__init__(
            f"The model {model[:128]!r} does not exist or is not yours. "
            "GET /v1/models lists those you may name.",
            param=param,
        )


class MethodNotAllowed(ApiError):
    """The path exists, but not for this method; the header `allow` lists those it has."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTimedOut(ApiError):
    """The rest of a body did not come; the connection, on which it still might, is closed."""

    status, type, code = 408, "invalid_request_error", "body_timeout"


class Conflict(ApiError):
    """The request cannot be reconciled with what is there; sending it again will not help."""

    status, type, code, retry = 409, "invalid_request_error", "conflict", False


class NameConflict(Conflict):
    """The name is taken."""

    code = "name_conflict"


class AliasMoved(Conflict):
    """The alias is not at the revision that the caller has seen, but at `revision`."""

    code = "alias_moved"

    def __init__(self, alias: str, revision: int, seen: int) -> None:
        super().__init__(
            f"{alias} is at revision {revision}, not {seen}: it was moved meanwhile. "
            "Look at it again, then decide.",
            param="revision",
        )
        self.revision = revision

    def fields(self) -> dict[str, Any]:
        """The four keys, and `revision`: where the alias is now (0: it is not there)."""
        return super().fields() | {"revision": self.revision}


class ImageMismatch(Conflict):
    """The adapter was compiled for another base than the one that is served."""

    code = "image_mismatch"


class WrongOffset(Conflict):
    """Bytes were sent for another place of a part than its end, which the header tells."""

    code = "wrong_offset"

    def __init__(self, part: str, sent: int, offset: int) -> None:
        super().__init__(
            f"The part {part} has {offset} bytes, so it goes on at {offset}, not at {sent}. "
            f"Send what follows with Upload-Offset: {offset}.",
            param="Upload-Offset",
            headers={"upload-offset": str(offset)},
        )
        self.offset = offset


class IdempotencyMismatch(Conflict):
    """The Idempotency-Key was used for a request that said something else."""

    code = "idempotency_mismatch"

    def __init__(self) -> None:
        super().__init__(
            "This Idempotency-Key belongs to another request of yours. Use a new key for a new "
            "request, or send that one again as it was.",
            param="Idempotency-Key",
        )


class StillRunning(Conflict):
    """The same thing is being done for another request; its outcome can be had soon."""

    code, retry, wait_s = "still_running", True, 1.0


class TooLarge(ApiError):
    """The body, or what it unpacks to, is larger than the limit that the message gives."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class AdapterRejected(ApiError):
    """A well-formed upload that is no adapter for this base: every reason, with its fix."""

    status, type, code, retry = 422, "invalid_request_error", "adapter_rejected", False

    def __init__(self, reasons: Sequence[tuple[str, str]], param: str | None = None) -> None:
        super().__init__(" ".join(message for _, message in reasons), param=param)
        self.reasons = [{"code": code, "message": message} for code, message in reasons]

    def fields(self) -> dict[str, Any]:
        """The four keys, and `reasons`: a list of `{"code", "message"}`."""
        return super().fields() | {"reasons": self.reasons}


class RateLimited(ApiError):
    """A limit is used up for now; `retry_after_s` says when to come back.

    `bucket` is whose limit it is: "tenant", "key" or "adapter"; `name` which of its limits.
    """

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"

    def __init__(
        self,
        name: LimitName,
        retry_after_s: float,
        limit: int,
        remaining: int = 0,
        headers: Mapping[str, str] | None = None,
        *,
        bucket: str = "tenant",
    ) -> None:
        unit = "requests at once" if name == "max_concurrency" else name.replace("_", " ")
        super().__init__(
            f"This {bucket}'s limit of {limit} {unit} is reached ({remaining} left). "
            f"Try again in {max(1, math.ceil(retry_after_s))} s.",
            retry_after_s=retry_after_s,
            headers=headers,
        )
        self.name, self.limit, self.remaining, self.bucket = name, limit, remaining, bucket


class QuotaExceeded(ApiError):
    """A budget or a quota is used up, and waiting a little will not help."""

    status, type, code, retry = 429, "insufficient_quota", "insufficient_quota", False


class BudgetSpent(QuotaExceeded):
    """A day's or a month's tokens are used up until `resets_at`, a moment in UTC."""

    def __init__(
        self,
        name: LimitName,
        limit: int,
        used: int,
        asked: int,
        resets_at: datetime,
        headers: Mapping[str, str] | None = None,
        *,
        bucket: str = "tenant",
    ) -> None:
        super().__init__(
            f"This {bucket}'s budget of {limit} {name.replace('_', ' ')} does not suffice: {used} "
            f"are used or reserved, and this request may take {asked}. The budget is whole again "
            f"at {resets_at:%Y-%m-%d %H:%M} UTC. Lower max_tokens, or ask for a larger budget.",
            headers=headers,
        )
        self.name, self.limit, self.used, self.bucket = name, limit, used, bucket


class InternalError(ApiError):
    """A fault of the server; its log has the rest under the request id."""

    code = "internal_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"The server failed. Its log has the cause under request {request_id}.")


class ImageUnusable(ApiError):
    """The adapter's weights are gone or damaged; only a new upload helps."""

    status, retry = 500, False


class StorageFull(ApiError):
    """The disk that the data directory lies on has no room; what was acknowledged is kept."""

    status, code, retry = 507, "storage_full", False

    def __init__(self) -> None:
        super().__init__(
            "The server's disk is full. Nothing that was acknowledged is lost: go on from there "
            "once its operator has made room."
        )


class TimedOut(ApiError):
    """A generation took longer than the server allows."""

    status, code, retry = 504, "request_timeout", False


class Unavailable(ApiError):
    """A part that the request needs is not there now; the same request may work soon."""

    status, code, wait_s = 503, "unavailable", 2.0


class EngineUnavailable(Unavailable):
    """No engine is ready to take a request."""

    code = "engine_unavailable"


class EngineRestarted(EngineUnavailable):
    """The engine ended while the request was in flight; nothing more of it will come."""

    code = "engine_restarted"


class LimiterDown(Unavailable):
    """Redis does not answer, so limits cannot be checked; requests are refused unchecked."""

    code = "limiter_down"

    def __init__(self, message: str = "Limits cannot be checked now. Try again soon.") -> None:
        super().__init__(message)


class ServerStopping(Unavailable):
    """This server is being stopped; another one, or the next, takes the request."""

    code = "server_stopping"

    def __init__(self) -> None:
        super().__init__("The server is stopping. Send the request again in a few seconds.")


class Overloaded(Unavailable):
    """The engine's queue is full."""

    code = "overloaded"
