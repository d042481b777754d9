//! A layer on a device, and its product with activations.

use kvpack_device::wgpu::launch::folded_grid;
use kvpack_device::wgpu::{KernelLimits, Kernels, Launch, Launches, Tensor, Variant, buffers};
use kvpack_device::{ElementType, Error as DeviceError};

use super::sources::SHADERS;
use crate::MOST_ROWS;
use crate::error::Result;
use crate::linear::QuantizedLinear;
use crate::shape::{Bits, LinearShape};
use crate::stored::{Octets, Scales, Stored};

/// Outputs of a workgroup.
const WORKGROUP_OUTPUTS: usize = 4;

/// Rows that a workgroup takes together.
const WORKGROUP_ROWS: usize = 4;

/// The weights of a layer on a device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Linear {
    shape: LinearShape,
    bits: Bits,
    chunks: usize,
    group_chunks: usize,
    codes: wgpu::Buffer,
    scales: wgpu::Buffer,
    /// The file of its scales.
    scales_file: &'static str,
    order: Option<wgpu::Buffer>,
}

/// A product that is joined with its tensors.
#[derive(Clone, Debug)]
pub struct BoundLinear(Launches);

impl Linear {
    /// Stores a layer on a device.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) for groups of very different sizes;
    /// [`Error::Device`](crate::Error::Device) when the device has too little memory, or allows only smaller bindings.
    pub fn upload(device: &wgpu::Device, linear: &QuantizedLinear) -> Result<Self> {
        let stored = Stored::new(linear, Octets::Neighbours)?;
        let (scales, scales_file): (&[u8], _) = match &stored.scales {
            Scales::Half(words) => (bytemuck::cast_slice(words), "linear/scales/half.wgsl"),
            Scales::Single(pairs) => (bytemuck::cast_slice(pairs), "linear/scales/single.wgsl"),
        };
        let of = |what, bytes: &[u8]| {
            let (needed, allowed) = (bytes.len() as u64, KernelLimits::new(&device.limits()).binding_bytes);
            if needed > allowed {
                let hint = "create the device with its largest bindings, or split the outputs over several layers";
                return Err(DeviceError::Limit { what: format!("{what} in bytes"), needed, allowed, hint });
            }
            buffers::create_filled(device, what, bytes, wgpu::BufferUsages::STORAGE)
        };
        Ok(Self {
            shape: linear.shape(),
            bits: linear.bits(),
            chunks: stored.chunks,
            group_chunks: stored.group_chunks,
            codes: of("the codes of a layer", bytemuck::cast_slice(&stored.codes))?,
            scales: of("the scales of a layer", scales)?,
            scales_file,
            order: stored.order.map(|order| of("the order of inputs", bytemuck::cast_slice(&order))).transpose()?,
        })
    }

    /// N and K.
    pub fn shape(&self) -> LinearShape {
        self.shape
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        self.codes.size() + self.scales.size() + self.order.as_ref().map_or(0, wgpu::Buffer::size)
    }

    /// Joins the product `y [rows, N] = x [rows, K] · Wᵀ` with its tensors, and compiles the kernels on first use.
    ///
    /// # Errors
    /// [`Error::Size`](crate::Error::Size) for 0 rows or more than [`MOST_ROWS`], [`Error::Device`](crate::Error::Device)
    /// for tensors with fewer elements, offsets that are not aligned as the device wants, or an odd number of outputs in
    /// 16 bits.
    pub fn bind(&self, kernels: &Kernels, x: &Tensor, rows: usize, y: &Tensor) -> Result<BoundLinear> {
        if rows == 0 || rows > MOST_ROWS {
            let (what, given, most) = ("the number of rows", rows as u64, MOST_ROWS as u64);
            return Err(crate::Error::Size { what, given, most });
        }
        let limits = kernels.device().limits();
        let (inputs, outputs) = (self.shape.inputs(), self.shape.outputs());
        for (what, tensor, width) in [("the activations", x, inputs), ("the outputs", y, outputs)] {
            if tensor.elements() < rows * width {
                let (given, expected) = (tensor.elements(), rows * width);
                return Err(
                    DeviceError::Elements { what, given, expected, shape: format!("{rows} rows of {width}") }.into()
                );
            }
            tensor.check_aligned(what, &limits)?;
        }
        if y.element_type() != ElementType::F32 && outputs % 2 == 1 {
            let reason = format!("rows of {outputs} outputs in 16 bits do not begin at words; use f32");
            return Err(DeviceError::Buffer { what: "the outputs", reason }.into());
        }
        let mut launches = Vec::new();
        let ordered = match &self.order {
            None => None,
            Some(order) => {
                let (ordered, launch) = self.order_inputs(kernels, order, x, rows)?;
                launches.push(launch);
                Some(ordered)
            }
        };
        launches.push(self.product(kernels, ordered.as_ref().unwrap_or(x), rows, y)?);
        Ok(BoundLinear(launches.into_iter().collect()))
    }

    fn order_inputs(
        &self,
        kernels: &Kernels,
        order: &wgpu::Buffer,
        x: &Tensor,
        rows: usize,
    ) -> Result<(Tensor, Launch)> {
        let places = self.chunks * crate::stored::CHUNK;
        let ordered = Tensor::zeroed(kernels.device(), rows * places, ElementType::F32)?;
        let variant = Variant::new(&SHADERS, "order_inputs")
            .import("element", file(x.element_type(), ELEMENT_FILES))
            .constant("INPUTS", self.shape.inputs())
            .constant("PLACES", places)
            .constant("ALL_ROWS", rows);
        let buffers =
            [("order", order.as_entire_buffer_binding()), ("inputs", x.binding()), ("ordered", ordered.binding())];
        // Layers have up to 2^24 inputs, whose padding at most doubles them.
        let grid = [places.div_ceil(64) as u32, rows as u32, 1];
        // SAFETY: docs/weights.md, "Why the kernels stay in bounds".
        let launch = unsafe { Launch::trusted(kernels, &variant, &buffers, grid) }?;
        Ok((ordered, launch))
    }

    fn product(&self, kernels: &Kernels, x: &Tensor, rows: usize, y: &Tensor) -> Result<Launch> {
        let together = rows.min(WORKGROUP_ROWS);
        let variant = Variant::new(&SHADERS, "linear")
            .import("codes", codes_file(self.bits))
            .import("scales", self.scales_file)
            .import("input", file(x.element_type(), INPUT_FILES))
            .import("output", file(y.element_type(), OUTPUT_FILES))
            .constant("CHUNKS", self.chunks)
            .constant("GROUP_CHUNKS", self.group_chunks)
            .constant("OUTPUTS", self.shape.outputs())
            .constant("ROWS", together)
            .constant("ALL_ROWS", rows);
        let buffers = [
            ("codes", self.codes.as_entire_buffer_binding()),
            ("scales", self.scales.as_entire_buffer_binding()),
            ("inputs", x.binding()),
            ("outputs_of_rows", y.binding()),
        ];
        let most = u64::from(kernels.device().limits().max_compute_workgroups_per_dimension);
        let [width, height, _] = folded_grid(self.shape.outputs().div_ceil(WORKGROUP_OUTPUTS) as u64, most);
        let grid = [width, height, rows.div_ceil(together) as u32];
        // SAFETY: docs/weights.md, "Why the kernels stay in bounds".
        Ok(unsafe { Launch::trusted(kernels, &variant, &buffers, grid) }?)
    }
}

impl BoundLinear {
    /// Encodes the product into an open pass. Does not submit, wait or allocate.
    pub fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        self.0.encode(pass);
    }

    /// Number of dispatches: 1, or 2 where the activations are put in order first.
    pub fn dispatches(&self) -> usize {
        self.0.len()
    }
}

const INPUT_FILES: [&str; 3] = ["linear/input/f32.wgsl", "linear/input/f16.wgsl", "linear/input/bf16.wgsl"];
const OUTPUT_FILES: [&str; 3] = ["linear/output/f32.wgsl", "linear/output/f16.wgsl", "linear/output/bf16.wgsl"];
const ELEMENT_FILES: [&str; 3] = ["linear/element/f32.wgsl", "linear/element/f16.wgsl", "linear/element/bf16.wgsl"];

const fn file(element_type: ElementType, [single, half, brain]: [&'static str; 3]) -> &'static str {
    match element_type {
        ElementType::F32 => single,
        ElementType::F16 => half,
        ElementType::Bf16 => brain,
    }
}

const fn codes_file(bits: Bits) -> &'static str {
    match bits {
        Bits::Two => "linear/codes/two.wgsl",
        Bits::Three => "linear/codes/three.wgsl",
        Bits::Four => "linear/codes/four.wgsl",
        Bits::Eight => "linear/codes/eight.wgsl",
    }
}
