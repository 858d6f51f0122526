"""NF4 and int8: the format is bitsandbytes', the kernel gives what plain torch gives, products read what was dequantised."""

from __future__ import annotations

import pytest
import torch

from rft.kernels import int8, nf4
from rft.kernels.lora_linear import (
    Branch,
    FrozenLinear,
    lora_gated_mlp,
    lora_gated_mlp_reference,
    lora_linears,
    lora_linears_reference,
)

CPU = torch.device("cpu")
SHAPES = [(64, 128), (3, 70), (96, 352), (300, 512)]


def random_weight(shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (33, 70), (512, 1024)], ids=str)
def test_codes_and_scales_are_bitsandbytes(shape, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = random_weight(shape, dtype)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    made = nf4.quantise(weight)
    assert torch.equal(made.codes.view(-1), codes.view(-1))
    assert torch.equal(made.nested, state.state2.absmax)
    assert float(made.offset) == float(state.offset)
    assert torch.equal(state.code.float(), nf4.levels(CPU))
    assert torch.equal(state.state2.code.float(), nf4.scale_levels(CPU))
    # bitsandbytes finds the nearest level on a CPU through a table of 2^16 steps: ours may differ within one of them of a border
    different = (made.scales != state.absmax).nonzero()[:, 0]
    absmax = torch.nn.functional.pad(weight.float().view(-1), (0, -weight.numel() % 64)).view(-1, 64).abs().amax(1)
    scaled = (absmax - made.offset) / made.nested.repeat_interleave(256)[: absmax.numel()]
    table = nf4.scale_levels(CPU)
    borders = (table[:-1] + table[1:]) / 2
    assert len(different) <= 0.02 * absmax.numel()
    for i in different.tolist():
        assert (borders - scaled[i]).abs().min() < 2 / 2**16
        assert abs(int(made.scales[i]) - int(state.absmax[i])) == 1
    theirs = functional.dequantize_4bit(codes, state)
    read = nf4.Weight(codes.view(made.codes.shape), state.absmax, state.state2.absmax, state.offset)
    ours = read.dequantised(dtype)
    if dtype == torch.float32:
        assert torch.equal(ours, theirs)
    else:  # on some CPUs bitsandbytes rounds the scale to bf16 before it multiplies
        assert ((ours - theirs).abs() <= theirs.abs() * 2**-7).all()


def test_int8_is_bitsandbytes_layout():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = random_weight((48, 96), torch.float16)
    codes, largest, _ = functional.int8_vectorwise_quant(weight)
    made = int8.quantise(weight)
    assert torch.equal(made.codes, codes)
    assert torch.equal(made.largest, largest.float())
    assert (made.dequantised() - weight.float()).abs().max() <= weight.abs().max() / 254 + 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_gives_what_plain_torch_gives(shape):
    """In the interpreter: fp32, codes to 4,096 bytes; the last shape goes through plain torch, as every large one on a CPU."""
    made = nf4.quantise(random_weight(shape))
    reference = nf4.dequantise_reference(made, torch.float32)
    out = torch.full(shape, float("nan"))
    if made.codes.numel() <= 1 << 13:
        nf4._dequantise(*made, out)
        assert torch.equal(out, reference)
    assert torch.equal(nf4.dequantise(made, torch.float32), reference)
    error = (reference - random_weight(shape)).norm() / random_weight(shape).norm()
    assert 0.05 < error < 0.12
    assert made.codes.nbytes + made.scales.nbytes + made.nested.nbytes <= reference.numel() * 4.2 / 8 + 8


def test_a_block_of_zeros_and_a_weight_of_zeros_stay_zero():
    weight = torch.zeros(4, 128)
    assert torch.equal(nf4.quantise(weight).dequantised(), weight)
    assert torch.equal(int8.quantise(weight).dequantised(), weight)
    weight[0, :64] = 1.0
    assert float(nf4.quantise(weight).dequantised()[1:].abs().max()) < 1e-2


def test_the_operation_is_registered_soundly():
    made = nf4.quantise(random_weight((8, 64)))
    torch.library.opcheck(torch.ops.rft.nf4_dequantise.default, (*made, torch.empty(8, 64)))


def test_wrong_shapes_are_said():
    with pytest.raises(ValueError, match="even number of columns"):
        nf4.quantise(torch.zeros(4, 7))
    made = nf4.quantise(random_weight((8, 64)))
    with pytest.raises(ValueError, match="wanted a contiguous"):
        nf4.dequantise(made, torch.float32, out=torch.empty(64, 8))


def test_a_buffer_is_shared_and_grows():
    nf4.release_buffers()
    small = nf4.shared_buffer(torch.Size((2, 8)), torch.float32, CPU)
    again = nf4.shared_buffer(torch.Size((4, 4)), torch.float32, CPU)
    assert small.data_ptr() == again.data_ptr()
    assert nf4.shared_buffer(torch.Size((5, 5)), torch.float32, CPU).shape == (5, 5)
    assert len(nf4._buffers) == 1


@pytest.mark.parametrize("kind", [nf4, int8], ids=["nf4", "int8"])
def test_linears_over_packed_weights_are_those_of_the_dequantised_numbers(kind):
    """Outputs and every gradient, of linears that share an input and of a whole MLP: no product sees another's weight in the buffer."""
    generator = torch.Generator().manual_seed(1)

    def linear(n, k, r=2):
        made = kind.quantise(random_weight((n, k), seed=n))
        A = (torch.randn(r, k, generator=generator) * 0.1).requires_grad_()
        B = (torch.randn(n, r, generator=generator) * 0.1).requires_grad_()
        return FrozenLinear(made, None, (Branch(A, B, 0.5),))

    x = torch.randn(5, 64, generator=generator, requires_grad=True)
    linears = [linear(32, 64), linear(48, 64)]
    gate, up, down = linear(96, 64), linear(96, 64), linear(64, 96)
    for ours, plain in (
        (lambda: lora_linears(x, linears), lambda: lora_linears_reference(x, linears)),
        (lambda: (lora_gated_mlp(x, gate, up, down),), lambda: (lora_gated_mlp_reference(x, gate, up, down),)),
    ):
        wanted = [x, *(t for ln in (*linears, gate, up, down) for b in ln.branches for t in (b.A, b.B))]
        got, right = ours(), plain()
        for a, b in zip(got, right, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()
        gradients = torch.autograd.grad(sum(t.square().sum() for t in got), wanted, allow_unused=True)
        exact = torch.autograd.grad(sum(t.square().sum() for t in right), wanted, allow_unused=True)
        for a, b in zip(gradients, exact, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4096, 14336), (1000, 4098)], ids=str)
def test_on_a_gpu_kernel_codes_and_scales_are_bitsandbytes(shape, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = random_weight(shape, torch.bfloat16).cuda()
    made = nf4.quantise(weight)
    assert torch.equal(made.dequantised(dtype), nf4.dequantise_reference(made, dtype))
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    assert (made.codes.view(-1) != codes.view(-1)).float().mean() < 1e-5  # ties
    assert (made.scales != state.absmax).float().mean() < 1e-3
    read = nf4.Weight(codes.view(made.codes.shape), state.absmax, state.state2.absmax, state.offset)
    assert torch.equal(read.dequantised(torch.bfloat16), functional.dequantize_4bit(codes, state))
