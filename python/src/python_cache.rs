//! The class `Cache`.

use kvpack::AttentionShape;
use kvpack::cache::{Budget, ModelRecipe, TokenRun};
use kvpack::plan::QueryRun;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::cache::{PromptLayer, StepRuns, spans_of};
use crate::dicts::{memory_dict, span_dict};
use crate::errors::raised;
use crate::held::{Held, HeldSequence, Swapped, on_backend, open};
use crate::layers::{LayersAttend, kinds};
use crate::python_step::Step;
use crate::recipe::recipe_of;

/// Keys and values of all layers of a model for a number of sequences.
#[pyclass(frozen, module = "kvpack")]
pub struct Cache {
    pub held: Held,
    recipe: ModelRecipe,
}

#[pymethods]
impl Cache {
    #[new]
    #[pyo3(signature = (*, layers, kv_heads, head_dim, recipe, query_heads=None, sequences=1, budget=None, scale=None,
        soft_cap=None, windows=None, sinks=None, device="cpu", stream=0))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        recipe: &Bound<'_, PyAny>,
        query_heads: Option<usize>,
        sequences: usize,
        budget: Option<u64>,
        scale: Option<f32>,
        soft_cap: Option<f32>,
        windows: Option<Vec<Option<usize>>>,
        sinks: Option<Vec<Option<Vec<f32>>>>,
        device: &str,
        stream: u64,
    ) -> PyResult<Self> {
        let recipe = recipe_of(recipe)?;
        let attend = LayersAttend { scale, soft_cap, windows, sinks };
        let shape = AttentionShape::new(query_heads.unwrap_or(kv_heads), kv_heads, head_dim).map_err(raised)?;
        let kinds = kinds(&recipe, layers, &shape, &attend).map_err(raised)?;
        let budget = budget.map_or_else(Budget::unlimited, Budget::of_bytes);
        let held = open(py, device, stream, &kinds, shape, sequences, budget)?;
        Ok(Self { held, recipe })
    }

    /// Opens a step. ``runs`` lists what it appends: a sequence (one decoded token), or ``(sequence, tokens)`` (a
    /// prompt or a part of one), or ``(sequence, tokens, "chunk")`` (tokens that may be taken back). Rows of all
    /// tensors of the step follow the order of the runs.
    fn begin(slf: &Bound<'_, Self>, runs: Vec<Bound<'_, PyAny>>) -> PyResult<Step> {
        let runs = runs.iter().map(token_run).collect::<PyResult<Vec<_>>>()?;
        Self::open_step(slf, &StepRuns::Append(runs))
    }

    /// Opens a step that stores nothing: queries of the newest tokens, ``(sequence, queries)`` for each run.
    fn begin_attend(slf: &Bound<'_, Self>, runs: Vec<(usize, usize)>) -> PyResult<Step> {
        let runs = runs.into_iter().map(|(sequence, queries)| QueryRun::causal(sequence, queries)).collect();
        Self::open_step(slf, &StepRuns::Attend(runs))
    }

    /// Compiles the kernels that steps with up to ``longest`` tokens of a sequence need, so that no step compiles.
    #[pyo3(signature = (longest=1))]
    fn prepare(&self, py: Python<'_>, longest: usize) -> PyResult<()> {
        on_backend!(&self.held, shared => shared.prepare(py, longest))
    }

    /// Allocates what these runs need, all at once and no more: as ``begin``, whose stores double when they grow.
    /// Refused while a step is open, which writes what is there.
    fn reserve(&self, py: Python<'_>, runs: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let runs = runs.iter().map(token_run).collect::<PyResult<Vec<_>>>()?;
        on_backend!(&self.held, shared => shared.reserve(py, &runs))
    }

    /// Gives memory back that holds nothing: that of a prompt's f16 form, for one. Returns the number of bytes.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        on_backend!(&self.held, shared => shared.call(py, |state| state.cache.trim()))
    }

    /// Rolls back the open step, if there is one.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        on_backend!(&self.held, shared => shared.abandon(py, None))
    }

    /// Lets the empty sequence ``target`` begin with what ``source`` holds. Pages are shared.
    fn fork(&self, py: Python<'_>, source: usize, target: usize) -> PyResult<()> {
        on_backend!(&self.held, shared => shared.look(py, |state| state.cache.fork(source, target)))
    }

    /// Drops the newest tokens of a sequence, so that ``length`` are left.
    fn truncate(&self, py: Python<'_>, sequence: usize, length: usize) -> PyResult<()> {
        on_backend!(&self.held, shared => shared.look(py, |state| state.cache.truncate(sequence, length)))
    }

    /// Raises what ``truncate`` would raise, and changes nothing: ask for all sequences before the first is truncated.
    fn check_truncate(&self, py: Python<'_>, sequence: usize, length: usize) -> PyResult<()> {
        on_backend!(&self.held, shared => shared.look(py, |state| state.cache.check_truncate(sequence, length)))
    }

    /// Drops all tokens of a sequence.
    fn clear(&self, py: Python<'_>, sequence: usize) -> PyResult<()> {
        on_backend!(&self.held, shared => shared.look(py, |state| state.cache.clear(sequence)))
    }

    /// Takes a sequence to the host, bit for bit, and frees its pages.
    fn swap_out(&self, py: Python<'_>, sequence: usize) -> PyResult<Swapped> {
        let held = match &self.held {
            Held::Cpu(shared) => HeldSequence::Cpu(shared.swap_out(py, sequence)?),
            #[cfg(feature = "cuda")]
            Held::Cuda(shared) => HeldSequence::Cuda(crate::on_device::OnDevice::new(shared.swap_out(py, sequence)?)),
        };
        Ok(Swapped { held })
    }

    /// Brings a sequence back, into an empty one.
    fn swap_in(&self, py: Python<'_>, sequence: usize, swapped: &Swapped) -> PyResult<()> {
        match (&self.held, &swapped.held) {
            (Held::Cpu(shared), HeldSequence::Cpu(swapped)) => shared.swap_in(py, sequence, swapped),
            #[cfg(feature = "cuda")]
            (Held::Cuda(shared), HeldSequence::Cuda(swapped)) => shared.swap_in(py, sequence, swapped),
            #[cfg(feature = "cuda")]
            _ => Err(crate::errors::Error::new_err("swap: the sequence comes from a cache on another device")),
        }
    }

    /// Positions of the queries that ``compress`` measures for a prompt, ``None`` if its policy measures nothing.
    #[pyo3(signature = (tokens, images=Vec::new()))]
    fn query_rows(&self, py: Python<'_>, tokens: usize, images: Vec<(usize, usize)>) -> PyResult<Option<Vec<u32>>> {
        let spans = spans_of(tokens, &images).map_err(raised)?;
        on_backend!(&self.held, shared => shared.query_rows(py, &self.recipe, spans))
    }

    /// Stores the part of a prompt that the recipe's policy keeps. ``layers`` has ``(keys, values, queries)`` for every
    /// layer, queries those of ``query_rows`` (or ``None``). Returns the kept tokens ``[layer][kv_head]``.
    #[pyo3(signature = (sequence, layers, images=Vec::new()))]
    fn compress(
        &self,
        py: Python<'_>,
        sequence: usize,
        layers: Vec<PromptLayer<'_>>,
        images: Vec<(usize, usize)>,
    ) -> PyResult<Vec<Vec<Vec<u32>>>> {
        let tokens = layers.first().map_or(Ok(0), |(keys, ..)| keys.len())?;
        let spans = spans_of(tokens, &images).map_err(raised)?;
        on_backend!(&self.held, shared => shared.compress(py, sequence, &layers, &self.recipe, spans))
    }

    /// Stores the tokens of a prompt that the caller chose, ``kept[layer][kv_head]``, as many for every head of a
    /// layer. ``layers`` has ``(keys, values)`` for every layer.
    fn keep(
        &self,
        py: Python<'_>,
        sequence: usize,
        layers: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        kept: Vec<Vec<Vec<u32>>>,
    ) -> PyResult<()> {
        on_backend!(&self.held, shared => shared.keep(py, sequence, &layers, kept))
    }

    /// Packs the full tiles of a sequence that the residual window need not hold.
    fn pack_windows(&self, py: Python<'_>, sequence: usize) -> PyResult<()> {
        on_backend!(&self.held, shared => {
            shared.call(py, |state| pollster::block_on(state.cache.pack_windows(sequence)))
        })
    }

    /// Length of a sequence: the position of its next token.
    fn length(&self, py: Python<'_>, sequence: usize) -> PyResult<usize> {
        on_backend!(&self.held, shared => shared.look(py, |state| state.cache.length(sequence)))
    }

    /// Tokens that a layer holds of a sequence.
    fn tokens(&self, py: Python<'_>, layer: usize, sequence: usize) -> PyResult<usize> {
        on_backend!(&self.held, shared => shared.look(py, |state| state.cache.tokens(layer, sequence)))
    }

    /// Number of layers.
    #[getter]
    fn layers(&self, py: Python<'_>) -> PyResult<usize> {
        on_backend!(&self.held, shared => shared.look(py, |state| Ok(state.cache.layers())))
    }

    /// Number of sequences.
    #[getter]
    fn sequences(&self, py: Python<'_>) -> PyResult<usize> {
        on_backend!(&self.held, shared => shared.look(py, |state| Ok(state.cache.sequences())))
    }

    /// The text of the recipe.
    #[getter]
    fn recipe(&self) -> String {
        self.recipe.to_string()
    }

    /// A description of each token that had elements which were NaN, infinite or too large: zeros were stored.
    fn non_finite(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        on_backend!(&self.held, shared => shared.call(py, |state| {
            let flagged = pollster::block_on(state.cache.non_finite())?;
            Ok(flagged.iter().map(|token| format!("{token:?}")).collect())
        }))
    }

    /// What a layer holds of a sequence, span by span: dicts of ``format``, ``tokens``, ``positions``, ``keys`` and
    /// ``values`` ``[kv_heads, tokens, head_dim]`` in float32. ``positions`` are one for each token, or those of every KV
    /// head in turn where heads chose tokens of their own.
    fn dequantize<'py>(&self, py: Python<'py>, layer: usize, sequence: usize) -> PyResult<Bound<'py, PyList>> {
        let (shape, spans) = on_backend!(&self.held, shared => (shared.shape, shared.dequantize(py, layer, sequence)?));
        let spans = spans.into_iter().map(|span| span_dict(py, span, &shape)).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, spans)
    }

    /// Bytes by store: a dict of ``allocated_bytes``, ``in_use_bytes``, ``bits_per_element`` and ``stores``.
    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let memory = on_backend!(&self.held, shared => shared.look(py, |state| Ok(state.cache.memory()))?);
        memory_dict(py, &memory)
    }
}

impl Cache {
    fn open_step(slf: &Bound<'_, Self>, runs: &StepRuns) -> PyResult<Step> {
        let opened = on_backend!(&slf.get().held, shared => shared.begin(slf.py(), runs))?;
        Ok(Step { cache: slf.clone().unbind(), opened })
    }
}

fn token_run(run: &Bound<'_, PyAny>) -> PyResult<TokenRun> {
    if let Ok(sequence) = run.extract::<usize>() {
        return Ok(TokenRun::decode(sequence));
    }
    if let Ok((sequence, tokens)) = run.extract::<(usize, usize)>() {
        return Ok(TokenRun::prompt(sequence, tokens));
    }
    match run.extract::<(usize, usize, String)>() {
        Ok((sequence, tokens, kind)) if kind == "chunk" => Ok(TokenRun::chunk(sequence, tokens)),
        Ok((sequence, tokens, kind)) if kind == "prompt" => Ok(TokenRun::prompt(sequence, tokens)),
        _ => {
            let given = run.repr()?;
            Err(pyo3::exceptions::PyTypeError::new_err(format!(
                "run {given}: it must be a sequence, (sequence, tokens) or (sequence, tokens, 'prompt' or 'chunk')"
            )))
        }
    }
}
