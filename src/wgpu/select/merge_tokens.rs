//! Kernels `normalize_kept`, `nearest_kept` and `merge_tokens`.

use super::words::Words;
use super::{check_index, check_indices, check_output, check_reach};
use crate::format::{AttentionShape, HEAD_DIMS};
use crate::plan::{ElementType, RowLayout};
use crate::policy::Merging;
use crate::wgpu::device::launch::{FLAT_WORKGROUP, Launch, Launches, flat_grid};
use crate::wgpu::device::{Indices, Kernels, Tensor, Variant};
use crate::wgpu::pack::rows_file;
use crate::wgpu::planned::planned;
use crate::wgpu::sources::SHADERS;
use crate::{Error, Result};

/// Evicted tokens of a workgroup of `nearest_kept`, `RESIDENT` in `select/rows.wgsl#resident_rows`.
const TILE_EVICTED: usize = 128;

/// Merges evicted tokens into their nearest kept ones. The plan decides everything except the buffers.
///
/// [`MergePlan::bind`] encodes four dispatches: they find the nearest kept key of every evicted token, and merge keys
/// and values into it. Sums are taken in the order of the evicted tokens, so two runs give the same bits.
#[derive(Clone, Debug)]
pub struct MergePlan {
    shape: AttentionShape,
    rows: RowLayout,
    kept: usize,
    evicted: usize,
    merging: Merging,
}

/// A merge bound to its tensors.
#[derive(Clone, Debug)]
pub struct BoundMerge {
    /// The dispatches to encode.
    pub launches: Launches,
    /// `[kv_heads, evicted]`: index of the nearest key among the kept tokens of the head.
    pub nearest: Words,
    /// `[kv_heads, evicted]`: cosine similarity of the keys.
    pub similarities: Tensor,
    /// `[kv_heads, kept, head_dim]`.
    pub keys: Tensor,
    /// `[kv_heads, kept, head_dim]`.
    pub values: Tensor,
}

/// `MergeCall` of `select/calls.wgsl#merge_call`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct MergeCall {
    first_element: u32,
    token_stride: u32,
    head_stride: u32,
    tokens: u32,
    kv_heads: u32,
    kept: u32,
    evicted: u32,
}

impl MergePlan {
    /// Plans the merge of `evicted` tokens of every KV head into `kept` tokens. The device reads which tokens they are.
    /// An index beyond the tokens is clamped to the last token.
    ///
    /// # Errors
    /// [`Error::NoTokens`] when none are kept or evicted; [`Error::Limit`] when 32-bit indices cannot address all
    /// elements, or the device cannot dispatch enough workgroups.
    pub fn new(shape: &AttentionShape, rows: RowLayout, [kept, evicted]: [usize; 2], merging: Merging) -> Result<Self> {
        if kept == 0 || evicted == 0 || rows.tokens == 0 {
            return Err(Error::NoTokens { what: "merge_tokens", hint: "pass at least one kept and one evicted token" });
        }
        check_reach(&rows, shape.kv_heads(), shape.head_dim())?;
        let row = shape.kv_heads() * shape.head_dim();
        check_index("the elements of a result", kept.max(evicted).saturating_mul(row) as u64)?;
        let workgroups = evicted.div_ceil(TILE_EVICTED).max(kept.div_ceil(kept_tile(shape.head_dim()))) as u64;
        if workgroups > u64::from(u16::MAX) {
            let (needed, allowed) = (workgroups, u64::from(u16::MAX));
            return Err(Error::Limit {
                what: "workgroups of a merge".into(),
                needed,
                allowed,
                hint: "pass fewer tokens at once",
            });
        }
        Ok(Self { shape: *shape, rows, kept, evicted, merging })
    }

    /// The kernel variants for keys and values of these types, for [`Kernels::prepare`].
    pub fn variants(&self, keys: ElementType, values: ElementType) -> Vec<Variant> {
        let head_dim = self.shape.head_dim();
        vec![
            variant_of("normalize_kept", head_dim, keys),
            variant_of("nearest_kept", head_dim, keys),
            merge_variant(head_dim, keys, self.merging),
            merge_variant(head_dim, values, self.merging),
        ]
    }

    /// Binds keys and values of one layout, and the positions of the kept tokens, `[kv_heads, kept]`, and of the
    /// evicted tokens, `[kv_heads, evicted]`. Creates the results.
    ///
    /// # Errors
    /// [`Error::Elements`] when a buffer does not fit the plan; [`Error::Limit`], [`Error::OutOfMemory`] or
    /// [`Error::DeviceLost`].
    pub fn bind(
        &self,
        kernels: &Kernels,
        [keys, values]: [&Tensor; 2],
        kept: &Indices,
        evicted: &Indices,
    ) -> Result<BoundMerge> {
        let (device, heads, head_dim) = (kernels.device(), self.shape.kv_heads(), self.shape.head_dim());
        let f32s = |elements| Tensor::zeroed(device, elements, ElementType::F32);
        let merged = heads * self.kept * head_dim;
        let (units, similarities) = (f32s(merged)?, f32s(heads * self.evicted)?);
        let nearest = Words::zeroed(device, "nearest kept tokens", heads * self.evicted)?;
        let mut launches = self.bind_nearest(kernels, keys, (kept, evicted), &units, (&nearest, &similarities))?;
        let (merged_keys, merged_values) = (f32s(merged)?, f32s(merged)?);
        for (rows, merged) in [(keys, &merged_keys), (values, &merged_values)] {
            launches.push(self.bind_merge(kernels, rows, (kept, evicted), (&nearest, &similarities), merged)?);
        }
        let launches = launches.into_iter().collect();
        Ok(BoundMerge { launches, nearest, similarities, keys: merged_keys, values: merged_values })
    }

    fn bind_nearest(
        &self,
        kernels: &Kernels,
        keys: &Tensor,
        (kept, evicted): (&Indices, &Indices),
        units: &Tensor,
        (nearest, similarities): (&Words, &Tensor),
    ) -> Result<Vec<Launch>> {
        let (limits, head_dim) = (kernels.device().limits(), self.shape.head_dim());
        self.check_indices(kept, evicted)?;
        self.rows.check("keys", keys.elements(), &self.shape)?;
        let rows = keys.element_binding(&limits)?;
        let call = self.upload_call(kernels, rows.first_element)?;
        let inputs = [("call", call.as_entire_buffer_binding()), ("rows", rows.buffer.clone())];
        let kept_rows = (self.kept * self.shape.kv_heads()) as u64;
        let variant = variant_of("normalize_kept", head_dim, keys.element_type());
        let buffers = [inputs.as_slice(), &[("kept_tokens", kept.binding()), ("units", units.binding())]].concat();
        let grid = flat_grid(kept_rows * u64::from(FLAT_WORKGROUP), &limits)?;
        let normalize = planned(kernels, &variant, &buffers, grid)?;
        let variant = variant_of("nearest_kept", head_dim, keys.element_type());
        let own = [
            ("evicted_tokens", evicted.binding()),
            ("units", units.binding()),
            ("nearest", nearest.binding()),
            ("similarities", similarities.binding()),
        ];
        let buffers = [inputs.as_slice(), &own].concat();
        let grid = [self.evicted.div_ceil(TILE_EVICTED) as u32, self.shape.kv_heads() as u32, 1];
        Ok(vec![normalize, planned(kernels, &variant, &buffers, grid)?])
    }

    fn bind_merge(
        &self,
        kernels: &Kernels,
        rows: &Tensor,
        (kept, evicted): (&Indices, &Indices),
        (nearest, similarities): (&Words, &Tensor),
        merged: &Tensor,
    ) -> Result<Launch> {
        let (limits, head_dim) = (kernels.device().limits(), self.shape.head_dim());
        self.rows.check("rows to merge", rows.elements(), &self.shape)?;
        let elements = self.shape.kv_heads() * self.kept * head_dim;
        check_output("merged rows", merged, elements, ElementType::F32, &limits)?;
        let source = rows.element_binding(&limits)?;
        let call = self.upload_call(kernels, source.first_element)?;
        let buffers = [
            ("call", call.as_entire_buffer_binding()),
            ("rows", source.buffer),
            ("kept_tokens", kept.binding()),
            ("evicted_tokens", evicted.binding()),
            ("nearest", nearest.binding()),
            ("similarities", similarities.binding()),
            ("merged", merged.binding()),
        ];
        let grid = [self.kept.div_ceil(kept_tile(head_dim)) as u32, self.shape.kv_heads() as u32, 1];
        planned(kernels, &merge_variant(head_dim, rows.element_type(), self.merging), &buffers, grid)
    }

    fn check_indices(&self, kept: &Indices, evicted: &Indices) -> Result<()> {
        check_indices("positions of kept tokens", kept, self.shape.kv_heads(), self.kept)?;
        check_indices("positions of evicted tokens", evicted, self.shape.kv_heads(), self.evicted)
    }

    fn upload_call(&self, kernels: &Kernels, first_element: u32) -> Result<wgpu::Buffer> {
        let call = MergeCall {
            first_element,
            token_stride: self.rows.token_stride as u32,
            head_stride: self.rows.head_stride as u32,
            tokens: self.rows.tokens as u32,
            kv_heads: self.shape.kv_heads() as u32,
            kept: self.kept as u32,
            evicted: self.evicted as u32,
        };
        super::upload_call(kernels.device(), &call, &[])
    }
}

/// Kept tokens of a workgroup of `merge_tokens`, `KEPT_TILE` in its source.
const fn kept_tile(head_dim: usize) -> usize {
    2048 / head_dim
}

fn variant_of(kernel: &'static str, head_dim: usize, element_type: ElementType) -> Variant {
    Variant::new(&SHADERS, kernel).constant("HEAD_DIM", head_dim).import("rows", rows_file(element_type))
}

fn merge_variant(head_dim: usize, element_type: ElementType, merging: Merging) -> Variant {
    let merging = match merging {
        Merging::Averaged => 0,
        Merging::Pivotal => 1,
        Merging::Weighted => 2,
    };
    variant_of("merge_tokens", head_dim, element_type).constant("MERGING", merging)
}

/// Every variant that a plan uses.
pub(super) fn variants() -> Vec<Variant> {
    let mut found = Vec::new();
    for (i, head_dim) in HEAD_DIMS.into_iter().enumerate() {
        for element_type in ElementType::ALL {
            found.extend(["normalize_kept", "nearest_kept"].map(|kernel| variant_of(kernel, head_dim, element_type)));
            let merging = [Merging::Averaged, Merging::Pivotal, Merging::Weighted][i % 3];
            found.push(merge_variant(head_dim, element_type, merging));
        }
    }
    found
}
