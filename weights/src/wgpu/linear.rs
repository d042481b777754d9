//! A layer on a device.

use kvpack_device::Error as DeviceError;
use kvpack_device::wgpu::{KernelLimits, Tensor, Variant, buffers};

use super::matrices::multiplies_matrices;
use super::sources::SHADERS;
use crate::error::Result;
use crate::linear::QuantizedLinear;
use crate::shape::{Bits, LinearShape};
use crate::stored::{CHUNK, Octets, Scales, Stored};

/// Scales that f16 holds.
const HALF_SCALES: &str = "linear/scales.wgsl#half";

/// The weights of a layer on a device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Linear {
    pub(super) shape: LinearShape,
    pub(super) bits: Bits,
    pub(super) chunks: usize,
    pub(super) group_chunks: usize,
    pub(super) codes: wgpu::Buffer,
    pub(super) scales: wgpu::Buffer,
    /// The file of its scales.
    scales_file: &'static str,
    pub(super) order: Option<InputOrder>,
    /// Whether kernels may multiply cooperative matrices.
    pub(super) has_matrices: bool,
}

/// Of layers whose inputs do not lie in order, or are padded.
#[derive(Clone, Debug)]
pub(super) struct InputOrder {
    /// The input at each place.
    pub inputs: wgpu::Buffer,
    /// The place of each input among the codes.
    pub homes: wgpu::Buffer,
}

impl Linear {
    /// Stores a layer on a device. Products take cooperative matrices if the device was opened with them, as
    /// `kvpack_device::wgpu::Requirements::of` does where wgpu's experimental features are allowed, and has those of the
    /// kernels.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) for groups of very different sizes;
    /// [`Error::Device`](crate::Error::Device) when the device has too little memory, or allows only smaller bindings.
    pub fn upload(device: &wgpu::Device, linear: &QuantizedLinear) -> Result<Self> {
        let stored = Stored::new(linear, Octets::Neighbours)?;
        let (scales, scales_file): (&[u8], _) = match &stored.scales {
            Scales::Half(words) => (bytemuck::cast_slice(words), HALF_SCALES),
            Scales::Single(pairs) => (bytemuck::cast_slice(pairs), "linear/scales.wgsl#single"),
        };
        let of = |what, bytes: &[u8]| {
            let (needed, allowed) = (bytes.len() as u64, KernelLimits::new(&device.limits()).binding_bytes);
            if needed > allowed {
                let hint = "create the device with its largest bindings, or split the outputs over several layers";
                return Err(DeviceError::Limit { what: format!("{what} in bytes"), needed, allowed, hint });
            }
            buffers::create_filled(device, what, bytes, wgpu::BufferUsages::STORAGE)
        };
        let order = match (&stored.order, stored.homes(Octets::Neighbours)) {
            (Some(inputs), Some(homes)) => Some(InputOrder {
                inputs: of("the order of inputs", bytemuck::cast_slice(inputs))?,
                homes: of("the places of inputs", bytemuck::cast_slice(&homes))?,
            }),
            _ => None,
        };
        Ok(Self {
            shape: linear.shape(),
            bits: linear.bits(),
            chunks: stored.chunks,
            group_chunks: stored.group_chunks,
            codes: of("the codes of a layer", bytemuck::cast_slice(&stored.codes))?,
            scales: of("the scales of a layer", scales)?,
            scales_file,
            order,
            has_matrices: multiplies_matrices(device),
        })
    }

    /// N and K.
    pub fn shape(&self) -> LinearShape {
        self.shape
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        self.codes.size()
            + self.scales.size()
            + self.order.as_ref().map_or(0, |order| order.inputs.size() + order.homes.size())
    }

    /// Inputs with the padding of groups.
    pub(super) fn places(&self) -> usize {
        self.chunks * CHUNK
    }

    /// A variant of a kernel that multiplies matrices.
    pub(super) fn matrix_variant(&self, kernel: &'static str) -> Variant {
        let halves = if self.scales_file == HALF_SCALES {
            "linear/half_octet.wgsl#half"
        } else {
            "linear/half_octet.wgsl#single"
        };
        self.variant(kernel).import("half_octet", halves).with_f16().with_matrices()
    }

    /// A variant of a kernel whose lanes take different octets of chunks.
    pub(super) fn by_lane(&self, variant: Variant) -> Variant {
        match self.bits {
            Bits::Three => variant.import("codes", "linear/codes.wgsl#three_by_lane"),
            Bits::Two | Bits::Four | Bits::Eight => variant,
        }
    }

    /// A variant of a kernel that reads weights.
    pub(super) fn variant(&self, kernel: &'static str) -> Variant {
        Variant::new(&SHADERS, kernel)
            .import("codes", codes_file(self.bits))
            .import("scales", self.scales_file)
            .constant("CHUNKS", self.chunks)
            .constant("GROUP_CHUNKS", self.group_chunks)
            .constant("OUTPUTS", self.shape.outputs())
    }
}

/// Refuses tensors with fewer elements than `rows` rows of `width`, or at offsets that are not aligned.
pub(super) fn check(
    what: &'static str,
    tensor: &Tensor,
    [rows, width]: [usize; 2],
    limits: &wgpu::Limits,
) -> Result<()> {
    if tensor.elements() < rows * width {
        let (given, expected) = (tensor.elements(), rows * width);
        return Err(DeviceError::Elements { what, given, expected, shape: format!("{rows} rows of {width}") }.into());
    }
    Ok(tensor.check_aligned(what, limits)?)
}

const fn codes_file(bits: Bits) -> &'static str {
    match bits {
        Bits::Two => "linear/codes.wgsl#two",
        Bits::Three => "linear/codes.wgsl#three",
        Bits::Four => "linear/codes.wgsl#four",
        Bits::Eight => "linear/codes.wgsl#eight",
    }
}
