import pytest
import torch

from rft.kernels.adamw import CHUNK, Update, adamw, adamw_reference, serves
from support.close import assert_close_fp32

GIVEN = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
SIZES = [(7,), (3, 5), (CHUNK // 64 + 3, 64), (1,)]


def drawn(device, sizes=SIZES, gradient=torch.float32, copy=torch.float16, step=3):
    made = []
    for size in sizes:
        w, g, m = (torch.randn(size, device=device) for _ in range(3))
        v = torch.rand(size, device=device)
        made.append(
            Update(w, g.to(gradient), m, v, None if copy is None else torch.zeros_like(w, dtype=copy), step + len(made))
        )
    return made


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "copy",
    [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu), None],  # the interpreter cuts bf16 off
    ids=str,
)
@pytest.mark.parametrize("clipped", [True, False])
def test_weights_moments_and_copies_are_those_of_the_reference(device, gradient, copy, clipped):
    updates = drawn(device, gradient=gradient, copy=copy)
    factor = torch.tensor(0.37, device=device) if clipped else None
    wanted = [adamw_reference(u, **GIVEN, factor=factor) for u in updates]
    adamw(updates, **GIVEN, factor=factor)
    for update, truth in zip(updates, wanted, strict=True):
        for got, exact in zip((update.weight, update.exp_avg, update.exp_avg_sq), truth, strict=True):
            assert_close_fp32(got, exact, 1e-6)
        if copy is not None:
            assert torch.equal(update.copy, update.weight.to(copy))


def test_twenty_steps_are_those_of_torch(device):
    updates = drawn(device, [(3, 5)], copy=None)  # several tensors and whole chunks: the test above
    theirs = [u.weight.clone().requires_grad_() for u in updates]
    torch_s = torch.optim.AdamW(theirs, lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    moments = [(torch.zeros_like(u.weight), torch.zeros_like(u.weight)) for u in updates]
    for step in range(1, 21):
        for parameter in theirs:
            parameter.grad = torch.randn_like(parameter)
        adamw(
            [Update(u.weight, p.grad, *mv, None, step) for u, p, mv in zip(updates, theirs, moments, strict=True)],
            **GIVEN,
        )
        torch_s.step()
    for update, parameter in zip(updates, theirs, strict=True):
        assert_close_fp32(update.weight, parameter.detach(), 1e-6)


def test_what_lies_beside_a_tensor_is_left_alone(device):
    around = torch.full((3, 64), 7.0, device=device)
    (update,) = drawn(device, sizes=[(50,)], copy=None)
    adamw([update._replace(weight=around[1, :50])], **GIVEN)
    assert torch.equal(around[0], torch.full((64,), 7.0, device=device))
    assert torch.equal(around[1, 50:], torch.full((14,), 7.0, device=device))
    assert not torch.equal(around[1, :50], torch.full((50,), 7.0, device=device))


def test_what_it_cannot_take_is_refused(device):
    (update,) = drawn(device, sizes=[(8, 8)])
    unfit = (
        update._replace(weight=update.weight.t()),
        update._replace(weight=update.weight.bfloat16()),
        update._replace(gradient=update.gradient[:4]),
        update._replace(exp_avg=torch.empty(65, device=device)[1:].view(8, 8)),
    )
    assert serves(update)
    for each in unfit:
        assert not serves(each)
        with pytest.raises(ValueError, match="wanted contiguous fp32"):
            adamw([each], **GIVEN)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    w = torch.zeros((1 << 31) + 64, device=device)
    g = torch.ones_like(w, dtype=torch.bfloat16)
    adamw([Update(w, g, torch.zeros_like(w), torch.zeros_like(w), None, 1)], **GIVEN)
    assert torch.allclose(w[[0, 1 << 31, -1]], torch.full((3,), -3e-3, device=device))


@pytest.mark.gpu
def test_the_host_never_waits(device):
    updates = drawn(device)
    factor = torch.ones((), device=device)
    adamw(updates, **GIVEN, factor=factor)
    torch.cuda.set_sync_debug_mode("error")
    try:
        adamw(updates, **GIVEN, factor=factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
