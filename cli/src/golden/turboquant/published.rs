//! TurboQuant as published (arXiv 2504.19874), with dense rotations and norms in f32: what its golden vectors are of.
//!
//! [`quantize_mse`] is algorithm 1: the codec for the least squared error. [`quantize_prod`] is algorithm 2: the same
//! at one bit less, and one sign bit per channel of a random projection of what is left (QJL), which makes inner
//! products with queries unbiased.
//!
//! kvpack's kernels implement the first with Hadamard rotations and f16 norms:
//! [`SegmentFormat::turboquant`](kvpack::SegmentFormat::turboquant).

use kvpack::format::Codebook;
use kvpack::{Error, Result};

/// A dense matrix, row by row, whose rows have as many elements as the vectors it is applied to.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    elements: &'a [f32],
    columns: usize,
}

impl<'a> Matrix<'a> {
    /// A matrix of `columns` columns.
    ///
    /// # Errors
    /// [`Error::Elements`] when the elements do not fill whole rows, or there are none.
    pub fn new(elements: &'a [f32], columns: usize) -> Result<Self> {
        if columns == 0 || elements.is_empty() || !elements.len().is_multiple_of(columns) {
            return Err(Error::Elements {
                what: "a matrix",
                given: elements.len(),
                expected: elements.len().div_ceil(columns.max(1)).max(1) * columns.max(1),
                shape: format!("whole rows of {columns} elements"),
            });
        }
        Ok(Self { elements, columns })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.elements.len() / self.columns
    }

    /// The matrix times a vector of [`Matrix::columns`] elements.
    fn times(&self, x: &[f64]) -> Vec<f64> {
        let row = |row: &[f32]| row.iter().zip(x).map(|(&a, x)| f64::from(a) * x).sum();
        self.elements.chunks_exact(self.columns).map(row).collect()
    }

    /// The transposed matrix times a vector of one element per row.
    fn transposed_times(&self, x: &[f64]) -> Vec<f64> {
        let mut product = vec![0.0; self.columns];
        for (row, x) in self.elements.chunks_exact(self.columns).zip(x) {
            product.iter_mut().zip(row).for_each(|(sum, &a)| *sum += f64::from(a) * x);
        }
        product
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }
}

/// A row in the codec for the least squared error.
#[derive(Clone, Debug, PartialEq)]
pub struct MseRow {
    /// One code per channel of the rotated row.
    pub codes: Vec<u8>,
    /// Norm of the row.
    pub norm: f32,
}

/// Algorithm 1: `y = Π x / |x|`, and for each channel of y the nearest level of the codebook, at a
/// boundary the lower one.
///
/// # Errors
/// [`Error::Elements`] when the rotation is not square or of another size than the row, or when the codebook has more
/// levels than bytes count.
pub fn quantize_mse(row: &[f32], rotation: Matrix<'_>, codebook: &Codebook) -> Result<MseRow> {
    check(row, rotation)?;
    check_square(rotation)?;
    check_codebook(codebook)?;
    let norm = norm(row);
    let turned = rotation.times(&unit(row, norm));
    let code = |y: &f64| codebook.boundaries().iter().filter(|&&boundary| *y > f64::from(boundary)).count() as u8;
    Ok(MseRow { codes: turned.iter().map(code).collect(), norm: norm as f32 })
}

impl MseRow {
    /// The row that the codes stand for: `|x| · Πᵀ level`.
    ///
    /// # Errors
    /// [`Error::Elements`] when the rotation is not square or of another size than the row.
    pub fn reconstruct(&self, rotation: Matrix<'_>, codebook: &Codebook) -> Result<Vec<f32>> {
        check_square(rotation)?;
        let unit = self.unit_reconstruction(rotation, codebook);
        Ok(unit.into_iter().map(|x| (f64::from(self.norm) * x) as f32).collect())
    }

    fn unit_reconstruction(&self, rotation: Matrix<'_>, codebook: &Codebook) -> Vec<f64> {
        let level = |&code: &u8| codebook.centroids().get(usize::from(code)).map_or(0.0, |&level| f64::from(level));
        rotation.transposed_times(&self.codes.iter().map(level).collect::<Vec<_>>())
    }
}

/// A row in the codec for unbiased inner products.
#[derive(Clone, Debug, PartialEq)]
pub struct ProdRow {
    /// The row at one bit less.
    pub mse: MseRow,
    /// For each row of the projection, whether its product with the residual is at least 0.
    pub signs: Vec<bool>,
    /// Norm of the residual of the row of norm 1.
    pub gamma: f32,
}

/// Algorithm 2: [`quantize_mse`], and the signs of `S r` of the residual `r` of the row of norm 1.
///
/// # Errors
/// [`Error::Elements`] when rotation or projection are of another size than the row.
pub fn quantize_prod(
    row: &[f32],
    rotation: Matrix<'_>,
    codebook: &Codebook,
    projection: Matrix<'_>,
) -> Result<ProdRow> {
    check(row, projection)?;
    let mse = quantize_mse(row, rotation, codebook)?;
    let near = mse.unit_reconstruction(rotation, codebook);
    let residual: Vec<f64> = unit(row, norm(row)).iter().zip(near).map(|(x, near)| x - near).collect();
    let gamma = residual.iter().map(|x| x * x).sum::<f64>().sqrt();
    let signs = projection.times(&residual).iter().map(|&x| x >= 0.0).collect();
    Ok(ProdRow { mse, signs, gamma: gamma as f32 })
}

impl ProdRow {
    /// The row whose inner products with queries are those of the original in expectation over the projection:
    /// `x̂_mse + |x| · √(π/2) / m · γ · Sᵀ sign`.
    ///
    /// # Errors
    /// [`Error::Elements`] when rotation or projection are of another size than the row.
    pub fn reconstruct(&self, rotation: Matrix<'_>, codebook: &Codebook, projection: Matrix<'_>) -> Result<Vec<f32>> {
        let near = self.mse.reconstruct(rotation, codebook)?;
        check(&near, projection)?;
        let signs: Vec<f64> = self.signs.iter().map(|&sign| if sign { 1.0 } else { -1.0 }).collect();
        let factor = f64::from(self.mse.norm) * f64::from(self.gamma) * std::f64::consts::FRAC_PI_2.sqrt()
            / self.signs.len() as f64;
        let residual = projection.transposed_times(&signs);
        Ok(near.iter().zip(residual).map(|(&near, x)| (f64::from(near) + factor * x) as f32).collect())
    }
}

fn norm(row: &[f32]) -> f64 {
    row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// The row of norm 1; zeros for zeros.
fn unit(row: &[f32], norm: f64) -> Vec<f64> {
    row.iter().map(|&x| if norm > 0.0 { f64::from(x) / norm } else { 0.0 }).collect()
}

fn check(row: &[f32], matrix: Matrix<'_>) -> Result<()> {
    if row.len() == matrix.columns() {
        return Ok(());
    }
    let shape = format!("a matrix of {} columns", matrix.columns());
    Err(Error::Elements { what: "a row", given: row.len(), expected: matrix.columns(), shape })
}

fn check_codebook(codebook: &Codebook) -> Result<()> {
    match codebook.centroids().len() {
        1..=256 => Ok(()),
        given => {
            Err(Error::Elements { what: "a codebook", given, expected: 256, shape: "codes of 8 bits, or less".into() })
        }
    }
}

fn check_square(matrix: Matrix<'_>) -> Result<()> {
    if matrix.rows() == matrix.columns() {
        return Ok(());
    }
    let (given, expected) = (matrix.elements.len(), matrix.columns * matrix.columns);
    Err(Error::Elements { what: "a rotation", given, expected, shape: format!("{} channels", matrix.columns) })
}

#[cfg(test)]
mod tests {
    use kvpack::format::codebook::CoordinateDensity;

    use super::*;

    const DIMENSION: usize = 64;

    /// Normal numbers of variance 1, by the sum of twelve uniform ones.
    fn normal(random: &mut fastrand::Rng, count: usize) -> Vec<f32> {
        (0..count).map(|_| (0..12).map(|_| random.f32()).sum::<f32>() - 6.0).collect()
    }

    /// A random rotation: Gram-Schmidt on normal rows.
    fn rotation(random: &mut fastrand::Rng) -> Vec<f32> {
        let mut rows: Vec<Vec<f64>> = Vec::new();
        while rows.len() < DIMENSION {
            let mut row: Vec<f64> = normal(random, DIMENSION).into_iter().map(f64::from).collect();
            for other in &rows {
                let along: f64 = row.iter().zip(other).map(|(a, b)| a * b).sum();
                row.iter_mut().zip(other).for_each(|(x, other)| *x -= along * other);
            }
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            rows.push(row.into_iter().map(|x| x / norm).collect());
        }
        rows.into_iter().flatten().map(|x| x as f32).collect()
    }

    /// The mean squared errors of the paper's theorem 1 at 1 to 4 bits, and its bound.
    #[test]
    fn distortion_is_that_of_the_paper() {
        let mut random = fastrand::Rng::with_seed(1);
        let elements = rotation(&mut random);
        let rotation = Matrix::new(&elements, DIMENSION).unwrap();
        for (bits, published) in [(1u32, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)] {
            let codebook = Codebook::lloyd_max(bits, CoordinateDensity::Sphere(DIMENSION));
            let (mut error, mut power) = (0.0, 0.0);
            for _ in 0..300 {
                let row = normal(&mut random, DIMENSION);
                let near = quantize_mse(&row, rotation, &codebook).unwrap().reconstruct(rotation, &codebook).unwrap();
                error += row.iter().zip(&near).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
                power += row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            }
            let distortion = error / power;
            assert!((distortion / published - 1.0).abs() < 0.16, "{bits} bits: {distortion}");
            assert!(distortion < 3f64.sqrt() * std::f64::consts::FRAC_PI_2 * 4f64.powi(-(bits as i32)));
        }
    }

    /// Over many projections the inner product is right in the mean; that of the codec alone is not.
    #[test]
    fn inner_products_are_unbiased() {
        let mut random = fastrand::Rng::with_seed(2);
        let elements = rotation(&mut random);
        let rotation = Matrix::new(&elements, DIMENSION).unwrap();
        let codebook = Codebook::lloyd_max(1, CoordinateDensity::Sphere(DIMENSION));
        let row = normal(&mut random, DIMENSION);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
        // The query is the row itself, whose products the codec alone shortens most.
        let exact = dot(&row, &row);
        let samples: Vec<f64> = (0..800)
            .map(|_| {
                let projection = normal(&mut random, DIMENSION * DIMENSION);
                let projection = Matrix::new(&projection, DIMENSION).unwrap();
                let quantized = quantize_prod(&row, rotation, &codebook, projection).unwrap();
                dot(&row, &quantized.reconstruct(rotation, &codebook, projection).unwrap())
            })
            .collect();
        let mean = samples.iter().sum::<f64>() / samples.len() as f64;
        let variance = samples.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / samples.len() as f64;
        let deviation = (variance / samples.len() as f64).sqrt();
        assert!((mean - exact).abs() < 4.0 * deviation, "{mean} ± {deviation}, {exact}");
        let alone = quantize_mse(&row, rotation, &codebook).unwrap().reconstruct(rotation, &codebook).unwrap();
        assert!((dot(&row, &alone) - exact).abs() > 20.0 * deviation);
    }

    #[test]
    fn sizes_are_checked() {
        let identity = [1.0, 0.0, 0.0, 1.0];
        let codebook = Codebook::from_centroids(vec![-1.0, 1.0]);
        let square = Matrix::new(&identity, 2).unwrap();
        assert!(Matrix::new(&identity, 3).is_err());
        assert!(Matrix::new(&[], 2).is_err());
        assert!(quantize_mse(&[1.0; 3], square, &codebook).is_err());
        assert!(quantize_mse(&[1.0; 4], Matrix::new(&identity, 4).unwrap(), &codebook).is_err());
        assert_eq!(
            quantize_mse(&[0.0; 2], square, &codebook).unwrap().reconstruct(square, &codebook).unwrap(),
            [0.0; 2]
        );
    }

    #[test]
    fn codes_without_a_level() {
        let identity: Vec<f32> = (0..16).map(|i| f32::from(u8::from(i % 5 == 0))).collect();
        let rotation = Matrix::new(&identity, 4).unwrap();
        for levels in [0, 257] {
            let codebook = Codebook::from_centroids((0..levels).map(|i| i as f32).collect());
            assert!(matches!(quantize_mse(&[1.0; 4], rotation, &codebook), Err(Error::Elements { .. })), "{levels}");
        }
    }
}
