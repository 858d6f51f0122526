//! `Feed`, `Producer`, `stream_key`.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use rft_core::feed::{self, Cursor, ProducerOptions};
use rft_core::plan::PlanOptions;
use rft_core::rows::Renderer;
use rft_core::spec::Spec;
use rft_core::store::Windows;
use rft_core::{Error, Kind};

use crate::error::to_py;
use crate::prepare::{Callback, Raised};

#[pyfunction]
pub fn stream_key(spec: &str) -> PyResult<String> {
    Spec::parse(spec).map(|spec| feed::key_of(&spec)).map_err(to_py)
}

fn cursor_of(text: Option<&str>) -> PyResult<Cursor> {
    let Some(text) = text else { return Ok(Cursor::start()) };
    serde_json::from_str(text).map_err(|e| to_py(Error::new(Kind::Argument, "cursor", e)))
}

#[pyclass(frozen, module = "rft._native")]
pub struct Feed(pub feed::Feed);

#[pymethods]
impl Feed {
    #[new]
    #[pyo3(signature = (spec, folder, *, key, seq_len, packing, overlong, seed, epoch, shuffle, reader, cursor=None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        spec: &str,
        folder: PathBuf,
        key: &str,
        seq_len: u32,
        packing: &str,
        overlong: &str,
        seed: u64,
        epoch: u64,
        shuffle: bool,
        reader: usize,
        cursor: Option<&str>,
    ) -> PyResult<Self> {
        let start = cursor_of(cursor)?;
        let made = || {
            let spec = Spec::parse(spec)?;
            let (packing, overlong) = (packing.parse()?, overlong.parse()?);
            let options = PlanOptions { seq_len, packing, overlong, seed, epoch, shuffle };
            let windows = Windows::new(&folder, key, feed::names_of(&spec.sources));
            feed::Feed::new(&folder, windows, options, reader, start)
        };
        made().map(Feed).map_err(to_py)
    }

    fn cursor(&self, pack: usize) -> PyResult<Option<String>> {
        let cursor = self.0.cursor(pack).map(|cursor| serde_json::to_string(&cursor)).transpose();
        cursor.map_err(|e| to_py(Error::new(Kind::Argument, "cursor", e)))
    }

    fn done(&self, pack: usize) -> PyResult<()> {
        self.0.done(pack).map_err(to_py)
    }

    fn share(&self, pack: usize) -> f64 {
        self.0.share(pack)
    }

    fn counts(&self, pack: usize) -> PyResult<Option<String>> {
        self.0.counts(pack).map(|counts| counts.map(|counts| counts.to_string())).map_err(to_py)
    }

    fn totals<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (totals, dict) = (self.0.totals(), PyDict::new(py));
        dict.set_item("windows", totals.windows)?;
        dict.set_item("packs", totals.packs)?;
        dict.set_item("tokens", totals.tokens)?;
        dict.set_item("label_tokens", totals.label_tokens)?;
        for (name, count) in totals.counts {
            dict.set_item(name, count)?;
        }
        Ok(dict)
    }
}

/// Python's renderer, and what it raises, for as long as the producer lives.
struct OwnedCallback {
    call: Py<PyAny>,
    turn: Mutex<()>,
}

impl Renderer for OwnedCallback {
    fn render(
        &self,
        conversations: Vec<String>,
    ) -> rft_core::Result<Vec<Result<rft_core::template::Rendered, String>>> {
        let _turn = self.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let raised = Raised::default();
        let call = Python::attach(|py| self.call.clone_ref(py));
        Callback { call, raised: &raised, turn: Mutex::new(()) }.render(conversations)
    }
}

#[pyclass(frozen, module = "rft._native")]
pub struct Producer(feed::Producer);

#[pymethods]
impl Producer {
    #[new]
    #[pyo3(signature = (spec, folder, *, key, cursor=None, ahead, readers, first_wait, render=None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        spec: &str,
        folder: PathBuf,
        key: String,
        cursor: Option<&str>,
        ahead: u64,
        readers: usize,
        first_wait: f64,
        render: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let first_wait = Duration::try_from_secs_f64(first_wait).unwrap_or_default();
        let options = ProducerOptions { folder, key, start: cursor_of(cursor)?, ahead, readers, first_wait };
        let renderer =
            render.map(|call| Box::new(OwnedCallback { call, turn: Mutex::new(()) }) as Box<dyn Renderer + Send>);
        py.detach(|| feed::Producer::start(Spec::parse(spec)?, options, renderer)).map(Producer).map_err(to_py)
    }

    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (status, dict) = (self.0.status(), PyDict::new(py));
        dict.set_item("bytes", status.bytes.0)?;
        dict.set_item("bytes_total", status.bytes.1)?;
        dict.set_item("rows", status.rows)?;
        dict.set_item("windows", status.windows)?;
        dict.set_item("trouble", status.trouble)?;
        Ok(dict)
    }

    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.0.stop());
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        // Its threads may wait for the interpreter in order to end.
        Python::attach(|py| py.detach(|| self.0.stop()));
    }
}
