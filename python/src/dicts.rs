//! Results that are dicts.

use kvpack::AttentionShape;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cache::HeldSpan;
use crate::new_array;

/// A span of a layer.
pub fn span_dict<'py>(py: Python<'py>, span: HeldSpan, shape: &AttentionShape) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let of = [shape.kv_heads(), span.tokens, shape.head_dim()];
    dict.set_item("format", span.format)?;
    dict.set_item("tokens", span.tokens)?;
    dict.set_item("positions", span.positions)?;
    dict.set_item("keys", new_array(py, &span.keys, &of)?)?;
    dict.set_item("values", new_array(py, &span.values, &of)?)?;
    Ok(dict)
}

/// The bytes of a cache as a dict.
pub fn memory_dict<'py>(py: Python<'py>, memory: &kvpack::cache::CacheMemory) -> PyResult<Bound<'py, PyDict>> {
    let stores = memory.stores().iter().map(|store| {
        let dict = PyDict::new(py);
        dict.set_item("format", store.format.to_string())?;
        dict.set_item("allocated_bytes", store.allocated_bytes)?;
        dict.set_item("in_use_bytes", store.in_use_bytes)?;
        dict.set_item("pages", store.pages)?;
        dict.set_item("pages_in_use", store.pages_in_use)?;
        dict.set_item("tokens", store.tokens)?;
        dict.set_item("bits_per_element", store.bits_per_element())?;
        Ok(dict)
    });
    let stores = stores.collect::<PyResult<Vec<_>>>()?;
    let dict = PyDict::new(py);
    dict.set_item("allocated_bytes", memory.allocated_bytes())?;
    dict.set_item("in_use_bytes", memory.in_use_bytes())?;
    dict.set_item("bits_per_element", memory.bits_per_element())?;
    dict.set_item("stores", stores)?;
    Ok(dict)
}
