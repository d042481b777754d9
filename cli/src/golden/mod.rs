//! Golden vectors: files with inputs and the outputs of somebody else's implementation.
//!
//! `tests/golden/README.md` describes the format. Each file names an `op`; the ops that kvpack implements are run
//! through its CPU kernels, some through those of a GPU too, and every output is compared as the file asks.

mod attention;
mod attention_prefill;
mod attention_stats;
mod calibquant;
mod cocktail;
mod compare;
mod file;
mod hadamard;
mod kernels;
mod kivi;
mod lookm;
mod saw_int4;
mod selection;
mod stored;
mod turboquant;
mod vlcache;
mod weights;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};

pub use compare::Mismatch;
pub use file::GoldenFile;
use kernels::Device;
use kvpack::wgpu::Wgpu;

use crate::backend::Chosen;

/// What one implementation of an op computed, by the name of the output.
type Outputs = BTreeMap<String, Vec<f64>>;

/// The outputs of these names.
fn named<const N: usize>(outputs: [(&str, Vec<f64>); N]) -> Outputs {
    outputs.into_iter().map(|(name, values)| (name.to_owned(), values)).collect()
}

/// What each implementation of an op computed.
type Computed = Vec<(&'static str, Outputs)>;

/// An op: computes the outputs of a file, with each of its implementations by name.
type Op = fn(&GoldenFile) -> Result<Computed>;

/// The ops that are implemented.
const OPS: [(&str, Op); 33] = [
    ("attention.column_sums", |file| attention_stats::column_sums(file, Device::Cpu)),
    ("attention.decode", attention::decode),
    ("attention.merge", attention_stats::merge),
    ("attention.prefill", attention_prefill::prefill),
    ("awq.scale", weights::awq_scale),
    ("awq.unpack", weights::awq_unpack),
    ("calibquant.calibrate", calibquant::calibrate),
    ("calibquant.decode", calibquant::decode),
    ("calibquant.pack", calibquant::pack),
    ("calibquant.quantize", calibquant::quantize),
    ("cocktail.decode", cocktail::decode),
    ("cocktail.search", |file| cocktail::search(file, Device::Cpu)),
    ("compressed_tensors.unpack", weights::compressed_tensors_unpack),
    ("gptq.quantize", weights::gptq_quantize),
    ("gptq.unpack", weights::gptq_unpack),
    ("h2o.select", |file| selection::h2o(file, Device::Cpu)),
    ("hadamard", hadamard::hadamard),
    ("kivi.quantize_k", kivi::quantize_k),
    ("kivi.quantize_v", kivi::quantize_v),
    ("lookm.evict", |file| lookm::evict(file, Device::Cpu)),
    ("lookm.merge", |file| lookm::merge(file, Device::Cpu)),
    ("pyramidkv.budget", selection::pyramidkv),
    ("saw.quantize", saw_int4::quantize),
    ("snapkv.select", |file| selection::snapkv(file, Device::Cpu)),
    ("streamingllm.select", selection::streamingllm),
    ("turboquant.codebook", turboquant::codebook),
    ("turboquant.mse", turboquant::mse),
    ("turboquant.prod", turboquant::prod),
    ("vlcache.budget", vlcache::budget),
    ("vlcache.plan", |file| vlcache::plan(file, Device::Cpu)),
    ("vlcache.scores", |file| vlcache::scores(file, Device::Cpu)),
    ("vlcache.sparsity", |file| vlcache::layer(file, Device::Cpu)),
    ("w4a16.matmul", weights::w4a16_matmul),
];

/// An op on a GPU.
type GpuOp = fn(&GoldenFile, &Wgpu) -> Result<Computed>;

/// The ops that run on a GPU too.
const GPU_OPS: [(&str, GpuOp); 11] = [
    ("attention.column_sums", |file, gpu| attention_stats::column_sums(file, Device::Gpu(gpu))),
    ("attention.prefill", attention_prefill::prefill_on_gpu),
    ("cocktail.search", |file, gpu| cocktail::search(file, Device::Gpu(gpu))),
    ("h2o.select", |file, gpu| selection::h2o(file, Device::Gpu(gpu))),
    ("hadamard", hadamard::hadamard_on_gpu),
    ("lookm.evict", |file, gpu| lookm::evict(file, Device::Gpu(gpu))),
    ("lookm.merge", |file, gpu| lookm::merge(file, Device::Gpu(gpu))),
    ("snapkv.select", |file, gpu| selection::snapkv(file, Device::Gpu(gpu))),
    ("vlcache.plan", |file, gpu| vlcache::plan(file, Device::Gpu(gpu))),
    ("vlcache.scores", |file, gpu| vlcache::scores(file, Device::Gpu(gpu))),
    ("vlcache.sparsity", |file, gpu| vlcache::layer(file, Device::Gpu(gpu))),
];

/// An op through CUDA.
#[cfg(feature = "cuda")]
type CudaOp = fn(&GoldenFile, &kvpack::cuda::Cuda) -> Result<Computed>;

/// The ops that run through CUDA too.
#[cfg(feature = "cuda")]
const CUDA_OPS: [(&str, CudaOp); 1] = [("attention.prefill", attention_prefill::prefill_on_cuda)];

/// What came of one file.
#[derive(Debug)]
pub struct GoldenResult {
    /// File name without its directory and suffix.
    pub name: String,
    /// What came of it.
    pub outcome: GoldenOutcome,
}

/// What came of a file.
#[derive(Debug)]
pub enum GoldenOutcome {
    /// Every output of every implementation agrees.
    Agrees {
        /// The kernels that were run.
        kernels: Vec<&'static str>,
        /// Largest `|got − want| / (atol + rtol · |want|)`; at most 1, and 0 where outputs are compared exactly.
        worst: f64,
    },
    /// An output differs.
    Differs {
        /// The kernel that computed it.
        kernel: &'static str,
        /// The first output that differs, and where.
        mismatch: Mismatch,
    },
    /// The op is none that kvpack implements.
    Unimplemented {
        /// The op.
        op: String,
    },
    /// The file cannot be run.
    Broken {
        /// Why.
        reason: String,
    },
}

/// Runs all `*.safetensors` files of a directory, in the order of their names, on the CPU and on `backend`.
///
/// # Errors
/// When the directory cannot be read or holds no such file. What is wrong with a single file is its result.
pub fn run_directory(directory: &Path, backend: &Chosen) -> Result<Vec<GoldenResult>> {
    let entries = std::fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let mut paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    paths.sort();
    if paths.is_empty() {
        bail!("{} holds no .safetensors files; pass a directory with golden vectors", directory.display());
    }
    Ok(paths.iter().map(|path| run_file(path, backend)).collect())
}

/// Runs one file.
fn run_file(path: &Path, backend: &Chosen) -> GoldenResult {
    let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let run = || GoldenFile::read(path).and_then(|file| run_op(&file, Some(backend)));
    // A mistake in an op is that file's result too, and says where it is on standard error.
    let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(anyhow!("kvpack panicked over it")));
    GoldenResult {
        name,
        outcome: outcome.unwrap_or_else(|error| GoldenOutcome::Broken { reason: format!("{error:#}") }),
    }
}

/// What a backend other than the CPU computes of a file.
fn run_on(file: &GoldenFile, backend: &Chosen) -> Result<Computed> {
    match backend {
        Chosen::Cpu(_) => Ok(Vec::new()),
        Chosen::Wgpu(gpu) => of_op(&GPU_OPS, file).map_or(Ok(Vec::new()), |op| op(file, gpu)),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(cuda) => of_op(&CUDA_OPS, file).map_or(Ok(Vec::new()), |op| op(file, cuda)),
    }
}

fn of_op<O: Copy>(ops: &[(&str, O)], file: &GoldenFile) -> Option<O> {
    ops.iter().find(|(name, _)| *name == file.op).map(|&(_, op)| op)
}

/// Runs the op of a file on the CPU, and on a backend that is given.
pub fn run_op(file: &GoldenFile, backend: Option<&Chosen>) -> Result<GoldenOutcome> {
    let Some(op) = of_op(&OPS, file) else {
        return Ok(GoldenOutcome::Unimplemented { op: file.op.clone() });
    };
    let mut worst = 0.0f64;
    let mut kernels = Vec::new();
    let mut computed: Vec<_> = op(file)?.into_iter().map(|of_kernel| (of_kernel, &file.compare)).collect();
    if let Some(backend) = backend {
        // Weights of f16 values are halves on devices that have them (shaders/attend/values.wgsl#fma).
        let compare = if file.compare_f16.is_empty() { &file.compare } else { &file.compare_f16 };
        computed.extend(run_on(file, backend)?.into_iter().map(|of_kernel| (of_kernel, compare)));
    }
    for ((kernel, outputs), compare) in computed {
        kernels.push(kernel);
        for (output, mode) in compare {
            // kvpack clamps where a formula would reverse an order: a file that says what that gives is taken by it.
            let guarded = file.compare.contains_key(&format!("{output}_guarded"));
            if guarded {
                continue;
            }
            let want = file.output(output)?;
            let Some(got) = outputs.get(output.as_str()) else {
                bail!("{kernel} computes no output '{output}'");
            };
            match mode.compare(output, got, &want) {
                Ok(distance) => worst = worst.max(distance),
                Err(mismatch) => return Ok(GoldenOutcome::Differs { kernel, mismatch }),
            }
        }
    }
    Ok(GoldenOutcome::Agrees { kernels, worst })
}

/// Elements of an output.
fn doubles<T: Copy + Into<f64>>(x: &[T]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}
