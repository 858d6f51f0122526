"""Ids equal those of the tokenizers wheel, and control tokens that text spells stay text, for both kinds of vocabulary."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rft import _native

ODD = [
    "hello",
    " hello",
    "  hello",
    "\thello",
    "    return x",
    "",
    "\r\n\r\n \n",
    "é e\u0301 ﬁ Å \u200b\ufeff",
    "日本語 テスト 😀\u200d👩",
    "a" * 300,
    " " * 70,
    "0123456789 12,345.6",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "hello world, the river runs to the sea",
    "    return x + y\n",
    "how many apples are left of 12?",
    "<s im_end start>",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def sentence_piece(normaliser: bool) -> Tokenizer:
    """Llama-2's two forms: prepend and replace as normalisers, or the Metaspace pre-tokeniser."""
    letters = sorted(set("".join(CORPUS)) - {" "})
    vocab = {token: number for number, token in enumerate(SPECIAL)}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *letters, "▁h", "el", "▁hel"]:
        vocab.setdefault(token, len(vocab))
    merges = [("▁", "h"), ("e", "l"), ("▁h", "el")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if normaliser:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


@cache
def pair(name: str) -> tuple[Tokenizer, _native.Tokenizer]:
    theirs = byte_level() if name == "byte-level" else sentence_piece(name == "sentencepiece")
    return theirs, _native.Tokenizer(theirs.to_str())


NAMES = ["byte-level", "sentencepiece", "metaspace"]
KEEPING = NAMES[:2]
"""Metaspace itself takes a leading space for its own mark: ids are the model's, so " hello" equals "hello" there."""


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_those_of_the_wheel(name):
    theirs, ours = pair(name)
    pick = random.Random(1)
    texts = ODD + ["".join(pick.choices([*"ab  \n.é", "hel", *SPECIAL], k=20)) for _ in range(200)]
    for text in texts:
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids, repr(text)


@pytest.mark.parametrize("name", KEEPING)
def test_leading_white_space_is_kept(name):
    _, ours = pair(name)
    texts = ["hello", " hello", "  hello", "\thello", "    hello"]
    ids = [tuple(ours.encode(text)) for text in texts]
    assert len(set(ids)) == len(texts)
    assert [ours.decode(ours.encode(text)) for text in texts] == texts


@pytest.mark.parametrize("name", NAMES)
def test_ordinary_text_never_becomes_a_control_token(name):
    theirs, ours = pair(name)
    for text in ["</s>", "a<|im_end|>b", "x <s> ", "".join(SPECIAL)]:
        ids = ours.encode_text(text).tolist()
        assert not set(ids) & set(range(len(SPECIAL)))
        assert theirs.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", NAMES)
def test_tokens_for_display_spell_the_text(name):
    _, ours = pair(name)
    text = "hello world<|im_end|>x" if name == "byte-level" else "hello world x"
    shown = "".join(ours.tokens(ours.encode(text)))
    assert shown in (text, " " + text)
    assert ours.tokens(ours.encode("é"))[-1:] in (["é"], ["\ufffd"])


@pytest.mark.parametrize("name", NAMES)
def test_a_spelled_token_changes_no_other_token_of_a_chat(name, tmp_path):
    """Around a control token that the user spelled, ids are those of the text cut at the template's own tokens."""
    theirs, ours = pair(name)
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    spelled, plain = "hello </s> hel", "hello hel"
    source = tmp_path / "rows.jsonl"
    rows = [{"messages": [{"role": "assistant", "content": text}]} for text in (spelled, plain)]
    source.write_text("\n".join(json.dumps(row) for row in rows))
    spec = {
        "format_version": 2,
        "sources": [{"path": str(source)}],
        "tokenizer": {"json": theirs.to_str(), "eos_id": 2, "vocab_size": 1000},
        "template": template,
        "train_on": "all",
    }
    counts = json.loads(_native.prepare(json.dumps(spec), str(tmp_path / "set")))
    store = _native.Store(str(tmp_path / "set"))
    first, second = (store.document(index)[0].tolist() for index in (0, 1))
    assert second == theirs.encode(f"<|im_start|>{plain}<|im_end|>", add_special_tokens=False).ids
    assert counts["control_token_rows"] == 1
    assert (first[0], first[-1], sum(token < len(SPECIAL) for token in first)) == (3, 4, 2)
    shared = len(ours.encode_text("hello")) - (name == "metaspace")
    assert first[:shared] == second[:shared]
    assert theirs.decode(first[1:-1]).lstrip(" ") == spelled


def test_a_broken_tokenizer_is_an_error_of_its_kind():
    with pytest.raises(_native.NativeError) as caught:
        _native.Tokenizer("{}")
    assert (caught.value.kind, caught.value.where) == ("tokenizer", "tokenizer.json")
