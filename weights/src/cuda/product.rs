//! The product of a layer with activations.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr};
use kvpack_device::ElementType;
use kvpack_device::cuda::memory::bytes_of;
use kvpack_device::cuda::{KernelLaunch, Kernels, Memory, Program, Tensor};

use super::dequantize::check_stream;
use super::linear::{Linear, check_aligned, check_apart, launch_of, type_code};
use super::sources::SOURCES;
use super::strips::StripLaunch;
use super::tiles::{BoundTiles, has_tiles};
use crate::error::{Result, check_rows};
use crate::path::Path;

/// The most rows of MMAs and of strips.
const FEW_ROWS: usize = 16;

/// A product that is joined with its tensors.
#[derive(Debug)]
pub struct BoundLinear {
    stream: Arc<CudaStream>,
    path: Path,
    order: Option<(KernelLaunch, OrderCall)>,
    product: Product,
    /// What the arguments point at.
    _memory: Vec<Arc<Memory>>,
}

#[derive(Debug)]
enum Product {
    Few(KernelLaunch, LinearCall),
    Tiles(Box<BoundTiles>),
}

/// The argument of `linear_fma`, `linear_mma` and `linear_strips`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct LinearCall {
    codes: u64,
    scales: u64,
    inputs: u64,
    outputs: u64,
    rows: u32,
    padding: u32,
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
    /// Joins the product `y [rows, N] = x [rows, K] · Wᵀ` with its tensors, and compiles the kernels on first use. Both
    /// tensors belong to the stream of the layer, or to an engine that orders its own work with that stream's.
    ///
    /// Each weight is rounded to f16 where [`BoundLinear::path`] says so ([`Path::rounds_weights`]).
    ///
    /// # Errors
    /// [`Error::Size`](crate::Error::Size) for 0 rows or more than [`MOST_ROWS`](crate::MOST_ROWS);
    /// [`Error::Device`](crate::Error::Device) for tensors with fewer elements or of another stream, activations that
    /// do not begin at a multiple of 16 bytes, outputs that share bytes with activations unless these are put in order
    /// or into f16 first, and errors of the driver.
    pub fn bind(&self, kernels: &Kernels, x: &Tensor, rows: usize, y: &Tensor) -> Result<BoundLinear> {
        check_rows(rows)?;
        self.check("the activations", x, [rows, self.shape.inputs()])?;
        self.check("the outputs", y, [rows, self.shape.outputs()])?;
        if self.order.is_none() {
            check_aligned("the activations", x)?;
        }
        let mut memory = vec![self.codes.clone(), self.scales.clone(), x.memory().clone(), y.memory().clone()];
        memory.extend(self.order.iter().map(|order| order.inputs.clone()));
        let in_tiles = rows > FEW_ROWS && has_tiles(kernels.facts());
        let becomes_f16 = in_tiles && x.element_type() != ElementType::F16;
        if self.order.is_none() && !becomes_f16 {
            let bytes = |tensor: &Tensor, width: usize| tensor.address()..tensor.address_of(rows * width);
            check_apart(bytes(x, self.shape.inputs()), bytes(y, self.shape.outputs()))?;
        }
        let (mut order, mut from) = (None, x.address());
        if let Some(inputs) = &self.order
            && !becomes_f16
        {
            let bytes = bytes_of("ordered activations", rows * self.places(), x.element_type().bytes())?;
            let ordered = Memory::zeroed(&self.stream, "ordered activations", bytes)?;
            let launch = self.order_inputs(kernels, rows, x.element_type())?;
            let call = OrderCall { order: inputs.inputs.address(), inputs: x.address(), ordered: ordered.address() };
            memory.push(ordered.clone());
            (order, from) = (Some((launch, call)), ordered.address());
        }
        let (path, product) = match in_tiles {
            true => {
                let tiles = self.tiles(kernels, (from, x.element_type()), rows, (y.address(), y.element_type()))?;
                (Path::MatrixTiles, Product::Tiles(Box::new(tiles)))
            }
            false => {
                let (path, launch) = self.few_rows(kernels, rows, x.element_type(), y.element_type())?;
                let call = LinearCall {
                    codes: self.codes.address(),
                    scales: self.scales.address(),
                    inputs: from,
                    outputs: y.address(),
                    rows: rows as u32,
                    padding: 0,
                };
                (path, Product::Few(launch, call))
            }
        };
        Ok(BoundLinear { stream: self.stream.clone(), path, order, product, _memory: memory })
    }

    fn order_inputs(&self, kernels: &Kernels, rows: usize, of: ElementType) -> Result<KernelLaunch> {
        let places = self.places();
        let defines = vec![("INPUTS", self.shape.inputs()), ("PLACES", places), ("INPUT", type_code(of))];
        let program = Program { sources: &SOURCES, files: &["order_inputs.cu"], defines };
        let grid = (places.div_ceil(128) as u32, rows as u32, 1);
        launch_of(kernels, &program, "order_inputs", grid, 128)
    }

    fn few_rows(&self, kernels: &Kernels, rows: usize, x: ElementType, y: ElementType) -> Result<(Path, KernelLaunch)> {
        let by_mma = x == ElementType::F16 && self.group_chunks.is_multiple_of(4) && rows <= FEW_ROWS;
        let together = rows.min(4);
        let mut defines = self.defines();
        let fixed = if by_mma { rows } else { 0 };
        defines.extend([("ALL_ROWS", fixed), ("ROWS", together), ("INPUT", type_code(x)), ("OUTPUT", type_code(y))]);
        defines.push(("BY_MMA", usize::from(by_mma)));
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
            let program = Program { sources: &SOURCES, files: &["linear.cu", "linear_strips.cu"], defines };
            return Ok((Path::Strips, launch.on(kernels, &program)?));
        }
        let program = Program { sources: &SOURCES, files: &["linear.cu"], defines };
        let outputs = self.shape.outputs();
        if by_mma {
            let launch = launch_of(kernels, &program, "linear_mma", (outputs.div_ceil(16) as u32, 1, 1), 256)?;
            return Ok((Path::Mma, launch));
        }
        let grid = (outputs.div_ceil(4) as u32, rows.div_ceil(together) as u32, 1);
        Ok((Path::FourRows, launch_of(kernels, &program, "linear_fma", grid, 64)?))
    }
}

impl BoundLinear {
    /// Queues the product on the stream of the layer. Does not wait, allocate or copy. The memory must live until the
    /// stream has finished: keep this value until then.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) on another stream, and for errors of the driver.
    pub fn launch(&self, stream: &Arc<CudaStream>) -> Result<()> {
        check_stream(&self.stream, stream)?;
        if let Some((launch, call)) = &self.order {
            // SAFETY: docs/weights.md, "Why the kernels stay in bounds". This value holds the memory.
            unsafe { launch.run(stream, call) }?;
        }
        match &self.product {
            // SAFETY: As above.
            Product::Few(launch, call) => Ok(unsafe { launch.run(stream, call) }?),
            Product::Tiles(tiles) => tiles.launch(stream),
        }
    }

    /// The kernel that it takes.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Number of kernels: 1, or 2 where the activations are put in order or into f16 first.
    pub fn kernels(&self) -> usize {
        let prepares = matches!(&self.product, Product::Tiles(tiles) if tiles.prepares());
        1 + usize::from(self.order.is_some() || prepares)
    }
}
