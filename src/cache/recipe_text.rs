//! The text form of recipes: one grammar for command lines, tables and configuration files.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::methods::Choice;
use super::{Appended, MOST_STORES, Recipe};
use crate::backend::QueryPrecision;
use crate::format::{AttentionShape, Calibration};
use crate::{Error, Result};

/// A recipe for every layer of a model, as people write it.
///
/// ```text
/// recipe  = method [":" bits] { "+" option }
/// option  = "window=" tokens               newest tokens in f16, at least, and tiles packed when full (128 if not said,
///                                          but for methods that pack tokens as they arrive)
///         | "sink=" tokens                 first tokens in f16, in whole tiles of 128 (0)
///         | "tau=" τ1 "," τ2               calibrated scores of packed spans, CalibQuant's eq. 7 (none)
///         | "query=" ("int8" | "int16")    precision of query and weights in integer dot products (int16)
///         | "store=" method [":" bits]     one more store, which spans of a prompt may name: the first after the method's own
///         | "layers=" layer { "," layer } ":" method [":" bits]    these layers by another method
/// ```
///
/// The methods are [`METHODS`](super::METHODS). Options hold for every layer, those of another method included.
///
/// ```
/// use kvpack::cache::{Appended, ModelRecipe, StoreId};
/// let shape = kvpack::AttentionShape::new(32, 8, 128)?;
/// let recipe: ModelRecipe = "calibquant:2+window=256+layers=0,1:f16".parse()?;
/// assert_eq!(recipe.layer(5, &shape).appended(), Appended::Tiles { to: StoreId::PACKED, newer: 256 });
/// assert_eq!(recipe.layer(1, &shape).packed().format, kvpack::SegmentFormat::F16);
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

impl ModelRecipe {
    /// Every method at every width, without options.
    pub fn all() -> Vec<Self> {
        let recipe = |base: Choice| Self { text: base.to_string(), base, layers: Vec::new(), options: Vec::new() };
        Choice::all().map(recipe).collect()
    }

    /// The recipe of a layer whose heads have this shape.
    pub fn layer(&self, layer: usize, shape: &AttentionShape) -> Recipe {
        let choice = self.layers.iter().find(|(named, _)| *named == layer).map_or(self.base, |(_, choice)| *choice);
        // What is said of packed spans is said of those in further stores too.
        let (stores, options): (Vec<_>, Vec<_>) =
            self.options.iter().partition(|option| matches!(option, RecipeOption::Store(_)));
        let all = stores.into_iter().chain(options);
        all.fold(choice.recipe(shape), |recipe, option: &RecipeOption| option.apply(recipe, shape))
    }

    /// The highest layer that the text names, which the model must have.
    pub fn highest_layer(&self) -> Option<usize> {
        self.layers.iter().map(|(layer, _)| *layer).max()
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
    let base = Choice::parse(parts.next().unwrap_or_default())?;
    let mut recipe = ModelRecipe { text: text.into(), base, layers: Vec::new(), options: Vec::new() };
    for part in parts {
        let (name, value) = part.split_once('=').ok_or_else(|| unknown_option(part))?;
        match name {
            "layers" => recipe.layers.extend(layer_choices(value)?),
            _ => recipe.options.push(option(name, value)?),
        }
    }
    let further = recipe.options.iter().filter(|option| matches!(option, RecipeOption::Store(_))).count();
    if further > MOST_STORES - 2 {
        return Err(format!("{further} further stores; a recipe has at most {MOST_STORES} stores in all"));
    }
    let mut seen = BTreeSet::new();
    match recipe.layers.iter().find(|(layer, _)| !seen.insert(*layer)) {
        Some((twice, _)) => Err(format!("layer {twice} is named twice")),
        None => Ok(recipe),
    }
}

/// An option that changes a recipe, read.
#[derive(Clone, Copy, Debug)]
enum RecipeOption {
    Window(usize),
    Sink(usize),
    Tau(Calibration),
    Query(QueryPrecision),
    Store(Choice),
}

impl RecipeOption {
    fn apply(&self, recipe: Recipe, shape: &AttentionShape) -> Recipe {
        match *self {
            // Nothing of what is appended is packed, behind whatever window.
            Self::Window(_) if recipe.appended() == Appended::Keep => recipe,
            Self::Window(newer) => recipe.with_window(newer),
            Self::Sink(sink) => recipe.with_sink(sink),
            Self::Tau(calibration) => recipe.with_calibration(calibration),
            Self::Query(query) => recipe.with_query(query),
            Self::Store(choice) => recipe.and_store(*choice.recipe(shape).packed()),
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
        "store" => further_store(value).map(RecipeOption::Store),
        _ => Err(unknown_option(name)),
    }
}

fn further_store(value: &str) -> Parsed<Choice> {
    let choice = Choice::parse(value).map_err(|reason| format!("store={value}: {reason}"))?;
    if choice.is_f16() { Err("store=f16: every recipe has an f16 store".into()) } else { Ok(choice) }
}

fn unknown_option(name: &str) -> String {
    format!(
        "there is no option '{name}'; the options are window=TOKENS, sink=TOKENS, tau=τ1,τ2, query=int8|int16, \
         store=METHOD and layers=0,1:METHOD"
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
    let choice = Choice::parse(text)?;
    layers.split(',').map(|layer| Ok((layer.parse().map_err(|_| needed())?, choice))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{METHODS, StoreId};
    use super::*;
    use crate::format::{Bits, SegmentFormat};

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
            recipe.layer(0, &shape()).packed().format.check(&shape()).unwrap();
        }
    }

    #[test]
    fn options_reach_every_layer() {
        let text = "kivi:2+sink=128+tau=0,3+query=int8+layers=0,3:calibquant:8+window=64";
        let recipe: ModelRecipe = text.parse().unwrap();
        for layer in [0, 1, 3] {
            let recipe = recipe.layer(layer, &shape());
            assert_eq!((recipe.sink(), recipe.query()), (128, QueryPrecision::Int8));
            assert_eq!(recipe.appended(), Appended::Tiles { to: StoreId::PACKED, newer: 64 });
            assert_eq!(recipe.stores()[1].calibration, Some(Calibration::new(0.0, 3.0).unwrap()));
        }
        let kivi: ModelRecipe = "kivi:2".parse().unwrap();
        assert_eq!(recipe.layer(3, &shape()).packed().format, SegmentFormat::calibquant(Bits::Eight));
        assert_eq!(recipe.layer(1, &shape()).packed().format, kivi.layer(0, &shape()).packed().format);
        assert_eq!(recipe.highest_layer(), Some(3));
        let f16: ModelRecipe = "f16+window=64".parse().unwrap();
        assert_eq!(f16.layer(0, &shape()).appended(), Appended::Keep);
    }

    #[test]
    fn recipes_of_several_stores_print_as_they_were_written() {
        let text = "saw-int4+store=calibquant:2+tau=0,3+store=kivi:2+sink=64";
        let recipe: ModelRecipe = text.parse().unwrap();
        assert_eq!(recipe.to_string(), text);
        let layer = recipe.layer(0, &shape());
        let formats: Vec<SegmentFormat> = layer.stores().iter().map(|store| store.format).collect();
        let kivi: ModelRecipe = "kivi:2".parse().unwrap();
        let two_bits = kivi.layer(0, &shape()).packed().format;
        let expected = [SegmentFormat::F16, SegmentFormat::saw_int4(), SegmentFormat::calibquant(Bits::Two), two_bits];
        assert_eq!(formats, expected);
        assert!(layer.stores()[1..].iter().all(|store| store.calibration.is_some()));
        assert_eq!(layer.appended(), Appended::AtOnce(StoreId::PACKED));
        // f16 beside packed stores that only prompts use.
        let prompts: ModelRecipe = "f16+store=saw-int4+store=calibquant:2".parse().unwrap();
        let layer = prompts.layer(0, &shape());
        assert_eq!((layer.stores().len(), layer.appended()), (3, Appended::Keep));
        let many = "int8".to_owned() + &"+store=int4".repeat(MOST_STORES - 1);
        assert!(many.parse::<ModelRecipe>().unwrap_err().to_string().contains("at most 16"));
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
            ("kivi:2+store=kiwi", "the methods are f16"),
            ("kivi:2+store=f16", "every recipe has an f16 store"),
            ("kivi:2+layers=0", "layers and a method"),
            ("kivi:2+layers=x:f16", "layers and a method"),
            ("kivi:2+layers=0:f16+layers=0:int8", "named twice"),
        ] {
            let error = text.parse::<ModelRecipe>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{text}'")) && error.contains(part), "{text}: {error}");
        }
    }
}
