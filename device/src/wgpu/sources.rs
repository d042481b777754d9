//! The shader files of a library, which hands them in with every variant.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};

use super::beside;

/// The WGSL files of a library, and what its kernels agree on. Two of them are equal if they have the same name.
pub struct ShaderSources {
    /// Name of the library. The labels of its kernels begin with it. No two libraries of a program share one.
    pub library: &'static str,
    /// Path and text of every file. A kernel is a file `{folder}/{kernel}.wgsl`.
    pub files: &'static [(&'static str, &'static str)],
    /// Buffers that kernels read at an offset that every dispatch gives. An engine may encode several steps before it
    /// submits the first, and each reads its own tables.
    pub tables: &'static [&'static str],
    /// The table whose contents kernels use as indices as they are, if there is one. Kernels that bind it keep all
    /// checks, even in a trusted launch. Two kernels in one dispatch share it.
    pub unclamped_table: Option<&'static str>,
}

impl ShaderSources {
    /// The text of a file.
    pub(super) fn file(&self, path: &str) -> Option<&'static str> {
        self.files.iter().find(|(name, _)| *name == path).map(|(_, text)| *text)
    }

    /// `path`, if there is such a file.
    pub(super) fn path(&self, path: &str) -> Option<&'static str> {
        self.files.iter().map(|(name, _)| *name).find(|name| *name == path)
    }

    /// The file of a kernel: `{folder}/{kernel}.wgsl` in one of the folders.
    pub(super) fn kernel_file(&self, kernel: &str) -> Option<&'static str> {
        let is_kernel = |path: &str| {
            let name = path.split_once('/').and_then(|(_, file)| file.strip_suffix(".wgsl"));
            name == Some(kernel)
        };
        self.files.iter().map(|(path, _)| *path).find(|path| is_kernel(path))
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
