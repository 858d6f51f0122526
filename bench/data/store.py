"""Bytes a token of a prepared set on disk: ids, masks, offsets, origins, checksums and manifest, over chats.

    python bench/data/store.py --qwen3 FOLDER --smollm2 FOLDER

Every byte under the set's folder counts. Qwen3's vocabulary needs 4 bytes an id, SmolLM2's (49,152) needs 2.
"""

from __future__ import annotations

NEEDS = "--qwen3 and --smollm2: folders with tokenizer.json"

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _chats import arguments, request, write_chats

from results import Results


def main() -> int:
    """A result line for each tokenizer given."""
    parser = arguments(__doc__)
    parser.add_argument("--qwen3", type=Path)
    parser.add_argument("--smollm2", type=Path)
    args = parser.parse_args()
    from rft import _native

    results = Results(args.results)
    with tempfile.TemporaryDirectory() as name:
        chats = Path(name) / "chats.jsonl"
        write_chats(chats, args.megabytes, args.chats)
        for tokenizer in ("qwen3", "smollm2"):
            if getattr(args, tokenizer) is None:
                continue
            folder = Path(name) / tokenizer
            counts = json.loads(_native.prepare(json.dumps(request(chats, getattr(args, tokenizer))), str(folder)))
            size = sum(file.stat().st_size for file in folder.iterdir())
            results.add(f"store/{tokenizer}", "rft", "bytes_per_token", size / counts["tokens"])
            results.add(f"store/{tokenizer}", "rft", "tokens_per_document", counts["tokens"] / counts["documents"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
