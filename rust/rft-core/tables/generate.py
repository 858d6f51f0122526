"""Writes unicode16.bin and unicode17.bin: the class of every code point that split patterns tell apart.

    pip install --target u16 unicodedata2==16.0.0 && pip install --target u17 unicodedata2==17.0.0
    PYTHONPATH=u16 python generate.py 16 && PYTHONPATH=u17 python generate.py 17

The source is `unicodedata2`, the Unicode Character Database as a Python module, in the version that its own
`unidata_version` names. A file is a list of little-endian u32, one a run of equal code points:
first code point << 8 | class. Classes are those of `Class` in src/tokenizer/unicode.rs.
"""

import struct
import sys
from pathlib import Path

import unicodedata2

CLASSES = {"Lu": 1, "Lt": 1, "Ll": 2, "Lm": 3, "Lo": 3, "M": 4, "N": 5, "P": 7, "S": 8}
# White_Space beside Z: the ASCII controls and NEL.
SPACES = {*range(9, 14), 0x85}


def class_of(code: int) -> int:
    category = unicodedata2.category(chr(code))
    if code in SPACES or category[0] == "Z":
        return 6
    return CLASSES.get(category, CLASSES.get(category[0], 0))


def main() -> None:
    version = sys.argv[1]
    if unicodedata2.unidata_version.split(".")[0] != version:
        sys.exit(f"unicodedata2 is of Unicode {unicodedata2.unidata_version}, wanted {version}")
    runs, last = [], None
    for code in range(0x110000):
        if (kind := class_of(code)) != last:
            runs.append(code << 8 | kind)
            last = kind
    path = Path(__file__).with_name(f"unicode{version}.bin")
    path.write_bytes(struct.pack(f"<{len(runs)}I", *runs))
    print(f"{path.name}: {len(runs)} runs, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
