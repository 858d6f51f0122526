"""The end of a run: which weights `final/` holds, its files, and the summary."""

from __future__ import annotations

from rft import log
from rft.checkpoint.hf import save_final
from rft.training.recorder import Recorder
from rft.training.result import Result
from rft.training.resume import mark_finished
from rft.training.run import Run
from rft.training.rundir import PLAN, write_json
from rft.training.state import load_weights
from rft.words import counted


def finish(run: Run, recorder: Recorder) -> Result:
    """Write `final/` and mark the run finished. Every rank calls it: sharded weights are gathered by all."""
    recorder.progress.close()
    state = run.state
    final_step = state.step
    best_wanted = run.config.checkpoint.final == "best"
    if best_wanted and state.best_step is not None and state.best_step != state.step:
        load_weights(run, state.best_step)
        final_step = state.best_step
    write_final(run)
    result = summarise(run, recorder, final_step)
    if run.is_main:
        mark_finished(run.run_dir, result.to_json())
        tell(run, result)
        compare_with_plan(run, result)
    return result


def compare_with_plan(run: Run, result: Result) -> None:
    """What was planned beside what was measured, on the terminal and in plan.json. Nothing on a CPU, which is not planned for."""
    if run.planned is None:
        return
    planned, ranks = run.planned, run.world_size
    speed, measured = planned.tokens_per_second * ranks, result.tokens_per_second
    table = {
        "planned": planned.to_json(),
        "measured": {"peak_bytes": result.memory_peak_bytes, "tokens_per_second": measured, "ranks": ranks},
    }
    write_json(run.run_dir / PLAN, table)
    words = f"peak {planned.chosen.sizes.peak / 2**30:.1f} GiB, measured {result.memory_peak_bytes / 2**30:.1f}"
    if measured is not None:
        words += f" · {speed:,.0f} tok/s, measured {measured:,.0f}"
    log.say("planned", words)


def write_final(run: Run) -> None:
    """The weights as they are into `final/`; `rft verify` checks by the same call. Every rank calls it."""
    assert run.source is not None
    assert run.tokenizer is not None
    template = run.prepared.template if run.prepared is not None else None
    save_final(
        run.run_dir / "final",
        model=run.model,
        source=run.source,
        tokenizer=run.tokenizer,
        config=run.config.model_dump(),
        masters=run.optimizer.named_masters(),
        rank=run.rank,
        world_size=run.world_size,
        group=run.data_group,
        template=template.source if template is not None else None,
    )


def summarise(run: Run, recorder: Recorder, final_step: int) -> Result:
    state, last = run.state, recorder.last_train
    eval_loss = state.best_eval if final_step == state.best_step else state.last_eval
    return Result(
        run_dir=run.run_dir,
        final_dir=run.run_dir / "final",
        status="stopped early" if state.stopped_early else "finished",
        steps=state.step,
        epochs=run.epochs_done,
        train_loss=last.get("loss"),
        eval_loss_before=state.first_eval,
        eval_loss=eval_loss,
        best_step=state.best_step,
        final_step=final_step,
        tokens=state.tokens,
        label_tokens=state.label_tokens,
        seconds=state.seconds,
        tokens_per_second=state.tokens / state.seconds if state.seconds else None,
        mfu=recorder.mfu,
        memory_peak_bytes=recorder.memory_peak_bytes,
    )


def tell(run: Run, result: Result) -> None:
    """The summary on the terminal: the numbers of summary.json."""
    log.line(" · ".join(summary_words(result)))
    if result.final_step != result.steps:
        log.line(f"final/ holds the weights of step {result.final_step}, whose held-out loss is the lowest")
    if result.eval_loss_before is not None and result.eval_loss is not None:
        log.line(f"held-out loss {result.eval_loss_before:.3f} -> {result.eval_loss:.3f}")
        if result.eval_loss >= result.eval_loss_before:
            log.warn(
                "the held-out loss did not fall", do="lower optim.lr or train for fewer epochs; try train.early_stop"
            )


def summary_words(result: Result) -> list[str]:
    epochs = "1 epoch" if result.epochs == 1 else f"{result.epochs:.3g} epochs"
    words = [counted(result.steps, "step"), epochs, counted(result.tokens, "token")]
    if result.train_loss is not None:
        words.append(f"loss {result.train_loss:.3f}")
    if result.tokens_per_second is not None:
        words.append(f"{result.tokens_per_second:,.0f} tok/s")
    if result.mfu is not None:
        words.append(f"{100 * result.mfu:.0f} % MFU")
    return [*words, f"peak {result.memory_peak_bytes / 2**30:.1f} GiB"]
