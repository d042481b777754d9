//! The text form of recipes: one grammar for command lines, tables and configuration files.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::{RecentWindow, Recipe};
use crate::backend::QueryPrecision;
use crate::format::{AffineFormat, AttentionShape, Bits, Calibration, Grouping, SegmentFormat, TensorFormat};
use crate::{Error, Result};

/// A published method, or a baseline, that recipes name.
#[derive(Clone, Copy, Debug)]
pub struct Method {
    /// The name in recipes.
    pub name: &'static str,
    /// The widths it takes, as in `name:4`; a method that takes none has an empty list.
    pub bits: &'static [Bits],
    /// How keys and values are stored.
    pub stores: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    recipe: fn(Bits, &AttentionShape) -> Recipe,
}

/// Newest tokens that stay in f16 where a recipe does not say otherwise: the residual window of KIVI.
const DEFAULT_WINDOW: usize = 128;

/// All methods. A recipe is one of them with options, see [`ModelRecipe`].
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
        stores: "as turboquant, with norms that make what is stored as long as the row",
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
    let affine = |grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping));
    let (key, value) = (affine(Grouping::ChannelTokens(32)), affine(Grouping::TokenChannels(32)));
    Recipe::pack_all(SegmentFormat { key, value }).with_window(DEFAULT_WINDOW)
}

/// A recipe for every layer of a model, as people write it.
///
/// ```text
/// recipe  = method [":" bits] { "+" option }
/// option  = "window=" tokens               newest tokens in f16, at least, and tiles packed when full (128 if not said,
///                                          but for methods that pack tokens as they arrive)
///         | "sink=" tokens                 first tokens in f16, in whole tiles of 128 (0)
///         | "tau=" τ1 "," τ2               calibrated scores of packed spans, CalibQuant's eq. 7 (none)
///         | "query=" ("int8" | "int16")    precision of query and weights in integer dot products (int16)
///         | "layers=" layer { "," layer } ":" method [":" bits]    these layers by another method
/// ```
///
/// The methods are [`METHODS`]. Options hold for every layer, those of another method included.
///
/// ```
/// use kvpack::cache::{ModelRecipe, RecentWindow};
/// let shape = kvpack::AttentionShape::new(32, 8, 128)?;
/// let recipe: ModelRecipe = "calibquant:2+window=256+layers=0,1:f16".parse()?;
/// assert_eq!(recipe.layer(5, &shape).recent, RecentWindow::PackTiles { newer: 256 });
/// assert_eq!(recipe.layer(1, &shape).packed, kvpack::SegmentFormat::F16);
/// assert_eq!(recipe.to_string(), "calibquant:2+window=256+layers=0,1:f16");
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModelRecipe {
    text: String,
    base: Choice,
    layers: Vec<(usize, Choice)>,
    options: Vec<RecipeOption>,
}

/// A method and its width.
#[derive(Clone, Copy, Debug)]
struct Choice {
    method: &'static Method,
    /// Of no meaning for a method that takes none.
    bits: Bits,
}

impl ModelRecipe {
    /// Every method at every width, without options.
    pub fn all() -> Vec<Self> {
        let choices = METHODS.iter().flat_map(Method::choices);
        choices.map(|base| Self { text: base.text(), base, layers: Vec::new(), options: Vec::new() }).collect()
    }

    /// The recipe of a layer whose heads have this shape.
    pub fn layer(&self, layer: usize, shape: &AttentionShape) -> Recipe {
        let choice = self.layers.iter().find(|(named, _)| *named == layer).map_or(self.base, |(_, choice)| *choice);
        let mut recipe = (choice.method.recipe)(choice.bits, shape);
        self.options.iter().for_each(|option| option.apply(&mut recipe));
        recipe
    }

    /// The highest layer that the text names, which the model must have.
    pub fn highest_layer(&self) -> Option<usize> {
        self.layers.iter().map(|(layer, _)| *layer).max()
    }
}

impl Method {
    fn choices(&'static self) -> impl Iterator<Item = Choice> {
        let widths: &[Bits] = if self.bits.is_empty() { &[Bits::Eight] } else { self.bits };
        widths.iter().map(move |&bits| Choice { method: self, bits })
    }
}

impl Choice {
    fn text(&self) -> String {
        let name = self.method.name;
        if self.method.bits.is_empty() { name.into() } else { format!("{name}:{}", self.bits) }
    }
}

impl fmt::Display for ModelRecipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for ModelRecipe {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse(text).map_err(|reason| Error::Recipe { given: text.into(), reason })
    }
}

type Parsed<T> = std::result::Result<T, String>;

fn parse(text: &str) -> Parsed<ModelRecipe> {
    let mut parts = text.split('+');
    let base = choice(parts.next().unwrap_or_default())?;
    let mut recipe = ModelRecipe { text: text.into(), base, layers: Vec::new(), options: Vec::new() };
    for part in parts {
        let (name, value) = part.split_once('=').ok_or_else(|| unknown_option(part))?;
        match name {
            "layers" => recipe.layers.extend(layer_choices(value)?),
            _ => recipe.options.push(option(name, value)?),
        }
    }
    let mut seen = BTreeSet::new();
    match recipe.layers.iter().find(|(layer, _)| !seen.insert(*layer)) {
        Some((twice, _)) => Err(format!("layer {twice} is named twice")),
        None => Ok(recipe),
    }
}

fn choice(text: &str) -> Parsed<Choice> {
    let (name, bits) = match text.split_once(':') {
        Some((name, bits)) => (name, Some(bits)),
        None => (text, None),
    };
    let method = METHODS.iter().find(|method| method.name == name).ok_or_else(|| {
        let names: Vec<&str> = METHODS.iter().map(|method| method.name).collect();
        format!("there is no method '{name}'; the methods are {}", names.join(", "))
    })?;
    let known = || method.choices().map(|choice| choice.text()).collect::<Vec<_>>().join(", ");
    match bits {
        Some(bits) if method.bits.is_empty() => Err(format!("{name} takes no width, and '{bits}' was given")),
        None if !method.bits.is_empty() => Err(format!("{name} needs a width: {}", known())),
        _ => {
            method.choices().find(|choice| choice.text() == text).ok_or_else(|| format!("{name} comes as {}", known()))
        }
    }
}

/// An option that changes a recipe, read.
#[derive(Clone, Copy, Debug)]
enum RecipeOption {
    Window(usize),
    Sink(usize),
    Tau(Calibration),
    Query(QueryPrecision),
}

impl RecipeOption {
    fn apply(&self, recipe: &mut Recipe) {
        match *self {
            Self::Window(newer) if recipe.recent != RecentWindow::KeepF16 => {
                recipe.recent = RecentWindow::PackTiles { newer };
            }
            // Nothing is packed in f16, behind whatever window.
            Self::Window(_) => {}
            Self::Sink(sink) => recipe.sink = sink,
            Self::Tau(calibration) => recipe.calibration = Some(calibration),
            Self::Query(query) => recipe.query = query,
        }
    }
}

fn option(name: &str, value: &str) -> Parsed<RecipeOption> {
    let tokens = || value.parse().map_err(|_| format!("{name}={value}: a number of tokens is needed"));
    match name {
        "window" => Ok(RecipeOption::Window(tokens()?)),
        "sink" => Ok(RecipeOption::Sink(tokens()?)),
        "tau" => tau(value).map(RecipeOption::Tau),
        "query" => match value {
            "int8" => Ok(RecipeOption::Query(QueryPrecision::Int8)),
            "int16" => Ok(RecipeOption::Query(QueryPrecision::Int16)),
            _ => Err(format!("query={value}: int8 or int16 is needed")),
        },
        _ => Err(unknown_option(name)),
    }
}

fn unknown_option(name: &str) -> String {
    format!(
        "there is no option '{name}'; the options are window=TOKENS, sink=TOKENS, tau=τ1,τ2, query=int8|int16 and \
         layers=0,1:METHOD"
    )
}

fn tau(value: &str) -> Parsed<Calibration> {
    let needed = || format!("tau={value}: two numbers are needed, as in tau=0,3");
    let (tau1, tau2) = value.split_once(',').ok_or_else(needed)?;
    let number = |text: &str| text.parse::<f32>().map_err(|_| needed());
    Calibration::new(number(tau1)?, number(tau2)?).map_err(|error| error.to_string())
}

fn layer_choices(value: &str) -> Parsed<Vec<(usize, Choice)>> {
    let needed = || format!("layers={value}: layers and a method are needed, as in layers=0,1:f16");
    let (layers, text) = value.split_once(':').ok_or_else(needed)?;
    let choice = choice(text)?;
    layers.split(',').map(|layer| Ok((layer.parse().map_err(|_| needed())?, choice))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> AttentionShape {
        AttentionShape::new(4, 2, 64).unwrap()
    }

    #[test]
    fn every_method_parses_as_it_is_printed() {
        let all = ModelRecipe::all();
        assert!(all.len() > METHODS.len());
        for recipe in all {
            let parsed: ModelRecipe = recipe.to_string().parse().unwrap();
            assert_eq!(parsed.layer(0, &shape()), recipe.layer(0, &shape()), "{recipe}");
            assert_eq!(parsed.to_string(), recipe.to_string());
            recipe.layer(0, &shape()).packed.check(&shape()).unwrap();
        }
    }

    #[test]
    fn options_reach_every_layer() {
        let text = "kivi:2+sink=128+tau=0,3+query=int8+layers=0,3:calibquant:8+window=64";
        let recipe: ModelRecipe = text.parse().unwrap();
        for layer in [0, 1, 3] {
            let recipe = recipe.layer(layer, &shape());
            assert_eq!((recipe.sink, recipe.query), (128, QueryPrecision::Int8));
            assert_eq!(recipe.recent, RecentWindow::PackTiles { newer: 64 });
            assert_eq!(recipe.calibration, Some(Calibration::new(0.0, 3.0).unwrap()));
        }
        assert_eq!(recipe.layer(3, &shape()).packed, SegmentFormat::calibquant(Bits::Eight));
        assert_eq!(recipe.layer(1, &shape()).packed, kivi(Bits::Two).packed);
        assert_eq!(recipe.highest_layer(), Some(3));
        let f16: ModelRecipe = "f16+window=64".parse().unwrap();
        assert_eq!(f16.layer(0, &shape()).recent, RecentWindow::KeepF16);
    }

    #[test]
    fn errors_say_what_is_allowed() {
        for (text, part) in [
            ("", "the methods are f16"),
            ("kiwi:2", "the methods are f16"),
            ("kivi", "kivi:4, kivi:2"),
            ("kivi:3", "kivi:4, kivi:2"),
            ("f16:2", "takes no width"),
            ("kivi:2+", "the options are window"),
            ("kivi:2+windows=3", "the options are window"),
            ("kivi:2+window=-1", "a number of tokens"),
            ("kivi:2+query=f16", "int8 or int16"),
            ("kivi:2+tau=3", "two numbers"),
            ("kivi:2+tau=nan,1", "NaN"),
            ("kivi:2+layers=0", "layers and a method"),
            ("kivi:2+layers=x:f16", "layers and a method"),
            ("kivi:2+layers=0:f16+layers=0:int8", "named twice"),
        ] {
            let error = text.parse::<ModelRecipe>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{text}'")) && error.contains(part), "{text}: {error}");
        }
    }
}
