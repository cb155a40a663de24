"""What the generating routes take and answer with, by example; for OpenAPI.

A test sends each body and holds each answer to its schema. Refuses to know routes.
"""

from typing import Any, Final

from loraplex.platform.api.documented import REF

Json = dict[str, Any]
MODEL: Final = "support@prod"
VERSION: Final = "support@3"
CREATED: Final = 1796000000
SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
USAGE: Final = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 8},
}
HELLO: Final = [{"role": "user", "content": "Hello"}]
EXPLAINED: Final = {
    "model": VERSION,
    "adapter": "support",
    "version": 3,
    "digest": "9f" * 32,
    "arm": "stable",
    "cached_tokens": 8,
    "queue_ms": 0.4,
    "load_ms": 0.0,
    "first_token_ms": 31.5,
    "total_ms": 88.2,
}

CHATS: Final[dict[str, Json]] = {
    "a question": {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, *HELLO],
        "max_tokens": 64,
    },
    "a stream with its usage": {
        "model": MODEL,
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "JSON of a schema": {
        "model": MODEL,
        "messages": HELLO,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "place", "schema": SCHEMA},
        },
    },
    "a tool": {
        "model": MODEL,
        "messages": HELLO,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
        "tool_choice": "auto",
    },
    "how it came about": {"model": MODEL, "messages": HELLO, "loraplex": True},
}
RESPONSES: Final[dict[str, Json]] = {
    "a question": {
        "model": MODEL,
        "instructions": "Be brief.",
        "input": "Hello",
        "max_output_tokens": 64,
    },
    "a stream": {"model": MODEL, "input": HELLO, "stream": True},
    "JSON of a schema": {
        "model": MODEL,
        "input": HELLO,
        "text": {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}},
    },
    "a tool": {
        "model": MODEL,
        "input": HELLO,
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        "tool_choice": "required",
        "stream": True,
    },
    "a tool of those that are told": {
        "model": MODEL,
        "input": HELLO,
        "tools": [
            {"type": "function", "name": "weather", "parameters": SCHEMA},
            {"type": "function", "name": "population", "parameters": SCHEMA},
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "weather"}],
        },
    },
}
INPUTS: Final[dict[str, Json]] = {
    "a prompt": {"model": MODEL, "instructions": "Be brief.", "input": "Hello"}
}
COMPLETIONS: Final[dict[str, Json]] = {
    "one prompt": {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32},
    "several prompts": {"model": MODEL, "prompt": ["One,", "Two,"], "max_tokens": 8, "n": 2},
    "log-probabilities": {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "logprobs": 2},
}
MESSAGES: Final[dict[str, Json]] = {
    "a question": {
        "model": MODEL,
        "max_tokens": 64,
        "system": "Be brief.",
        "messages": HELLO,
    },
    "a tool": {
        "model": MODEL,
        "max_tokens": 256,
        "messages": HELLO,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
    "a stream": {"model": MODEL, "max_tokens": 64, "messages": HELLO, "stream": True},
}
COUNTS: Final[dict[str, Json]] = {"a prompt": {"model": MODEL, "messages": HELLO}}

CHAT_ANSWER: Final = {
    "id": "chatcmpl-01jt4r0e6cq8v7v1e9b2s5m3xk",
    "object": "chat.completion",
    "created": CREATED,
    "model": VERSION,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": USAGE,
    "loraplex": EXPLAINED,
}
RESPONSE_ANSWER: Final = {
    "id": "resp_01jt4r0e6cq8v7v1e9b2s5m3xk",
    "object": "response",
    "created_at": CREATED,
    "completed_at": CREATED + 1,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "model": VERSION,
    "output": [
        {
            "id": "msg_01jt4r0e6cq8v7v1e9b2s5m3xk00",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}
            ],
        }
    ],
    "usage": {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    },
    "background": False,
    "instructions": "Be brief.",
    "max_output_tokens": 64,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
COMPLETION_ANSWER: Final = {
    "id": "cmpl-01jt4r0e6cq8v7v1e9b2s5m3xk",
    "object": "text_completion",
    "created": CREATED,
    "model": VERSION,
    "choices": [{"index": 0, "text": " there was", "logprobs": None, "finish_reason": "length"}],
    "usage": USAGE,
}
MESSAGE_ANSWER: Final = {
    "id": "msg_01jt4r0e6cq8v7v1e9b2s5m3xk",
    "type": "message",
    "role": "assistant",
    "model": VERSION,
    "content": [{"type": "text", "text": "Hello!"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 8,
        "output_tokens": 3,
    },
}
HEADERS: Final[dict[str, Json]] = {
    f"x-loraplex-{name}": {"description": text, "schema": {"type": "string"}}
    for name, text in {
        "model": "The immutable id of what answered.",
        "adapter": "The adapter's name; absent for the base.",
        "version": "The adapter's version; absent for the base.",
        "digest": 'The digest of the adapter\'s image, or "base".',
        "limit": "The limit that is nearest to being reached, and whose it is.",
        "arm": '"stable" or "canary", where an alias is split.',
        "cached-tokens": "Of the prompt, not computed anew. This and the times: not in streams.",
        "queue-ms": "Until first scheduled.",
        "load-ms": "Until the adapter's image was resident.",
        "first-token-ms": "Until the first token.",
        "total-ms": "In all.",
    }.items()
}


def named(bodies: dict[str, Json]) -> dict[str, Any]:
    """Examples as OpenAPI names them."""
    return {name: {"summary": name, "value": body} for name, body in bodies.items()}


def answered(model: type, answer: Json, event: str, events: str, sample: str) -> Json:
    """A successful answer: whole by `model`, or a stream whose events have the schema `event`.

    `events` says which there are, `sample` shows how a stream looks.
    """
    text = {"type": "string", "description": f"Server-sent events. {events}"}
    stream = {"schema": text, "example": sample, "x-events": {"$ref": REF.format(model=event)}}
    return {
        "model": model,
        "description": "The answer, or, with `stream`, its events.",
        "headers": HEADERS,
        "content": {"application/json": {"example": answer}, "text/event-stream": stream},
    }
