//! `Plan`.

use std::collections::BTreeMap;
use std::sync::Arc;

use numpy::{PyArray1, ToPyArray};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use rft_core::plan::{self, PlanOptions};

use crate::error::to_py;
use crate::store::Store;

#[pyclass(frozen, module = "rft._native")]
pub struct Plan(pub Arc<plan::Plan>);

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (store, seq_len, packing, overlong, seed, epoch, shuffle=true, windows=false))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        store: &Store,
        seq_len: u32,
        packing: &str,
        overlong: &str,
        seed: u64,
        epoch: u64,
        shuffle: bool,
        windows: bool,
    ) -> PyResult<Self> {
        let store = store.0.clone();
        py.detach(|| {
            let (packing, overlong) = (packing.parse()?, overlong.parse()?);
            let options = PlanOptions { seq_len, packing, overlong, seed, epoch, shuffle };
            if windows { plan::Plan::windowed(store, options) } else { plan::Plan::new(store, options) }
        })
        .map(|plan| Plan(Arc::new(plan)))
        .map_err(to_py)
    }

    #[getter]
    fn hash(&self) -> &str {
        self.0.hash()
    }

    #[getter]
    fn num_packs(&self) -> usize {
        self.0.num_packs()
    }

    #[getter]
    fn windows(&self) -> Vec<usize> {
        self.0.windows().to_vec()
    }

    #[getter]
    fn num_tokens(&self) -> u64 {
        self.0.num_tokens()
    }

    #[getter]
    fn num_label_tokens(&self) -> u64 {
        self.0.num_label_tokens()
    }

    #[getter]
    fn fill(&self) -> f64 {
        self.0.fill()
    }

    #[getter]
    fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.0.counts().entries().into_iter().collect()
    }

    fn pack(&self, index: usize) -> PyResult<Vec<(u32, u32, u32)>> {
        if index >= self.0.num_packs() {
            return Err(PyIndexError::new_err(format!("pack {index} of {}", self.0.num_packs())));
        }
        Ok(self.0.pack(index).map(|piece| (piece.document, piece.start, piece.length)).collect())
    }

    fn pack_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        self.0.pack_tokens().to_pyarray(py)
    }

    fn pack_labels<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        self.0.pack_labels().to_pyarray(py)
    }
}
