//! Builds the source of a kernel variant from the files in `shaders/`.
//!
//! Every file is readable WGSL as it stands. The builder does four things to it, and nothing else:
//!
//! - `// import common/file.wgsl` is replaced by that file, once; `// import slot = common/file.wgsl` names a slot whose
//!   default file a variant may replace ([`Variant::import`]);
//! - `const NAME: u32 = 4u;` gets the value of the variant ([`Variant::constant`]), as does `alias Name = type;`
//!   ([`Variant::alias`]);
//! - a `for (var i = 0u; i < BOUND; i++) {` under a line `// unroll` is written out, once per value, as
//!   `{ const i = 0u; … }`: naga turns every loop into `while (true)` with a break, which drivers neither unroll nor
//!   keep in registers;
//! - `enable f16;` is put in front if the variant asks for it.

use std::collections::{BTreeMap, BTreeSet};

use super::sources;
use crate::{Error, Result};

/// A kernel and the choices that specialise it. Two variants that are equal compile to the same pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    kernel: &'static str,
    entry: &'static str,
    constants: BTreeMap<&'static str, String>,
    aliases: BTreeMap<&'static str, &'static str>,
    imports: BTreeMap<&'static str, &'static str>,
    uses_f16: bool,
    uses_matrices: bool,
}

impl Variant {
    /// The kernel in `shaders/{kernel}.wgsl`, whose entry point has the same name.
    pub fn new(kernel: &'static str) -> Self {
        Self {
            kernel,
            entry: kernel,
            constants: BTreeMap::new(),
            aliases: BTreeMap::new(),
            imports: BTreeMap::new(),
            uses_f16: false,
            uses_matrices: false,
        }
    }

    /// Takes another entry point of the file.
    pub fn entry(mut self, entry: &'static str) -> Self {
        self.entry = entry;
        self
    }

    /// Sets `const name: u32`.
    pub fn constant(mut self, name: &'static str, value: usize) -> Self {
        self.constants.insert(name, format!("{value}u"));
        self
    }

    /// Sets `const name: f32`.
    pub fn float(mut self, name: &'static str, value: f32) -> Self {
        self.constants.insert(name, format!("{value:?}f"));
        self
    }

    /// Sets `const name: vec4<f32>`.
    pub fn vector(mut self, name: &'static str, [x, y, z, w]: [f32; 4]) -> Self {
        self.constants.insert(name, format!("vec4<f32>({x:?}f, {y:?}f, {z:?}f, {w:?}f)"));
        self
    }

    /// Sets `alias name`.
    pub fn alias(mut self, name: &'static str, value: &'static str) -> Self {
        self.aliases.insert(name, value);
        self
    }

    /// Puts `file` into the import slot `slot`.
    pub fn import(mut self, slot: &'static str, file: &'static str) -> Self {
        self.imports.insert(slot, file);
        self
    }

    /// Enables 16-bit floats.
    pub fn with_f16(mut self) -> Self {
        self.uses_f16 = true;
        self
    }

    /// Enables cooperative matrices.
    pub fn with_matrices(mut self) -> Self {
        self.uses_matrices = true;
        self
    }

    /// The kernel's name.
    pub fn kernel(&self) -> &'static str {
        self.kernel
    }

    /// The entry point's name.
    pub fn entry_point(&self) -> &'static str {
        self.entry
    }

    /// A label for debuggers: the kernel and its constants.
    pub fn label(&self) -> String {
        let mut label = format!("kvpack {}", self.entry);
        for file in self.imports.values() {
            label += &format!(" {}", file.trim_start_matches("common/").trim_end_matches(".wgsl"));
        }
        for (name, value) in &self.constants {
            label += &format!(" {name}={value}");
        }
        label
    }

    /// The WGSL of the variant.
    ///
    /// # Errors
    /// [`Error::Plan`] when the variant names a constant, alias, slot or file that the shader does not have: a bug of
    /// this crate that its tests find, never of a caller.
    pub fn source(&self) -> Result<Source> {
        let mut unused_slots: BTreeSet<&str> = self.imports.keys().copied().collect();
        let mut text = String::new();
        if self.uses_f16 {
            text += "enable f16;\n";
        }
        if self.uses_matrices {
            text += "enable wgpu_cooperative_matrix;\n";
        }
        self.expand_imports(&format!("{}.wgsl", self.kernel), &mut BTreeSet::new(), &mut unused_slots, &mut text)?;
        if let Some(slot) = unused_slots.first() {
            return Err(self.broken(format!("no import slot {slot}")));
        }
        for (name, value) in &self.constants {
            text = self.replace_declaration(text, &format!("const {name}: "), "=", value)?;
        }
        for (name, value) in &self.aliases {
            text = self.replace_declaration(text, &format!("alias {name} "), "=", value)?;
        }
        let constants = evaluate_constants(&text);
        let lines: Vec<&str> = text.lines().collect();
        let mut unrolled = String::new();
        unroll(&lines, &constants, &mut unrolled).map_err(|reason| self.broken(reason))?;
        let bindings = bindings(&unrolled);
        Ok(Source { wgsl: unrolled, bindings })
    }

    fn expand_imports(
        &self,
        file: &str,
        seen: &mut BTreeSet<String>,
        unused_slots: &mut BTreeSet<&str>,
        text: &mut String,
    ) -> Result<()> {
        if !seen.insert(file.to_owned()) {
            return Ok(());
        }
        let source = sources::file(file).ok_or_else(|| self.broken(format!("no shader file {file}")))?;
        for line in source.lines() {
            let Some(import) = line.strip_prefix("// import ") else {
                text.push_str(line);
                text.push('\n');
                continue;
            };
            let chosen = match import.split_once(" = ") {
                Some((slot, default)) => {
                    unused_slots.remove(slot);
                    self.imports.get(slot).copied().unwrap_or(default)
                }
                None => import,
            };
            self.expand_imports(chosen, seen, unused_slots, text)?;
        }
        Ok(())
    }

    /// Replaces what follows `=` in the one line that starts with `prefix`.
    fn replace_declaration(&self, text: String, prefix: &str, equals: &str, value: &str) -> Result<String> {
        let mut found = 0;
        let mut replaced = String::with_capacity(text.len() + 16);
        for line in text.lines() {
            match line.strip_prefix(prefix).and_then(|rest| rest.split_once(equals)) {
                Some((before, _)) => {
                    found += 1;
                    replaced += &format!("{prefix}{before}= {value};\n");
                }
                None => {
                    replaced.push_str(line);
                    replaced.push('\n');
                }
            }
        }
        if found != 1 {
            return Err(self.broken(format!("{found} declarations of '{}', 1 is needed", prefix.trim())));
        }
        Ok(replaced)
    }

    fn broken(&self, reason: String) -> Error {
        Error::Plan { what: "shader variant", reason: format!("{}: {reason}", self.label()) }
    }
}

/// The source of a variant and the buffers it binds.
#[derive(Clone, Debug)]
pub struct Source {
    /// WGSL.
    pub wgsl: String,
    /// Its storage buffers in group 0, by binding.
    pub bindings: Vec<Binding>,
}

/// A storage buffer that a shader declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Binding index in group 0.
    pub index: u32,
    /// Name of the variable.
    pub name: String,
    /// Whether the shader writes it.
    pub writable: bool,
}

/// Finds declarations of the form `@group(0) @binding(3) var<storage, read> keys: …`.
fn bindings(text: &str) -> Vec<Binding> {
    let mut found: Vec<Binding> = text
        .lines()
        .filter_map(|line| {
            let (index, rest) = line.strip_prefix("@group(0) @binding(")?.split_once(')')?;
            let rest = rest.trim_start();
            let rest = rest.strip_prefix("@coherent ").unwrap_or(rest);
            let (access, rest) = rest.strip_prefix("var<storage, ")?.split_once('>')?;
            let (name, _) = rest.split_once(':')?;
            Some(Binding { index: index.parse().ok()?, name: name.trim().to_owned(), writable: access == "read_write" })
        })
        .collect();
    found.sort_by_key(|binding| binding.index);
    found
}

/// The values of all `const NAME: u32 = expression;` lines, in order.
fn evaluate_constants(text: &str) -> BTreeMap<String, u32> {
    let mut constants = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, expression)) = line.strip_prefix("const ").and_then(|rest| rest.split_once(": u32 = "))
            && let Some(value) = Expression::new(expression.split(';').next().unwrap_or(""), &constants).value()
        {
            constants.insert(name.to_owned(), value);
        }
    }
    constants
}

/// Writes loops under `// unroll` out, innermost last.
fn unroll(lines: &[&str], constants: &BTreeMap<String, u32>, out: &mut String) -> std::result::Result<(), String> {
    let mut at = 0;
    while at < lines.len() {
        if lines[at].trim() != "// unroll" {
            out.push_str(lines[at]);
            out.push('\n');
            at += 1;
            continue;
        }
        let header = lines.get(at + 1).ok_or("'// unroll' at the end")?;
        let (variable, bound) = loop_header(header).ok_or_else(|| format!("cannot unroll '{}'", header.trim()))?;
        let times = Expression::new(bound, constants).value().ok_or_else(|| format!("bound '{bound}' is unknown"))?;
        let indent = header.len() - header.trim_start().len();
        let closing = lines[at + 2..]
            .iter()
            .position(|line| line.trim() == "}" && line.len() - line.trim_start().len() == indent)
            .ok_or_else(|| format!("no closing brace for '{}'", header.trim()))?;
        let body = &lines[at + 2..at + 2 + closing];
        for value in 0..times {
            out.push_str(&format!("{}{{ const {variable} = {value}u;\n", " ".repeat(indent)));
            let mut inner = constants.clone();
            inner.insert(variable.to_owned(), value);
            unroll(body, &inner, out)?;
            out.push_str(&format!("{}}}\n", " ".repeat(indent)));
        }
        at += closing + 3;
    }
    Ok(())
}

/// `for (var i = 0u; i < BOUND; i++) {` as `(i, BOUND)`.
fn loop_header(line: &str) -> Option<(&str, &str)> {
    let (variable, rest) = line.trim().strip_prefix("for (var ")?.split_once(" = 0u; ")?;
    let bound = rest.strip_prefix(variable)?.strip_prefix(" < ")?.strip_suffix("++) {")?;
    Some((variable, bound.strip_suffix(variable)?.trim_end().strip_suffix(';')?))
}

/// A tiny evaluator for constant expressions: names, literals, `+ - * / %` and parentheses.
struct Expression<'a> {
    rest: &'a str,
    constants: &'a BTreeMap<String, u32>,
}

impl<'a> Expression<'a> {
    fn new(text: &'a str, constants: &'a BTreeMap<String, u32>) -> Self {
        Self { rest: text.trim(), constants }
    }

    fn value(mut self) -> Option<u32> {
        let value = self.sum()?;
        self.rest.trim().is_empty().then_some(value)
    }

    fn sum(&mut self) -> Option<u32> {
        let mut value = self.product()?;
        loop {
            value = match self.operator(&['+', '-']) {
                Some('+') => value.checked_add(self.product()?)?,
                Some(_) => value.checked_sub(self.product()?)?,
                None => return Some(value),
            };
        }
    }

    fn product(&mut self) -> Option<u32> {
        let mut value = self.atom()?;
        loop {
            value = match self.operator(&['*', '/', '%']) {
                Some('*') => value.checked_mul(self.atom()?)?,
                Some('/') => value.checked_div(self.atom()?)?,
                Some(_) => value.checked_rem(self.atom()?)?,
                None => return Some(value),
            };
        }
    }

    fn atom(&mut self) -> Option<u32> {
        self.rest = self.rest.trim_start();
        if let Some(inner) = self.rest.strip_prefix('(') {
            self.rest = inner;
            let value = self.sum()?;
            self.rest = self.rest.trim_start().strip_prefix(')')?;
            return Some(value);
        }
        let end = self.rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word.strip_suffix('u').unwrap_or(word).parse() {
            Ok(number) => Some(number),
            Err(_) => self.constants.get(word).copied(),
        }
    }

    fn operator(&mut self, allowed: &[char]) -> Option<char> {
        let trimmed = self.rest.trim_start();
        let operator = trimmed.chars().next().filter(|c| allowed.contains(c))?;
        self.rest = &trimmed[1..];
        Some(operator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions() {
        let constants = BTreeMap::from([("A".to_owned(), 6), ("B_2".to_owned(), 4)]);
        let value = |text| Expression::new(text, &constants).value();
        assert_eq!(value("A * B_2 / 3u + 1u"), Some(9));
        assert_eq!(value("2u * (A - B_2)"), Some(4));
        assert_eq!(value("A -"), None);
        assert_eq!(value("C"), None);
    }

    #[test]
    fn loops_are_written_out() {
        let text = "const N: u32 = 2u;\n// unroll\nfor (var i = 0u; i < N; i++) {\n    // unroll\n    for (var j = 0u; j < i; j++) {\n        x(i, j);\n    }\n}\nend";
        let lines: Vec<&str> = text.lines().collect();
        let mut out = String::new();
        unroll(&lines, &evaluate_constants(text), &mut out).unwrap();
        assert_eq!(
            out,
            "const N: u32 = 2u;\n{ const i = 0u;\n}\n{ const i = 1u;\n    { const j = 0u;\n        x(i, j);\n    }\n}\nend\n"
        );
    }

    #[test]
    fn bindings_are_found() {
        let found = bindings(
            "@group(0) @binding(1) var<storage, read_write> b: array<u32>;\n@group(0) @binding(0) var<storage, read> a: array<u32>;",
        );
        assert_eq!(found[0], Binding { index: 0, name: "a".into(), writable: false });
        assert_eq!(found[1], Binding { index: 1, name: "b".into(), writable: true });
    }
}
