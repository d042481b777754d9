//! Which recipes an evaluation takes.

use anyhow::{Result, bail};
use kvpack::cache::{Appended, ModelRecipe};
use kvpack::{AttentionShape, Backend};

use crate::model::{Config, PackedAttention};
use crate::print::note;

/// A recipe that is asked for.
pub struct Wanted {
    recipe: ModelRecipe,
    /// By its name, and not with all others.
    by_name: bool,
}

impl Wanted {
    /// The recipes of the texts, each of which may name several, separated by spaces.
    pub fn parse(given: &[String]) -> Result<Vec<Self>> {
        let mut wanted = Vec::new();
        for text in given.iter().flat_map(|text| text.split_whitespace()) {
            let one_of_all = |recipe| Self { recipe, by_name: false };
            match text {
                "all" => wanted.extend(ModelRecipe::all().into_iter().chain(centred()).map(one_of_all)),
                "centred" => wanted.extend(centred().map(one_of_all)),
                "windowed" => wanted.extend(windowed().map(one_of_all)),
                _ => {
                    let recipe: ModelRecipe = text.parse()?;
                    wanted.push(Self { recipe: recipe.plain()?.clone(), by_name: true });
                }
            }
        }
        if wanted.is_empty() {
            bail!(
                "--recipes names no recipe; 'all' stands for every method at every width, 'centred' for those with a centre, \
                 'windowed' for those with a centre, a sink and a window"
            );
        }
        Ok(wanted)
    }
}

/// Every method at every width that packs keys.
fn packed() -> impl Iterator<Item = String> {
    ModelRecipe::all().into_iter().map(|recipe| recipe.to_string()).filter(|recipe| recipe != "f16")
}

/// Those that take a centre, with one.
fn centred() -> impl Iterator<Item = ModelRecipe> {
    packed().filter_map(|recipe| format!("{recipe}+centre").parse().ok())
}

/// All of them, with what protects them.
fn windowed() -> impl Iterator<Item = ModelRecipe> {
    packed().filter_map(|recipe| protected(&recipe)?.parse().ok())
}

/// Options that take the edge off a coarse recipe: centred keys, if the format takes a centre, and the first and
/// the last 128 tokens in f16.
const PROTECTION: [(&str, &str); 3] = [("centre", "centre"), ("sink=", "sink=128"), ("window=", "window=128")];

/// The recipe with all of them that it lacks, or none if it lacks none. Methods that pack tile by tile have
/// a window anyway.
pub fn protected(recipe: &str) -> Option<String> {
    // Any shape will do: a window is not a matter of heads.
    let first_layer = recipe.parse::<ModelRecipe>().ok()?.layer(0, &AttentionShape::new(1, 1, 128).ok()?);
    let has_window = matches!(first_layer.appended(), Appended::Tiles { .. });
    let mut text = recipe.to_owned();
    for (name, option) in PROTECTION {
        if recipe.contains(&format!("+{name}")) || (name == "window=" && has_window) {
            continue;
        }
        let with_option = format!("{text}+{option}");
        if with_option.parse::<ModelRecipe>().is_ok() {
            text = with_option;
        }
    }
    (text != recipe).then_some(text)
}

/// The recipes that the model and the backend can take, found before any is evaluated. One that is named must be among
/// them; of all others, those that are not are left out with a word.
pub fn fitting<B: Backend + Clone>(model: &Config, wanted: &[Wanted], backend: &B) -> Result<Vec<ModelRecipe>> {
    let mut fitting = Vec::with_capacity(wanted.len());
    for Wanted { recipe, by_name } in wanted {
        match PackedAttention::new(backend, model, recipe) {
            Ok(_) => fitting.push(recipe.clone()),
            Err(error) if *by_name => return Err(error.context(format!("recipe {recipe}"))),
            Err(error) => note!("left out {recipe}: {error:#}"),
        }
    }
    Ok(fitting)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(given: &str) -> Vec<String> {
        Wanted::parse(&[given.into()]).unwrap().iter().map(|wanted| wanted.recipe.to_string()).collect()
    }

    #[test]
    fn all_recipes_are_those_with_a_centre_too() {
        let all = names("all");
        for recipe in ["f16", "int4", "int4+centre", "calibquant:2", "turboquant-prod:3+centre", "qjl+centre"] {
            assert!(all.iter().any(|name| name == recipe), "{recipe}: {all:?}");
        }
        for recipe in ["f16+centre", "calibquant:2+centre", "kivi:4+centre", "int8-symmetric-channel+centre"] {
            assert!(all.iter().all(|name| name != recipe), "{recipe}: {all:?}");
        }
        let centred = names("centred");
        assert!(!centred.is_empty() && centred.iter().all(|name| name.ends_with("+centre") && all.contains(name)));
        assert!(Wanted::parse(&[String::new()]).is_err());
    }

    #[test]
    fn protection_adds_what_a_recipe_lacks_and_takes() {
        let windowed = names("windowed");
        for recipe in ["int4+centre+sink=128+window=128", "kivi:2+sink=128", "calibquant:4+sink=128"] {
            assert!(windowed.iter().any(|name| name == recipe), "{recipe}: {windowed:?}");
        }
        assert_eq!(windowed.len(), ModelRecipe::all().len() - 1, "every method but f16");
        assert_eq!(protected("turboquant:3+centre").as_deref(), Some("turboquant:3+centre+sink=128+window=128"));
        assert_eq!(protected("int4+sink=256+window=64").as_deref(), Some("int4+sink=256+window=64+centre"));
        assert_eq!(protected("kivi:2+sink=128"), None);
        assert_eq!(protected("no recipe"), None);
    }
}
