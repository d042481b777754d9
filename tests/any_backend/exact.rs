//! Products in f64, for references.

/// The product of two rows. A loop over indices: tests are not optimised, and iterators take ten times as long.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let mut sum = 0.0;
    let mut i = 0;
    while i < a.len() {
        sum += a[i] as f64 * b[i] as f64;
        i += 1;
    }
    sum
}
