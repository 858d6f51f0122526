//! `prepare`, `store_key`, `key_inputs`.

use std::path::PathBuf;
use std::sync::Mutex;

use pyo3::prelude::*;
use rft_core::prepare::{Observer, prepare as core_prepare};
use rft_core::rows::Renderer;
use rft_core::spec::Spec;
use rft_core::template::Rendered;
use rft_core::{Error, Kind, key};

use crate::error::to_py;
use crate::template::{byte_spans, char_spans};

/// Where a Python exception waits until the core has returned.
pub(crate) type Raised = Mutex<Option<PyErr>>;

fn keep(raised: &Raised, error: PyErr) -> Error {
    let told = error.to_string();
    *raised.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
    Error::new(Kind::Argument, "callback", told)
}

struct Progress<'a> {
    call: Option<Py<PyAny>>,
    raised: &'a Raised,
}

impl Observer for Progress<'_> {
    fn progress(&mut self, bytes_read: u64, bytes_total: u64, rows: u64) -> rft_core::Result<()> {
        Python::attach(|py| {
            py.check_signals()?;
            match &self.call {
                Some(call) => call.call1(py, (bytes_read, bytes_total, rows)).map(|_| ()),
                None => Ok(()),
            }
        })
        .map_err(|error| keep(self.raised, error))
    }
}

pub(crate) struct Callback<'a> {
    pub call: Py<PyAny>,
    pub raised: &'a Raised,
    /// Python's function is called by one thread at a time: it need not be made for more.
    pub turn: Mutex<()>,
}

/// What the Python renderer gives for a conversation.
#[derive(FromPyObject)]
enum Answer {
    Text((String, Vec<(usize, usize)>)),
    Problem(String),
}

impl Renderer for Callback<'_> {
    fn render(&self, conversations: Vec<String>) -> rft_core::Result<Vec<Result<Rendered, String>>> {
        let _turn = self.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let answers: Vec<Answer> = Python::attach(|py| self.call.call1(py, (conversations,))?.extract(py))
            .map_err(|error| keep(self.raised, error))?;
        answers
            .into_iter()
            .map(|answer| match answer {
                Answer::Problem(problem) => Ok(Err(problem)),
                Answer::Text((text, spans)) => match byte_spans(&text, &spans) {
                    Some(spans) => Ok(Ok(Rendered { text, spans })),
                    None => Err(Error::new(Kind::Argument, "render", "a span lies outside the text")),
                },
            })
            .collect()
    }
}

#[pyfunction]
#[pyo3(signature = (spec, out, on_progress=None, render=None))]
pub fn prepare(
    py: Python<'_>,
    spec: &str,
    out: PathBuf,
    on_progress: Option<Py<PyAny>>,
    render: Option<Py<PyAny>>,
) -> PyResult<String> {
    let spec = Spec::parse(spec).map_err(to_py)?;
    let raised = Raised::default();
    let result = py.detach(|| {
        let renderer = render.map(|call| Callback { call, raised: &raised, turn: Mutex::new(()) });
        let renderer = renderer.as_ref().map(|renderer| renderer as &dyn Renderer);
        core_prepare(&spec, &out, renderer, &mut Progress { call: on_progress, raised: &raised })
    });
    match raised.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        Some(error) => Err(error),
        None => result.map_err(to_py).map(|made| {
            let mut report = made.counts;
            report["written"] = made.written.into();
            report["resumed_rows"] = made.resumed_rows.into();
            report.to_string()
        }),
    }
}

#[pyfunction]
pub fn source_hashes(py: Python<'_>, spec: &str) -> PyResult<Vec<String>> {
    py.detach(|| key::hashes(&Spec::parse(spec)?)).map_err(to_py)
}

#[pyfunction]
pub fn store_key(py: Python<'_>, spec: &str) -> PyResult<String> {
    py.detach(|| key::of_spec(&Spec::parse(spec)?)).map(|(key, _)| key).map_err(to_py)
}

#[pyfunction]
pub fn key_inputs(py: Python<'_>, spec: &str) -> PyResult<String> {
    py.detach(|| key::of_spec(&Spec::parse(spec)?)).map(|(_, inputs)| inputs.to_string()).map_err(to_py)
}

/// Rows, rows that became chats, bytes of text, of trained text, a digest of both, CPU seconds.
type Measured = (usize, usize, usize, usize, String, Vec<f64>);

#[pyfunction]
#[pyo3(signature = (spec, repeats=1, fill=true))]
pub fn measure_rows(py: Python<'_>, spec: &str, repeats: usize, fill: bool) -> PyResult<Measured> {
    let found = py.detach(|| rft_core::rows::measure(&Spec::parse(spec)?, repeats, fill)).map_err(to_py)?;
    Ok((found.rows, found.chats, found.bytes.0, found.bytes.1, key::hex(found.digest), found.seconds))
}

/// Text and character spans of each document of a row, or the sentence that says why the row is left out.
#[derive(IntoPyObject)]
pub enum Shown {
    Documents(Vec<(String, Vec<(usize, usize)>)>),
    Problem(String),
}

#[pyfunction]
#[pyo3(signature = (spec, fill=true))]
pub fn masked_rows(py: Python<'_>, spec: &str, fill: bool) -> PyResult<Vec<Shown>> {
    let rows = py.detach(|| rft_core::rows::masked(&Spec::parse(spec)?, fill)).map_err(to_py)?;
    let in_characters = |(text, spans): (String, Vec<(usize, usize)>)| {
        let spans = char_spans(&text, &spans);
        (text, spans)
    };
    let shown = |row: rft_core::rows::Shown| match row {
        Ok(documents) => Shown::Documents(documents.into_iter().map(in_characters).collect()),
        Err(problem) => Shown::Problem(problem),
    };
    Ok(rows.into_iter().map(shown).collect())
}
