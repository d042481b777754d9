//! The recipes that the library knows, as a table for documents.

use std::fmt::Write;

use kvpack::cache::{EVICTIONS, METHODS, ModelRecipe};
use kvpack::{AttentionShape, SegmentFormat};

/// The recipe, without options, whose packed tokens have this format; none where no method has it. A rotation may have
/// another order than the recipe's: steps are timed with one that divides every head.
pub fn of_format(format: &SegmentFormat, shape: &AttentionShape) -> Option<String> {
    known(shape).into_iter().find(|(packed, _)| packed == format).map(|(_, recipe)| recipe)
}

/// The formats of recipes without options by the names that benchmarks give them, each with its recipe.
pub fn names(shape: &AttentionShape) -> Vec<(String, String)> {
    known(shape).into_iter().map(|(format, recipe)| (format.to_string(), recipe)).collect()
}

/// The formats of recipes without options, for heads of this shape and for the smallest.
fn known(shape: &AttentionShape) -> Vec<(SegmentFormat, String)> {
    let of_heads = |shape: &AttentionShape| {
        let recipes = ModelRecipe::all().into_iter();
        recipes.map(|recipe| (recipe.layer(0, shape).packed().format, recipe.to_string())).collect::<Vec<_>>()
    };
    let smallest = AttentionShape::new(1, 1, 64).map_or_else(|_| Vec::new(), |smallest| of_heads(&smallest));
    [of_heads(shape), smallest].concat()
}

/// The format that a recipe packs in, for commands that take formats or recipes.
///
/// # Errors
/// When the text is no recipe, or says more than a format does.
pub fn format_of(text: &str, shape: &AttentionShape) -> kvpack::Result<SegmentFormat> {
    let recipe: ModelRecipe = text.parse()?;
    if text.contains('+') {
        let reason = "a format has no options; name the method alone".into();
        return Err(kvpack::Error::Recipe { given: text.into(), reason });
    }
    Ok(recipe.plain()?.layer(0, shape).packed().format)
}

/// Why a text is no recipe with a format of its own, in brackets behind a space; nothing where it does not look like
/// one.
pub fn reason(text: &str) -> String {
    let looks_like_one = !text.contains(' ') && text.starts_with(|c: char| c.is_ascii_alphabetic());
    let error = AttentionShape::new(1, 1, 64).and_then(|shape| format_of(text, &shape)).err();
    error.filter(|_| looks_like_one).map_or_else(String::new, |error| format!(" ({error})"))
}

/// Every method with its bits, and every policy that may stand before it, in Markdown. Bits are those of an element of
/// a packed page with its ranges, in heads of 128 channels.
///
/// # Errors
/// When a method's own name is no recipe.
pub fn table() -> kvpack::Result<String> {
    let shape = AttentionShape::new(32, 8, 128)?;
    let mut table = String::from("| recipe | bits | what is stored | from |\n| --- | ---: | --- | --- |\n");
    for method in METHODS {
        let names: Vec<String> = match method.bits {
            [] => vec![method.name.to_owned()],
            widths => widths.iter().map(|bits| format!("{}:{bits}", method.name)).collect(),
        };
        let bits = names.iter().map(|name| {
            let recipe: ModelRecipe = name.parse()?;
            Ok(format!("{:.2}", recipe.layer(0, &shape).packed().format.bits_per_element(&shape)))
        });
        let bits = bits.collect::<kvpack::Result<Vec<String>>>()?.join(", ");
        let short = names.iter().enumerate().map(|(i, name)| match name.split_once(':') {
            Some((_, width)) if i > 0 => format!("`:{width}`"),
            _ => format!("`{name}`"),
        });
        let names = short.collect::<Vec<String>>().join(", ");
        writeln!(table, "| {names} | {bits} | {} | {} |", method.stores, linked(method.source)).ok();
    }
    for policy in EVICTIONS {
        let (name, arguments, source) = (policy.name, policy.arguments, linked(policy.source));
        writeln!(table, "| `{name}:{arguments}/…` | | of a prompt: {} | {source} |", policy.keeps).ok();
    }
    Ok(table)
}

/// `arXiv 2502.14882` as a link.
fn linked(source: &str) -> String {
    let Some((before, rest)) = source.split_once("arXiv ") else { return source.to_owned() };
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    let (number, after) = rest.split_at(end);
    format!("{before}[arXiv {number}](https://arxiv.org/abs/{number}){after}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_have_the_names_of_their_recipes() {
        let shape = AttentionShape::new(32, 8, 128).unwrap();
        for recipe in ModelRecipe::all() {
            let format = format_of(&recipe.to_string(), &shape).unwrap();
            assert_eq!(of_format(&format, &shape), Some(recipe.to_string()));
        }
        let named =
            kvpack::conformance::decode_formats().into_iter().filter(|format| of_format(format, &shape).is_some());
        assert!(named.count() >= 15);
        assert_eq!(of_format(&SegmentFormat::per_channel(kvpack::Bits::One), &shape), None, "not shrunk");
    }

    #[test]
    fn every_method_and_policy_has_a_row() {
        let table = table().unwrap();
        assert_eq!(table.lines().count(), 2 + METHODS.len() + EVICTIONS.len());
        assert!(table.contains("| `f16` | 16.00 |") && table.contains("| `kivi:4`, `:2` | 5.00, 3.00 |"), "{table}");
        assert!(table.contains("| `lookm:SHARE/…` | | of a prompt: text before images"), "{table}");
        assert!(table.contains("[arXiv 2504.19874](https://arxiv.org/abs/2504.19874), and a correction |"), "{table}");
    }
}
