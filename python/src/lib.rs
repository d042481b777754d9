//! The Python module of kvpack.

mod cache;
#[cfg(feature = "cuda")]
mod cuda_host;
mod dlpack;
mod errors;
mod functions;
mod host;
mod python_cache;
mod torch;
mod view;

use pyo3::prelude::*;

/// A NumPy array of these numbers.
fn new_array<'py>(py: Python<'py>, numbers: &[f32], shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    use kvpack::cpu::{Cpu, CpuTensor};
    let array = py.import("numpy")?.call_method1("empty", (shape.to_vec(), "float32"))?;
    let view = view::View::of("result", &array, None)?;
    host::Host::give(&Cpu::new(), &CpuTensor::F32(numbers.to_vec()), &view)?;
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
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("Error", py.get_type::<errors::Error>())?;
    module.add("NoRoom", py.get_type::<errors::NoRoom>())?;
    module.add("TensorError", py.get_type::<errors::TensorError>())?;
    module.add_class::<python_cache::Recipe>()?;
    module.add_class::<python_cache::Cache>()?;
    module.add_class::<python_cache::Step>()?;
    module.add_class::<python_cache::Swapped>()?;
    module.add_class::<functions::Packed>()?;
    module.add_function(wrap_pyfunction!(recipes, module)?)?;
    module.add_function(wrap_pyfunction!(functions::quantize, module)?)?;
    module.add_function(wrap_pyfunction!(functions::dequantize, module)?)?;
    module.add_function(wrap_pyfunction!(functions::attend, module)?)?;
    module.add_function(wrap_pyfunction!(functions::attend_states, module)?)?;
    module.add_function(wrap_pyfunction!(functions::merge, module)?)?;
    Ok(())
}
