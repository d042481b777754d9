//! Builds the source of a kernel variant from the shader files of a library.
//!
//! Every file is readable WGSL as it stands. The builder makes these seven changes, and no others:
//!
//! - `// import folder/file.wgsl` is replaced by that file, once, and `// import folder/file.wgsl#section` by a section
//!   of it, which stands below a line `// -------- section --------`;
//! - `// import slot = folder/slot.wgsl#choice` is replaced by the choice that the variant puts into the slot
//!   ([`Variant::import`]), or by the named one. A slot is a file. It states what every choice provides and holds
//!   default bodies; the choices are its sections. A default body is used when a choice leaves the function out and some
//!   code calls it. Without a choice the default bodies stand at the end of the part that opens the slot;
//! - `const NAME: u32 = 4u;` gets the value of the variant ([`Variant::constant`]), as does `alias Name = type;`
//!   ([`Variant::alias`]);
//! - `var<storage, read> name` becomes `read_write` if the variant requests it ([`Variant::writable`]);
//! - a `for (var i = 0u; i < BOUND; i++) {` under a line `// unroll` is written out, once per value, as `{ const i =
//!   0u; … }`: naga turns every loop into `while (true)` with a break, which drivers neither unroll nor keep in
//!   registers;
//! - `enable f16;` is put in front if the variant requests it;
//! - if a variant has a second kernel ([`Variant::beside`]), both become one text, with `other_` before the names of
//!   the second (`beside.rs`).
//!
//! Browsers need two more kinds of lines that naga does not know: see [`Source::for_browsers`].

use std::collections::{BTreeMap, BTreeSet};

use super::assembly::assemble;
use super::beside;
use super::sources::ShaderSources;
use super::unroll::{evaluate_constants, unroll};
use crate::{Error, Result};

/// A kernel and the choices that specialise it. Equal variants compile to the same pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    sources: &'static ShaderSources,
    kernel: &'static str,
    entry: &'static str,
    constants: BTreeMap<&'static str, String>,
    aliases: BTreeMap<&'static str, &'static str>,
    imports: BTreeMap<&'static str, &'static str>,
    writable: BTreeSet<&'static str>,
    uses_f16: bool,
    uses_matrices: bool,
    other: Option<Box<Variant>>,
}

impl Variant {
    /// The kernel in the file `{kernel}.wgsl` in one of the folders of `sources`. Its entry point has the same name.
    pub fn new(sources: &'static ShaderSources, kernel: &'static str) -> Self {
        Self {
            sources,
            kernel,
            entry: kernel,
            constants: BTreeMap::new(),
            aliases: BTreeMap::new(),
            imports: BTreeMap::new(),
            writable: BTreeSet::new(),
            uses_f16: false,
            uses_matrices: false,
            other: None,
        }
    }

    /// Selects another entry point of the file.
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

    /// Puts a choice, `{file}#{choice}`, into the import slot `slot`.
    pub fn import(mut self, slot: &'static str, choice: &'static str) -> Self {
        self.imports.insert(slot, choice);
        self
    }

    /// Declares the storage buffer `name` as `read_write` although it is only read. A launch may not bind a buffer both
    /// read-only and for writing, not even different parts of it, but it may bind both parts as `read_write`.
    pub fn writable(mut self, name: &'static str) -> Self {
        self.writable.insert(name);
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

    /// Puts another kernel with the same arguments into the same dispatch. Workgroups at z = 0 do the work of this
    /// kernel; those at z = 1 do the work of the other.
    pub fn beside(mut self, other: Self) -> Self {
        self.other = Some(Box::new(other));
        self
    }

    /// The files that it is made of.
    pub const fn sources(&self) -> &'static ShaderSources {
        self.sources
    }

    /// The kernel's name.
    pub fn kernel(&self) -> &'static str {
        self.kernel
    }

    /// The entry point's name.
    pub fn entry_point(&self) -> &'static str {
        if self.other.is_some() { beside::ENTRY } else { self.entry }
    }

    /// Names of the constants and aliases that the variant sets.
    pub fn settings(&self) -> impl Iterator<Item = &'static str> {
        self.constants.keys().chain(self.aliases.keys()).copied()
    }

    /// A label for debuggers: the kernel and its constants.
    pub fn label(&self) -> String {
        let mut label = format!("{} {}", self.sources.library, self.entry);
        for file in self.imports.values() {
            let choice = file.split_once('/').map_or(*file, |(_, choice)| choice);
            label += &format!(" {}", choice.replace(".wgsl#", "/").trim_end_matches(".wgsl"));
        }
        for (name, value) in &self.constants {
            label += &format!(" {name}={value}");
        }
        match &self.other {
            None => label,
            Some(other) => label + " beside " + other.label().trim_start_matches(self.sources.library).trim_start(),
        }
    }

    /// The WGSL of the variant.
    ///
    /// # Errors
    /// [`Error::Plan`] when the variant names a constant, alias, buffer, slot or file that the shader lacks. That is a
    /// bug of this crate, which its tests find, and never the caller's mistake.
    pub fn source(&self) -> Result<Source> {
        let text = self.text(|_| String::new())?;
        let constants = evaluate_constants(&text);
        let lines: Vec<&str> = text.lines().collect();
        let mut unrolled = String::new();
        unroll(&lines, &constants, &mut unrolled).map_err(|reason| self.broken(reason))?;
        let bindings = bindings(&unrolled);
        Ok(Source { wgsl: unrolled, bindings })
    }

    /// The WGSL of the variant for a reader. A heading before every part names its file, and loops under
    /// `// unroll` stay loops. The text is valid and equivalent.
    ///
    /// # Errors
    /// As [`source`](Self::source).
    pub fn listing(&self) -> Result<String> {
        let rule = "-".repeat(100);
        self.text(|file| format!("// {rule}\n// shaders/{file}\n// {rule}\n\n"))
    }

    /// All parts with the constants and aliases of the variant, each under its heading, including those of the second
    /// kernel.
    fn text(&self, heading: impl Fn(&str) -> String) -> Result<String> {
        let first = self.text_alone(&heading)?;
        let Some(other) = &self.other else { return Ok(first) };
        let second = other.text_alone(&heading)?;
        let shared = self.sources.shared_buffer();
        beside::beside([&first, self.entry], [&second, other.entry], shared).map_err(|reason| self.broken(reason))
    }

    fn text_alone(&self, heading: impl Fn(&str) -> String) -> Result<String> {
        let mut text = String::new();
        if self.uses_f16 {
            text += "enable f16;\n\n";
        }
        if self.uses_matrices {
            text += "enable wgpu_cooperative_matrix;\n\n";
        }
        let parts = assemble(self.sources, self.kernel, &self.imports).map_err(|reason| self.broken(reason))?;
        let parts: Vec<String> = parts.iter().map(|part| heading(&part.path) + &part.text).collect();
        text += &parts.join("\n");
        for (name, value) in &self.constants {
            text = self.replace_declaration(text, &format!("const {name}: "), "=", value)?;
        }
        for (name, value) in &self.aliases {
            text = self.replace_declaration(text, &format!("alias {name} "), "=", value)?;
        }
        for name in &self.writable {
            let declaration = format!("var<storage, read> {name}:");
            if !text.contains(&declaration) {
                return Err(self.broken(format!("no '{declaration}'")));
            }
            text = text.replace(&declaration, &format!("var<storage, read_write> {name}:"));
        }
        Ok(text)
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
            return Err(self.broken(format!("{found} declarations of '{}'; there must be 1", prefix.trim())));
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

impl Source {
    /// The text for a browser's compiler: with `enable subgroups;` where subgroups are used, and with the directives
    /// that stand in comments, `// diagnostic(…);`.
    pub fn for_browsers(&self) -> String {
        let uses_subgroups =
            self.wgsl.lines().filter_map(|line| line.split("//").next()).any(|code| code.contains("subgroup"));
        let enable = uses_subgroups.then_some("enable subgroups;\n");
        let directives = self
            .wgsl
            .lines()
            .filter_map(|line| line.strip_prefix("// "))
            .filter(|line| line.starts_with("diagnostic("));
        let directives = directives.flat_map(|directive| [directive, "\n"]);
        enable.into_iter().chain(directives).chain([self.wgsl.as_str()]).collect()
    }
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
    /// Bytes of one element if it is a word or a vector of words, otherwise 0. No smaller buffer is bound.
    pub least_bytes: u64,
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
            let (name, of) = rest.split_once(':')?;
            let (name, writable, least_bytes) = (name.trim().to_owned(), access == "read_write", element_bytes(of));
            Some(Binding { index: index.parse().ok()?, name, writable, least_bytes })
        })
        .collect();
    found.sort_by_key(|binding| binding.index);
    found
}

/// Bytes of an element of a buffer, if it is a word or a vector of words.
fn element_bytes(of: &str) -> u64 {
    let element = of.trim().trim_end_matches(';').trim_start_matches("array<").trim_start_matches("atomic<");
    match element.trim_end_matches('>') {
        "u32" | "i32" | "f32" => 4,
        "vec2<u32" | "vec2<f32" => 8,
        "vec4<u32" | "vec4<f32" => 16,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn browsers_are_told_of_subgroups() {
        let text = |wgsl: &str| Source { wgsl: wgsl.into(), bindings: Vec::new() }.for_browsers();
        assert_eq!(text("// A subgroup.\nfn f() {} // subgroups\n"), "// A subgroup.\nfn f() {} // subgroups\n");
        let (plain, said) = ("enable f16;\nlet a = subgroupMax(b);\n", "// diagnostic(off, subgroup_uniformity);\n");
        assert_eq!(text(plain), format!("enable subgroups;\n{plain}"));
        assert_eq!(
            text(&format!("{plain}{said}")),
            format!("enable subgroups;\ndiagnostic(off, subgroup_uniformity);\n{plain}{said}")
        );
    }

    #[test]
    fn bindings_are_found() {
        let found = bindings(
            "@group(0) @binding(1) var<storage, read_write> b: array<atomic<u32>>;\n\
             @group(0) @binding(0) var<storage, read> a: array<vec4<u32>>;\n\
             @group(0) @binding(2) var<storage, read> c: Call;",
        );
        let binding =
            |index, name: &str, writable, least_bytes| Binding { index, name: name.into(), writable, least_bytes };
        assert_eq!(found, [binding(0, "a", false, 16), binding(1, "b", true, 4), binding(2, "c", false, 0)]);
    }
}
