"""Loader: packed batches of 8192 tokens in random order, complete, against bare ids from Hugging Face datasets.

Ours: documents of openhermes' lengths from a prepared set, one pack a batch, with labels, positions and cu_seqlens, as
`rft.data.open` gives them. The peer: as many rows of 8192 int32 ids in an Arrow file, torch format, read one by one in random
order. CPU seconds of the whole process, its threads included, the files in the page cache; median of several passes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from _lengths import draw

from results import Results

SEQ_LEN = 8192
CASE = "loader/packed-8192"
VOCABULARY = 100_000  # ids of four bytes, as for most models of today


def tokenizer_files(folder: Path):
    """A letter a token, and a vocabulary as large as real ones: what is measured is reading, not the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from rft.config.model import ModelConfig
    from rft.models.tokenizer import load_tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    vocabulary |= {f"unused {number}": number for number in range(len(alphabet), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(ModelConfig(path=str(folder)))


def prepared_set(folder: Path, tokens: int):
    from rft.config.data import DataConfig, SourceConfig
    from rft.data.prepare import prepare

    lengths, _ = draw("openhermes", tokens // 300)
    letters = np.random.default_rng(1).integers(97, 123, int(lengths.sum(dtype=np.int64)), dtype=np.uint8)
    letters[::5] = 32
    path, at = folder / "rows.jsonl", 0
    with open(path, "w", encoding="ascii") as file:
        for length in lengths.tolist():
            file.write('{"text": "' + letters[at : at + length - 1].tobytes().decode() + '"}\n')
            at += length
    data = DataConfig(train=[SourceConfig(path=str(path), format="text")], store=str(folder / "sets"))
    return prepare(data, tokenizer_files(folder / "tokenizer")).train


def ours(path: str, arrays: str) -> tuple[float, int]:
    """CPU seconds and real tokens of an epoch."""
    import rft.data

    opened = rft.data.open(path, seq_len=SEQ_LEN, pad_id=0, arrays=arrays)
    opened.batches_in_epoch(0)  # the plan is made once an epoch; its time is in data/pack
    tokens, start = 0, time.process_time()
    for batch in opened.epoch(0):
        assert batch.labels.shape[1] == SEQ_LEN
        tokens += batch.num_tokens
    return time.process_time() - start, tokens


def arrow_rows(folder: Path, rows: int):
    import datasets

    datasets.disable_progress_bars()
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (rows, SEQ_LEN), dtype=np.int32)
    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))})
    datasets.Dataset.from_dict({"input_ids": list(ids)}, features=features).save_to_disk(str(folder / "arrow"))
    return datasets.load_from_disk(str(folder / "arrow")).with_format("torch")


def peer(rows) -> tuple[float, int]:
    order = np.random.default_rng(2).permutation(len(rows)).tolist()
    tokens, start = 0, time.process_time()
    for row in order:
        tokens += rows[row]["input_ids"].numel()
    return time.process_time() - start, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path)
    parser.add_argument(
        "--tokens", type=int, default=64_000_000, help="size of the set; needs 25 bytes of disk a token"
    )
    parser.add_argument("--folder", type=Path, help="where the files go for the while (default: the system's)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    results = Results(args.results, versions={"datasets": version("datasets")})
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        store = prepared_set(folder, args.tokens)
        rows = arrow_rows(folder, store.num_tokens // SEQ_LEN)
        rates: dict[str, list[float]] = {"rft": [], "rft-numpy": [], "datasets-torch": []}
        for repeat in range(args.repeats + 1):  # in turn, so that a busy neighbour slows all of them
            measured = {
                "rft": ours(store.path, "torch"),
                "rft-numpy": ours(store.path, "numpy"),
                "datasets-torch": peer(rows),
            }
            for system, (seconds, tokens) in measured.items():
                if repeat:  # the first pass reads the files in
                    rates[system].append(tokens / seconds / 1e6)
        for system, values in rates.items():
            results.add(CASE, system, "mtok_per_second", values)


if __name__ == "__main__":
    main()
