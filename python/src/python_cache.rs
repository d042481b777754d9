//! The classes `Recipe`, `Cache`, `Step` and `Swapped`.

use kvpack::cache::{Budget, ModelCache, ModelRecipe, SwappedSequence, TokenRun};
use kvpack::cpu::{Cpu, CpuIndices};
use kvpack::plan::{LayerAttention, MOST_LAYERS, QueryRun, Scoring};
use kvpack::{AttentionShape, Error, Result};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::cache::{HeldSpan, Opened, PromptLayer, Shared, StepRuns, spans_of};
use crate::errors::raised;
use crate::host::Host;
use crate::new_array;

/// A recipe, from its text: how a cache stores keys and values. ``kvpack.recipes()`` lists the methods.
#[pyclass(frozen, module = "kvpack")]
pub struct Recipe {
    pub recipe: ModelRecipe,
}

#[pymethods]
impl Recipe {
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        Ok(Self { recipe: text.parse().map_err(raised)? })
    }

    /// Whether the recipe names a policy that evicts tokens of a prompt: see ``Cache.compress``.
    #[getter]
    fn evicts(&self) -> bool {
        self.recipe.policy().is_some()
    }

    fn __str__(&self) -> String {
        self.recipe.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Recipe('{}')", self.recipe)
    }
}

/// A recipe given as such or as its text.
pub fn recipe_of(given: &Bound<'_, PyAny>) -> PyResult<ModelRecipe> {
    if let Ok(recipe) = given.cast::<Recipe>() {
        return Ok(recipe.get().recipe.clone());
    }
    given.extract::<String>()?.parse().map_err(raised)
}

enum Held {
    Cpu(Shared<Cpu>),
    #[cfg(feature = "cuda")]
    Cuda(Shared<kvpack::cuda::Cuda>),
}

/// Calls a method of the cache on its backend.
macro_rules! on_backend {
    ($held:expr, $shared:ident => $call:expr) => {
        match $held {
            Held::Cpu($shared) => $call,
            #[cfg(feature = "cuda")]
            Held::Cuda($shared) => $call,
        }
    };
}

/// A sequence that ``Cache.swap_out`` took to the host.
#[pyclass(frozen, module = "kvpack")]
pub struct Swapped {
    held: HeldSequence,
}

enum HeldSequence {
    Cpu(SwappedSequence<CpuIndices>),
    #[cfg(feature = "cuda")]
    Cuda(SwappedSequence<kvpack::cuda::Indices>),
}

#[pymethods]
impl Swapped {
    /// Bytes on the host.
    #[getter]
    fn bytes(&self) -> usize {
        match &self.held {
            HeldSequence::Cpu(swapped) => swapped.bytes(),
            #[cfg(feature = "cuda")]
            HeldSequence::Cuda(swapped) => swapped.bytes(),
        }
    }

    fn __len__(&self) -> usize {
        match &self.held {
            HeldSequence::Cpu(swapped) => swapped.length(),
            #[cfg(feature = "cuda")]
            HeldSequence::Cuda(swapped) => swapped.length(),
        }
    }
}

/// Keys and values of all layers of a model for a number of sequences.
#[pyclass(frozen, module = "kvpack")]
pub struct Cache {
    held: Held,
    recipe: ModelRecipe,
}

/// How the layers of a model attend.
struct LayersAttend {
    scale: Option<f32>,
    soft_cap: Option<f32>,
    windows: Option<Vec<Option<usize>>>,
    sinks: Option<Vec<Option<Vec<f32>>>>,
}

impl LayersAttend {
    fn check(&self, layers: usize) -> Result<()> {
        let lists = [("windows", self.windows.as_ref().map(Vec::len)), ("sinks", self.sinks.as_ref().map(Vec::len))];
        match lists.into_iter().find(|(_, given)| given.is_some_and(|given| given != layers)) {
            None => Ok(()),
            Some((what, given)) => {
                let reason =
                    format!("{} for {layers} layers; give one for each, None where there is none", given.unwrap_or(0));
                Err(Error::Plan { what, reason })
            }
        }
    }

    fn layer(&self, layer: usize, shape: &AttentionShape) -> Result<LayerAttention> {
        let mut attention = LayerAttention::default();
        let sinks = self.sinks.as_ref().and_then(|sinks| sinks[layer].as_ref());
        if self.scale.is_some() || self.soft_cap.is_some() || sinks.is_some() {
            let mut scoring = Scoring::of(shape);
            if let Some(scale) = self.scale {
                scoring = scoring.with_scale(scale)?;
            }
            if let Some(cap) = self.soft_cap {
                scoring = scoring.with_soft_cap(cap)?;
            }
            if let Some(sinks) = sinks {
                scoring = scoring.with_sinks(sinks)?;
            }
            attention = attention.with_scoring(scoring);
        }
        match self.windows.as_ref().and_then(|windows| windows[layer]) {
            None => Ok(attention),
            Some(window) if window > 1 => Ok(attention.with_window(window - 1)),
            Some(window) => {
                let reason =
                    format!("{window} positions; a query sees itself and at least one before it, so 2 or more");
                Err(Error::Plan { what: "window", reason })
            }
        }
    }
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

    /// Drops all tokens of a sequence.
    fn clear(&self, py: Python<'_>, sequence: usize) -> PyResult<()> {
        on_backend!(&self.held, shared => shared.look(py, |state| state.cache.clear(sequence)))
    }

    /// Takes a sequence to the host, bit for bit, and frees its pages.
    fn swap_out(&self, py: Python<'_>, sequence: usize) -> PyResult<Swapped> {
        let held = match &self.held {
            Held::Cpu(shared) => HeldSequence::Cpu(shared.swap_out(py, sequence)?),
            #[cfg(feature = "cuda")]
            Held::Cuda(shared) => HeldSequence::Cuda(shared.swap_out(py, sequence)?),
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
    /// ``values`` ``[kv_heads, tokens, head_dim]`` in float32.
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

/// A step of a cache: store and attend in every layer, then ``commit`` or ``abandon``. As a context manager it commits,
/// and abandons if an exception passes.
#[pyclass(frozen, module = "kvpack")]
pub struct Step {
    cache: Py<Cache>,
    opened: Opened,
}

#[pymethods]
impl Step {
    /// Stores keys and values ``[tokens, kv_heads, head_dim]`` of the step's tokens in a layer.
    fn store(&self, layer: usize, keys: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> PyResult<()> {
        on_backend!(&self.cache.get().held, shared => shared.store(self.opened.number, layer, keys, values))
    }

    /// Attends to a layer with queries ``[rows, query_heads, head_dim]``. Returns ``out``, or a new tensor of the
    /// queries' library and type.
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
    /// number, as long as that step's ``bound_anew`` is false and the step of the capture is kept. ``None`` for steps
    /// that no graph may hold.
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
        if kind.is_some() { self.abandon(py) } else { self.commit(py).inspect_err(|_| _ = self.abandon(py)) }?;
        Ok(false)
    }
}

// --- parts --------------------------------------------------------------------------------------------------------

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

/// Shape and recipe of every layer.
fn kinds(
    recipe: &ModelRecipe,
    layers: usize,
    shape: &AttentionShape,
    attend: &LayersAttend,
) -> Result<Vec<(AttentionShape, kvpack::Recipe)>> {
    if layers > MOST_LAYERS {
        let (needed, allowed) = (layers as u64, MOST_LAYERS as u64);
        return Err(Error::Limit { what: "layers of a cache".into(), needed, allowed, hint: "use fewer layers" });
    }
    if recipe.mixture().is_some() {
        recipe.plain()?;
    }
    if let Some(layer) = recipe.highest_layer().filter(|&layer| layer >= layers) {
        let reason = format!("it names layer {layer} of a cache with {layers} layers");
        return Err(Error::Recipe { given: recipe.to_string(), reason });
    }
    attend.check(layers)?;
    (0..layers)
        .map(|layer| Ok((*shape, recipe.layer(layer, shape).with_attention(attend.layer(layer, shape)?))))
        .collect()
}

fn open(
    py: Python<'_>,
    device: &str,
    stream: u64,
    kinds: &[(AttentionShape, kvpack::Recipe)],
    shape: AttentionShape,
    sequences: usize,
    budget: Budget,
) -> PyResult<Held> {
    fn shared<B: Host>(
        py: Python<'_>,
        host: B,
        kinds: &[(AttentionShape, kvpack::Recipe)],
        shape: AttentionShape,
        sequences: usize,
        budget: Budget,
    ) -> PyResult<Shared<B>> {
        let cache = py.detach(|| ModelCache::new(&host, kinds, sequences)).map_err(raised)?;
        Ok(Shared::new(host, cache.with_budget(budget), shape))
    }
    let unsupported = |hint: &'static str| {
        let what = format!("device '{device}'");
        Err(raised(Error::Unsupported { what, hint: hint.into() }))
    };
    match device.split_once(':').unwrap_or((device, "0")) {
        ("cpu", _) => Ok(Held::Cpu(shared(py, Cpu::new(), kinds, shape, sequences, budget)?)),
        #[cfg(feature = "cuda")]
        ("cuda", ordinal) => {
            let host = crate::cuda_host::open(py, ordinal, stream)?;
            Ok(Held::Cuda(shared(py, host, kinds, shape, sequences, budget)?))
        }
        #[cfg(not(feature = "cuda"))]
        ("cuda", _) => {
            let _ = stream;
            unsupported("this wheel was built without the feature cuda; build it with --features cuda, or use 'cpu'")
        }
        _ => unsupported("use 'cpu' or 'cuda:0'"),
    }
}

fn span_dict<'py>(py: Python<'py>, span: HeldSpan, shape: &AttentionShape) -> PyResult<Bound<'py, PyDict>> {
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
