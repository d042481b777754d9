//! Compiles the sources with NVRTC, and keeps the binaries.

use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;

use cudarc::nvrtc::{result as nvrtc, sys};

use super::driver::DeviceFacts;
use super::kept_file::{self, hash};
use super::libraries::nvrtc_present;
use super::sources::KernelSources;
use crate::{Error, Result};

/// The place where compiled kernels are kept between runs.
///
/// Files are named after a hash of the source, the options and the architecture. Several versions of kvpack and several
/// machines may therefore share a directory, and a program may ship one to machines without NVRTC. A file that is
/// damaged is compiled again and replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelCache {
    /// In this directory, which is created when it is needed.
    Directory(PathBuf),
    /// Nowhere: every process compiles the kernels again.
    None,
}

impl KernelCache {
    /// The directory `kvpack` in the user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`, or `%LOCALAPPDATA%`), or
    /// [`KernelCache::None`] if the environment names no such folder.
    pub fn of_user() -> Self {
        let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = || folder("HOME").map(|home| home.join(".cache"));
        match folder("XDG_CACHE_HOME").or_else(home).or_else(|| folder("LOCALAPPDATA")) {
            Some(folder) => Self::Directory(folder.join("kvpack")),
            None => Self::None,
        }
    }

    fn path(&self, program: &Program, architecture: &str) -> Option<PathBuf> {
        match self {
            Self::Directory(directory) => Some(directory.join(program.file_name(architecture))),
            Self::None => None,
        }
    }

    /// The binary kept for a program, if its file is whole.
    pub(super) fn read(&self, program: &Program, architecture: &str) -> Option<Vec<u8>> {
        self.path(program, architecture).and_then(|path| kept_file::read(&path))
    }

    /// Keeps a binary. If the directory cannot be written, the next process only has to compile again.
    pub(super) fn write(&self, program: &Program, architecture: &str, binary: &[u8]) {
        if let Some(path) = self.path(program, architecture) {
            kept_file::write(&path, binary).unwrap_or(());
        }
    }
}

/// Files compiled together, and the macros they are compiled with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    /// The files of the library.
    pub sources: &'static KernelSources,
    /// The files to compile, by their paths.
    pub files: &'static [&'static str],
    /// Macros and their values.
    pub defines: Vec<(&'static str, usize)>,
}

impl Program {
    /// The architecture to compile for, in NVRTC's spelling. Warpgroup instructions exist on one architecture only, and
    /// not on later ones.
    pub fn architecture(&self, facts: &DeviceFacts) -> String {
        let architecture = facts.architecture();
        if self.defines.contains(&("WARPGROUPS", 1)) { architecture + "a" } else { architecture }
    }

    fn options(&self, architecture: &str) -> Vec<String> {
        let define = |(name, value): &(&str, usize)| format!("-D{name}={value}");
        let fixed = [format!("--gpu-architecture={architecture}"), "--std=c++17".into()];
        fixed.into_iter().chain(self.defines.iter().map(define)).collect()
    }

    fn file_name(&self, architecture: &str) -> String {
        let mut text = self.sources.assemble(self.files);
        self.options(architecture).iter().for_each(|option| text.push_str(option));
        let name = self.files.last().map_or("kernel", |file| file.trim_end_matches(".cu"));
        format!("{name}-{architecture}-{:016x}{:016x}.cubin", hash(text.as_bytes(), 0), hash(text.as_bytes(), 1))
    }

    /// Compiles to a binary of `architecture`.
    ///
    /// # Errors
    /// [`Error::Adapter`] when NVRTC is not installed, [`Error::Gpu`] with its log when it refuses the source.
    pub fn compile(&self, architecture: &str) -> Result<Vec<u8>> {
        self.compile_with(&self.options(architecture)).map(|(binary, _)| binary)
    }

    /// What the compiler remarks on the kernels: registers, spills, and products of warpgroups that it makes wait for
    /// each other ("serialized").
    ///
    /// # Errors
    /// As [`Program::compile`].
    pub fn compiler_remarks(&self, architecture: &str) -> Result<String> {
        let mut options = self.options(architecture);
        options.push("--ptxas-options=-v".into());
        self.compile_with(&options).map(|(_, log)| log)
    }

    fn compile_with(&self, options: &[String]) -> Result<(Vec<u8>, String)> {
        if !nvrtc_present() {
            let reason = "NVRTC (libnvrtc, part of the CUDA toolkit) was not found, and the kernels are not in the kernel \
                          cache; install it, set the library path, or ship a filled cache";
            return Err(Error::Adapter { reason: reason.into() });
        }
        let source = c_string(self.sources.assemble(self.files))?;
        let failed = |what: &str, error: nvrtc::NvrtcError| Error::Gpu { message: format!("NVRTC, {what}: {error:?}") };
        let program = nvrtc::create_program(&source, None).map_err(|error| failed("source", error))?;
        // SAFETY: `program` was just created, is used by this thread alone, and is destroyed once, below.
        let compiled = unsafe { nvrtc::compile_program(program, options) };
        let log = log_of(program);
        let binary = match compiled {
            Ok(()) => binary_of(program).map_err(|error| failed("binary", error)),
            Err(error) => Err(failed(&log, error)),
        };
        // SAFETY: Created above and not used after this.
        unsafe { nvrtc::destroy_program(program) }.map_err(|error| failed("release", error))?;
        Ok((binary?, log))
    }
}

fn binary_of(program: sys::nvrtcProgram) -> std::result::Result<Vec<u8>, nvrtc::NvrtcError> {
    let mut bytes = 0;
    // SAFETY: The program is compiled. The vector for the binary has the size that NVRTC reports.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &mut bytes).result()?;
        let mut binary = vec![0u8; bytes];
        sys::nvrtcGetCUBIN(program, binary.as_mut_ptr().cast::<c_char>()).result()?;
        Ok(binary)
    }
}

fn log_of(program: sys::nvrtcProgram) -> String {
    // SAFETY: the program exists; NVRTC ends its log with a zero.
    let log = unsafe { nvrtc::get_program_log(program) }.unwrap_or_default();
    let bytes: Vec<u8> = log.iter().map(|&byte| byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn c_string(text: String) -> Result<CString> {
    CString::new(text).map_err(|error| Error::Gpu { message: format!("kernel source: {error}") })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    static SOURCES: KernelSources = KernelSources {
        library: "test",
        files: &[("quantize.cu", "// Quantises.\n"), ("dequantize.cu", "// Back.\n")],
    };

    fn program(bits: usize) -> Program {
        Program { sources: &SOURCES, files: &["quantize.cu"], defines: vec![("KEY_BITS", bits)] }
    }

    #[test]
    fn names_depend_on_source_options_and_architecture() {
        let name = program(4).file_name("sm_90");
        assert!(name.starts_with("quantize-sm_90-") && name.ends_with(".cubin"), "{name}");
        assert_eq!(name, program(4).file_name("sm_90"));
        assert_ne!(name, program(2).file_name("sm_90"));
        assert_ne!(name, program(4).file_name("sm_80"));
        assert_ne!(name, Program { files: &["dequantize.cu"], ..program(4) }.file_name("sm_90"));
    }

    #[test]
    fn what_is_written_is_read_back() {
        let directory = std::env::temp_dir().join(format!("kvpack-kernel-cache-{}", std::process::id()));
        let cache = KernelCache::Directory(directory.clone());
        assert_eq!(cache.read(&program(4), "sm_90"), None);
        cache.write(&program(4), "sm_90", b"binary");
        assert_eq!(cache.read(&program(4), "sm_90").as_deref(), Some(b"binary".as_slice()));
        assert_eq!(cache.read(&program(2), "sm_90"), None);
        assert_eq!(KernelCache::None.read(&program(4), "sm_90"), None);
        // A damaged file counts as missing, and what is then compiled takes its place.
        fs::write(directory.join(program(4).file_name("sm_90")), b"bin").unwrap();
        assert_eq!(cache.read(&program(4), "sm_90"), None);
        cache.write(&program(4), "sm_90", b"again");
        assert_eq!(cache.read(&program(4), "sm_90").as_deref(), Some(b"again".as_slice()));
        fs::remove_dir_all(directory).unwrap();
    }
}
