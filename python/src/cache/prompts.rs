//! Prompts of which a cache keeps a part.

use kvpack::backend::TensorRows;
use kvpack::cache::{DenseLayer, MeasuredQueries, ModelRecipe};
use kvpack::plan::{RowLayout, TokenRange};
use kvpack::policy::{LayerSelection, Selection, Spans};
use kvpack::{AttentionShape, Result};
use pollster::block_on;
use pyo3::prelude::*;

use super::{Shared, State, refuse};
use crate::errors::raised;
use crate::host::Host;

/// Keys, values and measured queries of a layer of a prompt.
pub type PromptLayer<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

impl<B: Host> Shared<B> {
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
        let (mut tensors, mut views) = (Vec::with_capacity(layers.len()), Vec::new());
        for (keys, values, queries) in layers {
            let pair = self.pair(keys, values)?;
            let queries = queries.as_ref().map(|queries| self.queries(queries)).transpose()?;
            let taken = queries.as_ref().map(|view| Ok::<_, PyErr>((self.host.take("queries", view)?, view.shape[0])));
            tensors.push((self.take_pair(&pair)?, taken.transpose()?));
            views.extend(pair.into_iter().chain(queries));
        }
        let shape = self.shape;
        let compress = |state: &mut State<B>| {
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
        };
        self.call_on(py, self.order(py, &views), |state| compress(state).map_err(raised))
    }

    pub fn keep(
        &self,
        py: Python<'_>,
        sequence: usize,
        layers: &[(Bound<'_, PyAny>, Bound<'_, PyAny>)],
        kept: Vec<Vec<Vec<u32>>>,
    ) -> PyResult<()> {
        let (mut dense, mut views) = (Vec::with_capacity(layers.len()), Vec::new());
        for (keys, values) in layers {
            let pair = self.pair(keys, values)?;
            let (keys, values, rows) = self.take_pair(&pair)?;
            dense.push(DenseLayer { rows, keys, values });
            views.extend(pair);
        }
        let keep = |state: &mut State<B>| {
            let tokens = dense.first().map_or(0, |layer| layer.rows.tokens);
            let of_layers = kept.into_iter().map(|kept| LayerSelection::new(tokens, kept));
            let selection = Selection::new(of_layers.collect::<Result<Vec<_>>>()?)?;
            block_on(state.cache.keep(sequence, dense, &selection))
        };
        self.call_on(py, self.order(py, &views), |state| keep(state).map_err(raised))
    }
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
