import pytest
import torch

from rft.kernels.rope import _rope, rope, rope_reference
from support.close import assert_close_fp32, assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
CASES = [  # B, T, H_q, H_k, E, R
    (1, 1, 4, 4, 16, 16),
    (2, 5, 6, 2, 24, 24),
    (1, 7, 40, 8, 64, 32),
    (3, 3, 5, 1, 80, 20),
]


def make(device, B, T, H_q, H_k, E, R, dtype=torch.float32, tables=None):
    q = torch.randn(B, T, H_q, E, device=device).to(dtype).transpose(1, 2)
    k = torch.randn(B, T, H_k, E, device=device).to(dtype).transpose(1, 2)
    angles = torch.randn(tables or B, T, R // 2, device=device) * 10
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def run(function, q, k, cos, sin, grads, **options):
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    out = function(q, k, cos, sin, **options)
    torch.autograd.backward(out, grads)
    return *(o.detach() for o in out), q.grad, k.grad


def eager(q, k, cos, sin, *, interleaved=False):
    """As transformers has it, in the dtype of q."""

    def turn(x):
        R = 2 * cos.shape[-1]
        part, rest = x[..., :R], x[..., R:]
        if interleaved:
            c, s = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
            half = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
        else:
            c, s = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
            half = torch.cat([-part[..., R // 2 :], part[..., : R // 2]], -1)
        return torch.cat([part * c[:, None] + half * s[:, None], rest], -1)

    return turn(q), turn(k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_keys_and_their_gradients_match_the_reference(device, case, interleaved, dtype):
    q, k, cos, sin = make(device, *case, dtype)
    grads = [torch.randn_like(q), torch.randn_like(k)]
    truth = run(
        rope_reference,
        q.float(),
        k.float(),
        cos.float(),
        sin.float(),
        [g.float() for g in grads],
        interleaved=interleaved,
    )
    plain = run(eager, q, k, cos, sin, grads, interleaved=interleaved)
    got = run(rope, q, k, cos, sin, grads, interleaved=interleaved)
    for g, p, t in zip(got, plain, truth, strict=True):
        assert_no_worse(g, p, t)


def test_wide_tables_of_transformers_go_in_as_views(device):
    """[angles | angles] by its first half; angles repeated in place by every second column; one table for the batch."""
    q, k, cos, sin = make(device, 2, 4, 3, 3, 16, 16, tables=1)
    expected = rope(q, k, cos.expand(2, -1, -1).contiguous(), sin.expand(2, -1, -1).contiguous())
    for wide, view in (
        (lambda t: torch.cat([t, t], -1), slice(0, 8)),
        (lambda t: t.repeat_interleave(2, -1), slice(0, 16, 2)),
    ):
        got = rope(q, k, wide(cos)[..., view], wide(sin)[..., view])
        for g, e in zip(got, expected, strict=True):
            assert torch.equal(g, e)


def test_any_strides_of_inputs_and_gradients_give_the_same(device):
    q, k, cos, sin = make(device, 2, 4, 3, 2, 16, 8)
    grads = [torch.randn(16, device=device).expand(q.shape), torch.ones((), device=device).expand(k.shape)]
    expected = run(rope, q.contiguous(), k.contiguous(), cos, sin, [g.contiguous() for g in grads])
    fused = torch.cat(
        [q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2)], -1
    )  # q and k as slices of one projection
    sliced = [part.view(2, 4, -1, 16).transpose(1, 2) for part in fused.split([48, 32], -1)]
    for pair in ((q, k), sliced, [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k)]):
        for got, wanted in zip(run(rope, *pair, cos, sin, grads), expected, strict=True):
            assert torch.equal(got, wanted)
    assert rope(q, k, cos, sin)[0].transpose(1, 2).is_contiguous()


def test_backward_undoes_forward_and_runs_twice(device):
    q, k, cos, sin = make(device, 1, 6, 2, 2, 8, 8)
    q = q.detach().requires_grad_()
    turned, _ = rope(q, k, cos, sin)
    turned.backward(turned.detach(), retain_graph=True)
    assert_close_fp32(q.grad, q.detach())
    turned.backward(turned.detach())
    assert_close_fp32(q.grad, 2 * q.detach())


def test_no_tokens(device):
    q, k, cos, sin = make(device, 1, 0, 2, 2, 8, 8)
    assert rope(q, k, cos, sin)[0].shape == (1, 2, 0, 8)


def test_wrong_shapes_are_refused_by_name(device):
    q, k, cos, sin = make(device, 2, 4, 3, 2, 16, 16)
    with pytest.raises(ValueError, match="differ in heads alone"):
        rope(q, k[:, :, :3], cos, sin)
    with pytest.raises(ValueError, match="wanted"):
        rope(q, k, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))


def test_the_registered_op_passes_opcheck_and_compiles_into_one_graph(device):
    q, k, cos, sin = make(device, 1, 4, 3, 2, 16, 8)
    torch.library.opcheck(_rope.op, (q.requires_grad_(), k.requires_grad_(), cos, sin, True, False))
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager" if device.type == "cpu" else "inductor")
    grads = [torch.randn_like(q), torch.randn_like(k)]
    for got, wanted in zip(run(compiled, q, k, cos, sin, grads), run(rope, q, k, cos, sin, grads), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.gpu
def test_the_last_token_past_2_to_the_31_equals_the_same_token_alone(device):
    T, H, E = 524300, 32, 128
    q = torch.empty(1, T, H, E, dtype=torch.bfloat16, device=device).normal_().transpose(1, 2)
    angles = torch.randn(1, T, E // 2, device=device)
    got = run(rope, q, q[:, :2], angles.cos(), angles.sin(), [q, q[:, :2]])
    alone = run(
        rope, q[:, :, -1:], q[:, :2, -1:], angles[:, -1:].cos(), angles[:, -1:].sin(), [q[:, :, -1:], q[:, :2, -1:]]
    )
    for g, a in zip(got, alone, strict=True):
        assert torch.equal(g[:, :, -1:], a)
        assert g[:, :, -1].abs().sum() > 0


@pytest.mark.gpu
def test_the_host_never_waits_and_the_step_can_be_captured(device):
    q, k, cos, sin = make(device, 1, 64, 8, 2, 64, 64, torch.bfloat16)
    grads = [torch.randn_like(q), torch.randn_like(k)]
    expected = run(rope, q, k, cos, sin, grads)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(rope, q, k, cos, sin, grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(rope, q, k, cos, sin, grads)
    graph.replay()
    for got, wanted in zip(captured, expected, strict=True):
        assert torch.equal(got, wanted)
