"""BO-12: nothing of ours hangs in a forked or spawned process after the parent has used it."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest

from rft.data.loader import Loader
from support.children import encode, encode_into, prepare_into, read, read_into
from support.data import prepare_rows, some_chats, tiny_files


def in_children(method, target, *arguments, count=2):
    """What `count` processes put, each within 30 s."""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    children = [context.Process(target=target, args=(queue, *arguments)) for _ in range(count)]
    for child in children:
        child.start()
    try:
        return [queue.get(timeout=30) for _ in children]
    finally:
        for child in children:
            child.join(10)
            if child.is_alive():
                child.kill()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_encoding_in_two_children_gives_the_parents_ids(tmp_path, method):
    files = tiny_files(tmp_path / "tokenizer")
    wanted = encode(files.json)
    assert in_children(method, encode_into, files.json) == [wanted, wanted]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_reading_in_children_works_while_the_parents_threads_run(tmp_path, method):
    made = prepare_rows(tmp_path, some_chats(40))
    loader = Loader(made.train, seq_len=128, packing="stream", overlong="split", seed=0, pad_id=3)
    running = loader.steps(0, 2)
    first = next(running)
    wanted = read(made.train.path)
    assert in_children(method, read_into, made.train.path, count=1) == [wanted]
    rest = [batch.input_ids[0].tolist() for step in [first, *running] for batch in step]
    assert rest == wanted


def test_preparing_in_a_forked_child_works_after_the_parent_has_prepared(tmp_path):
    wanted = int(np.sum(prepare_rows(tmp_path / "parent", some_chats(50, seed=5)).train.lengths()))
    assert in_children("fork", prepare_into, tmp_path / "child", count=1) == [wanted]


def test_iterator_carried_over_a_fork_says_so_instead_of_waiting(tmp_path):
    made = prepare_rows(tmp_path, some_chats(40))
    loader = Loader(made.train, seq_len=128, packing="stream", overlong="split", seed=0, pad_id=3)
    running = loader.steps(0, 1)
    next(running)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child():
        try:
            next(running)
            queue.put("went on")
        except RuntimeError as error:
            queue.put(str(error))

    process = context.Process(target=child)
    process.start()
    try:
        assert "over a fork" in queue.get(timeout=30)
    finally:
        process.join(10)
        process.kill()
    loader.close()


@pytest.mark.gpu
def test_encoding_in_forked_children_works_after_cuda_was_initialised(tmp_path):
    import torch

    torch.ones(1, device="cuda").add_(1).item()
    files = tiny_files(tmp_path / "tokenizer")
    wanted = encode(files.json)
    assert in_children("fork", encode_into, files.json) == [wanted, wanted]
