"""The kernels wired into models, on a CUDA device in bf16: what is swapped, how exact it is, what it keeps in memory."""

from __future__ import annotations

import pytest
import torch

from rft.kernels import fp8
from rft.kernels.lora_linear import Branch, FrozenLinear, lora_gated_mlp, lora_linears
from rft.memory.plan import MemoryPlan
from rft.memory.recompute import apply_recompute
from rft.memory.sizes import Problem
from rft.memory.sizes import sizes as sizes_of
from rft.models.attention import install_attention, register
from rft.models.backbone import Backbone, decoder_layers
from rft.models.describe import describe
from rft.models.head import KERNEL_ALLOWED, Head, LogitTransform, compare_kernel
from rft.models.norm import RMSNorm
from rft.models.receipts import Receipts
from rft.models.surgery import apply_swaps
from support.close import assert_no_worse
from support.families import FAMILIES, build
from support.rows import packed_batch, random_documents

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ROUTED = ("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "llama4_text", "qwen3_next", "granitemoehybrid")
RECURRENT = ("qwen3_next", "qwen3_5", "falcon_h1", "bamba", "granitemoehybrid", "lfm2")
MATH_ONLY = ("gemma2", "gpt_oss")
CASTINGS = {
    "llama": "round_then_scale",
    "olmo2": "scale_then_round",
    "gemma2": "one_plus_weight",
    "gpt_oss": "scale_then_round",
}
ATTENTION_DECLINED = (
    "gpt_neox",
    "deepseek_v3",
    "llama4_text",
    "qwen3_next",
    "qwen3_5",
    "falcon_h1",
    "granitemoehybrid",
    "gpt2",
)


def count(receipts: Receipts, what: str) -> int:
    return sum(a.count for a in receipts.applied if a.what == what)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_with_kernels_is_no_further_from_fp32_than_the_plain_model_is(family):
    """Norms of the errors over several batches: of one tiny batch, luck decides which is larger."""
    register()
    recurrent = family in RECURRENT
    receipts, batches = Receipts(), range(6)
    runs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name in ("truth", "plain", "kernels"):
        model = build(family, attention="rft").to(CUDA, torch.float32 if name == "truth" else torch.bfloat16)
        if name == "kernels":
            apply_swaps(model, receipts, device=CUDA, kernels=True)
        state = install_attention(model, "math")
        runs[name] = []
        for seed in batches:
            model.zero_grad()
            documents = random_documents(*((24,) if recurrent else (40, 21, 9)), seed=seed)
            batch = packed_batch(*documents, fill=3).to(CUDA)
            hidden, _ = Backbone(model, state, isolate=not recurrent)(batch)
            head = Head(model, LogitTransform(), kernels=name == "kernels")
            head.loss_sums(hidden, batch.labels, num_label_tokens=batch.num_label_tokens)["next_token"].backward()
            gradients = [p.grad.float().flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None]
            runs[name].append((hidden.detach().float(), torch.cat(gradients)))
    for part in (0, 1):
        truth, plain, own = (torch.stack([run[part] for run in runs[n]]) for n in ("truth", "plain", "kernels"))
        plain_error, own_error = ((x - truth).norm() / truth.norm() for x in (plain, own))
        factor = 2 if family in ROUTED else 1.1  # a router whose choice flips by rounding moves a whole token
        assert own_error <= factor * plain_error + 1e-4, (
            f"{('hidden', 'gradients')[part]}: {own_error:.2e}, plain {plain_error:.2e}"
        )
    assert (
        count(receipts, "attention block") == 0
        if family in ATTENTION_DECLINED
        else count(receipts, "attention block") > 0
    )
    if family in CASTINGS:
        assert {m.casting for m in model.modules() if isinstance(m, RMSNorm)} == {CASTINGS[family]}


def test_the_loss_kernel_is_plain_torch_s_loss():
    for transform in (LogitTransform(), LogitTransform(0.2, 30.0)):
        assert max(compare_kernel(transform, CUDA).values()) <= KERNEL_ALLOWED


def llama(layers: int, **sizes):
    import transformers

    values = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 32000, "num_hidden_layers": layers, **sizes,
    }  # fmt: skip
    return transformers.LlamaConfig(
        **values, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )


def on_device(config, *, lora: bool, recompute="none"):
    """A bf16 model of random weights on the GPU with every swap, and its receipts."""
    import transformers
    from peft import LoraConfig, get_peft_model

    register()
    with CUDA:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="rft", dtype=torch.bfloat16)
    if lora:
        names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers" in n]
        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, target_modules=names), autocast_adapter_dtype=False
        )
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(CUDA, torch.bfloat16)
    receipts = Receipts()
    apply_swaps(model, receipts, device=CUDA, kernels=True)
    apply_recompute(list(decoder_layers(model)), recompute)
    return model.train(), receipts


def one_step(model, batch):
    state = install_attention(model, "varlen")
    hidden, _ = Backbone(model, state)(batch)
    total = Head(model, kernels=True).loss_sums(hidden, batch.labels, num_label_tokens=batch.num_label_tokens)[
        "next_token"
    ]
    total.backward()
    return total.detach()


def test_blocks_of_real_width_are_verified_and_swapped():
    for widths in ({}, {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}):
        _, receipts = on_device(llama(1, **widths), lora=True)
        assert [count(receipts, w) for w in ("rms_norm kernel", "lora linear", "gated mlp", "attention block")] == [
            3,
            7,
            1,
            1,
        ]
        assert all("bf16" in " ".join(a.checked) for a in receipts.applied)


@pytest.mark.parametrize("recompute", ["none", 2, "full"])
@pytest.mark.parametrize("lora", [True, False])
def test_the_planner_s_bytes_are_near_what_a_step_takes(lora, recompute):
    config = llama(4)
    documents = random_documents(*[1024] * 8, vocabulary=32000)
    batch = packed_batch(*documents).to(CUDA)
    model, _ = on_device(config, lora=lora, recompute=recompute)
    one_step(model, batch)  # compiles, and makes workspaces
    for parameter in model.parameters():
        parameter.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one_step(model, batch)
    taken = torch.cuda.max_memory_allocated() - before
    facts = describe(model)
    problem = Problem(
        facts=facts, seq_len=8192, packs=1, memory_bytes=100 << 30, kernels=True, trained_in_full=not lora, itemsize=2,
        master_itemsize=2, document_tokens=1024,
    )  # fmt: skip
    moments = sizes_of(problem, MemoryPlan(recompute=recompute)).moments.values()
    there = ("weights", "adapter", "optimizer")  # before the step, or not at all
    modelled = max(sum(count for name, count in moment.items() if name not in there) for moment in moments)
    assert modelled == pytest.approx(taken, rel=0.08), (
        f"taken {taken / 2**20:.0f} MiB, modelled {modelled / 2**20:.0f} MiB"
    )


def test_recompute_gives_the_same_gradients_and_keeps_less():
    documents = random_documents(300, 212, 512, vocabulary=32000)
    batch = packed_batch(*documents).to(CUDA)
    found = {}
    torch.use_deterministic_algorithms(True)
    try:
        for recompute in ("none", "full"):
            torch.manual_seed(0)
            model, _ = on_device(llama(3), lora=True, recompute=recompute)
            torch.cuda.reset_peak_memory_stats()
            one_step(model, batch)
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found[recompute] = (gradients, torch.cuda.max_memory_allocated())
            del model
    finally:
        torch.use_deterministic_algorithms(False)
    for name, gradient in found["none"][0].items():
        assert torch.equal(found["full"][0][name], gradient), name
    assert found["full"][1] < found["none"][1]


# ---- FP8


def test_fp8_products_are_those_of_the_quantised_numbers():
    if why := fp8.why_not(torch.empty(16, 16), torch.cuda.get_device_capability()):
        pytest.skip(why)
    torch.manual_seed(0)
    x = torch.randn(300, 512, device=CUDA).bfloat16()
    weight = fp8.quantise_weight((torch.randn(768, 512, device=CUDA) * 0.05).bfloat16())
    q, scale = fp8.quantise_rows(x)
    reference, reference_scale = fp8.quantise_rows_reference(x)
    assert torch.equal(scale, reference_scale)
    assert (q.float() - reference.float()).abs().max() <= 32  # one step of the largest numbers, where roundings tie
    assert (q.float() != reference.float()).float().mean() < 1e-3
    dy = torch.randn(300, 768, device=CUDA).bfloat16()
    p, p_scale = fp8.quantise_rows(dy)
    forward = fp8.product(q, scale, weight, None, torch.bfloat16)
    back = fp8.product_back(p, p_scale, weight.by_column, weight.column_scale, torch.bfloat16)
    # the same numbers dequantised: their product in fp32 is true, in bf16 the yardstick
    for got, rows, other in (
        (forward, q.float() * scale, weight.dequantised()),
        (back, p.float() * p_scale, weight.by_column.float() * weight.column_scale),
    ):
        assert_no_worse(got, rows.bfloat16() @ other.bfloat16().t(), rows @ other.t())


def test_fp8_blocks_train_without_the_host_waiting():
    if why := fp8.why_not(torch.empty(16, 16), torch.cuda.get_device_capability()):
        pytest.skip(why)

    def linear(n, k):
        A, B = (torch.randn(s, device=CUDA).bfloat16().requires_grad_() for s in ((16, k), (n, 16)))
        return FrozenLinear(
            fp8.quantise_weight(torch.randn(n, k, device=CUDA).bfloat16() * k**-0.5), None, (Branch(A, B, 0.1),)
        )

    gate, up, down, q = linear(512, 256), linear(512, 256), linear(256, 512), linear(256, 256)
    x = torch.randn(128, 256, device=CUDA).bfloat16().requires_grad_()

    def step():
        (y,) = lora_linears(x, [q])
        lora_gated_mlp(y, gate, up, down).sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(x.grad).all()
    assert all(b.A.grad.abs().sum() > 0 for each in (gate, up, down, q) for b in each.branches)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_with_every_swap_never_waits_for_the_device(recompute):
    batch = packed_batch(*random_documents(300, 212, vocabulary=32000)).to(CUDA)
    model, _ = on_device(llama(2), lora=True, recompute=recompute)
    one_step(model, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one_step(model, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batches_of_one_size_compile_nothing_anew():
    """Ten packs of different documents and numbers of labels, after one of each divisibility by 16, which Triton looks at."""
    import triton

    def batch(*lengths):
        return packed_batch(*random_documents(*lengths, vocabulary=32000)).to(CUDA)

    model, _ = on_device(llama(2), lora=True)
    for lengths in ([32] * 16, [500, 12]):  # 496 and 510 labels
        one_step(model, batch(*lengths))
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(str(given.get("repr")))
    try:
        for number in range(2, 12):
            first = [32 + number] * number
            one_step(model, batch(*first, 512 - sum(first)))
        assert not compiled
        one_step(model, batch(300))  # another size: the hook sees what is compiled
        assert compiled
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
