"""Whole training steps of Llama shapes with random weights: tokens/s and memory, against Unsloth and transformers + Liger + PEFT.

    python bench/train/step.py                                 every case, every system, results shown
    python bench/train/step.py --cases lora-bf16/doc-8192 --systems rft --profile --results FILE
    python bench/train/step.py --tiny                          the same path with tiny shapes on a CPU (no figures worth keeping)

Cases are named as the project's targets name them. Each case and system runs in a process of its own within `--part-seconds`, and its line
is written when it ends, so that one that fails or is cut short loses nothing else; the next one's imports overlap (turn.py). Weights are drawn on the device from the config; Unsloth
reads a folder, which is written once a shape. In FP8 cases peers train bf16 LoRA. `doc-8192`: one document, every token labelled.
`packed-400`: lengths drawn lognormal with mean 400, capped at 2,048, packed; peers get 20 rows of 410. `-default-settings`: whatever each
system does by itself (rft: its planner); the others run without recompute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import turn

NEEDS = "a CUDA GPU of 80 GiB or more; liger-kernel and unsloth as peers"
SEQ_LEN = 8192
WARM_UP, STEPS = 3, 8
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
    },
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    shape: str
    adapter: str
    """lora or none."""
    base: str
    """bf16 or fp8."""
    documents: str
    """doc or packed."""
    defaults: bool = False


def _cases() -> Iterator[Case]:
    for base in ("bf16", "fp8"):
        for documents, name in (("doc", "doc-8192"), ("packed", "packed-400")):
            for defaults in (False, True):
                full = f"train/llama-8b/lora-{base}/{name}{'-default-settings' if defaults else ''}"
                yield Case(full, "llama-8b", "lora", base, documents, defaults)
    yield Case("train/llama-1b/full-bf16/doc-8192", "llama-1b", "none", "bf16", "doc")


CASES = {c.name: c for c in _cases()}
SYSTEMS = ("rft", "unsloth", "liger", "transformers", "transformers-compiled")
USUAL = ("rft", "unsloth", "liger")
"""Systems of a run without --systems: the two that are nearest. The others are slower, and a compilation takes a minute or more."""
ORDER = (
    "train/llama-8b/lora-bf16/doc-8192", "train/llama-8b/lora-fp8/doc-8192", "train/llama-1b/full-bf16/doc-8192",
    "train/llama-8b/lora-bf16/packed-400", "train/llama-8b/lora-fp8/packed-400", "train/llama-8b/lora-bf16/doc-8192-default-settings",
    "train/llama-8b/lora-bf16/packed-400-default-settings", "train/llama-8b/lora-fp8/doc-8192-default-settings",
    "train/llama-8b/lora-fp8/packed-400-default-settings",
)  # fmt: skip
"""What matters most comes first, in case time runs out."""


@dataclass(frozen=True)
class Setting:
    """What a child process is told."""

    case: Case
    tiny: bool
    attention: str
    narrow: bool = False
    """All layers, an eighth as wide, on an eighth of the tokens: so little for the device that a step takes what the host takes."""
    cuda_graph: bool = False
    """rft launches forward and backward as one graph."""
    compile: bool = False
    """rft compiles its decoder layers."""

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    @property
    def seq_len(self) -> int:
        return 16 if self.tiny else SEQ_LEN // 8 if self.narrow else SEQ_LEN

    def config(self) -> Any:
        import transformers

        sizes = {**SHAPES[self.case.shape], **(TINY if self.tiny else {})}
        if self.narrow and not self.tiny:
            sizes |= {
                name: sizes[name] // 8
                for name in (
                    "hidden_size",
                    "intermediate_size",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "vocab_size",
                )
            }
        rope = {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
        return transformers.LlamaConfig(
            **sizes,
            rope_parameters=rope,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            bos_token_id=1,
            eos_token_id=2,
        )

    def lengths(self) -> list[int]:
        """Documents of one row."""
        if self.case.documents == "doc":
            return [self.seq_len]
        import numpy as np

        rng = np.random.default_rng(0)
        mean, cap = (5, 8) if self.tiny else (400, 2048)
        lengths: list[int] = []
        while sum(lengths) < self.seq_len:
            drawn = int(min(cap, max(2, rng.lognormal(np.log(mean) - 0.32, 0.8))))
            lengths.append(min(drawn, self.seq_len - sum(lengths)))
        return lengths

    def peer_rows(self) -> tuple[int, int]:
        """(rows, tokens a row) of the same work without packing."""
        if self.case.documents == "doc":
            return 1, self.seq_len
        return (2, 8) if self.tiny else (20, 410)


Step = Callable[[], tuple[Any, int]]
"""Runs one optimizer step; gives (loss, real tokens)."""


# ---- rft


def build_rft(setting: Setting) -> tuple[Step, dict[str, Any]]:
    """Through the library's own parts, in the order in which a run is set up; no data files and no weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from rft.adapters.lora import inject, train_everything
    from rft.config.adapter import LoraConfig
    from rft.config.optim import AdamWConfig
    from rft.losses import SftLoss
    from rft.memory.recompute import apply_recompute
    from rft.models.attention import Needs, choose_backend, install_attention, register
    from rft.models.backbone import Backbone, decoder_layers
    from rft.models.compiled import CompiledLayers
    from rft.models.decoder_layer import readers_of_one_input
    from rft.models.describe import describe
    from rft.models.head import Head, auto_chunk_rows
    from rft.models.receipts import Receipts
    from rft.models.surgery import apply_swaps
    from rft.optim import BUILDERS, clip_factor, grad_norm
    from rft.quant.fp8 import quantise_base
    from rft.training.cuda_graph import MicroBatchGraphs
    from rft.training.trainee import Trainee

    case, device = setting.case, torch.device(setting.device)
    dtype = torch.float32 if setting.tiny else torch.bfloat16
    register()
    config = setting.config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="rft", dtype=dtype)
    receipts = Receipts()
    if case.adapter == "lora":
        model = inject(model, LoraConfig(r=16), dtype=torch.float32, receipts=receipts)
    else:
        train_everything(model, dtype=torch.float32)
    facts = describe(model)
    turn.take()
    began = time.perf_counter()
    apply_swaps(model, receipts, device=device, kernels=True)
    swap_seconds = time.perf_counter() - began
    size = config.head_dim
    backend, _ = choose_backend(setting.attention, device, dtype, Needs(head_size=size, value_size=size))
    state = install_attention(model, backend)
    layers = list(decoder_layers(model))
    rows = auto_chunk_rows(device.type, facts.vocab_size, kernels=True, head_trained=case.adapter == "none")
    packs, recompute = (1, "none") if not case.defaults else planned(setting, facts, rows)
    apply_recompute(layers, recompute)
    compiled = CompiledLayers(layers, state) if setting.compile else None
    head = Head(model, chunk_rows=rows, kernels=True)
    trainee = Trainee(model, Backbone(model, state), head, SftLoss())
    fill_on_device(model, device)
    if case.base == "fp8":
        done = quantise_base(layers, readers=readers_of_one_input)
        receipts.apply("fp8 base", done.count, done.of, "e4m3 by row")
    named = [(n, p) for n, p in trainee.named_parameters() if p.requires_grad]
    optim = AdamWConfig(name="adamw", lr=1e-5)
    uses = Counter(id(p) for _, p in trainee.named_parameters(remove_duplicate=False))
    optimizer = BUILDERS[AdamWConfig](
        named, optim, compute_dtype=dtype if dtype != torch.float32 else None, kernels=True,
        narrow_gradients=frozenset(n for n, p in named if uses[id(p)] == 1 and case.adapter == "none"),
    )  # fmt: skip
    batch = packed(setting.lengths(), packs, config.vocab_size).to(device)
    trainee.train()
    told: list[str] = []
    if compiled is not None:
        compiled.tell = lambda c: told.append(f"{c.count}/{len(layers)} compiled, {c.describe()} {c.declined or ''}")
    graphs = None
    if setting.cuda_graph:
        graphs = MicroBatchGraphs(
            trainee, optimizer.parameters, trainee.losses.terms, device, lambda *said: told.append(str(said))
        )

    def step() -> tuple[Any, int]:
        if graphs is not None:
            loss = graphs(batch, {"next_token": batch.label_weight})["next_token"]
        else:
            loss = trainee(batch)["next_token"] / batch.label_weight
            loss.backward()
        optimizer.step(clip_factor(grad_norm(optimizer.parameters), 1.0))
        optimizer.zero_grad()
        return loss.detach(), batch.num_tokens

    applied = {a.what: f"{a.count}/{a.of}" for a in receipts.applied}
    facts_told = {"attention": backend, "packs": packs, "recompute": recompute, "swap_seconds": swap_seconds, **applied}
    if setting.compile:
        facts_told["compiled"] = told
    return step, facts_told | ({"cuda graph": told} if setting.cuda_graph else {})


def planned(setting: Setting, facts: Any, rows: int) -> tuple[int, Any]:
    """What `auto` is on this machine, at the default tokens_per_step."""
    import torch

    from rft.memory import planner
    from rft.memory.devices import rates_of
    from rft.memory.speed import Machinery

    if setting.tiny:
        return 2, 2
    problem = planner.Problem(
        facts=facts, seq_len=setting.seq_len, packs=32768 // setting.seq_len, memory_bytes=torch.cuda.get_device_properties(0).total_memory,
        kernels=True, trained_in_full=setting.case.adapter == "none", itemsize=2, base=setting.case.base, attention="fa4",
        document_tokens=sum(n * n for n in setting.lengths()) / sum(setting.lengths()),
    )  # fmt: skip
    made = planner.plan(
        problem, planner.Given(chunk_rows=rows, tiled_mlp=1), Machinery(rates_of(torch.cuda.get_device_name()))
    )
    chosen = made.chosen
    print(f"plan: {chosen.plan}, {chosen.total / 2**30:.1f} GiB: {chosen.sizes.allocated}")
    return chosen.plan.micro_batch, chosen.plan.recompute


def fill_on_device(model: Any, device: Any) -> None:
    """Random weights drawn where they stay; rotary tables made again, which have no values on meta."""
    import torch

    from rft.models.backbone import find_base

    model.to_empty(device=device)
    base = find_base(model)
    base.rotary_emb = type(base.rotary_emb)(config=base.rotary_emb.config).to(device)
    model.get_base_model().tie_weights() if hasattr(model, "get_base_model") else model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif "lora_B" in name:
                parameter.zero_()
            else:
                parameter.normal_(std=0.02)


def packed(lengths: list[int], packs: int, vocabulary: int) -> Any:
    import torch

    from rft.data.batch import Batch

    every = lengths * packs
    total = sum(every)
    ids = torch.randint(3, vocabulary, (total,), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(ids, -100)
    at = 0
    for length in every:
        labels[at : at + length - 1] = ids[at + 1 : at + length]
        at += length
    ends = torch.tensor([0, *every], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in every])
    count = int((labels != -100).sum())
    tokens = total // packs
    return Batch(
        ids[None],
        labels[None],
        positions[None],
        ends,
        None,
        tuple(every),
        (tokens,) * packs,
        total,
        count,
        float(count),
    )


# ---- peers


def build_liger(setting: Setting) -> tuple[Step, dict[str, Any]]:
    """transformers + Liger's kernels (+ PEFT), torch's fused AdamW."""
    if not setting.tiny:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    return build_transformers(setting)


def build_compiled(setting: Setting) -> tuple[Step, dict[str, Any]]:
    """transformers (+ PEFT), each decoder layer under torch.compile."""
    return build_transformers(setting, compiled=not setting.tiny)


def build_transformers(setting: Setting, *, compiled: bool = False) -> tuple[Step, dict[str, Any]]:
    """transformers (+ PEFT) as they are, torch's fused AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    case, device = setting.case, torch.device(setting.device)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            setting.config(), attn_implementation="sdpa", dtype=torch.float32 if setting.tiny else torch.bfloat16
        )
    turn.take()
    fill_on_device(model, device)
    model.config.use_cache = False
    if case.adapter == "lora":
        from peft import LoraConfig, get_peft_model

        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"))
    if case.defaults:
        if case.adapter == "lora":
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if compiled:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        for layer in base.model.layers:
            layer.compile()
    return peer_step(setting, model, device), {"recompute": "full" if case.defaults else "none"}


def build_unsloth(setting: Setting) -> tuple[Step, dict[str, Any]]:
    """Unsloth's own loader, over a folder of random weights."""
    if setting.tiny:
        raise RuntimeError("Unsloth needs a GPU")
    import unsloth  # noqa: F401  # before transformers
    from unsloth import FastLanguageModel

    case = setting.case
    turn.take()
    folder = saved_model(setting)
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=setting.seq_len, load_in_4bit=False, full_finetuning=case.adapter == "none"
    )
    if case.adapter == "lora":
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = FastLanguageModel.get_peft_model(
            model, r=16, lora_alpha=32, lora_dropout=0, bias="none", target_modules=names,
            use_gradient_checkpointing="unsloth" if case.defaults else False,
        )  # fmt: skip
    return peer_step(setting, model, "cuda"), {"recompute": "its default" if case.defaults else "none"}


def saved_model(setting: Setting) -> Path:
    """A folder with random weights of the shape and a tokenizer of plain words, written once."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = Path(tempfile.gettempdir()) / f"rft-bench-{setting.case.shape}"
    if (folder / "done").exists():
        return folder
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(setting.config(), dtype=torch.bfloat16)
    fill_on_device(model, torch.device("cuda"))
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w0"
    ).save_pretrained(folder)
    (folder / "done").touch()
    del model
    torch.cuda.empty_cache()
    return folder


def peer_step(setting: Setting, model: Any, device: Any) -> Step:
    import torch

    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    rows, length = setting.peer_rows()
    ids = torch.randint(3, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0)).to(
        device
    )

    def step() -> tuple[Any, int]:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), ids.numel()

    return step


BUILDERS = {
    "rft": build_rft, "liger": build_liger, "unsloth": build_unsloth, "transformers": build_transformers,
    "transformers-compiled": build_compiled,
}  # fmt: skip

# ---- a child measures one system


def measure(setting: Setting, system: str, profile: bool) -> dict[str, Any]:
    """tokens/s of each step, peak GiB, losses; with `profile` milliseconds a step by kind of kernel."""
    import torch

    began = time.perf_counter()
    step, facts = BUILDERS[system](setting)
    losses = [float(step()[0]) for _ in range(1 if setting.tiny else WARM_UP)]
    ready = time.perf_counter() - began
    if setting.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    rates, loss = timed(step, setting)
    if setting.narrow:
        return {"host_ms": [1e3 * count / rate for rate, count in zip(rates, [step()[1]] * len(rates), strict=True)]}
    losses.append(float(loss))
    gib = torch.cuda.max_memory_allocated() / 2**30 if setting.device == "cuda" else 0.0
    found = {"rates": rates, "gib": gib, "losses": losses, "facts": facts, "ready_seconds": ready}
    if profile:
        found["profile"] = profile_step(step, setting.device)
    return found


def timed(step: Step, setting: Setting) -> tuple[list[float], Any]:
    """(tokens/s of each step, the last loss). Steps follow one another as in training: the device's clock stands between them, and the
    host waits at the end only."""
    import torch

    if setting.device != "cuda":
        rates = []
        for _ in range(2):
            start = time.perf_counter()
            loss, tokens = step()
            rates.append(tokens / (time.perf_counter() - start))
        return rates, loss
    clocks, counts = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)], []
    clocks[0].record()
    for clock in clocks[1:]:
        loss, tokens = step()
        counts.append(tokens)
        clock.record()
    torch.cuda.synchronize()
    return [n / (a.elapsed_time(b) / 1e3) for n, a, b in zip(counts, clocks, clocks[1:], strict=False)], loss


KINDS = (  # the first that a kernel's name holds
    ("fp8 quantise", ("_quantise_kernel",)),
    ("loss", ("_accumulate_kernel", "_finish_kernel", "_rows_kernel", "_gather_kernel", "_spread_kernel", "_scale_kernel", "cross_entropy")),
    ("lora reduction", ("_lowrank_kernel", "_add_parts_kernel")),
    ("rope", ("_rope_kernel", "rope")),
    ("norm", ("_add_shares_kernel", "rms_norm", "rmsnorm", "layer_norm")),
    ("attention", ("flash", "fmha", "attn", "attention", "flex")),
    ("optimizer", ("adam", "multi_tensor", "foreach", "lpnorm")),
    ("matmul", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "mm", "matmul", "gemv", "splitk")),
    ("norm or activation (Triton)", ("_forward_kernel", "_backward_kernel")),
    ("copy or fill", ("copy", "memcpy", "memset", "fill", "cat")),
    ("elementwise", ("elementwise", "vectorized", "reduce", "index", "gather", "scatter")),
)  # fmt: skip


def profile_step(step: Step, device: str) -> dict[str, Any]:
    """Milliseconds of one step by kind of kernel, and the largest kernels by name, over two steps."""
    import torch
    from torch.profiler import ProfilerActivity

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as traced:
        for _ in range(2):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in traced.key_averages():
        ms = (event.self_device_time_total if device == "cuda" else event.self_cpu_time_total) / 1e3 / 2
        if ms <= 0:
            continue
        low = event.key.lower()
        kind = next((k for k, words in KINDS if any(word in low for word in words)), "other")
        by_kind[kind] += ms
        by_name[event.key[:100]][0] += ms
        by_name[event.key[:100]][1] += event.count / 2
    largest = sorted(by_name.items(), key=lambda item: -item[1][0])[:25]
    idle = idle_ms(traced) if device == "cuda" else []
    by_kind["idle"] = sum(ms for _, (ms, _) in idle)
    return {"kinds": dict(sorted(by_kind.items(), key=lambda item: -item[1])), "largest": largest, "idle": idle[:12]}


def idle_ms(traced: Any) -> list[tuple[str, list[float]]]:
    """Milliseconds a step in which the device waited, by the kernel that came next: (name, [ms, times]), the longest first."""
    from torch.autograd import DeviceType

    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in traced.events() if e.device_type == DeviceType.CUDA
    )
    waited: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    end = spans[0][0] if spans else 0.0
    for start, stop, name in spans:
        if start > end:
            waited[name[:100]][0] += (start - end) / 1e3 / 2
            waited[name[:100]][1] += 1 / 2
        end = max(end, stop)
    return sorted(waited.items(), key=lambda item: -item[1][0])


# ---- the parent starts one process a case and system


def command_of(case: Case, system: str, args: argparse.Namespace, answer: Path) -> list[str]:
    return [
        sys.executable, "-P", __file__, "--child", case.name, system, "--answer", str(answer), "--attention", args.attention,
        *(["--tiny"] if args.tiny else []), *(["--profile"] if args.profile else []), *(["--narrow"] if args.narrow else []),
        *(["--cuda-graph"] if args.cuda_graph else []), *(["--compile"] if args.compile else []),
    ]  # fmt: skip


def answered(status: int | None, output: str, answer: Path, verbose: bool, each: float) -> dict[str, Any] | None:
    """What a child measured, or {"error": ...}; None where the bench's time was over, which is told and is no result."""
    tail = [line for line in output.strip().splitlines() if line.strip()]
    if verbose or status:
        print("\n".join(tail[-30:]), flush=True)
    if status == turn.OUT_OF_TIME:
        print(f"    {answer.stem}: no time left", flush=True)
        return None
    if status is None:
        return {"error": f"no end after {each:.0f} s"}
    if status or not answer.exists():
        return {"error": (tail[-1] if tail else f"exit status {status}")[:300]}
    return json.loads(answer.read_text())  # type: ignore[no-any-return]


def report(results: Any, case: Case, system: str, found: dict[str, Any]) -> None:
    if "error" in found:
        results.error(case.name, system, found["error"])
        return
    if "host_ms" in found:
        results.add(f"{case.name}/host", system, "ms", found["host_ms"])
        return
    results.add(case.name, system, "tokens_per_second", found["rates"])
    results.add(case.name, system, "gib", found["gib"])
    print(
        f"    {found['facts']}, losses {[round(x, 3) for x in found['losses']]}, ready after {found['ready_seconds']:.0f} s, "
        f"each step {[round(x) for x in found['rates']]}"
    )
    for kind, ms in found.get("profile", {}).get("kinds", {}).items():
        results.add(f"{case.name}/profile", system, f"ms {kind}", ms)
    for title in ("largest", "idle"):
        for name, (ms, count) in found.get("profile", {}).get(title, []):
            print(f"    {'before ' if title == 'idle' else ''}{ms:8.2f} ms  {count:6.0f} x  {name}")


def chosen_cases(names: list[str] | None) -> list[Case]:
    every = [CASES[name] for name in ORDER]
    if not names:
        return every
    return [
        c for c in every if any(c.name == n or c.name.endswith("/" + n) or n in c.name.split("/")[1:] for n in names)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="append result lines here")
    parser.add_argument("--cases", nargs="*", help="whole names, or ends of them: lora-bf16/doc-8192")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(USUAL))
    parser.add_argument("--attention", default="auto", help="force rft's attention")
    parser.add_argument("--profile", action="store_true", help="milliseconds by kind of kernel, of rft and the peers")
    parser.add_argument(
        "--narrow", action="store_true", help="milliseconds that the host takes for a step (a result line of its own)"
    )
    parser.add_argument(
        "--cuda-graph", action="store_true", help="rft with train.cuda_graph (result lines of their own)"
    )
    parser.add_argument("--compile", action="store_true", help="rft with train.compile (result lines of their own)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU: does every line run")
    parser.add_argument("--seconds", type=float, default=3600, help="limit for all of it")
    parser.add_argument("--part-seconds", type=float, default=150, help="limit for one case of one system")
    parser.add_argument(
        "--page", action="store_true", help="rewrite the section of docs/performance.md from stored results"
    )
    parser.add_argument("--verbose", action="store_true", help="show what the processes print")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        setting = Setting(CASES[args.child[0]], args.tiny, args.attention, args.narrow, args.cuda_graph, args.compile)
        args.answer.write_text(json.dumps(measure(setting, args.child[1], args.profile)))
        return 0
    if args.page:
        from _step_page import write_page

        return write_page()
    import torch  # so that the result lines name the GPU  # noqa: F401

    from results import Results
    from timing import versions_of

    results = Results(args.results, versions=versions_of("liger-kernel", "unsloth", "flash-attn-4"))
    end = time.monotonic() + args.seconds
    # a peer runs the same in FP8 cases as in bf16 ones: measured once, told under each
    told: dict[tuple[str, str], list[Case]] = {}
    for case in chosen_cases(args.cases):
        for system in args.systems:
            name = case.name if system == "rft" else case.name.replace("fp8", "bf16")
            told.setdefault((system, name), []).append(case)
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if args.tiny:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / f"{number}.json" for number in range(len(told))]
        commands = [
            command_of(cases[0], system, args, answer) for ((system, _), cases), answer in zip(told.items(), answers, strict=True)
        ]  # fmt: skip
        ended = turn.in_turn(commands, args.part_seconds, end, environment)
        for ((system, _), cases), answer, (status, output) in zip(told.items(), answers, ended, strict=True):
            found = answered(status, output, answer, args.verbose, args.part_seconds)
            failed |= system == "rft" and (found is None or "error" in found)
            if found is None:
                continue
            for case in cases:
                if args.cuda_graph and system == "rft":
                    case = replace(case, name=f"{case.name}/cuda-graph")
                if args.compile and system == "rft":
                    case = replace(case, name=f"{case.name}/compile")
                report(results, case, system, found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
