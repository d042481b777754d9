//! Quantisers against the textbook: one column at a time, with the inverse of what is left of the Hessian.

use kvpack_weights::quantize::{
    AwqOptions, Clip, ColumnOrder, GptaqOptions, GptqOptions, Grid, Hessian, Matrix, OutOfRange, PairedHessian,
    ScaleType, Shrinkage, Symmetry, awq, awq_scaled, awq_scales, gptaq, gptq, round_to_nearest,
};
use kvpack_weights::{Bits, Error, GroupSize, QuantizedLinear};

use crate::normal;

const BLOCK: usize = 128;

/// A layer and its inputs.
struct Case {
    outputs: usize,
    inputs: usize,
    tokens: usize,
    weights: Vec<f32>,
    activations: Vec<f32>,
}

impl Case {
    /// Inputs that resemble each other, some of them much larger than others.
    fn new(outputs: usize, inputs: usize, tokens: usize, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let weights = normal(&mut random, outputs * inputs);
        let mut activations = normal(&mut random, tokens * inputs);
        for row in activations.chunks_exact_mut(inputs) {
            let shared = random.f32() - 0.5;
            row.iter_mut().enumerate().for_each(|(k, x)| *x = (*x + shared) * if k % 7 == 3 { 8.0 } else { 1.0 });
        }
        Self { outputs, inputs, tokens, weights, activations }
    }

    fn w(&self) -> Matrix<'_> {
        Matrix::new(self.outputs, self.inputs, &self.weights).unwrap()
    }

    fn x(&self) -> Matrix<'_> {
        Matrix::new(self.tokens, self.inputs, &self.activations).unwrap()
    }

    fn hessian(&self) -> Hessian {
        let mut hessian = Hessian::new(self.inputs).unwrap();
        // In two parts.
        let (first, second) = self.activations.split_at(self.tokens / 2 * self.inputs);
        for part in [first, second] {
            hessian.add(Matrix::new(part.len() / self.inputs, self.inputs, part).unwrap()).unwrap();
        }
        assert_eq!(hessian.tokens(), self.tokens);
        hessian
    }

    /// The damped Hessian.
    fn damped(&self, damping: f64) -> Vec<f64> {
        let n = self.inputs;
        let mut h = product(&self.activations, &self.activations, n);
        let mean = (0..n).map(|i| h[i * n + i]).sum::<f64>() / n as f64;
        (0..n).for_each(|i| h[i * n + i] += damping * mean);
        h
    }

    /// Mean square difference of the outputs.
    fn loss(&self, weights: &[f64]) -> f64 {
        loss(&self.activations, &self.weights, &self.activations, weights, self.inputs)
    }
}

/// aᵀ · b of rows of n.
fn product(a: &[f32], b: &[f32], n: usize) -> Vec<f64> {
    let mut sum = vec![0.0; n * n];
    for (a, b) in a.chunks_exact(n).zip(b.chunks_exact(n)) {
        for (i, &a) in a.iter().enumerate() {
            b.iter().enumerate().for_each(|(j, &b)| sum[i * n + j] += f64::from(a) * f64::from(b));
        }
    }
    sum
}

/// Mean square difference of two layers on two sets of inputs.
fn loss(x: &[f32], w: &[f32], other_x: &[f32], other_w: &[f64], n: usize) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for (x, other_x) in x.chunks_exact(n).zip(other_x.chunks_exact(n)) {
        for (w, other_w) in w.chunks_exact(n).zip(other_w.chunks_exact(n)) {
            let y: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            let other: f64 = other_x.iter().zip(other_w).map(|(&x, &w)| f64::from(x) * w).sum();
            sum += (y - other).powi(2);
            count += 1;
        }
    }
    sum / f64::from(count)
}

/// The inverse by Gauss and Jordan.
fn inverse(matrix: &[f64], n: usize) -> Vec<f64> {
    let mut a = matrix.to_vec();
    let mut inverse: Vec<f64> = (0..n * n).map(|at| if at / n == at % n { 1.0 } else { 0.0 }).collect();
    for pivot in 0..n {
        let factor = a[pivot * n + pivot];
        for j in 0..n {
            a[pivot * n + j] /= factor;
            inverse[pivot * n + j] /= factor;
        }
        for i in (0..n).filter(|&i| i != pivot) {
            let factor = a[i * n + pivot];
            for j in 0..n {
                a[i * n + j] -= factor * a[pivot * n + j];
                inverse[i * n + j] -= factor * inverse[pivot * n + j];
            }
        }
    }
    inverse
}

/// Removes row and column j from what the inverse is of.
fn eliminate(inverse: &mut [f64], n: usize, j: usize) {
    let row = inverse[j * n..][..n].to_vec();
    for a in 0..n {
        for b in 0..n {
            inverse[a * n + b] -= row[a] * row[b] / row[j];
        }
    }
}

/// Scale and zero of a group, as GPTQ fits them.
fn fit(weights: &[f64], bits: Bits, symmetry: Symmetry) -> (f64, f64) {
    let largest = f64::from(bits.largest());
    let low = weights.iter().fold(0.0f64, |low, &w| low.min(w));
    let high = weights.iter().fold(0.0f64, |high, &w| high.max(w));
    match symmetry {
        Symmetry::Asymmetric => {
            let scale = f64::from(((high - low) / largest) as f32);
            (scale, (-low / scale).round_ties_even())
        }
        Symmetry::Symmetric => (f64::from((2.0 * high.max(-low) / largest) as f32), f64::from(bits.middle())),
    }
}

/// The codes of one row: GPTQ, or GPTAQ where C is given.
fn textbook(weights: &[f64], h: &[f64], cross: Option<&[f64]>, size: usize, bits: Bits, symmetry: Symmetry) -> Vec<u8> {
    let n = weights.len();
    let mut w = weights.to_vec();
    let mut left = inverse(h, n);
    let (mut at_block, mut levels) = (w.clone(), (0.0, 0.0));
    let mut codes = Vec::new();
    for j in 0..n {
        if j % BLOCK == 0 {
            at_block.copy_from_slice(&w);
        }
        if j % size == 0 {
            levels = fit(&at_block[j..(j + size).min(n)], bits, symmetry);
        }
        let (scale, zero) = levels;
        let code = ((w[j] / scale).round_ties_even() + zero).clamp(0.0, f64::from(bits.largest()));
        codes.push(code as u8);
        let (value, error) = (w[j], (w[j] - scale * (code - zero)) / left[j * n + j]);
        (j + 1..n).for_each(|k| w[k] -= error * left[j * n + k]);
        eliminate(&mut left, n, j);
        if let Some(cross) = cross {
            for k in j + 1..n {
                let moved: f64 = (j + 1..n).map(|i| cross[j * n + i] * left[i * n + k]).sum();
                w[k] += value * moved;
            }
        }
    }
    codes
}

fn grid(bits: Bits, group: GroupSize, symmetry: Symmetry) -> Grid {
    Grid { bits, group, symmetry, scales: ScaleType::F32 }
}

fn doubles(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x.into()).collect()
}

#[test]
fn gptq_is_the_textbook_algorithm() {
    let cases = [
        (5, 20, GroupSize::Row, Bits::Three, Symmetry::Asymmetric),
        (5, 40, GroupSize::Inputs(8), Bits::Four, Symmetry::Asymmetric),
        (4, 30, GroupSize::Inputs(13), Bits::Two, Symmetry::Symmetric),
        (3, 300, GroupSize::Inputs(32), Bits::Four, Symmetry::Asymmetric),
        (3, 290, GroupSize::Inputs(200), Bits::Four, Symmetry::Symmetric),
        (2, 140, GroupSize::Row, Bits::Eight, Symmetry::Symmetric),
    ];
    for (number, (outputs, inputs, group, bits, symmetry)) in cases.into_iter().enumerate() {
        let case = Case::new(outputs, inputs, 2 * inputs + 100, number as u64);
        let got = gptq(case.w(), &case.hessian(), &GptqOptions::new(grid(bits, group, symmetry))).unwrap();
        let h = case.damped(0.01);
        let size = group.inputs(inputs);
        let rows = case.weights.chunks_exact(inputs);
        let want: Vec<u8> = rows.flat_map(|w| textbook(&doubles(w), &h, None, size, bits, symmetry)).collect();
        assert_eq!(got.linear.codes().unpack(), want, "case {number}");
    }
}

#[test]
fn gptaq_is_the_textbook_algorithm() {
    for (number, (inputs, group, alpha)) in
        [(20, GroupSize::Row, 1.0), (150, GroupSize::Inputs(32), 0.25)].into_iter().enumerate()
    {
        let (bits, symmetry) = (Bits::Four, Symmetry::Asymmetric);
        let case = Case::new(4, inputs, 3 * inputs, 50 + number as u64);
        let full = disturbed(&case.activations, 60 + number as u64);
        let options = GptaqOptions { alpha, gptq: GptqOptions::new(grid(bits, group, symmetry)) };
        let got = gptaq(case.w(), &paired(&case, &full), &options).unwrap();
        let difference: Vec<f32> = full.iter().zip(&case.activations).map(|(full, x)| full - x).collect();
        let mut cross = product(&difference, &case.activations, inputs);
        cross.iter_mut().for_each(|x| *x *= alpha);
        let (h, size) = (case.damped(0.01), group.inputs(inputs));
        let rows = case.weights.chunks_exact(inputs);
        let want: Vec<u8> = rows.flat_map(|w| textbook(&doubles(w), &h, Some(&cross), size, bits, symmetry)).collect();
        assert_eq!(got.linear.codes().unpack(), want, "case {number}");
        // Without asymmetry it is GPTQ.
        let none = GptaqOptions { alpha: 0.0, ..options };
        let plain = gptq(case.w(), &case.hessian(), &options.gptq).unwrap();
        assert_eq!(gptaq(case.w(), &paired(&case, &full), &none).unwrap().linear, plain.linear);
        assert_ne!(got.linear, plain.linear);
    }
}

/// What a model in full precision might have at the same place.
fn disturbed(activations: &[f32], seed: u64) -> Vec<f32> {
    let noise = normal(&mut fastrand::Rng::with_seed(seed), activations.len());
    activations.iter().zip(noise).map(|(x, noise)| 1.1 * x + 0.2 * noise).collect()
}

fn paired(case: &Case, full: &[f32]) -> PairedHessian {
    let mut moments = PairedHessian::new(case.inputs).unwrap();
    moments.add(case.x(), Matrix::new(case.tokens, case.inputs, full).unwrap()).unwrap();
    moments
}

/// Act-order is GPTQ on permuted inputs.
#[test]
fn act_order_permutes_and_puts_back() {
    let case = Case::new(4, 96, 300, 5);
    let n = case.inputs;
    let options = GptqOptions {
        order: ColumnOrder::Activations,
        ..GptqOptions::new(grid(Bits::Four, GroupSize::Inputs(16), Symmetry::Asymmetric))
    };
    let ordered = gptq(case.w(), &case.hessian(), &options).unwrap().linear;
    let h = product(&case.activations, &case.activations, n);
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| h[b * n + b].total_cmp(&h[a * n + a]));
    let permuted = |values: &[f32]| values.chunks_exact(n).flat_map(|row| order.iter().map(|&k| row[k])).collect();
    let other = Case { weights: permuted(&case.weights), activations: permuted(&case.activations), ..case };
    let natural = gptq(other.w(), &other.hessian(), &GptqOptions { order: ColumnOrder::Natural, ..options }).unwrap();
    let mut back = vec![0; n];
    order.iter().enumerate().for_each(|(at, &input)| back[input] = at as u32);
    assert_eq!(ordered, natural.linear.permuted(&back).unwrap());
    assert!(ordered.groups().index().is_some());
}

/// Babai's bound: without clipping, e·H·eᵀ is the sum of squares of the report, and at most Σ (s / 2)² / U_jj².
#[test]
fn nothing_is_clamped_where_ranges_are_widened() {
    for (group, symmetry, bits) in [
        (GroupSize::Inputs(32), Symmetry::Asymmetric, Bits::Three),
        (GroupSize::Inputs(32), Symmetry::Symmetric, Bits::Three),
        (GroupSize::Row, Symmetry::Asymmetric, Bits::Three),
        (GroupSize::Inputs(140), Symmetry::Asymmetric, Bits::Three),
    ] {
        let case = Case::new(4, 170, 400, 9);
        let n = case.inputs;
        let options = GptqOptions::new(grid(bits, group, symmetry));
        let clamped = gptq(case.w(), &case.hessian(), &options).unwrap();
        assert!(clamped.report.clamped > 0, "{group:?} {symmetry:?}");
        let options = GptqOptions { out_of_range: OutOfRange::Widened, ..options };
        let widened = gptq(case.w(), &case.hessian(), &options).unwrap();
        assert_eq!(widened.report.clamped, 0, "{group:?} {symmetry:?}");
        let h = case.damped(0.01);
        let quantized = widened.linear.dequantize::<f64>();
        let mut square = 0.0;
        for (w, q) in case.weights.chunks_exact(n).zip(quantized.chunks_exact(n)) {
            let e: Vec<f64> = w.iter().zip(q).map(|(&w, q)| f64::from(w) - q).collect();
            let rows = h.chunks_exact(n).zip(&e);
            square += rows.map(|(row, e_i)| e_i * row.iter().zip(&e).map(|(h, e)| h * e).sum::<f64>()).sum::<f64>();
        }
        assert!((square / widened.report.error - 1.0).abs() < 1e-6, "{square} {}", widened.report.error);
        let (mut left, mut bound) = (inverse(&h, n), 0.0);
        let groups = widened.linear.groups();
        for j in 0..n {
            let scales = widened.linear.scales().chunks_exact(groups.count()).map(|row| f64::from(row[groups.of(j)]));
            bound += scales.map(|scale| (scale / 2.0).powi(2) / left[j * n + j]).sum::<f64>();
            eliminate(&mut left, n, j);
        }
        assert!(square <= bound * (1.0 + 1e-9), "{square} beyond {bound}");
    }
}

#[test]
fn calibrated_methods_beat_rounding() {
    let case = Case::new(16, 128, 400, 11);
    for (bits, symmetry) in [(Bits::Four, Symmetry::Asymmetric), (Bits::Three, Symmetry::Symmetric)] {
        let grid = Grid { scales: ScaleType::F16, ..grid(bits, GroupSize::Inputs(32), symmetry) };
        let of = |linear: &QuantizedLinear| case.loss(&linear.dequantize());
        let rounded = of(&round_to_nearest(case.w(), &grid).unwrap());
        let options = GptqOptions::new(grid);
        let with_gptq = of(&gptq(case.w(), &case.hessian(), &options).unwrap().linear);
        let ordered = GptqOptions { order: ColumnOrder::Activations, ..options };
        let ordered = of(&gptq(case.w(), &case.hessian(), &ordered).unwrap().linear);
        let unscaled = |clip| {
            let awq = awq(case.w(), case.x(), &AwqOptions { grid, clip }).unwrap();
            let weights = awq.linear.dequantize::<f64>();
            let weights: Vec<f64> =
                weights.iter().enumerate().map(|(at, w)| w / f64::from(awq.search.scales[at % case.inputs])).collect();
            (case.loss(&weights), awq.search.losses[awq.search.best])
        };
        let ((with_awq, told), (clipped, _)) = (unscaled(Clip::Never), unscaled(Clip::Searched));
        println!("{rounded} {with_gptq} {ordered} {with_awq} {clipped}");
        assert!(with_gptq < 0.85 * rounded && ordered < 0.85 * rounded, "{rounded} {with_gptq} {ordered}");
        assert!(with_awq < 0.9 * rounded && clipped < with_awq, "{rounded} {with_awq} {clipped}");
        assert!((with_awq / told - 1.0).abs() < 1e-6, "{with_awq} {told}");
    }
}

/// GPTAQ gives what the full model computes from its own inputs; GPTQ what the layer gives for the inputs it meets.
#[test]
fn gptaq_comes_nearer_to_the_full_model() {
    let case = Case::new(16, 64, 800, 13);
    let full = disturbed(&case.activations, 14);
    let options = GptqOptions::new(grid(Bits::Four, GroupSize::Inputs(32), Symmetry::Asymmetric));
    let of = |linear: QuantizedLinear| {
        loss(&full, &case.weights, &case.activations, &linear.dequantize::<f64>(), case.inputs)
    };
    let plain = of(gptq(case.w(), &case.hessian(), &options).unwrap().linear);
    let [quarter, whole] = [0.25, 1.0].map(|alpha| {
        of(gptaq(case.w(), &paired(&case, &full), &GptaqOptions { alpha, gptq: options }).unwrap().linear)
    });
    assert!(quarter < plain && whole < plain, "{plain} {quarter} {whole}");
}

#[test]
fn damping_grows_until_there_is_a_factor() {
    // One token: the rank is 1.
    let mut case = Case::new(4, 64, 2, 17);
    case.activations.copy_within(..64, 64);
    let grid = grid(Bits::Four, GroupSize::Inputs(32), Symmetry::Asymmetric);
    let options = GptqOptions { damping: 1e-19, ..GptqOptions::new(grid) };
    let quantized = gptq(case.w(), &case.hessian(), &options).unwrap();
    assert!(quantized.report.damping > 1e-19 && quantized.report.damping < 1e-10, "{:?}", quantized.report);
    let refused = gptq(case.w(), &case.hessian(), &GptqOptions { damping: f64::NAN, ..options });
    assert!(matches!(refused, Err(Error::Value { what: "damping", .. })), "{refused:?}");
    let refused = gptq(case.w(), &Hessian::new(64).unwrap(), &options);
    assert!(matches!(refused, Err(Error::Value { .. })), "{refused:?}");
}

/// With fewer tokens than inputs, what inputs share by chance is not made up for: other tokens of the same kind lose
/// less. With many tokens it changes next to nothing.
#[test]
fn chance_is_not_made_up_for() {
    let inputs = 256;
    let unseen = Case::new(1, inputs, 4000, 91);
    let loss = |case: &Case, shrinkage: Shrinkage| {
        let grid = grid(Bits::Three, GroupSize::Inputs(64), Symmetry::Asymmetric);
        let options = GptqOptions { shrinkage, order: ColumnOrder::Activations, ..GptqOptions::new(grid) };
        let quantized = gptq(case.w(), &case.hessian(), &options).unwrap();
        let weights = quantized.linear.dequantize::<f32>();
        let change: Vec<f32> = weights.iter().zip(&case.weights).map(|(q, w)| q - w).collect();
        let of_token = |x: &[f32]| -> f64 {
            let product = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(w * x)).sum::<f64>().powi(2);
            change.chunks_exact(inputs).map(product).sum()
        };
        unseen.activations.chunks_exact(inputs).map(of_token).sum::<f64>()
    };
    let few = Case::new(16, inputs, 64, 90);
    let (all, shrunk) = (loss(&few, Shrinkage::Never), loss(&few, Shrinkage::ByTokens));
    assert!(shrunk < 0.8 * all, "{shrunk} and {all}");
    let many = Case::new(16, inputs, 20_000, 92);
    let (all, shrunk) = (loss(&many, Shrinkage::Never), loss(&many, Shrinkage::ByTokens));
    assert!((shrunk / all - 1.0).abs() < 0.05, "{shrunk} and {all}");
}

#[test]
fn dead_inputs_get_no_weight() {
    let mut case = Case::new(3, 40, 100, 19);
    case.activations.iter_mut().enumerate().filter(|(at, _)| [4, 17].contains(&(at % 40))).for_each(|(_, x)| *x = 0.0);
    let options = GptqOptions::new(grid(Bits::Four, GroupSize::Inputs(8), Symmetry::Asymmetric));
    let quantized = gptq(case.w(), &case.hessian(), &options).unwrap();
    assert_eq!(quantized.report.dead_inputs, 2);
    let weights = quantized.linear.dequantize::<f32>();
    let is_dead = |at: usize| [4, 17].contains(&(at % 40));
    assert!(weights.iter().enumerate().all(|(at, &w)| w.is_finite() && (!is_dead(at) || w == 0.0)));
}

/// Dead inputs change nothing for the others: not with activations in another unit, and not if they are left out.
#[test]
fn dead_inputs_change_no_other() {
    let mut case = Case::new(4, 40, 30, 23);
    let is_dead = |at: usize| at % 5 == 1;
    let dead = |(at, _): &(usize, &mut f32)| is_dead(*at);
    case.activations.iter_mut().enumerate().filter(dead).for_each(|(_, x)| *x = 0.0);
    case.weights.iter_mut().enumerate().filter(dead).for_each(|(_, w)| *w = 0.0);
    let live = |values: &[f32]| {
        let live = values.iter().enumerate().filter(|(at, _)| !is_dead(*at));
        live.map(|(_, &x)| x).collect::<Vec<f32>>()
    };
    let others = Case { inputs: 32, weights: live(&case.weights), activations: live(&case.activations), ..case };
    for (order, shrinkage, group) in [
        (ColumnOrder::Natural, Shrinkage::Never, GroupSize::Row),
        (ColumnOrder::Natural, Shrinkage::ByTokens, GroupSize::Row),
        (ColumnOrder::Activations, Shrinkage::ByTokens, GroupSize::Row),
        (ColumnOrder::Activations, Shrinkage::Never, GroupSize::Inputs(6)),
    ] {
        let grid = grid(Bits::Four, group, Symmetry::Asymmetric);
        let options = GptqOptions { order, shrinkage, ..GptqOptions::new(grid) };
        let quantized = |case: &Case| gptq(case.w(), &case.hessian(), &options).unwrap().linear.dequantize::<f32>();
        let of_all = quantized(&case);
        if group == GroupSize::Row {
            assert_eq!(live(&of_all), quantized(&others), "{order:?} {shrinkage:?}");
        }
        for factor in [1.0 / 4096.0, 4096.0] {
            let activations = case.activations.iter().map(|x| x * factor).collect();
            let scaled = Case { weights: case.weights.clone(), activations, ..case };
            assert_eq!(quantized(&scaled), of_all, "{order:?} {shrinkage:?} {factor}");
        }
    }
}

#[test]
fn scales_of_inputs_are_positive() {
    let case = Case::new(2, 8, 10, 29);
    let grid = grid(Bits::Four, GroupSize::Row, Symmetry::Asymmetric);
    for clip in [Clip::Never, Clip::Searched] {
        for scale in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY] {
            let mut scales = [1.0; 8];
            scales[3] = scale;
            let refused = awq_scaled(case.w(), case.x(), &scales, &AwqOptions { grid, clip });
            assert!(matches!(refused, Err(Error::Value { index: 3, .. })), "{scale}: {refused:?}");
        }
    }
}

/// Groups of zeros, of one sign and of tiny weights have finite scales, and scales in f16 are those that are stored.
#[test]
fn odd_groups_are_quantised() {
    let rows: Vec<f32> = [0.0, 1.0, -1.0, 1e-30, 3e4].into_iter().flat_map(|w| [w; 32]).collect();
    let weights = Matrix::new(5, 32, &rows).unwrap();
    for symmetry in [Symmetry::Symmetric, Symmetry::Asymmetric] {
        for bits in Bits::ALL {
            let grid = Grid { bits, group: GroupSize::Inputs(16), symmetry, scales: ScaleType::F16 };
            let linear = round_to_nearest(weights, &grid).unwrap();
            for (w, q) in rows.iter().zip(linear.dequantize::<f32>()) {
                // A symmetric range of 2^b levels has none for its maximum, and a scale in f16 is off by 2^-11 of it.
                let step = f64::from(w.abs()) * 2.0 / f64::from(bits.largest()) + 1e-6;
                assert!(f64::from((w - q).abs()) <= 0.57 * step, "{bits} {symmetry:?}: {w} became {q}");
            }
            assert!(linear.scales().iter().all(|&scale| half::f16::from_f32(scale).to_f32() == scale && scale > 0.0));
        }
    }
}

/// The range of a group of one sign begins at 0, also that of a short last group.
#[test]
fn groups_of_one_sign_keep_their_weights() {
    let inputs = 130;
    let rows: Vec<f32> =
        (0..inputs).map(|at| if at < 128 { (at as f32 * 0.7).sin() } else { 0.5 + at as f32 / 1e4 }).collect();
    let (weights, negative) = (Matrix::new(1, inputs, &rows).unwrap(), rows.iter().map(|w| -w).collect::<Vec<_>>());
    let x: Vec<f32> = (0..4 * inputs).map(|at| (at as f32 * 0.3).cos()).collect();
    let grid = Grid {
        bits: Bits::Four,
        group: GroupSize::Inputs(128),
        symmetry: Symmetry::Asymmetric,
        scales: ScaleType::F16,
    };
    for (weights, rows) in [(weights, &rows), (Matrix::new(1, inputs, &negative).unwrap(), &negative)] {
        let scales = awq_scales(&[weights], Matrix::new(4, inputs, &x).unwrap(), &grid).unwrap();
        assert!(scales.losses.iter().all(|loss| loss.is_finite()));
        let ones = vec![1.0; inputs];
        let linear =
            awq_scaled(weights, Matrix::new(4, inputs, &x).unwrap(), &ones, &AwqOptions { grid, clip: Clip::Never })
                .unwrap();
        for (w, q) in rows.iter().zip(linear.dequantize::<f32>()).skip(128) {
            assert!((w - q).abs() < 0.02, "{w} became {q}");
        }
    }
    let none = awq_scales(&[], Matrix::new(4, inputs, &x).unwrap(), &grid);
    assert!(matches!(none, Err(Error::Size { given: 0, .. })), "{none:?}");
}

#[test]
fn non_finite_values_are_refused() {
    for value in [f32::NAN, f32::INFINITY] {
        let values = [0.0, value];
        let refused = Matrix::new(1, 2, &values);
        assert!(matches!(refused, Err(Error::NonFinite { index: 1, .. })), "{refused:?}");
    }
    assert!(matches!(Matrix::new(0, 2, &[]), Err(Error::Size { .. })));
    assert!(matches!(Matrix::new(1, 2, &[0.0]), Err(Error::Elements { .. })));
}

/// Groups of no inputs have one.
#[test]
fn groups_have_inputs() {
    let grid = grid(Bits::Four, GroupSize::Inputs(0), Symmetry::Asymmetric);
    let linear = round_to_nearest(Matrix::new(1, 3, &[1.0, 2.0, 3.0]).unwrap(), &grid).unwrap();
    assert_eq!((linear.groups().size(), linear.groups().count()), (1, 3));
}
