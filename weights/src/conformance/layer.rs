//! A layer and its activations, from a few words that say how they are made.

use half::f16;
use kvpack_device::ElementType;

use crate::backend::HostTensor;
use crate::codes::PackedCodes;
use crate::error::Result;
use crate::linear::QuantizedLinear;
use crate::shape::{Bits, GroupSize, Groups, LinearShape};

/// How the groups of a layer lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputOrder {
    /// Neighbouring inputs form a group.
    Natural,
    /// Groups are formed along another order, as with act-order.
    ByActivation,
}

/// Which numbers the scales are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleKind {
    /// All of them are f16.
    Half,
    /// f16 holds them, below its smallest normal number, 2^-14.
    Subnormal,
    /// f16 does not hold them.
    Single,
}

/// What the activations are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activations {
    /// From -1 to 1.
    Even,
    /// From `-factor` to `factor`, and 0 in every third run of 32 inputs.
    Scaled {
        /// The largest.
        factor: f32,
    },
    /// From -1 to 1, but for three of each row that are this many times as large.
    Outliers {
        /// How many times.
        factor: f32,
    },
    /// From -1 to 1, but for one of each row, which is this infinity or NaN.
    NotFinite(f32),
}

/// A layer, and the activations that it is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerCase {
    /// Bits of a code.
    pub bits: Bits,
    /// N.
    pub outputs: usize,
    /// K.
    pub inputs: usize,
    /// Inputs of a group.
    pub group: usize,
    /// How they lie.
    pub order: InputOrder,
    /// Its scales.
    pub scales: ScaleKind,
    /// Rows of activations.
    pub rows: usize,
    /// Their type.
    pub x: ElementType,
    /// The type of the outputs.
    pub y: ElementType,
    /// Their numbers.
    pub activations: Activations,
    /// Whether it belongs to the set that covers every kernel once in the least time.
    pub quick: bool,
}

impl LayerCase {
    /// One row of f16 times 12 outputs of 256 inputs at 4 bits, the outputs in f32. Other cases say how they differ.
    pub const PLAIN: Self = Self {
        bits: Bits::Four,
        outputs: 12,
        inputs: 256,
        group: 128,
        order: InputOrder::Natural,
        scales: ScaleKind::Half,
        rows: 1,
        x: ElementType::F16,
        y: ElementType::F32,
        activations: Activations::Even,
        quick: false,
    };

    /// The same among those that cover every kernel once.
    #[must_use]
    pub const fn quick(self) -> Self {
        Self { quick: true, ..self }
    }

    /// The layer. Its codes look random, and some zeros are the one that no code reaches.
    ///
    /// # Errors
    /// [`Error::Size`](crate::Error::Size) for sizes that no layer has.
    pub fn layer(&self) -> Result<QuantizedLinear> {
        let shape = LinearShape::new(self.outputs, self.inputs)?;
        let size = GroupSize::Inputs(self.group);
        let groups = match self.order {
            InputOrder::Natural => Groups::in_order(shape, size),
            InputOrder::ByActivation => {
                // Input k is the (7 · k)-th by its activations; the sizes are no multiples of 7.
                let of_group = size.inputs(self.inputs);
                let group = |input: usize| (7 * input % self.inputs / of_group) as u32;
                Groups::indexed(shape, size, (0..self.inputs).map(group).collect())?
            }
        };
        let codes: Vec<u8> =
            random(shape.weights(), self.bits.largest() + 1, 1).into_iter().map(|code| code as u8).collect();
        let count = self.outputs * groups.count();
        let scale = |x: f32| match self.scales {
            ScaleKind::Half => f16::from_f32(0.01 * (x + 1.5)).to_f32(),
            // 64 to 320 times 2^-24.
            ScaleKind::Subnormal => (128.0 * (x + 1.5)).round() / (1 << 24) as f32,
            ScaleKind::Single => 0.01 * (x + 1.5),
        };
        let zeros = random(count, self.bits.largest() + 2, 3).into_iter().map(|zero| zero as u16).collect();
        let scales = even(count, 2).into_iter().map(scale).collect();
        QuantizedLinear::new(PackedCodes::pack(self.bits, shape, &codes)?, groups, scales, zeros)
    }

    /// The activations `[rows, K]`.
    pub(super) fn activations(&self) -> HostTensor {
        let mut numbers = even(self.rows * self.inputs, 4);
        for row in numbers.chunks_exact_mut(self.inputs) {
            match self.activations {
                Activations::Even => {}
                Activations::Scaled { factor } => row.iter_mut().enumerate().for_each(|(input, number)| {
                    *number *= if input / 32 % 3 == 1 { 0.0 } else { factor };
                }),
                Activations::Outliers { factor } => {
                    [5, 700, 1999].iter().for_each(|input| row[input % self.inputs] *= factor);
                }
                Activations::NotFinite(number) => row[77 % self.inputs] = number,
            }
        }
        HostTensor::new(self.x, &numbers)
    }

    /// What the outputs hold before a product, with some elements behind them.
    pub(super) fn outputs_before(&self) -> HostTensor {
        HostTensor::new(self.y, &even(self.rows * self.outputs + 6, 5))
    }

    /// What the weights hold before they are dequantised, with some elements behind them.
    pub(super) fn weights_before(&self) -> HostTensor {
        HostTensor::new(ElementType::F16, &even(self.outputs * self.inputs + 10, 5))
    }

    /// What of it is in the name of a check: lower case letters, digits and dashes.
    pub(super) fn name(&self, rows: Option<usize>) -> String {
        let mut name = format!("{}bit-{}x{}-g{}", self.bits.count(), self.outputs, self.inputs, self.group);
        if let Some(rows) = rows {
            let row = if rows == 1 { "row" } else { "rows" };
            name += &format!("-{rows}{row}-{}-to-{}", type_name(self.x), type_name(self.y));
        }
        if self.order == InputOrder::ByActivation {
            name += "-act-order";
        }
        match self.scales {
            ScaleKind::Half => {}
            ScaleKind::Subnormal => name += "-subnormal-scales",
            ScaleKind::Single => name += "-f32-scales",
        }
        match self.activations {
            Activations::Even => {}
            Activations::Scaled { factor } => name += &format!("-scaled-{factor:e}"),
            Activations::Outliers { factor } => name += &format!("-outliers-{factor:e}"),
            Activations::NotFinite(number) => name += if number.is_nan() { "-nan" } else { "-infinite" },
        }
        name
    }

    /// Its sizes, for people.
    pub(super) fn subject(&self, rows: Option<usize>) -> String {
        let layer = format!("{}, {} × {}", self.bits, self.outputs, self.inputs);
        match rows {
            Some(1) => format!("1 row, {layer}"),
            Some(rows) => format!("{rows} rows, {layer}"),
            None => layer,
        }
    }
}

const fn type_name(of: ElementType) -> &'static str {
    match of {
        ElementType::F32 => "f32",
        ElementType::F16 => "f16",
        ElementType::Bf16 => "bf16",
    }
}

/// Numbers below `below` that look random.
fn random(count: usize, below: u32, seed: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state % below
    };
    (0..count).map(|_| next()).collect()
}

/// Numbers from -1 to 1 that look random.
fn even(count: usize, seed: u32) -> Vec<f32> {
    random(count, 1 << 20, seed).into_iter().map(|x| (x as f32 / (1 << 19) as f32) - 1.0).collect()
}
