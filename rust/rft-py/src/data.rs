//! `data_command`: the command line of `rft-data`.

use std::sync::Mutex;

use pyo3::prelude::*;
use rft_core::{Error, Kind};

#[pyfunction]
pub fn data_command(py: Python<'_>, arguments: Vec<String>) -> PyResult<(u8, String, String)> {
    let interrupted: Mutex<Option<PyErr>> = Mutex::new(None);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = py.detach(|| {
        let poll = || {
            Python::attach(|py| py.check_signals()).map_err(|error| {
                let told = Error::new(Kind::Io, "", error.to_string());
                *interrupted.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
                told
            })
        };
        rft_data::run("rft data", &arguments, &mut out, &mut err, &poll)
    });
    match interrupted.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        Some(error) => Err(error),
        None => {
            let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
            Ok((code, text(out), text(err)))
        }
    }
}
