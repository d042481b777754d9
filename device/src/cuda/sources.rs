//! The CUDA files of a library, which hands them in with every program.

use std::fmt;
use std::hash::{Hash, Hasher};

/// Files that every library can include.
const SHARED: &[(&str, &str)] = &[("device/warpgroup.cuh", include_str!("../../cuda/warpgroup.cuh"))];

/// The CUDA C++ files of a library. Two of them are equal if they have the same name.
pub struct KernelSources {
    /// Name of the library. No two libraries of a program share one.
    pub library: &'static str,
    /// Path and text of every file. Files include others as `#include "path"`, and `device/warpgroup.cuh` of this
    /// crate: barriers and products of warpgroups.
    pub files: &'static [(&'static str, &'static str)],
}

impl KernelSources {
    /// Joins several files into one text: each `#include "…"` is replaced once by the file that it names.
    ///
    /// NVRTC could take the files as headers. A single text serves as the key of a cache and gives error messages one
    /// line numbering.
    pub(super) fn assemble(&self, files: &[&'static str]) -> String {
        let mut text = String::new();
        let mut included = Vec::new();
        files.iter().for_each(|name| self.include(name, &mut included, &mut text));
        text
    }

    fn file(&self, name: &str) -> Option<&'static str> {
        self.files.iter().chain(SHARED).find(|(path, _)| *path == name).map(|(_, text)| *text)
    }

    fn include(&self, name: &str, included: &mut Vec<String>, text: &mut String) {
        if included.iter().any(|seen| seen == name) {
            return;
        }
        included.push(name.into());
        for line in self.file(name).unwrap_or_default().lines() {
            match included_name(line) {
                Some(name) => self.include(name, included, text),
                None if line == "#pragma once" => {}
                None => {
                    text.push_str(line);
                    text.push('\n');
                }
            }
        }
    }

    /// What is wrong with the files, for the tests of the library: each begins with what it is, includes only files
    /// that exist, and no system headers, which NVRTC does not provide.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn check(&self) -> Result<(), String> {
        for (name, text) in self.files.iter().chain(SHARED) {
            if !text.starts_with("//") {
                return Err(format!("{name} does not begin with what it is"));
            }
            if text.contains("#include <") {
                return Err(format!("{name} includes a system header"));
            }
            let missing = text.lines().filter_map(included_name).find(|included| self.file(included).is_none());
            if let Some(missing) = missing {
                return Err(format!("{name} includes {missing}, which does not exist"));
            }
        }
        Ok(())
    }
}

fn included_name(line: &str) -> Option<&str> {
    line.strip_prefix("#include \"")?.strip_suffix('"')
}

impl fmt::Debug for KernelSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.library)
    }
}

impl PartialEq for KernelSources {
    fn eq(&self, other: &Self) -> bool {
        self.library == other.library
    }
}

impl Eq for KernelSources {}

impl Hash for KernelSources {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.library.hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: KernelSources = KernelSources {
        library: "test",
        files: &[
            ("a.cu", "// A.\n#include \"common/c.cuh\"\nvoid a();\n"),
            ("b.cu", "// B.\n#include \"common/c.cuh\"\nvoid b();\n"),
            ("common/c.cuh", "// C.\n#pragma once\nstruct Call {};\n"),
        ],
    };

    #[test]
    fn each_file_comes_once() {
        assert_eq!(FILES.check(), Ok(()));
        let text = FILES.assemble(&["a.cu", "b.cu"]);
        assert_eq!(text, "// A.\n// C.\nstruct Call {};\nvoid a();\n// B.\nvoid b();\n");
    }

    #[test]
    fn what_nvrtc_cannot_read_is_told() {
        let of = |text: &'static str| {
            let files: &'static [(&'static str, &'static str)] = Box::leak(Box::new([("a.cu", text)]));
            KernelSources { library: "test", files }.check().unwrap_err()
        };
        assert!(of("void a();").contains("begin"));
        assert!(of("// A.\n#include <cuda.h>\n").contains("system header"));
        assert!(of("// A.\n#include \"c.cuh\"\n").contains("c.cuh"));
    }
}
