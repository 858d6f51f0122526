"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from rft.words import counted


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (0, "row", "0 rows"),
        (1, "row", "1 row"),
        (1200, "step", "1,200 steps"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (3, "batch", "3 batches"),
    ],
)
def test_one_is_singular_and_thousands_have_a_comma(number, noun, words):
    assert counted(number, noun) == words
