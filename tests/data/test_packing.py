"""Strategies, balance over ranks, fill-up, and the position that `rft.data.open` gives: BO-03 and BO-19 of bugs.md."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import rft.data
from rft import _native
from rft.data.loader import Loader
from rft.errors import DataError
from rft.training.step import train_step
from support.data import prepare_rows, some_chats, tiny_files
from support.stub_run import VOCABULARY, stub_run

PAD = 3
ALL = ["stream", "bfd", "even", "sequential", "none"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_files(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory, files):
    return prepare_rows(tmp_path_factory.mktemp("chats"), some_chats(120), files).train


def texts(folder, files, lengths):
    """A set of documents with exactly these numbers of tokens, in this order."""
    rows = [{"text": "".join("zq"[i % 2] for i in range(length - 1)) or "z"} for length in lengths]
    store = prepare_rows(folder, rows, files).train
    assert store.lengths().tolist() == list(lengths)
    return store


def loader(store, *, seq_len=256, packing="stream", **options):
    return Loader(store, seq_len=seq_len, packing=packing, overlong="split", seed=0, pad_id=PAD, **options)


def documents(batch):
    """Ids of every document that is no fill-up."""
    row, edges = batch.input_ids.shape[1] // len(batch.pack_tokens), batch.cu_seqlens.tolist()
    real = [(start, end) for start, end in pairwise(edges) if start % row < batch.pack_tokens[start // row]]
    return [tuple(batch.input_ids[0, start:end].tolist()) for start, end in real]


# ---- strategies


@pytest.mark.parametrize("packing", ALL)
def test_each_document_is_read_once_an_epoch_on_any_number_of_ranks(chats, packing):
    whole = Counter(tuple(chats.document(i)[0].tolist()) for i in range(chats.num_documents))
    for world_size, micro_batch in ((1, 1), (3, 2)):
        found = Counter()
        for rank in range(world_size):
            made = loader(
                chats, seq_len=512, packing=packing, rank=rank, world_size=world_size, micro_batch=micro_batch
            )
            for step in made.steps(0, 2 * world_size * micro_batch):
                for batch in step:
                    found.update(documents(batch))
        assert found == whole


def test_sequential_packs_hold_neighbours_in_the_order_of_the_file(tmp_path, files):
    lengths = [30, 40, 50, 20, 60, 10, 90, 5]
    store = texts(tmp_path, files, lengths)
    made = loader(store, seq_len=100, packing="sequential")
    for epoch in (0, 1):
        plan = made.plan(epoch)
        packs = [[lengths[document] for document, _, _ in plan.pack(pack)] for pack in range(plan.num_packs)]
        assert packs == [[30, 40], [50, 20], [60, 10], [90, 5]]


def test_even_packs_hold_about_as_many_documents_each(tmp_path, files):
    store = texts(tmp_path, files, [90 if n % 10 == 0 else 5 for n in range(1000)])

    def spread(packing):
        plan = loader(store, seq_len=1000, packing=packing).plan(0)
        return float(np.std([len(plan.pack(pack)) for pack in range(plan.num_packs)]))

    assert spread("even") < spread("bfd") / 2


@pytest.mark.parametrize("packing", ALL)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_held_out_set_of_any_size_is_packed_and_read_whole(tmp_path, files, packing, count):
    store = texts(tmp_path, files, [3 + n for n in range(count)])
    for world_size in (1, 2, 4):
        seen = 0
        for rank in range(world_size):
            made = loader(store, seq_len=64, packing=packing, rank=rank, world_size=world_size, shuffle=False)
            steps = list(made.steps(0, world_size))
            assert len(steps) == made.steps_in_epoch(0, world_size)
            seen += sum(batch.num_tokens for step in steps for batch in step)
        assert seen == store.num_tokens


def test_lengths_can_be_packed_without_a_set():
    lengths = np.array([5, 3, 8, 2], np.uint32)
    items, offsets = _native.pack(lengths, 8, "bfd", shuffle=False)
    packs = [items[a:b].tolist() for a, b in pairwise(offsets)]
    assert sorted(map(sorted, packs)) == [[0, 1], [2], [3]]
    for wrong in (9, 0):
        with pytest.raises(_native.NativeError) as raised:
            _native.pack(np.array([5, wrong], np.uint32), 8, "stream")
        assert (raised.value.where, raised.value.wanted) == ("lengths[1]", "1 to 8")


# ---- fill-up


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_fill_up_costs_no_more_attention_than_short_documents(tmp_path, files, micro_batch):
    store = texts(tmp_path, files, [8] * 5)
    (step,) = loader(store, seq_len=1000, micro_batch=micro_batch).steps(0, micro_batch)
    (batch,) = step
    assert batch.input_ids.shape == (1, 1000 * micro_batch)  # shapes are those of full packs
    assert batch.cu_seqlens[-1] == 1000 * micro_batch
    assert batch.max_length == max(batch.lengths) == 128
    assert sum(length**2 for length in batch.lengths) <= 5 * 8**2 + 128 * 1000 * micro_batch
    for start in batch.cu_seqlens[:-1].tolist():
        assert batch.position_ids[0, start] == 0
    assert (batch.labels[0, 40:] == -100).all()


# ---- balance


def costs(steps):
    return [[sum(length**2 for length in batch.lengths) for batch in step] for step in steps]


def all_ranks(store, world_size, packs, **options):
    return [
        list(loader(store, rank=rank, world_size=world_size, **options).steps(0, packs)) for rank in range(world_size)
    ]


def test_ranks_get_equally_many_packs_and_about_equal_attention(tmp_path, files):
    pick = np.random.default_rng(0)
    store = texts(tmp_path, files, np.clip(pick.lognormal(4, 0.7, 1000), 2, 500).astype(int).tolist())

    def straggler(balance):
        ranks = [costs(steps) for steps in all_ranks(store, 4, 32, seq_len=512, balance=balance)]
        assert len({tuple(map(len, steps)) for steps in ranks}) == 1
        whole = [[sum(step) for step in steps[:-1]] for steps in ranks]
        return float(np.mean(np.max(whole, 0) / np.mean(whole, 0)))

    assert straggler(balance=True) < 1.02
    assert straggler(balance=False) > 1.1


def test_micro_batches_of_one_number_cost_about_the_same_on_every_rank(tmp_path, files):
    pick = np.random.default_rng(0)
    store = texts(tmp_path, files, np.clip(pick.lognormal(4, 0.7, 1000), 2, 500).astype(int).tolist())

    def spread(balance):
        ranks = np.array([costs(steps)[0] for steps in all_ranks(store, 4, 32, seq_len=512, balance=balance)])
        return float((ranks.max(0) / ranks.mean(0)).mean())

    assert spread(balance=True) < spread(balance=False) - 0.1


@pytest.mark.parametrize("packing", ["stream", "none"])
def test_balance_changes_no_loss_and_no_gradient(tmp_path, chats, packing):
    def step(balance):
        ranks = all_ranks(chats, 2, 8, packing=packing, balance=balance)
        batches = [batch for steps in ranks for batch in steps[0]]  # what the ranks' sums are made of
        small = [
            replace(
                b, input_ids=b.input_ids % VOCABULARY, labels=torch.where(b.labels < 0, -100, b.labels % VOCABULARY)
            )
            for b in batches
        ]
        run = stub_run(tmp_path / str(balance), small)
        gradient = []
        run.trainee.model.linear.weight.register_post_accumulate_grad_hook(lambda p: gradient.append(p.grad.clone()))
        result = train_step(run, small)
        return [b.input_ids.tolist() for b in batches], result.terms["next_token"], gradient[-1], result.counts

    (ids, loss, gradient, counts), (plain_ids, plain_loss, plain_gradient, plain_counts) = step(True), step(False)
    assert ids != plain_ids  # they are dealt otherwise
    assert counts == plain_counts
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-5, atol=1e-7)


def test_deal_refuses_more_packs_than_places():
    with pytest.raises(_native.NativeError, match="5 packs for 2 ranks of 2"):
        _native.deal(np.ones(5, np.uint64), 2, 2)


# ---- position (BO-19)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("then", [1, 2, 3])
def test_twenty_samples_are_each_read_once_over_a_save_and_another_number_of_ranks(tmp_path, files, shuffle, then):
    store = texts(tmp_path, files, range(2, 22))
    options = {"seq_len": 64, "packing": "none", "shuffle": shuffle, "pad_id": PAD}
    opened = rft.data.open(store.path, **options)
    first = [batch for batch, _ in zip(opened.epoch(0), range(5), strict=False)]
    opened.close()
    state = json.loads(json.dumps(opened.state(0, len(first))))
    read = [batch.num_tokens for batch in first]
    if not shuffle:
        assert read == [2, 3, 4, 5, 6]
    rest = []
    for rank in range(then):
        again = rft.data.open(store.path, rank=rank, world_size=then, **options)
        batches = list(again.resume(state))
        assert len(batches) == -(-15 // then)
        rest += [batch.num_tokens for batch in batches if batch.num_tokens]
        if not shuffle and rank == 0 and then == 1:
            assert rest[0] == 7
    assert sorted(read + rest) == list(range(2, 22))


def test_a_new_process_reads_on_where_the_old_one_stopped(chats):
    script = (
        "import json, sys\nimport rft.data\n"
        "path, state = json.loads(sys.argv[1])\n"
        "opened = rft.data.open(path, seq_len=256, pad_id=3)\n"
        "print(json.dumps([batch.input_ids.tolist() for batch in opened.resume(state)]))\n"
    )
    opened = rft.data.open(chats.path, seq_len=256, pad_id=PAD)
    whole = [batch.input_ids.tolist() for batch in opened.epoch(2)]
    argument = json.dumps([chats.path, opened.state(2, 4)])
    done = subprocess.run(
        [sys.executable, "-c", script, argument], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == whole[4:]


def test_every_position_of_an_epoch_gives_exactly_the_rest(chats):
    opened = rft.data.open(chats.path, seq_len=256, pad_id=PAD, micro_batch=2, arrays="numpy")
    whole = [batch.input_ids.tolist() for batch in opened.epoch(1)]
    for read in range(len(whole) + 1):
        assert [batch.input_ids.tolist() for batch in opened.resume(opened.state(1, read))] == whole[read:]
        assert [batch.input_ids.tolist() for batch in opened.epoch(1, read)] == whole[read:]


@pytest.mark.parametrize("change", [{"seq_len": 255}, {"packing": "bfd"}, {"seed": 1}, {"shuffle": False}], ids=str)
def test_a_position_in_other_packs_is_refused(chats, change):
    state = rft.data.open(chats.path, seq_len=256).state(0, 1)
    with pytest.raises(DataError, match="other packs"):
        rft.data.open(chats.path, **{"seq_len": 256, **change}).resume(state)


@pytest.mark.parametrize(
    "change",
    [{}, None, 5, {"packs": -1}, {"packs": 10**9}, {"packs": "4"}, {"epoch": None}, {"epoch": -1}, {"epoch": 0.5}],
    ids=str,
)
def test_what_is_no_position_is_refused(chats, change):
    opened = rft.data.open(chats.path, seq_len=256)
    state = {**opened.state(0, 1), **change} if isinstance(change, dict) and change else change
    with pytest.raises(ValueError, match=r"state|packs|epoch"):
        opened.resume(state)


@pytest.mark.parametrize("option", [{"pad_id": -1}, {"pad_id": 10**6}, {"micro_batch": 0}, {"rank": 1}], ids=str)
def test_options_that_no_batch_can_have_are_refused(chats, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        rft.data.open(chats.path, seq_len=256, **option)


# ---- threads and signals


def test_iterators_of_one_loader_run_in_several_threads(chats):
    made = loader(chats, seq_len=128)
    wanted = [[batch.input_ids.tolist() for step in made.steps(epoch, 1) for batch in step] for epoch in range(4)]
    got: dict[int, list] = {}

    def read(epoch):
        got[epoch] = [batch.input_ids.tolist() for step in made.steps(epoch, 1) for batch in step]

    threads = [threading.Thread(target=read, args=(epoch,)) for epoch in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[epoch] for epoch in range(4)] == wanted


def test_an_interrupted_reader_ends_with_its_thread(chats):
    script = (
        "import sys, rft.data\n"
        "opened = rft.data.open(sys.argv[1], seq_len=128)\n"
        "print('reading', flush=True)\n"
        "while True:\n    for _ in opened.epoch(0): pass\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, chats.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "reading\n"
    child.send_signal(signal.SIGINT)
    try:
        _, told = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == -signal.SIGINT
    assert told.rstrip().endswith("KeyboardInterrupt")


def test_bins_and_ranks_that_cannot_be_are_an_error_and_no_panic():
    with pytest.raises(_native.NativeError, match="at most 16777216"):
        _native.pack(np.array([1], np.uint32), 2**24 + 1, "bfd")
    with pytest.raises(_native.NativeError, match="1 packs for"):
        _native.deal(np.array([1], np.uint64), 2**63, 2)
