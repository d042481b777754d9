//! Checks must find what they are there to find: a backend that is right but for one mistake has to fail.

use half::bf16;
use kvpack_device::ElementType;

use super::{Activations, Check, Failure, InputOrder, Kind, LayerCase, ScaleKind, checks};
use crate::backend::{Backend, HostTensor, Product};
use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::linear::QuantizedLinear;
use crate::shape::{GroupSize, Groups};

/// A mistake that kernels make.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    /// Zeros are one less, as version 1 of GPTQ stores them.
    ZerosOfVersionOne,
    /// Groups with an index are read as if they lay in order.
    ForgetsOrder,
    /// Scales are rounded to f16.
    HalvesScales,
    /// The last input is left out.
    DropsLastInput,
    /// The last row is left as it was.
    DropsLastRow,
    /// Activations are integers of 8 bits.
    CoarseActivations,
    /// The last output is one unit of f32 larger in the second run.
    Wavers,
    /// Something is written behind the last element.
    WritesBehind,
    /// bf16 outputs are cut off in place of being rounded.
    CutsBf16,
    /// An infinite activation counts as a large one.
    ClampsInfinite,
    /// An output is NaN.
    YieldsNan,
    /// The last element is missing.
    YieldsLess,
    /// One row is refused.
    RefusesOneRow,
}

struct Mistaken(Mistake);

impl Mistaken {
    fn layer(&self, layer: &QuantizedLinear) -> Result<QuantizedLinear> {
        let (mut groups, mut scales) = (layer.groups().clone(), layer.scales().to_vec());
        let mut zeros = layer.zeros().to_vec();
        match self.0 {
            Mistake::ZerosOfVersionOne => zeros.iter_mut().for_each(|zero| *zero = zero.saturating_sub(1)),
            Mistake::ForgetsOrder => groups = Groups::in_order(layer.shape(), GroupSize::Inputs(groups.size())),
            Mistake::HalvesScales => {
                scales.iter_mut().for_each(|scale| *scale = half::f16::from_f32(*scale).to_f32());
            }
            _ => {}
        }
        QuantizedLinear::new(layer.codes().clone(), groups, scales, zeros)
    }

    fn activations(&self, x: &HostTensor, inputs: usize) -> HostTensor {
        let mut numbers = x.numbers();
        for row in numbers.chunks_exact_mut(inputs) {
            match self.0 {
                Mistake::DropsLastInput => row[inputs - 1] = 0.0,
                Mistake::CoarseActivations => {
                    let largest = row.iter().fold(0.0f32, |largest, number| largest.max(number.abs()));
                    row.iter_mut().for_each(|number| *number = (*number * 127.0 / largest).round() * largest / 127.0);
                }
                Mistake::ClampsInfinite => {
                    row.iter_mut().for_each(|number| *number = number.clamp(-6e4, 6e4).max(-6e4));
                }
                _ => {}
            }
        }
        HostTensor::new(x.element_type(), &numbers)
    }

    /// What it returns, of `count` elements and those behind them.
    fn outputs(&self, outputs: &mut Vec<f32>, before: &[f32], (count, last_row): (usize, usize), run: usize) {
        match self.0 {
            Mistake::DropsLastRow => outputs[count - last_row..count].copy_from_slice(&before[count - last_row..count]),
            Mistake::Wavers if run == 1 => outputs[count - 1] = f32::from_bits(outputs[count - 1].to_bits() + 1),
            Mistake::WritesBehind => outputs[count] += 1.0,
            Mistake::YieldsNan => outputs[0] = f32::NAN,
            Mistake::YieldsLess => drop(outputs.pop()),
            _ => {}
        }
    }
}

impl Backend for Mistaken {
    async fn product(&self, layer: &QuantizedLinear, x: &HostTensor, rows: usize, y: &HostTensor) -> Result<Product> {
        if self.0 == Mistake::RefusesOneRow && rows == 1 {
            return Err(Error::Size { what: "rows", given: 1, most: 0 });
        }
        let outputs = layer.shape().outputs();
        let x = self.activations(x, layer.shape().inputs());
        let exact = HostTensor::new(ElementType::F32, &y.numbers());
        let to = if self.0 == Mistake::CutsBf16 && y.element_type() == ElementType::Bf16 { &exact } else { y };
        let mut product = Cpu.product(&self.layer(layer)?, &x, rows, to).await?;
        for (run, got) in product.runs.iter_mut().enumerate() {
            if self.0 == Mistake::CutsBf16 && y.element_type() == ElementType::Bf16 {
                got.iter_mut().for_each(|x| *x = bf16::from_bits((x.to_bits() >> 16) as u16).to_f32());
            }
            self.outputs(got, &y.numbers(), (rows * outputs, outputs), run);
        }
        Ok(product)
    }

    async fn dequantize(&self, layer: &QuantizedLinear, weights: &HostTensor) -> Result<Vec<f32>> {
        let mut got = Cpu.dequantize(&self.layer(layer)?, weights).await?;
        self.outputs(&mut got, &weights.numbers(), (layer.shape().weights(), layer.shape().inputs()), 0);
        Ok(got)
    }
}

/// The failures of a backend with this mistake in one case.
fn failures(mistake: Mistake, kind: Kind, case: LayerCase) -> Vec<Failure> {
    pollster::block_on(Check::new(kind, case).run(&Mistaken(mistake))).unwrap().failures
}

#[test]
fn every_mistake_is_found() {
    let plain = LayerCase { rows: 2, ..LayerCase::PLAIN };
    let ordered = LayerCase { order: InputOrder::ByActivation, ..plain };
    let single = LayerCase { scales: ScaleKind::Single, ..plain };
    let not_finite = LayerCase { activations: Activations::NotFinite(f32::INFINITY), ..plain };
    for (mistake, case, expected) in [
        (Mistake::ZerosOfVersionOne, plain, "outputs differ"),
        (Mistake::ForgetsOrder, ordered, "outputs differ"),
        (Mistake::HalvesScales, single, "outputs differ"),
        (Mistake::DropsLastInput, plain, "outputs differ"),
        (Mistake::DropsLastRow, plain, "outputs differ"),
        (Mistake::CoarseActivations, plain, "over the limit"),
        (Mistake::Wavers, plain, "1 outputs differ from run to run"),
        (Mistake::WritesBehind, plain, "1 elements behind the last have changed"),
        (Mistake::CutsBf16, LayerCase { y: ElementType::Bf16, ..plain }, "outputs differ"),
        (Mistake::ClampsInfinite, not_finite, "an activation is not finite, and 24 outputs are"),
        (Mistake::YieldsNan, plain, "1 outputs differ"),
        (Mistake::YieldsLess, plain, "came back with 29"),
        (Mistake::RefusesOneRow, LayerCase::PLAIN, "refused: rows is 1"),
    ] {
        let found: Vec<String> = failures(mistake, Kind::Linear, case).iter().map(Failure::to_string).collect();
        assert!(found.iter().any(|found| found.contains(expected)), "{mistake:?}: {found:?}");
        let in_quick_set = checks().into_iter().any(|check| {
            check.is_quick()
                && check.kind() == Kind::Linear
                && !failures(mistake, Kind::Linear, *check.case()).is_empty()
        });
        assert!(in_quick_set, "{mistake:?} passes the quick checks");
    }
}

#[test]
fn mistakes_in_weights_are_found() {
    let plain = LayerCase::PLAIN;
    for (mistake, case, expected) in [
        (Mistake::ZerosOfVersionOne, plain, "weights differ"),
        (Mistake::ForgetsOrder, LayerCase { order: InputOrder::ByActivation, ..plain }, "weights differ"),
        (Mistake::HalvesScales, LayerCase { scales: ScaleKind::Single, ..plain }, "weights differ"),
        (Mistake::DropsLastRow, plain, "256 weights differ"),
        (Mistake::WritesBehind, plain, "1 elements behind the last have changed"),
        (Mistake::YieldsNan, plain, "1 weights differ"),
        (Mistake::YieldsLess, plain, "came back with"),
    ] {
        let found: Vec<String> = failures(mistake, Kind::Dequantize, case).iter().map(Failure::to_string).collect();
        assert!(found.iter().any(|found| found.contains(expected)), "{mistake:?}: {found:?}");
    }
}

#[test]
fn the_reference_passes() {
    for check in checks() {
        let report = pollster::block_on(check.run(&Cpu)).unwrap();
        assert!(report.passed(), "{}: {}", check.name(), report.reason());
    }
}
