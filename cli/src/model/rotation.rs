//! Rotary position encoding, and what the layers take of a step.

use candle_core::{Device, Tensor};

use super::config::RopePairs;

/// The most positions whose angles the host computes: a step of decoding then needs no kernels for them.
const FEW_POSITIONS: usize = 256;

/// What the layers take of a step.
#[derive(Clone)]
pub struct Inputs {
    /// `[tokens, width]`.
    pub(super) stream: Tensor,
    pub(super) rotations: Rotations,
}

/// Rotations of the positions of a chunk in all layers.
#[derive(Clone)]
pub struct Rotations {
    pub(super) global: Rotation,
    /// Those of local layers.
    pub(super) local: Option<Rotation>,
}

/// Cosine and sine of the positions of a chunk, `[tokens, 1, head_dim / 2]`.
#[derive(Clone)]
pub(super) struct Rotation {
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
}
impl Inputs {
    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.stream.dims().first().copied().unwrap_or(0)
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let rotations = [Some(&self.rotations.global), self.rotations.local.as_ref()].into_iter().flatten();
        std::iter::once(&self.stream).chain(rotations.flat_map(|rotation| [&rotation.cos, &rotation.sin]))
    }

    /// The same in memory of its own, which [`Inputs::set`] writes.
    ///
    /// # Errors
    /// Those of the device.
    pub fn copied(&self) -> candle_core::Result<Self> {
        let rotation = |of: &Rotation| -> candle_core::Result<Rotation> {
            Ok(Rotation { cos: of.cos.copy()?, sin: of.sin.copy()? })
        };
        let local = self.rotations.local.as_ref().map(rotation).transpose()?;
        let rotations = Rotations { global: rotation(&self.rotations.global)?, local };
        Ok(Self { stream: self.stream.copy()?, rotations })
    }

    /// Takes the elements of others of the same shapes.
    ///
    /// # Errors
    /// When the shapes differ, and those of the device.
    pub fn set(&self, others: &Self) -> candle_core::Result<()> {
        self.tensors().zip(others.tensors()).try_for_each(|(to, from)| to.slice_set(&from.contiguous()?, 0, 0))
    }
}

impl Rotation {
    /// The rotation of tokens at these positions, on the device and in the type of a tensor.
    pub(super) fn new(frequencies: &[f32], positions: &[usize], of: &Tensor) -> candle_core::Result<Self> {
        let angles =
            positions.iter().flat_map(|&position| frequencies.iter().map(move |frequency| position as f32 * frequency));
        let (angles, shape): (Vec<f32>, _) = (angles.collect(), (positions.len(), 1, frequencies.len()));
        if positions.len() <= FEW_POSITIONS {
            let of = |function: fn(f32) -> f32| {
                let made = angles.iter().map(|&angle| function(angle)).collect::<Vec<_>>();
                Tensor::from_vec(made, shape, &Device::Cpu)?.to_dtype(of.dtype())?.to_device(of.device())
            };
            return Ok(Self { cos: of(f32::cos)?, sin: of(f32::sin)? });
        }
        let angles = Tensor::from_vec(angles, shape, of.device())?;
        Ok(Self { cos: angles.cos()?.to_dtype(of.dtype())?, sin: angles.sin()?.to_dtype(of.dtype())? })
    }

    /// Rotary position encoding of `[tokens, heads, head_dim]`.
    pub(super) fn apply(&self, x: &Tensor, pairs: RopePairs) -> candle_core::Result<Tensor> {
        let (tokens, heads, head_dim) = x.dims3()?;
        let half = head_dim / 2;
        let (pairs, axis) = match pairs {
            RopePairs::Neighbours => (x.reshape((tokens, heads, half, 2))?, 3),
            RopePairs::Halves => (x.reshape((tokens, heads, 2, half))?, 2),
        };
        let (a, b) = (pairs.narrow(axis, 0, 1)?.squeeze(axis)?, pairs.narrow(axis, 1, 1)?.squeeze(axis)?);
        let turned_a = (a.broadcast_mul(&self.cos)? - b.broadcast_mul(&self.sin)?)?;
        let turned_b = (a.broadcast_mul(&self.sin)? + b.broadcast_mul(&self.cos)?)?;
        Tensor::stack(&[turned_a, turned_b], axis)?.reshape((tokens, heads, head_dim))
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    /// Each pair turns by position · frequency, whichever elements form it.
    #[test]
    fn pairs_turn_by_their_position() {
        let angles = Tensor::new(&[[[0.5f32, 2.0]]], &Device::Cpu).unwrap();
        let rotation = Rotation { cos: angles.cos().unwrap(), sin: angles.sin().unwrap() };
        let x = Tensor::new(&[[[1.0f32, 2.0, 3.0, 4.0]]], &Device::Cpu).unwrap();
        let turn = |a: f32, b: f32, angle: f32| {
            let (sin, cos) = angle.sin_cos();
            (a * cos - b * sin, a * sin + b * cos)
        };
        let apply = |pairs| rotation.apply(&x, pairs).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let ((a, b), (c, d)) = (turn(1.0, 2.0, 0.5), turn(3.0, 4.0, 2.0));
        let near = |given: Vec<f32>, expected: [f32; 4]| given.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6);
        assert!(near(apply(RopePairs::Neighbours), [a, b, c, d]));
        let ((a, c), (b, d)) = (turn(1.0, 3.0, 0.5), turn(2.0, 4.0, 2.0));
        assert!(near(apply(RopePairs::Halves), [a, b, c, d]));
    }
}
