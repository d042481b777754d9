//! The Python module of kvpack.

mod cache;
#[cfg(feature = "command")]
mod command;
#[cfg(feature = "cuda")]
mod cuda_host;
mod dicts;
mod dlpack;
mod errors;
mod exchange;
mod forked;
mod functions;
mod held;
mod host;
mod layers;
mod on_device;
mod python_cache;
mod python_step;
mod recipe;
mod torch;
mod view;

use kvpack::cpu::{Cpu, CpuTensor};
use pyo3::prelude::*;

/// A NumPy array of the numbers of a tensor in float32.
fn new_array<'py>(py: Python<'py>, numbers: &CpuTensor, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    let array = py.import("numpy")?.call_method1("empty", (shape.to_vec(), "float32"))?;
    host::Host::give(&Cpu::new(), numbers, &view::View::of("result", &array, None)?)?;
    Ok(array)
}

/// The methods of kvpack, as texts that ``Recipe`` takes.
#[pyfunction]
fn recipes() -> Vec<String> {
    kvpack::cache::ModelRecipe::all().iter().map(ToString::to_string).collect()
}

#[pymodule]
fn _kvpack(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    forked::imported();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("Error", py.get_type::<errors::Error>())?;
    module.add("NoRoom", py.get_type::<errors::NoRoom>())?;
    module.add("TensorError", py.get_type::<errors::TensorError>())?;
    module.add_class::<recipe::Recipe>()?;
    module.add_class::<python_cache::Cache>()?;
    module.add_class::<python_step::Step>()?;
    module.add_class::<held::Swapped>()?;
    module.add_class::<functions::Packed>()?;
    #[cfg(feature = "command")]
    module.add_function(wrap_pyfunction!(command::command, module)?)?;
    module.add_function(wrap_pyfunction!(recipes, module)?)?;
    module.add_function(wrap_pyfunction!(functions::quantize, module)?)?;
    module.add_function(wrap_pyfunction!(functions::dequantize, module)?)?;
    module.add_function(wrap_pyfunction!(functions::attend, module)?)?;
    module.add_function(wrap_pyfunction!(functions::attend_states, module)?)?;
    module.add_function(wrap_pyfunction!(functions::merge, module)?)?;
    Ok(())
}
