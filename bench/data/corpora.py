"""Text corpora for tokenizer benchmarks: english, code, multilingual, chat, json (20 to 80 MB each, no repeats).

    python bench/data/corpora.py OUT --debian ROOT --python FOLDER [FOLDER ...]

ROOT: a folder into which the Debian packages dict-gcide, linux-doc-6.1 and manpages-{de,fr,ru,ja,zh} were unpacked
(`apt-get download`, `dpkg -x`). FOLDER: Python installs or environments, for their sources and JSON files. Each corpus
becomes OUT/<name>.txt: UTF-8 documents with a NUL between them, shuffled by a fixed seed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

NEEDS = "Debian packages and Python installs as sources of text (see its head)"
LARGEST = 80_000_000
LANGUAGES = ("de", "fr", "ru", "ja", "zh_CN", "zh_TW")
chance = random.Random(0)


def read(path: Path) -> str:
    data = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    return data.decode("utf-8")


def readable(paths: Iterable[Path]) -> Iterator[str]:
    """The texts of files that are UTF-8."""
    for path in sorted(paths):
        try:
            yield read(path)
        except (OSError, EOFError, UnicodeDecodeError):
            continue


def write(folder: Path, name: str, documents: list[str], most: int = LARGEST) -> None:
    chance.shuffle(documents)
    seen, kept, size = set(), [], 0
    for document in documents:
        data = document.replace("\0", "").encode()
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        if len(data) < 64 or digest in seen:
            continue
        seen.add(digest)
        kept.append(data)
        size += len(data)
        if size > most:
            break
    (folder / f"{name}.txt").write_bytes(b"\0".join(kept))
    print(f"{name}: {len(kept)} documents, {size / 1e6:.1f} MB")


def unwrapped(text: str) -> str:
    """Paragraphs on one line each, as prose on the web is."""
    return "\n\n".join(re.sub(r"\s*\n\s*", " ", part).strip() for part in re.split(r"\n\s*\n", text))


def cut(text: str, low: int = 500, high: int = 8000) -> list[str]:
    """Documents of about low to high characters, cut between paragraphs."""
    documents, current, size, wanted = [], [], 0, chance.randint(low, high)
    for part in text.split("\n\n"):
        current.append(part)
        size += len(part)
        if size >= wanted:
            documents.append("\n\n".join(current))
            current, size, wanted = [], 0, chance.randint(low, high)
    return [*documents, "\n\n".join(current)]


def chat(document: str) -> str:
    turns = document.split("\n\n")[:8]
    roles = ("user", "assistant")
    said = "".join(f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns))
    return f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--debian", type=Path, required=True)
    parser.add_argument("--python", type=Path, nargs="+", required=True)
    parser.add_argument("--results", type=Path, help="taken and not used: this makes inputs, not figures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    share = args.debian / "usr/share"
    docs = share / "doc"

    english = cut(unwrapped(read(share / "dictd/gcide.dict.dz")))
    prose = [*docs.glob("linux-doc-*/html/_sources/**/*.txt"), *docs.glob("linux-doc-*/Documentation/**/*.gz")]
    for text in readable(path for path in prose if "translations" not in str(path)):
        english += [] if "<html" in text[:500].lower() else cut(unwrapped(text))
    write(args.out, "english", english)
    write(args.out, "chat", [chat(document) for document in english[:40_000] if len(document) > 200], LARGEST // 2)

    other = []
    for language in LANGUAGES:
        for text in readable((share / "man").glob(f"{language}*/**/*.gz")):
            other += cut(re.sub(r"(?m)^\.\\\".*$|^'\\\".*$|\\f[BIRP]|^\.[A-Za-z]+ ?", "", text))
    for text in readable(docs.glob("linux-doc-*/html/_sources/translations/**/*.txt")):
        other += cut(text)
    write(args.out, "multilingual", other)

    sources = (path for folder in args.python for path in folder.glob("**/lib/python*/**/*.py"))
    write(args.out, "code", [text for text in readable(sources) if len(text) < 400_000])
    objects = (path for folder in args.python for path in folder.glob("**/site-packages/**/*.json"))
    pieces = (text[at : at + 20_000] for text in readable(objects) for at in range(0, min(len(text), 400_000), 20_000))
    write(args.out, "json", list(pieces), 30_000_000)


if __name__ == "__main__":
    main()
