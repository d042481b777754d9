//! A cache on one backend, behind a lock that is taken while the interpreter is free.

mod prompts;

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use kvpack::cache::{ModelCache, SwappedSequence, TokenRun};
use kvpack::cpu::CpuTensor;
use kvpack::plan::{ElementType, QueryRun, RowLayout};
use kvpack::{AttentionShape, Error, Result};
use pollster::block_on;
use pyo3::prelude::*;

pub use self::prompts::{PromptLayer, spans_of};
use crate::errors::{raised, wrong_tensor};
use crate::forked::{is_forked, with_threads};
use crate::host::{CallOrder, Host, LayerRows, Prepared};
use crate::on_device::{OnDevice, Parked, free_parked, park};
use crate::view::{View, new_like};

/// The cache of a backend, and its open step.
pub struct Shared<B: Host> {
    pub shape: AttentionShape,
    host: OnDevice<B, B>,
    state: SharedState<B>,
}

/// Nobody shares it with the cache, until the cache is dropped and leaves it.
type SharedState<B> = OnDevice<B, Arc<Mutex<State<B>>>>;

/// What a cache left that was dropped while a graph captured one of its streams.
struct Left<B: Host> {
    host: OnDevice<B, B>,
    state: SharedState<B>,
}

pub struct State<B: Host> {
    pub cache: ModelCache<B>,
    open: Option<Open<B>>,
    /// Steps so far.
    steps: u64,
    host: B::State,
}

/// The open step. A step of another number is over.
struct Open<B: Host> {
    number: u64,
    rows: usize,
    /// Whether it stores tokens. A step of `begin_attend` stores none.
    appends: bool,
    prepared: Option<Prepared<B::Prepared>>,
    /// Which layers have stored their tokens by launches of the prepared step.
    stored: Vec<bool>,
}

impl<B: Host> Drop for Shared<B> {
    /// The layers of a prepared step run on the caller's stream, which the backend's is not ordered behind until the
    /// next call. The fields, which hold the memory that they read and write, are dropped after this.
    fn drop(&mut self) {
        if !may_free::<B>(&self.host, &mut self.state) {
            let state = OnDevice::new(Arc::clone(&self.state));
            park(Box::new(Left { host: OnDevice::new(B::clone(&self.host)), state }));
        }
    }
}

impl<B: Host> Parked for Left<B> {
    fn may_go(&mut self) -> bool {
        may_free::<B>(&self.host, &mut self.state)
    }
}

fn may_free<B: Host>(host: &B, state: &mut SharedState<B>) -> bool {
    let _device = B::thread_device();
    let Some(state) = Arc::get_mut(state) else { return false };
    host.may_free(&mut state.get_mut().unwrap_or_else(PoisonError::into_inner).host)
}

/// A step that was opened.
pub struct Opened {
    pub number: u64,
    /// The class of a prepared step, and whether a graph of it has to be captured again.
    pub graph: Option<(u64, bool)>,
    /// Keeps the memory of its launches alive.
    pub _memory: Option<Box<dyn Any + Send + Sync>>,
}

/// What a step does.
pub enum StepRuns {
    Append(Vec<TokenRun>),
    Attend(Vec<QueryRun>),
}

fn refuse<T>(what: &'static str, reason: impl Into<String>) -> Result<T> {
    Err(Error::Plan { what, reason: reason.into() })
}

impl StepRuns {
    fn rows(&self) -> usize {
        match self {
            Self::Append(runs) => runs.iter().map(|run| run.tokens()).fold(0, usize::saturating_add),
            Self::Attend(runs) => runs.iter().map(|run| run.queries).fold(0, usize::saturating_add),
        }
    }
}

impl<B: Host> State<B> {
    fn open_step(&self, number: u64) -> Result<&Open<B>> {
        match &self.open {
            Some(open) if open.number == number => Ok(open),
            _ => refuse("step", "it was committed or abandoned; begin another"),
        }
    }

    /// The open step, whose layers are launched from now on by calls of the cache.
    fn check_step(&mut self, number: u64) -> Result<()> {
        self.open_step(number)?;
        self.mark_launched()
    }

    fn commit(&mut self, number: u64) -> Result<()> {
        self.check_step(number)?;
        self.cache.commit()?;
        self.open = None;
        Ok(())
    }

    /// Tells the cache which layers of the open step were launched without it.
    fn mark_launched(&mut self) -> Result<()> {
        let Some(open) = &self.open else { return Ok(()) };
        if open.stored.contains(&true) {
            for part in self.cache.open_steps()? {
                part.layers.iter().filter(|&&layer| open.stored[layer]).for_each(|&layer| part.stored.mark(layer));
            }
        }
        Ok(())
    }

    /// Launches a layer of a prepared step; false if the step is none.
    fn launch(
        &mut self,
        host: &B,
        number: u64,
        order: CallOrder,
        layer: usize,
        rows: &LayerRows<'_>,
    ) -> PyResult<bool> {
        self.open_step(number).map_err(raised)?;
        let Self { open: Some(open), host: state, .. } = self else { return Ok(false) };
        let Some(prepared) = &open.prepared else { return Ok(false) };
        let Some(stored) = open.stored.get_mut(layer) else { return Ok(false) };
        let given = match rows {
            LayerRows::Store { keys, .. } | LayerRows::Both { keys, .. } => keys.shape[0],
            LayerRows::Attend { queries, .. } => queries.shape[0],
        };
        // Launches of a step that stores nothing would ignore keys and values.
        let allowed = if rows.stores() { open.appends } else { *stored };
        if given != open.rows || !allowed {
            return Ok(false); // the call of the cache says what is wrong
        }
        host.launch(state, order, &prepared.launches, layer, rows)?;
        *stored |= rows.stores();
        Ok(true)
    }
}

impl<B: Host> Shared<B> {
    pub fn new(host: B, cache: ModelCache<B>, shape: AttentionShape) -> Self {
        let state = State { cache, open: None, steps: 0, host: host.state() };
        free_parked();
        Self { shape, host: OnDevice::new(host), state: OnDevice::new(Arc::new(Mutex::new(state))) }
    }

    fn lock(&self) -> Result<MutexGuard<'_, State<B>>> {
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::Poisoned(state)) => Ok(state.into_inner()),
            Err(TryLockError::WouldBlock) if is_forked() => {
                refuse("cache", "another thread worked on it when this process was forked; make a new one here")
            }
            Err(TryLockError::WouldBlock) => Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Calls what the library does on the host alone, while other threads of Python run.
    pub fn look<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut State<B>) -> Result<R> + Send) -> PyResult<R> {
        let on_host = || {
            let _device = B::thread_device();
            work(&mut *self.lock()?)
        };
        py.detach(|| with_threads(on_host)).map_err(raised)
    }

    /// Calls the library, in the order of the caller's current stream, while other threads of Python run.
    pub fn call<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut State<B>) -> Result<R> + Send) -> PyResult<R> {
        let order = CallOrder { stream: self.host.current_stream(py), foreign: false };
        self.call_on(py, order, |state| work(state).map_err(raised))
    }

    fn call_on<R: Send>(
        &self,
        py: Python<'_>,
        order: CallOrder,
        work: impl FnOnce(&mut State<B>) -> PyResult<R> + Send,
    ) -> PyResult<R> {
        let on_stream = || {
            let _device = B::thread_device();
            free_parked();
            let mut state = self.lock()?;
            self.host.enter(&mut state.host, order)?;
            let done = work(&mut state);
            self.host.leave(&mut state.host, order)?;
            Ok(done)
        };
        py.detach(|| with_threads(on_stream)).map_err(raised)?
    }

    /// The order of a call with these tensors. Tensors of PyTorch are ordered on its current stream, and those of other
    /// libraries on the stream of the backend.
    fn order<'a>(&self, py: Python<'_>, views: impl IntoIterator<Item = &'a View>) -> CallOrder {
        let (mut torch, mut foreign) = (false, false);
        views.into_iter().for_each(|view| if view.of_torch { torch = true } else { foreign = true });
        let own = self.host.stream_handle().filter(|_| !torch);
        CallOrder { stream: own.unwrap_or_else(|| self.host.current_stream(py)), foreign }
    }

    /// Opens a step.
    pub fn begin(&self, py: Python<'_>, runs: &StepRuns) -> PyResult<Opened> {
        self.call(py, |state| {
            match runs {
                StepRuns::Append(runs) => {
                    block_on(state.cache.reserve_for_append(runs))?;
                    state.cache.begin_append(runs)?;
                }
                StepRuns::Attend(runs) => state.cache.begin_attend(runs)?,
            }
            let rows = runs.rows();
            let prepared = self.host.prepared(&mut state.host, &state.cache, rows);
            let prepared = prepared.inspect_err(|_| state.cache.abandon())?;
            state.steps += 1;
            let graph = prepared.as_ref().map(|prepared| (prepared.class, prepared.bound_anew));
            let memory =
                prepared.as_ref().map(|prepared| Box::new(OnDevice::<B, _>::new(prepared.launches.clone())) as _);
            let appends = matches!(runs, StepRuns::Append(_));
            // Layers of a step that stores nothing lack nothing.
            let stored = vec![!appends; state.cache.layers()];
            state.open = Some(Open { number: state.steps, rows, appends, prepared, stored });
            Ok(Opened { number: state.steps, graph, _memory: memory })
        })
    }

    /// Allocates what runs need in every layer.
    pub fn reserve(&self, py: Python<'_>, runs: &[TokenRun]) -> PyResult<()> {
        self.call(py, |state| {
            (0..state.cache.layers()).try_for_each(|layer| {
                let room = state.cache.room_for_append(layer, runs)?;
                block_on(state.cache.reserve_kind(layer, &room))
            })
        })
    }

    /// Compiles what steps need.
    pub fn prepare(&self, py: Python<'_>, longest: usize) -> PyResult<()> {
        self.call(py, |state| self.host.prepare(&mut state.host, &state.cache, longest))
    }

    /// Notes that a graph of a prepared step was replayed for this one.
    pub fn replayed(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.look(py, |state| {
            state.open_step(step)?;
            match &mut state.open {
                Some(open) if open.prepared.is_some() => open.stored.fill(true),
                _ => return refuse("step", "its 'graph' is None: no graph stores it; call store for every layer"),
            }
            Ok(())
        })
    }

    /// Launches a layer of a prepared step; false if the step is none, and the calls of the cache are to be made.
    fn launch(&self, py: Python<'_>, step: u64, layer: usize, rows: &LayerRows<'_>) -> PyResult<bool> {
        let order = self.order(py, rows.views());
        py.detach(|| {
            let _device = B::thread_device();
            self.lock().map_err(raised)?.launch(&self.host, step, order, layer, rows)
        })
    }

    /// Keys or values `[tokens, kv_heads, head_dim]`.
    fn rows(&self, what: &str, tensor: &Bound<'_, PyAny>) -> PyResult<View> {
        let view = View::of(what, tensor, self.host.stream_handle())?;
        view.check_place(what, self.host.place())?;
        view.check_shape(what, "[tokens, kv_heads, head_dim]", &[self.shape.kv_heads(), self.shape.head_dim()])?;
        Ok(view)
    }

    /// Keys and values of as many tokens.
    fn pair(&self, keys: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> PyResult<[View; 2]> {
        let (k, v) = (self.rows("keys", keys)?, self.rows("values", values)?);
        if k.shape[0] != v.shape[0] {
            let reason = format!("they have {} tokens; the keys have {}", v.shape[0], k.shape[0]);
            return Err(wrong_tensor("values", reason));
        }
        Ok([k, v])
    }

    /// Keys and values, and how they lie: where they are, if both lie alike.
    fn take_pair(&self, [keys, values]: &[View; 2]) -> PyResult<(B::Tensor, B::Tensor, RowLayout)> {
        if let Some(rows) = keys.rows().filter(|rows| B::READS_ROWS && values.rows().as_ref() == Some(rows)) {
            let of = |what, view| self.host.take_rows(what, view, &rows, &self.shape);
            return Ok((of("keys", keys)?, of("values", values)?, rows));
        }
        let rows = RowLayout::token_major(keys.shape[0], &self.shape);
        Ok((self.host.take("keys", keys)?, self.host.take("values", values)?, rows))
    }

    /// Queries `[rows, query_heads, head_dim]`.
    fn queries(&self, tensor: &Bound<'_, PyAny>) -> PyResult<View> {
        let view = View::of("queries", tensor, self.host.stream_handle())?;
        view.check_place("queries", self.host.place())?;
        let rest = [self.shape.query_heads(), self.shape.head_dim()];
        view.check_shape("queries", "[rows, query_heads, head_dim]", &rest)?;
        Ok(view)
    }

    pub fn store(&self, step: u64, layer: usize, keys: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> PyResult<()> {
        self.store_views(keys.py(), step, layer, &self.pair(keys, values)?)
    }

    fn store_views(&self, py: Python<'_>, step: u64, layer: usize, pair: &[View; 2]) -> PyResult<()> {
        let [keys, values] = pair;
        if self.launch(py, step, layer, &LayerRows::Store { keys, values })? {
            return Ok(());
        }
        let (k, v, rows) = self.take_pair(pair)?;
        self.call_on(py, self.order(py, pair), |state| {
            state.check_step(step).map_err(raised)?;
            block_on(state.cache.store(layer, rows, &k, &v)).map_err(raised)
        })
    }

    pub fn attend<'py>(
        &self,
        step: u64,
        layer: usize,
        queries: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let view = self.queries(queries)?;
        let (out, to) = view.output(queries, out, self.host.stream_handle())?;
        self.host.check_output(&to, &view, &[])?;
        self.attend_views(queries.py(), step, layer, &view, &to)?;
        Ok(out)
    }

    fn attend_views(&self, py: Python<'_>, step: u64, layer: usize, queries: &View, out: &View) -> PyResult<()> {
        if self.launch(py, step, layer, &LayerRows::Attend { queries, out })? {
            return Ok(());
        }
        let q = self.host.take("queries", queries)?;
        let mut output = self.host.output(out, queries)?;
        self.call_on(py, self.order(py, [queries, out]), |state| {
            state.check_step(step).map_err(raised)?;
            block_on(state.cache.attend_into(layer, &q, &mut output)).map_err(raised)
        })?;
        self.host.give(&output, out)
    }

    /// Stores and attends.
    pub fn store_attend<'py>(
        &self,
        step: u64,
        layer: usize,
        [keys, values, queries]: [&Bound<'py, PyAny>; 3],
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, pair, view) = (keys.py(), self.pair(keys, values)?, self.queries(queries)?);
        if pair[0].shape[0] != view.shape[0] {
            let reason = format!("they have {} rows; the keys have {}", view.shape[0], pair[0].shape[0]);
            return Err(wrong_tensor("queries", reason));
        }
        let (out, to) = view.output(queries, out, self.host.stream_handle())?;
        self.host.check_output(&to, &view, &pair)?;
        let both = LayerRows::Both { keys: &pair[0], values: &pair[1], queries: &view, out: &to };
        if !self.launch(py, step, layer, &both)? {
            self.store_views(py, step, layer, &pair)?;
            self.attend_views(py, step, layer, &view, &to)?;
        }
        Ok(out)
    }

    pub fn attend_states<'py>(
        &self,
        step: u64,
        layer: usize,
        queries: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let view = self.queries(queries)?;
        let new = |shape: &[usize]| {
            let new = new_like(queries, view.place, shape, ElementType::F32)?;
            let view = View::of("result", &new, self.host.stream_handle())?;
            Ok::<_, PyErr>((new, view))
        };
        let ((outputs, to), (lse, to_lse)) = (new(&view.shape)?, new(&view.shape[..2])?);
        let q = self.host.take("queries", &view)?;
        let py = queries.py();
        self.call_on(py, self.order(py, [&view, &to, &to_lse]), |state| {
            state.check_step(step).map_err(raised)?;
            let states = block_on(state.cache.attend_states(layer, &q)).map_err(raised)?;
            self.host.copy(&states.outputs, &to)?;
            self.host.copy(&states.lse, &to_lse)
        })?;
        Ok((outputs, lse))
    }

    pub fn commit(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.look(py, |state| state.commit(step))
    }

    /// Makes the tokens of a step part of the cache, unless it is over.
    pub fn commit_if_open(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.look(py, |state| if state.open_step(step).is_ok() { state.commit(step) } else { Ok(()) })
    }

    /// Rolls the open step back; `None`: whichever it is.
    pub fn abandon(&self, py: Python<'_>, step: Option<u64>) -> PyResult<()> {
        self.look(py, |state| {
            if step.is_none() || state.open.as_ref().map(|open| open.number) == step {
                state.cache.abandon();
                state.open = None;
            }
            Ok(())
        })
    }

    /// The spans that a sequence holds in a layer: keys and values `[kv_heads, tokens, head_dim]`.
    pub fn dequantize(&self, py: Python<'_>, layer: usize, sequence: usize) -> PyResult<Vec<HeldSpan>> {
        self.call(py, |state| {
            state.mark_launched()?;
            let spans = state.cache.dequantize(layer, sequence)?;
            let positions = block_on(state.cache.positions(layer, sequence))?;
            let held = spans.into_iter().zip(positions).map(|(span, positions)| {
                let keys = CpuTensor::F32(block_on(self.host.download(&span.keys))?);
                let values = CpuTensor::F32(block_on(self.host.download(&span.values))?);
                let positions = match positions {
                    kvpack::cache::SpanPositions::Run(run) => (run.start()..run.end()).collect(),
                    kvpack::cache::SpanPositions::PerHead(positions) => positions,
                };
                Ok(HeldSpan { format: span.format.to_string(), tokens: span.tokens, positions, keys, values })
            });
            held.collect()
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
    pub keys: CpuTensor,
    pub values: CpuTensor,
}
