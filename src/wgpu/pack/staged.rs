//! Parts of prompts that a step stored in f16, packed from there: kernels `dequantize` and `quantize`.

use super::dequantize::DequantizePlan;
use super::non_finite_flags::NonFiniteFlags;
use super::quantize::QuantizePlan;
use crate::backend::{OpenStep, StagedSpan, StepKind};
use crate::format::SegmentFormat;
use crate::plan::{ElementType, Page, WriteLayout};
use crate::wgpu::device::launch::Launches;
use crate::wgpu::device::{Kernels, Store, Tensor, Variant};
use crate::{Error, Result};

/// The store of a part, where appended tokens stay in f16.
const FIRST_PACKED: usize = 1;

/// Binds what packs the parts of a step, by layer; nothing where it has none. Parts and layers share the rows between
/// f16 and packed pages.
pub(in crate::wgpu) fn bind(kernels: &Kernels, step: &OpenStep<'_, Store, NonFiniteFlags>) -> Result<Vec<Launches>> {
    if step.staged.is_empty() {
        return Ok(Vec::new());
    }
    let plan = |span| StagedPlan::new(step.table.layout(), span);
    let plans = step.staged.iter().map(plan).collect::<Result<Vec<_>>>()?;
    let elements = plans.iter().map(|plan| plan.read.elements()).max().unwrap_or(0);
    let rows = || Tensor::zeroed(kernels.device(), elements, ElementType::F32);
    let rows = [rows()?, rows()?];
    let of_layer = |stores: &Vec<&Store>| {
        let bound = plans.iter().map(|plan| plan.bind(kernels, stores, &rows));
        Ok(bound.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    };
    step.stores.iter().map(of_layer).collect()
}

/// The kernel variants that pack parts as spans: none where appended tokens are packed.
pub(in crate::wgpu) fn variants_of(kind: StepKind<'_>) -> Result<Vec<Variant>> {
    let layout = kind.layout;
    let packs_later = layout.windows().iter().any(|pair| pair.windows > 0);
    let packed = layout.stores().iter().skip(FIRST_PACKED);
    if packs_later || packed.clone().any(|store| store.tokens > 0) || packed.count() == 0 {
        return Ok(Vec::new());
    }
    let page = || vec![Page { shard: 0, index: 0 }];
    let (tokens, centre, store) = (1, layout.has_centres(FIRST_PACKED).then_some(0), FIRST_PACKED);
    let span = StagedSpan { tokens, staged: page(), centre, store, pages: page(), range_slot: 0 };
    let plan = StagedPlan::new(layout, &span)?;
    Ok([plan.read.variants(), plan.write.variants(ElementType::F32, ElementType::F32)].concat())
}

/// Packs one part, in every layer alike.
#[derive(Debug)]
struct StagedPlan {
    store: usize,
    read: DequantizePlan,
    write: QuantizePlan,
}

impl StagedPlan {
    fn new(layout: &WriteLayout, span: &StagedSpan) -> Result<Self> {
        let (shape, stores) = (layout.shape(), layout.stores());
        let to = stores.get(span.store).ok_or_else(|| no_store(span.store, stores.len()))?;
        let read = DequantizePlan::new(shape, &SegmentFormat::F16, &span.read())?;
        let write = QuantizePlan::new(shape, &to.format, &span.write(shape)?)?;
        Ok(Self { store: span.store, read, write })
    }

    /// Binds the stores of a layer. The rows have room for the plan.
    fn bind(&self, kernels: &Kernels, stores: &[&Store], [keys, values]: &[Tensor; 2]) -> Result<Launches> {
        let (Some(f16), Some(packed)) = (stores.first(), stores.get(self.store)) else {
            return Err(no_store(self.store, stores.len()));
        };
        let elements = self.read.elements();
        let (keys, values) = (keys.slice(0, elements)?, values.slice(0, elements)?);
        let read = self.read.bind(kernels, f16, &keys, &values)?;
        let write = self.write.bind(kernels, packed, &keys, &values)?;
        Ok(read.into_iter().chain(write).collect())
    }
}

fn no_store(store: usize, stores: usize) -> Error {
    let reason = format!("a part of a prompt is packed into store {store} of {stores}");
    Error::Plan { what: "step", reason }
}
