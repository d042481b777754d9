//! Sizes of a layer: outputs, inputs, bits and groups.

use std::fmt;

use crate::error::{Error, Result, check_elements};

/// The most outputs or inputs of a layer. The largest vocabularies have 2^18 entries.
pub const MOST_FEATURES: usize = 1 << 24;

/// The most weights of a layer.
pub const MOST_WEIGHTS: u64 = 1 << 36;

/// Bits of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bits {
    /// Codes 0 to 3.
    Two,
    /// Codes 0 to 7. 32 codes fill 3 words.
    Three,
    /// Codes 0 to 15.
    Four,
    /// Codes 0 to 255.
    Eight,
}

impl Bits {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Two, Self::Three, Self::Four, Self::Eight];

    /// Codes of `bits` bits.
    ///
    /// # Errors
    /// [`Error::Bits`] for other numbers than 2, 3, 4 and 8.
    pub fn new(bits: u64) -> Result<Self> {
        Self::ALL.into_iter().find(|known| u64::from(known.count()) == bits).ok_or(Error::Bits { given: bits })
    }

    /// How many they are.
    pub fn count(self) -> u32 {
        match self {
            Self::Two => 2,
            Self::Three => 3,
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// The largest code, 2^b - 1.
    pub fn largest(self) -> u32 {
        (1 << self.count()) - 1
    }

    /// The zero of symmetric ranges, 2^(b - 1).
    pub fn middle(self) -> u32 {
        1 << (self.count() - 1)
    }

    /// The 32-bit words that a dense bit stream of `codes` codes fills, rounded up.
    pub fn words(self, codes: usize) -> usize {
        // No overflow: a layer has at most MOST_FEATURES inputs.
        (codes * self.count() as usize).div_ceil(32)
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bits", self.count())
    }
}

/// Outputs N and inputs K of a layer `y = x · Wᵀ` with W `[N, K]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearShape {
    outputs: usize,
    inputs: usize,
}

impl LinearShape {
    /// A layer from `inputs` to `outputs` features.
    ///
    /// # Errors
    /// [`Error::Size`] for sizes that are 0, or larger than [`MOST_FEATURES`] or [`MOST_WEIGHTS`].
    pub fn new(outputs: usize, inputs: usize) -> Result<Self> {
        for (what, given) in [("the number of outputs", outputs), ("the number of inputs", inputs)] {
            if given == 0 || given > MOST_FEATURES {
                return Err(Error::Size { what, given: given as u64, most: MOST_FEATURES as u64 });
            }
        }
        let weights = outputs as u64 * inputs as u64;
        if weights > MOST_WEIGHTS || usize::try_from(weights).is_err() {
            return Err(Error::Size { what: "outputs times inputs", given: weights, most: MOST_WEIGHTS });
        }
        Ok(Self { outputs, inputs })
    }

    /// N, the rows of W.
    pub fn outputs(self) -> usize {
        self.outputs
    }

    /// K, the columns of W.
    pub fn inputs(self) -> usize {
        self.inputs
    }

    /// N · K.
    pub fn weights(self) -> usize {
        self.outputs * self.inputs
    }
}

impl fmt::Display for LinearShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a layer of {} outputs and {} inputs", self.outputs, self.inputs)
    }
}

/// How many inputs of a row share a scale and a zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupSize {
    /// All inputs; checkpoints write -1.
    Row,
    /// This many, at least 1; the last group may be shorter.
    Inputs(usize),
}

impl GroupSize {
    /// As checkpoints write it: -1 for a whole row.
    ///
    /// # Errors
    /// [`Error::Config`] for other numbers below 1, and above [`MOST_FEATURES`].
    pub fn new(given: i64) -> Result<Self> {
        match given {
            -1 => Ok(Self::Row),
            given => match usize::try_from(given) {
                Ok(inputs @ 1..=MOST_FEATURES) => Ok(Self::Inputs(inputs)),
                _ => Err(Error::Config {
                    what: "group_size".into(),
                    reason: format!(
                        "{given} is no group size; allowed are -1 for a whole row, or 1 to {MOST_FEATURES}"
                    ),
                }),
            },
        }
    }

    /// As checkpoints write it.
    pub fn written(self) -> i64 {
        match self {
            Self::Row => -1,
            Self::Inputs(inputs) => inputs as i64,
        }
    }

    /// Inputs of a group in rows of `inputs`, which is at least 1.
    pub fn inputs(self, inputs: usize) -> usize {
        match self {
            Self::Row => inputs,
            // 0 would divide by zero, and inputs are at least 1.
            Self::Inputs(size) => size.clamp(1, inputs),
        }
    }
}

/// The group of each input.
///
/// There are `ceil(K / size)` groups. In order, input k is in group `k / size`. With act-order, GPTQ forms groups along
/// another order of the inputs and stores the group of each (`g_idx`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    inputs: usize,
    size: usize,
    index: Option<Vec<u32>>,
}

impl Groups {
    /// Groups of neighbouring inputs.
    pub fn in_order(shape: LinearShape, size: GroupSize) -> Self {
        Self { inputs: shape.inputs(), size: size.inputs(shape.inputs()), index: None }
    }

    /// Groups by an index of K elements. An index that is in order is not kept.
    ///
    /// # Errors
    /// [`Error::Elements`] and [`Error::Value`] for an index of another length, and for groups that do not exist.
    pub fn indexed(shape: LinearShape, size: GroupSize, index: Vec<u32>) -> Result<Self> {
        check_elements("the group index", index.len(), shape.inputs(), || shape.to_string())?;
        let mut groups = Self::in_order(shape, size);
        let count = groups.count();
        if let Some(at) = index.iter().position(|&group| group as usize >= count) {
            return Err(Error::Value {
                what: "the group of input",
                index: at,
                given: index[at].to_string(),
                allowed: format!("0 to {}", count - 1),
            });
        }
        if index.iter().enumerate().any(|(input, &group)| input / groups.size != group as usize) {
            groups.index = Some(index);
        }
        Ok(groups)
    }

    /// The inputs that they divide.
    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.inputs.div_ceil(self.size)
    }

    /// Inputs of a group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The group of an input.
    ///
    /// # Panics
    /// For an input that the layer does not have, where groups are indexed.
    pub fn of(&self, input: usize) -> usize {
        match &self.index {
            None => input / self.size,
            Some(index) => index[input] as usize,
        }
    }

    /// The group of each input, where they are not in order.
    pub fn index(&self) -> Option<&[u32]> {
        self.index.as_deref()
    }
}
