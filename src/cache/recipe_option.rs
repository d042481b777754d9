//! Options of recipes in text: `window=256`, `centre`, `store=kivi:2`.

use super::methods::Choice;
use super::parsed::{Parsed, did_you_mean};
use super::{Appended, Recipe};
use crate::backend::QueryPrecision;
use crate::format::{AttentionShape, Calibration};

/// A parsed option of a recipe.
#[derive(Clone, Copy, Debug)]
pub(super) enum RecipeOption {
    Window(usize),
    Sink(usize),
    Tau(Calibration),
    Query(QueryPrecision),
    Store(Choice),
    Centre,
}

impl RecipeOption {
    /// Applies the option to the recipe of a layer.
    pub(super) fn apply(&self, recipe: Recipe, shape: &AttentionShape) -> Recipe {
        match *self {
            // Appended tokens are never packed, so the length of the window does not matter.
            Self::Window(_) if recipe.appended() == Appended::Keep => recipe,
            Self::Window(newer) => recipe.with_window(newer),
            Self::Sink(sink) => recipe.with_sink(sink),
            Self::Tau(calibration) => recipe.with_calibration(calibration),
            Self::Query(query) => recipe.with_query(query),
            Self::Store(choice) => recipe.and_store(*choice.recipe(shape).packed()),
            Self::Centre => recipe.with_centre(),
        }
    }

    /// Parses `name=value`.
    pub(super) fn parse(name: &str, value: &str) -> Parsed<Self> {
        let tokens = || value.parse().map_err(|_| format!("{name}={value}: a number of tokens is needed"));
        match name {
            "window" => Ok(Self::Window(tokens()?)),
            "sink" => Ok(Self::Sink(tokens()?)),
            "tau" => tau(value).map(Self::Tau),
            "query" => match value {
                "int8" => Ok(Self::Query(QueryPrecision::Int8)),
                "int16" => Ok(Self::Query(QueryPrecision::Int16)),
                _ => Err(format!("query={value}: int8 or int16 is needed")),
            },
            "store" => further_store(value).map(Self::Store),
            _ => Err(unknown_option(name)),
        }
    }
}

fn further_store(value: &str) -> Parsed<Choice> {
    let choice = Choice::parse(value).map_err(|reason| format!("store={value}: {reason}"))?;
    if choice.is_f16() { Err("store=f16: every recipe has an f16 store".into()) } else { Ok(choice) }
}

/// Every option, with the value that it takes.
const OPTIONS: [(&str, Option<&str>); 12] = [
    ("window", Some("window=128")),
    ("sink", Some("sink=128")),
    ("tau", Some("tau=0,3")),
    ("query", Some("query=int8")),
    ("centre", None),
    ("store", Some("store=kivi:2")),
    ("layers", Some("layers=0,1:f16")),
    ("merge", Some("merge=averaged")),
    ("text", Some("text=raised")),
    ("every", Some("every=512")),
    ("reorder", Some("reorder=none")),
    ("search", Some("search=none")),
];

/// The message for an option that stands without a value.
pub(super) fn option_without_value(name: &str) -> String {
    match OPTIONS.iter().find(|(known, _)| *known == name) {
        Some((_, Some(example))) => format!("{name} needs a value, as in {example}"),
        _ => unknown_option(name),
    }
}

/// The message for a name that is no option.
pub(super) fn unknown_option(name: &str) -> String {
    if name == "centre" || name == "center" {
        return format!("{name} takes no value");
    }
    let near = did_you_mean(name, OPTIONS.iter().map(|(known, _)| *known));
    format!(
        "there is no option '{name}'{near}; the options are window=TOKENS, sink=TOKENS, tau=τ1,τ2, query=int8|int16, \
         centre, store=METHOD and layers=0,1:METHOD, and of policies merge=none|averaged|pivotal|weighted, \
         text=equal|raised|stays and every=TOKENS, and of mixtures reorder=none and search=none"
    )
}

fn tau(value: &str) -> Parsed<Calibration> {
    let needed = || format!("tau={value}: two numbers are needed, as in tau=0,3");
    let (tau1, tau2) = value.split_once(',').ok_or_else(needed)?;
    let number = |text: &str| text.parse::<f32>().map_err(|_| needed());
    Calibration::new(number(tau1)?, number(tau2)?).map_err(|error| error.to_string())
}
