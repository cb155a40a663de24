"""What every part of a generating route's body is: strict."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Fields are what they say they are: no coercion, no NaN or infinity, no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
