//! What the decoder does between its products, as one kernel each: this program's own, and candle's for the rest.

use candle_core::{DType, Error, Result, Tensor};
use candle_nn::ops::rms_norm;
use candle_nn::rotary_emb::{rope, rope_i};
use kvpack::AttentionShape;
use kvpack::cuda::Cuda;
use kvpack_cli::{Activation, Fused, RopePairs};
use kvpack_device::cuda::cudarc::driver::{DeviceRepr, LaunchConfig};
use kvpack_device::cuda::{KernelLaunch, KernelSources, Program};

use crate::attention::lend;
use crate::scratch::Scratch;

static SOURCES: KernelSources =
    KernelSources { library: "candle-host", files: &[("decoder.cu", include_str!("../kernels/decoder.cu"))] };

/// Threads of a block of `gate` and `split_heads`.
const THREADS: usize = 256;

/// Elements that a thread takes at a time.
const TOGETHER: usize = 8;

/// Norms, rotations and gates on the stream of candle.
pub struct HostKernels {
    pub backend: Cuda,
    pub scratch: Scratch,
}

/// The argument of `add_and_norm`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct NormCall {
    stream: u64,
    added: u64,
    weight: u64,
    sum: u64,
    normed: u64,
    epsilon: f32,
    padding: u32,
}

/// The argument of `split_heads`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct HeadsCall {
    joined: u64,
    cosines: u64,
    sines: u64,
    queries: u64,
    keys: u64,
    values: u64,
    rows: u64,
}

/// The argument of `gate`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct GateCall {
    joined: u64,
    gated: u64,
    rows: u64,
}

// SAFETY: Plain numbers in the order of the kernels' structs.
unsafe impl DeviceRepr for NormCall {}
// SAFETY: As above.
unsafe impl DeviceRepr for HeadsCall {}
// SAFETY: As above.
unsafe impl DeviceRepr for GateCall {}

impl HostKernels {
    /// A tensor for a kernel to write.
    fn tensor(&self, like: &Tensor, shape: (usize, usize)) -> Result<Tensor> {
        self.scratch.tensor(shape, like.dtype(), like.device())
    }

    /// Queues a kernel on the stream.
    ///
    /// # Safety
    /// The tensors whose addresses `call` holds have the sizes that the kernel assumes.
    unsafe fn launch<T: DeviceRepr>(
        &self,
        name: &'static str,
        of: (DType, Vec<(&'static str, usize)>),
        (blocks, threads): (usize, usize),
        call: &T,
    ) -> Result<()> {
        let (dtype, mut defines) = of;
        defines.push(("HALVES", usize::from(dtype == DType::F16)));
        let kernels = self.backend.kernels();
        let program = Program { sources: &SOURCES, files: &["decoder.cu"], defines };
        let function = kernels.function(&program, name).map_err(Error::wrap)?;
        let blocks =
            u32::try_from(blocks).map_err(|_| Error::msg(format!("{blocks} blocks of {name}: take less rows")))?;
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads as u32, 1, 1), shared_mem_bytes: 0 };
        let overlaps = kernels.facts().capability >= (9, 0);
        let launch = KernelLaunch { name, function, config, cluster: 1, overlaps };
        // SAFETY: The caller guarantees sizes; candle frees in the order of the stream.
        unsafe { launch.run(self.backend.stream(), call) }.map_err(Error::wrap)
    }
}

/// The address of a contiguous tensor.
fn address(tensor: &Tensor) -> Result<u64> {
    Ok(lend(tensor).map_err(|error| Error::msg(format!("{error:#}")))?.address())
}

/// Whether the kernels take tensors of this type whose rows are whole groups of elements.
fn takes(x: &Tensor, widths: &[usize]) -> bool {
    matches!(x.dtype(), DType::F16 | DType::F32) && widths.iter().all(|width| width.is_multiple_of(TOGETHER))
}

impl Fused for HostKernels {
    fn norm(&self, x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
        rms_norm(&x.contiguous()?, weight, epsilon as f32)
    }

    fn add_and_norm(&self, stream: &Tensor, added: &Tensor, weight: &Tensor, epsilon: f64) -> Result<(Tensor, Tensor)> {
        let (rows, width) = stream.dims2()?;
        if !takes(stream, &[width]) {
            let sum = (stream + added)?;
            let normed = self.norm(&sum, weight, epsilon)?;
            return Ok((sum, normed));
        }
        let (stream, added) = (stream.contiguous()?, added.contiguous()?);
        let (sum, normed) = (self.tensor(&stream, (rows, width))?, self.tensor(&stream, (rows, width))?);
        let call = NormCall {
            stream: address(&stream)?,
            added: address(&added)?,
            weight: address(weight)?,
            sum: address(&sum)?,
            normed: address(&normed)?,
            epsilon: epsilon as f32,
            padding: 0,
        };
        let threads = (width / TOGETHER).next_multiple_of(32).min(512);
        let of = (stream.dtype(), vec![("WIDTH", width), ("THREADS", threads)]);
        // SAFETY: all are rows of this width, and the weight is one.
        unsafe { self.launch("add_and_norm", of, (rows, threads), &call)? };
        Ok((sum, normed))
    }

    fn rotate(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: RopePairs) -> Result<Tensor> {
        // Every row is a batch of one token, with a position of its own.
        let (tokens, heads, head_dim) = x.dims3()?;
        let x = x.contiguous()?.reshape((tokens, heads, 1, head_dim))?;
        let rotated = match pairs {
            RopePairs::Neighbours => rope_i(&x, cos, sin)?,
            RopePairs::Halves => rope(&x, cos, sin)?,
        };
        rotated.reshape((tokens, heads, head_dim))
    }

    fn heads(
        &self,
        joined: &Tensor,
        shape: &AttentionShape,
        (cos, sin): (&Tensor, &Tensor),
        pairs: RopePairs,
    ) -> Result<[Tensor; 3]> {
        let (rows, head_dim) = (joined.dim(0)?, shape.head_dim());
        let (heads, kv_heads) = (shape.query_heads(), shape.kv_heads());
        let joined = joined.contiguous()?;
        if !takes(&joined, &[head_dim]) {
            let part = |first, count| joined.narrow(1, first * head_dim, count * head_dim)?.contiguous();
            let part = |first, count| part(first, count)?.reshape((rows, count, head_dim));
            let rotated = |x: Tensor| self.rotate(&x, cos, sin, pairs);
            let (queries, keys) = (rotated(part(0, heads)?)?, rotated(part(heads, kv_heads)?)?);
            return Ok([queries, keys, part(heads + kv_heads, kv_heads)?]);
        }
        let made = |count| self.tensor(&joined, (rows, count * head_dim))?.reshape((rows, count, head_dim));
        let made = [made(heads)?, made(kv_heads)?, made(kv_heads)?];
        let (cos, sin) = (cos.contiguous()?, sin.contiguous()?);
        let call = HeadsCall {
            joined: address(&joined)?,
            cosines: address(&cos)?,
            sines: address(&sin)?,
            queries: address(&made[0])?,
            keys: address(&made[1])?,
            values: address(&made[2])?,
            rows: rows as u64,
        };
        let neighbours = usize::from(pairs == RopePairs::Neighbours);
        let defines =
            vec![("HEAD_DIM", head_dim), ("QUERY_HEADS", heads), ("KV_HEADS", kv_heads), ("NEIGHBOURS", neighbours)];
        let units = rows * (heads + 2 * kv_heads) * head_dim / TOGETHER;
        // SAFETY: rows of all heads, and half a head of cosines and of sines for each.
        unsafe { self.launch("split_heads", (joined.dtype(), defines), (units.div_ceil(THREADS), THREADS), &call)? };
        Ok(made)
    }

    fn gate(&self, joined: &Tensor, activation: Activation) -> Result<Tensor> {
        let (rows, both) = joined.dims2()?;
        let inner = both / 2;
        let joined = joined.contiguous()?;
        if !takes(&joined, &[inner]) {
            let (gate, up) = (joined.narrow(1, 0, inner)?.contiguous()?, joined.narrow(1, inner, inner)?.contiguous()?);
            return match activation {
                Activation::Silu => gate.silu()? * up,
                Activation::Gelu => gate.gelu()? * up,
            };
        }
        let gated = self.tensor(&joined, (rows, inner))?;
        let call = GateCall { joined: address(&joined)?, gated: address(&gated)?, rows: rows as u64 };
        let of = (joined.dtype(), vec![("INNER", inner), ("GELU", usize::from(activation == Activation::Gelu))]);
        let units = rows * inner / TOGETHER;
        // SAFETY: rows of twice as many elements, and of as many.
        unsafe { self.launch("gate", of, (units.div_ceil(THREADS), THREADS), &call)? };
        Ok(gated)
    }
}
