//! A layer on a device.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, LaunchConfig};
use kvpack_device::cuda::{DeviceFacts, KernelLaunch, Kernels, Memory, Program, Tensor};
use kvpack_device::{ElementType, Error as DeviceError};

use super::strips;
use crate::error::Result;
use crate::linear::QuantizedLinear;
use crate::shape::{Bits, LinearShape};
use crate::stored::{CHUNK, Octets, Scales, Stored};

/// Bytes at whose multiples kernels read activations and write weights.
const ALIGNMENT: u64 = 16;

/// The weights of a layer on a device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Linear {
    pub(super) stream: Arc<CudaStream>,
    pub(super) shape: LinearShape,
    pub(super) bits: Bits,
    pub(super) chunks: usize,
    pub(super) group_chunks: usize,
    pub(super) codes: Arc<Memory>,
    pub(super) scales: Arc<Memory>,
    pub(super) has_single_scales: bool,
    pub(super) in_strips: bool,
    pub(super) order: Option<InputOrder>,
}

/// Of layers whose inputs do not lie in order, or are padded.
#[derive(Clone, Debug)]
pub(super) struct InputOrder {
    /// The input at each place.
    pub inputs: Arc<Memory>,
    /// The place of each input among the codes.
    pub homes: Arc<Memory>,
}

impl Linear {
    /// Stores a layer on the device of a stream.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) for groups of very different sizes;
    /// [`Error::Device`](crate::Error::Device) when the device has too little memory.
    pub fn upload(stream: &Arc<CudaStream>, linear: &QuantizedLinear) -> Result<Self> {
        // As `octet_at` of cuda/codes.cuh has them.
        let octets = if linear.bits() == Bits::Eight { Octets::Neighbours } else { Octets::EveryFourth };
        let mut stored = Stored::new(linear, octets)?;
        let in_strips = strips::has_kernel(&DeviceFacts::of(stream.context())?, &stored, linear.shape());
        if in_strips {
            strips::reorder(&mut stored, linear.bits());
        }
        let of = |what, words: &[u8]| Memory::upload(stream, what, words);
        let (scales, has_single_scales) = match &stored.scales {
            Scales::Half(words) => (bytemuck::cast_slice(words), false),
            Scales::Single(pairs) => (bytemuck::cast_slice(pairs), true),
        };
        let order = match (&stored.order, stored.homes(octets)) {
            (Some(inputs), Some(homes)) => Some(InputOrder {
                inputs: of("the order of inputs", bytemuck::cast_slice(inputs))?,
                homes: of("the places of inputs", bytemuck::cast_slice(&homes))?,
            }),
            _ => None,
        };
        Ok(Self {
            stream: stream.clone(),
            shape: linear.shape(),
            bits: linear.bits(),
            chunks: stored.chunks,
            group_chunks: stored.group_chunks,
            codes: of("the codes of a layer", bytemuck::cast_slice(&stored.codes))?,
            scales: of("the scales of a layer", scales)?,
            has_single_scales,
            in_strips,
            order,
        })
    }

    /// N and K.
    pub fn shape(&self) -> LinearShape {
        self.shape
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let order = self.order.as_ref().map_or(0, |order| order.inputs.bytes() + order.homes.bytes());
        (self.codes.bytes() + self.scales.bytes() + order) as u64
    }

    /// Inputs with the padding of groups.
    pub(super) fn places(&self) -> usize {
        self.chunks * CHUNK
    }

    /// The macros of codes.cuh.
    pub(super) fn defines(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("BITS", self.bits.count() as usize),
            ("CHUNKS", self.chunks),
            ("GROUP_CHUNKS", self.group_chunks),
            ("OUTPUTS", self.shape.outputs()),
            ("SINGLE_SCALES", usize::from(self.has_single_scales)),
            ("IN_STRIPS", usize::from(self.in_strips)),
        ]
    }

    /// Refuses tensors with fewer elements than `rows` rows of `width`, or of another stream.
    pub(super) fn check(&self, what: &'static str, tensor: &Tensor, [rows, width]: [usize; 2]) -> Result<()> {
        if tensor.elements() < rows * width {
            let (given, expected) = (tensor.elements(), rows * width);
            let shape = format!("{rows} rows of {width}");
            return Err(DeviceError::Elements { what, given, expected, shape }.into());
        }
        Ok(tensor.memory().check_stream(what, &self.stream)?)
    }
}

/// Refuses tensors that do not begin at a multiple of 16 bytes.
pub(super) fn check_aligned(what: &'static str, tensor: &Tensor) -> Result<()> {
    if tensor.address().is_multiple_of(ALIGNMENT) {
        return Ok(());
    }
    let reason = format!("they begin at address {:#x}, not at a multiple of {ALIGNMENT}", tensor.address());
    Err(DeviceError::Buffer { what, reason }.into())
}

/// Refuses outputs that share bytes with activations. A block would read activations after another has written there.
pub(super) fn check_apart(activations: Range<u64>, outputs: Range<u64>) -> Result<()> {
    if outputs.end <= activations.start || activations.end <= outputs.start {
        return Ok(());
    }
    let reason = format!(
        "they lie at {:#x} to {:#x} and share bytes with the activations at {:#x} to {:#x}; give them other memory",
        outputs.start, outputs.end, activations.start, activations.end
    );
    Err(DeviceError::Buffer { what: "the outputs", reason }.into())
}

/// The launch of a kernel without dynamic shared memory.
pub(super) fn launch_of(
    kernels: &Kernels,
    program: &Program,
    name: &'static str,
    grid: (u32, u32, u32),
    block: u32,
) -> Result<KernelLaunch> {
    let function = kernels.function(program, name)?;
    let config = LaunchConfig { grid_dim: grid, block_dim: (block, 1, 1), shared_mem_bytes: 0 };
    Ok(KernelLaunch { name, function, config, cluster: 1, overlaps: false })
}

/// The element type, as the macros of the kernels name it.
pub(super) const fn type_code(of: ElementType) -> usize {
    match of {
        ElementType::F32 => 0,
        ElementType::F16 => 1,
        ElementType::Bf16 => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_share_no_byte_with_activations() {
        for (outputs, is_apart) in [
            (0x100..0x200, true),
            (0x300..0x400, true),
            (0x100..0x201, false),
            (0x2ff..0x400, false),
            (0x240..0x280, false),
            (0x100..0x400, false),
            (0x200..0x300, false),
        ] {
            let given = check_apart(0x200..0x300, outputs.clone());
            let refused = matches!(given, Err(crate::Error::Device(DeviceError::Buffer { what: "the outputs", .. })));
            assert_eq!((given.is_ok(), refused), (is_apart, !is_apart), "{outputs:x?}: {given:?}");
        }
    }
}
