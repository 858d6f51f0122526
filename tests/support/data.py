"""Small real tokenizers and data files for tests: a byte-level BPE with chat control tokens, trained here in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Template C of bugs.md, as many models ship it: no generation tags."""

CHATML_TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same text with the assistant's turns between generation tags."""

BOS, END, START, STOP, PAD = "<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"

_SENTENCES = (
    "The capital of France is Paris and the capital of Italy is Rome.",
    "A train leaves the station at nine and arrives at half past eleven.",
    "system user assistant tool: you are a brief and helpful assistant.",
    "How many apples are left when four of the twelve apples are eaten?",
    "def add(first, second):\n    return first + second\n",
    "The answer is 42, because 6 times 7 equals 42. Hello! Bye. See you soon.",
    "Water boils at one hundred degrees; the river runs to the sea, and the sea is wide.",
)


@cache
def _trained(vocab_size: int) -> str:
    """The tokenizer.json text, without a post-processor."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special: list[Any] = [AddedToken(text, special=True, normalized=False) for text in (END, START, STOP, PAD, BOS)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES * 4, trainer)
    return tokenizer.to_str()


def write_tiny_tokenizer(
    directory: str | Path,
    *,
    bos: bool = False,
    template: str | None = CHATML,
    eos: str = STOP,
    pad: str = PAD,
    vocab_size: int = 400,
) -> Path:
    """A Hugging Face tokenizer folder: byte-level BPE of `vocab_size` entries, ids 0..4 = END, START, STOP, PAD, BOS.

    bos: the post-processor puts BOS first, as Llama's does. template: chat template, or None for a base model.
    Files are added to `directory`, so it can be that of a tiny model. Returns the directory.
    """
    from tokenizers import Tokenizer, processors

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(_trained(vocab_size))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "model_input_names": ["input_ids", "attention_mask"],
        "eos_token": eos,
        "pad_token": pad,
    }
    if bos:
        config["bos_token"] = BOS
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    if template is not None:
        config["chat_template"] = template
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), "utf-8")
    return directory


def write_rows(path: str | Path, rows: Iterable[dict[str, Any]]) -> Path:
    """One JSON object a line. Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    """A `messages` row: user and assistant in turn, after an optional system message."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages += [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(turns)]
    return {"messages": messages}


def some_chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` different short chats of very different lengths, the same for the same seed."""
    import random

    words = " ".join(_SENTENCES).split()
    pick = random.Random(seed)
    rows = []
    for number in range(count):
        turns = 2 * pick.randint(1, 3)
        texts = [" ".join(pick.choices(words, k=pick.randint(1, 24))) for _ in range(turns)]
        rows.append(chat(f"{number}: {texts[0]}", *texts[1:]))
    return rows


def tiny_files(directory: str | Path, **options: Any) -> Any:
    """`TokenizerFiles` of a tiny tokenizer written into `directory`; options of `write_tiny_tokenizer`."""
    from rft.config.model import ModelConfig
    from rft.models.tokenizer import load_tokenizer

    return load_tokenizer(ModelConfig(path=str(write_tiny_tokenizer(directory, **options))))


def prepare_rows(folder: Path, rows: Iterable[dict[str, Any]], tokenizer: Any = None, **data: Any) -> Any:
    """`Prepared` for rows written to `folder`/rows.jsonl. tokenizer: TokenizerFiles (default: tiny). data: keys of [data]."""
    from rft.config.data import DataConfig, SourceConfig
    from rft.data.prepare import prepare

    source = {key: data.pop(key) for key in ("format", "fields", "roles") if key in data}
    path = write_rows(folder / "rows.jsonl", rows)
    config = DataConfig(train=[SourceConfig(path=str(path), **source)], store=str(folder / "sets"), **data)
    return prepare(config, tokenizer if tokenizer is not None else tiny_files(folder / "tokenizer"))


def prepare_code(folder: Path, tokenizer: Any, rows: str, path: str = "words.dat", **data: Any) -> Any:
    """`Prepared` for `folder`/`path` through a function of the user's, rows = "module:function"."""
    from rft.config.data import DataConfig, SourceConfig
    from rft.data.prepare import prepare

    source = SourceConfig(path=str(folder / path), rows=rows)
    return prepare(DataConfig(train=[source], allow_code=True, store=str(folder / "sets"), **data), tokenizer)


def documents_of_code(arguments: tuple[Path, Any, str]) -> int:
    """How many documents `prepare_code` makes. Here, so that a spawned process can import it."""
    return prepare_code(*arguments).train.num_documents


def trained_texts(store: Any, index: int, tokenizer: Any) -> list[str]:
    """Decoded text of each trained run of a document: "Hello<|im_end|>", ..."""
    native = _native_tokenizer(tokenizer.json)
    ids, trained, _ = store.document(index)
    runs: list[list[int]] = []
    for position, (token, flag) in enumerate(zip(ids, trained, strict=True)):
        if flag:
            if position == 0 or not trained[position - 1]:
                runs.append([])
            runs[-1].append(int(token))
    return [_decode(native, run) for run in runs]


def text_of(store: Any, index: int, tokenizer: Any) -> str:
    """Decoded text of a whole document, control tokens included."""
    return _decode(_native_tokenizer(tokenizer.json), store.document(index)[0])


@cache
def _native_tokenizer(json_text: str) -> Any:
    from rft import _native

    return _native.Tokenizer(json_text)


def _decode(native: Any, ids: Any) -> str:
    import numpy as np

    return native.decode(np.asarray(ids, dtype=np.uint32))
