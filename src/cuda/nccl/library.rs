//! The functions of NCCL that the transport calls, loaded at run time.
//!
//! cudarc has bindings too. They look for `libnccl.so` alone, which only development packages install, panic where it or
//! a function is missing, and read results into an enum that a newer library has more of.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::{Error, Result};

/// An opaque communicator.
pub(super) type Communicator = *mut c_void;

/// The version of NCCL that brought what is called here: communicators that do not block. In NCCL's numbering.
const LEAST_VERSION: c_int = 21_400;

/// Results of NCCL that are not errors.
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` as in version 2.14. NCCL takes the size that a configuration has, and its own defaults for what came
/// later.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Config {
    /// A communicator whose calls return at once.
    pub(super) const NOT_BLOCKING: Self =
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: LEAST_VERSION as u32, blocking: 0 };
}

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $name:literal: ($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions, each under its name without the prefix.
        #[derive(Debug)]
        pub(super) struct Functions {
            $($(#[$doc])* pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            fn of(library: &'static Library) -> std::result::Result<Self, String> {
                Ok(Self {
                    $($field: {
                        // SAFETY: The types are those of NCCL's header.
                        let function = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> $result>($name.to_bytes_with_nul())
                        };
                        *function.map_err(|error| format!("it lacks {:?}: {error}", $name))?
                    },)*
                })
            }
        }
    };
}

functions! {
    get_version = c"ncclGetVersion": (*mut c_int) -> c_int;
    get_unique_id = c"ncclGetUniqueId": (*mut UniqueId) -> c_int;
    init_rank = c"ncclCommInitRankConfig": (*mut Communicator, c_int, UniqueId, c_int, *mut Config) -> c_int;
    async_error = c"ncclCommGetAsyncError": (Communicator, *mut c_int) -> c_int;
    finalize = c"ncclCommFinalize": (Communicator) -> c_int;
    destroy = c"ncclCommDestroy": (Communicator) -> c_int;
    abort = c"ncclCommAbort": (Communicator) -> c_int;
    count = c"ncclCommCount": (Communicator, *mut c_int) -> c_int;
    user_rank = c"ncclCommUserRank": (Communicator, *mut c_int) -> c_int;
    all_gather = c"ncclAllGather": (*const c_void, *mut c_void, usize, c_int, Communicator, *mut c_void) -> c_int;
    broadcast = c"ncclBroadcast":
        (*const c_void, *mut c_void, usize, c_int, c_int, Communicator, *mut c_void) -> c_int;
    error_string = c"ncclGetErrorString": (c_int) -> *const c_char;
    last_error = c"ncclGetLastError": (Communicator) -> *const c_char;
}

/// The functions of the installed library.
///
/// # Errors
/// [`Error::Adapter`] when there is none, or it is older than 2.14.
pub(super) fn functions() -> Result<&'static Functions> {
    static LOADED: OnceLock<std::result::Result<Functions, String>> = OnceLock::new();
    LOADED.get_or_init(load).as_ref().map_err(|reason| Error::Adapter {
        reason: format!(
            "NCCL cannot be used: {reason}. Install it (libnccl.so.2, NVIDIA's package libnccl2 or nvidia-nccl) or set \
             the library path; ranks of one host need none over cuda::peer"
        ),
    })
}

/// The library, or the loader's reasons why there is none.
fn load_nccl() -> std::result::Result<Library, String> {
    // The name in run-time packages, and that in development packages.
    let names = [format!("{DLL_PREFIX}nccl{DLL_SUFFIX}.2"), format!("{DLL_PREFIX}nccl{DLL_SUFFIX}")];
    let mut reasons = Vec::new();
    for name in names {
        // SAFETY: Loads NCCL, whose initialisers run in every program that links it.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    Err(reasons.join("; "))
}

fn load() -> std::result::Result<Functions, String> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    let library = load_nccl()?;
    let functions = Functions::of(LIBRARY.get_or_init(|| library))?;
    let mut version = 0;
    // SAFETY: NCCL writes one integer.
    let result = unsafe { (functions.get_version)(&mut version) };
    // Versions up to 2.8 were numbered by thousands.
    if result != SUCCESS || version < LEAST_VERSION {
        return Err(format!("it has version {version}, and {LEAST_VERSION} (2.14) or newer is needed"));
    }
    Ok(functions)
}

impl Functions {
    /// The meaning of a result, and the communicator's own message about it.
    pub(super) fn message(&self, communicator: Communicator, result: c_int) -> String {
        let text = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: NCCL returns texts of its own, which end with a zero.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned(),
        };
        // SAFETY: Takes any number.
        let meaning = text(unsafe { (self.error_string)(result) });
        // SAFETY: NCCL takes a communicator or null.
        let detail = text(unsafe { (self.last_error)(communicator) });
        if detail.is_empty() { meaning } else { format!("{meaning} ({detail})") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the library is missing, the error says so, and nothing panics.
    #[test]
    fn no_library_is_a_typed_error() {
        if load_nccl().is_ok() {
            return;
        }
        let error = functions().unwrap_err();
        assert!(matches!(error, Error::Adapter { .. }), "{error}");
        assert!(error.to_string().contains("libnccl.so.2") && error.to_string().contains("cuda::peer"), "{error}");
    }

    #[test]
    fn the_configuration_is_that_of_its_version() {
        assert_eq!(size_of::<Config>(), 24);
        assert_eq!(Config::NOT_BLOCKING.size, 24);
    }
}
