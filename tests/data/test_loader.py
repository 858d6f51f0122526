"""Plans and batches: BO-01, 02, 03 and 21 of bugs.md, resume at any step, and nothing that depends on the number of ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from rft.data.loader import Loader
from rft.errors import DataError
from support.data import prepare_rows, some_chats, tiny_files

IGNORED = -100


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_files(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory, files):
    return prepare_rows(tmp_path_factory.mktemp("chats"), some_chats(80), files).train


def texts(tmp_path, files, lengths, **options):
    """A set of documents with exactly these numbers of tokens."""
    rows = [{"text": "".join("zq"[i % 2] for i in range(length - 1)) or "z"} for length in lengths]
    store = prepare_rows(tmp_path, rows, files, **options).train
    assert sorted(store.lengths().tolist()) == sorted(lengths)
    return store


def loader(store, *, seq_len=64, packing="stream", overlong="split", seed=0, pad_id=3, **options):
    return Loader(store, seq_len=seq_len, packing=packing, overlong=overlong, seed=seed, pad_id=pad_id, **options)


def pieces(batch):
    """(ids, labels, positions) of every document of a batch, fill-up included."""
    edges = batch.cu_seqlens.tolist()
    rows = (batch.input_ids[0], batch.labels[0], batch.position_ids[0])
    return [tuple(row[a:b].tolist() for row in rows) for a, b in pairwise(edges)]


def stream(steps):
    """Everything of a stream, comparable."""
    return [
        [
            (
                b.input_ids.tolist(),
                b.labels.tolist(),
                b.position_ids.tolist(),
                b.cu_seqlens.tolist(),
                b.lengths,
                b.pack_tokens,
                b.num_tokens,
                b.num_label_tokens,
                b.label_weight,
            )
            for b in step
        ]
        for step in steps
    ]


def check(batch, seq_len, micro_batch, packing="stream"):
    """What holds for every batch."""
    total = batch.input_ids.shape[1]
    if packing != "none":
        assert total == seq_len * micro_batch
        assert all(edge in batch.cu_seqlens for edge in range(0, total + 1, seq_len))  # no document crosses a pack
    assert batch.input_ids.dtype == batch.labels.dtype == batch.position_ids.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.diff().tolist() == list(batch.lengths)
    assert sum(batch.lengths) == total
    assert (batch.labels != IGNORED).sum() == batch.num_label_tokens
    assert sum(batch.pack_tokens) == batch.num_tokens
    for _ids, labels, positions in pieces(batch):
        assert positions == list(range(len(positions)))
        assert labels[-1] == IGNORED  # the last position of a document has no target


# ---- BO-01


def test_packed_documents_have_positions_borders_and_labels_of_their_own(tmp_path, files):
    store = texts(tmp_path, files, [5, 3])
    (step,) = loader(store, seq_len=8).steps(0, 1)
    (batch,) = step
    check(batch, 8, 1)
    lengths = batch.lengths
    assert sorted(lengths) == [3, 5]
    assert batch.position_ids.tolist() == [[*range(lengths[0]), *range(lengths[1])]]
    assert batch.cu_seqlens.tolist() == [0, lengths[0], 8]
    assert batch.num_label_tokens == 6  # 4 + 2, not 7
    for ids, labels, _ in pieces(batch):
        assert labels == [*ids[1:], IGNORED]


@pytest.mark.parametrize("packing", ["stream", "bfd", "none"])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_every_batch_holds_whole_documents_with_shifted_labels(chats, packing, micro_batch):
    by_ids = {
        tuple(ids.tolist()): trained.tolist() for ids, trained, _ in map(chats.document, range(chats.num_documents))
    }
    seen = []
    for step in loader(chats, seq_len=512, packing=packing, micro_batch=micro_batch).steps(0, micro_batch):
        for batch in step:
            check(batch, 512, micro_batch, packing)
            for ids, labels, _ in pieces(batch):
                if set(ids) == {3}:  # fill-up
                    assert set(labels) == {IGNORED}
                    continue
                trained = by_ids[tuple(ids)]
                targets = [token if flag else IGNORED for token, flag in zip(ids[1:], trained[1:], strict=True)]
                assert labels == [*targets, IGNORED]
                seen.append(tuple(ids))
    assert sorted(seen) == sorted(by_ids)


def test_rows_of_packing_none_are_as_long_as_their_longest_document_rounded_up(chats):
    lengths = sorted(chats.lengths().tolist())
    widths = set()
    for step in loader(chats, seq_len=512, packing="none", micro_batch=2).steps(0, 2):
        for batch in step:
            width = batch.input_ids.shape[1] // 2
            longest = max(batch.pack_tokens)
            assert width == -(-longest // 64) * 64
            widths.add(width)
    assert len(widths) > 1
    assert max(widths) == -(-lengths[-1] // 64) * 64


# ---- BO-02


def kept(store, **options):
    made = loader(store, **options)
    found = []
    for step in made.steps(0, 1):
        for batch in step:
            found += [ids for ids, _, _ in pieces(batch) if set(ids) != {3}]
    return made.plan(0), found


def test_split_keeps_every_token_once(tmp_path, files):
    store = texts(tmp_path, files, [4, 2, 3, 2, 17])
    plan, found = kept(store, seq_len=3, overlong="split")
    assert sorted(token for ids in found for token in ids) == sorted(
        token for index in range(5) for token in store.document(index)[0].tolist()
    )
    assert max(map(len, found)) == 3
    assert plan.counts["split_documents"] == 2
    assert plan.num_tokens == 28


def test_truncate_counts_what_it_cuts(tmp_path, files):
    store = texts(tmp_path, files, [4, 2, 3, 2])
    plan, found = kept(store, seq_len=3, overlong="truncate")
    assert sum(map(len, found)) == plan.num_tokens == 10
    assert (plan.counts["truncated_documents"], plan.counts["truncated_tokens"]) == (1, 1)


def test_drop_counts_what_it_leaves_out(tmp_path, files):
    store = texts(tmp_path, files, [4, 2, 3, 2])
    plan, found = kept(store, seq_len=3, overlong="drop")
    assert sum(map(len, found)) == plan.num_tokens == 7
    assert (plan.counts["dropped_documents"], plan.counts["dropped_tokens"]) == (1, 4)


def test_error_names_the_row_and_its_length(tmp_path, files):
    store = texts(tmp_path, files, [4, 2, 3])
    with pytest.raises(DataError) as raised:
        loader(store, seq_len=3, overlong="error").plan(0)
    assert "rows.jsonl:1" in str(raised.value)
    assert "4" in raised.value.problem


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
@pytest.mark.parametrize("packing", ["stream", "bfd", "none"])
def test_kept_and_lost_tokens_add_up(chats, overlong, packing):
    plan = loader(chats, seq_len=100, overlong=overlong, packing=packing).plan(0)
    counts = plan.counts
    lost = counts["truncated_tokens"] + counts["dropped_tokens"] + counts.get("unlabelled_tokens", 0)
    assert plan.num_tokens + lost == chats.num_tokens
    assert plan.num_tokens == int(plan.pack_tokens().sum())
    assert plan.num_label_tokens == int(plan.pack_labels().sum())


def test_small_set_is_one_pack_and_one_step(tmp_path, files):
    store = texts(tmp_path, files, [10, 20, 20])
    made = loader(store, seq_len=4096)
    assert (made.plan(0).num_packs, made.steps_in_epoch(0, 1)) == (1, 1)
    (step,) = made.steps(0, 1)
    assert step[0].num_tokens == 50
    assert made.steps_in_epoch(0, 64) == 1  # fewer packs than a step wants: still one step


# ---- BO-03


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_run_the_same_steps_and_micro_batches_and_fillers_weigh_nothing(tmp_path, files, world_size, micro_batch):
    store = texts(tmp_path, files, [8] * 5)
    packs = 2 * micro_batch * world_size
    ranks = [
        list(loader(store, seq_len=8, rank=rank, world_size=world_size, micro_batch=micro_batch).steps(0, packs))
        for rank in range(world_size)
    ]
    shapes = {tuple(len(step) for step in steps) for steps in ranks}
    assert len(shapes) == 1
    tokens = sum(batch.num_tokens for steps in ranks for step in steps for batch in step)
    labels = sum(batch.num_label_tokens for steps in ranks for step in steps for batch in step)
    assert (tokens, labels) == (40, 35)
    for steps in ranks:
        for step in steps:
            for batch in step:
                check(batch, 8, micro_batch)
                for pack, real in enumerate(batch.pack_tokens):
                    if real == 0:
                        filler = slice(8 * pack, 8 * pack + 8)
                        assert (batch.labels[0, filler] == IGNORED).all()
                assert batch.num_packs == sum(1 for real in batch.pack_tokens if real)


@pytest.mark.parametrize("packing", ["stream", "bfd", "none"])
def test_one_and_three_ranks_train_on_the_same_packs_in_each_step(chats, packing):
    def documents(world_size, micro_batch):
        steps: dict[int, list[list[int]]] = {}
        for rank in range(world_size):
            made = loader(
                chats, seq_len=200, packing=packing, rank=rank, world_size=world_size, micro_batch=micro_batch
            )
            for number, step in enumerate(made.steps(1, 6)):
                steps.setdefault(number, []).extend(
                    ids for batch in step for ids, _, _ in pieces(batch) if set(ids) != {3}
                )
        return [sorted(step) for _, step in sorted(steps.items())]

    alone = documents(1, 1)
    assert documents(3, 1) == alone
    assert documents(2, 3) == alone
    assert documents(1, 6) == alone


def test_plan_does_not_know_the_ranks(chats):
    plans = [loader(chats, seq_len=200, rank=rank, world_size=world).plan(2) for rank, world in ((0, 1), (3, 4))]
    assert plans[0].hash == plans[1].hash


# ---- order


def test_order_changes_with_epoch_and_seed_and_with_nothing_else(chats):
    def order(seed=0, epoch=0, shuffle=True):
        plan = loader(chats, seq_len=200, seed=seed, shuffle=shuffle).plan(epoch)
        return plan.hash, [piece for pack in range(plan.num_packs) for piece in plan.pack(pack)]

    base = order()
    assert order() == base
    for other in (order(seed=1), order(epoch=1)):
        assert other[0] != base[0]
        assert other[1] != base[1]
        assert sorted(other[1]) == sorted(base[1])
    assert order(shuffle=False, epoch=0)[1] == order(shuffle=False, epoch=1)[1]


@pytest.mark.parametrize(
    "change", [{"seq_len": 201}, {"packing": "bfd"}, {"overlong": "truncate"}, {"seed": 5}], ids=str
)
def test_plan_hash_covers_what_makes_the_packs(chats, change):
    base = {"seq_len": 200, "packing": "stream", "overlong": "split", "seed": 0}
    assert loader(chats, **base).plan(0).hash != loader(chats, **{**base, **change}).plan(0).hash


# ---- resume


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("packing", ["stream", "none"])
def test_resume_at_any_step_equals_the_uninterrupted_stream(chats, packing, world_size, micro_batch):
    packs = 2 * world_size * micro_batch
    for rank in range(world_size):
        made = loader(chats, seq_len=200, packing=packing, rank=rank, world_size=world_size, micro_batch=micro_batch)
        whole = stream(made.steps(3, packs))
        assert len(whole) == made.steps_in_epoch(3, packs) > 2
        for start in range(len(whole) + 1):
            again = loader(
                chats, seq_len=200, packing=packing, rank=rank, world_size=world_size, micro_batch=micro_batch
            )
            assert stream(again.steps(3, packs, start)) == whole[start:]


def test_resume_on_another_number_of_ranks_reads_each_document_once(chats):
    def read(world_size, start, stop=None):
        found = []
        for rank in range(world_size):
            steps = list(loader(chats, seq_len=200, rank=rank, world_size=world_size).steps(0, 4, start))
            found += [
                tuple(ids) for step in steps[:stop] for batch in step for ids, _, _ in pieces(batch) if set(ids) != {3}
            ]
        return found

    assert sorted(read(1, 0, 3) + read(2, 3)) == sorted(read(4, 0))


def test_batches_stay_as_they_were_while_later_ones_are_read(chats):
    made = loader(chats, seq_len=200)
    held = list(made.steps(0, 1))
    copies = stream(held)
    list(made.steps(1, 1))
    assert stream(held) == copies


def test_iterator_left_early_ends_its_thread_and_the_loader_goes_on(chats):
    made = loader(chats, seq_len=100)
    for _ in range(20):
        steps = made.steps(0, 1)
        next(steps)
        steps.close()
    left = made.steps(0, 1)
    next(left)
    made.close()
    assert len(list(made.steps(0, 1))) == made.steps_in_epoch(0, 1)


# ---- BO-21


def pair(prompt_tokens):
    return {"prompt": "".join("zq"[i % 2] for i in range(prompt_tokens)), "completion": "yes"}


def test_row_whose_labels_are_all_cut_off_is_counted_and_left_out(tmp_path, files):
    both = prepare_rows(tmp_path / "both", [pair(50), pair(2)], files).train
    good = prepare_rows(tmp_path / "good", [pair(2)], files).train
    made = loader(both, seq_len=16, overlong="truncate")
    assert made.plan(0).counts["unlabelled_documents"] == 1
    batches = [batch for step in made.steps(0, 1) for batch in step]
    alone = [batch for step in loader(good, seq_len=16, overlong="truncate").steps(0, 1) for batch in step]
    assert sum(batch.label_weight for batch in batches) == sum(batch.label_weight for batch in alone) > 0
    assert all(batch.num_label_tokens for batch in batches)  # no step without a label


def test_set_whose_labels_are_all_cut_off_stops_before_the_first_step(tmp_path, files):
    store = prepare_rows(tmp_path, [pair(50)] * 3, files).train
    with pytest.raises(DataError, match="no token to train on is left") as raised:
        loader(store, seq_len=16, overlong="truncate").plan(0)
    assert "seq_len" in raised.value.do


# ---- weights


def test_weights_of_rows_and_messages_reach_the_batch(tmp_path, files):
    rows = [{"text": "zqz", "loss_weight": 0.5}, {"text": "qzq"}]
    store = prepare_rows(tmp_path, rows, files).train
    (step,) = loader(store, seq_len=16).steps(0, 1)
    (batch,) = step
    assert batch.weights is not None
    labelled = batch.labels != IGNORED
    assert sorted(batch.weights[labelled].tolist()) == [0.5] * 3 + [1.0] * 3
    assert batch.label_weight == pytest.approx(4.5)
    assert batch.num_label_tokens == 6


# ---- rft.data.open


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_open_gives_the_loaders_batches(chats, arrays):
    import rft.data

    opened = rft.data.open(chats.path, seq_len=200, pad_id=3, micro_batch=2, arrays=arrays)
    batches = list(opened.epoch(0))
    wanted = [step[0] for step in loader(chats, seq_len=200, micro_batch=2).steps(0, 2)]
    assert len(batches) == opened.batches_in_epoch(0) == len(wanted)
    for got, want in zip(batches, wanted, strict=True):
        assert np.array_equal(np.asarray(got.input_ids), want.input_ids.numpy())
        assert np.array_equal(np.asarray(got.labels), want.labels.numpy())
        assert isinstance(got.input_ids, np.ndarray) == (arrays == "numpy")


def test_open_says_what_is_wrong_with_a_folder_that_is_no_set(tmp_path):
    import rft.data

    with pytest.raises(DataError):
        rft.data.open(tmp_path, seq_len=8)


@pytest.mark.gpu
def test_batches_on_a_busy_gpu_are_those_of_the_cpu(chats):
    made = {device: loader(chats, seq_len=200, device=device) for device in ("cpu", "cuda")}
    wanted = stream(made["cpu"].steps(0, 1))
    busy = torch.randn(4096, 4096, device="cuda")
    got = []
    for step in made["cuda"].steps(0, 1):
        for _ in range(5):
            busy = busy @ busy * 1e-3  # so that the host runs ahead and slots go round before the copies were used
        got.append(step)
    assert all(batch.input_ids.is_cuda for step in got for batch in step)
    assert stream(got) == wanted


@pytest.mark.gpu
def test_a_batch_copied_to_the_host_is_there_when_it_is_read(chats):
    wanted = stream(loader(chats, seq_len=200, device="cpu").steps(0, 1))
    busy = torch.randn(8192, 8192, device="cuda")
    got = []
    for step in loader(chats, seq_len=200, device="cuda").steps(0, 1):
        for _ in range(20):
            busy = busy @ busy * 1e-4  # a copy that is not waited for lies behind these
        got.append([batch.to("cpu") for batch in step])
    assert stream(got) == wanted
