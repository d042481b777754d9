//! The class `Step`.

use pyo3::prelude::*;

use crate::cache::Opened;
use crate::held::{Held, on_backend};
use crate::python_cache::Cache;

/// A step of a cache: store and attend in every layer, then ``commit`` or ``abandon``. As a context manager it commits,
/// and abandons if an exception passes.
#[pyclass(frozen, module = "kvpack")]
pub struct Step {
    /// Dropped before the memory of the launches: where the step is the last that holds the cache, the cache orders what
    /// is given back.
    pub cache: Py<Cache>,
    pub opened: Opened,
}

#[pymethods]
impl Step {
    /// Stores keys and values ``[tokens, kv_heads, head_dim]`` of the step's tokens in a layer.
    fn store(&self, layer: usize, keys: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> PyResult<()> {
        on_backend!(&self.cache.get().held, shared => shared.store(self.opened.number, layer, keys, values))
    }

    /// Attends to a layer with queries ``[rows, query_heads, head_dim]``. Returns ``out``, or a new tensor of the
    /// queries' type: one of PyTorch for queries of PyTorch, and a NumPy array for others. NumPy has no bfloat16, and
    /// no arrays on CUDA: such queries need ``out``.
    #[pyo3(signature = (layer, queries, out=None))]
    fn attend<'py>(
        &self,
        layer: usize,
        queries: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        on_backend!(&self.cache.get().held, shared => shared.attend(self.opened.number, layer, queries, out))
    }

    /// ``store`` and ``attend`` of a layer in one call, which takes less time than two.
    #[pyo3(signature = (layer, keys, values, queries, out=None))]
    fn store_attend<'py>(
        &self,
        layer: usize,
        keys: &Bound<'py, PyAny>,
        values: &Bound<'py, PyAny>,
        queries: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        on_backend!(&self.cache.get().held, shared => {
            shared.store_attend(self.opened.number, layer, [keys, values, queries], out)
        })
    }

    /// The number of the step's kind, if a CUDA graph may hold its calls: ``store``, ``attend`` and ``store_attend``
    /// then only launch kernels. A graph that was captured in one step may be replayed in every later step of the same
    /// number, as long as that step's ``bound_anew`` is false and the step of the capture is kept. Steps of other rows
    /// have other numbers. ``None`` for steps that no graph may hold.
    #[getter]
    fn graph(&self) -> Option<u64> {
        self.opened.graph.map(|(class, _)| class)
    }

    /// Whether memory was bound again. A graph of this number must then be captured again.
    #[getter]
    fn bound_anew(&self) -> bool {
        self.opened.graph.is_none_or(|(_, anew)| anew)
    }

    /// Says that a graph was replayed for this step, so that it can be committed. Replay it on the stream that was the
    /// current one in ``begin``.
    fn replayed(&self, py: Python<'_>) -> PyResult<()> {
        on_backend!(&self.cache.get().held, shared => shared.replayed(py, self.opened.number))
    }

    /// The attention states of the queries: outputs ``[rows, query_heads, head_dim]`` and natural log-sum-exps
    /// ``[rows, query_heads]``, float32.
    fn attend_states<'py>(
        &self,
        layer: usize,
        queries: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        on_backend!(&self.cache.get().held, shared => shared.attend_states(self.opened.number, layer, queries))
    }

    /// Makes the tokens part of the cache.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        on_backend!(&self.cache.get().held, shared => shared.commit(py, self.opened.number))
    }

    /// Rolls the step back. Does nothing after ``commit``.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        on_backend!(&self.cache.get().held, shared => shared.abandon(py, Some(self.opened.number)))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind, _error, _trace))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<Bound<'_, PyAny>>,
        _error: Option<Bound<'_, PyAny>>,
        _trace: Option<Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        if kind.is_some() {
            self.abandon(py)?;
            return Ok(false);
        }
        let ended = on_backend!(&self.cache.get().held, shared => shared.commit_if_open(py, self.opened.number));
        ended.inspect_err(|_| _ = self.abandon(py))?;
        Ok(false)
    }
}
