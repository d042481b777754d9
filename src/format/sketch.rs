//! Rows of codebook formats: codes of levels, and sign sketches of their residual (QJL, arXiv 2406.03482; TurboQuant,
//! arXiv 2504.19874, algorithm 2).
//!
//! The sketch of a vector r is `sign(S r)` for a random projection S. If S has m rows of standard normal numbers,
//! `√(π/2)/m · |r| · <S q, sign(S r)>` is an unbiased estimate of `<q, r>`. Here S is `√d · R₂ R₁` with d rows: R₁ is
//! the rotation of the format, R₂ the rotations of a [`Sketch`]. The estimate is then `ρ · <R₂ R₁ q, ± level>`, with
//! the norm ρ = |r| rounded like all norms and the [level of a sketch](sketch_level). It is a codebook of two levels in
//! one more basis. A query is rotated for the levels and once more for the sketch, and no key is rotated back.
//!
//! With levels, r is the residual of the rotated row, `R₁ x − norm · level`, in f32, each step rounded. Without levels,
//! r is `R₁ x`. The field of channel c holds the code of channel c of `R₁ x`, stored signed, below the sign bit of
//! place c of `R₂ r`. The sign bit is set if that place is below 0.

use super::codebook::{renormalized, stored_norm};
use super::{Bits, CodeRange, Codebook, CodebookFormat, Direction, NormRule, Rotation};
use crate::Result;

/// The rotations between the basis of levels and the basis of signs.
///
/// All are randomised, have the order of the format's own rotation and [dealt](Rotation::dealt) channels, and use the
/// seeds `seed`, `seed + 1`, …. There is one rotation where a block is the whole head, and three otherwise (head_dim 80
/// and 96). Fewer do not make every row look normal: with one, inner products of a row with a single non-zero channel
/// were 5 % too large at head_dim 80.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sketch {
    /// Seed of the first rotation.
    pub seed: u32,
}

impl Sketch {
    /// The rotations, in order.
    pub fn rotations(self, order: usize, head_dim: usize) -> impl DoubleEndedIterator<Item = Rotation> {
        let rounds = Self::rounds(order, head_dim) as u32;
        (0..rounds).map(move |round| Rotation::dealt(order, self.seed.wrapping_add(round)))
    }

    /// How many rotations there are.
    pub(crate) const fn rounds(order: usize, head_dim: usize) -> usize {
        if order == head_dim { 1 } else { 3 }
    }
}

/// A row in its stored form.
#[derive(Clone, Debug, PartialEq)]
pub struct CodedRow {
    /// One field per channel.
    pub fields: Vec<u32>,
    /// The norm as scale, by the format's [`NormRule`], and the norm of the residual as minimum, 0 without a sketch.
    pub range: CodeRange,
}

/// The values of a format's fields, indexed by the field with its top bit flipped, as kernels unpack codes.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldLevels {
    /// Relative to the norm.
    pub levels: Vec<f32>,
    /// Values of the sketch, relative to the norm of the residual; empty without a sketch.
    pub signs: Vec<f32>,
}

/// The level of a sketch: `1 / (d · E|u|)`, where u is a channel of a random unit vector of d channels. It is close to
/// `√(π/2)/√d`, the level of projections with independent rows. 0 for a head dimension without kernels.
pub fn sketch_level(head_dim: usize) -> f32 {
    // Of the two levels with the least squared error, the upper one is E|u|.
    let mean =
        Codebook::of_format(Bits::One, head_dim).map_or(f64::INFINITY, |codebook| codebook.centroids()[1].into());
    (1.0 / (head_dim as f64 * mean)) as f32
}

impl CodebookFormat {
    /// Codes, norms and signs of a row that [`CodebookFormat::rotation`] has rotated.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) when the format does not fit a head with this number of channels.
    pub fn encode_row(&self, rotated: &[f32]) -> Result<CodedRow> {
        self.check_head_dim(rotated.len())?;
        Ok(self.encode_checked_row(rotated))
    }

    /// [`CodebookFormat::encode_row`] for a row whose head dimension was checked.
    pub(crate) fn encode_checked_row(&self, rotated: &[f32]) -> CodedRow {
        let stored = stored_norm(rotated);
        let norm = stored.to_f32();
        let codebook =
            self.level_bits().and_then(|bits| Some((middle(bits), Codebook::of_format(bits, rotated.len())?)));
        let mut residual = rotated.to_vec();
        let mut fields = vec![0; rotated.len()];
        let mut levels = vec![0.0; rotated.len()];
        if let Some((middle, codebook)) = codebook {
            for ((field, level), x) in fields.iter_mut().zip(&mut levels).zip(&mut residual) {
                let code = codebook.encode(*x, norm);
                *field = code ^ middle;
                *level = codebook.centroids()[code as usize];
                *x -= norm * *level;
            }
        }
        if self.sketch.is_none() {
            let scale = match self.norms {
                NormRule::Row => norm,
                NormRule::Renormalized => renormalized(stored, &levels).to_f32(),
            };
            return CodedRow { fields, range: CodeRange { scale, min: 0.0 } };
        }
        self.sketch_rotations(rotated.len())
            .for_each(|rotation| rotation.turn_checked(Direction::Forward, &mut residual));
        for (field, x) in fields.iter_mut().zip(&residual) {
            *field |= if *x < 0.0 { middle(self.bits) } else { 0 };
        }
        CodedRow { fields, range: CodeRange { scale: norm, min: stored_norm(&residual).to_f32() } }
    }

    /// The rotations from the basis of the levels to the basis of the signs; none without a sketch.
    pub fn sketch_rotations(&self, head_dim: usize) -> impl DoubleEndedIterator<Item = Rotation> {
        let order = self.rotation.order();
        self.sketch.into_iter().flat_map(move |sketch| sketch.rotations(order, head_dim))
    }

    /// The values of its fields; empty for a head dimension without kernels.
    pub fn field_levels(&self, head_dim: usize) -> FieldLevels {
        let flipped = 0..=self.bits.max_code();
        let codebook = self.level_bits().and_then(|bits| Some((bits, Codebook::of_format(bits, head_dim)?)));
        let level = |field: u32| match &codebook {
            Some((bits, codebook)) => codebook.centroids()[((field & bits.max_code()) ^ middle(*bits)) as usize],
            None => 0.0,
        };
        let levels = flipped.clone().map(|flipped| level(flipped ^ middle(self.bits))).collect();
        let sign =
            |flipped| if flipped >= middle(self.bits) { sketch_level(head_dim) } else { -sketch_level(head_dim) };
        FieldLevels { levels, signs: self.sketch.map_or(Vec::new(), |_| flipped.map(sign).collect()) }
    }
}

/// The top bit of a code.
const fn middle(bits: Bits) -> u32 {
    1 << (bits.count() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::HEAD_DIMS;

    /// Each rotation has signs of its own.
    #[test]
    fn seeds_of_rotations_ascend() {
        let of = |order, head_dim| Sketch { seed: u32::MAX }.rotations(order, head_dim).collect::<Vec<_>>();
        assert_eq!(of(16, 80), [u32::MAX, 0, 1].map(|seed| Rotation::dealt(16, seed)));
        assert_eq!(of(64, 64), [Rotation::dealt(64, u32::MAX)]);
    }

    /// The residual of a row of zeros is not below 0 anywhere.
    #[test]
    fn signs_of_zeros_are_not_set() {
        for format in [CodebookFormat::turboquant_prod(Bits::Two, 64), CodebookFormat::turboquant_prod(Bits::Four, 80)]
        {
            let row = format.encode_row(&vec![0.0; if format.rotation.order() == 64 { 64 } else { 80 }]).unwrap();
            assert!(row.fields.iter().all(|field| field & middle(format.bits) == 0), "{format:?}: {:?}", row.fields);
            assert_eq!(row.range, CodeRange::default());
        }
    }

    /// Normal numbers of variance 1, as sums of twelve uniform ones.
    fn normal(random: &mut fastrand::Rng, count: usize) -> Vec<f32> {
        (0..count).map(|_| (0..12).map(|_| random.f32()).sum::<f32>() - 6.0).collect()
    }

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    }

    /// The values of a stored row.
    fn decode(format: &CodebookFormat, row: &CodedRow) -> Vec<f32> {
        let tables = format.field_levels(row.fields.len());
        let flipped = |field: &u32| (field ^ middle(format.bits)) as usize;
        let mut decoded: Vec<f32> =
            row.fields.iter().map(|field| row.range.min * tables.signs[flipped(field)]).collect();
        format.sketch_rotations(decoded.len()).rev().for_each(|rotation| rotation.unrotate(&mut decoded).unwrap());
        decoded
            .iter_mut()
            .zip(&row.fields)
            .for_each(|(x, field)| *x += row.range.scale * tables.levels[flipped(field)]);
        format.rotation.unrotate(&mut decoded).unwrap();
        decoded
    }

    /// The mean of an inner product over seeds and its standard error, and the exact product. The row is uneven: its
    /// first eighth has four times the spread.
    fn products(bits: Bits, head_dim: usize, seeds: u32) -> (f64, f64, f64) {
        let mut random = fastrand::Rng::with_seed(u64::from(bits.count()) << 10 | head_dim as u64);
        let mut row = normal(&mut random, head_dim);
        row[..head_dim / 8].iter_mut().for_each(|x| *x *= 4.0);
        // Half of the query is the row itself, because levels alone shorten its product with the row most.
        let query: Vec<f32> = normal(&mut random, head_dim).iter().zip(&row).map(|(a, b)| a + b).collect();
        let order = Rotation::largest_order(head_dim);
        let samples: Vec<f64> = (0..seeds)
            .map(|seed| {
                let format = CodebookFormat {
                    bits,
                    rotation: Rotation::randomized(order, 1000 * seed),
                    sketch: Some(Sketch { seed: 1000 * seed + 500 }),
                    norms: NormRule::Row,
                };
                let mut rotated = row.clone();
                format.rotation.rotate(&mut rotated).unwrap();
                dot(&query, &decode(&format, &format.encode_row(&rotated).unwrap()))
            })
            .collect();
        let mean = samples.iter().sum::<f64>() / samples.len() as f64;
        let variance = samples.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (samples.len() - 1) as f64;
        (mean, (variance / samples.len() as f64).sqrt(), dot(&query, &row))
    }

    /// Over many seeds the mean inner product of stored keys is right, within four standard errors and 1 % of the
    /// product. The mean with levels alone is not.
    #[test]
    fn inner_products_are_unbiased() {
        for head_dim in HEAD_DIMS {
            for bits in [Bits::One, Bits::Two, Bits::Three, Bits::Four] {
                let (mean, error, exact) = products(bits, head_dim, 600);
                assert!((mean - exact).abs() < 4.0 * error, "{bits} bits of {head_dim}: {mean} ± {error}, {exact}");
                assert!(error < 0.01 * exact, "{bits} bits of {head_dim}: {error} of {exact}");
            }
        }
        let plain = CodebookFormat::turboquant(Bits::One, 128);
        let mut random = fastrand::Rng::with_seed(9);
        let mut row = normal(&mut random, 128);
        plain.rotation.rotate(&mut row).unwrap();
        let coded = plain.encode_row(&row).unwrap();
        let tables = plain.field_levels(128);
        let near: Vec<f32> = coded.fields.iter().map(|f| coded.range.scale * tables.levels[(f ^ 1) as usize]).collect();
        assert!(dot(&row, &near) < 0.7 * dot(&row, &row), "levels of one bit shorten products by 2/π");
    }

    /// Renormalised rows keep their codes, and their values are as long as the row, within the rounding of two norms.
    #[test]
    fn renormalized_rows_have_the_length_of_the_row() {
        let mut random = fastrand::Rng::with_seed(5);
        for head_dim in HEAD_DIMS {
            for bits in [Bits::One, Bits::Two, Bits::Three, Bits::Four] {
                let published = CodebookFormat::turboquant(bits, head_dim);
                let renormalized = published.renormalized();
                let row = normal(&mut random, head_dim);
                let mut rotated = row.clone();
                published.rotation.rotate(&mut rotated).unwrap();
                let [short, long] = [published, renormalized].map(|format| {
                    let coded = format.encode_row(&rotated).unwrap();
                    (coded.fields.clone(), length_of_levels(&format, &coded))
                });
                assert_eq!(short.0, long.0);
                let length = dot(&row, &row).sqrt();
                assert!((long.1 / length - 1.0).abs() < 1.1e-3, "{bits} bits of {head_dim}: {} of {length}", long.1);
                assert!((short.1 / length - 1.0).abs() > (long.1 / length - 1.0).abs(), "{bits} bits of {head_dim}");
            }
        }
        let zero = CodebookFormat::turboquant(Bits::Two, 64).renormalized().encode_row(&[0.0; 64]).unwrap();
        assert_eq!(zero.range, CodeRange { scale: 0.0, min: 0.0 });
    }

    /// The length of the values of a row without a sketch.
    fn length_of_levels(format: &CodebookFormat, row: &CodedRow) -> f64 {
        let levels = format.field_levels(row.fields.len()).levels;
        let value = |field: &u32| f64::from(row.range.scale * levels[(field ^ middle(format.bits)) as usize]);
        row.fields.iter().map(|field| value(field).powi(2)).sum::<f64>().sqrt()
    }

    /// One bit for the residual reduces the squared error of a product from that of b − 1 bits of levels to about π/2
    /// of it over d.
    #[test]
    fn sketches_estimate_with_the_variance_of_the_paper() {
        for (bits, distortion) in [(Bits::Two, 0.363), (Bits::Three, 0.117), (Bits::Four, 0.0345)] {
            let head_dim = 128;
            let mut random = fastrand::Rng::with_seed(3);
            let format = CodebookFormat::turboquant_prod(bits, head_dim);
            let (mut error, mut power) = (0.0, 0.0);
            for _ in 0..400 {
                let (row, query) = (normal(&mut random, head_dim), normal(&mut random, head_dim));
                let mut rotated = row.clone();
                format.rotation.rotate(&mut rotated).unwrap();
                let near = decode(&format, &format.encode_row(&rotated).unwrap());
                error += (dot(&query, &near) - dot(&query, &row)).powi(2);
                power += dot(&query, &query) * dot(&row, &row);
            }
            // (π/2 − 1) for the part of the query along the residual's signs; theorem 2 bounds it by π/2.
            let bound = std::f64::consts::FRAC_PI_2 * distortion / head_dim as f64;
            assert!(error / power < bound, "{bits} bits: {} of {bound}", error / power);
        }
    }
}
