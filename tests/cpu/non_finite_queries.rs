//! NaN in queries propagates on the CPU, through the cache, the baseline and the oracle.

use kvpack::AttentionShape;
use kvpack::cpu::{Cpu, DenseSegment, exact_attention, plain_attention};

use any_backend::non_finite_queries;

#[test]
fn nan_propagates_through_every_recipe() {
    non_finite_queries::check(&Cpu::new(), |_| true);
}

#[test]
fn policies_do_not_lose_nan() {
    non_finite_queries::check_policies(&Cpu::new());
}

#[test]
fn nan_propagates_through_plain_rows() {
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let rows: Vec<f32> = (0..500 * 64).map(|i| (i as f32 * 0.3).sin()).collect();
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut query = vec![0.5; 128];
        query[70] = value;
        let segment = DenseSegment { keys: &rows, values: &rows, tokens: 500, calibration: None };
        let exact = exact_attention(&shape, &[segment], &query).unwrap();
        assert!(exact.outputs[..64].iter().all(|x| x.is_finite()) && exact.outputs[64..].iter().all(|x| x.is_nan()));
        assert!(exact.lse[0].is_finite() && exact.lse[1].is_nan());
        let plain = plain_attention(&shape, &rows, &rows, 500, &query).unwrap();
        let outputs = plain.outputs();
        assert!(outputs[..64].iter().all(|x| x.is_finite()) && outputs[64..].iter().all(|x| x.is_nan()), "{value}");
        assert!(plain.lse()[0].is_finite() && plain.lse()[1].is_nan(), "{value}");
    }
}
