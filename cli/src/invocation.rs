//! How the command was called: as a program, or by another program that holds it, as the Python module does.

use std::ffi::OsString;
#[cfg(feature = "cuda")]
use std::process::Command;
use std::sync::OnceLock;

static CALLED: OnceLock<Invocation> = OnceLock::new();

/// The call that this process serves.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// What starts the command again: a program and its first arguments.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only ranks on several GPUs are started again"))]
    program: Vec<OsString>,
    /// The arguments behind the name of the command.
    arguments: Vec<OsString>,
}

impl Invocation {
    /// The arguments of this process, whose program is the command.
    pub fn of_process() -> Self {
        let program = std::env::current_exe().map_or_else(|_| "kvpack".into(), Into::into);
        Self { program: vec![program], arguments: std::env::args_os().skip(1).collect() }
    }

    /// A call from another program. `program` starts the command again: a program and its first arguments.
    pub const fn of(program: Vec<OsString>, arguments: Vec<OsString>) -> Self {
        Self { program, arguments }
    }

    /// The name of the command and its arguments.
    pub fn words(&self) -> impl Iterator<Item = OsString> {
        std::iter::once(OsString::from("kvpack")).chain(self.arguments.iter().cloned())
    }

    /// Makes this the call that the process serves, if it serves none yet.
    pub fn keep(self) -> &'static Self {
        CALLED.get_or_init(|| self)
    }

    /// The call that this process serves.
    pub fn current() -> &'static Self {
        CALLED.get_or_init(Self::of_process)
    }

    /// Starts the command once more, with other arguments.
    #[cfg(feature = "cuda")]
    pub fn again(&self) -> Command {
        let mut command = Command::new(self.program.first().map_or("kvpack".as_ref(), OsString::as_os_str));
        command.args(self.program.iter().skip(1));
        command
    }
}
