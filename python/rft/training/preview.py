"""The config as a run would have it, for who only looks. No torch where an earlier call has met the model (known.py)."""

from __future__ import annotations

from dataclasses import replace

from rft.config.root import Config
from rft.training import without_effect
from rft.training.decision import Decision
from rft.training.known import recall, remember
from rft.training.resolve import resolve_precision
from rft.training.trackers import check_trackers


def resolve_without_weights(config: Config, *, processes: int = 1) -> tuple[Config, list[Decision]]:
    """The config as a run on this machine would have it, and why; reads neither weights nor data.

    processes: that `rft train` would start here. Without torch where an earlier call has met this model.
    """
    known = recall(config, processes)
    if known is not None:
        check_trackers(config.log)
        decided, decisions = resolve_precision(config, known.machine)
        made, more = known.resolve(decided)
        without_effect.tell(known.seen(decided, made))
        return made, [*decisions, *more]
    from rft.parallel.mesh import join_world
    from rft.training.setup import inspect_job

    world = join_world()
    job = inspect_job(config, replace(world, world_size=max(processes, world.world_size)))
    remember(config, processes, job.known)
    return job.config, job.decisions
