//! The product of a layer with activations.

use kvpack_device::wgpu::launch::folded_grid;
use kvpack_device::wgpu::{Kernels, Launch, Launches, Tensor, Variant};
use kvpack_device::{ElementType, Error as DeviceError};

use super::linear::{Linear, check};
use super::sources::SHADERS;
use super::splits::{RowSplit, splits};
use crate::error::{Result, check_rows};
use crate::path::Path;
use crate::shape::Bits;

/// Outputs of a workgroup that takes a few rows, and rows that it takes together.
const FEW: [usize; 2] = [4, 4];

/// A workgroup that takes one row: its invocations, its outputs, and those whose codes it loads together.
struct RowWorkgroup {
    invocations: usize,
    outputs: usize,
    batch: usize,
}

impl RowWorkgroup {
    /// On an H200, 28672 inputs take 38.9 µs with 128 invocations and 34.2 with 64. 13824 inputs take 14.1 and 16.6. Nobody
    /// timed other numbers between these.
    const fn of(chunks: usize) -> Self {
        if chunks < 640 {
            Self { invocations: 128, outputs: 8, batch: 4 }
        } else {
            Self { invocations: 64, outputs: 16, batch: 16 }
        }
    }
}

/// The most rows of such workgroups; with more, tiles are faster.
const FEW_ROWS: usize = 16;

/// Rows of a product by matrices of few rows, and the fewest that take them: it takes nearly as long for one row as for
/// all. Without matrices, 5 to 8 rows read the weights twice and take up to 1.5 times as long on an H200.
const MATRIX_ROWS: usize = 16;
const LEAST_MATRIX_ROWS: usize = 5;

/// Chunks of a turn of such products: inputs are whole turns.
const TURN_CHUNKS: usize = 16;

/// Rows and outputs of a tile.
const TILE: usize = 64;

/// Rows and outputs of a tile of matrices.
pub(super) const MATRIX_TILE: usize = 128;

/// Invocations of a workgroup that adds the sums of shared tiles. Each has four outputs.
const ADDERS: usize = 256;

/// A product that is joined with its tensors.
#[derive(Clone, Debug)]
pub struct BoundLinear {
    path: Path,
    launches: Launches,
}

/// Activations as a kernel reads them.
struct Prepared {
    inputs: Tensor,
    parts: usize,
    /// The factor of each row.
    units: Option<Tensor>,
}

impl Linear {
    /// Joins the product `y [rows, N] = x [rows, K] · Wᵀ` with its tensors, and compiles the kernels on first use.
    ///
    /// Each weight is rounded to f16 where [`BoundLinear::path`] says so ([`Path::rounds_weights`]).
    ///
    /// # Errors
    /// [`Error::Size`](crate::Error::Size) for 0 rows or more than [`MOST_ROWS`](crate::MOST_ROWS),
    /// [`Error::Device`](crate::Error::Device) for tensors with fewer elements, offsets that are not aligned as the
    /// device wants, or an odd number of outputs in 16 bits.
    pub fn bind(&self, kernels: &Kernels, x: &Tensor, rows: usize, y: &Tensor) -> Result<BoundLinear> {
        check_rows(rows)?;
        let limits = kernels.device().limits();
        let (inputs, outputs) = (self.shape.inputs(), self.shape.outputs());
        check("the activations", x, [rows, inputs], &limits)?;
        check("the outputs", y, [rows, outputs], &limits)?;
        if y.element_type() != ElementType::F32 && outputs % 2 == 1 {
            let reason = format!("rows of {outputs} outputs in 16 bits do not begin at words; use f32");
            return Err(DeviceError::Buffer { what: "the outputs", reason }.into());
        }
        // Kernels of tiles take the number of rows from what is bound.
        let y = y.slice(0, rows * outputs)?;
        let path = self.path(x.element_type(), rows);
        let mut launches = Vec::new();
        let prepared = match path {
            Path::MatrixTiles => self.prepare(kernels, x, [rows, rows], &mut launches)?,
            Path::MatrixRows => self.prepare(kernels, x, [rows, MATRIX_ROWS], &mut launches)?,
            _ => Prepared { inputs: self.ordered(kernels, x, rows, &mut launches)?, parts: 1, units: None },
        };
        match path {
            Path::MatrixTiles => self.matrix_tiles(kernels, &prepared, rows, &y, &mut launches)?,
            Path::MatrixRows => self.matrix_rows(kernels, &prepared, &y, &mut launches)?,
            Path::OneRow => launches.push(self.one_row(kernels, &prepared.inputs, &y)?),
            Path::Tiles => launches.push(self.tiles(kernels, &prepared.inputs, rows, &y)?),
            _ => launches.push(self.few_rows(kernels, &prepared.inputs, rows, &y)?),
        }
        Ok(BoundLinear { path, launches: launches.into_iter().collect() })
    }

    fn path(&self, x: ElementType, rows: usize) -> Path {
        let by_matrices = self.has_matrices && x != ElementType::F32 && self.chunks.is_multiple_of(TURN_CHUNKS);
        match (rows > FEW_ROWS, self.has_matrices) {
            (false, _) if by_matrices && rows >= LEAST_MATRIX_ROWS => Path::MatrixRows,
            (false, _) if rows == 1 && self.bits == Bits::Four && x != ElementType::F32 => Path::OneRow,
            (false, _) => Path::FourRows,
            (true, false) => Path::Tiles,
            (true, true) => Path::MatrixTiles,
        }
    }

    /// Activations in the order of the codes, in f32 where they had another.
    fn ordered(&self, kernels: &Kernels, x: &Tensor, rows: usize, launches: &mut Vec<Launch>) -> Result<Tensor> {
        let Some(order) = &self.order else { return Ok(x.clone()) };
        let places = self.places();
        let ordered = Tensor::zeroed(kernels.device(), rows * places, ElementType::F32)?;
        let variant = Variant::new(&SHADERS, "order_inputs")
            .import("element", file(x.element_type(), ELEMENT_FILES))
            .constant("INPUTS", self.shape.inputs())
            .constant("PLACES", places)
            .constant("ALL_ROWS", rows);
        let order = ("order", order.inputs.as_entire_buffer_binding());
        let buffers = [order, ("inputs", x.binding()), ("ordered", ordered.binding())];
        // Layers have up to 2^24 inputs, whose padding at most doubles them.
        let grid = [places.div_ceil(64) as u32, rows as u32, 1];
        // SAFETY: docs/weights.md, "Why the kernels stay in bounds".
        launches.push(unsafe { Launch::trusted(kernels, &variant, &buffers, grid) }?);
        Ok(ordered)
    }

    /// Activations in the order of the codes and in f16, as many rows as are needed: f16 in order as it is, others with
    /// a factor for each row.
    fn prepare(
        &self,
        kernels: &Kernels,
        x: &Tensor,
        [rows, needed]: [usize; 2],
        launches: &mut Vec<Launch>,
    ) -> Result<Prepared> {
        if x.element_type() == ElementType::F16 && self.order.is_none() && rows == needed {
            return Ok(Prepared { inputs: x.clone(), parts: 1, units: None });
        }
        let parts = if x.element_type() == ElementType::F32 { 2 } else { 1 };
        let places = self.places();
        let prepared = Tensor::zeroed(kernels.device(), needed * parts * places, ElementType::F16)?;
        let units = Tensor::zeroed(kernels.device(), needed, ElementType::F32)?;
        let mut variant = Variant::new(&SHADERS, "prepare_rows")
            .import("element", file(x.element_type(), ELEMENT_FILES))
            .constant("INPUTS", self.shape.inputs())
            .constant("PLACES", places)
            .constant("PARTS", parts)
            .constant("ALL_ROWS", rows)
            .constant("WRITTEN_ROWS", needed);
        let mut buffers = vec![("inputs", x.binding()), ("prepared", prepared.binding()), ("units", units.binding())];
        if let Some(order) = &self.order {
            variant = variant.import("place", "linear/place.wgsl#ordered");
            buffers.push(("order", order.inputs.as_entire_buffer_binding()));
        }
        // SAFETY: docs/weights.md, "Why the kernels stay in bounds".
        launches.push(unsafe { Launch::trusted(kernels, &variant, &buffers, [needed as u32, 1, 1]) }?);
        Ok(Prepared { inputs: prepared, parts, units: Some(units) })
    }

    fn one_row(&self, kernels: &Kernels, x: &Tensor, y: &Tensor) -> Result<Launch> {
        let variant = self.variant("linear_row").import("input", file(x.element_type(), INPUT_FILES));
        let RowWorkgroup { invocations, outputs, batch } = RowWorkgroup::of(self.chunks);
        let variant =
            variant.constant("INVOCATIONS", invocations).constant("TOGETHER", outputs).constant("BATCH", batch);
        self.launch(kernels, variant, (x, None, y), self.grid(kernels, outputs, 1))
    }

    fn few_rows(&self, kernels: &Kernels, x: &Tensor, rows: usize, y: &Tensor) -> Result<Launch> {
        let together = rows.min(FEW[1]);
        let variant = self.variant("linear").import("input", file(x.element_type(), INPUT_FILES));
        let variant = variant.constant("ROWS", together).constant("ALL_ROWS", rows);
        let depth = rows.div_ceil(together);
        self.launch(kernels, variant, (x, None, y), self.grid(kernels, FEW[0], depth))
    }

    fn tiles(&self, kernels: &Kernels, x: &Tensor, rows: usize, y: &Tensor) -> Result<Launch> {
        let variant = self.by_lane(self.variant("linear_tiles")).import("input", file(x.element_type(), INPUT_FILES));
        self.launch(kernels, variant, (x, None, y), self.grid(kernels, TILE, rows.div_ceil(TILE)))
    }

    fn matrix_tiles(
        &self,
        kernels: &Kernels,
        x: &Prepared,
        rows: usize,
        y: &Tensor,
        launches: &mut Vec<Launch>,
    ) -> Result<()> {
        let splits = splits(rows, self.shape.outputs(), x.parts * self.chunks);
        // Two chunks between two barriers, where they fill all turns.
        let turn = if (x.parts * self.chunks / splits).is_multiple_of(2) { 2 } else { 1 };
        let variant = self.by_lane(self.matrix_variant("linear_matrix"));
        let variant = variant.constant("PARTS", x.parts).constant("SPLITS", splits).constant("TURN", turn);
        let grid = self.grid(kernels, MATRIX_TILE, rows.div_ceil(MATRIX_TILE) * splits);
        self.shared(kernels, (variant, grid), x, (splits, y), launches)
    }

    /// A kernel whose workgroups share outputs, and the one that adds their sums.
    fn shared(
        &self,
        kernels: &Kernels,
        (variant, grid): (Variant, [u32; 3]),
        x: &Prepared,
        (splits, y): (usize, &Tensor),
        launches: &mut Vec<Launch>,
    ) -> Result<()> {
        if splits == 1 {
            launches.push(self.launch(kernels, in_units(variant, x), (&x.inputs, x.units.as_ref(), y), grid)?);
            return Ok(());
        }
        let sums = Tensor::zeroed(kernels.device(), splits * y.elements(), ElementType::F32)?;
        launches.push(self.launch(kernels, variant, (&x.inputs, None, &sums), grid)?);
        launches.push(self.add_splits(kernels, x, splits, (&sums, y))?);
        Ok(())
    }

    fn add_splits(
        &self,
        kernels: &Kernels,
        x: &Prepared,
        splits: usize,
        (sums, y): (&Tensor, &Tensor),
    ) -> Result<Launch> {
        let variant = Variant::new(&SHADERS, "add_splits")
            .import("output", file(y.element_type(), OUTPUT_FILES))
            .constant("OUTPUTS", self.shape.outputs())
            .constant("SPLITS", splits);
        let mut buffers = vec![("sums", sums.binding()), ("outputs_of_rows", y.binding())];
        buffers.extend(x.units.as_ref().map(|units| ("units", units.binding())));
        let most = u64::from(kernels.device().limits().max_compute_workgroups_per_dimension);
        let grid = folded_grid(y.elements().div_ceil(4 * ADDERS) as u64, most);
        // SAFETY: docs/weights.md, "Why the kernels stay in bounds".
        Ok(unsafe { Launch::trusted(kernels, &in_units(variant, x), &buffers, grid) }?)
    }

    fn matrix_rows(&self, kernels: &Kernels, x: &Prepared, y: &Tensor, launches: &mut Vec<Launch>) -> Result<()> {
        let RowSplit { slices, splits } = RowSplit::of(self.shape.outputs(), self.chunks / TURN_CHUNKS);
        let variant = self.matrix_variant("linear_rows_matrix").constant("SLICES", slices).constant("SPLITS", splits);
        self.shared(kernels, (variant, self.grid(kernels, 16 * slices, splits)), x, (splits, y), launches)
    }

    /// Workgroups of `outputs` outputs each, `depth` times.
    fn grid(&self, kernels: &Kernels, outputs: usize, depth: usize) -> [u32; 3] {
        let most = u64::from(kernels.device().limits().max_compute_workgroups_per_dimension);
        let [width, height, _] = folded_grid(self.shape.outputs().div_ceil(outputs) as u64, most);
        [width, height, depth as u32]
    }

    fn launch(
        &self,
        kernels: &Kernels,
        variant: Variant,
        (x, units, y): (&Tensor, Option<&Tensor>, &Tensor),
        grid: [u32; 3],
    ) -> Result<Launch> {
        let variant = variant.import("output", file(y.element_type(), OUTPUT_FILES));
        let mut buffers = vec![
            ("codes", self.codes.as_entire_buffer_binding()),
            ("scales", self.scales.as_entire_buffer_binding()),
            ("inputs", x.binding()),
            ("outputs_of_rows", y.binding()),
        ];
        buffers.extend(units.map(|units| ("units", units.binding())));
        // SAFETY: docs/weights.md, "Why the kernels stay in bounds".
        Ok(unsafe { Launch::trusted(kernels, &variant, &buffers, grid) }?)
    }
}

impl BoundLinear {
    /// Encodes the product into an open pass. Does not submit, wait or allocate.
    pub fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        self.launches.encode(pass);
    }

    /// The kernel that it takes.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Number of dispatches: 1, one more where the activations are put in order or into f16 first, and one more where
    /// workgroups share tiles, whose sums are added at the end.
    pub fn dispatches(&self) -> usize {
        self.launches.len()
    }
}

/// A variant whose outputs are multiplied by the factors of rows, where they have any.
fn in_units(variant: Variant, x: &Prepared) -> Variant {
    if x.units.is_some() { variant.import("unit", "linear/unit.wgsl#given") } else { variant }
}

const INPUT_FILES: [&str; 3] = ["linear/input.wgsl#f32", "linear/input.wgsl#f16", "linear/input.wgsl#bf16"];
const OUTPUT_FILES: [&str; 3] = ["linear/output.wgsl#f32", "linear/output.wgsl#f16", "linear/output.wgsl#bf16"];
const ELEMENT_FILES: [&str; 3] = ["linear/element.wgsl#f32", "linear/element.wgsl#f16", "linear/element.wgsl#bf16"];

const fn file(element_type: ElementType, [single, half, brain]: [&'static str; 3]) -> &'static str {
    match element_type {
        ElementType::F32 => single,
        ElementType::F16 => half,
        ElementType::Bf16 => brain,
    }
}
