//! Dense tensors in host memory.

use std::any::Any;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::foreign::{ElementsMut, ForeignTensor};
use crate::backend::NonFinite;
use crate::format::{AttentionShape, TILE_TOKENS};
use crate::plan::{ElementType, Elements, IndexShape, Page, QueryLayout, RowLayout, TokenIndices};
use crate::{Error, Result};

/// A dense tensor in host memory.
#[derive(Debug)]
pub enum CpuTensor {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 16-bit floats.
    F16(Vec<f16>),
    /// Brain floats.
    Bf16(Vec<bf16>),
    /// Elements in memory of the caller: see [`CpuTensor::from_address`]. A clone has memory of its own.
    Foreign(ForeignTensor),
}

impl Clone for CpuTensor {
    fn clone(&self) -> Self {
        Self::new(self.elements())
    }
}

impl PartialEq for CpuTensor {
    fn eq(&self, other: &Self) -> bool {
        match (self.elements(), other.elements()) {
            (Elements::F32(a), Elements::F32(b)) => a == b,
            (Elements::F16(a), Elements::F16(b)) => a == b,
            (Elements::Bf16(a), Elements::Bf16(b)) => a == b,
            _ => false,
        }
    }
}

impl CpuTensor {
    /// A tensor of memory that an engine allocated, without a copy. An output is written in place.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use kvpack::cpu::CpuTensor;
    /// use kvpack::plan::{ElementType, Elements};
    ///
    /// let projected: Arc<[f32]> = vec![0.5; 2 * 64].into();
    /// let address = projected.as_ptr().expose_provenance();
    /// // SAFETY: the owner keeps the elements, and nothing writes them.
    /// let keys = unsafe { CpuTensor::from_address(Arc::new(projected), address, 2 * 64, ElementType::F32) }?;
    /// assert!(matches!(keys.elements(), Elements::F32(x) if x.as_ptr().addr() == address));
    /// # Ok::<(), kvpack::Error>(())
    /// ```
    ///
    /// # Safety
    /// The memory at `address` holds `elements` elements, whose provenance was exposed or is not Rust's, as long as
    /// `owner` lives. While the tensor is an input, nothing writes them; while it is an output, nothing else uses them.
    ///
    /// # Errors
    /// [`Error::Buffer`] when the address is 0 or not a multiple of the element size, or the elements pass the end of
    /// the address space.
    pub unsafe fn from_address(
        owner: Arc<dyn Any + Send + Sync>,
        address: usize,
        elements: usize,
        element_type: ElementType,
    ) -> Result<Self> {
        // SAFETY: the caller promises what it asks for.
        Ok(Self::Foreign(unsafe { ForeignTensor::new(owner, address, elements, element_type) }?))
    }

    /// Copies elements of the caller.
    pub fn new(elements: Elements<'_>) -> Self {
        match elements {
            Elements::F32(x) => Self::F32(x.to_vec()),
            Elements::F16(x) => Self::F16(x.to_vec()),
            Elements::Bf16(x) => Self::Bf16(x.to_vec()),
        }
    }

    /// Creates a tensor of the given element type. Elements are rounded to the nearest value, ties to even.
    pub fn from_f32(x: Vec<f32>, element: ElementType) -> Self {
        match element {
            ElementType::F32 => Self::F32(x),
            ElementType::F16 => Self::F16(x.into_iter().map(f16::from_f32).collect()),
            ElementType::Bf16 => Self::Bf16(x.into_iter().map(bf16::from_f32).collect()),
        }
    }

    /// The elements.
    pub fn elements(&self) -> Elements<'_> {
        match self {
            Self::F32(x) => Elements::F32(x),
            Self::F16(x) => Elements::F16(x),
            Self::Bf16(x) => Elements::Bf16(x),
            Self::Foreign(x) => x.elements(),
        }
    }

    /// The elements, to write.
    pub fn elements_mut(&mut self) -> ElementsMut<'_> {
        match self {
            Self::F32(x) => ElementsMut::F32(x),
            Self::F16(x) => ElementsMut::F16(x),
            Self::Bf16(x) => ElementsMut::Bf16(x),
            Self::Foreign(x) => x.elements_mut(),
        }
    }

    /// Takes `rows` rows, laid out as in `at`, into a contiguous tensor: for example queries from a fused projection.
    ///
    /// # Errors
    /// As [`QueryLayout::check`].
    pub fn take_rows(&self, at: QueryLayout, rows: usize, shape: &AttentionShape) -> Result<Self> {
        at.check("rows to take", self.elements().len(), rows, shape)?;
        let elements = shape.query_heads() * shape.head_dim();
        let places = || (0..rows).map(|row| at.row(row)..at.row(row) + elements);
        Ok(match self.elements() {
            Elements::F32(x) => Self::F32(places().flat_map(|place| &x[place]).copied().collect()),
            Elements::F16(x) => Self::F16(places().flat_map(|place| &x[place]).copied().collect()),
            Elements::Bf16(x) => Self::Bf16(places().flat_map(|place| &x[place]).copied().collect()),
        })
    }

    /// Writes the contiguous rows of another tensor to the layout `at`, rounded to the type of this tensor: for example
    /// outputs among those of other ranks.
    ///
    /// # Errors
    /// As [`QueryLayout::check`]; [`Error::Elements`] when the other tensor does not hold whole rows.
    pub fn put_rows(&mut self, at: QueryLayout, dense: &Self, shape: &AttentionShape) -> Result<()> {
        let elements = shape.query_heads() * shape.head_dim();
        let rows = dense.elements().len() / elements;
        QueryLayout::dense(shape).check("rows to put", dense.elements().len(), rows, shape)?;
        at.check("a tensor for rows", self.elements().len(), rows, shape)?;
        let mut to = self.elements_mut();
        for (row, x) in dense.to_f32().chunks_exact(elements).enumerate() {
            to.write_f32(at.row(row), x);
        }
        Ok(())
    }

    /// The elements as f32.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.elements() {
            Elements::F32(x) => x.to_vec(),
            Elements::F16(x) => x.to_f32_vec(),
            Elements::Bf16(x) => x.to_f32_vec(),
        }
    }
}

/// Token numbers `[kv_heads, count]` in host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuIndices {
    tokens: Arc<[u32]>,
    shape: IndexShape,
}

impl CpuIndices {
    /// Copies token numbers of the caller, `[kv_heads, count]`, all below `below`.
    ///
    /// # Errors
    /// As [`IndexShape::of`].
    pub fn new(tokens: &[u32], kv_heads: usize, below: u32) -> Result<Self> {
        Ok(Self { shape: IndexShape::of(tokens, kv_heads, below)?, tokens: tokens.into() })
    }

    /// The token numbers, `[kv_heads, count]`.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(super) fn token(&self, kv_head: usize, i: usize) -> usize {
        self.tokens[kv_head * self.shape.count() + i] as usize
    }
}

impl TokenIndices for CpuIndices {
    fn shape(&self) -> IndexShape {
        self.shape
    }
}

/// Reads the channels of one row, which begins at element `start`.
pub(super) fn read_row(elements: Elements<'_>, start: usize, row: &mut [f32]) {
    match elements {
        Elements::F32(x) => row.copy_from_slice(&x[start..start + row.len()]),
        Elements::F16(x) => x[start..start + row.len()].convert_to_f32_slice(row),
        Elements::Bf16(x) => x[start..start + row.len()].convert_to_f32_slice(row),
    }
}

/// The first element, in token order, that is NaN, infinite or beyond ±`largest`.
///
/// # Errors
/// [`Error::NoTokens`] or [`Error::Elements`] when the tensor does not fit its layout.
pub fn first_non_finite(
    what: &'static str,
    elements: Elements<'_>,
    rows: &RowLayout,
    shape: &AttentionShape,
    largest: f32,
) -> Result<Option<NonFinite>> {
    rows.check(what, elements.len(), shape)?;
    let storable = |x: &f32| x.abs() <= largest; // false for NaN
    let mut row = vec![0.0; shape.head_dim()];
    for token in 0..rows.tokens {
        for kv_head in 0..shape.kv_heads() {
            read_row(elements, rows.row(token, kv_head), &mut row);
            if let Some(channel) = row.iter().position(|x| !storable(x)) {
                return Ok(Some(NonFinite { token, kv_head, channel, value: row[channel] }));
            }
        }
    }
    Ok(None)
}

/// Checks that a span has tokens, and exactly the pages that they need.
pub(super) fn check_span(what: &'static str, tokens: usize, pages: &[Page]) -> Result<()> {
    let needed = tokens.div_ceil(TILE_TOKENS);
    if tokens == 0 {
        return Err(Error::NoTokens { what, hint: "pass at least one token" });
    }
    if pages.len() != needed {
        let reason = format!("{tokens} tokens need {needed} pages; {} were given", pages.len());
        return Err(Error::Plan { what, reason });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_caller_is_read_and_written_where_it_lies() {
        let mut memory = vec![1.0f32; 130];
        let address = memory.as_mut_ptr().expose_provenance();
        let of = |address, elements| {
            // SAFETY: `memory` outlives the tensors, and is looked at only when they are gone.
            unsafe { CpuTensor::from_address(Arc::new(()), address, elements, ElementType::F32) }
        };
        let mut tensor = of(address, 128).unwrap();
        let copy = tensor.clone();
        assert!(copy == tensor && copy == CpuTensor::F32(vec![1.0; 128]) && copy != of(address, 127).unwrap());
        tensor.elements_mut().write_f32(2, &[5.0, 6.0]);
        assert!(copy != tensor);
        drop(tensor);
        assert_eq!(memory[..5], [1.0, 1.0, 5.0, 6.0, 1.0]);
        for (address, elements) in [(0, 1), (address + 2, 1), (address, usize::MAX), (address, usize::MAX / 4)] {
            assert!(matches!(of(address, elements), Err(Error::Buffer { .. })), "{address:#x} {elements}");
        }
    }

    #[test]
    fn rows_come_back_from_where_they_were_put() {
        let shape = AttentionShape::new(2, 1, 64).unwrap();
        let rows = CpuTensor::F32((0..3 * 128).map(|i| i as f32).collect());
        let at = QueryLayout { first: 8, stride: 200 };
        for element in ElementType::ALL {
            let mut whole = CpuTensor::from_f32(vec![-1.0; at.elements_needed(3, &shape) + 1], element);
            whole.put_rows(at, &rows, &shape).unwrap();
            // bf16 rounds integers beyond 256.
            assert_eq!(whole.take_rows(at, 3, &shape).unwrap(), CpuTensor::from_f32(rows.to_f32(), element));
            let outside = whole.to_f32().iter().filter(|&&x| x == -1.0).count();
            assert_eq!(outside, whole.elements().len() - 3 * 128);
            assert!(matches!(whole.take_rows(at, 4, &shape), Err(Error::Elements { .. })));
            assert!(whole.put_rows(QueryLayout { first: 12, ..at }, &rows, &shape).is_err());
        }
    }
}
