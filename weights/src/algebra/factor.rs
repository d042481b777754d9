//! The upper triangular U with `Uᵀ · U = H⁻¹`, whose rows GPTQ spreads errors with.
//!
//! With J that reverses the order, `J·H·J = L·Lᵀ` (Cholesky) gives `H = R·Rᵀ` with the upper triangular `R = J·L·J`, so
//! that `U = R⁻¹ = J·L⁻¹·J`. That is one factorisation and one triangular inverse, n³/3 multiply-adds each or less,
//! where the usual way factors, inverts and factors again.

use rayon::prelude::*;

use super::{View, add_product};

/// Columns that are factored at once.
const BLOCK: usize = 64;

/// Columns of an inverse that are computed at once.
const STRIPE: usize = 8 * BLOCK;

/// U `[n, n]` of a symmetric H `[n, n]`, of which the lower triangle is read. `None` where H is not positive definite.
pub fn inverse_factor(hessian: &[f64], n: usize) -> Option<Vec<f64>> {
    let mut factor = vec![0.0; n * n];
    factor.par_chunks_exact_mut(n).enumerate().for_each(|(row, values)| {
        // The lower triangle of J·H·J is the upper one of H, reversed.
        let of_column = |column: usize| hessian[(n - 1 - column) * n + (n - 1 - row)];
        values[..=row].iter_mut().enumerate().for_each(|(column, value)| *value = of_column(column));
    });
    cholesky(&mut factor, n)?;
    let inverse = lower_inverse(&factor, n);
    drop(factor);
    let mut upper = inverse;
    upper.reverse();
    upper.iter().all(|value| value.is_finite()).then_some(upper)
}

/// The Cholesky factor in place of the lower triangle; what lies above is left alone.
fn cholesky(a: &mut [f64], n: usize) -> Option<()> {
    let mut panel = Vec::new();
    for start in (0..n).step_by(BLOCK) {
        let end = (start + BLOCK).min(n);
        let width = end - start;
        for j in start..end {
            let (above, row) = a.split_at_mut(j * n);
            let row = &mut row[..n];
            for k in start..j {
                let other = &above[k * n..][..n];
                let sum: f64 = (start..k).map(|i| row[i] * other[i]).sum();
                row[k] = (row[k] - sum) / other[k];
            }
            let square = row[j] - (start..j).map(|i| row[i] * row[i]).sum::<f64>();
            if !(square.is_finite() && square > 0.0) {
                return None;
            }
            row[j] = square.sqrt();
        }
        let (done, below) = a.split_at_mut(end * n);
        let triangle = &done[start * n..];
        below.par_chunks_exact_mut(n).for_each(|row| {
            for k in 0..width {
                let other = &triangle[k * n + start..][..width];
                let sum: f64 = (0..k).map(|i| row[start + i] * other[i]).sum();
                row[start + k] = (row[start + k] - sum) / other[k];
            }
        });
        panel.clear();
        below.chunks_exact(n).for_each(|row| panel.extend_from_slice(&row[start..end]));
        // The lower triangle of what is left, in blocks of columns.
        let left = n - end;
        for from in (0..left).step_by(4 * BLOCK) {
            let columns = (left - from).min(4 * BLOCK);
            let rows = View::new(&panel[from * width..], left - from, width, width);
            let others = View::new(&panel[from * width..], columns, width, width).transposed();
            add_product(&mut below[from * n + end + from..], n, -1.0, rows, others);
        }
    }
    Some(())
}

/// The inverse of a lower triangle.
fn lower_inverse(lower: &[f64], n: usize) -> Vec<f64> {
    let mut inverse = vec![0.0; n * n];
    let mut sums = Vec::new();
    for start in (0..n).step_by(BLOCK) {
        let end = (start + BLOCK).min(n);
        let width = end - start;
        // Row block i of the inverse: L_ii⁻¹ · (1 - Σ L_ik · X_k).
        sums.clear();
        sums.resize(width * end, 0.0);
        // Columns of X are 0 above their diagonal.
        for from in (0..start).step_by(STRIPE) {
            let (to, depth) = ((from + STRIPE).min(start), start - from);
            let left = View::new(&lower[start * n + from..], width, depth, n);
            let right = View::new(&inverse[from * n + from..], depth, to - from, n);
            add_product(&mut sums[from..], end, -1.0, left, right);
        }
        for row in 0..width {
            sums[row * end + start + row] = 1.0;
        }
        for row in 0..width {
            let (done, rest) = sums.split_at_mut(row * end);
            let current = &mut rest[..end];
            for k in 0..row {
                let factor = lower[(start + row) * n + start + k];
                let other = &done[k * end..][..end];
                current.iter_mut().zip(other).for_each(|(x, &y)| *x -= factor * y);
            }
            let diagonal = lower[(start + row) * n + start + row];
            current.iter_mut().for_each(|x| *x /= diagonal);
            inverse[(start + row) * n..][..end].copy_from_slice(current);
        }
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positive(n: usize, seed: u64) -> Vec<f64> {
        let mut random = fastrand::Rng::with_seed(seed);
        let root: Vec<f64> = (0..n * n).map(|_| random.f64() - 0.5).collect();
        let mut matrix = vec![0.0; n * n];
        (0..n).for_each(|i| matrix[i * n + i] = 0.1);
        let view = View::new(&root, n, n, n);
        add_product(&mut matrix, n, 1.0, view, view.transposed());
        matrix
    }

    /// U is upper triangular with a positive diagonal, and UᵀU·H is 1.
    #[test]
    fn the_factor_is_that_of_the_inverse() {
        for n in [1, 2, 3, 63, 64, 65, 200, 700] {
            let matrix = positive(n, n as u64);
            let upper = inverse_factor(&matrix, n).unwrap();
            let mut inverse = vec![0.0; n * n];
            let view = View::new(&upper, n, n, n);
            add_product(&mut inverse, n, 1.0, view.transposed(), view);
            let mut one = vec![0.0; n * n];
            add_product(&mut one, n, 1.0, View::new(&inverse, n, n, n), View::new(&matrix, n, n, n));
            for i in 0..n {
                assert!(upper[i * n + i] > 0.0);
                for j in 0..n {
                    assert!(j >= i || upper[i * n + j] == 0.0, "{n}: {i}, {j}");
                    let wanted = if i == j { 1.0 } else { 0.0 };
                    assert!((one[i * n + j] - wanted).abs() < 1e-8, "{n}: {i}, {j}: {}", one[i * n + j]);
                }
            }
        }
    }

    #[test]
    fn what_is_not_positive_definite_has_none() {
        let mut matrix = positive(70, 3);
        matrix[69 * 70 + 69] = -1.0;
        assert!(inverse_factor(&matrix, 70).is_none());
        matrix[69 * 70 + 69] = f64::NAN;
        assert!(inverse_factor(&matrix, 70).is_none());
        assert!(inverse_factor(&[0.0], 1).is_none());
    }
}
