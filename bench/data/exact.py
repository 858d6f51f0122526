"""Ids and places against the tokenizers library: hard documents, every code point, and whole folders of text. Exit 1 if any differ.

    python bench/data/exact.py --tokenizers FOLDER [--text FOLDER ...] [--every N] [--tokenizer NAME ...] [--unicode 16 | 17]

FOLDER of tokenizers: <name>/tokenizer.json. The reference is the `tokenizers` of this environment: up to 0.23 with Unicode 16, from 1.0
on with 17 (`--unicode 17`; an environment without rft takes its folder `python` as PYTHONPATH).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

NEEDS = "a folder of tokenizer.json files"
LONGEST = 20_000
"""Characters of a text that are compared at a time: the library needs memory for each."""


def documents(seed: int = 5, *, huge: bool = True) -> list[str]:
    """Hand-made and random documents that split patterns, merges and added tokens stumble over."""
    chance = random.Random(seed)
    made = [
        *["", "\n", " ", "a\r\n\r\n b\r\n \t\r\n", "a\u00a0b \u2028c\u2029 \u0085 \u200b \ufeff x\u3000y"],
        "I'M they'LL we'Re 'S 's' don''t 'ſ 'Tis O'K O'\u212a I'ſt can't've x's's",
        "e\u0301a\u0308 \u1112\u1161\u11ab \u0915\u093c \u212b \ufb01 A\u030a\u0327",
        "".join(c + "".join(chr(0x300 + chance.randrange(112)) for _ in range(9)) for c in "hello world"),
        "👨‍👩‍👧‍👦👩🏽‍🚀🏴󠁧󠁢󠁥󠁮󠁧󠁿 🫨🇺🇳 ☎️1️⃣",
        "नमस्ते दुनिया السلام عليكم ไทยภาษา 안녕하세요 こんにちは世界 Привет, мир! שָׁלוֹם Καλημέρα ꙮ 𝕳𝖊𝖑𝖑𝖔 ①②③ ½ ٣٤٥ Ⅻ",
        "<|im_start|>user\nhi<|im_end|><|im_start|><|im_end|>x<|endoftext|>y <|begin_of_text|> <|im_sta <| <s> </s>",
        " <|im_end|>  <|im_end|>\n <|endoftext|>\t",
        "a\0b\0\0c\x01\x7f",
        "\ufeffHello",
        "helloWorldFOOBar XMLHttpRequest2 iPhone15ProMAX 漢字ABC漢字Abc ABC漢",
        "\U0010ffff\uffff\ufffd\ue000",
        "▁a ▁ b▁▁c",
    ]
    for width in range(1, 40):
        made.append("a" + " " * width + "b" + "\n" * width + " " * width + "\n" + "\t" * width + "c")
    words = [
        "the",
        "quick",
        "é",
        "世界",
        "123",
        "12345",
        "can't",
        "<|im_end|>",
        "_x",
        "::",
        "->",
        "😀",
        "ß",
        "I'LL",
        "  ",
        "\n\n",
        "\t",
        " ",
        "́",
    ]
    made += ["".join(chance.choice(words) for _ in range(60)) for _ in range(300)]
    ranges = ((32, 127), (0x80, 0x3000), (0x3000, 0xD800), (0x10000, 0x20000))
    made += ["".join(chr(chance.randrange(*chance.choice(ranges))) for _ in range(120)) for _ in range(200)]
    if huge:
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
        made += ["a" * 100_000, "Ab" * 30_000, "1234567890" * 2000, "!?.,;:-=_*#" * 2000, "=" * 20_000]
        made += ["".join(chance.choice(letters[26:52]) for _ in range(20_000)), " " * 20_000 + "x", "x" + " " * 20_000]
        made += ["".join(chance.choice(letters) for _ in range(50_000)), "\t" * 5000 + "\n" * 5000 + "  \n" * 3000]
        made += ["".join(chr(0x4E00 + chance.randrange(8000)) for _ in range(20_000)), "\r" * 3000 + "\r\n" * 3000]
        for number in range(30):
            run = chance.choice([" ", "x", "\n", "!", "9"]) * 3000
            made.append("some words here " * (400 + number * 37) + run + " and more text " * 2000)
    return made


def code_points(every: int = 1) -> Iterator[str]:
    """Code points, each in six contexts."""
    for code in range(0, 0x110000, every):
        if not 0xD800 <= code < 0xE000:
            c = chr(code)
            yield f"a{c}b {c} {c}1'{c}\n{c}{c}e"


def texts(folder: Path) -> Iterator[str]:
    """All text below a folder, in stretches."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for at in range(0, len(text), LONGEST):
            yield text[at : at + LONGEST]


def differing(path: Path, given: Iterator[str], *, unicode: int = 16, show: int = 5) -> tuple[int, int]:
    """(texts, those whose ids differ) for one tokenizer.json."""
    from tokenizers import Tokenizer

    from rft import _native

    ours, theirs = _native.Tokenizer(path.read_text(encoding="utf-8"), unicode), Tokenizer.from_file(str(path))
    if hasattr(theirs, "no_padding"):  # 1.0 has neither unless asked for
        theirs.no_truncation()
        theirs.no_padding()
    count = wrong = 0
    for text in given:
        count += 1
        if ours.encode(text).tolist() != list(theirs.encode(text, add_special_tokens=False).ids):
            wrong += 1
            if wrong <= show:
                print(f"  differs: {text[:80]!r}")
    return count, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", type=Path, required=True)
    parser.add_argument("--tokenizer", nargs="*", help="names in the folder; all by default")
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--every", type=int, default=1, help="every so many code points")
    parser.add_argument("--unicode", type=int, choices=(16, 17), default=16, help="tables of split patterns")
    parser.add_argument("--results", type=Path, help="taken and not used: the exit status says it")
    args = parser.parse_args()
    failed = 0
    for path in sorted(args.tokenizers.glob("*/tokenizer.json")):
        if args.tokenizer and path.parent.name not in args.tokenizer:
            continue
        for name, given in (
            ("hard documents", iter(documents())),
            ("code points", code_points(args.every)),
            *((str(folder), texts(folder)) for folder in args.text),
        ):
            count, wrong = differing(path, given, unicode=args.unicode)
            failed += wrong
            print(f"{path.parent.name}: {name}: {count} texts, {wrong} differ", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
