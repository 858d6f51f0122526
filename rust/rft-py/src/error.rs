//! Core errors as `rft._native.NativeError`.

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use rft_core::Error;

pyo3::create_exception!(
    rft._native,
    NativeError,
    PyException,
    "A failure of the core: kind, where, problem, wanted, do."
);

/// The core's error as a Python exception with its parts as attributes.
pub fn to_py(error: Error) -> PyErr {
    let raised = NativeError::new_err(error.to_string());
    Python::attach(|py| {
        let value = raised.value(py);
        let parts = [
            ("kind", error.kind.name()),
            ("where", error.place.as_str()),
            ("problem", error.problem.as_str()),
            ("wanted", error.wanted.as_str()),
            ("do", error.remedy.as_str()),
        ];
        for (name, part) in parts {
            if let Err(failed) = value.setattr(name, part) {
                return failed;
            }
        }
        raised
    })
}
