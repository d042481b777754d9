//! A layer on a device, and its product with activations.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, LaunchConfig};
use kvpack_device::cuda::memory::{bytes_of, same_stream};
use kvpack_device::cuda::{DeviceFacts, KernelLaunch, Kernels, Memory, Program, Tensor};
use kvpack_device::{ElementType, Error as DeviceError};

use super::sources::SOURCES;
use super::strips::{self, StripLaunch};
use crate::MOST_ROWS;
use crate::error::Result;
use crate::linear::QuantizedLinear;
use crate::shape::{Bits, LinearShape};
use crate::stored::{CHUNK, Octets, Scales, Stored};

/// Bytes at whose multiples kernels read activations.
const ALIGNMENT: u64 = 16;

/// The weights of a layer on a device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Linear {
    stream: Arc<CudaStream>,
    shape: LinearShape,
    bits: Bits,
    chunks: usize,
    group_chunks: usize,
    codes: Arc<Memory>,
    scales: Arc<Memory>,
    has_single_scales: bool,
    in_strips: bool,
    order: Option<Arc<Memory>>,
}

/// A product that is joined with its tensors.
#[derive(Debug)]
pub struct BoundLinear {
    stream: Arc<CudaStream>,
    order: Option<(KernelLaunch, OrderCall)>,
    product: (KernelLaunch, LinearCall),
    /// What the arguments point at.
    _memory: Vec<Arc<Memory>>,
}

/// The argument of `linear_fma` and `linear_mma`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct LinearCall {
    codes: u64,
    scales: u64,
    inputs: u64,
    outputs: u64,
}

/// The argument of `order_inputs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct OrderCall {
    order: u64,
    inputs: u64,
    ordered: u64,
}

// SAFETY: Plain integers in the order of the kernels' struct.
unsafe impl DeviceRepr for LinearCall {}
// SAFETY: As above.
unsafe impl DeviceRepr for OrderCall {}

impl Linear {
    /// Stores a layer on the device of a stream.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) for groups of very different sizes;
    /// [`Error::Device`](crate::Error::Device) when the device has too little memory.
    pub fn upload(stream: &Arc<CudaStream>, linear: &QuantizedLinear) -> Result<Self> {
        // As `octet_at` of cuda/linear.cu has them.
        let octets = if linear.bits() == Bits::Eight { Octets::Neighbours } else { Octets::EveryFourth };
        let mut stored = Stored::new(linear, octets)?;
        let in_strips = strips::has_kernel(&DeviceFacts::of(stream.context())?, linear.bits(), &stored, linear.shape());
        if in_strips {
            strips::reorder(&mut stored, linear.bits());
        }
        let of = |what, words: &[u8]| Memory::upload(stream, what, words);
        let (scales, has_single_scales) = match &stored.scales {
            Scales::Half(words) => (bytemuck::cast_slice(words), false),
            Scales::Single(pairs) => (bytemuck::cast_slice(pairs), true),
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
            order: stored.order.map(|order| of("the order of inputs", bytemuck::cast_slice(&order))).transpose()?,
        })
    }

    /// N and K.
    pub fn shape(&self) -> LinearShape {
        self.shape
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let order = self.order.as_ref().map_or(0, |order| order.bytes());
        (self.codes.bytes() + self.scales.bytes() + order) as u64
    }

    /// Joins the product `y [rows, N] = x [rows, K] · Wᵀ` with its tensors, and compiles the kernels on first use. Both
    /// tensors belong to the stream of the layer, or to an engine that orders its own work with that stream's.
    ///
    /// # Errors
    /// [`Error::Size`](crate::Error::Size) for 0 rows or more than [`MOST_ROWS`]; [`Error::Device`](crate::Error::Device)
    /// for tensors with fewer elements or of another stream, activations that do not begin at a multiple of 16 bytes,
    /// and errors of the driver.
    pub fn bind(&self, kernels: &Kernels, x: &Tensor, rows: usize, y: &Tensor) -> Result<BoundLinear> {
        if rows == 0 || rows > MOST_ROWS {
            let (what, given, most) = ("the number of rows", rows as u64, MOST_ROWS as u64);
            return Err(crate::Error::Size { what, given, most });
        }
        let (inputs, outputs) = (self.shape.inputs(), self.shape.outputs());
        for (what, tensor, width) in [("the activations", x, inputs), ("the outputs", y, outputs)] {
            if tensor.elements() < rows * width {
                let (given, expected) = (tensor.elements(), rows * width);
                let shape = format!("{rows} rows of {width}");
                return Err(DeviceError::Elements { what, given, expected, shape }.into());
            }
            tensor.memory().check_stream(what, &self.stream)?;
        }
        if self.order.is_none() && !x.address().is_multiple_of(ALIGNMENT) {
            let reason = format!("they begin at address {:#x}, not at a multiple of {ALIGNMENT}", x.address());
            return Err(DeviceError::Buffer { what: "the activations", reason }.into());
        }
        let mut memory = vec![self.codes.clone(), self.scales.clone(), x.memory().clone(), y.memory().clone()];
        let (order, from) = match &self.order {
            None => (None, x.address()),
            Some(order) => {
                let places = self.chunks * CHUNK;
                let bytes = bytes_of("ordered activations", rows * places, x.element_type().bytes())?;
                let ordered = Memory::zeroed(&self.stream, "ordered activations", bytes)?;
                let launch = self.order_inputs(kernels, rows, x.element_type())?;
                let call = OrderCall { order: order.address(), inputs: x.address(), ordered: ordered.address() };
                memory.extend([order.clone(), ordered.clone()]);
                (Some((launch, call)), ordered.address())
            }
        };
        let product = self.product(kernels, rows, x.element_type(), y.element_type())?;
        let call = LinearCall {
            codes: self.codes.address(),
            scales: self.scales.address(),
            inputs: from,
            outputs: y.address(),
        };
        Ok(BoundLinear { stream: self.stream.clone(), order, product: (product, call), _memory: memory })
    }

    fn order_inputs(&self, kernels: &Kernels, rows: usize, of: ElementType) -> Result<KernelLaunch> {
        let places = self.chunks * CHUNK;
        let defines = vec![("INPUTS", self.shape.inputs()), ("PLACES", places), ("INPUT", type_code(of))];
        let program = Program { sources: &SOURCES, files: &["order_inputs.cu"], defines };
        let grid = (places.div_ceil(128) as u32, rows as u32, 1);
        launch_of(kernels, &program, "order_inputs", grid, 128)
    }

    fn product(&self, kernels: &Kernels, rows: usize, x: ElementType, y: ElementType) -> Result<KernelLaunch> {
        let by_mma = x == ElementType::F16 && self.group_chunks.is_multiple_of(4);
        let together = rows.min(4);
        let mut defines = vec![
            ("BITS", self.bits.count() as usize),
            ("CHUNKS", self.chunks),
            ("GROUP_CHUNKS", self.group_chunks),
            ("OUTPUTS", self.shape.outputs()),
            ("ALL_ROWS", rows),
            ("ROWS", together),
            ("INPUT", type_code(x)),
            ("OUTPUT", type_code(y)),
            ("SINGLE_SCALES", usize::from(self.has_single_scales)),
            ("IN_STRIPS", usize::from(self.in_strips)),
        ];
        if by_mma && self.in_strips {
            let launch = StripLaunch {
                rows,
                outputs: self.shape.outputs(),
                chunks: self.chunks,
                bits: self.bits,
                scale_bytes: if self.has_single_scales { 8 } else { 4 },
                multiprocessors: kernels.facts().multiprocessors,
            };
            defines.extend(launch.defines());
            return launch
                .on(kernels, &Program { sources: &SOURCES, files: &["linear.cu", "linear_strips.cu"], defines });
        }
        let program = Program { sources: &SOURCES, files: &["linear.cu"], defines };
        let outputs = self.shape.outputs();
        match by_mma {
            true => launch_of(kernels, &program, "linear_mma", (outputs.div_ceil(16) as u32, 1, 1), 256),
            false => {
                let grid = (outputs.div_ceil(4) as u32, rows.div_ceil(together) as u32, 1);
                launch_of(kernels, &program, "linear_fma", grid, 64)
            }
        }
    }
}

impl BoundLinear {
    /// Queues the product on the stream of the layer. Does not wait, allocate or copy. The memory must live until the
    /// stream has finished: keep this value until then.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) on another stream, and for errors of the driver.
    pub fn launch(&self, stream: &Arc<CudaStream>) -> Result<()> {
        if !same_stream(&self.stream, stream) {
            let reason = "the layer lies on another stream; launch it there".into();
            return Err(DeviceError::Plan { what: "a product", reason }.into());
        }
        if let Some((launch, call)) = &self.order {
            // SAFETY: docs/weights.md, "Why the kernels stay in bounds". This value holds the memory.
            unsafe { launch.run(stream, call) }?;
        }
        let (launch, call) = &self.product;
        // SAFETY: As above.
        Ok(unsafe { launch.run(stream, call) }?)
    }

    /// Number of kernels: 1, or 2 where the activations are put in order first.
    pub fn kernels(&self) -> usize {
        1 + usize::from(self.order.is_some())
    }
}

fn launch_of(
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
const fn type_code(of: ElementType) -> usize {
    match of {
        ElementType::F32 => 0,
        ElementType::F16 => 1,
        ElementType::Bf16 => 2,
    }
}
