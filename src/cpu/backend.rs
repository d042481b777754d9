//! The CPU as a backend.

use super::dense::{CpuIndices, CpuTensor, first_non_finite};
use super::memory::{MemoryLimit, MemoryShare};
use super::states::States;
use super::store::CpuStore;
use super::{append, attend, dequantize, merge_pair, merge_states, quantize, scores, weighted_values};
use crate::backend::{
    AttendOptions, Attention, AttentionStates, Device, NonFinite, Packing, SpanRead, SpanWrite, Storage, TokenWrite,
};
use crate::format::{AttentionShape, KeyOrValue, SegmentFormat};
use crate::plan::{AttendPlan, Elements, Page, RowLayout, Split, Work};
use crate::{Error, Result};

/// The CPU backend: every kernel in f32, with rayon's threads.
///
/// It runs everywhere, is the reference for the other backends, and the default where there is no GPU.
///
/// ```
/// use kvpack::cpu::Cpu;
/// use kvpack::backend::Storage;
/// use kvpack::{AttentionShape, SegmentFormat};
/// let shape = AttentionShape::new(8, 2, 128)?;
/// let store = Cpu::new().create_store(shape, SegmentFormat::F16)?;
/// assert_eq!(Cpu::new().store_bytes(&store), 0);
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cpu {
    max_shard_bytes: u64,
    memory: MemoryLimit,
}

impl Cpu {
    /// Without limits but that of the machine.
    pub fn new() -> Self {
        Self { max_shard_bytes: 1 << 30, memory: MemoryLimit::new(u64::MAX) }
    }

    /// Bounds the bytes of keys, and those of values, in one shard (1 GiB if not set).
    #[must_use]
    pub fn with_max_shard_bytes(self, bytes: u64) -> Self {
        Self { max_shard_bytes: bytes, ..self }
    }

    /// Bounds the bytes that all stores made by this backend and its clones hold together.
    #[must_use]
    pub fn with_memory_limit(self, bytes: u64) -> Self {
        Self { memory: MemoryLimit::new(bytes), ..self }
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Device for Cpu {
    type Tensor = CpuTensor;
    type Indices = CpuIndices;

    fn name(&self) -> String {
        format!("CPU, {} threads", rayon::current_num_threads())
    }

    async fn upload(&self, elements: Elements<'_>) -> Result<CpuTensor> {
        Ok(CpuTensor::new(elements))
    }

    async fn download(&self, tensor: &CpuTensor) -> Result<Vec<f32>> {
        Ok(tensor.to_f32())
    }

    async fn upload_indices(&self, tokens: &[u32], kv_heads: usize, below: u32) -> Result<CpuIndices> {
        CpuIndices::new(tokens, kv_heads, below)
    }

    async fn download_indices(&self, indices: &CpuIndices) -> Result<Vec<u32>> {
        Ok(indices.tokens().to_vec())
    }

    fn elements(&self, tensor: &CpuTensor) -> usize {
        tensor.elements().len()
    }
}

impl Storage for Cpu {
    type Store = CpuStore;

    fn create_store(&self, shape: AttentionShape, format: SegmentFormat) -> Result<CpuStore> {
        CpuStore::within(shape, format, MemoryShare::of(self.memory.clone()))
    }

    fn max_shard_pages(&self, shape: &AttentionShape, format: &SegmentFormat) -> u32 {
        let key = format.tensor_page_bytes(KeyOrValue::Key, shape);
        let value = format.tensor_page_bytes(KeyOrValue::Value, shape);
        (self.max_shard_bytes / key.max(value) as u64).try_into().unwrap_or(u32::MAX)
    }

    async fn add_shard(&self, store: &mut CpuStore, pages: u32) -> Result<()> {
        store.add_shard(pages)
    }

    async fn reserve_ranges(&self, store: &mut CpuStore, slots: usize) -> Result<()> {
        store.reserve_ranges(slots)
    }

    fn store_bytes(&self, store: &CpuStore) -> u64 {
        store.bytes()
    }
}

impl Packing for Cpu {
    async fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &CpuTensor,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> Result<Option<NonFinite>> {
        let what = match which {
            KeyOrValue::Key => "keys",
            KeyOrValue::Value => "values",
        };
        first_non_finite(what, tensor.elements(), rows, shape, largest)
    }

    fn quantize(
        &self,
        store: &mut CpuStore,
        keys: &CpuTensor,
        values: &CpuTensor,
        write: SpanWrite<'_, CpuIndices>,
    ) -> Result<()> {
        quantize(store, keys.elements(), values.elements(), write)
    }

    fn append(
        &self,
        store: &mut CpuStore,
        keys: &CpuTensor,
        values: &CpuTensor,
        rows: RowLayout,
        writes: &[TokenWrite],
    ) -> Result<()> {
        append(store, keys.elements(), values.elements(), rows, writes)
    }

    fn copy_page(&self, store: &mut CpuStore, from: Page, to: Page) -> Result<()> {
        store.copy_page(from, to)
    }

    fn dequantize(&self, store: &CpuStore, read: SpanRead<'_>) -> Result<(CpuTensor, CpuTensor)> {
        let keys = dequantize(store, KeyOrValue::Key, read)?;
        let values = dequantize(store, KeyOrValue::Value, read)?;
        Ok((CpuTensor::F32(keys), CpuTensor::F32(values)))
    }
}

impl Attention for Cpu {
    async fn attend(
        &self,
        plan: &AttendPlan,
        stores: &[&CpuStore],
        queries: &CpuTensor,
        options: AttendOptions,
    ) -> Result<CpuTensor> {
        let states = attend_plan(plan, stores, queries.elements(), options.split)?;
        Ok(CpuTensor::from_f32(states.into_outputs(), options.output))
    }

    async fn attend_states(
        &self,
        plan: &AttendPlan,
        stores: &[&CpuStore],
        queries: &CpuTensor,
        options: AttendOptions,
    ) -> Result<AttentionStates<CpuTensor>> {
        Ok(attend_plan(plan, stores, queries.elements(), options.split)?.into())
    }

    async fn merge(
        &self,
        shape: &AttentionShape,
        first: &AttentionStates<CpuTensor>,
        second: &AttentionStates<CpuTensor>,
    ) -> Result<AttentionStates<CpuTensor>> {
        Ok(merge_pair(&States::of(shape, first)?, &States::of(shape, second)?)?.into())
    }
}

/// The state of every query of a plan over all tokens that it sees, row by row.
///
/// # Errors
/// [`Error::Plan`] or [`Error::Elements`] when stores or queries are not those of the plan.
pub fn attend_plan(plan: &AttendPlan, stores: &[&CpuStore], queries: Elements<'_>, split: Split) -> Result<States> {
    plan.check_elements("queries", queries.len())?;
    let work = Work::new(plan, split, 1)?;
    let mut states = States::for_work(&work)?;
    for segment in work.segments() {
        let store = stores.get(segment.store()).filter(|store| store.shape() == work.shape());
        let store = store.ok_or_else(|| Error::Plan {
            what: "attend",
            reason: format!("store {} is missing or of another shape than {:?}", segment.store(), work.shape()),
        })?;
        match segment.calibration() {
            None => attend(segment, store, queries, &mut states)?,
            Some(calibration) => {
                let scores = scores(segment, store, queries)?;
                weighted_values(segment, store, &scores, &scores.maps(calibration), &mut states)?;
            }
        }
    }
    merge_states(&work, &states)
}
