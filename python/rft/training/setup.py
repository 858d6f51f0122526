"""Config -> Run, in the one order of construction: meta, adapters, surgery, shard, weights, optimizer, loader, state."""

from __future__ import annotations

import os
import random
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rft import log
from rft.adapters.lora import initialise, inject, train_everything
from rft.checkpoint.base_cache import BaseCache
from rft.checkpoint.load import Checkpoint
from rft.config.adapter import LoraConfig
from rft.config.compatibility import uses_disk
from rft.config.root import Config
from rft.data.loader import Loader
from rft.data.prepare import prepare
from rft.data.streaming import Readers, StreamedSet, StreamLoader
from rft.errors import ConfigError, Refused
from rft.losses import SftLoss
from rft.memory import planner
from rft.memory.recompute import why_not as why_no_recompute
from rft.memory.weights import WeightStream
from rft.models.attention import NAME, AttentionState, choose_backend, install_attention
from rft.models.aux_loss import RouterLoss
from rft.models.backbone import Backbone, decoder_layers
from rft.models.compiled import CompiledLayers
from rft.models.describe import describe
from rft.models.head import KERNEL_ALLOWED, Head, auto_chunk_rows, compare_kernel
from rft.models.load import build_meta, find_model, materialise
from rft.models.probe import probe_architecture, require_packing
from rft.models.receipts import Receipts
from rft.models.rope import settle_dynamic
from rft.models.surgery import apply_swaps, why_no_kernels
from rft.models.tokenizer import load_tokenizer
from rft.optim import BUILDERS, Home, Optimizer, Schedule
from rft.optim.groups import is_lora_B
from rft.parallel.apply import apply_replicate, parallelize
from rft.parallel.collectives import broadcast_json
from rft.parallel.fsdp import local_part
from rft.parallel.mesh import World
from rft.quant.packed import Packed, place
from rft.ranks import plain_number
from rft.training import without_effect
from rft.training.cuda_graph import BY_BORDERS, MicroBatchGraphs
from rft.training.flops import count_flops
from rft.training.job import DTYPES, Job
from rft.training.known import Known
from rft.training.machine import inspect_machine, limit_threads
from rft.training.memory_modes import offload_folder, save_memory
from rft.training.replan import Replanner
from rft.training.resolve import (
    plan_packs_per_step,
    plan_total_steps,
    planned_for,
    resolve_for_data,
    resolve_precision,
    resolve_rope,
    tell_rope,
)
from rft.training.resume import accumulate_on_resume
from rft.training.run import Run
from rft.training.rundir import write_run_files
from rft.training.signals import Signals
from rft.training.state import TrainState, resume_state
from rft.training.trackers import check_trackers
from rft.training.trainee import Trainee
from rft.words import counted


def inspect_job(config: Config, world: World, *, kernels: bool | None = None) -> Job:
    """Find the model, build it on meta, inject adapters, and decide every `auto` that does not depend on the data.

    kernels: whether the Triton kernels are swapped in; None = where they run (CUDA). True elsewhere needs Triton's interpreter.
    """
    check_trackers(config.log)
    limit_threads()
    machine = inspect_machine(world.device, world.world_size)
    config, decisions = resolve_precision(config, machine)
    config, of_rope = resolve_rope(config)
    decisions += of_rope
    source = find_model(config.model)
    config, of_rope = tell_rope(config, source.rope)
    decisions += of_rope
    tokenizer = load_tokenizer(config.model)
    compute_dtype = DTYPES[config.train.precision]
    master_dtype = torch.float32 if compute_dtype == torch.float32 else DTYPES[config.train.master]
    probed = probe_architecture(source, config.model, world.device)
    model = build_meta(source, config.model, compute_dtype, vocab_size=tokenizer.vocab_size, attention=probed.attention)
    receipts = Receipts()
    wide = frozenset(name for name, p in model.named_parameters() if p.dtype != compute_dtype)
    if isinstance(config.adapter, LoraConfig):
        receipts.ask("lora")
        model = inject(
            model,
            config.adapter,
            dtype=master_dtype,
            base_id=source.base_id,
            new_token_ids=tokenizer.added_ids,
            receipts=receipts,
        )
        wide = frozenset()
    else:
        receipts.ask("full fine-tuning")
        train_everything(model, dtype=master_dtype)
    facts = describe(model)
    if source.rope:
        facts = replace(facts, max_positions=config.model.rope.target_length)
        receipts.apply("positions", facts.num_layers, facts.num_layers, source.rope)
        if config.model.rope.method == "none":
            log.warn(f"positions beyond those that the model was trained for, without scaling: {source.rope}")
    no_kernels = why_no_kernels(world.device) if kernels is None else None if kernels else "switched off by the caller"
    if no_kernels:
        receipts.decline("kernels", 0, no_kernels)
    if config.model.base_weights == "fp8":
        from rft.quant.fp8 import refuse_without_fp8

        refuse_without_fp8(world.device, emulate=bool(kernels))
    head_trained = any(p.requires_grad for p in model.get_output_embeddings().parameters())
    itemsize = torch.empty((), dtype=compute_dtype).element_size()
    rows = auto_chunk_rows(
        world.device.type, facts.vocab_size, kernels=not no_kernels, head_trained=head_trained, itemsize=itemsize
    )
    can_recompute = not why_no_recompute(list(decoder_layers(model)))
    known = Known(
        facts=facts,
        machine=machine,
        attention=choose_backend(
            config.model.attention,
            world.device,
            compute_dtype,
            probed.needs,
            first=BY_BORDERS if config.train.cuda_graph else (),
        ),
        chunk_rows=rows,
        kernels=not no_kernels,
        isolates=probed.isolates,
        can_recompute=can_recompute,
    )
    given = config
    config, more = known.resolve(config)
    without_effect.tell(known.seen(given, config))
    planned = None
    if machine.kind == "cuda":
        planned = planned_for(
            config, facts, machine, kernels=not no_kernels, can_recompute=can_recompute, isolates=probed.isolates
        )
    assert isinstance(config.train.micro_batch, int)
    require_packing(
        probed, packing=config.data.packing, micro_batch=config.train.micro_batch, name=type(model).__name__
    )
    return Job(
        config=config,
        world=world,
        machine=machine,
        source=source,
        tokenizer=tokenizer,
        model=model,
        wide=wide,
        facts=facts,
        probed=probed,
        receipts=receipts,
        decisions=[*decisions, *more],
        kernels=not no_kernels,
        planned=planned,
        known=known,
        given=given,
    )


def add_data(job: Job, rows: Iterable[dict[str, Any]] | None) -> None:
    """Prepare the data or find it prepared, and decide what depends on it."""
    lead = job.world.local_rank == 0
    readers = stream_readers(job.world) if job.config.data.streaming else None
    seed = job.config.train.seed
    job.prepared = prepare(job.config.data, job.tokenizer, rows=rows, lead=lead, seed=seed, readers=readers)
    seq_len = job.config.data.seq_len
    assert seq_len is not None
    if isinstance(job.prepared.train, StreamedSet):
        mean_length = float(seq_len)  # no document is known yet; none is longer than a pack
    else:
        lengths = np.minimum(job.prepared.train.lengths().astype(np.float64), seq_len)
        mean_length = float((lengths**2).sum() / lengths.sum())
    job.config, decisions = resolve_for_data(job.config, job.machine, mean_length, job.facts.is_moe)
    job.decisions += decisions
    if job.planned is not None:
        counts = job.prepared.report["train"]
        labelled = counts.get("trained_tokens", 0) / max(counts.get("tokens", 0), 1)
        problem = replace(job.planned.problem, label_share=labelled or 1.0, document_tokens=mean_length)
        job.planned = planner.again(job.planned, problem)


def stream_readers(world: World) -> Readers:
    """The processes of this machine as readers of one stream; their windows get a name that is new for each start."""
    token = broadcast_json(uuid.uuid4().hex if world.rank == 0 else None, world.group)
    count = plain_number("LOCAL_WORLD_SIZE", 0) if world.world_size > 1 else 1
    if not count:  # a launcher that does not say who shares a machine: then each reads for itself
        return Readers(f"{token}-{world.rank}")
    own = world.local_rank if count > 1 else 0
    return Readers(f"{token}-{world.rank - own}", own, count)


def build_run(job: Job, run_dir: Path, checkpoint: Checkpoint | None) -> Run:
    """Weights, optimizer, loaders and state: a Run that is ready for its next step.

    checkpoint: where to go on from; None = from the start. Raises RftError kinds for whatever cannot be had as asked.
    """
    be_deterministic(job)
    seed_everything(job.config.train.seed)
    loader, eval_loader = build_loaders(job)
    packs_per_step = plan_steps(job, loader, checkpoint)
    total_steps = plan_total_steps(job.config, lambda epoch: steps_in_epoch(loader, epoch, packs_per_step))
    if total_steps == 0:
        raise ConfigError("train.epochs", f"{job.config.train.epochs:g} is no step at all", wanted="at least one step")
    seen = job.known.seen(job.given, job.config)
    without_effect.tell(replace(seen, steps=total_steps), but=seen)
    refuse_many_updates(job, packs_per_step)
    if uses_disk(job.config):
        offload_folder(job.config, run_dir)  # raises before any weight is read
    trainee = build_trainee(job, run_dir)
    optimizer = build_optimizer(job, trainee, run_dir, packs_per_step=packs_per_step)
    config = job.config
    run = Run(
        config=config,
        decisions=job.decisions,
        run_dir=run_dir,
        device=job.world.device,
        model=trainee.model,
        trainee=trainee,
        losses=trainee.losses,
        optimizer=optimizer,
        schedule=Schedule(config.optim.schedule, total_steps, optimizer.param_groups),
        loader=loader,
        packs_per_step=packs_per_step,
        total_steps=total_steps,
        state=TrainState(packs_per_step=packs_per_step, total_steps=total_steps, eval_key=eval_key(job)),
        eval_loader=eval_loader,
        rank=job.world.rank,
        world_size=job.world.world_size,
        local_rank=job.world.local_rank,
        data_group=job.world.group,
        signals=Signals(config.checkpoint.signal_timeout_seconds),
        source=job.source,
        tokenizer=job.tokenizer,
        prepared=job.prepared,
        flops=count_flops(trainee.model, job.facts),
        device_name=job.machine.device_name,
        receipts=job.receipts.to_json(),
        planned=job.planned,
        replanner=Replanner(job, run_dir),
    )
    if config.train.cuda_graph:
        run.graphs = build_graphs(job, run)
    if config.train.compile:
        tell_compiled(job, run)
    seed_everything(
        config.train.seed + job.world.rank
    )  # dropout differs by rank, and does not depend on how weights were read
    if checkpoint is not None:
        resume_state(run, checkpoint)
        run.saved_step, run.saved_path = checkpoint.step, checkpoint.path
    return run


def why_no_graph(job: Job) -> str | None:
    """Why a micro-batch of this job cannot be a CUDA graph, or None."""
    config = job.config
    if job.world.device.type != "cuda":
        return f"a {job.world.device.type} has no CUDA graphs"
    if job.world.world_size > 1:
        return f"{job.world.world_size} ranks sum their gradients during the backward, outside of a graph"
    if config.memory.recompute != "none" or config.memory.offload != "none":
        saves = f'recompute "{config.memory.recompute}", offload "{config.memory.offload}"'
        return f"the memory plan needs {saves}, which a graph cannot hold"
    if config.model.attention not in BY_BORDERS:
        return f"attention {config.model.attention} needs every document's length on the host; {' and '.join(BY_BORDERS)} do not"
    needs = job.probed.needs
    if not job.probed.isolates or needs.chunk:
        return "this model needs the documents' lengths on the host"
    return "experts take as many tokens as each batch gives them" if job.facts.is_moe else None


def build_graphs(job: Job, run: Run) -> MicroBatchGraphs:
    """Raises Refused where there can be none; what only shows when a graph is made is told by a receipt."""
    why = why_no_graph(job)
    if why:
        raise Refused("train.cuda_graph = true", why, do="set train.cuda_graph = false")
    drops = isinstance(job.config.adapter, LoraConfig) and job.config.adapter.dropout > 0

    def tell(checked: dict[str, float] | None, why_not: str | None) -> None:
        if why_not is not None:
            job.receipts.decline("cuda graph", 1, why_not)
            log.warn(f"no CUDA graph: {why_not}")
        else:
            how = "forward and backward of a micro-batch, one graph for each shape" + (
                "; not compared, since dropout draws anew" if drops else ""
            )
            job.receipts.apply("cuda graph", 1, 1, how, checked)
            log.say("graph", how)
        run.receipts = job.receipts.to_json()
        if run.is_main and run.prepared is not None:
            write_run_files(run)

    trained = [p for p in run.trainee.parameters() if p.requires_grad]
    return MicroBatchGraphs(run.trainee, trained, run.losses.terms, run.device, tell, compare=not drops)


def compile_layers(job: Job, layers: list[torch.nn.Module], attention: AttentionState) -> CompiledLayers:
    """The layers compiled when they are first called. Raises Refused where none can be; what only shows then is told by a receipt."""
    config = job.config
    job.receipts.ask("compiled layers")
    if job.probed.attention != NAME:
        raise Refused(
            "train.compile = true",
            "this model does not take its attention from a registry, so it cannot be an op of its graphs",
            do="set train.compile = false",
        )
    if config.model.attention == "flex":
        raise Refused(
            "train.compile = true",
            "attention is FlexAttention here, which is compiled itself, and torch does not compile inside an op",
            do="set train.compile = false, or another model.attention",
        )
    drops = isinstance(config.adapter, LoraConfig) and config.adapter.dropout > 0
    compiled = CompiledLayers(layers, attention, compare=not (drops or job.probed.needs.dropout))
    if not compiled.count:
        raise Refused("train.compile = true", next(iter(compiled.declined)), do="set train.compile = false")
    return compiled


def tell_compiled(job: Job, run: Run) -> None:
    """Receipts of compiled layers: once the first forward in training has settled each of them, and again where that changes."""
    what = "compiled layers"

    def tell(compiled: CompiledLayers) -> None:
        first = not any(entry.what == what for entry in job.receipts.applied)
        declined_before = {d.why for d in job.receipts.declined if d.what == what}
        job.receipts.forget(what)
        if compiled.count:
            job.receipts.apply(what, compiled.count, len(compiled.layers), compiled.describe(), compiled.checked)
            say = log.say if first else log.detail
            say("compiled", f"{compiled.count} of {len(compiled.layers)} layers, {compiled.describe()}")
        for why, count in compiled.declined.items():
            job.receipts.decline(what, count, why)
            if why not in declined_before:
                log.warn(f"{counted(count, 'decoder layer')} not compiled: {why}")
        run.receipts = job.receipts.to_json()
        if run.is_main and run.prepared is not None:
            write_run_files(run)

    run.trainee.compiled.tell = tell  # type: ignore[union-attr]


def refuse_many_updates(job: Job, packs_per_step: int) -> None:
    """`optim.in_backward` applies a gradient as soon as a backward brings it: a step may have one backward only."""
    micro_batch = job.config.train.micro_batch
    assert isinstance(micro_batch, int)
    count = packs_per_step // (micro_batch * job.world.world_size)
    if job.config.optim.in_backward and count > 1:
        raise ConfigError(
            "optim.in_backward = true",
            f"a step has {count} micro-batches of {micro_batch} pack{'s' if micro_batch > 1 else ''}, and each would be an update",
            wanted="one micro-batch a step",
            do="set train.accumulate = 1 with train.micro_batch, or leave out optim.in_backward",
        )


def build_trainee(job: Job, run_dir: Path | None = None) -> Trainee:
    """The model with everything swapped in, sharded where asked, its weights read, around which the trainee is put."""
    config, world, model = job.config, job.world, job.model
    apply_swaps(model, job.receipts, device=world.device, kernels=job.kernels)
    attention = install_attention(model, config.model.attention)
    job.receipts.apply(
        f"attention {config.model.attention}", job.facts.num_layers, job.facts.num_layers, "documents kept apart"
    )
    router = train_router(job)
    losses = SftLoss(router=router is not None)
    head = build_head(job)
    backbone = Backbone(model, attention, router_logits=losses.router, isolate=job.probed.isolates)
    trainee = Trainee(model, backbone, head, losses, router=router)
    layers = list(decoder_layers(model))
    weights = weights_on_host(job, trainee, layers)
    save_memory(job, trainee, layers, run_dir)
    if config.train.compile:
        # a plain attribute, as the others: no submodule. Within checkpointing and offloading, and before anything shards
        object.__setattr__(trainee, "compiled", compile_layers(job, layers, attention))
    mixed = job.compute_dtype if job.compute_dtype != job.master_dtype else None
    parallelize(trainee, world, job.mode, layers=layers, compute_dtype=mixed)  # type: ignore[arg-type]
    if job.mode != "none":
        how = {"shard": "FSDP2, a group a layer", "replicate": "gradients summed in fp32 during the backward"}[job.mode]
        job.receipts.apply(f"parallel {job.mode}", 1, 1, f"{world.world_size} ranks, {how}")
    packed = pack_base(job, layers) if config.model.base_weights in ("nf4", "int8") else None
    cache = BaseCache.of(job.source, packed, world.device, config.model.cache_gb) if packed is not None else None
    codes = cache.codes if cache is not None else None
    on_host = () if weights is None else weights.covered()
    materialise(model, job.source, world.device, root=trainee, local_part=local_part, codes=codes, on_host=on_host)
    if packed is not None:
        tell_packed(job, packed, cache)
    settle_dynamic(model, config.model.rope.target_length)
    if isinstance(config.adapter, LoraConfig):
        initialise(model, config.adapter, seed=config.train.seed, local_part=local_part)
    if config.model.base_weights == "fp8":
        quantise_to_fp8(job, layers)
    if weights is not None:
        weights.take_frozen()
    if job.mode == "replicate":
        apply_replicate(trainee, world)
    return trainee.train()


def weights_on_host(job: Job, trainee: Trainee, layers: list[torch.nn.Module]) -> WeightStream | None:
    """Where the weights of the layers lie when not on the GPU; None: they do."""
    if job.config.memory.offload_weights == "none":
        return None
    if why := why_no_recompute(layers):
        raise Refused('memory.offload_weights = "cpu"', why, do="leave out memory.offload_weights")
    weights = WeightStream(layers, job.world.device)
    # a plain attribute: no submodule, so no parameter changes its name
    object.__setattr__(trainee, "weights", weights)
    return weights


def pack_base(job: Job, layers: list[torch.nn.Module]) -> Packed:
    """Containers for frozen linears of the decoder layers, which take their weights in fewer bits as these are read."""
    kind = job.config.model.base_weights
    assert kind in ("nf4", "int8")
    placed = place(job.model, layers, kind)
    if not placed.linears:
        why = next(iter(placed.left), "its decoder layers have no frozen linear")
        raise Refused(f'model.base_weights = "{kind}"', why, do='set model.base_weights = "bf16"')
    return placed


def tell_packed(job: Job, packed: Packed, cache: BaseCache | None) -> None:
    """Receipt of a quantised base: how much, how well, whence its codes came, and what stayed in 16 bits."""
    size = packed.bytes() / packed.numbers * 8
    how = f"{packed.bytes() / 2**30:.2f} GiB, {size:.2f} bits a number; dequantised into one shared buffer"
    error = job.model.rft_packing_error
    if cache is not None:
        came = cache.finish(error, keep=job.world.local_rank == 0)
        log.say("base", f"{packed.kind}, {came}")
        how, error = f"{how}; {came}", cache.error
    checked = {"largest relative error of a weight": error}
    job.receipts.apply(f"{packed.kind} base", len(packed.linears), packed.of, how, checked)
    for why, count in packed.left.items():
        job.receipts.decline(f"{packed.kind} base", count, why)
    share = packed.left_numbers / (packed.numbers + packed.left_numbers)
    if share > 0.05:
        log.warn(
            f'model.base_weights = "{packed.kind}": {share:.0%} of the weights in the decoder layers stay in 16 bits '
            f"({', '.join(packed.left)}): {packed.left_numbers * job.compute_dtype.itemsize / 2**30:.1f} GiB"
        )


def quantise_to_fp8(job: Job, layers: list[torch.nn.Module]) -> None:
    """Frozen linears of the decoder layers in FP8, once their weights are there."""
    from rft.models.decoder_layer import readers_of_one_input
    from rft.quant.fp8 import KEPT_AT_EACH_END, quantise_base

    keep = job.config.model.keep_ends
    keep = KEPT_AT_EACH_END if keep is None else keep
    done = quantise_base(layers, keep_ends=keep, readers=readers_of_one_input)
    if not done.count:
        why = ", ".join(done.left) or "its decoder layers have no frozen linear"
        raise Refused(
            'model.base_weights = "fp8"', f"no linear can be held so: {why}", do='set model.base_weights = "bf16"'
        )
    how = "e4m3 by row, both layouts; LoRA on unquantised inputs"
    job.receipts.apply("fp8 base", done.count, done.of, how, {"largest relative error of a weight": done.error})
    for why, count in done.left.items():
        job.receipts.decline("fp8 base", count, why)
    if job.kernels:
        from rft.models.decoder_layer import count_handed_rows

        handed, readers = count_handed_rows(layers)
        if handed:
            how = "inputs of q, k, v and of gate, up quantised by the norm before"
            job.receipts.apply("fp8 inputs", handed, readers, how)
        if handed < readers:
            why = "their layer is not served by `add and norm`: a pass of their own quantises them"
            job.receipts.decline("fp8 inputs", readers - handed, why)


def build_head(job: Job) -> Head:
    """The loss head, through the kernel where it serves and agrees with plain torch on this device."""
    rows, transform = job.config.loss.chunk_rows, job.probed.transform
    head = Head(job.model, transform, chunk_rows=rows, kernels=job.kernels)
    shown = "the least logits" if rows == "least" else f"{rows} rows of logits"
    if job.kernels:
        checked: dict[str, float] = {}
        why = head.why_not_kernel()
        if not why:
            checked = compare_kernel(transform, job.world.device)
            worst = max(checked, key=lambda k: checked[k])
            if not checked[worst] <= KERNEL_ALLOWED:
                why = f"{worst} differs by {checked[worst]:.1e} (allowed {KERNEL_ALLOWED:g})"
        if not why:
            job.receipts.apply("linear cross entropy kernel", 1, 1, f"{shown} at a time, labelled rows alone", checked)
            return head
        job.receipts.decline("linear cross entropy kernel", 1, why)
        head = Head(job.model, transform, chunk_rows=rows)
    job.receipts.apply("loss head", 1, 1, f"{shown} at a time, labelled rows alone")
    return head


def train_router(job: Job) -> RouterLoss | None:
    """The router's balance loss where the router is trained; raises Refused where it cannot be had."""
    if not job.facts.is_moe or isinstance(job.config.adapter, LoraConfig):
        return None
    loss = RouterLoss.of(job.source.config, job.probed)
    job.receipts.apply("router balance loss", 1, 1, "a pack at a time, over its real tokens")
    return loss


def build_optimizer(
    job: Job, trainee: Trainee, run_dir: Path | None = None, *, packs_per_step: int | None = None
) -> Optimizer:
    """The optimizer over what is trained. Where ranks hold whole weights, bf16 copies are computed with and fp32 masters updated."""
    config, memory = job.config, job.config.memory
    split = job.master_dtype != job.compute_dtype and job.mode != "shard"  # FSDP2 keeps fp32 shards and gathers bf16
    named = [(name, p) for name, p in trainee.named_parameters() if p.requires_grad]
    tables = {id(p) for m in trainee.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    model: Any = trainee.model
    output = {id(p) for p in model.get_output_embeddings().parameters()}
    weights: WeightStream | None = getattr(trainee, "weights", None)
    home = None
    if memory.offload_states != "none":
        home = Home(memory.offload_states, job.world.device, offload_folder(config, run_dir))
    optimizer = BUILDERS[type(config.optim)](
        named,
        config.optim,
        compute_dtype=job.compute_dtype if split else None,
        keep=frozenset(f"model.{name}" for name in job.wide),
        embeddings=frozenset(name for name, p in named if id(p) in tables),
        head=frozenset(name for name, p in named if id(p) in output),
        narrow_gradients=added_once(job, trainee, packs_per_step) if split else frozenset(),
        seed=config.train.seed,
        kernels=job.kernels,
        home=home,
        away=weights,
    )
    tell_optimizer(job, optimizer)
    if weights is not None:
        job.receipts.apply("weights on cpu", job.facts.num_layers, job.facts.num_layers, weights.describe())
    return optimizer


def added_once(job: Job, trainee: Trainee, packs_per_step: int | None) -> frozenset[str]:
    """Trained parameters to whose gradient a step brings one part, in the compute type: an fp32 tensor for it would hold the same.

    Not those of adapters and of the output head: theirs come in fp32 from where they are made.
    """
    if (
        job.mode != "none"
        or packs_per_step != job.config.train.micro_batch
        or isinstance(job.config.adapter, LoraConfig)
    ):
        return frozenset()
    uses = Counter(id(p) for _, p in trainee.named_parameters(remove_duplicate=False))
    model: Any = trainee.model
    uses.update(id(p) for p in model.get_output_embeddings().parameters())
    return frozenset(name for name, p in trainee.named_parameters() if p.requires_grad and uses[id(p)] == 1)


def tell_optimizer(job: Job, optimizer: Optimizer) -> None:
    """Receipts of what the optimizer does besides plain updates."""
    config, count = job.config, len(optimizer.parameters)
    how = ", ".join(f"{number} tensors by {rule}" for rule, number in optimizer.rules().items())
    job.receipts.apply(f"optimizer {config.optim.name}", count, count, how)
    if job.master_dtype == torch.bfloat16:
        narrow = sum(p.dtype == torch.bfloat16 for p in optimizer.parameters)
        job.receipts.apply("bf16 weights", narrow, count, "rounded stochastically, noise by seed, step and name")
    if config.optim.lora_plus_ratio:
        factors = sum(is_lora_B(name) for group in optimizer.param_groups for name in group["names"])
        if not factors:
            raise Refused("optim.lora_plus_ratio", "no B matrix is trained here", do="leave it out")
        job.receipts.apply(
            "lora plus", factors, count, f"B matrices at {config.optim.lora_plus_ratio:g} times the rate"
        )
    if config.optim.in_backward:
        job.receipts.apply("step in backward", count, count, "each weight is updated when its gradient is there")
    if config.memory.offload_states != "none":
        job.receipts.apply(
            f"states on {config.memory.offload_states}", count, count, "visit the device a bucket at a time"
        )


# ---- data


def build_loaders(job: Job) -> tuple[Loader | StreamLoader, Loader | None]:
    """Training packs in the epoch's seeded order, held-out packs in the set's own."""
    assert job.prepared is not None
    data, train = job.config.data, job.config.train
    assert data.seq_len is not None
    common: dict[str, Any] = {
        "seq_len": data.seq_len,
        "packing": data.packing,
        "overlong": data.overlong,
        "seed": train.seed,
        "pad_id": job.tokenizer.pad_id,
        "rank": job.world.rank,
        "world_size": job.world.world_size,
        "micro_batch": train.micro_batch,
        "device": job.world.device,
    }
    loader: Loader | StreamLoader
    if isinstance(job.prepared.train, StreamedSet):
        loader = StreamLoader(job.prepared.train, **common)
    else:
        loader = Loader(job.prepared.train, **common, shuffle="window" if data.shuffle == "window" else True)
        loader.plan(0)  # raises where no label survives, before any weight is read
    held_out = job.prepared.eval
    eval_loader = None if held_out is None else Loader(held_out, **common, shuffle=False, name="eval")
    if eval_loader is not None:
        eval_loader.plan(0)
    return loader, eval_loader


def plan_steps(job: Job, loader: Loader | StreamLoader, checkpoint: Checkpoint | None) -> int:
    """Packs of a step over all ranks. A resumed run keeps what it had, dealt out anew over the ranks of now."""
    world_size, train = job.world.world_size, job.config.train
    if checkpoint is not None and isinstance(checkpoint.state.get("packs_per_step"), int):
        packs = checkpoint.state["packs_per_step"]
        assert isinstance(train.micro_batch, int)
        if train.accumulate is None or checkpoint.world_size != world_size:
            accumulate_on_resume(packs, train.micro_batch, world_size)  # raises where it does not divide
            return packs
    # Of a stream no document is known; where it matters (packing "none") train.accumulate is given.
    mean = 1.0 if isinstance(loader, StreamLoader) else loader.plan(0).num_tokens / loader.plan(0).num_packs
    packs, _ = plan_packs_per_step(job.config, world_size, mean)
    return packs


def steps_in_epoch(loader: Loader | StreamLoader, epoch: int, packs_per_step: int) -> int:
    assert isinstance(loader, Loader), "data.streaming needs train.max_steps"
    return loader.steps_in_epoch(epoch, packs_per_step)


def eval_key(job: Job) -> str:
    assert job.prepared is not None
    return "" if job.prepared.eval is None else job.prepared.eval.key


# ---- randomness


def seed_everything(seed: int) -> None:
    """Every generator that a library may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def be_deterministic(job: Job) -> None:
    """Bit-equal repeats where `train.deterministic` says so; a CPU gives them anyway, for one number of threads."""
    wanted = bool(job.config.train.deterministic)
    if job.world.device.type == "cuda":
        if wanted:
            # Read by cuBLAS when it makes its first handle, which is at the first matmul, later than here.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # time for nothing
        torch.use_deterministic_algorithms(wanted)
        reason = next((d.reason for d in job.decisions if d.key == "train.deterministic"), "as the config says")
        if wanted:
            job.receipts.apply("deterministic", 1, 1, reason)
        else:
            job.receipts.decline("deterministic", 1, reason)
        log.detail("exact", f"deterministic algorithms {'on' if wanted else 'off'}: {reason}")
