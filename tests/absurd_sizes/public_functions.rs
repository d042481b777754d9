//! The public functions of the crate that take numbers, read from its sources.

use std::collections::BTreeSet;
use std::path::Path;

/// The rooms whose functions need no device.
const ROOMS: [&str; 7] = ["backend", "cache", "cpu", "format", "plan", "policy", "ranks"];

/// Files of the device layer whose functions need no device, and the rooms that re-export them.
const RE_EXPORTED: [(&str, &str); 1] = [("plan", "../device/src/element.rs")];

/// Types of numbers.
const NUMBERS: [&str; 9] = ["usize", "u64", "u32", "i64", "i32", "u8", "u16", "f32", "f64"];

/// Types that hold numbers that a caller chooses, through functions that check little.
const HOLDERS: [&str; 4] = ["Rotation", "TokenRun", "QueryRun", "CoordinateDensity"];

/// Their names: room, type and function.
pub fn with_numbers() -> BTreeSet<String> {
    let re_exported = |room| RE_EXPORTED.into_iter().filter(move |(by, _)| *by == room).map(|(_, path)| read(path));
    let files = ROOMS.map(|room| sources(Path::new(room)).into_iter().chain(re_exported(room)).collect::<Vec<_>>());
    let numbers = types_of_numbers(files.iter().flatten().map(|(_, text)| text.as_str()));
    let mut found = BTreeSet::new();
    for (room, files) in ROOMS.iter().zip(&files) {
        files.iter().for_each(|(_, text)| of_file(room, text, &numbers, &mut found));
    }
    found
}

/// Numbers, and the public types that hold some which a caller sets without a check: all their fields are public.
fn types_of_numbers<'a>(files: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
    let types: Vec<(String, String)> = files.flat_map(open_types).collect();
    let mut numbers: BTreeSet<String> = NUMBERS.into_iter().chain(HOLDERS).map(str::to_owned).collect();
    loop {
        let holds_one = |(name, fields): &&(String, String)| !numbers.contains(name) && names_one(fields, &numbers);
        let found: Vec<String> = types.iter().filter(holds_one).map(|(name, _)| name.clone()).collect();
        if found.is_empty() {
            return numbers;
        }
        numbers.extend(found);
    }
}

/// The public types of a file whose fields are all public, and the types of their fields.
fn open_types(text: &str) -> Vec<(String, String)> {
    let mut types = Vec::new();
    let mut lines = code(text).lines();
    while let Some(line) = lines.next() {
        let is_struct = line.starts_with("pub struct ");
        let Some(rest) = line.strip_prefix("pub struct ").or_else(|| line.strip_prefix("pub enum ")) else { continue };
        if !line.ends_with('{') {
            continue;
        }
        let name = rest.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
        let fields = lines.by_ref().take_while(|line| *line != "}").map(str::trim);
        let fields: Vec<&str> = fields.filter(|line| !line.starts_with("//") && !line.starts_with('#')).collect();
        let is_open = !is_struct || fields.iter().all(|field| field.starts_with("pub ") && !field.starts_with("pub("));
        if is_open {
            types.push((name.to_owned(), fields.iter().flat_map(|field| [field_type(field), " "]).collect()));
        }
    }
    types
}

/// The type of a field, or all of a variant.
fn field_type(field: &str) -> &str {
    match field.strip_prefix("pub ").and_then(|field| field.split_once(": ")) {
        Some((_, of)) => of,
        None => field,
    }
}

/// What comes before the tests of a file.
pub fn code(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default()
}

/// The files of a room, or of all, by their paths in `src`, and what they hold.
pub fn sources(room: &Path) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src");
    let mut files = Vec::new();
    list(&root, room, &mut files);
    files
}

/// A file, by its path from `src`, and what it holds.
fn read(path: &str) -> (String, String) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src").join(path);
    (path.to_owned(), std::fs::read_to_string(file).unwrap())
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
fn of_file(room: &str, text: &str, numbers: &BTreeSet<String>, found: &mut BTreeSet<String>) {
    let text = code(text);
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
            if takes_numbers(&signature, numbers) {
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

/// Whether a parameter is a number, or holds one.
fn takes_numbers(signature: &str, numbers: &BTreeSet<String>) -> bool {
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
    names_one(parameters, numbers)
}

/// Whether types hold a number. Numbers that are elements of slices and vectors, which have a length, are none.
fn names_one(types: &str, numbers: &BTreeSet<String>) -> bool {
    let (mut brackets, mut vectors) = (0usize, 0usize);
    for part in types.split_inclusive(['[', ']', '<', '>']) {
        let is_element = brackets + vectors > 0;
        let mut words = part.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
        if words.any(|word| numbers.contains(word) && !(is_element && NUMBERS.contains(&word))) {
            return true;
        }
        match part.chars().next_back() {
            Some('[') => brackets += 1,
            Some(']') => brackets = brackets.saturating_sub(1),
            Some('<') if vectors > 0 || part.ends_with("Vec<") => vectors += 1,
            Some('>') => vectors = vectors.saturating_sub(1),
            _ => {}
        }
    }
    false
}
