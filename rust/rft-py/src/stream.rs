//! `Stream`.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rft_core::stream::{self, Share, Slot, Taken};

use crate::error::to_py;
use crate::feed::Feed;
use crate::plan::Plan;

/// How long Ctrl-C may go unnoticed while the disk is waited for.
const SIGNALS_EVERY: Duration = Duration::from_millis(100);

#[pyclass(frozen, module = "rft._native")]
pub struct Stream(stream::Stream);

/// What the packs come from: the plan of a prepared set, or a feed, once.
#[derive(FromPyObject)]
enum Packs<'py> {
    Plan(PyRef<'py, Plan>),
    Feed(PyRef<'py, Feed>),
}

#[pymethods]
impl Stream {
    #[new]
    #[pyo3(signature = (packs, *, rank, world_size, micro_batch, packs_per_step, start_step, pad_id, capacity, first_pack=0, balance=true))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        packs: Packs<'_>,
        rank: usize,
        world_size: usize,
        micro_batch: usize,
        packs_per_step: usize,
        start_step: usize,
        pad_id: i64,
        capacity: usize,
        first_pack: usize,
        balance: bool,
    ) -> PyResult<Self> {
        let share = Share { rank, world_size, micro_batch, packs_per_step, first_pack, balance };
        match packs {
            Packs::Plan(plan) => stream::Stream::new(plan.0.clone(), share, start_step, pad_id, capacity),
            Packs::Feed(feed) => {
                let packs = feed.0.take_packs().map_err(to_py)?;
                stream::Stream::over(packs, share, start_step, pad_id, capacity)
            }
        }
        .map(Stream)
        .map_err(to_py)
    }

    #[getter]
    fn num_steps(&self) -> Option<usize> {
        self.0.num_steps()
    }

    fn wait(&self, py: Python<'_>, seconds: f64) -> PyResult<bool> {
        let until = std::time::Instant::now() + Duration::try_from_secs_f64(seconds).unwrap_or_default();
        loop {
            let left = until.saturating_duration_since(std::time::Instant::now());
            if py.detach(|| self.0.wait(left.min(SIGNALS_EVERY))) {
                return Ok(true);
            }
            py.check_signals()?;
            if left.is_zero() {
                return Ok(false);
            }
        }
    }

    #[pyo3(signature = (slot, ids, labels, positions, cu_seqlens, weights))]
    #[allow(clippy::too_many_arguments)]
    fn submit(
        &self,
        slot: usize,
        ids: usize,
        labels: usize,
        positions: usize,
        cu_seqlens: usize,
        weights: Option<usize>,
    ) -> PyResult<()> {
        let slot = Slot { number: slot, ids, labels, positions, cu_seqlens, weights };
        // SAFETY: the stub states what the caller promises about these addresses; only rft.data calls this.
        unsafe { self.0.submit(slot) }.map_err(to_py)
    }

    fn take<'py>(&self, py: Python<'py>) -> PyResult<Option<Batch<'py>>> {
        while !py.detach(|| self.0.wait(SIGNALS_EVERY)) {
            py.check_signals()?;
        }
        let taken = py.detach(|| self.0.take()).map_err(to_py)?;
        taken.map(|taken| to_tuple(py, &taken)).transpose()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

/// Slot, last of its step, tokens, lengths, pack_tokens, num_tokens, num_label_tokens, label_weight, weighted: a tuple, since a dict of
/// names took as long as a tenth of filling the batch.
type Batch<'py> = (usize, bool, usize, Bound<'py, PyTuple>, Bound<'py, PyTuple>, u64, u64, f64, bool);

fn to_tuple<'py>(py: Python<'py>, taken: &Taken) -> PyResult<Batch<'py>> {
    let filled = &taken.filled;
    let (lengths, packs) = (PyTuple::new(py, &filled.lengths)?, PyTuple::new(py, &filled.pack_tokens)?);
    let counts = (filled.num_tokens, filled.num_label_tokens, filled.label_weight);
    Ok((taken.slot, taken.last, filled.tokens, lengths, packs, counts.0, counts.1, counts.2, filled.weighted))
}
