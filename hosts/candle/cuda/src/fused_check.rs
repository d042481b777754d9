//! The kernels between products against the same in f32 on the CPU.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};
use kvpack::AttentionShape;
use kvpack::cpu::nmse;
use kvpack_cli::{Activation, Fused, RopePairs};

use crate::fused::HostKernels;

/// The largest error: that of rounding a result to f16.
const LARGEST: f64 = 2e-7;

const EPSILON: f64 = 1e-5;

fn on_cpu(x: &Tensor) -> Result<Tensor> {
    Ok(x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?)
}

/// The largest error of tensors against those expected.
fn error(pairs: &[(Tensor, Tensor)]) -> Result<f64> {
    pairs.iter().try_fold(0f64, |largest, (given, expected)| {
        let expected: Vec<f64> = expected.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f64::from).collect();
        Ok(largest.max(nmse(&on_cpu(given)?.flatten_all()?.to_vec1::<f32>()?, &expected)))
    })
}

/// Compares sums and norms, heads and gates in f16 and f32. False where they differ.
pub fn run(kernels: &HostKernels, device: &Device) -> Result<bool> {
    let mut passed = true;
    for dtype in [DType::F16, DType::F32] {
        let random = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, device)?.to_dtype(dtype);
        let mut report = |what: String, error: f64| {
            let verdict = if error <= LARGEST { "ok" } else { "FAILED" };
            passed &= error <= LARGEST;
            println!("{what} in {dtype:?}: NMSE {error:.1e} (at most {LARGEST:.0e}): {verdict}");
        };
        for (rows, width) in [(1, 576), (3, 4096), (300, 5120), (2, 16384), (2, 100)] {
            let (stream, added, weight) = (random(&[rows, width])?, random(&[rows, width])?, random(&[width])?);
            let given = kernels.add_and_norm(&stream, &added, &weight, EPSILON)?;
            let sum = on_cpu(&(&stream + &added)?)?;
            let by = (sum.sqr()?.mean_keepdim(D::Minus1)? + EPSILON)?.sqrt()?;
            let normed = sum.broadcast_div(&by)?.broadcast_mul(&on_cpu(&weight)?)?;
            report(format!("sum and norm, {rows} × {width}"), error(&[(given.0, sum), (given.1, normed)])?);
        }
        for (rows, heads, kv_heads, head_dim) in [(1, 9, 3, 64), (5, 32, 8, 128), (70, 4, 4, 80), (3, 2, 1, 256)] {
            let (shape, half) = (AttentionShape::new(heads, kv_heads, head_dim)?, head_dim / 2);
            let joined = random(&[rows, (heads + 2 * kv_heads) * head_dim])?;
            let angles = random(&[rows, 1, half])?;
            let (cos, sin) = (angles.cos()?, angles.sin()?);
            for pairs in [RopePairs::Halves, RopePairs::Neighbours] {
                let given = kernels.heads(&joined, &shape, (&cos, &sin), pairs)?;
                let expected = turned(&joined, (heads, kv_heads, head_dim), (&cos, &sin), pairs)?;
                let pairs_of: Vec<_> = given.into_iter().zip(expected).collect();
                report(format!("{heads}/{kv_heads} × {head_dim}, {rows} rows, {pairs:?}"), error(&pairs_of)?);
            }
        }
        for (rows, inner) in [(1, 1536), (7, 11008), (260, 160), (2, 20)] {
            if dtype == DType::F16 && inner < 100 {
                continue; // candle's own kernels round in between
            }
            let joined = random(&[rows, 2 * inner])?;
            let (gate, up) = (on_cpu(&joined.narrow(1, 0, inner)?)?, on_cpu(&joined.narrow(1, inner, inner)?)?);
            for (activation, expected) in [(Activation::Silu, gate.silu()?), (Activation::Gelu, gate.gelu()?)] {
                let given = kernels.gate(&joined, activation)?;
                report(format!("gate, {rows} × {inner}, {activation:?}"), error(&[(given, (expected * &up)?)])?);
            }
        }
    }
    Ok(passed)
}

/// Queries, keys and values, the former two rotated, in f32.
fn turned(
    joined: &Tensor,
    (heads, kv_heads, head_dim): (usize, usize, usize),
    (cos, sin): (&Tensor, &Tensor),
    pairs: RopePairs,
) -> Result<Vec<Tensor>> {
    let (joined, cos, sin, half) = (on_cpu(joined)?, on_cpu(cos)?, on_cpu(sin)?, head_dim / 2);
    let rows = joined.dim(0)?;
    let parts = [(0, heads, true), (heads, kv_heads, true), (heads + kv_heads, kv_heads, false)];
    let part = |(first, count, turns): (usize, usize, bool)| -> Result<Tensor> {
        let x = joined.narrow(1, first * head_dim, count * head_dim)?;
        if !turns {
            return Ok(x.contiguous()?.reshape((rows, count, head_dim))?);
        }
        let (split, axis) = match pairs {
            RopePairs::Neighbours => (x.contiguous()?.reshape((rows, count, half, 2))?, 3),
            RopePairs::Halves => (x.contiguous()?.reshape((rows, count, 2, half))?, 2),
        };
        let (a, b) = (split.narrow(axis, 0, 1)?.squeeze(axis)?, split.narrow(axis, 1, 1)?.squeeze(axis)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
        Ok(Tensor::stack(&[first, second], axis)?.reshape((rows, count, head_dim))?)
    };
    parts.into_iter().map(part).collect()
}
