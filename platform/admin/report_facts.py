"""An upload's report in words: its checks, what was found out, and what the adapter said.

Knows the report's JSON; refuses to know rows and HTTP. What a report lacks is left out, for an
older server may have written it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

from loraplex.platform.upload_report import Check
from loraplex.web.contexts.shell import Badge, Tone
from loraplex.web.contexts.uploads import Fact, Mark, Step
from loraplex.web.words import of_bytes

TITLES: Final[Mapping[str, str]] = {
    "received": "All bytes are here",
    "unpacked": "The files are what they should be",
    "config": "adapter_config.json is understood",
    "weights": "Every weight fits the base",
    "compiled": "Compiled, and equal to PEFT's arithmetic",
    "canary": "Tried in the engine beside the base",
    "published": "Published",
}
STATES: Final[Mapping[str, tuple[str, Tone]]] = {
    "uploading": ("receiving", "plain"),
    "validating": ("checking", "plain"),
    "ready": ("ready", "good"),
    "rejected": ("refused", "bad"),
    "failed": ("failed", "bad"),
    "cancelled": ("cancelled", "warn"),
    "expired": ("expired", "warn"),
}


def state_badge(state: str) -> Badge:
    """The state of an upload."""
    return Badge(*STATES[state])


def steps_of(state: str, report: Mapping[str, Any]) -> tuple[Step, ...]:
    """All checks in order: those made, the one that is being made, and those to come."""
    made = {check["name"]: check for check in report.get("checks", ())}
    steps, first = [], True
    for name in get_args(Check):
        check = made.get(name)
        mark: Mark = "waiting"
        if check is not None:
            mark = "done" if check["state"] == "passed" else "failed"
        elif first:
            mark, first = "running" if state == "validating" else "waiting", False
        steps.append(
            Step(
                title=TITLES[name],
                mark=mark,
                detail=_detail(name, check, report),
                seconds=check["seconds"] if check else None,
            )
        )
    return tuple(steps)


def _detail(name: str, check: Mapping[str, Any] | None, report: Mapping[str, Any]) -> str:
    if check is None:
        return ""
    if check["state"] == "failed":
        count = len(report.get("reasons", ()))
        return f"{count} reason{'s' if count > 1 else ''}, above"
    if name == "published" and (version := check["detail"].get("version")):
        return str(version)
    return ""


def facts_of(report: Mapping[str, Any]) -> tuple[Fact, ...]:
    """What was found out of the adapter."""
    return tuple(Fact(label, value) for label, value in _facts(report))


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "rank" in report:
        yield "Rank", f"{report['rank']}"
    if coverage := report.get("coverage"):
        full = [name for name, each in coverage.items() if each["layers"]]
        layers = max((each["layers"] for each in coverage.values()), default=0)
        of = max((each["of"] for each in coverage.values()), default=0)
        yield "Modules", f"{len(full)} of {len(coverage)} linears, in {layers} of {of} layers"
    for dtype, each in report.get("variants", {}).items():
        if "bytes" in each:
            yield f"Image, {dtype}", f"{of_bytes(each['bytes'])}, {each['digest'][:12]}…"
    if base := report.get("base"):
        asked = base.get("asked")
        yield "Base", f"{base['name']}" + (f" (trained on {asked})" if asked else "")
    if parity := report.get("parity"):
        yield "Parity", f"within {parity['max_error']:.2%} of the checkpoint, rounding included"
    yield from _moves(report.get("canary") or {})


def _moves(canary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "tokens_changed" in canary:
        yield "Moves outputs", f"{canary['tokens_changed']:.0%} of greedy tokens change"
        yield (
            "Log-probabilities",
            (f"by {canary['mean_delta']:.3f} on average, {canary['max_delta']:.2f} at most"),
        )
        yield (
            "First token",
            f"{canary['first_token_ms']:.0f} ms, loading {canary['load_ms']:.0f} ms",
        )


def texts_of(report: Mapping[str, Any], name: str) -> tuple[tuple[str, str], ...]:
    """How the base and the adapter went on from a probe."""
    canary = report.get("canary") or {}
    if "text" not in canary:
        return ()
    prompt = canary["prompt"]
    return (("The base", f"{prompt}{canary['base_text']}"), (name, f"{prompt}{canary['text']}"))
