"""Formats beside chats, rows that must not be trained on silently, and what is told of rows."""

from __future__ import annotations

import json

import pytest

from rft.config.data import DataConfig, SourceConfig
from rft.data.prepare import prepare, remarks
from rft.errors import DataError, RftError
from rft.visible import visible, visible_line
from support.data import (
    BOS,
    CHATML,
    CHATML_TAGGED,
    STOP,
    chat,
    prepare_rows,
    some_chats,
    text_of,
    tiny_files,
    trained_texts,
    write_rows,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_files(tmp_path_factory.mktemp("tokenizer"))


# ---- segments and tokens


def test_segments_are_trained_where_labelled_and_their_control_tokens_are_meant(tmp_path, files):
    row = {
        "segments": [
            {"text": "<|im_start|>user\n2+2=", "label": False},
            {"text": "4<|im_end|>", "label": True},
            {"text": "\n", "label": False},
            {"text": "done", "train": True},
        ]
    }
    made = prepare_rows(tmp_path, [row], files)
    assert trained_texts(made.train, 0, files) == [f"4{STOP}", "done"]
    ids, _, _ = made.train.document(0)
    assert ((ids == 1).sum(), (ids == 2).sum()) == (1, 1)
    assert text_of(made.train, 0, files) == f"<|im_start|>user\n2+2=4{STOP}\ndone"


def test_segments_begin_with_bos_where_the_tokenizer_adds_one(tmp_path):
    files = tiny_files(tmp_path / "tokenizer", bos=True)
    for name, text in (("without", "ab"), ("with", f"{BOS}ab")):
        row = {"segments": [{"text": text, "label": True}]}
        (tmp_path / name).mkdir()
        ids = prepare_rows(tmp_path / name, [row], files).train.document(0)[0]
        assert (ids == files.bos_id).sum() == 1
        assert ids[0] == files.bos_id


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"input_ids": [10, 11, 12]}, [True, True, True]),
        ({"input_ids": [10, 11, 12], "labels": [-100, 11, 12]}, [False, True, True]),
        ({"input_ids": [10, 11, 12], "loss_mask": [1, 0, 1]}, [True, False, True]),
        ({"input_ids": [10, 11, 12], "assistant_masks": [False, True, True]}, [False, True, True]),
        ({"input_ids": [10, 11, 12, 0, 0], "labels": [-100, 11, 12, -100, -100], "attention_mask": [1, 1, 1, 0, 0]}, [False, True, True]),
    ],
    ids=["all", "labels", "loss mask", "assistant mask", "filled up"],
)  # fmt: skip
def test_tokens_are_taken_as_they_are(tmp_path, files, row, trained):
    ids, bits, _ = prepare_rows(tmp_path, [row], files).train.document(0)
    assert (ids.tolist(), bits.tolist()) == ([10, 11, 12], trained)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [10, 11, 12], "labels": [11, 12, -100]}, r"neither -100 nor the token at its place"),
        ({"input_ids": [10, 11, 12], "labels": [-100, 11]}, r"it has 2 entries, and input_ids has 3"),
        ({"input_ids": [10, -1], "labels": [-100, -1]}, r"-1 is no token id"),
        ({"input_ids": [10, 1.5]}, r"is no whole number"),
        ({"input_ids": [10, 99_999_999]}, r"99999999"),
        ({"segments": [{"text": "a", "label": 1}]}, "segments|format"),
        ({"segments": [{"text": "a", "label": True, "train": False}]}, r'"label": true and "train": false'),
    ],
    ids=[
        "shifted",
        "short",
        "negative",
        "fraction",
        "beyond the vocabulary",
        "label is no bool",
        "label against train",
    ],
)
def test_tokens_and_segments_that_are_wrong_are_refused_with_their_line(tmp_path, files, row, message):
    format = "tokens" if "input_ids" in row else "segments"
    with pytest.raises(RftError, match=message) as raised:
        prepare_rows(tmp_path, [row], files, format=format)
    assert "rows.jsonl:1" in raised.value.where


def test_ids_beyond_the_vocabulary_are_a_fault_of_the_row_and_skipped_as_one(tmp_path, files):
    rows = [{"input_ids": [10, 99_999_999]}, {"input_ids": [10, 11]}]
    with pytest.raises(DataError, match=r"it holds the id 99999999, and the model has \d+"):
        prepare_rows(tmp_path, rows, files, format="tokens")
    made = prepare_rows(tmp_path, rows, files, format="tokens", on_error="skip")
    assert (made.train.num_documents, made.report["train"]["dropped"]) == (1, {"bad row": 1})


def test_numbers_that_json_does_not_have_matter_only_in_fields_that_are_used(tmp_path, files):
    lines = ['{"text": "one, NaN", "score": NaN, "more": [{"a": -Infinity}, "NaN"], "z": Infinity}', '{"text": "two"}']
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = DataConfig(train=[SourceConfig(path=str(path))], store=str(tmp_path / "sets"))
    made = prepare(data, files)
    assert made.train.num_documents == 2
    assert made.report["train"]["unused_fields"] == {"more": 1}
    path.write_text('{"text": "one", "loss_weight": NaN}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"NaN is in it") as raised:
        prepare(data, files)
    assert raised.value.where.endswith('rows.jsonl:1, field "loss_weight"')


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        ({"text": None}, "text", "it is null"),
        ({"text": "a", "loss_weight": 1e-300}, "loss_weight", "is too small"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]}, "messages[1].weight", "neither 0"),
        ({"messages": [{"role": "assistant", "content": "b", "weight": 0, "train": True}]}, "messages[0]", '"weight": 0'),
    ],
    ids=["null", "tiny weight", "weight of half", "weight against train"],
)  # fmt: skip
def test_values_that_mean_nothing_are_told_by_their_field(tmp_path, files, row, field, problem):
    format = "messages" if "messages" in row else "text"
    with pytest.raises(DataError) as raised:
        prepare_rows(tmp_path, [row], files, format=format)
    assert raised.value.where.endswith(f'rows.jsonl:1, field "{field}"')
    assert problem in raised.value.problem


def test_weight_0_of_openai_leaves_a_turn_out(tmp_path, files):
    turns = [("a", 0), ("b", 1), ("c", None)]
    messages = [
        message
        for text, weight in turns
        for message in (
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": text} | ({} if weight is None else {"weight": weight}),
        )
    ]
    made = prepare_rows(tmp_path, [{"messages": messages}], files)
    assert [text[0] for text in trained_texts(made.train, 0, files)] == ["b", "c"]


# ---- rows for other losses


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "a"}]},
        {"messages": chat("a", "b")["messages"], "chosen": "x", "rejected": "y"},
        {"prompt": "a", "completion": "b", "label": False},
        {"prompt": "a", "completion": "b", "label": 1},
        {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]},
    ],
    ids=["pairs", "pairs of chats", "pairs beside a chat", "kto", "kto in numbers", "steps"],
)
def test_rows_of_other_losses_are_not_trained_on_as_if_all_were_right(tmp_path, files, row):
    with pytest.raises(DataError, match="for a loss that this version does not have") as raised:
        prepare_rows(tmp_path, [row], files)
    assert "format" in raised.value.do or "convert" in raised.value.do


def test_a_row_of_another_loss_among_others_is_bad_and_counted(tmp_path, files):
    chats = some_chats(5)
    pair = {**chat("a", "b"), "chosen": "x", "rejected": "y"}
    with pytest.raises(DataError, match="preference pairs") as raised:
        prepare_rows(tmp_path, [*chats, pair], files)
    assert "rows.jsonl:6" in raised.value.where
    made = prepare_rows(tmp_path, [*chats, pair], files, on_error="skip")
    assert made.report["train"]["dropped"] == {"bad row": 1}


def test_rows_of_other_losses_can_be_asked_for_and_what_is_ignored_is_told(tmp_path, files):
    rows = [{"prompt": "a", "completion": "b", "label": False}, {"prompt": "c", "completion": "d", "label": True}]
    made = prepare_rows(tmp_path, rows, files, format="prompt_completion")
    assert made.train.num_documents == 2
    assert any("not used: label (2 rows)" in text for text in remarks(made.report))


# ---- what is told


def test_content_that_is_null_is_an_error_unless_tools_are_called(tmp_path, files):
    row = chat("a", None)
    with pytest.raises(DataError, match="it is null, and the assistant message has no tool_calls") as raised:
        prepare_rows(tmp_path, [row], files)
    assert "messages[1].content" in raised.value.where
    made = prepare_rows(tmp_path / "skip", [row, chat("a", "b")], files, on_error="skip")
    assert made.report["train"]["dropped"] == {"bad row": 1}
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    row["messages"][1]["tool_calls"] = [call]
    template = CHATML.replace("message['content']", "(message['content'] or message.tool_calls[0].function.name)", 1)
    with_calls = tiny_files(tmp_path / "calls", template=template)
    assert trained_texts(prepare_rows(tmp_path / "c", [row], with_calls).train, 0, with_calls) == [f"look{STOP}"]


def test_answers_that_are_all_empty_are_dropped_and_counted(tmp_path, files):
    made = prepare_rows(tmp_path, [chat("a", ""), chat("a", "  \n"), chat("a", "", "b", "c")], files)
    assert made.report["train"]["dropped"] == {"empty": 2}


def test_fields_without_a_value_are_none(tmp_path, files):
    row = chat("Hi", "Hello")
    for message in row["messages"]:
        message.update(tool_calls=None, name=None, reasoning_content=None)
    row.update(tools=None, source=None)
    made, plain = prepare_rows(tmp_path / "a", [row], files), prepare_rows(tmp_path / "b", [chat("Hi", "Hello")], files)
    assert made.train.document(0)[0].tolist() == plain.train.document(0)[0].tolist()
    assert remarks(made.report) == []


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED], ids=["stock", "tagged"])
def test_tools_that_the_template_does_not_write_are_told(tmp_path, template):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    rows = [
        {**chat("Hi", "Hello"), "tools": [tool]},
        {**chat("Hi", "Hello"), "tools": json.dumps([tool])},
        chat("a", "b"),
    ]
    files = tiny_files(tmp_path / "tokenizer", template=template)
    made = prepare_rows(tmp_path, rows, files)
    assert any(text == "tools that the template does not write: in 2 rows" for text in remarks(made.report))
    writes = tiny_files(tmp_path / "other", template="{% if tools %}{{ tools | tojson }}{% endif %}" + template)
    again = prepare_rows(tmp_path / "again", rows, writes)
    assert remarks(again.report) == []
    assert "look_up" in text_of(again.train, 0, writes)


def test_chats_in_which_nothing_ends_a_turn_are_told(tmp_path):
    template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    files = tiny_files(tmp_path / "tokenizer", template=template)
    rows = [chat("Hi", "Hello"), {**chat("a", "b"), "tools": []}, chat("c", "d")]
    made = prepare_rows(tmp_path, rows, files)
    assert any(text.startswith("in 3 chats no control token ends what is trained on") for text in remarks(made.report))
    asked_for = prepare_rows(tmp_path / "masked", rows, files, end_of_turn="mask")
    assert asked_for.report["train"]["unended_rows"] == 0
    ended = prepare_rows(tmp_path / "ended", rows, tiny_files(tmp_path / "other", template=CHATML))
    assert ended.report["train"]["unended_rows"] == 0


def test_unused_fields_are_counted_by_name(tmp_path, files):
    rows = [{**chat("a", "b"), "id": 1, "source": {"deep": [1, 2]}}, {**chat("c", "d"), "id": 2}, chat("e", "f")]
    made = prepare_rows(tmp_path, rows, files)
    assert made.report["train"]["unused_fields"] == {"id": 2, "source": 1}
    assert remarks(made.report) == ["fields of the rows that are not used: id (2 rows), source (1 row)"]


def test_roles_that_no_row_has_are_told(tmp_path, files, capsys):
    prepare_rows(tmp_path, [chat("a", "b")], files, train_on=["assistant", "tool"])
    said = capsys.readouterr()
    assert "data.train_on names tool, and no row has such a message" in said.out + said.err


def test_each_data_set_has_its_own_words_for_roles(tmp_path, files):
    row = {"messages": [{"role": "a", "content": "from a"}, {"role": "b", "content": "from b"}]}
    words = [{"a": "user", "b": "assistant"}, {"a": "assistant", "b": "user"}]
    sets = [SourceConfig(path=str(write_rows(tmp_path / f"{n}.jsonl", [row])), roles=words[n % 2]) for n in range(6)]
    made = prepare(DataConfig(train=sets, store=str(tmp_path / "sets")), files)
    assert [trained_texts(made.train, n, files) for n in range(6)] == [[f"from b{STOP}"], [f"from a{STOP}"]] * 3
    sets = [*sets, SourceConfig(path=str(write_rows(tmp_path / "plain.jsonl", [row])))]
    with pytest.raises(DataError, match=r"plain\.jsonl:1"):
        prepare(DataConfig(train=sets, store=str(tmp_path / "sets")), files)


@pytest.mark.parametrize(
    ("fraction", "words"), [(1e-9, "holds out none of the 5 rows"), (1 - 1e-9, "holds out all of the 5 rows")]
)
def test_a_split_without_rows_on_a_side_blames_the_fraction(tmp_path, files, fraction, words):
    with pytest.raises(DataError, match=words) as raised:
        prepare_rows(tmp_path, some_chats(5), files, eval_fraction=fraction)
    assert "eval_fraction" in raised.value.do


# ---- the end of a turn

OPEN_ENDED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "end_of_turn", "spans"),
    [
        (CHATML, "auto", [f"b{STOP}", f"d{STOP}"]),
        (CHATML, "train", [f"b{STOP}", f"d{STOP}"]),
        (CHATML, "mask", ["b", "d"]),
        (CHATML_TAGGED, "auto", [f"b{STOP}", f"d{STOP}"]),
        (CHATML_TAGGED, "mask", ["b", "d"]),
        (OPEN_ENDED, "auto", ["b", "d"]),
        (OPEN_ENDED, "train", [f"b{STOP}", f"d{STOP}"]),
        (OPEN_ENDED, "mask", ["b", "d"]),
    ],
    ids=lambda value: value if value in ("auto", "train", "mask") else "",
)
def test_the_token_that_ends_a_turn_is_trained_as_asked(tmp_path, template, end_of_turn, spans):
    files = tiny_files(tmp_path / "tokenizer", template=template)
    made = prepare_rows(tmp_path, [chat("a", "b", "c", "d")], files, end_of_turn=end_of_turn)
    assert trained_texts(made.train, 0, files) == spans


def test_the_end_token_of_a_completion_is_masked_as_asked(tmp_path, files):
    row = {"prompt": "2+2=", "completion": "4"}
    assert trained_texts(prepare_rows(tmp_path, [row], files, end_of_turn="mask").train, 0, files) == ["4"]


# ---- what a terminal would obey


def test_text_is_shown_without_what_a_terminal_obeys_or_what_reorders_it():
    hostile = "a\x1b[31mred\x07\r\x9b2J \u202eevil\u2066 \u200bx\ud800 \ufeff \U000e0041"
    shown = visible(hostile + "\n\té 日本 😀 \u200d")
    assert all(c.isprintable() or c in "\n\t\u200d" for c in shown)
    assert "\\x1b[31mred\\x07\\x0d\\x9b2J \\u202eevil\\u2066" in shown
    assert shown.endswith("\n\té 日本 😀 \u200d")
    assert visible_line("a\nb\tc") == "a\\nb\\tc"
