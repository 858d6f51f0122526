"""The quickstart from the first line to the last: rows, config, speed probe, training by `rft train`'s own code, two answers."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft import log
from rft.config.load import load_config
from rft.config.root import Config
from rft.quickstart import files
from rft.quickstart.stdlib import SYSTEM, Documented, documented_functions, example_of, split, write_rows
from rft.report.units import duration
from rft.words import counted

HELD_OUT_ROWS = 64
"""Enough that the loss moves by more than its noise, few enough that measuring it twice takes half a minute."""
MINUTES = 4.0
_FEWEST_STEPS, _MOST_STEPS = 4, 400
_ANSWER_TOKENS = 60


@dataclass(frozen=True)
class Outcome:
    """What the quickstart came to."""

    folder: Path
    steps: int
    loss_before: float
    loss_after: float
    answer_before: str
    answer_after: str
    seconds: float


def quickstart(folder: Path, *, minutes: float = MINUTES) -> Outcome:
    """Train SmolLM2 on docstrings for about `minutes` in the next free folder of that name.

    Raises ConfigError (exit 2) where the package with the weights is not installed.
    """
    began = time.monotonic()
    model = files.model_file()
    folder = files.free_folder(folder)
    toml = folder / "quickstart.toml"
    log.say("model", f"{files.MODEL_NAME}, from the installed package {files.PACKAGE} {files.package_version()}")
    example = _write_data(folder)
    toml.write_text(files.toml_text(toml, model, max_steps=_MOST_STEPS, minutes="?"), encoding="utf-8")
    log.say("probe", "measuring this machine's speed: a few steps")
    probe = probe_speed(load_config(toml), example)
    steps = steps_for(minutes * 60, probe.seconds_a_step)
    trained = duration(steps * probe.seconds_a_step)
    toml.write_text(files.toml_text(toml, model, max_steps=steps, minutes=trained), encoding="utf-8")
    log.say("config", f"{toml}   (yours to edit)")
    log.say(
        "probe",
        f"{probe.tokens_per_second:,.0f} tok/s here: {counted(steps, 'step')} of {files.TOKENS_PER_STEP:,} tokens take about {trained}",
    )
    result = _train(load_config(toml), toml)
    after = answer_of(str(folder / "run"), example)
    _show_answers(example, probe.answer, after)
    assert result.eval_loss_before is not None
    assert result.eval_loss is not None
    outcome = Outcome(
        folder, result.steps, result.eval_loss_before, result.eval_loss, probe.answer, after, time.monotonic() - began
    )
    _say_what_next(outcome, toml)
    return outcome


def _write_data(folder: Path) -> Documented:
    """Training and held-out rows; returns the held-out function whose docstring is shown before and after."""
    train, held_out = split(documented_functions(), HELD_OUT_ROWS)
    path = folder / "data" / "train.jsonl"
    write_rows(path, train)
    write_rows(folder / "data" / "heldout.jsonl", held_out)
    log.say(
        "data",
        f"{len(train):,} docstrings of this Python's standard library -> {path}, {len(held_out)} held out",
    )
    return example_of(held_out)


# ---- speed probe


@dataclass(frozen=True)
class Probe:
    """What this machine does, and what the model says before it is trained."""

    tokens_per_second: float
    seconds_a_step: float
    answer: str


def probe_speed(config: Config, example: Documented) -> Probe:
    """Time forward and backward over one pack, after one that warms up; nothing is updated and nothing is kept.

    The model is then asked for the example: its adapter is still zero, so this is the answer before training.
    """
    from rft.parallel.mesh import join_world
    from rft.training.setup import add_data, build_loaders, build_trainee, inspect_job

    job = inspect_job(config, join_world())
    add_data(job, None)
    loader, _ = build_loaders(job)
    trainee = build_trainee(job)
    seconds = 0.0
    tokens = 0
    packs = loader.steps(0, 1)
    for _ in range(2):
        (batch,) = next(packs)
        start = time.perf_counter()
        terms = trainee(batch)
        (terms["next_token"] / batch.label_weight).backward()
        seconds, tokens = time.perf_counter() - start, batch.num_tokens
    loader.close()
    del trainee, packs
    rate = tokens / seconds
    return Probe(rate, files.TOKENS_PER_STEP / rate, answer_of(config.model.path, example))


def steps_for(seconds: float, seconds_a_step: float) -> int:
    """Steps that fit, never so few that nothing is learned."""
    return min(_MOST_STEPS, max(_FEWEST_STEPS, math.floor(seconds / seconds_a_step)))


def answer_of(path: str, example: Documented) -> str:
    """The docstring that a model or run writes for the example, the likeliest token each time."""
    from rft.checkpoint.target import find_target
    from rft.generate.load import load_speaker
    from rft.generate.talk import Sampling, answer

    speaker = load_speaker(find_target(path))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example.source}]
    return answer(speaker, messages, Sampling(max_tokens=_ANSWER_TOKENS)).text


# ---- training and the words around it


def _train(config: Config, toml: Path) -> Any:
    from rft.report import write_report
    from rft.training.api import train_config

    # what follows is printed by the command that the user will type next time
    log.line(f"\n$ rft train {toml}")
    return train_config(config, config_path=toml, report=write_report)


def _show_answers(example: Documented, before: str, after: str) -> None:
    """The function that neither run has seen, what its authors wrote, and what the model writes before and after."""
    log.line()
    log.say("asked", f"for the docstring of {example.name} ({example.where}), which is held out:\n{example.source}")
    log.say("authors", one_line(example.docstring))
    log.say("before", one_line(before))
    log.say("after", one_line(after))
    log.line()


def one_line(text: str, width: int = 240) -> str:
    """The first words of an answer, quoted."""
    text = " ".join(text.split())
    return f'"{text[: width - 4]} ..."' if len(text) > width else f'"{text}"'


def rft_command() -> str:
    """How `rft` is called from the current folder: by its name where PATH has it, else by the path of this environment's own."""
    if shutil.which("rft"):
        return "rft"
    beside = Path(sys.executable).with_name("rft")
    if not beside.is_file():
        return f"{shlex.quote(sys.executable)} -m rft"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


def _say_what_next(outcome: Outcome, toml: Path) -> None:
    run, rft = outcome.folder / "run", rft_command()
    log.say(
        "loss", f"held-out {outcome.loss_before:.3f} -> {outcome.loss_after:.3f} in {counted(outcome.steps, 'step')}"
    )
    log.say("time", f"{duration(outcome.seconds)} in all")
    steps = [
        f"look at the run     {run / 'report.html'}",
        f"talk to the model   {rft} chat {run}",
        f"merge the adapter   {rft} merge {run}",
        f"train on your rows  put them in a JSONL file, set [[data.train]] path in {toml},",
        f"                    then {rft} train --new {toml}",
    ]
    log.say("next", "\n".join(steps))
