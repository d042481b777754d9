//! Assembles kernels from the shader files of a library: imports, slots with their choices, and default bodies.

use std::collections::{BTreeMap, BTreeSet};

use super::ShaderSources;

/// What a line that imports a file begins with.
const IMPORT: &str = "// import ";

/// A piece of an assembled kernel that comes from one file, or from one section of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its path among the files of the library: `{file}` or `{file}#{section}`. Further sections of the file follow the
    /// first, each as ` #{section}`.
    pub path: String,
    /// Whether it precedes the sections of a file: of a slot it holds the default bodies.
    has_defaults: bool,
    /// The path of the part that imported it.
    by: String,
    pub text: String,
}

/// The parts of a kernel, one for each file, with the files of `choices` in its slots.
///
/// # Errors
/// A message that names the kernel, file or slot that does not exist.
pub(super) fn assemble(
    sources: &ShaderSources,
    kernel: &str,
    choices: &BTreeMap<&'static str, &'static str>,
) -> Result<Vec<Part>, String> {
    let path = sources.kernel(kernel).ok_or_else(|| format!("no kernel {kernel}"))?;
    let mut assembly = Assembly {
        sources,
        choices,
        unused: choices.keys().copied().collect(),
        seen: BTreeSet::new(),
        parts: Vec::new(),
    };
    assembly.import(&path, "")?;
    match assembly.unused.first() {
        Some(slot) => Err(format!("no slot {slot}")),
        None => Ok(by_file(where_opened(with_defaults(assembly.parts)))),
    }
}

struct Assembly<'a> {
    sources: &'a ShaderSources,
    choices: &'a BTreeMap<&'static str, &'static str>,
    unused: BTreeSet<&'static str>,
    seen: BTreeSet<String>,
    parts: Vec<Part>,
}

impl Assembly<'_> {
    /// Adds a file or a section with the default bodies of its slot, unless it was added before. What it imports follows,
    /// so that a kernel is read from above. `by` is the path of what imports it.
    fn import(&mut self, path: &str, by: &str) -> Result<(), String> {
        if !self.seen.insert(path.to_owned()) {
            return Ok(());
        }
        let source = self.sources.text(path).ok_or_else(|| format!("no shader file {path}"))?;
        let (imports, text): (Vec<&str>, Vec<&str>) = source.lines().partition(|line| line.starts_with(IMPORT));
        // A blank line is above imports and another below.
        self.push(path, by, text.join("\n").replace("\n\n\n", "\n\n"));
        self.import_defaults(path, by)?;
        for import in imports.iter().filter_map(|line| line.strip_prefix(IMPORT)) {
            match import.split_once(" = ") {
                Some((slot, default)) => {
                    self.unused.remove(slot);
                    self.import(self.choices.get(slot).copied().unwrap_or(default), path)?;
                    self.import_defaults(default, path)?;
                }
                None => self.import(import, path)?,
            }
        }
        Ok(())
    }

    fn import_defaults(&mut self, section: &str, by: &str) -> Result<(), String> {
        match section.split_once('#') {
            Some((slot, _)) => self.import(slot, by),
            None => Ok(()),
        }
    }

    fn push(&mut self, path: &str, by: &str, text: String) {
        if !text.trim().is_empty() {
            let (path, by, has_defaults) = (path.to_owned(), by.to_owned(), self.sources.has_sections(path));
            self.parts.push(Part { path, has_defaults, by, text: text.trim_matches('\n').to_owned() + "\n" });
        }
    }
}

/// Keeps a default body only if no choice defines the function and some code calls it.
fn with_defaults(parts: Vec<Part>) -> Vec<Part> {
    let (slots, others): (Vec<&Part>, Vec<&Part>) = parts.iter().partition(|part| part.has_defaults);
    let mut code: Vec<String> = others.iter().map(|part| code_of(&part.text)).collect();
    let given: BTreeSet<&str> = others.iter().flat_map(|part| functions(&part.text)).map(|(name, _)| name).collect();
    let mut waiting: Vec<(&str, &str)> =
        slots.iter().flat_map(|part| functions(&part.text)).filter(|(name, _)| !given.contains(name)).collect();
    // A default may call another one.
    let mut kept = BTreeSet::new();
    while let Some(at) = waiting.iter().position(|(name, _)| code.iter().any(|text| calls(text, name))) {
        let (name, body) = waiting.swap_remove(at);
        kept.insert(name.to_owned());
        code.push(code_of(body).replacen(&format!("fn {name}("), "", 1));
    }
    let mut found = Vec::new();
    for part in &parts {
        if !part.has_defaults {
            found.push(part.clone());
            continue;
        }
        let bodies: Vec<&str> =
            functions(&part.text).into_iter().filter(|(name, _)| kept.contains(*name)).map(|(_, body)| body).collect();
        if !bodies.is_empty() {
            found.push(Part { text: bodies.join("\n\n") + "\n", ..part.clone() });
        }
    }
    found
}

/// Moves default bodies of a slot, no choice of which was taken, to the end of the part that opens it: there they are
/// called.
fn where_opened(parts: Vec<Part>) -> Vec<Part> {
    let is_alone = |part: &Part| part.has_defaults && !parts.iter().any(|other| is_section_of(other, &part.path));
    let (moved, mut kept): (Vec<Part>, Vec<Part>) = parts.iter().cloned().partition(is_alone);
    for part in moved {
        match kept.iter_mut().find(|other| other.path == part.by) {
            Some(opens) => opens.text += &format!("\n// Of {}, by default:\n\n{}", part.path, part.text),
            None => kept.push(part),
        }
    }
    kept
}

fn is_section_of(part: &Part, file: &str) -> bool {
    part.path.split_once('#').is_some_and(|(of, _)| of == file)
}

/// Joins the parts of each file where its first one stands.
fn by_file(parts: Vec<Part>) -> Vec<Part> {
    let mut files: Vec<Part> = Vec::new();
    for part in parts {
        let (file, section) = part.path.split_once('#').map_or((&*part.path, None), |(file, name)| (file, Some(name)));
        match files.iter_mut().find(|known| known.path.split('#').next() == Some(file)) {
            Some(known) => {
                known.path += &section.map_or(String::new(), |name| format!(" #{name}"));
                known.text = [known.text.as_str(), &part.text].join("\n");
            }
            None => files.push(part),
        }
    }
    files
}

/// The top-level functions of a file, with the comments above them: name and text.
fn functions(text: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    let mut comment: Option<usize> = None;
    let mut open: Option<(&str, usize)> = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let end = at + line.trim_end().len();
        match (open, line.strip_prefix("fn ").and_then(|rest| rest.split_once('('))) {
            (Some((name, start)), _) if line.starts_with('}') => {
                found.push((name, &text[start..end]));
                open = None;
            }
            (None, Some((name, rest))) => {
                let start = comment.unwrap_or(at);
                match rest.trim_end().ends_with("{}") {
                    true => found.push((name, &text[start..end])),
                    false => open = Some((name, start)),
                }
            }
            _ => {}
        }
        comment = if line.starts_with("//") { comment.or(Some(at)) } else { None };
        at += line.len();
    }
    found
}

/// The text without comments.
fn code_of(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

fn calls(code: &str, function: &str) -> bool {
    code.match_indices(function).any(|(at, _)| {
        let inside_a_name = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        !inside_a_name && code[at + function.len()..].starts_with('(')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(path: &str, text: &str) -> Part {
        Part { path: path.into(), has_defaults: !path.contains('#'), by: String::new(), text: text.into() }
    }

    #[test]
    fn functions_come_with_their_comments() {
        let text = "// header\n\n// Does.\n// More.\nfn a(x: u32) -> u32 {\n    return x;\n}\n\nfn b() {}\n\nconst C: u32 = 1u;\n";
        let found = functions(text);
        assert_eq!(found, [("a", "// Does.\n// More.\nfn a(x: u32) -> u32 {\n    return x;\n}"), ("b", "fn b() {}")]);
    }

    #[test]
    fn defaults_stand_where_their_slot_is_opened() {
        let of = |path: &str, by: &str, text: &str| Part { by: by.into(), ..part(path, text) };
        let parts = vec![
            of("x/y.wgsl#one", "", "fn one() {}\n"),
            of("x/alone.wgsl", "x/y.wgsl#one", "fn alone() {}\n"),
            of("x/chosen.wgsl#way", "x/y.wgsl#one", "fn way() {}\n"),
            of("x/chosen.wgsl", "x/y.wgsl#one", "fn other() {}\n"),
        ];
        let found = where_opened(parts.clone());
        assert_eq!(found[0].text, "fn one() {}\n\n// Of x/alone.wgsl, by default:\n\nfn alone() {}\n");
        assert_eq!(found[1..], parts[2..]);
    }

    #[test]
    fn defaults_are_taken_where_they_are_called_and_nobody_else_has_them() {
        let slot = "// Says.\n\nfn a() {}\n\nfn b() {\n    c();\n}\n\nfn c() {}\n\nfn d() {}\n";
        let parts = vec![part("x/y.wgsl#one", "fn a() {\n    b();\n}\n"), part("x/y.wgsl", slot)];
        let found = with_defaults(parts.clone());
        assert_eq!(found[0], parts[0]);
        assert_eq!(found[1].text, "fn b() {\n    c();\n}\n\nfn c() {}\n");
    }

    #[test]
    fn sections_of_a_file_stand_together() {
        let parts = ["a.wgsl#x", "b.wgsl", "a.wgsl#y", "a.wgsl"].map(|path| part(path, &format!("{path}\n")));
        let found = by_file(parts.to_vec());
        assert_eq!(found.iter().map(|part| &*part.path).collect::<Vec<_>>(), ["a.wgsl#x #y", "b.wgsl"]);
        assert_eq!(found[0].text, "a.wgsl#x\n\na.wgsl#y\n\na.wgsl\n");
    }

    #[test]
    fn a_name_within_a_name_is_no_call() {
        assert!(calls("let x = begin(1u);", "begin"));
        assert!(!calls("let x = to_begin(1u) + begin_all(2u);", "begin"));
    }
}
