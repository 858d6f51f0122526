import pytest
import torch

from rft.kernels.lora import _lowrank_gradients, lowrank_gradients, lowrank_gradients_reference
from support.close import assert_close_fp32, assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 1), (70, 600, 4), (200, 1100, 16), (130, 96, 25), (30, 96, 40)], ids=str)
def test_both_gradients_match_the_reference(device, shape, dtype):
    T, N, r = shape
    dy, s, B = (torch.randn(size, device=device).to(dtype) for size in ((T, N), (T, r), (N, r)))
    truth = lowrank_gradients_reference(dy.float(), s.float(), B.float(), 0.7)
    ds, dB = lowrank_gradients(dy, s, B, 0.7)
    assert_no_worse(ds, dy @ B * 0.7, truth[0], what="ds")
    assert_close_fp32(dB, truth[1], 1e-5, what="dB")  # exact products of the inputs, fp32 sums


def test_strided_and_expanded_inputs_give_the_same(device):
    T, N, r = 40, 70, 8
    s, B = torch.randn(T, 2 * r, device=device)[:, r:], torch.randn(r, N, device=device).t()
    for dy in (torch.randn(T, 2 * N, device=device)[:, :N], torch.ones((), device=device).expand(T, N)):
        got = lowrank_gradients(dy, s, B)
        expected = lowrank_gradients(dy.contiguous(), s.contiguous(), B.contiguous())
        for g, e in zip(got, expected, strict=True):
            assert torch.equal(g, e)


def test_no_tokens_give_a_gradient_of_zero(device):
    ds, dB = lowrank_gradients(
        torch.empty(0, 32, device=device), torch.empty(0, 4, device=device), torch.ones(32, 4, device=device)
    )
    assert ds.shape == (0, 4)
    assert torch.equal(dB, torch.zeros(32, 4, device=device))


def test_wrong_shapes_are_refused_by_name(device):
    with pytest.raises(ValueError, match="wanted"):
        lowrank_gradients(
            torch.zeros(3, 5, device=device), torch.zeros(3, 2, device=device), torch.zeros(4, 2, device=device)
        )


def test_the_registered_op_passes_opcheck(device):
    args = tuple(torch.randn(size, device=device) for size in ((20, 48), (20, 4), (48, 4)))
    torch.library.opcheck(_lowrank_gradients, (*args, 2.0))


@pytest.mark.gpu
def test_the_last_rows_past_2_to_the_31_and_bit_equal_repeats(device):
    T, N, r = 150016, 14336, 16
    dy = torch.empty(T, N, dtype=torch.bfloat16, device=device).normal_()
    s, B = torch.randn(T, r, device=device).bfloat16(), torch.randn(N, r, device=device).bfloat16()
    ds, dB = lowrank_gradients(dy, s, B)
    assert_no_worse(ds[-64:], dy[-64:] @ B, dy[-64:].float() @ B.float())
    assert_close_fp32(dB, torch.mm(dy.t(), s, out_dtype=torch.float32), 1e-4)
    again = lowrank_gradients(dy, s, B)
    assert torch.equal(ds, again[0])
    assert torch.equal(dB, again[1])
