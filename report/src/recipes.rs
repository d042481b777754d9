//! The recipes that the library knows, as a table for documents.

use std::fmt::Write;

use kvpack::AttentionShape;
use kvpack::cache::{EVICTIONS, METHODS, ModelRecipe};

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
    fn every_method_and_policy_has_a_row() {
        let table = table().unwrap();
        assert_eq!(table.lines().count(), 2 + METHODS.len() + EVICTIONS.len());
        assert!(table.contains("| `f16` | 16.00 |") && table.contains("| `kivi:4`, `:2` | 5.00, 3.00 |"), "{table}");
        assert!(table.contains("| `lookm:SHARE/…` | | of a prompt: text before images"), "{table}");
        assert!(table.contains("[arXiv 2504.19874](https://arxiv.org/abs/2504.19874), and a correction |"), "{table}");
    }
}
