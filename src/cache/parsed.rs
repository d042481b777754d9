//! The result of reading a recipe's text, and suggestions for misspelt names.

/// A value read from text, or why the text cannot be read.
pub(super) type Parsed<T> = Result<T, String>;

/// Similarity (Jaro) above which a name is suggested for another, as in clap.
const SIMILAR: f64 = 0.7;

/// `; did you mean kivi?`, or nothing where no known name is similar to the given one.
pub(super) fn did_you_mean<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let rated = known.into_iter().map(|name| (strsim::jaro(given, name), name));
    let nearest = rated.filter(|(similarity, _)| *similarity > SIMILAR).max_by(|a, b| a.0.total_cmp(&b.0));
    nearest.map_or_else(String::new, |(_, name)| format!("; did you mean {name}?"))
}
