//! This rank's micro-batches, filled ahead by one thread into buffers of the caller.
//!
//! Step k of an epoch takes packs `[k * P, (k + 1) * P)` of the plan (behind `first_pack`), dealt to the ranks so that their
//! costs are even.
//! Missing packs are fillers, so that every rank has the same number of micro-batches.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::balance::deal;
use crate::batch::{self, Buffers, Filled};
use crate::error::{Error, Kind, Result};
use crate::plan::Plan;

/// Who takes which packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// This rank, from 0.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Packs of a micro-batch.
    pub micro_batch: usize,
    /// Packs of a step, over all ranks.
    pub packs_per_step: usize,
    /// Where step 0 begins: behind what was read before the number of packs a step changed; else 0.
    pub first_pack: usize,
    /// Whether packs are dealt by cost; else rank r gets every world-th from r on.
    pub balance: bool,
}

impl Share {
    fn check(&self) -> Result<()> {
        let bad = |problem: String| Err(Error::new(Kind::Argument, "stream", problem));
        if self.world_size == 0 || self.micro_batch == 0 || self.packs_per_step == 0 {
            return bad("world_size, micro_batch and packs_per_step start at 1".into());
        }
        if self.rank >= self.world_size {
            return bad(format!("rank {} of {}", self.rank, self.world_size));
        }
        let round = self.micro_batch * self.world_size;
        if !self.packs_per_step.is_multiple_of(round) {
            return bad(format!(
                "packs_per_step {} is no multiple of micro_batch x world_size = {round}",
                self.packs_per_step
            ));
        }
        Ok(())
    }

    /// Steps of an epoch of `num_packs`.
    pub fn num_steps(&self, num_packs: usize) -> usize {
        num_packs.saturating_sub(self.first_pack).div_ceil(self.packs_per_step)
    }

    /// Micro-batches of a step on every rank.
    pub fn micro_batches(&self, step: usize, num_packs: usize) -> usize {
        let left = num_packs.saturating_sub(self.first_pack + step * self.packs_per_step).min(self.packs_per_step);
        left.div_ceil(self.micro_batch * self.world_size)
    }

    /// This rank's packs of a step, micro-batch after micro-batch; `None` = filler. A function of the step alone.
    pub fn packs(&self, plan: &Plan, step: usize) -> Vec<Option<usize>> {
        let start = self.first_pack + step * self.packs_per_step;
        let end = plan.num_packs().min(start + self.packs_per_step);
        let each = self.micro_batches(step, plan.num_packs()) * self.micro_batch;
        if self.balance && self.world_size > 1 {
            let costs: Vec<u64> = (start..end).map(|pack| plan.cost(pack)).collect();
            let dealt = deal(&costs, self.world_size, each);
            return dealt[self.rank * each..(self.rank + 1) * each]
                .iter()
                .map(|pack| pack.map(|pack| start + pack))
                .collect();
        }
        let pack = |slot: usize| start + slot * self.world_size + self.rank;
        (0..each).map(|slot| (pack(slot) < end).then_some(pack(slot))).collect()
    }
}

/// Addresses of a slot's buffers, `capacity` long each (`cu_seqlens` one more).
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// The caller's number for it.
    pub number: usize,
    /// i64.
    pub ids: usize,
    /// i64.
    pub labels: usize,
    /// i64.
    pub positions: usize,
    /// i32.
    pub cu_seqlens: usize,
    /// f32.
    pub weights: Option<usize>,
}

/// A filled slot.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The slot's number.
    pub slot: usize,
    /// Step of the epoch.
    pub step: usize,
    /// Whether it is the last micro-batch of its step.
    pub last: bool,
    /// What was written.
    pub filled: Filled,
}

/// Slots that wake the thread, and micro-batches that wake who waits for one: waking costs as much as filling, so several go
/// at once where there is more to come.
const AT_ONCE: usize = 6;

#[derive(Default)]
struct State {
    /// Whether the thread waits for slots.
    idle: bool,
    /// Callers that wait for a micro-batch.
    hungry: usize,
    submitted: VecDeque<Slot>,
    filling: bool,
    ready: VecDeque<Taken>,
    failed: Option<Error>,
    finished: bool,
    closed: bool,
}

impl State {
    fn enough_to_fill(&self) -> bool {
        self.submitted.len() >= AT_ONCE || (self.hungry > 0 && !self.submitted.is_empty())
    }

    fn enough_to_take(&self) -> bool {
        self.ready.len() >= AT_ONCE || self.submitted.is_empty() || self.failed.is_some() || self.finished
    }

    /// Whether there is something to wait for in [`Stream::take`], and nothing to take.
    fn blocks(&self) -> bool {
        self.ready.is_empty()
            && !(self.finished || self.closed || self.failed.is_some())
            && (self.filling || !self.submitted.is_empty())
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    to_fill: Condvar,
    to_take: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock is held cannot leave the state half-changed: each change is one assignment or push.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The micro-batches of one rank, in order.
pub struct Stream {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
    num_steps: usize,
}

impl Stream {
    /// Starts the thread at a step of the plan's epoch.
    ///
    /// # Errors
    /// Arguments that do not fit; a start behind the end.
    pub fn new(plan: Arc<Plan>, share: Share, start_step: usize, pad_id: i64, capacity: usize) -> Result<Stream> {
        share.check()?;
        let num_steps = share.num_steps(plan.num_packs());
        if start_step > num_steps {
            let problem = format!("start_step {start_step} lies behind the {num_steps} steps of the epoch");
            return Err(Error::new(Kind::Argument, "stream", problem));
        }
        let shared = Arc::new(Shared::default());
        let filler = Filler { shared: shared.clone(), plan, share, pad_id, capacity, num_steps };
        let thread = std::thread::Builder::new()
            .name("rft-stream".into())
            .spawn(move || filler.run(start_step))
            .map_err(|e| Error::new(Kind::Io, "stream", format!("cannot start a thread: {e}")))?;
        Ok(Stream { shared, thread: Mutex::new(Some(thread)), process: std::process::id(), num_steps })
    }

    /// Steps of the epoch.
    pub fn num_steps(&self) -> usize {
        self.num_steps
    }

    /// Hands over a slot; the next micro-batch goes into it.
    ///
    /// # Safety
    /// The addresses must point to writable memory of the stated lengths that nobody touches until [`Stream::take`]
    /// has returned the slot, or [`Stream::close`] has returned.
    pub unsafe fn submit(&self, slot: Slot) -> Result<()> {
        self.check_process()?;
        let mut state = self.shared.lock();
        if state.closed {
            return Err(Error::new(Kind::Argument, "stream", "it is closed"));
        }
        state.submitted.push_back(slot);
        let wake = state.idle && state.enough_to_fill();
        drop(state);
        if wake {
            self.shared.to_fill.notify_one();
        }
        Ok(())
    }

    /// The next micro-batch, in order; none at the end. Waits for the thread.
    ///
    /// # Errors
    /// What the thread met; no slot to wait for.
    pub fn take(&self) -> Result<Option<Taken>> {
        self.check_process()?;
        while !self.wait(Duration::from_secs(3600)) {}
        let mut state = self.shared.lock();
        if let Some(taken) = state.ready.pop_front() {
            return Ok(Some(taken));
        }
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if state.finished {
            return Ok(None);
        }
        let problem =
            if state.closed { "it is closed" } else { "no buffers were submitted, so there is nothing to wait for" };
        Err(Error::new(Kind::Argument, "stream", problem))
    }

    /// Whether [`Stream::take`] would return at once; waits for that, but no longer than `at_most`: who waits for a slow disk
    /// can look for signals in between.
    pub fn wait(&self, at_most: Duration) -> bool {
        if self.process != std::process::id() {
            return true; // `take` says what is wrong
        }
        let mut state = self.shared.lock();
        if !state.blocks() {
            return true;
        }
        state.hungry += 1;
        if state.idle {
            self.shared.to_fill.notify_one();
        }
        let waited = self.shared.to_take.wait_timeout_while(state, at_most, |state| state.blocks());
        let (mut state, waited) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        state.hungry -= 1;
        !waited.timed_out()
    }

    /// Stops the thread and waits for it; afterwards no buffer is written to. Twice is fine.
    pub fn close(&self) {
        if self.process != std::process::id() {
            // A forked child has no such thread, and its lock may be held for ever.
            return;
        }
        self.shared.lock().closed = true;
        self.shared.to_fill.notify_all();
        self.shared.to_take.notify_all();
        let thread = self.thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(thread) = thread {
            // The thread's own panics are caught and told by `take`.
            let _ = thread.join();
        }
    }

    fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let problem =
            format!("it was opened by process {} before a fork, and threads do not survive one", self.process);
        Err(Error::new(Kind::Argument, "stream", problem).remedy("open a stream of its own in each process"))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.close();
        } else if let Ok(thread) = self.thread.get_mut() {
            std::mem::forget(thread.take());
        }
    }
}

/// What the thread works with.
struct Filler {
    shared: Arc<Shared>,
    plan: Arc<Plan>,
    share: Share,
    pad_id: i64,
    capacity: usize,
    num_steps: usize,
}

impl Filler {
    fn run(&self, start_step: usize) {
        // Everything, the dealing of packs too: a panic that nobody told would leave the reader waiting for ever.
        let result = catch_unwind(AssertUnwindSafe(|| self.fill_all(start_step))).unwrap_or_else(|panic| {
            Err(Error::new(Kind::Store, "stream", format!("the thread failed: {}", told(&panic))))
        });
        let mut state = self.shared.lock();
        state.filling = false;
        match result {
            Ok(()) => state.finished = !state.closed,
            Err(error) => state.failed = Some(error),
        }
        drop(state);
        self.shared.to_take.notify_all();
    }

    /// Micro-batch after micro-batch until the epoch's end, or until the stream is closed.
    fn fill_all(&self, start_step: usize) -> Result<()> {
        for step in start_step..self.num_steps {
            let packs = self.share.packs(&self.plan, step);
            let count = packs.len() / self.share.micro_batch;
            for (micro, packs) in packs.chunks(self.share.micro_batch).enumerate() {
                let Some(slot) = self.next_slot() else { return Ok(()) };
                let filled = self.fill(packs, slot)?;
                let mut state = self.shared.lock();
                state.filling = false;
                state.ready.push_back(Taken { slot: slot.number, step, last: micro + 1 == count, filled });
                let wake = state.hungry > 0 && state.enough_to_take();
                drop(state);
                if wake {
                    self.shared.to_take.notify_all();
                }
            }
        }
        Ok(())
    }

    /// Waits for a slot; none when the stream is closed.
    fn next_slot(&self) -> Option<Slot> {
        let mut state = self.shared.lock();
        if state.submitted.is_empty() {
            // Asleep until there are several: awake it fills all that there are.
            state.idle = true;
            let woken = self.shared.to_fill.wait_while(state, |state| !state.closed && !state.enough_to_fill());
            state = woken.unwrap_or_else(|poisoned| poisoned.into_inner());
            state.idle = false;
        }
        if state.closed {
            return None;
        }
        state.filling = true;
        state.submitted.pop_front()
    }

    fn fill(&self, packs: &[Option<usize>], slot: Slot) -> Result<Filled> {
        // SAFETY: `submit` promises memory of these lengths that is ours until the slot is taken or the stream closed.
        let mut buffers = unsafe {
            Buffers {
                ids: std::slice::from_raw_parts_mut(slot.ids as *mut i64, self.capacity),
                labels: std::slice::from_raw_parts_mut(slot.labels as *mut i64, self.capacity),
                positions: std::slice::from_raw_parts_mut(slot.positions as *mut i64, self.capacity),
                cu_seqlens: std::slice::from_raw_parts_mut(slot.cu_seqlens as *mut i32, self.capacity + 1),
                weights: slot.weights.map(|at| std::slice::from_raw_parts_mut(at as *mut f32, self.capacity)),
            }
        };
        batch::fill(&self.plan, packs, self.pad_id, &mut buffers)
    }
}

fn told(panic: &Box<dyn std::any::Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}
