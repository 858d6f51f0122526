//! What stands between paths and files: archives.

use std::path::PathBuf;

use pyo3::prelude::*;
use rft_core::readers;

use crate::error::to_py;

#[pyfunction]
pub fn archive_members(py: Python<'_>, path: PathBuf) -> PyResult<Vec<(String, u64)>> {
    let members = py.detach(|| readers::members(&path)).map_err(to_py)?;
    Ok(members.into_iter().map(|member| (member.name, member.size)).collect())
}
