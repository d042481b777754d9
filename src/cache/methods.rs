//! The methods that recipes name.

use std::fmt;

use super::Recipe;
use super::evictions::Eviction;
use super::parsed::{Parsed, did_you_mean};
use crate::format::{AffineFormat, AttentionShape, Bits, Grouping, SegmentFormat, TensorFormat};

/// A named method of recipes: a published one, or a baseline.
#[derive(Clone, Copy, Debug)]
pub struct Method {
    /// The name in recipes.
    pub name: &'static str,
    /// The widths that it takes, as in `name:4`. Empty for a method without widths.
    pub bits: &'static [Bits],
    /// The storage of keys and values.
    pub stores: &'static str,
    /// Its source.
    pub source: &'static str,
    recipe: fn(Bits, &AttentionShape) -> Recipe,
}

/// Number of newest tokens that stay in f16 unless a recipe sets it: the residual window of KIVI.
const DEFAULT_WINDOW: usize = 128;

/// All methods. A recipe is one of them with options, see [`ModelRecipe`](super::ModelRecipe).
pub const METHODS: &[Method] = &[
    Method { name: "f16", bits: &[], stores: "f16", source: "the baseline", recipe: |_, _| Recipe::f16() },
    Method {
        name: "int8",
        bits: &[],
        stores: "8-bit codes, one range per token; packed as tokens arrive",
        source: "a baseline",
        recipe: |_, _| per_token(Bits::Eight),
    },
    Method {
        name: "int8-symmetric",
        bits: &[],
        stores: "8-bit codes about 0, one scale per token; packed as tokens arrive",
        source: "a baseline",
        recipe: |_, _| symmetric(Grouping::Token),
    },
    Method {
        name: "int8-symmetric-channel",
        bits: &[],
        stores: "8-bit codes about 0, one scale per channel and tile",
        source: "a baseline",
        recipe: |_, _| symmetric(Grouping::ChannelTokens(128)).with_window(DEFAULT_WINDOW),
    },
    Method {
        name: "int4",
        bits: &[],
        stores: "4-bit codes, one range per token; packed as tokens arrive",
        source: "a baseline",
        recipe: |_, _| per_token(Bits::Four),
    },
    Method {
        name: "calibquant",
        bits: &[Bits::Eight, Bits::Four, Bits::Two, Bits::One],
        stores: "one range per channel and span, shrunk at 1 bit",
        source: "CalibQuant, arXiv 2502.14882",
        recipe: |bits, _| Recipe::calibquant(bits).with_window(DEFAULT_WINDOW),
    },
    Method {
        name: "saw-int4",
        bits: &[],
        stores: "4-bit codes, one range per token, keys rotated by Hadamard blocks of 16; packed as tokens arrive",
        source: "SAW-INT4, arXiv 2604.19157",
        recipe: |_, _| Recipe::pack_all(SegmentFormat::saw_int4()),
    },
    Method {
        name: "turboquant",
        bits: &[Bits::Four, Bits::Three, Bits::Two, Bits::One],
        stores: "randomly rotated, codes of a Lloyd-Max codebook, one norm per token; packed as tokens arrive",
        source: "TurboQuant (mse), arXiv 2504.19874",
        recipe: |bits, shape| Recipe::pack_all(SegmentFormat::turboquant(bits, shape.head_dim())),
    },
    Method {
        name: "turboquant-renormalized",
        bits: &[Bits::Four, Bits::Three, Bits::Two, Bits::One],
        stores: "as turboquant, with norms that make the decoded row as long as the original",
        source: "TurboQuant (mse), arXiv 2504.19874, and a correction",
        recipe: |bits, shape| Recipe::pack_all(SegmentFormat::turboquant_renormalized(bits, shape.head_dim())),
    },
    Method {
        name: "turboquant-prod",
        bits: &[Bits::Four, Bits::Three, Bits::Two],
        stores: "K: turboquant at one bit less and a 1-bit sketch of the rest, V: turboquant; packed as tokens arrive",
        source: "TurboQuant (prod), arXiv 2504.19874",
        recipe: |bits, shape| Recipe::pack_all(SegmentFormat::turboquant_prod(bits, shape.head_dim())),
    },
    Method {
        name: "qjl",
        bits: &[],
        stores: "K: a 1-bit sketch and a norm per token, V: 4-bit codes, one range per token; packed as tokens arrive",
        source: "QJL, arXiv 2406.03482",
        recipe: |_, shape| Recipe::pack_all(SegmentFormat::qjl(shape.head_dim())),
    },
    Method {
        name: "kivi",
        bits: &[Bits::Four, Bits::Two],
        stores: "K: one range per channel and 32 tokens, V: one per token and 32 channels",
        source: "KIVI, arXiv 2402.02750",
        recipe: |bits, _| kivi(bits),
    },
];

fn per_token(bits: Bits) -> Recipe {
    let format = TensorFormat::Affine(AffineFormat::new(bits, Grouping::Token));
    Recipe::pack_all(SegmentFormat { key: format, value: format })
}

fn symmetric(grouping: Grouping) -> Recipe {
    let format = TensorFormat::Affine(AffineFormat::new(Bits::Eight, grouping).symmetric());
    Recipe::pack_all(SegmentFormat { key: format, value: format })
}

fn kivi(bits: Bits) -> Recipe {
    Recipe::pack_all(SegmentFormat::kivi(bits)).with_window(DEFAULT_WINDOW)
}

/// A method and its width.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    method: &'static Method,
    /// Meaningless for a method without widths.
    bits: Bits,
}

impl Choice {
    /// Every method at every width.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        METHODS.iter().flat_map(Method::choices)
    }

    /// Parses a method and its width, if it takes one. Errors are messages.
    pub(super) fn parse(text: &str) -> Parsed<Self> {
        let (name, bits) = match text.split_once(':') {
            Some((name, bits)) => (name, Some(bits)),
            None => (text, None),
        };
        let method = METHODS.iter().find(|method| method.name == name).ok_or_else(|| {
            let names: Vec<&str> = METHODS.iter().map(|method| method.name).collect();
            let near = did_you_mean(name, names.iter().copied().chain(["cocktail"]));
            format!(
                "there is no method '{name}'{near}; the methods are {}, and before a '/' those that evict tokens: {}",
                names.join(", "),
                Eviction::names()
            )
        })?;
        let known = || method.choices().map(|choice| choice.to_string()).collect::<Vec<_>>().join(", ");
        match bits {
            Some(bits) if method.bits.is_empty() => Err(format!("{name} takes no width, and '{bits}' was given")),
            None if !method.bits.is_empty() => Err(format!("{name} needs a width: {}", known())),
            _ => {
                let mut choices = method.choices();
                choices.find(|choice| choice.to_string() == text).ok_or_else(|| format!("{name} comes as {}", known()))
            }
        }
    }

    /// The method's recipe for heads of this shape.
    pub(super) fn recipe(&self, shape: &AttentionShape) -> Recipe {
        (self.method.recipe)(self.bits, shape)
    }

    /// Whether it packs nothing.
    pub(super) fn is_f16(&self) -> bool {
        self.method.name == "f16"
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.method.name;
        if self.method.bits.is_empty() { f.write_str(name) } else { write!(f, "{name}:{}", self.bits) }
    }
}

impl Method {
    fn choices(&'static self) -> impl Iterator<Item = Choice> {
        let widths: &[Bits] = if self.bits.is_empty() { &[Bits::Eight] } else { self.bits };
        widths.iter().map(move |&bits| Choice { method: self, bits })
    }
}
