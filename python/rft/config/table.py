"""The base of every TOML table: strict, frozen, and its own documentation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOST = 10**12
Count = Annotated[int, Field(gt=0, le=MOST)]
"""Of steps, rows and the like: no more than fits whatever is computed from it."""
CountOrNone = Annotated[int, Field(ge=0, le=MOST)]


class Table(BaseModel):
    """One table of the TOML file. Unknown keys and wrong types are errors; attribute docstrings are the help text.

    Strict types: `"2e-5"` is no number and `4096.0` no integer; an integer is accepted where a float is wanted; nan and inf are not.
    No string is empty and no name stands in a list twice, whatever the key: neither says anything.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _says_something(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("empty")
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            if "" in value:
                raise ValueError("a list with an empty string in it")
            repeated = next((item for item in value if value.count(item) > 1), None)
            if repeated is not None:
                raise ValueError(f'a list with "{repeated}" more than once')
        return value
