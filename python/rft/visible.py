"""Text of users' data made safe to show: what a terminal would obey, and what would reorder or hide text, as its number."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but tab and newline: ESC, BEL, CR, C1
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # marks of direction, and what has no width
    "\ud800-\udfff\U000e0000-\U000e0fff]"  # halves of pairs, tags
)


def visible(text: str) -> str:
    """`text` with each such character as `\\x1b` or `\\u202e`; tabs and newlines are left."""
    return _UNSAFE.sub(lambda match: _numbered(match.group()), text)


def visible_line(text: str) -> str:
    """`visible`, on one line."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _numbered(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
