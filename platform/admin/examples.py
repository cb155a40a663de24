"""Requests to paste, for a model: with curl, and in Python. Knows text alone."""

import json
import shlex

QUESTION = "Hello"


def curl_for(url: str, model: str, prompt: str = QUESTION) -> str:
    """A curl command that reads the key from the environment."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}]})
    return "\n".join(
        (
            f"curl {url}/v1/chat/completions \\",
            '  -H "Authorization: Bearer $LORAPLEX_API_KEY" \\',
            "  -H 'Content-Type: application/json' \\",
            f"  -d {shlex.quote(body)}",
        )
    )


def python_for(url: str, model: str, prompt: str = QUESTION) -> str:
    """A program for OpenAI's own client."""
    return "\n".join(
        (
            "import os",
            "from openai import OpenAI",
            "",
            "client = OpenAI(",
            f'    base_url="{url}/v1",',
            '    api_key=os.environ["LORAPLEX_API_KEY"],',
            ")",
            "answer = client.chat.completions.create(",
            f"    model={model!r},",
            f"    messages=[{{'role': 'user', 'content': {prompt!r}}}],",
            ")",
            "print(answer.choices[0].message.content)",
        )
    )
