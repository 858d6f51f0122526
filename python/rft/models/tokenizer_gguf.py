"""The exact tokenizer of a GGUF file, from the vocabulary, scores or merges and the splitting rule that its header names.

A GGUF file names how text is cut before byte-pair merging (`tokenizer.ggml.pre`) instead of holding the rule. A wrong
rule gives plausible but different ids ("smollm" without cutting digits apart costs whole numbers), so a name that is
not known exactly is refused rather than approximated.
"""

from __future__ import annotations

from typing import Any

from rft.errors import ModelError
from rft.models.gguf_header import read_metadata as read_metadata

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+")

_SPLITS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
}
"""`pre` names whose rule is a list of regular expressions, before plain byte-level BPE."""

_DIGITS_THEN_GPT2 = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""Every digit is a piece of its own, then GPT-2's rule."""

_GPT2 = frozenset({"gpt-2", "gpt2", "phi-2", "mpt"})

_NFC = frozenset({"qwen2", "mpt"})
"""`pre` names whose tokenizers compose characters first."""

_IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""A piece that is a vocabulary entry is taken whole, whatever the merges say."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


def tokenizer_from_metadata(metadata: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """(`tokenizers.Tokenizer`, tokenizer_config keys) of a GGUF header. Raises ModelError for kinds not known exactly."""
    ggml = {key.removeprefix("tokenizer.ggml."): v for key, v in metadata.items() if key.startswith("tokenizer.ggml.")}
    kind, pieces = ggml.get("model"), ggml.get("tokens")
    if not isinstance(pieces, list) or not pieces:
        raise ModelError(
            where, "the GGUF file holds no vocabulary", do="give model.path a directory with tokenizer.json"
        )
    if kind == "gpt2":
        tokenizer = _byte_level(ggml, pieces, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(ggml, pieces, where)
    elif kind == "gemma4":
        tokenizer = _newline_split(ggml, pieces)
    else:
        raise ModelError(
            where,
            f"tokenizer kind {kind!r} of GGUF files is not supported",
            wanted="gpt2 (byte-level BPE), llama (SentencePiece BPE) or gemma4",
            do="use the model's own directory or hub id instead of the GGUF file",
        )
    _mark_added(tokenizer, pieces, ggml.get("token_type") or [])
    config = _config(metadata, ggml, pieces)
    _add_bos_eos(tokenizer, ggml, config, kind)
    return tokenizer, config


def _byte_level(ggml: dict[str, Any], pieces: list[str], where: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = ggml.get("pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in ggml.get("merges", [])]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    # fuse_unk and byte_fallback off: bytes that have no token are left out, as in the models' own tokenizer.json
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _IGNORE_MERGES))
    raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    steps: list[Any]
    if pre in _SPLITS:
        steps = [*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]), raw]
    elif pre in _DIGITS_THEN_GPT2:
        steps = [digits, gpt2]
    elif pre == "deepseek-coder":
        steps = [*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _DEEPSEEK_CODER), digits, raw]
    elif pre in _GPT2:
        steps = [gpt2]
    else:
        known = sorted({*_SPLITS, *_DIGITS_THEN_GPT2, *_GPT2, "deepseek-coder"})
        raise ModelError(
            where,
            f"tokenizer.ggml.pre = {pre!r}: how this vocabulary cuts text is not known exactly",
            wanted=", ".join(known),
            do="use the model's own directory or hub id (it holds tokenizer.json) instead of the GGUF file",
        )
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(ggml: dict[str, Any], pieces: list[str], where: str) -> Any:
    """SentencePiece BPE: of all neighbours the pair whose union has the best score is joined first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = ggml.get("scores")
    if not scores or len(scores) != len(pieces):
        raise ModelError(where, "the GGUF file's SentencePiece vocabulary has no scores")
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    ranked = []
    for whole, index in vocabulary.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((scores[index], cut, len(right), left, right))
    # Equal scores: longer left part first, the order of the merges in converted tokenizer.json files.
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    merges = [merge[3:] for merge in ranked]
    unknown = pieces[ggml.get("unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = ggml.get("add_space_prefix", True)
    to_marker = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_marker]) if prefix else to_marker
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _newline_split(ggml: dict[str, Any], pieces: list[str]) -> Any:
    """Gemma 4: merges over marked spaces, runs of newlines cut off first."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in ggml.get("merges", [])]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    unknown = pieces[ggml.get("unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _mark_added(tokenizer: Any, pieces: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    special = [AddedToken(pieces[i], special=True, normalized=False) for i, t in enumerate(types) if t == _CONTROL]
    plain = [AddedToken(pieces[i], special=False, normalized=False) for i, t in enumerate(types) if t == _USER_DEFINED]
    if special:
        tokenizer.add_special_tokens(special)
    if plain:
        tokenizer.add_tokens(plain)


def _config(metadata: dict[str, Any], ggml: dict[str, Any], pieces: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    context = next((v for key, v in metadata.items() if key.endswith(".context_length")), None)
    if context:
        config["model_max_length"] = context
    names = {
        "bos_token": "bos",
        "eos_token": "eos",
        "unk_token": "unknown",
        "pad_token": "padding",
        "mask_token": "mask",
    }
    for ours, theirs in names.items():
        index = ggml.get(f"{theirs}_token_id")
        if index is not None and 0 <= index < len(pieces):
            config[ours] = pieces[index]
    template = metadata.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


def _add_bos_eos(tokenizer: Any, ggml: dict[str, Any], config: dict[str, Any], kind: str) -> None:
    from tokenizers import processors

    # What files without the key mean: SentencePiece models and Llama 3 put the begin-of-text token first.
    adds_bos = ggml.get("add_bos_token", kind == "llama" or ggml.get("pre") in ("llama-bpe", "llama3", "llama-v3"))
    head = [config["bos_token"]] if adds_bos and "bos_token" in config else []
    tail = [config["eos_token"]] if ggml.get("add_eos_token", False) and "eos_token" in config else []
    if head or tail:
        one, two = [*head, "$A", *tail], [*head, "$B", *tail]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(one),
            pair=" ".join(one + two),
            special_tokens=[(text, tokenizer.token_to_id(text)) for text in {*head, *tail}],
        )
