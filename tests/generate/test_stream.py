"""Text that streams: whole characters, in order, up to the end of the turn."""

from __future__ import annotations

import torch

from rft.config.model import ModelConfig
from rft.generate.talk import TextStream
from rft.models.tokenizer import load_tokenizer
from support.data import END, STOP, write_tiny_tokenizer


def stream_of(tmp_path, text: str, *, end: str | None = STOP, after: str = ""):
    tokenizer = load_tokenizer(ModelConfig(path=str(write_tiny_tokenizer(tmp_path))))
    pieces: list[str] = []
    stream = TextStream(tokenizer, {tokenizer.token_id(STOP), tokenizer.token_id(END)}, pieces.append)
    stream.put(torch.tensor([[7, 8, 9]]))  # the prompt
    ids = tokenizer.hf().encode(text, add_special_tokens=False)
    ids += [tokenizer.token_id(end)] if end else []
    ids += tokenizer.hf().encode(after, add_special_tokens=False)
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.end()
    return stream, pieces


def test_pieces_add_up_to_the_text_and_characters_come_whole(tmp_path):
    text = "Zürich – 東京 🙂 fin"
    stream, pieces = stream_of(tmp_path, text)
    assert "".join(pieces) == text == stream.text
    assert len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.ended


def test_nothing_after_the_end_of_the_turn_is_shown(tmp_path):
    stream, pieces = stream_of(tmp_path, "Hello!", after=" and more")
    assert "".join(pieces) == "Hello!"
    assert stream.ended


def test_turn_that_was_cut_shows_what_there_is(tmp_path):
    stream, pieces = stream_of(tmp_path, "Hello wor", end=None)
    assert "".join(pieces) == "Hello wor"
    assert not stream.ended
