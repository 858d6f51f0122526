"""The base of every TOML table: strict, frozen, and its own documentation."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """One table of the TOML file. Unknown keys and wrong types are errors; attribute docstrings are the help text.

    Strict types: `"2e-5"` is no number and `4096.0` no integer; an integer is accepted where a float is wanted; nan and inf are not.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
