//! Elements of dense tensors.

use half::{bf16, f16};

/// Element type of a dense tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats, two to a word, the first in the low half.
    F16,
    /// Brain floats: the high halves of 32-bit floats, two to a word like f16.
    Bf16,
}

impl ElementType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Reads elements of this type from their bytes in memory, and appends them as f32. Bytes after the last whole
    /// element are ignored.
    pub fn read_f32(self, bytes: &[u8], into: &mut Vec<f32>) {
        let read = bytes.chunks_exact(self.bytes());
        match self {
            Self::F32 => into.extend(read.map(bytemuck::pod_read_unaligned::<f32>)),
            Self::F16 => into.extend(read.map(|x| bytemuck::pod_read_unaligned::<f16>(x).to_f32())),
            Self::Bf16 => into.extend(read.map(|x| bytemuck::pod_read_unaligned::<bf16>(x).to_f32())),
        }
    }
}

/// Elements of a dense tensor in host memory.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// 16-bit floats.
    F16(&'a [f16]),
    /// Brain floats.
    Bf16(&'a [bf16]),
}

impl Elements<'_> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F16(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }

    /// True if there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their type.
    pub const fn element_type(&self) -> ElementType {
        match self {
            Self::F32(_) => ElementType::F32,
            Self::F16(_) => ElementType::F16,
            Self::Bf16(_) => ElementType::Bf16,
        }
    }

    /// Element `i` as f32.
    ///
    /// # Panics
    /// If `i` is out of range, as when indexing a slice.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Self::F32(x) => x[i],
            Self::F16(x) => x[i].to_f32(),
            Self::Bf16(x) => x[i].to_f32(),
        }
    }

    /// Their bytes in memory order.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::F32(x) => bytemuck::cast_slice(x),
            Self::F16(x) => bytemuck::cast_slice(x),
            Self::Bf16(x) => bytemuck::cast_slice(x),
        }
    }
}

impl<'a> From<&'a [f32]> for Elements<'a> {
    fn from(x: &'a [f32]) -> Self {
        Self::F32(x)
    }
}

impl<'a> From<&'a [f16]> for Elements<'a> {
    fn from(x: &'a [f16]) -> Self {
        Self::F16(x)
    }
}

impl<'a> From<&'a [bf16]> for Elements<'a> {
    fn from(x: &'a [bf16]) -> Self {
        Self::Bf16(x)
    }
}
