import pytest
import torch

from rft.kernels.lora import (
    Pair,
    _lowrank_gradients,
    _rows_per_program,
    _tile,
    lowrank_gradients,
    lowrank_gradients_reference,
)
from support.close import assert_close_fp32, assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 1), (70, 600, 4), (200, 1100, 16), (130, 96, 25), (30, 96, 40)], ids=str)
def test_both_gradients_match_the_reference(device, shape, dtype):
    T, N, r = shape
    dy, s, B = (torch.randn(size, device=device).to(dtype) for size in ((T, N), (T, r), (N, r)))
    truth = lowrank_gradients_reference(dy.float(), s.float(), B.float(), 0.7)
    ds, (dB,) = lowrank_gradients([Pair(dy, s, B, 0.7)])
    assert_no_worse(ds, dy @ B * 0.7, truth[0], what="ds")
    assert_close_fp32(dB, truth[1], 1e-5, what="dB")  # exact products of the inputs, fp32 sums


def test_strided_and_expanded_inputs_give_the_same(device):
    T, N, r = 40, 70, 8
    s, B = torch.randn(T, 2 * r, device=device)[:, r:], torch.randn(r, N, device=device).t()
    for dy in (torch.randn(T, 2 * N, device=device)[:, :N], torch.ones((), device=device).expand(T, N)):
        ds, (dB,) = lowrank_gradients([Pair(dy, s, B)])
        expected, (expected_dB,) = lowrank_gradients([Pair(dy.contiguous(), s.contiguous(), B.contiguous())])
        assert torch.equal(ds, expected)
        assert torch.equal(dB, expected_dB)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("r", [1, 16, 25, 40])
@pytest.mark.parametrize("widths", [(600, 33), (16, 300, 100), (40, 40, 40)], ids=str)
def test_branches_together_are_those_alone(device, widths, r, dtype):
    T = 200
    side_by_side = torch.randn(T, len(widths) * r, device=device).to(dtype)
    pairs = [
        Pair(torch.randn(T, n, device=device).to(dtype), s, torch.randn(n, r, device=device).to(dtype), 0.5 + i)
        for i, (n, s) in enumerate(zip(widths, side_by_side.split(r, dim=1), strict=True))
    ]
    ds, dBs = lowrank_gradients(pairs)
    truth = [lowrank_gradients_reference(*(t.float() for t in p[:3]), p.scale) for p in pairs]
    plain = torch.cat([p.dy @ p.B * p.scale for p in pairs], dim=1)
    assert_no_worse(ds, plain, torch.cat([each[0] for each in truth], dim=1), what="ds")
    for dB, (_, expected) in zip(dBs, truth, strict=True):
        assert dB.is_contiguous()
        assert_close_fp32(dB, expected, 1e-5, what="dB")  # exact products of the inputs, fp32 sums


def test_branches_of_different_ranks_or_too_many_take_launches_of_their_own(device):
    ranks = (4, 8, 4, 4)
    pairs = [Pair(*(torch.randn(size, device=device) for size in ((30, 50), (30, r), (50, r)))) for r in ranks]
    ds, dBs = lowrank_gradients(pairs)
    assert ds.shape == (30, sum(ranks))
    for part, dB, pair in zip(ds.split(ranks, dim=1), dBs, pairs, strict=True):
        alone, (alone_dB,) = lowrank_gradients([pair])
        assert torch.equal(part, alone)
        assert torch.equal(dB, alone_dB)


def test_ranges_of_tokens_keep_the_multiprocessors_busy():
    for blocks in (4, 16, 24, 56, 112, 200, 1000):
        tiles = _rows_per_program(8192, blocks, 132, 128) // 128
        waves = -(-blocks * -(-64 // tiles) // 132)
        assert waves * tiles <= 1.25 * max(1, blocks * 64 / 132), blocks
    assert _rows_per_program(100, 56, 132, 128) == 128


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_tiles_fit_the_shared_memory_of_every_gpu(shared):
    for R in (16, 32):
        for itemsize in (2, 4):
            assert _tile(14336, R, itemsize, shared).shared_bytes(R, itemsize) <= shared
    assert _tile(14336, 16, 2, 227 << 10) == (128, 256, 3)
    assert _tile(14336, 32, 2, 227 << 10) == (128, 256, 2)


def test_no_tokens_give_a_gradient_of_zero(device):
    sizes = ((0, 32), (0, 4), (32, 4))
    ds, (dB,) = lowrank_gradients([Pair(*(torch.ones(size, device=device) for size in sizes))])
    assert ds.shape == (0, 4)
    assert torch.equal(dB, torch.zeros(32, 4, device=device))


def test_wrong_shapes_are_refused_by_name(device):
    with pytest.raises(ValueError, match="wanted"):
        lowrank_gradients([Pair(*(torch.zeros(size, device=device) for size in ((3, 5), (3, 2), (4, 2))))])


def test_the_registered_op_passes_opcheck(device):
    args = tuple([torch.randn(size, device=device) for _ in range(2)] for size in ((20, 48), (20, 4), (48, 4)))
    torch.library.opcheck(_lowrank_gradients.op, (*args, [2.0, 0.5]))


@pytest.mark.gpu
def test_the_last_rows_past_2_to_the_31_and_bit_equal_repeats(device):
    T, N, r = 150016, 14336, 16
    dy = torch.empty(T, N, dtype=torch.bfloat16, device=device).normal_()
    s, B = torch.randn(T, r, device=device).bfloat16(), torch.randn(N, r, device=device).bfloat16()
    ds, (dB,) = lowrank_gradients([Pair(dy, s, B)])
    assert_no_worse(ds[-64:], dy[-64:] @ B, dy[-64:].float() @ B.float())
    assert_close_fp32(dB, torch.mm(dy.t(), s, out_dtype=torch.float32), 1e-4)
    again, (again_dB,) = lowrank_gradients([Pair(dy, s, B)])
    assert torch.equal(ds, again)
    assert torch.equal(dB, again_dB)
