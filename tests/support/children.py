"""What child processes of tests run: spawned ones find it by its name."""

from __future__ import annotations

from rft import _native

TEXTS = [f"The capital of France is number {n}; 日本 {n * n}" for n in range(10)]


def encode(json_text):
    tokenizer = _native.Tokenizer(json_text)
    return [tokenizer.encode(text).tolist() for text in TEXTS]


def encode_into(queue, json_text):
    queue.put(encode(json_text))


def read(path):
    from rft.data.loader import Loader  # not above: it would cost spawned children that only encode the import of torch

    loader = Loader(_native.Store(path), seq_len=128, packing="stream", overlong="split", seed=0, pad_id=3)
    return [batch.input_ids[0].tolist() for step in loader.steps(0, 2) for batch in step]


def read_into(queue, path):
    queue.put(read(path))


def prepare_into(queue, folder):
    from support.data import prepare_rows, some_chats

    made = prepare_rows(folder, some_chats(50, seed=5))
    queue.put(sum(made.train.lengths().tolist()))
