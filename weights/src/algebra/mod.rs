//! Linear algebra in f64: products, and the factor that GPTQ wants.

mod factor;

pub use factor::inverse_factor;

use gemm_common::Parallelism;

/// A matrix in a slice: element (i, j) is at `start + i · row_stride + j · column_stride`.
#[derive(Clone, Copy)]
pub struct View<'a> {
    values: &'a [f64],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> View<'a> {
    /// `rows` of `columns`, one row `stride` elements behind the other.
    ///
    /// # Panics
    /// When the slice is too short.
    pub fn new(values: &'a [f64], rows: usize, columns: usize, stride: usize) -> Self {
        let view = Self { values, rows, columns, row_stride: stride, column_stride: 1 };
        assert!(view.fits(), "{rows} x {columns} by {stride} of {} elements", values.len());
        view
    }

    /// Rows for columns.
    pub fn transposed(self) -> Self {
        Self {
            values: self.values,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }

    fn fits(&self) -> bool {
        let last = |count: usize, stride: usize| count.saturating_sub(1).checked_mul(stride);
        let last = last(self.rows, self.row_stride).zip(last(self.columns, self.column_stride));
        let last = last.and_then(|(row, column)| row.checked_add(column));
        self.rows == 0 || self.columns == 0 || last.is_some_and(|last| last < self.values.len())
    }
}

/// `c += factor · a · b` on all processors, where row i of c begins at `i · stride`.
///
/// # Panics
/// When shapes do not fit each other, or c is too short.
pub fn add_product(c: &mut [f64], stride: usize, factor: f64, a: View<'_>, b: View<'_>) {
    add(c, stride, factor, (a, b), Parallelism::Rayon(0));
}

/// [`add_product`] on the processor of the caller, who keeps the others busy.
///
/// # Panics
/// As [`add_product`].
pub fn add_product_alone(c: &mut [f64], stride: usize, factor: f64, a: View<'_>, b: View<'_>) {
    add(c, stride, factor, (a, b), Parallelism::None);
}

fn add(c: &mut [f64], stride: usize, factor: f64, (a, b): (View<'_>, View<'_>), parallelism: Parallelism) {
    let (rows, columns, depth) = (a.rows, b.columns, a.columns);
    assert!(b.rows == depth && columns <= stride.max(1), "{rows} x {depth} times {} x {columns}", b.rows);
    if rows == 0 || columns == 0 || depth == 0 {
        return;
    }
    assert!((rows - 1) * stride + columns <= c.len(), "{rows} x {columns} by {stride} of {} elements", c.len());
    let gemm = gemm_f64::gemm::f64::get_gemm_fn();
    let signed = |stride: usize| stride as isize;
    // The kernel wants columns of c in a row: cᵀ += bᵀ · aᵀ.
    // SAFETY: the views fit their slices (`View::new`), c has place for rows · columns by its stride (above), and c is
    // borrowed exclusively, so it overlaps neither a nor b.
    unsafe {
        gemm(
            columns,
            rows,
            depth,
            c.as_mut_ptr(),
            signed(stride),
            1,
            true,
            b.values.as_ptr(),
            signed(b.row_stride),
            signed(b.column_stride),
            a.values.as_ptr(),
            signed(a.row_stride),
            signed(a.column_stride),
            1.0,
            factor,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_parts_are_those_of_sums() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut values = |count: usize| (0..count).map(|_| random.f64() - 0.5).collect::<Vec<_>>();
        for (rows, columns, depth) in [(1, 1, 1), (3, 5, 7), (17, 33, 9), (65, 64, 130)] {
            let (a, b) = (values(rows * (depth + 3)), values(columns * (depth + 1)));
            let stride = columns + 2;
            let start = values(rows * stride);
            let mut c = start.clone();
            let of_b = View::new(&b, columns, depth, depth + 1).transposed();
            add_product(&mut c, stride, -2.0, View::new(&a, rows, depth, depth + 3), of_b);
            for i in 0..rows {
                for j in 0..stride {
                    let sum: f64 =
                        (0..depth).map(|k| a[i * (depth + 3) + k] * b[j.min(columns - 1) * (depth + 1) + k]).sum();
                    let wanted = start[i * stride + j] - if j < columns { 2.0 * sum } else { 0.0 };
                    assert!((c[i * stride + j] - wanted).abs() < 1e-12, "{rows} {columns} {depth} at {i}, {j}");
                }
            }
        }
    }
}
