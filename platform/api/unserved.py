"""Fields of the API's models that nothing here serves: refused by name, or left unread.

Each refusal says what to send instead. Knows bodies as they come; refuses to know any route's.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from loraplex.platform.errors import BadRequest


@dataclass(frozen=True)
class Unserved:
    """The reasons for refusals by field, unless its value is among the `harmless` ones.

    Those ask for what is done anyway. What stands in `ignored` changes no answer.
    """

    reasons: Mapping[str, str]
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    codes: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def strip(self, data: Any, fields: Collection[str]) -> Any:
        """The body without what a model with these `fields` has no field for.

        Raises `BadRequest`.
        """
        if not isinstance(data, dict):
            return data
        for name, reason in self.reasons.items():
            if data.get(name) is not None and not self._is_harmless(name, data[name]):
                raise BadRequest(reason, param=name, code=self.codes.get(name))
        dropped = (self.ignored | self.reasons.keys()) - set(fields)
        return {name: value for name, value in data.items() if name not in dropped}

    def _is_harmless(self, name: str, value: Any) -> bool:
        """Nulls in a value say nothing; True is not 1 here."""
        if isinstance(value, dict):
            value = {key: each for key, each in value.items() if each is not None}
        known = self.harmless.get(name, ())
        return any(value == each and type(value) is type(each) for each in known)
