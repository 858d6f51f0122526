"""Our tokenizer engine gives what the tokenizers wheel gives: flags of added tokens, hard text, every language, real files."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import time
import zipfile
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.conftest import SHARED
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rft import _native

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = [
    "the river runs",
    "to the sea",
    " and 12,345 apples",
    "don't",
    "Éa",
    "日本語",
    "\n\n",
    "<sep>",
    " <sep> ",
    "Привет",
]


@cache
def exact() -> ModuleType:
    """bench/data/exact.py, which makes the hard documents."""
    path = Path(__file__).parents[2] / "bench" / "data" / "exact.py"
    spec = importlib.util.spec_from_file_location("exact", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def trained(pattern: str = LLAMA3, nfc: bool = True) -> str:
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(WORDS * 20 + [" ".join(WORDS)], trainer)
    return tokenizer.to_str()


def sentence_piece(*, metaspace: str | None = None) -> str:
    """Llama 2's form: prepend and replace as normalisers, or Metaspace with a scheme."""
    letters = sorted(set("".join(WORDS)) - {" "})
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *letters]
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("▁", "▁"),
        ("▁▁", "▁▁"),
        ("r", "i"),
        ("▁", "ri"),
        ("e", "r"),
        ("日", "本"),
    ]
    tokens += [left + right for left, right in merges]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=metaspace, split=False)
    return tokenizer.to_str()


def assert_same(text_of_file: str, texts: list[str]) -> None:
    ours, theirs = _native.Tokenizer(text_of_file), Tokenizer.from_str(text_of_file)
    assert ours.engine == (True, "")
    for text in texts:
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).tolist() == wanted, text


def mixed(parts: list[str], count: int) -> list[str]:
    chance = random.Random(3)
    return ["".join(chance.choice(parts) for _ in range(chance.randrange(1, 14))) for _ in range(count)]


@pytest.mark.parametrize("kind", ["nfc", "plain", "prepend", "first", "always", "never"])
@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_added_tokens_with_each_flag_are_found_where_the_library_finds_them(kind: str, flag: str) -> None:
    if kind in ("nfc", "plain"):
        base = trained(nfc=kind == "nfc")
    else:
        base = sentence_piece(metaspace=None if kind == "prepend" else kind)
    tokenizer = Tokenizer.from_str(base)
    added = [AddedToken(text, special=False, **{"normalized": False, flag: True}) for text in ("<sep>", "né", "sea")]
    tokenizer.add_tokens([*added, AddedToken("<sep", normalized=False), AddedToken("▁the", normalized=True)])
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    parts = [
        "<sep>",
        "<sep",
        "<end>",
        "né",
        "ne\u0301",
        "sea",
        "the",
        "▁",
        " ",
        "  ",
        "\n",
        "x",
        "_",
        "日本",
        "é",
        "seaside",
    ]
    assert_same(tokenizer.to_str(), ["", *parts, *mixed(parts, 300)])


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_hard_documents_give_the_librarys_ids(kind: str) -> None:
    made = trained() if kind == "bytes" else sentence_piece()
    assert_same(made, exact().documents(huge=False))


def test_a_vocabulary_that_lacks_bytes_and_merges_out_of_order_give_the_librarys_ids() -> None:
    file = json.loads(trained())
    vocab, merges = file["model"]["vocab"], file["model"]["merges"]
    for letter in ("Ă", "Ć", "ñ"):  # 0x02, 0x06, 0xf1
        vocab.pop(letter)
    file["model"]["merges"] = merges = [merge for merge in merges if not {"Ă", "Ć", "ñ"} & set("".join(merge))]
    assert_same(json.dumps(file), ["a\x02b\x06\x06 the\x02 river", "\U00060000 \x02", *exact().documents(huge=False)])
    merges.reverse()  # parts come after what they are parts of
    assert_same(json.dumps(file), exact().documents(huge=False)[:200])
    file["model"]["ignore_merges"] = True
    assert_same(json.dumps(file), exact().documents(huge=False)[:200])


def test_what_the_engine_does_not_know_goes_to_the_library_with_a_reason() -> None:
    word_piece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    word_piece.pre_tokenizer = pre_tokenizers.Whitespace()
    ours = _native.Tokenizer(word_piece.to_str())
    assert ours.engine == (False, "its model is WordPiece")
    assert ours.encode("a b a").tolist() == [1, 0, 1]
    odd = _native.Tokenizer(trained(r"\p{L}+|\P{L}+"))
    assert not odd.engine[0]
    assert "split pattern" in odd.engine[1]
    text = "the river 12"
    theirs = Tokenizer.from_str(trained(r"\p{L}+|\P{L}+"))
    assert odd.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids


def test_time_grows_with_the_length_of_the_text_not_its_square() -> None:
    """BO-11: one document of a SentencePiece-type tokenizer, and pieces without an end."""
    for made, unit in ((sentence_piece(), "the cat sat on the mat. "), (trained(), "ab"), (trained(), "日本")):
        tokenizer = _native.Tokenizer(made)

        def seconds(size: int, unit: str = unit, tokenizer: _native.Tokenizer = tokenizer) -> float:
            text = unit * (size // len(unit.encode()))
            began = time.process_time()
            tokenizer.encode(text)
            return time.process_time() - began

        seconds(100_000)
        assert min(seconds(1_000_000) for _ in range(2)) <= 15 * max(seconds(100_000), 0.002)
        begin = (unit * 10_000)[:10_000]
        theirs = Tokenizer.from_str(made).encode(begin, add_special_tokens=False).ids
        assert tokenizer.encode(begin).tolist() == theirs


def test_a_leading_space_is_not_lost() -> None:
    """BO-14."""
    texts = ["the", " the", "  the", "\tthe", "    return the"]
    for made in (trained(), sentence_piece(), sentence_piece(metaspace="never")):
        tokenizer = _native.Tokenizer(made)
        ids = [tuple(tokenizer.encode(text)) for text in texts]
        assert len(set(ids)) == len(texts)
        assert_same(made, texts)


def test_a_file_gives_the_ids_of_its_documents_on_any_number_of_threads(tmp_path: Path) -> None:
    marked = Tokenizer.from_str(trained(nfc=False))
    marked.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|im_end|>x"])
    documents = ["", *exact().documents(huge=False), "", *["the river runs to the sea " * 3000] * 30]
    # New pieces and marks in turns, and rulers longer than any key.
    documents += [f"<|im_start|>u{n}\n{n * 7919}zq{'=' * (n % 300)}<|im_end|>\n<|im_end|>x" for n in range(400)]
    documents = [document.replace("\0", "") for document in documents]
    path = tmp_path / "text"
    path.write_bytes("\0".join(documents).encode())
    for made in (trained(), marked.to_str(), sentence_piece()):
        tokenizer = _native.Tokenizer(made)
        assert tokenizer.engine[0]
        wanted = [tokenizer.encode(document) for document in documents]
        for threads in (1, 2, 3):
            ids, ends = tokenizer.encode_file(path, 0, threads)
            assert ids.dtype == np.uint16
            assert len(ends) == len(documents)
            assert np.array_equal(ids, np.concatenate(wanted))
            assert np.array_equal(ends, np.cumsum([len(each) for each in wanted]))
        # The library on the documents that mix most.
        theirs = Tokenizer.from_str(made)
        for document, ids in zip(documents[-40:], wanted[-40:], strict=True):
            assert theirs.encode(document, add_special_tokens=False).ids == ids.tolist()
    broken = tmp_path / "broken"
    broken.write_bytes(b"good\0bad \xff\0good")
    with pytest.raises(_native.NativeError, match="document 1"):
        tokenizer.encode_file(broken, 0, 1)
    assert tokenizer.encode_file(path, 0, 1)[1][-1] == sum(len(each) for each in wanted)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises((TypeError, UnicodeEncodeError)):
        _native.Tokenizer(trained()).encode("a\ud800b")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
def test_every_language_of_udhr_gives_the_librarys_ids() -> None:
    texts = []
    for archive in (SHARED / "data" / "udhr").glob("*.zip"):
        with zipfile.ZipFile(archive) as files:
            names = [name for name in files.namelist() if not name.endswith("/")]
            texts += [files.read(name)[:1500].decode("utf-8", "ignore") for name in names]
    assert len(texts) > 300
    for made in (trained(), trained(nfc=False), sentence_piece()):
        assert_same(made, texts)


REAL = os.environ.get("RFT_TOKENIZERS", "")


@pytest.mark.skipif(not REAL, reason="RFT_TOKENIZERS names no folder of <name>/tokenizer.json")
def test_real_tokenizers_give_the_librarys_ids_on_hard_documents() -> None:
    found = sorted(Path(REAL).glob("*/tokenizer.json"))
    assert found
    for path in found:
        given = [*exact().documents(), *exact().code_points(997)]
        assert exact().differing(path, iter(given))[1] == 0, path
