//! The functions of the module: one span of one layer, on the CPU.

use kvpack::backend::{Attention, AttentionStates};
use kvpack::cache::PromptSpan;
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, QueryRun, RowLayout, TokenRange, Visible};
use kvpack::{AttentionShape, KvCache};
use pollster::block_on;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::dicts::memory_dict;
use crate::errors::{raised, wrong_tensor};
use crate::forked::with_threads;
use crate::host::Host;
use crate::new_array;
use crate::recipe::recipe_of;
use crate::view::{Place, View, new_like};

/// Packed keys and values of one layer, from ``quantize``.
#[pyclass(frozen, module = "kvpack")]
pub struct Packed {
    cache: KvCache<Cpu>,
    tokens: usize,
}

#[pymethods]
impl Packed {
    fn __len__(&self) -> usize {
        self.tokens
    }

    /// Bytes by store, as ``Cache.memory``.
    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        memory_dict(py, &self.cache.memory())
    }
}

/// A tensor on the host with this many dimensions.
fn taken(what: &str, tensor: &Bound<'_, PyAny>, dimensions: usize) -> PyResult<(CpuTensor, View)> {
    let view = View::of(what, tensor, None)?;
    view.check_place(what, Place::Cpu)?;
    if view.shape.len() != dimensions {
        return Err(wrong_tensor(what, format!("its shape is {:?}; it must have {dimensions} dimensions", view.shape)));
    }
    Ok((Cpu::new().take(what, &view)?, view))
}

/// Packs keys and values ``[tokens, kv_heads, head_dim]`` as one span of a recipe.
#[pyfunction]
#[pyo3(signature = (keys, values, recipe, query_heads=None))]
pub fn quantize(
    keys: &Bound<'_, PyAny>,
    values: &Bound<'_, PyAny>,
    recipe: &Bound<'_, PyAny>,
    query_heads: Option<usize>,
) -> PyResult<Packed> {
    let recipe = recipe_of(recipe)?;
    let recipe = recipe.plain().map_err(raised)?;
    let ((k, view), (v, others)) = (taken("keys", keys, 3)?, taken("values", values, 3)?);
    if view.shape != others.shape {
        let reason = format!("their shape is {:?}; that of the keys is {:?}", others.shape, view.shape);
        return Err(wrong_tensor("values", reason));
    }
    let (tokens, kv_heads, head_dim) = (view.shape[0], view.shape[1], view.shape[2]);
    let pack = || {
        let shape = AttentionShape::new(query_heads.unwrap_or(kv_heads), kv_heads, head_dim)?;
        let mut cache = KvCache::new(Cpu::new(), shape, 1, recipe.layer(0, &shape))?;
        let spans = [PromptSpan::packed(TokenRange::new(0, tokens)?)];
        block_on(cache.prefill(0, RowLayout::token_major(tokens, &shape), &k, &v, &spans))?;
        Ok(Packed { cache, tokens })
    };
    keys.py().detach(|| with_threads(pack)).map_err(raised)
}

/// Keys and values ``[kv_heads, tokens, head_dim]`` of what was packed, float32.
#[pyfunction]
pub fn dequantize<'py>(py: Python<'py>, packed: &Packed) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let shape = *packed.cache.shape();
    let spans = py.detach(|| with_threads(|| packed.cache.dequantize(0))).map_err(raised)?;
    let Some(span) = spans.first() else { return Err(crate::errors::Error::new_err("nothing is packed")) };
    let of = [shape.kv_heads(), span.tokens, shape.head_dim()];
    Ok((new_array(py, &span.keys, &of)?, new_array(py, &span.values, &of)?))
}

/// The run of all rows of queries.
fn run_of(rows: usize, visible: &str) -> PyResult<QueryRun> {
    let visible = match visible {
        "all" => Visible::All,
        "causal" => Visible::Causal,
        other => {
            let text = format!("visible '{other}': it must be 'all' or 'causal'");
            return Err(pyo3::exceptions::PyValueError::new_err(text));
        }
    };
    Ok(QueryRun::new(0, rows, visible))
}

fn queries_of(packed: &Packed, queries: &Bound<'_, PyAny>) -> PyResult<(CpuTensor, View)> {
    let (q, view) = taken("queries", queries, 3)?;
    let shape = packed.cache.shape();
    view.check_shape("queries", "[rows, query_heads, head_dim]", &[shape.query_heads(), shape.head_dim()])?;
    Ok((q, view))
}

/// Attention of queries ``[rows, query_heads, head_dim]`` to packed keys and values. ``visible`` is ``"all"`` or
/// ``"causal"`` (the queries are those of the newest tokens).
#[pyfunction]
#[pyo3(signature = (packed, queries, visible="all", out=None))]
pub fn attend<'py>(
    packed: &Packed,
    queries: &Bound<'py, PyAny>,
    visible: &str,
    out: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (q, view) = queries_of(packed, queries)?;
    let runs = [run_of(view.shape[0], visible)?];
    let (out, to) = view.output(queries, out, None)?;
    let mut output = Cpu::new().output(&to, &view)?;
    let attend = || block_on(packed.cache.attend_into(&runs, &q, &mut output));
    queries.py().detach(|| with_threads(attend)).map_err(raised)?;
    Cpu::new().give(&output, &to)?;
    Ok(out)
}

/// The attention states of the queries: outputs ``[rows, query_heads, head_dim]`` and natural log-sum-exps
/// ``[rows, query_heads]``, float32.
#[pyfunction]
#[pyo3(signature = (packed, queries, visible="all"))]
pub fn attend_states<'py>(
    packed: &Packed,
    queries: &Bound<'py, PyAny>,
    visible: &str,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let (q, view) = queries_of(packed, queries)?;
    let runs = [run_of(view.shape[0], visible)?];
    let attend = || block_on(packed.cache.attend_states(&runs, &q));
    let states = queries.py().detach(|| with_threads(attend)).map_err(raised)?;
    given(queries, &states, &view.shape)
}

fn given<'py>(
    like: &Bound<'py, PyAny>,
    states: &AttentionStates<CpuTensor>,
    shape: &[usize],
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let new = |shape: &[usize], tensor: &CpuTensor| {
        let new = new_like(like, Place::Cpu, shape, ElementType::F32)?;
        Cpu::new().give(tensor, &View::of("result", &new, None)?)?;
        Ok::<_, PyErr>(new)
    };
    Ok((new(shape, &states.outputs)?, new(&shape[..2], &states.lse)?))
}

type States<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// The states of the same queries over the tokens of both: ``(outputs, lse)`` each.
#[pyfunction]
pub fn merge<'py>(first: States<'py>, second: States<'py>) -> PyResult<States<'py>> {
    let states = |what: &str, (outputs, lse): &States<'py>| {
        let ((o, view), (l, of_lse)) = (taken(what, outputs, 3)?, taken(what, lse, 2)?);
        if view.shape[..2] != of_lse.shape[..] {
            let reason = format!("outputs of shape {:?} have log-sum-exps of shape {:?}", view.shape, of_lse.shape);
            return Err(wrong_tensor(what, reason));
        }
        Ok((AttentionStates { outputs: o, lse: l }, view.shape))
    };
    let ((a, shape), (b, other)) = (states("first states", &first)?, states("second states", &second)?);
    if shape != other {
        return Err(wrong_tensor("second states", format!("their shape is {other:?}; that of the first is {shape:?}")));
    }
    let merge = || {
        let heads = AttentionShape::new(shape[1], shape[1], shape[2])?;
        block_on(Cpu::new().merge(&heads, &a, &b))
    };
    let merged = first.0.py().detach(|| with_threads(merge)).map_err(raised)?;
    given(&first.0, &merged, &shape)
}
