//! Finds out whether the CUDA libraries that are loaded at run time exist.
//!
//! cudarc panics at the first call into a library that it cannot load, so each one is probed first. cudarc has a probe
//! of its own only if nothing else in the program makes it link the libraries instead of loading them, as candle does.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::ffi::c_void;

use cudarc::driver::sys::CUDA_VERSION;
use libloading::Library;

/// True if the driver's library can be loaded. Nothing is initialised.
pub fn driver_present() -> bool {
    present(&["cuda", "nvcuda"])
}

/// A function of the driver that cudarc's bindings lack. `name` ends with a zero.
pub(super) fn driver_symbol(name: &[u8]) -> Option<*mut c_void> {
    // SAFETY: As in `present`. The library stays loaded, and nobody calls the function by this type.
    unsafe {
        let mut names = ["cuda", "nvcuda"].into_iter().flat_map(file_names);
        let library = names.find_map(|name| Library::new(name).ok())?;
        let symbol = library.get::<unsafe extern "C" fn()>(name).ok().map(|symbol| *symbol as *mut c_void);
        std::mem::forget(library);
        symbol
    }
}

/// True if NVRTC can be loaded.
pub(super) fn nvrtc_present() -> bool {
    present(&["nvrtc"])
}

fn present(libraries: &[&str]) -> bool {
    // SAFETY: Loads a CUDA library, whose initialisers run in every CUDA program, and unloads it.
    libraries.iter().flat_map(|library| file_names(library)).any(|name| unsafe { Library::new(name) }.is_ok())
}

/// File names under which cudarc looks for a library, for the CUDA version of its bindings.
fn file_names(library: &str) -> Vec<String> {
    let file = format!("{DLL_PREFIX}{library}{DLL_SUFFIX}");
    let (major, minor) = (CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10);
    if cfg!(windows) {
        let versioned =
            [format!("{major}"), format!("{major}0_0"), format!("{major}{minor}_0"), "12".into(), "11".into()];
        return versioned
            .into_iter()
            .map(|version| format!("{library}64_{version}{DLL_SUFFIX}"))
            .chain([file])
            .collect();
    }
    [format!("{file}.{major}"), format!("{file}.12"), format!("{file}.11"), format!("{file}.1"), file].into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The driver's library has this name where only the driver is installed, and NVRTC's where only its packages are.
    #[cfg(target_os = "linux")]
    #[test]
    fn names_of_installed_packages() {
        assert!(file_names("cuda").contains(&"libcuda.so.1".into()));
        assert!(file_names("nvrtc").contains(&"libnvrtc.so.12".into()));
    }

    #[test]
    fn what_is_not_there_is_not_found() {
        assert!(!present(&["kvpack-has-no-such-library"]));
    }
}
