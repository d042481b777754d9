//! The `kvpack` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Mesa's device-select layer asks for a display and complains on standard error where there is none. kvpack chooses
    // among all adapters itself.
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() && std::env::var_os("NODEVICE_SELECT").is_none() {
        // SAFETY: no other thread runs yet that could read the environment.
        unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    }
    kvpack_cli::main()
}
