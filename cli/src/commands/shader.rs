//! `kvpack shader`: the WGSL of a kernel, with the file that each part comes from.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Result, bail};
use kvpack::backend::{AttendOptions, SpanRead, SpanWrite};
use kvpack::cache::{ModelRecipe, Recipe};
use kvpack::conformance::{DecodeShape, decode_shapes};
use kvpack::plan::{
    AttendPlan, ElementType, Page, QueryRun, RowLayout, Rows, SpanView, StoreCapacity, StoreView, TokenRange,
    WindowCapacity, WriteLayout,
};
use kvpack::wgpu::{
    AttendStep, Capabilities, DequantizePlan, KernelLimits, Path, QuantizePlan, StoreStep, SubgroupSizes, Timestamps,
    Variant,
};
use kvpack::{SegmentFormat, TILE_TOKENS};

use crate::outcome::Outcome;
use crate::print::{self, say};

/// Print the WGSL of a kernel, with the file that each part comes from.
///
/// The shader is assembled for a format, a shape and a kind of device. A comment before each part names its file in
/// shaders/. No device is needed.
#[derive(clap::Args)]
pub struct ShaderArgs {
    /// The recipe whose packed format the kernel reads: f16, calibquant:2, kivi:4, turboquant:3, … Option +tau=0,3
    /// calibrates scores; option +query=int8 rounds queries and weights to one byte.
    #[arg(long, value_name = "RECIPE", default_value = "calibquant:4")]
    format: ModelRecipe,
    /// The shape of the decode step: a name that `kvpack bench --shape` takes.
    #[arg(long, value_name = "NAME", default_value = "g4-b8-32k")]
    shape: String,
    /// The kernel [default: the one that attends to packed tokens].
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// What the device can do: floor, f16, subgroups or matrices.
    #[arg(long, value_name = "PATH", default_value = "subgroups")]
    path: Path,
    /// Whether a packing or unpacking kernel is for keys or for values.
    #[arg(long, value_enum, default_value = "keys")]
    tensor: TensorName,
    /// Type of keys, values, queries and outputs.
    #[arg(long, value_enum, default_value = "f16")]
    elements: ElementName,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum TensorName {
    Keys,
    Values,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum ElementName {
    F32,
    F16,
    Bf16,
}

/// Kernels that attend, the fullest first.
const ATTENDING: [&str; 3] = ["attend", "attend_matrix", "weighted_values"];

/// Runs the command.
pub fn run(args: &ShaderArgs) -> Result<Outcome> {
    let step = args.step()?;
    let recipe = args.format.plain()?.layer(0, &step.shape);
    let variants = args.variants(&step, &recipe)?;
    let variant = args.chosen(&variants)?;
    say!("// {} of {} at {}, path {}", variant.kernel(), recipe.packed().format, step.name, args.path)?;
    say!("// Assembled by `kvpack shader`; edit the files that are named below.\n")?;
    print::piece(&variant.listing()?)?;
    Ok(Outcome::Passed)
}

impl ShaderArgs {
    fn step(&self) -> Result<DecodeShape> {
        let steps = decode_shapes();
        let names: Vec<&str> = steps.iter().map(|step| step.name.as_str()).collect();
        match steps.iter().find(|step| step.name == self.shape) {
            Some(step) => Ok(step.clone()),
            None => bail!("there is no shape '{}'; the shapes are {}", self.shape, names.join(", ")),
        }
    }

    fn chosen<'a>(&self, variants: &'a [Variant]) -> Result<&'a Variant> {
        let named = |name: &str| {
            let mut of_name = variants.iter().filter(|variant| variant.kernel() == name);
            // Packing lists the kernels of keys before those of values.
            if self.tensor == TensorName::Keys { of_name.next() } else { of_name.next_back() }
        };
        let chosen = match &self.kernel {
            Some(name) => named(name),
            None => ATTENDING.into_iter().find_map(named),
        };
        let Some(chosen) = chosen else {
            let names: BTreeSet<&str> = variants.iter().map(Variant::kernel).collect();
            let names: Vec<&str> = names.into_iter().collect();
            bail!(
                "no kernel '{}' takes part for {} at {} on path {}; those that do are {}",
                self.kernel.as_deref().unwrap_or("attend"),
                self.format,
                self.shape,
                self.path,
                names.join(", ")
            );
        };
        Ok(chosen)
    }

    /// All kernels that pack, attend to and unpack a segment.
    fn variants(&self, step: &DecodeShape, recipe: &Recipe) -> Result<Vec<Variant>> {
        recipe.packed().format.check(&step.shape)?;
        let mut found = self.step_variants(step, recipe)?;
        // Of the other tensor, f16 has kernels of no other name.
        let format = match self.tensor {
            TensorName::Keys => SegmentFormat { value: SegmentFormat::F16.value, ..recipe.packed().format },
            TensorName::Values => SegmentFormat { key: SegmentFormat::F16.key, ..recipe.packed().format },
        };
        let elements = self.element_type();
        let (shape, pages) = (&step.shape, &[Page { shard: 0, index: 0 }]);
        let rows = RowLayout::token_major(TILE_TOKENS, shape);
        let write =
            SpanWrite { rows, tokens: Rows::Run(TokenRange::new(0, TILE_TOKENS)?), pages, range_slot: 0, centre: None };
        found.extend(QuantizePlan::new(shape, &format, &write)?.variants(elements, elements));
        let store = |format, tokens, copies| StoreCapacity {
            format,
            shard_pages: vec![1],
            range_slots: 1,
            tokens,
            copies,
            centres: 0,
            centre_slots: 0,
        };
        let steps = |stores, windows| {
            let layout = Arc::new(WriteLayout::new(*shape, 1, stores, windows)?);
            // Keys and values apart, as a device takes them that binds too few buffers for both.
            Ok::<_, kvpack::Error>(StoreStep::new(&layout).variants(0, elements, elements))
        };
        found.extend(steps(vec![store(format, usize::from(format.takes_single_tokens()), 1)], vec![])?);
        let window = WindowCapacity { from: 0, to: 1, windows: 1, newer: 0 };
        let windows = steps(vec![store(SegmentFormat::F16, 0, 0), store(format, 0, 0)], vec![window])?;
        // Of what windows take besides, spans take the same, but that they read dense tensors.
        found.extend(windows.into_iter().filter(|variant| variant.kernel() == "ranges_window"));
        let read = SpanRead { pages, tokens: TILE_TOKENS, range_slot: 0, centre: None };
        found.extend(DequantizePlan::new(shape, &format, &read)?.variants());
        Ok(found)
    }

    fn step_variants(&self, step: &DecodeShape, recipe: &Recipe) -> Result<Vec<Variant>> {
        let sequences: Vec<(usize, Vec<Page>)> = (0..step.sequences)
            .map(|sequence| {
                let tokens = step.length(sequence);
                (tokens, (0..tokens.div_ceil(TILE_TOKENS) as u32).map(|index| Page { shard: 0, index }).collect())
            })
            .collect();
        let spans = sequences.iter().enumerate();
        let spans = spans.map(|(sequence, (tokens, pages))| SpanView {
            sequence,
            start: 0,
            tokens: *tokens,
            gathered: None,
            pages,
            range_slot: 0,
        });
        let store = StoreView {
            format: recipe.packed().format,
            calibration: recipe.packed().calibration,
            spans: spans.collect(),
        };
        let plan = AttendPlan::new(step.shape, &QueryRun::decode_batch(step.sequences), &[store])?;
        let options = AttendOptions { query: recipe.query(), output: self.element_type(), ..AttendOptions::default() };
        Ok(AttendStep::new(&self.capabilities(), &plan, self.element_type(), options)?.variants())
    }

    const fn element_type(&self) -> ElementType {
        match self.elements {
            ElementName::F32 => ElementType::F32,
            ElementName::F16 => ElementType::F16,
            ElementName::Bf16 => ElementType::Bf16,
        }
    }

    /// Those of a discrete GPU with subgroups of 32, restricted to the path.
    fn capabilities(&self) -> Capabilities {
        let limits = KernelLimits {
            binding_bytes: u64::from(u32::MAX),
            binding_alignment: 256,
            storage_buffers: 12,
            workgroup_memory: 48 << 10,
            invocations: 1024,
            workgroups: 65_535,
        };
        let all = Capabilities {
            f16: true,
            subgroups: Some(SubgroupSizes { min: 32, max: 32 }),
            coherent: true,
            matrices: true,
            timestamps: Timestamps::None,
            limits,
        };
        all.restricted_to(self.path)
    }
}
