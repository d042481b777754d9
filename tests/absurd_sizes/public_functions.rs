//! The public functions of the crate that take numbers, read from its sources.

use std::collections::BTreeSet;
use std::path::Path;

/// The rooms whose functions need no device.
const ROOMS: [&str; 6] = ["backend", "cache", "cpu", "format", "plan", "policy"];

/// Types of parameters that are numbers, or hold numbers that a caller sets without a check.
const NUMBERS: &[&str] = &[
    "usize",
    "u64",
    "u32",
    "i64",
    "i32",
    "u8",
    "f32",
    "f64",
    "RowLayout",
    "NewSpan",
    "Page",
    "Split",
    "TokenRun",
    "QueryRun",
    "PyramidShape",
    "VlCacheLimits",
    "StoreRoom",
    "StoreCapacity",
    "SpanView",
    "TokenWrite",
    "WindowMove",
    "NewCentre",
    "SpanWrite",
    "SpanRead",
    "QueryLayout",
    "CoordinateDensity",
    "Rotation",
    "Appended",
    "MeasuredRows",
    "Recent",
];

/// Their names: room, type and function.
pub fn with_numbers() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for room in ROOMS {
        sources(Path::new(room)).iter().for_each(|(_, text)| of_file(room, text, &mut found));
    }
    found
}

/// The files of a room, or of all, by their paths in `src`, and what they hold.
pub fn sources(room: &Path) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    list(&root, room, &mut files);
    files
}

fn list(root: &Path, folder: &Path, files: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(root.join(folder)).unwrap() {
        let entry = entry.unwrap();
        let path = folder.join(entry.file_name());
        if entry.path().is_dir() {
            list(root, &path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") && path != Path::new("counts.rs") {
            let name = path.to_string_lossy().replace(std::path::MAIN_SEPARATOR, "/");
            files.push((name, std::fs::read_to_string(entry.path()).unwrap()));
        }
    }
}

/// Where a function stands.
enum Place {
    Alone,
    /// In a trait, whose functions are as public as it is.
    Trait(String),
    Impl(String),
    /// Functions of a trait, which are listed where it is, or of something private.
    Elsewhere,
}

/// Reads a file that is formatted as rustfmt does: what is public begins its line.
fn of_file(room: &str, text: &str, found: &mut BTreeSet<String>) {
    let text = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
    let mut place = Place::Alone;
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line.starts_with("impl") || line.starts_with("pub trait ") {
            let mut header = line.to_owned();
            while !header.contains('{')
                && let Some(next) = lines.next()
            {
                header += next;
            }
            place = place_of(&header);
        } else if line == "}" {
            place = Place::Alone;
        } else if let Some((name, signature)) = function(line, &place) {
            let mut signature = signature.to_owned();
            while !(signature.contains('{') || signature.trim_end().ends_with(';'))
                && let Some(next) = lines.next()
            {
                signature += next;
            }
            if takes_numbers(&signature) {
                let of = match &place {
                    Place::Trait(name) | Place::Impl(name) => format!("{name}::"),
                    Place::Alone | Place::Elsewhere => String::new(),
                };
                found.insert(format!("{room}::{of}{name}"));
            }
        }
    }
}

fn place_of(header: &str) -> Place {
    let header = header.split('{').next().unwrap_or_default();
    let name = |text: &str| text.trim().split(['<', ':', ' ']).next().unwrap_or_default().to_owned();
    if let Some(of_trait) = header.strip_prefix("pub trait ") {
        return Place::Trait(name(of_trait));
    }
    if header.contains(" for ") {
        return Place::Elsewhere;
    }
    let after = header.strip_prefix("impl").unwrap_or(header);
    Place::Impl(name(without_generics(after)))
}

/// What follows the generics at the beginning.
fn without_generics(text: &str) -> &str {
    let mut depth = 0usize;
    for (at, letter) in text.char_indices() {
        match letter {
            '<' => depth += 1,
            '>' if !text[..at].ends_with('-') => depth = depth.saturating_sub(1),
            ' ' if depth == 0 => return &text[at..],
            _ => {}
        }
    }
    text
}

/// The name of a public function that begins on this line, and the line from its name on.
fn function<'a>(line: &'a str, place: &Place) -> Option<(&'a str, &'a str)> {
    let rest = match place {
        Place::Alone => line.strip_prefix("pub ")?,
        Place::Impl(_) => line.strip_prefix("    pub ")?,
        Place::Trait(_) => line.strip_prefix("    ").filter(|rest| !rest.starts_with(' '))?,
        Place::Elsewhere => return None,
    };
    let rest =
        ["const ", "async ", "unsafe "].into_iter().fold(rest, |rest, word| rest.strip_prefix(word).unwrap_or(rest));
    let rest = rest.strip_prefix("fn ")?;
    let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_')?;
    Some((&rest[..end], rest))
}

/// Whether a parameter is a number, or holds one; elements of slices and vectors, which have a length, are none.
fn takes_numbers(signature: &str) -> bool {
    let from = signature.find('(').unwrap_or(0);
    let mut depth = 0usize;
    let to = signature[from..].char_indices().find(|&(_, letter)| {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        depth == 0
    });
    let parameters = &signature[from..from + to.map_or(signature.len() - from, |(at, _)| at)];
    let mut plain = String::new();
    let (mut brackets, mut skipped) = (0usize, 0usize);
    for part in parameters.split_inclusive(['[', ']', '<', '>']) {
        if brackets + skipped == 0 {
            plain += part;
        }
        match part.chars().next_back() {
            Some('[') => brackets += 1,
            Some(']') => brackets = brackets.saturating_sub(1),
            Some('<') if skipped > 0 || part.ends_with("Vec<") => skipped += 1,
            Some('>') => skipped = skipped.saturating_sub(1),
            _ => {}
        }
    }
    let words = plain.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    words.filter(|word| !word.is_empty()).any(|word| NUMBERS.contains(&word))
}
