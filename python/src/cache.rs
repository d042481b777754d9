//! A cache on one backend, behind a lock that is taken while the interpreter is free.

use std::sync::{Mutex, PoisonError};

use kvpack::backend::TensorRows;
use kvpack::cache::{DenseLayer, MeasuredQueries, ModelCache, ModelRecipe, SwappedSequence, TokenRun};
use kvpack::plan::{QueryRun, RowLayout, TokenRange};
use kvpack::policy::{LayerSelection, Selection, Spans};
use kvpack::{AttentionShape, Error, Result};
use pollster::block_on;
use pyo3::prelude::*;

use crate::errors::{raised, wrong_tensor};
use crate::host::Host;
use crate::view::{View, new_like};
use kvpack::plan::ElementType;

/// The cache of a backend, and its open step.
pub struct Shared<B: Host> {
    pub host: B,
    pub shape: AttentionShape,
    state: Mutex<State<B>>,
}

pub struct State<B: Host> {
    pub cache: ModelCache<B>,
    /// The number of the open step. A step of another number is over.
    open: Option<u64>,
    steps: u64,
}

/// Keys, values and measured queries of a layer of a prompt.
pub type PromptLayer<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// What a step does.
pub enum StepRuns {
    Append(Vec<TokenRun>),
    Attend(Vec<QueryRun>),
}

fn refuse<T>(what: &'static str, reason: impl Into<String>) -> Result<T> {
    Err(Error::Plan { what, reason: reason.into() })
}

impl<B: Host> State<B> {
    fn check_step(&self, number: u64) -> Result<()> {
        if self.open == Some(number) {
            return Ok(());
        }
        refuse("step", "it was committed or abandoned; begin another")
    }
}

impl<B: Host> Shared<B> {
    pub fn new(host: B, cache: ModelCache<B>, shape: AttentionShape) -> Self {
        Self { host, shape, state: Mutex::new(State { cache, open: None, steps: 0 }) }
    }

    /// Calls the library while other threads of Python run.
    pub fn call<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut State<B>) -> Result<R> + Send) -> PyResult<R> {
        py.detach(|| work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))).map_err(raised)
    }

    /// Opens a step and returns its number.
    pub fn begin(&self, py: Python<'_>, runs: &StepRuns) -> PyResult<u64> {
        self.call(py, |state| {
            match runs {
                StepRuns::Append(runs) => {
                    block_on(state.cache.reserve_for_append(runs))?;
                    state.cache.begin_append(runs)?;
                }
                StepRuns::Attend(runs) => state.cache.begin_attend(runs)?,
            }
            state.steps += 1;
            state.open = Some(state.steps);
            Ok(state.steps)
        })
    }

    /// Keys or values `[tokens, kv_heads, head_dim]`.
    fn rows(&self, what: &str, tensor: &Bound<'_, PyAny>) -> PyResult<(B::Tensor, usize)> {
        let view = View::of(what, tensor, self.host.stream_handle())?;
        view.check_place(what, self.host.place())?;
        let rest = [self.shape.kv_heads(), self.shape.head_dim()];
        let tokens = view.check_shape(what, "[tokens, kv_heads, head_dim]", &rest)?;
        Ok((self.host.take(what, &view)?, tokens))
    }

    /// Keys and values of as many tokens.
    fn pair(&self, keys: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> PyResult<(B::Tensor, B::Tensor, RowLayout)> {
        let ((k, tokens), (v, others)) = (self.rows("keys", keys)?, self.rows("values", values)?);
        if tokens != others {
            return Err(wrong_tensor("values", format!("they have {others} tokens; the keys have {tokens}")));
        }
        Ok((k, v, RowLayout::token_major(tokens, &self.shape)))
    }

    /// Queries `[rows, query_heads, head_dim]`.
    fn queries(&self, tensor: &Bound<'_, PyAny>) -> PyResult<(B::Tensor, View)> {
        let view = View::of("queries", tensor, self.host.stream_handle())?;
        view.check_place("queries", self.host.place())?;
        view.check_shape("queries", "[rows, query_heads, head_dim]", &self.query_row())?;
        Ok((self.host.take("queries", &view)?, view))
    }

    fn query_row(&self) -> [usize; 2] {
        [self.shape.query_heads(), self.shape.head_dim()]
    }

    pub fn store(&self, step: u64, layer: usize, keys: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> PyResult<()> {
        let (k, v, rows) = self.pair(keys, values)?;
        self.call(keys.py(), |state| {
            state.check_step(step)?;
            block_on(state.cache.store(layer, rows, &k, &v))
        })
    }

    pub fn attend<'py>(
        &self,
        step: u64,
        layer: usize,
        queries: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = queries.py();
        let (q, view) = self.queries(queries)?;
        let (out, to) = view.output(queries, out, self.host.stream_handle())?;
        let mut output = self.host.output(&to)?;
        self.call(py, |state| {
            state.check_step(step)?;
            block_on(state.cache.attend_into(layer, &q, &mut output))
        })?;
        self.host.give(&output, &to)?;
        Ok(out)
    }

    pub fn attend_states<'py>(
        &self,
        step: u64,
        layer: usize,
        queries: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let (q, view) = self.queries(queries)?;
        let states = self.call(queries.py(), |state| {
            state.check_step(step)?;
            block_on(state.cache.attend_states(layer, &q))
        })?;
        let outputs = self.result(queries, &view.shape, &states.outputs)?;
        Ok((outputs, self.result(queries, &view.shape[..2], &states.lse)?))
    }

    /// An f32 result in a new tensor of the caller's library.
    fn result<'py>(
        &self,
        like: &Bound<'py, PyAny>,
        shape: &[usize],
        tensor: &B::Tensor,
    ) -> PyResult<Bound<'py, PyAny>> {
        let new = new_like(like, shape, ElementType::F32)?;
        self.host.copy(tensor, &View::of("result", &new, self.host.stream_handle())?)?;
        Ok(new)
    }

    pub fn commit(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.call(py, |state| {
            state.check_step(step)?;
            state.cache.commit()?;
            state.open = None;
            Ok(())
        })
    }

    /// Rolls the open step back; `None`: whichever it is.
    pub fn abandon(&self, py: Python<'_>, step: Option<u64>) -> PyResult<()> {
        self.call(py, |state| {
            if step.is_none() || state.open == step {
                state.cache.abandon();
                state.open = None;
            }
            Ok(())
        })
    }

    /// The spans that a sequence holds in a layer: keys and values `[kv_heads, tokens, head_dim]`.
    pub fn dequantize(&self, py: Python<'_>, layer: usize, sequence: usize) -> PyResult<Vec<HeldSpan>> {
        self.call(py, |state| {
            let spans = state.cache.dequantize(layer, sequence)?;
            let positions = block_on(state.cache.positions(layer, sequence))?;
            let held = spans.into_iter().zip(positions).map(|(span, positions)| {
                let keys = block_on(self.host.download(&span.keys))?;
                let values = block_on(self.host.download(&span.values))?;
                let positions = match positions {
                    kvpack::cache::SpanPositions::Run(run) => (run.start()..run.end()).collect(),
                    kvpack::cache::SpanPositions::PerHead(positions) => positions,
                };
                Ok(HeldSpan { format: span.format.to_string(), tokens: span.tokens, positions, keys, values })
            });
            held.collect()
        })
    }

    pub fn query_rows(&self, py: Python<'_>, recipe: &ModelRecipe, spans: Spans) -> PyResult<Option<Vec<u32>>> {
        self.call(py, |state| {
            let Some(policy) = recipe.policy() else { return Ok(None) };
            let prompt = state.cache.observe(policy.clone(), spans)?;
            Ok(prompt.query_rows().map(|rows| rows.positions().to_vec()))
        })
    }

    pub fn compress(
        &self,
        py: Python<'_>,
        sequence: usize,
        layers: &[PromptLayer<'_>],
        recipe: &ModelRecipe,
        spans: Spans,
    ) -> PyResult<Vec<Vec<Vec<u32>>>> {
        let mut tensors = Vec::with_capacity(layers.len());
        for (keys, values, queries) in layers {
            let queries = queries.as_ref().map(|queries| self.queries(queries)).transpose()?;
            tensors.push((self.pair(keys, values)?, queries.map(|(q, view)| (q, view.shape[0]))));
        }
        let shape = self.shape;
        self.call(py, |state| {
            let Some(policy) = recipe.policy() else {
                return refuse(
                    "compress",
                    format!("recipe '{recipe}' evicts nothing; name a policy, as in 'h2o:0.2/f16'"),
                );
            };
            let mut prompt = state.cache.observe(policy.clone(), spans)?;
            let heads = AttentionShape::new(shape.query_heads(), shape.query_heads(), shape.head_dim())?;
            for (layer, ((keys, values, rows), queries)) in tensors.into_iter().enumerate() {
                let dense = DenseLayer { rows, keys, values };
                let measured = queries.as_ref().map(|(q, rows)| MeasuredQueries {
                    queries: TensorRows { tensor: q, layout: RowLayout::token_major(*rows, &heads) },
                    known_lse: None,
                });
                prompt.observe(layer, dense, measured)?;
            }
            Ok(kept(&block_on(state.cache.compress(sequence, &prompt))?))
        })
    }

    pub fn keep(
        &self,
        py: Python<'_>,
        sequence: usize,
        layers: &[(Bound<'_, PyAny>, Bound<'_, PyAny>)],
        kept: Vec<Vec<Vec<u32>>>,
    ) -> PyResult<()> {
        let mut dense = Vec::with_capacity(layers.len());
        for (keys, values) in layers {
            let (keys, values, rows) = self.pair(keys, values)?;
            dense.push(DenseLayer { rows, keys, values });
        }
        self.call(py, |state| {
            let tokens = dense.first().map_or(0, |layer| layer.rows.tokens);
            let of_layers = kept.into_iter().map(|kept| LayerSelection::new(tokens, kept));
            let selection = Selection::new(of_layers.collect::<Result<Vec<_>>>()?)?;
            block_on(state.cache.keep(sequence, dense, &selection))
        })
    }

    pub fn swap_out(&self, py: Python<'_>, sequence: usize) -> PyResult<SwappedSequence<B::Indices>> {
        self.call(py, |state| block_on(state.cache.swap_out(sequence)))
    }

    pub fn swap_in(&self, py: Python<'_>, sequence: usize, swapped: &SwappedSequence<B::Indices>) -> PyResult<()> {
        self.call(py, |state| block_on(state.cache.swap_in(sequence, swapped)))
    }
}

/// A span on the host.
pub struct HeldSpan {
    pub format: String,
    pub tokens: usize,
    pub positions: Vec<usize>,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

fn kept(selection: &Selection) -> Vec<Vec<Vec<u32>>> {
    let of_layer = |layer: &LayerSelection| (0..layer.kv_heads()).map(|head| layer.kept(head).to_vec()).collect();
    selection.layers().iter().map(of_layer).collect()
}

/// Text and images of a prompt.
pub fn spans_of(tokens: usize, images: &[(usize, usize)]) -> Result<Spans> {
    let images: Vec<TokenRange> =
        images.iter().map(|&(start, end)| TokenRange::new(start, end)).collect::<Result<_>>()?;
    Spans::new(tokens, &images)
}
