"""Training on 1, 2, 4 and 8 GPUs of one host: speed a GPU, memory, waiting, checkpoints, and whether the numbers stay the same.

    python bench/train/scaling.py                                   every setting on 1, 2, 4, 8 GPUs, as many as there are
    python bench/train/scaling.py --ranks 1 2 --settings llama-8b/lora-bf16 --tokens 8192 --systems rft
    python bench/train/scaling.py --parts nccl parity killed        without the large models
    python bench/train/scaling.py --tiny                            two gloo ranks on the CPU, tiny shapes: does every line run
    python bench/train/scaling.py --page                            the section of docs/performance.md from the stored results

Parts, in this order:
nccl        bytes a second between the GPUs, as NCCL alone moves them.
parity      the same 20 steps of the same packs on every number of ranks, in fp32 and bf16, replicated and sharded: largest relative
            difference of a loss; then a run saved on the most ranks at step 10 goes on with half and a quarter of them.
killed      `rft train` on all ranks, one killed with SIGKILL: seconds until the command ends; then the same command goes on.
speed       whole steps, each rank with one row of `--tokens` tokens (doc: one document; `--documents packed`: lognormal lengths, mean 400).
            rft is built and stepped by the library's own functions (inspect_job, build_trainee, train_step); the competitor is transformers'
            model under torch's fully_shard (or DDP, where rft replicates), fused AdamW, sdpa, with the recompute that the setting names.
            `wait_ms`: time of a step in which the GPU only communicates. `percent_of_one_gpu`, `percent_of_two_gpus`: rft's own
            speed a GPU against fewer GPUs in the same run.
checkpoint  seconds and GiB of a checkpoint of rft's run, seconds to load it with half as many ranks, and the next losses there
            beside those of the run that saved it.

Weights are random, drawn by name on the device, the same on every number of ranks. Each measurement is a set of processes of its own within
`--part-seconds`; its line is written when it ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "train"), str(ROOT / "tests")]
from _scaling_ranks import PARITY, SETTINGS, TINY, Setting, Task, child

NEEDS = "several CUDA GPUs of 80 GiB or more (--tiny: nothing)"
PARTS = ("nccl", "parity", "killed", "speed", "checkpoint")
ALLOWED = {"fp32": 1e-4, "bf16": 1e-2}
"""Largest relative difference of a loss over 20 steps: sums in another order, which AdamW turns into whole updates where gradients are near zero."""


# ---- a model folder without weights on the disk


def write_model(folder: Path, shape: str, *, tiny: bool) -> Path:
    """config.json, a tokenizer of bytes, and a safetensors file that is a header and a hole: weights are drawn, not read."""
    import torch
    import transformers
    from step import SHAPES
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    sizes = TINY if tiny else PARITY if shape == "parity" else SHAPES[shape]
    tied = {"tie_word_embeddings": bool(SHAPES.get(shape, {}).get("tie_word_embeddings"))}
    config = transformers.LlamaConfig(
        **{**sizes, **tied}, max_position_embeddings=131072, rms_norm_eps=1e-5, architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, bos_token_id=1, eos_token_id=2, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    letters = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(letters[:3])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    header: dict[str, Any] = {}
    at = 0
    for name, parameter in model.named_parameters():  # a tied weight once
        size = parameter.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return folder


# ---- the parent


def start_ranks(task: Task, seconds: float, verbose: bool) -> dict[str, Any]:
    """The first rank's answer, or {"error": ...}. No process outlives the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = {"WORLD_SIZE": str(task.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        more = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if task.tiny else {}
        more["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        processes = []
        for rank in range(task.ranks):
            env = os.environ | common | more | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            answer = folder / ("answer.json" if rank == 0 else "none")
            command = [
                sys.executable,
                "-P",
                __file__,
                "--child",
                json.dumps(dataclasses.asdict(task)),
                "--answer",
                str(answer),
            ]
            with open(folder / f"{rank}.log", "wb") as log:
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        until = time.monotonic() + seconds
        try:
            while any(p.poll() is None for p in processes) and time.monotonic() < until:
                if any(p.poll() for p in processes):
                    break
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill() if process.poll() is None else None
            codes = [process.wait() for process in processes]
        tails = [
            (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines() for rank in range(task.ranks)
        ]
        if verbose or any(codes):
            print(*tails[0][-25:], sep="\n", flush=True)
        if (folder / "answer.json").exists() and not any(code > 0 for code in codes):
            return json.loads((folder / "answer.json").read_text())
        if time.monotonic() >= until:
            return {"error": f"no end after {seconds:.0f} s"}
        worst = next((rank for rank, code in enumerate(codes) if code > 0), 0)
        return {"error": f"rank {worst}: {(tails[worst] or ['no word'])[-1][:300]}"}


@dataclass
class Bench:
    """The parent: what to run, and what came of it."""

    args: argparse.Namespace
    results: Any
    folder: Path
    ranks: list[int]
    failed: bool = False

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.args.seconds
        self.prefix = (
            "scaling-tiny" if self.args.tiny else "scaling"
        )  # figures of tiny shapes are never taken for real ones
        self.models: dict[str, Path] = {}
        self.alone: dict[tuple[str, int], float] = {}
        """(setting, tokens) -> rft's tokens/s on one rank."""

    def task(self, part: str, setting: str, ranks: int, **more: Any) -> Task:
        shape = SETTINGS[setting].shape if setting in SETTINGS else setting
        if shape not in self.models:
            self.models[shape] = write_model(self.folder / f"model-{shape}", shape, tiny=self.args.tiny)
        common = {
            "system": "rft",
            "tokens": 16 if self.args.tiny else 512,
            "documents": "doc",
            "run_dir": str(self.folder / "none"),
        }
        fewer = {"steps": 2, "warm_up": 1} if self.args.tiny and "steps" not in more else {}
        precision = {"precision": "fp32"} if self.args.tiny and "precision" not in more else {}
        values = common | fewer | precision | more
        return Task(
            part=part, setting=setting, ranks=ranks, model=str(self.models[shape]), tiny=self.args.tiny, **values
        )

    def run(self, task: Task) -> dict[str, Any]:
        seconds = min(self.args.part_seconds, self.end - time.monotonic())
        if seconds < 5:
            return {"error": "not started, no time left"}
        return start_ranks(task, seconds, self.args.verbose)

    def error(self, case: str, system: str, text: str) -> None:
        self.results.error(case, system, text)
        self.failed |= system == "rft"

    # ---- parts

    def nccl(self) -> None:
        for ranks in self.ranks:
            if ranks > 1:
                system = "gloo" if self.args.tiny else "nccl"
                found = self.run(self.task("nccl", "parity", ranks))
                if "error" in found:
                    self.error(f"{self.prefix}/{ranks}/bandwidth", system, found["error"])
                for name, figures in found.items() if "error" not in found else ():
                    self.results.add(f"{self.prefix}/{ranks}/bandwidth/{name}", system, "gb_per_second", figures)

    def parity(self) -> None:
        """The same 20 steps on every number of ranks; from the most ranks' checkpoint on with half and a quarter of them."""
        most, least, steps = max(self.ranks), min(self.ranks), 20
        for precision in ("fp32",) if self.args.tiny else ("fp32", "bf16"):
            common = {
                "precision": precision,
                "packs": most,
                "steps": steps,
                "lr": 1e-3,
                "run_dir": str(self.folder / precision),
            }
            fewer = {most // 2, most // 4} & set(range(1, most))
            found = {}
            for ranks in sorted(
                {*self.ranks, *fewer}, reverse=True
            ):  # the most first: the others go on from its checkpoint
                found[ranks] = self.run(
                    self.task("parity", "parity", ranks, save=ranks == most, resume=ranks in fewer, **common)
                )
            for data in ("replicate", "shard"):
                case = f"{self.prefix}/parity/full-{precision}-{data}"
                for ranks in sorted(found):
                    if ranks != least:
                        self.compare(
                            f"{case}/on-{ranks}", losses(found[ranks], data), losses(found[least], data), precision
                        )
                    if ranks in fewer:
                        expected = losses(found[most], data)[steps // 2 :]
                        self.compare(
                            f"{case}/resumed-on-{ranks}", losses(found[ranks], data, "resumed"), expected, precision
                        )

    def compare(self, case: str, got: Any, expected: Any, precision: str) -> None:
        """got, expected: losses, or the words of what went wrong."""
        for found in (got, expected):
            if isinstance(found, str):
                return self.error(case, "rft", found)
        worst = largest_error(got, expected)
        self.results.add(case, "rft", "relative_loss_error", worst)
        if not worst <= ALLOWED[precision]:
            self.error(case, "rft", f"losses differ by {worst:.2e}, allowed {ALLOWED[precision]:g}: {got} {expected}")
        return None

    def killed(self) -> None:
        """One rank of `rft train` killed: how long until all is over, in how many messages; then the same command."""
        ranks = max(self.ranks)
        case = f"{self.prefix}/{ranks}/killed-rank"
        if ranks < 2:
            return print("killed: left out, needs two ranks")
        found = kill_a_rank(self.folder / "killed", ranks, cpu=self.args.tiny, seconds=self.args.part_seconds)
        if "error" in found:
            return self.error(case, "rft", found["error"])
        self.results.add(case, "rft", "seconds", found["seconds"])
        print(f"    {found['message']}\n    and again: {found['again']}")
        return None

    def speed(self) -> None:
        for setting_name in self.args.settings:
            setting = SETTINGS[setting_name]
            for number, tokens in enumerate(self.args.tokens):
                rates: dict[int, float] = {}
                for ranks in self.ranks:
                    case = f"{self.prefix}/{ranks}/{setting_name}/{self.args.documents}-{tokens}"
                    if ranks < setting.least_ranks:
                        print(f"{case}: left out, needs {setting.least_ranks} GPUs")
                        continue
                    # the same work on one GPU needs no second time: sharded or not, one rank holds all
                    if (
                        ranks == 1
                        and setting_name.endswith("-sharded")
                        and setting_name.removesuffix("-sharded") in self.args.settings
                    ):
                        rates[1] = self.alone.get((setting_name.removesuffix("-sharded"), tokens), 0.0)
                        continue
                    for system in self.systems(setting, ranks):
                        self.measure(
                            case, setting_name, system, ranks, tokens, save=number == 0 and ranks > 1, rates=rates
                        )

    def systems(self, setting: Setting, ranks: int) -> Iterator[str]:
        if "rft" in self.args.systems:
            yield "rft"
        if "peer" in self.args.systems and ranks > 1:
            yield "transformers+ddp" if setting.data == "replicate" else "transformers+fsdp2"

    def measure(
        self, case: str, setting: str, system: str, ranks: int, tokens: int, *, save: bool, rates: dict[int, float]
    ) -> None:
        run_dir = self.folder / "runs" / case.replace("/", "-")
        save = save and system == "rft" and "checkpoint" in self.args.parts
        task = self.task(
            "speed", setting, ranks, system=system, tokens=16 if self.args.tiny else tokens, documents=self.args.documents, save=save, run_dir=str(run_dir),
            recompute=self.args.recompute,
        )  # fmt: skip
        found = self.run(task)
        if "error" in found:
            return self.error(case, system, found["error"])
        self.results.add(case, system, "tokens_per_second", found["rates"])
        self.results.add(case, system, "gib", found["gib"])
        self.results.add(case, system, "communication_ms", found["communication_ms"])
        self.results.add(case, system, "wait_ms", found["wait_ms"])
        print(f"    {found['facts']}, losses {[round(x, 3) for x in found['losses']]}")
        if system == "rft":
            rates[ranks] = sorted(found["rates"])[len(found["rates"]) // 2]
            if ranks == 1:
                self.alone[setting, tokens] = rates[1]
            for fewer, name in ((1, "one"), (2, "two")):
                if ranks > fewer and rates.get(fewer):
                    self.results.add(
                        case, "rft", f"percent_of_{name}_gpu{'s' * (fewer > 1)}", 100 * rates[ranks] / rates[fewer]
                    )
        if "checkpoint" in found:
            self.checkpoint(case, task, found["checkpoint"])
        remove(run_dir)
        return None

    def checkpoint(self, case: str, task: Task, saved: dict[str, Any]) -> None:
        case = f"{case}/checkpoint"
        if "error" in saved:
            return self.error(case, "rft", saved["error"])
        self.results.add(case, "rft", "save_seconds", saved["seconds"])
        self.results.add(case, "rft", "gib_on_disk", saved["bytes"] / 2**30)
        fewer = task.ranks // 2
        again = self.run(dataclasses.replace(task, part="load", ranks=fewer, packs=task.ranks, steps=2))
        if "error" in again:
            return self.error(f"{case}/on-{fewer}", "rft", again["error"])
        self.results.add(f"{case}/on-{fewer}", "rft", "load_seconds", again["seconds"])
        self.compare(f"{case}/on-{fewer}", again["losses"], saved["losses"], task.precision)
        return None


def losses(found: dict[str, Any], data: str, kind: str = "losses") -> Any:
    return found["error"] if "error" in found else found[data][kind]


def largest_error(got: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference; infinite where the numbers are not as many, or not finite."""
    if len(got) != len(expected) or not got:
        return float("inf")
    errors = [abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True)]
    return max(e if e == e else float("inf") for e in errors)


def remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def kill_a_rank(folder: Path, ranks: int, *, cpu: bool, seconds: float) -> dict[str, Any]:
    """{"seconds", "message", "again"}: kill the last rank of `rft train` with SIGKILL behind its first checkpoint, then run it again."""
    from support.command import write_project

    folder.mkdir(parents=True)
    config = write_project(folder, train=f"max_steps = {80 if cpu else 600}", checkpoint="save_every_steps = 4")
    command = [sys.executable, "-P", "-m", "rft", "train", str(config)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command += ["--cpu-ranks", str(ranks)] if cpu else ["--set", 'train.precision="bf16"']
    run_dir = folder / "runs" / "chat"
    with open(folder / "out", "wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        until = time.monotonic() + seconds
        while not list(run_dir.glob("checkpoints/step-*/complete.json")):
            if process.poll() is not None or time.monotonic() > until:
                return {"error": "no checkpoint came: " + (folder / "out").read_text(errors="replace").strip()[-300:]}
            time.sleep(0.05)
        last = workers_of(process.pid)[-1]
        begun = time.monotonic()
        os.kill(last, signal.SIGKILL)
        code = process.wait(60)
        taken = time.monotonic() - begun
    except subprocess.TimeoutExpired:
        return {"error": "still running 60 s after a rank was killed"}
    finally:
        left = workers_of(process.pid) if process.poll() is None else []
        for pid in (process.pid, *left):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
    text = (folder / "out").read_text(errors="replace")
    told = [line for line in text.splitlines() if line.startswith("error")]
    if code != 1 or len(told) != 1:
        return {"error": f"exit status {code} with {len(told)} messages: {text[-300:]}"}
    again = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=seconds)
    if again.returncode:
        return {"error": f"did not go on: {(again.stdout + again.stderr)[-300:]}"}
    resumed = next(
        (line for line in again.stdout.splitlines() if line.startswith("resume")), "nothing was said of resuming"
    )
    return {"seconds": taken, "message": told[0], "again": resumed}


def workers_of(launcher: int) -> list[int]:
    """Its workers' process ids by rank."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) != launcher:
                continue
            env = dict(item.partition("=")[::2] for item in (entry / "environ").read_text().split("\0"))
        except (OSError, ValueError):
            continue
        if "RANK" in env:
            found[int(env["RANK"])] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="append result lines here")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", nargs="*", type=int, help="default: 1, 2, 4, 8, as many GPUs as there are")
    parser.add_argument(
        "--settings",
        nargs="*",
        choices=list(SETTINGS),
        default=[n for n in SETTINGS if n != "llama-1b/full-bf16-sharded"],
    )
    parser.add_argument("--tokens", nargs="*", type=int, default=[8192, 2048], help="a GPU and step")
    parser.add_argument("--documents", choices=("doc", "packed"), default="doc")
    parser.add_argument("--systems", nargs="*", choices=("rft", "peer"), default=["rft", "peer"])
    parser.add_argument(
        "--recompute", default="none", help="memory.recompute of rft: none, full, auto, or every n-th layer"
    )
    parser.add_argument("--seconds", type=float, default=7200, help="limit for all of it")
    parser.add_argument("--part-seconds", type=float, default=300, help="limit for one set of processes")
    parser.add_argument("--tiny", action="store_true", help="two gloo ranks on the CPU with tiny shapes")
    parser.add_argument(
        "--page",
        action="store_true",
        help="rewrite the section of docs/performance.md and its plot from stored results",
    )
    parser.add_argument("--verbose", action="store_true", help="show what the processes print")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        found = child(Task(**json.loads(args.child)))
        if args.answer.name == "answer.json":
            args.answer.write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # threads of collectives can hold up the interpreter's end
    if args.page:
        from _scaling_page import write_page

        return write_page()
    import torch  # so that the result lines name the GPUs

    from results import Results

    here = torch.cuda.device_count()
    ranks = args.ranks or ([1, 2] if args.tiny else [n for n in (1, 2, 4, 8) if n <= here])
    if not args.tiny and (not ranks or max(ranks) > here):
        parser.error(f"{here} GPUs are visible; --tiny runs without")
    if args.tiny:
        args.tokens = args.tokens[:1]
    with tempfile.TemporaryDirectory(prefix="rft-scaling-") as folder:
        bench = Bench(args, Results(args.results), Path(folder), sorted(ranks))
        for part in PARTS:
            if part in args.parts and part != "checkpoint":  # checkpoints are part of speed
                getattr(bench, part)()
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
