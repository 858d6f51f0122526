//! `Tokenizer`.

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1, ToPyArray};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rft_core::tokenizer;

use crate::error::to_py;

#[pyclass(frozen, module = "rft._native")]
pub struct Tokenizer(tokenizer::Tokenizer);

#[pymethods]
impl Tokenizer {
    #[new]
    #[pyo3(signature = (json, unicode=16))]
    fn new(py: Python<'_>, json: &str, unicode: u32) -> PyResult<Self> {
        let version = tokenizer::unicode::Version::try_from(unicode).map_err(PyValueError::new_err)?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        py.detach(|| tokenizer::Tokenizer::load(json, version, threads)).map(Tokenizer).map_err(to_py)
    }

    fn encode<'py>(&self, py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let encoded = py.detach(|| self.0.encode(text)).map_err(to_py)?;
        Ok(encoded.ids.to_pyarray(py))
    }

    fn encode_text<'py>(&self, py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let ids = py.detach(|| self.0.encode_text(text)).map_err(to_py)?;
        Ok(ids.to_pyarray(py))
    }

    /// (whether the fast engine runs, why not)
    #[getter]
    fn engine(&self) -> (bool, String) {
        let engine = self.0.engine();
        (engine.fast, engine.reason)
    }

    fn encode_file<'py>(
        &self,
        py: Python<'py>,
        path: std::path::PathBuf,
        separator: u8,
        threads: usize,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyArray1<u64>>)> {
        let documents = py.detach(|| self.0.encode_file(&path, separator, threads)).map_err(to_py)?;
        let ids = match documents.ids {
            tokenizer::Ids::U16(ids) => ids.into_pyarray(py).into_any(),
            tokenizer::Ids::U32(ids) => ids.into_pyarray(py).into_any(),
        };
        Ok((ids, documents.ends.into_pyarray(py)))
    }

    fn decode(&self, py: Python<'_>, ids: PyReadonlyArray1<'_, u32>) -> PyResult<String> {
        let ids = ids.as_slice()?;
        py.detach(|| self.0.decode(ids)).map_err(to_py)
    }

    fn tokens(&self, py: Python<'_>, ids: PyReadonlyArray1<'_, u32>) -> PyResult<Vec<String>> {
        let ids = ids.as_slice()?;
        py.detach(|| self.0.tokens(ids)).map_err(to_py)
    }
}
