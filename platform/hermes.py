"""Tool calls as Hermes models write them, for a base whose own template has no place for tools.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

Many templates (Hermes, Qwen) write the same, so this is also the form that answers are read in. A
message is a mapping with `role` and `content`; a tool is OpenAI's JSON. This file refuses to know
templates, requests and tokens.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

_INTRODUCTION: Final = """\
You may call one or more functions to help with the user's request. Their signatures are within \
<tools></tools>:
<tools>
{tools}
</tools>

For each call, answer with a JSON object of the function's name and arguments within \
<tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

Message = Mapping[str, Any]


def spell_out(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, system: bool
) -> list[Message]:
    """The same conversation without tools in it but in its text.

    The tools are listed in the system message, or, for a template without one (`system` is false),
    before the first message of the user. Calls become the assistant's text, and the results that
    follow each other one message of the user's.
    """
    plain = list(_plain(messages))
    return _introduce(plain, _list(tools), system=system) if tools else plain


def call_text(name: str, arguments: Any) -> str:
    """One call, in its tags."""
    return f"{OPEN}\n{_json({'name': name, 'arguments': arguments})}\n{CLOSE}"


def _plain(messages: Sequence[Message]) -> Iterator[Message]:
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            results = (f"<tool_response>\n{m['content']}\n</tool_response>" for m in group)
            yield {"role": "user", "content": "\n".join(results)}
        else:
            yield from map(_without_calls, group)


def _without_calls(message: Message) -> Message:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls:
        return message
    texts = [call_text(call["name"], call["arguments"]) for call in calls]
    content = "\n".join(filter(None, (message["content"], *texts)))
    return {"role": message["role"], "content": content}


def _list(tools: Iterable[Mapping[str, Any]]) -> str:
    return _INTRODUCTION.format(tools="\n".join(map(_json, tools)))


def _introduce(messages: list[Message], text: str, *, system: bool) -> list[Message]:
    role = "system" if system else "user"
    for i, message in enumerate(messages):
        if message["role"] == role:
            parts = [message["content"], text] if system else [text, message["content"]]
            changed = {**message, "content": "\n\n".join(filter(None, parts))}
            return [*messages[:i], changed, *messages[i + 1 :]]
    return [{"role": role, "content": text}, *messages]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
