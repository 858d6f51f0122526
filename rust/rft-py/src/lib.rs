//! The extension `rft._native`: convert, release the GIL, map errors.

mod data;
mod error;
mod feed;
mod pack;
mod plan;
mod prepare;
mod readers;
mod store;
mod stream;
mod template;
mod tokenizer;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("NativeError", module.py().get_type::<error::NativeError>())?;
    module.add_function(wrap_pyfunction!(prepare::prepare, module)?)?;
    module.add_function(wrap_pyfunction!(prepare::store_key, module)?)?;
    module.add_function(wrap_pyfunction!(prepare::key_inputs, module)?)?;
    module.add_function(wrap_pyfunction!(prepare::measure_rows, module)?)?;
    module.add_function(wrap_pyfunction!(prepare::masked_rows, module)?)?;
    module.add_function(wrap_pyfunction!(prepare::source_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(data::data_command, module)?)?;
    module.add_function(wrap_pyfunction!(readers::archive_members, module)?)?;
    module.add_function(wrap_pyfunction!(readers::fetch_remote, module)?)?;
    module.add_function(wrap_pyfunction!(readers::list_remote, module)?)?;
    module.add_function(wrap_pyfunction!(readers::remote_states, module)?)?;
    module.add_function(wrap_pyfunction!(pack::pack, module)?)?;
    module.add_function(wrap_pyfunction!(pack::deal, module)?)?;
    module.add_class::<template::Template>()?;
    module.add_class::<tokenizer::Tokenizer>()?;
    module.add_class::<store::Store>()?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<feed::Feed>()?;
    module.add_class::<feed::Producer>()?;
    module.add_function(wrap_pyfunction!(feed::stream_key, module)?)?;
    Ok(())
}
