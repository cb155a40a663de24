"""An annotation for lists whose usual single element may be written as a string.

Refuses to know what the elements are.
"""

from collections.abc import Callable
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


class OrText:
    """A list, or a string that stands for the list that `listed` makes of it."""

    def __init__(self, listed: Callable[[str], list[Any]]) -> None:
        self._listed = listed

    def _as_list(self, value: Any) -> Any:
        return self._listed(value) if isinstance(value, str) else value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._as_list, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(schema)]}
