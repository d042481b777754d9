//! The shader files of a library, which hands them in with every variant.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};

use super::beside;

/// The WGSL files of a library, and what its kernels agree on. Two of them are equal if they have the same name.
pub struct ShaderSources {
    /// Name of the library. The labels of its kernels begin with it. No two libraries of a program share one.
    pub library: &'static str,
    /// Path and text of every file. A file may have sections, such as the choices of a slot, each below a line
    /// `// -------- {section} --------`. A kernel is a file `{folder}/{kernel}.wgsl`, or a section of its name.
    pub files: &'static [(&'static str, &'static str)],
    /// Buffers that kernels read at an offset that every dispatch gives. An engine may encode several steps before it
    /// submits the first, and each reads its own tables.
    pub tables: &'static [&'static str],
    /// The table whose contents kernels use as indices as they are, if there is one. Kernels that bind it keep all
    /// checks, even in a trusted launch. Two kernels in one dispatch share it.
    pub unclamped_table: Option<&'static str>,
}

impl ShaderSources {
    /// The text of a file up to its sections, or of one section, `{file}#{section}`.
    pub(super) fn text(&self, path: &str) -> Option<&'static str> {
        let (file, wanted) = path.split_once('#').map_or((path, None), |(file, section)| (file, Some(section)));
        let (_, text) = self.files.iter().find(|(name, _)| *name == file)?;
        sections(text).into_iter().find(|(section, _)| *section == wanted).map(|(_, text)| text)
    }

    /// Whether a file has sections.
    pub(super) fn has_sections(&self, path: &str) -> bool {
        self.files.iter().any(|(name, text)| *name == path && text.lines().any(|line| section_below(line).is_some()))
    }

    /// The path of a kernel: what has its name and an entry point, a file `{folder}/{kernel}.wgsl` or a section.
    pub(super) fn kernel(&self, kernel: &str) -> Option<String> {
        self.files.iter().find_map(|(path, text)| {
            let file = path.split_once('/')?.1.strip_suffix(".wgsl");
            let is_kernel = |(section, text): &(Option<&str>, &str)| {
                section.or(file) == Some(kernel) && text.lines().any(|line| line.starts_with("@compute "))
            };
            let (section, _) = sections(text).into_iter().find(is_kernel)?;
            Some(section.map_or_else(|| (*path).to_owned(), |section| format!("{path}#{section}")))
        })
    }

    /// Whether kernels read a buffer of this name at the offset that a dispatch gives.
    pub fn is_table(&self, name: &str) -> bool {
        self.tables.contains(&name)
    }

    /// The name of a buffer of the second kernel of a dispatch ([`Variant::beside`](super::Variant::beside)).
    pub fn other_buffer(&self, name: &str) -> String {
        beside::other_name(name, self.shared_buffer())
    }

    /// The buffer that two kernels of a dispatch share; no name is empty.
    pub(super) fn shared_buffer(&self) -> &'static str {
        self.unclamped_table.unwrap_or_default()
    }
}

/// The section that begins below a line.
fn section_below(line: &str) -> Option<&str> {
    line.strip_prefix("// -------- ")?.strip_suffix(" --------")
}

/// What precedes the sections of a file, then each section with its text.
fn sections(text: &'static str) -> Vec<(Option<&'static str>, &'static str)> {
    let mut found = Vec::new();
    let (mut section, mut start, mut at) = (None, 0, 0);
    for line in text.split_inclusive('\n') {
        if let Some(next) = section_below(line.trim_end()) {
            found.push((section, &text[start..at]));
            (section, start) = (Some(next), at + line.len());
        }
        at += line.len();
    }
    found.push((section, &text[start..]));
    found
}

impl fmt::Debug for ShaderSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.library)
    }
}

impl PartialEq for ShaderSources {
    fn eq(&self, other: &Self) -> bool {
        self.library == other.library
    }
}

impl Eq for ShaderSources {}

impl Hash for ShaderSources {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.library.hash(state);
    }
}

impl Ord for ShaderSources {
    fn cmp(&self, other: &Self) -> Ordering {
        self.library.cmp(other.library)
    }
}

impl PartialOrd for ShaderSources {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_stand_below_their_lines() {
        const TEXT: &str =
            "// Slot.\nfn a() {}\n\n// -------- one --------\n\nfn b() {}\n\n// -------- two --------\nfn c() {}\n";
        const KERNEL: &str = "@compute @workgroup_size(1)\nfn d() {}\n";
        const KERNELS: &str = "// Two.\n\n// -------- one --------\n@compute @workgroup_size(1)\nfn one() {}\n";
        const FILES: &[(&str, &str)] = &[("x/slot.wgsl", TEXT), ("x/kernel.wgsl", KERNEL), ("x/two.wgsl", KERNELS)];
        let sources = ShaderSources { library: "test", files: FILES, tables: &[], unclamped_table: None };
        assert_eq!(sources.text("x/slot.wgsl"), Some("// Slot.\nfn a() {}\n\n"));
        assert_eq!(sources.text("x/slot.wgsl#one"), Some("\nfn b() {}\n\n"));
        assert_eq!(sources.text("x/slot.wgsl#two"), Some("fn c() {}\n"));
        assert_eq!(sources.text("x/slot.wgsl#three"), None);
        assert_eq!(sources.text("x/kernel.wgsl"), Some(KERNEL));
        assert!(sources.has_sections("x/slot.wgsl") && !sources.has_sections("x/kernel.wgsl"));
        let kernels = ["kernel", "one", "two"].map(|kernel| sources.kernel(kernel));
        assert_eq!(kernels.map(Option::unwrap_or_default), ["x/kernel.wgsl", "x/two.wgsl#one", ""]);
    }
}
