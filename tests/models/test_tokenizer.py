"""Tokenizers of directories: ids of the model's own tokenizer.json, special tokens, templates, added tokens, saving."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer

from rft.config.model import ModelConfig
from rft.errors import ModelError
from rft.models.tokenizer import load_tokenizer
from support.data import BOS, CHATML, END, PAD, STOP, tiny_files, write_tiny_tokenizer

TEXTS = ["The capital of France", " two  spaces", "naïve 日本 😀\r\n\t x", "12345", f"a{STOP}b"]


def load(path, **options):
    return load_tokenizer(ModelConfig(path=str(path), **options))


def test_facts_are_those_of_the_directory(tmp_path):
    files = tiny_files(tmp_path, bos=True)
    assert (files.special["eos_token"], files.eos_id) == (STOP, 2)
    assert (files.pad_id, files.bos_id, files.add_bos, files.vocab_size) == (3, 4, True, 400)
    assert files.template == CHATML
    assert files.control_tokens() == [END, "<|im_start|>", STOP, PAD, BOS]


def test_bos_is_not_added_where_the_post_processor_adds_none(tmp_path):
    files = tiny_files(tmp_path, bos=False)
    assert not files.add_bos
    assert files.bos_id is None


def test_config_key_add_bos_token_does_not_overrule_the_post_processor(tmp_path):
    write_tiny_tokenizer(tmp_path, bos=True)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "add_bos_token": False}))
    assert load(tmp_path).add_bos
    assert AutoTokenizer.from_pretrained(tmp_path)("a")["input_ids"][0] == 4  # transformers reads it the same way


def test_pad_falls_back_to_the_end_token(tmp_path):
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    path.write_text(json.dumps(config))
    assert load(tmp_path).pad_id == 2


def test_padding_and_truncation_baked_into_the_file_are_off(tmp_path):
    write_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_str(load(tmp_path).json).encode("The capital of France and of Italy").ids) > 7


@pytest.mark.parametrize("bos", [False, True])
def test_saved_tokenizer_gives_the_same_ids_and_template_in_transformers(tmp_path, bos):
    files = tiny_files(tmp_path / "model", bos=bos)
    files.save(tmp_path / "final", "{{ messages }}")
    ours, theirs = files.hf(), AutoTokenizer.from_pretrained(tmp_path / "final")
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours(text)["input_ids"] == Tokenizer.from_str(files.json).encode(text).ids
    assert theirs.chat_template == "{{ messages }}"
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.model_max_length) == (2, 3, 2048)
    again = load(tmp_path / "final")
    assert (again.json, again.special, again.add_bos, again.pad_id) == (
        files.json,
        files.special,
        files.add_bos,
        files.pad_id,
    )


def sentencepiece_style(directory, tokenizer_class):
    """A tokenizer.json in the prepend + replace form, as Llama 2 has, with a few merges."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁helo",
        "he",
        "▁he",
        "ll",
        "llo",
        "hello",
    ]
    vocabulary = {piece: index for index, piece in enumerate(words)}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("▁", "he"), ("he", "llo")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": tokenizer_class, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


SPACES = ["hello", " hello", "  hello", "\thello", "    hello = hello"]


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_leading_spaces_are_kept_and_ids_are_those_of_the_file_bo_14(tmp_path, tokenizer_class):
    original = sentencepiece_style(tmp_path / "model", tokenizer_class)
    files = load(tmp_path / "model")
    files.save(tmp_path / "final")
    ours, saved = Tokenizer.from_str(files.json), AutoTokenizer.from_pretrained(tmp_path / "final")
    lists = [original.encode(text, add_special_tokens=False).ids for text in SPACES]
    assert len({tuple(ids) for ids in lists}) == len(SPACES)
    for text, ids in zip(SPACES, lists, strict=True):
        assert ours.encode(text, add_special_tokens=False).ids == ids
        assert saved(text, add_special_tokens=False)["input_ids"] == ids
        assert ours.decode(ids) == text


def test_chat_template_file_comes_before_the_config_key(tmp_path):
    write_tiny_tokenizer(tmp_path, template="from the config")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load(tmp_path).template == "from the file"


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "plain"}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    assert load(tmp_path).template == "plain"


def test_special_token_that_is_an_ordinary_entry_is_recognised_in_text(tmp_path):
    write_tiny_tokenizer(tmp_path, eos="boils")
    path = tmp_path / "tokenizer.json"
    file = json.loads(path.read_text())
    vocabulary = file["model"]["vocab"]
    vocabulary["boils"] = len(vocabulary)
    path.write_text(json.dumps(file))
    files = load(tmp_path)
    assert "boils" in files.control_tokens()
    assert (
        Tokenizer.from_str(files.json).encode("Water boils").ids[-1]
        == files.eos_id
        == files.hf()("boils")["input_ids"][0]
    )


def test_added_tokens_get_new_ids_and_survive_saving(tmp_path):
    write_tiny_tokenizer(tmp_path / "model")
    files = load(tmp_path / "model", add_tokens=["<|tool|>", "mol", STOP])
    assert files.added_ids == (400, 401)  # STOP is there already
    assert files.vocab_size == 402
    assert "<|tool|>" in files.control_tokens()
    assert "mol" not in files.control_tokens()
    files.save(tmp_path / "final")
    assert AutoTokenizer.from_pretrained(tmp_path / "final")("<|tool|>mol")["input_ids"] == [400, 401]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda config: config.pop("eos_token"), "names no end token"),
        (lambda config: config.update(eos_token="<none>"), "'<none>' is not in the vocabulary"),
    ],
)
def test_tokenizer_without_an_end_token_is_refused(tmp_path, change, problem):
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=problem):
        load(tmp_path)


def test_end_token_comes_from_the_models_config_where_the_tokenizer_names_none(tmp_path):
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert load(tmp_path).special["eos_token"] == END


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", "{}", "cannot be read"),
        ("tokenizer.json", '{"model": ', "cannot be read"),
        ("tokenizer_config.json", "{", "not JSON"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, problem):
    write_tiny_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=problem) as raised:
        load(tmp_path)
    assert name in raised.value.where


def test_unknown_hub_id_offline_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="no directory, no GGUF file, and the hub gives no tokenizer") as raised:
        load("nobody/no-such-model-here")
    assert "model.path" in raised.value.do
