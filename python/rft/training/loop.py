"""The training loop: reads downwards. A feature in the loop is a line in the loop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from rft import log
from rft.data.batch import Batch
from rft.errors import Stopped
from rft.training.evaluate import Interrupted, evaluate
from rft.training.finish import finish
from rft.training.metrics import eval_line
from rft.training.recorder import Recorder
from rft.training.replan import step_within_memory
from rft.training.result import Result
from rft.training.run import Run
from rft.training.state import save_state
from rft.training.step import GivenUp


def train(run: Run) -> Result:
    """Train to the end: planned steps, held-out losses, checkpoints, `final/`.

    Raises Stopped after a signal, with the state of the last finished step saved; TrainingError where the numbers are useless.
    """
    with Recorder(run) as recorder:
        try:
            evaluate_and_save(run, recorder)  # before the first step, or what a stopped run did not get to
            for micro_batches in steps_left(run, recorder):
                result = step_within_memory(run, micro_batches)
                advance(run, result.counts)
                recorder.step_done(result)
                evaluate_and_save(run, recorder)
                stop_if_asked(run, recorder)
        except (Interrupted, GivenUp) as stop:
            raise stopped(run, recorder, stop.signal_number) from None
        recorder.flush()
        return finish(run, recorder)


def steps_left(run: Run, recorder: Recorder) -> Iterator[list[Batch]]:
    """Micro-batches of each step that is still to be made, through all epochs; keeps the position in `run.state`."""
    state = run.state
    while more_steps(run):
        state.plan_hash = run.loader.plan(state.epoch).hash
        steps = iter(run.loader.steps(state.epoch, run.packs_per_step, start_step=state.step_in_epoch))
        while more_steps(run):
            start = time.perf_counter()
            micro_batches = next(steps, None)
            if micro_batches is None:
                break
            recorder.step_begins(time.perf_counter() - start)
            yield micro_batches
        if more_steps(run):
            state.epoch, state.step_in_epoch = state.epoch + 1, 0


def more_steps(run: Run) -> bool:
    return run.state.step < run.total_steps and not run.state.stopped_early


def advance(run: Run, counts: dict[str, float]) -> None:
    """A step was made."""
    state = run.state
    state.step += 1
    state.step_in_epoch += 1
    state.tokens += int(counts["tokens"])
    state.label_tokens += int(counts["label_tokens"])


def evaluate_and_save(run: Run, recorder: Recorder) -> None:
    """Whatever is due at this step. Evaluation first: its result is part of the state that is saved."""
    if evaluation_due(run):
        record_evaluation(run, recorder)
    if save_due(run):
        save(run, recorder, "as planned")


# ---- evaluation


def evaluation_due(run: Run) -> bool:
    """Before the first step, every `eval_every_steps`, and after the last; once at each of these."""
    if run.eval_loader is None or run.state.last_eval_step == run.state.step:
        return False
    every, step = run.config.train.eval_every_steps, run.state.step
    return step in (0, run.total_steps) or (every is not None and step % every == 0)


def record_evaluation(run: Run, recorder: Recorder) -> None:
    """Held-out loss of the weights as they are. The lowest one of trained weights is the best; that of step 0 is only shown."""
    recorder.flush()
    evaluation = evaluate(run, recorder.progress.evaluating)
    state, early_stop = run.state, run.config.train.early_stop
    state.last_eval, state.last_eval_step = evaluation.loss, state.step
    recorder.evaluation(eval_line(state.step, run.epochs_done, evaluation))
    if state.step == 0:
        state.first_eval = evaluation.loss
        return
    before = math.inf if state.best_eval is None else state.best_eval
    if evaluation.loss < before:
        state.best_eval, state.best_step = evaluation.loss, state.step
        if run.saved_step == state.step:
            run.saved_step = (
                None  # saved by a stop before it was evaluated: the checkpoint does not know that it is the best
            )
    if early_stop is None:
        return
    state.evals_without_better = (
        0 if evaluation.loss < before - early_stop.min_delta else state.evals_without_better + 1
    )
    if state.evals_without_better >= early_stop.patience and state.step < run.total_steps:
        log.line(f"early stop after step {state.step}: the lowest held-out loss is that of step {state.best_step}")
        state.stopped_early = True


# ---- checkpoints and signals


def save_due(run: Run) -> bool:
    """At the planned steps, after the last one, and where a new best held-out loss must not be lost."""
    config, state = run.config.checkpoint, run.state
    if state.step in (0, run.saved_step):
        return False
    planned = config.save_every_steps is not None and state.step % config.save_every_steps == 0
    new_best = state.best_step == state.step and config.keep_best > 0
    return planned or new_best or not more_steps(run)


def save(run: Run, recorder: Recorder, reason: str) -> None:
    """Save the state, unless the numbers since the last line show that it is useless (TrainingError)."""
    recorder.flush()
    start = time.perf_counter()
    run.saved_path, run.saved_step = save_state(run, reason), run.state.step
    recorder.add_seconds("checkpoint", time.perf_counter() - start)


def stop_if_asked(run: Run, recorder: Recorder) -> None:
    if run.signals and (number := run.signals.stop_requested(run.data_group)):
        raise stopped(run, recorder, number)


def stopped(run: Run, recorder: Recorder, signal_number: int) -> Stopped:
    """Save the state after the last finished step; the exception that ends the run."""
    assert run.signals is not None
    if run.state.step != run.saved_step:
        save(run, recorder, f"signal {signal_number}")
    return run.signals.stopped(run.saved_path)
