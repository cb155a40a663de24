"""The messages between the platform and an engine process: the only contract of the two sides.

Frozen msgspec structs, tagged and encoded as msgpack, one message a ZeroMQ frame. This file knows
token ids, image digests and opaque tenant keys; it refuses to know text, names and HTTP.

A client says `Hello` and hears `Ready`. Each accepted `Generate` is answered by any number of
`Chunk`s and then by exactly one terminal event, `Finished` or `Failed`. A request has one choice or
several; the last chunk of each carries its `finish`. `Abort` ends a request, or one of its choices,
early (a request that ends so is `Finished` with reason "abort"). Clients send `Ping` while they
live; the engine aborts what a silent client left behind. `Prefetch` and `Pin` concern images alone
and are not answered.
"""

import hashlib
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

FinishReason = Literal["stop", "length", "abort"]

FailureCode = Literal[
    "engine_died",  # the process ended while the request was in flight; safe to retry
    "engine_unavailable",  # no engine is ready to take the request; retry later
    "image_missing",  # the image is not in the store
    "image_corrupt",  # its bytes are not those its digest names
    "image_mismatch",  # it was compiled for another base
    "invalid_request",  # it can never be served: too long, ids out of range
    "overloaded",  # the engine's queue is full
    "internal",  # a fault of ours; the log has the traceback
]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The root of all messages; msgspec writes the subclass's name as the first element."""


GuideKind = Literal["json_schema", "regex", "grammar"]
WHITESPACE = r"( |\n( {0,24}|\t{0,8}))"  # between JSON's tokens, once: no text is endless blanks


class Guide(msgspec.Struct, frozen=True, array_like=True):
    """What the completion's text must match: a JSON schema, a regular expression or a grammar.

    `text` is JSON for "json_schema", Rust's syntax for "regex", llguidance's Lark for "grammar".
    """

    kind: GuideKind
    text: str


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How to choose tokens. Greedy when `temperature` is 0; a seed reproduces in any batch."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # the platform draws one where the caller gave none
    stop_token_ids: tuple[int, ...] = ()  # the base's own end tokens are always added
    ignore_eos: bool = False
    min_tokens: int = 0  # before so many, no end token and no stop token may come
    logprobs: int | None = None  # None: none; k: the chosen token's and the k likeliest
    prompt_logprobs: int | None = None  # the same, of the prompt's tokens
    guide: Guide | None = None
    draft_tokens: int | None = None  # looked up in the prompt each step; None: the server's default


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a token under the model's own distribution, and the likeliest tokens."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Beams(msgspec.Struct, frozen=True, array_like=True):
    """Beam search: of `width` beams, the best hypotheses, as many as the request has choices.

    A hypothesis scores the sum of its log-probabilities over `len(tokens) ** length_penalty`.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False  # end once `width` hypotheses are complete


class Part(msgspec.Struct, frozen=True, array_like=True):
    """An image in a composition, and the factor by which its delta counts."""

    image: str  # digest
    weight: float


class Policy(msgspec.Struct, frozen=True, array_like=True):
    """What the engine grants a tenant; the newest request's holds."""

    weight: float = 1.0  # of its share of the service
    max_running: int | None = None  # sequences at once
    kv_share: float = 1.0  # of the KV blocks, at most
    resident_bytes: int | None = None  # of its images in the engine's memory, at most


class Hello(Message, frozen=True):
    """First message of a client."""


class Ping(Message, frozen=True):
    """A sign of life, once a second."""


class Generate(Message, frozen=True):
    """Run one request: a prompt under one adapter image (or none) until a stop or a limit.

    Choice i samples with the seed `sampling.seed + i`. Requests share cached KV only where base,
    image and `scope` are the same: a secret of the tenant's, drawn by the platform. Without one a
    tenant shares with itself alone.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    image: str | None = None  # digest, 64 hex digits; None is the bare base
    tenant: str = ""  # opaque; for fairness and accounting
    scope: str = ""  # opaque; whose cached KV it may share
    policy: Policy = Policy()
    priority: int = 0  # among the tenant's own, the lowest first
    choices: int = 1
    beams: Beams | None = None
    parts: tuple[Part, ...] = ()  # what `image`, a composition's digest, is made of


class Abort(Message, frozen=True):
    """Stop a request, or one choice of it; unknown ids are ignored (it may have just finished)."""

    request_id: str
    index: int | None = None


class Prefetch(Message, frozen=True):
    """Bring an image to host memory while there is room: a request for it is expected."""

    image: str


class Pin(Message, frozen=True):
    """Keep an image resident once it is there, or no longer."""

    image: str
    pinned: bool = True


class Ready(Message, frozen=True):
    """The engine's answer to `Hello`: who it is and what it can take."""

    epoch: str  # a new one for each life of the process
    base: str  # fingerprint of the base
    max_model_len: int  # tokens, prompt and completion together
    max_num_seqs: int
    kv_capacity_tokens: int
    executor: str  # "torch"
    device: str  # "cpu", "cuda:0"
    dtype: str  # "float32", "bfloat16"
    weight_bytes: int = 0  # of the base
    memory_bytes: int = 0  # that KV blocks and images share
    block_bytes: int = 0  # of one KV block


class Chunk(Message, frozen=True):
    """Tokens of a choice, in order; `logprobs` is as long as `token_ids` when asked for."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    finish: FinishReason | None = None  # set on the choice's last chunk
    score: float | None = None  # of a beam, whose tokens come in one chunk


class PromptLogprobs(Message, frozen=True):
    """Log-probabilities of the prompt's tokens but the first; comes before the first chunk."""

    request_id: str
    logprobs: tuple[TokenLogprob, ...]


class Finished(Message, frozen=True):
    """Terminal: the request ran. Times are seconds since the engine accepted it."""

    request_id: str
    reason: FinishReason  # of its first choice that was not aborted
    prompt_tokens: int
    completion_tokens: int  # all that were sent in chunks, a stop token among them
    cached_tokens: int = 0  # of the prompt, whose KV was there already
    load_s: float = 0.0  # until the image was resident
    queue_s: float = 0.0  # until first scheduled
    first_token_s: float = 0.0
    total_s: float = 0.0


class Failed(Message, frozen=True):
    """Terminal: the request did not run to its end."""

    request_id: str
    code: FailureCode
    message: str


class CacheEvent(msgspec.Struct, frozen=True, array_like=True):
    """What happened to a tenant's cached KV. `blocks` are the hashes' first 8 bytes, hexadecimal.

    "stored": blocks are cached now; "hit": a request found them; "evicted": they are gone.
    """

    kind: Literal["stored", "hit", "evicted"]
    tenant: str
    blocks: tuple[str, ...]
    tokens: int


class CacheEvents(Message, frozen=True):
    """Events in order. Clients that come late or lose some must treat what they know as a hint."""

    events: tuple[CacheEvent, ...]


class Service(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant has had of the engine since it started, and has now."""

    tenant: str
    counter: float  # virtual tokens: cost over weight, lifted when it came back from idleness
    prompt_tokens: int  # computed, those found in the cache left out
    generated_tokens: int
    cached_tokens: int
    running: int
    waiting: int
    kv_blocks: int
    image_bytes: int = 0  # of images on the device that it uses, or was the last to use


class Stats(Message, frozen=True):
    """What the engine has done since it started, and how it is now. Sent about twice a second.

    `rows_per_step[i]` counts the steps with at most `ROW_BUCKETS[i]` rows (and more than the bucket
    before); the last entry counts the rest. `adapters_per_step[i]` counts the steps with exactly
    `i` distinct adapters, its last entry those with that many or more.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    loading: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    images_resident: int = 0
    image_bytes: int = 0
    image_budget_bytes: int = 0
    sequences_per_step_max: int = 0
    adapters_per_step_max: int = 0
    rows_total: int = 0
    rows_per_step: tuple[int, ...] = ()
    adapters_per_step: tuple[int, ...] = ()
    kv_blocks_cached: int = 0  # of those that nobody uses
    cache_queried_tokens: int = 0  # of prompts that were looked up
    cache_hit_tokens: int = 0
    cache_evicted_blocks: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    swap_blocks_used: int = 0
    swap_blocks_total: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of those drafted
    images_pinned: int = 0
    tenants: tuple[Service, ...] = ()  # those who had service lately, the most first
    resident: tuple[str, ...] = ()  # digests of images on the device, up to `MAX_TOLD` of them


MAX_TOLD = 512  # resident images, the ones in use first
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
ADAPTER_BUCKETS = 17  # 0 to 15 exactly, then 16 and more

ToEngine: TypeAlias = Hello | Ping | Generate | Abort | Prefetch | Pin
FromEngine: TypeAlias = Ready | Chunk | PromptLogprobs | Finished | Failed | Stats | CacheEvents
Event: TypeAlias = Chunk | PromptLogprobs | Finished | Failed


def composition_digest(parts: Iterable[Part]) -> str:
    """The name of a composition, 64 hex digits; the order of its parts does not matter."""
    spec = sorted((part.image, part.weight) for part in parts)
    return hashlib.sha256(b"composition" + msgspec.msgpack.encode(spec)).hexdigest()


_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: Message) -> bytes:
    """Encode a message as msgpack."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Decode what a client sent; raises `msgspec.DecodeError` or `ValidationError`."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    """Decode what an engine sent; raises `msgspec.DecodeError` or `ValidationError`."""
    return _from_engine.decode(frame)
