"""`rft inspect`: what is shown is what is in the set."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rft.data.inspect import Inspector, as_html, as_json, as_text, bars, dropped_lines
from rft.data.loader import Loader
from support.data import STOP, chat, prepare_rows, some_chats, tiny_files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_files(tmp_path_factory.mktemp("tokenizer"))


def look(tmp_path, files, rows, **options):
    made = prepare_rows(tmp_path, rows, files, **options)
    loader = Loader(made.train, seq_len=64, packing="stream", overlong="split", seed=0, pad_id=3)
    return made, Inspector(made.train, files, loader)


def test_sample_holds_every_token_with_its_mask_and_origin(tmp_path, files):
    made, inspector = look(tmp_path, files, [chat("Hi", "Hello", "Bye", "See you")])
    sample = inspector.document(0)
    ids, trained, _ = made.train.document(0)
    assert [index for token in sample.tokens for index in token.ids] == ids.tolist()
    assert "".join(token.text for token in sample.tokens if token.trained) == f"Hello{STOP}See you{STOP}"
    assert sample.trained == int(trained.sum())
    assert {token.text for token in sample.tokens if token.control} == {"<|im_start|>", STOP}
    assert sample.caption().startswith(f"{len(ids)} tokens, {sample.trained} trained in 2 spans, from ")
    assert sample.caption().endswith("rows.jsonl:1")


def test_characters_of_several_tokens_are_shown_whole(tmp_path, files):
    _, inspector = look(tmp_path, files, [chat("日本 😀", "é日")])
    sample = inspector.document(0)
    assert "日本 😀" in "".join(token.text for token in sample.tokens)
    assert "\ufffd" not in "".join(token.text for token in sample.tokens)
    assert any(len(token.ids) > 1 for token in sample.tokens)


def test_first_token_of_a_document_is_not_shown_as_trained(tmp_path, files):
    _, inspector = look(tmp_path, files, [{"text": "some text"}])
    assert [token.trained for token in inspector.document(0).tokens][:2] == [False, True]


def test_plain_text_shows_borders_of_trained_spans_and_newlines(tmp_path, files):
    _, inspector = look(tmp_path, files, [chat("Hi", "Hel\nlo")])
    text = as_text(inspector.document(0), colour=False).plain
    assert f"⟦Hel↵\nlo{STOP}⟧↵\n" in text


def test_pack_shows_its_pieces_in_order(tmp_path, files):
    _, inspector = look(tmp_path, files, some_chats(20))
    plan = inspector.loader.plan(0)
    for number in range(plan.num_packs):
        shown = inspector.pack(number)
        assert [(s.document, s.start, s.length) for s in shown] == plan.pack(number)
        assert sum(s.trained for s in shown) == int(plan.pack_labels()[number])


def test_histogram_counts_every_document_once(tmp_path, files):
    made, inspector = look(tmp_path, files, some_chats(50))
    histogram = inspector.histogram()
    lengths = np.asarray(made.train.lengths())
    for low, high, count in histogram:
        assert count == int(((lengths >= low) & (lengths < high)).sum())
    assert sum(count for *_, count in histogram) == 50
    assert len(bars(histogram)) == len(histogram)


def test_histogram_of_one_length_is_one_bar(tmp_path, files):
    _, inspector = look(tmp_path, files, [{"text": "same"}, {"text": "same"}])
    ((_, _, count),) = inspector.histogram()
    assert count == 2


def test_json_and_page_hold_the_samples_and_escape_their_text(tmp_path, files):
    rows = [chat("<b>&amp;</b>", "<script>alert(1)</script>"), {"messages": [{"role": "user", "content": "x"}]}]
    made, inspector = look(tmp_path, files, rows)
    report = made.report
    samples = inspector.spread(5)
    assert len(samples) == 1
    value = json.loads(as_json(report, samples, inspector.pack(0), inspector))
    assert [i for token in value["samples"][0]["tokens"] for i in token["ids"]] == made.train.document(0)[0].tolist()
    page = as_html("title", report, samples, inspector.pack(0), inspector)
    assert "<script>" not in page
    assert "http" not in page  # nothing is fetched
    assert "no trained token: 1" in page


def test_dropped_lines_name_the_first_places(tmp_path, files):
    made, _ = look(tmp_path, files, [chat("a", "b"), {"messages": []}, {"messages": 3}], on_error="skip")
    lines = dropped_lines(made.report["train"])
    assert sum(int(line.split(": ")[1].split(" ")[0]) for line in lines) == 2
    assert any("rows.jsonl:3" in line for line in lines)
