//! The upper triangular U with `Uᵀ · U = H⁻¹`, whose rows GPTQ spreads errors with.
//!
//! With J that reverses the order, `J·H·J = L·Lᵀ` (Cholesky) gives `H = R·Rᵀ` with the upper triangular `R = J·L·J`, so
//! that `U = R⁻¹ = J·L⁻¹·J`. That is one factorisation and one triangular inverse, n³/3 multiply-adds each or less,
//! where the usual way factors, inverts and factors again.

use std::ops::Range;

use rayon::prelude::*;

use super::{View, add_product, add_product_alone};

/// Columns that are factored at once.
const BLOCK: usize = 64;

/// Columns of a panel.
const PANEL: usize = 4 * BLOCK;

/// Columns of an inverse that one task computes.
const STRIPE: usize = 2 * BLOCK;

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
///
/// Blocks of a panel change the columns of the panel alone. Those behind it change once a panel: each time, all of them
/// come from memory.
fn cholesky(a: &mut [f64], n: usize) -> Option<()> {
    for start in (0..n).step_by(PANEL) {
        let end = (start + PANEL).min(n);
        for from in (start..end).step_by(BLOCK) {
            let to = (from + BLOCK).min(end);
            factor_block(a, n, from, to)?;
            subtract(a, n, from..to, to..end);
        }
        subtract(a, n, start..end, end..n);
    }
    Some(())
}

/// The factor's columns `start..end`, from what the columns before have left.
fn factor_block(a: &mut [f64], n: usize, start: usize, end: usize) -> Option<()> {
    for j in start..end {
        let (above, row) = a.split_at_mut(j * n);
        let row = &mut row[..n];
        for k in start..j {
            let other = &above[k * n..][..n];
            row[k] = (row[k] - dot(&row[start..k], &other[start..k])) / other[k];
        }
        let square = row[j] - dot(&row[start..j], &row[start..j]);
        if !(square.is_finite() && square > 0.0) {
            return None;
        }
        row[j] = square.sqrt();
    }
    let (done, below) = a.split_at_mut(end * n);
    let triangle = &done[start * n..];
    below.par_chunks_exact_mut(n).for_each(|row| {
        let row = &mut row[start..end];
        for k in 0..end - start {
            let other = &triangle[k * n + start..][..=k];
            row[k] = (row[k] - dot(&row[..k], &other[..k])) / other[k];
        }
    });
    Some(())
}

/// Takes what the columns `of` make of the lower triangle from its columns `from`, in blocks.
fn subtract(a: &mut [f64], n: usize, of: Range<usize>, from: Range<usize>) {
    if from.is_empty() {
        return;
    }
    let (first, width) = (from.start, of.len());
    let below = &mut a[first * n..];
    let mut panel = vec![0.0; (n - first) * width];
    let rows = panel.par_chunks_exact_mut(width).zip(below.par_chunks_exact(n));
    rows.for_each(|(to, row)| to.copy_from_slice(&row[of.clone()]));
    for column in from.clone().step_by(4 * BLOCK) {
        let (columns, at) = ((from.end - column).min(4 * BLOCK), column - first);
        let rows = View::new(&panel[at * width..], n - column, width, width);
        let others = View::new(&panel[at * width..], columns, width, width).transposed();
        add_product(&mut below[at * n + column..], n, -1.0, rows, others);
    }
}

/// The product of two rows, in eight sums.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a, b) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum::<f64>() + rest
}

/// The inverse of a lower triangle. Its stripes of columns need nothing of each other, so that each is one task:
/// products with the few rows of a block do not keep many processors busy.
fn lower_inverse(lower: &[f64], n: usize) -> Vec<f64> {
    let starts: Vec<usize> = (0..n).step_by(STRIPE).collect();
    let stripes: Vec<Vec<f64>> = starts.par_iter().map(|&from| inverse_stripe(lower, n, from)).collect();
    let mut inverse = vec![0.0; n * n];
    inverse.par_chunks_exact_mut(n).enumerate().for_each(|(row, values)| {
        for (&from, stripe) in starts.iter().zip(&stripes).take_while(|&(&from, _)| from <= row) {
            let width = STRIPE.min(n - from);
            values[from..from + width].copy_from_slice(&stripe[(row - from) * width..][..width]);
        }
    });
    inverse
}

/// Columns of the inverse from `from` on, at most [`STRIPE`]; its rows begin at `from`, as what lies above is 0.
fn inverse_stripe(lower: &[f64], n: usize, from: usize) -> Vec<f64> {
    let columns = STRIPE.min(n - from);
    let mut stripe = vec![0.0; (n - from) * columns];
    for start in (from..n).step_by(BLOCK) {
        let width = BLOCK.min(n - start);
        // Row block i of the inverse: L_ii⁻¹ · (1 - Σ L_ik · X_k).
        let (done, rest) = stripe.split_at_mut((start - from) * columns);
        let block = &mut rest[..width * columns];
        if start > from {
            let left = View::new(&lower[start * n + from..], width, start - from, n);
            add_product_alone(block, columns, -1.0, left, View::new(done, start - from, columns, columns));
        }
        for row in (0..width).filter(|row| start - from + row < columns) {
            block[row * columns + start - from + row] = 1.0;
        }
        for row in 0..width {
            let (done, rest) = block.split_at_mut(row * columns);
            let current = &mut rest[..columns];
            let factors = &lower[(start + row) * n + start..][..=row];
            for (factor, other) in factors[..row].iter().zip(done.chunks_exact(columns)) {
                current.iter_mut().zip(other).for_each(|(x, &y)| *x -= factor * y);
            }
            current.iter_mut().for_each(|x| *x /= factors[row]);
        }
    }
    stripe
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
