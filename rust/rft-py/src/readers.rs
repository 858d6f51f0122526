//! What stands between paths and files: archives.

use std::path::PathBuf;

use pyo3::prelude::*;
use rft_core::readers;

use crate::error::to_py;

/// URL and size of each object of a folder.
type Listed = Vec<(String, u64)>;

#[pyfunction]
pub fn archive_members(py: Python<'_>, path: PathBuf) -> PyResult<Vec<(String, u64)>> {
    let members = py.detach(|| readers::members(&path)).map_err(to_py)?;
    Ok(members.into_iter().map(|member| (member.name, member.size)).collect())
}

#[pyfunction]
#[cfg(feature = "remote")]
pub fn list_remote(py: Python<'_>, folder: &str) -> PyResult<Listed> {
    py.detach(|| readers::remote::list(folder)).map_err(to_py)
}

#[pyfunction]
#[cfg(feature = "remote")]
pub fn remote_states(py: Python<'_>, urls: Vec<String>) -> PyResult<Vec<(u64, String)>> {
    py.detach(|| readers::remote::states(&urls)).map_err(to_py)
}

#[pyfunction]
#[cfg(feature = "remote")]
#[pyo3(signature = (urls, cache, limit, on_progress=None))]
pub fn fetch_remote(
    py: Python<'_>,
    urls: Vec<String>,
    cache: PathBuf,
    limit: u64,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Vec<PathBuf>> {
    let mut raised = None;
    let result = py.detach(|| {
        readers::remote::fetch(&urls, &cache, limit, &mut |done, total| {
            let heard = Python::attach(|py| {
                py.check_signals()?;
                on_progress.as_ref().map_or(Ok(()), |call| call.call1(py, (done, total)).map(|_| ()))
            });
            heard.map_err(|error| {
                let told = rft_core::Error::new(rft_core::Kind::Argument, "callback", &error);
                raised = Some(error);
                told
            })
        })
    });
    match raised {
        Some(error) => Err(error),
        None => result.map_err(to_py),
    }
}

#[cfg(not(feature = "remote"))]
fn not_built<T>(url: &str) -> PyResult<T> {
    Err(to_py(
        rft_core::Error::new(rft_core::Kind::Data, url, "this build of rft reads no remote data")
            .remedy("build it with the cargo feature \"remote\", or download the data"),
    ))
}

#[pyfunction]
#[cfg(not(feature = "remote"))]
pub fn list_remote(folder: &str) -> PyResult<Listed> {
    not_built(folder)
}

#[pyfunction]
#[cfg(not(feature = "remote"))]
pub fn remote_states(urls: Vec<String>) -> PyResult<Vec<(u64, String)>> {
    not_built(urls.first().map_or("", String::as_str))
}

#[pyfunction]
#[cfg(not(feature = "remote"))]
#[pyo3(signature = (urls, cache, limit, on_progress=None))]
pub fn fetch_remote(
    urls: Vec<String>,
    cache: PathBuf,
    limit: u64,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Vec<PathBuf>> {
    let _ = (cache, limit, on_progress);
    not_built(urls.first().map_or("", String::as_str))
}
