//! `Store`.

use std::path::PathBuf;
use std::sync::Arc;

use numpy::{IntoPyArray, PyArray1};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use rft_core::store;

use crate::error::to_py;

#[pyclass(frozen, module = "rft._native")]
pub struct Store(pub Arc<store::Store>);

type Document<'py> = (Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<bool>>, Option<Bound<'py, PyArray1<f32>>>);

impl Store {
    fn check(&self, index: usize) -> PyResult<usize> {
        let documents = self.0.num_documents();
        if index < documents {
            Ok(index)
        } else {
            Err(PyIndexError::new_err(format!("document {index} of {documents}")))
        }
    }
}

#[pymethods]
impl Store {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| store::Store::open(&path)).map(|store| Store(Arc::new(store))).map_err(to_py)
    }

    #[getter]
    fn path(&self) -> String {
        self.0.path().display().to_string()
    }

    #[getter]
    fn key(&self) -> &str {
        &self.0.manifest().key
    }

    #[getter]
    fn num_documents(&self) -> usize {
        self.0.num_documents()
    }

    #[getter]
    fn num_tokens(&self) -> u64 {
        self.0.num_tokens()
    }

    #[getter]
    fn manifest(&self) -> &str {
        self.0.manifest_text()
    }

    #[getter]
    fn has_weights(&self) -> bool {
        self.0.has_weights()
    }

    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.verify()).map_err(to_py)
    }

    fn lengths<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        let store = &self.0;
        py.detach(|| (0..store.num_documents()).map(|index| store.length(index)).collect::<Vec<_>>()).into_pyarray(py)
    }

    fn trained<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        let store = &self.0;
        let count = |index| store.count_trained(store.range(index));
        py.detach(|| (0..store.num_documents()).map(count).collect::<Vec<_>>()).into_pyarray(py)
    }

    fn document<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Document<'py>> {
        let range = self.0.range(self.check(index)?);
        let ids = self.0.ids(range.clone()).to_vec();
        let mut trained = vec![false; range.len()];
        for run in self.0.trained_runs(range.clone()) {
            trained[run].fill(true);
        }
        let weights: Option<Vec<f32>> = self.0.has_weights().then(|| range.map(|token| self.0.weight(token)).collect());
        Ok((ids.into_pyarray(py), trained.into_pyarray(py), weights.map(|weights| weights.into_pyarray(py))))
    }

    fn origin(&self, index: usize) -> PyResult<(String, u64)> {
        let (path, line) = self.0.origin(self.check(index)?);
        Ok((path.to_string(), line))
    }
}
