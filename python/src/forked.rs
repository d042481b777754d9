//! Processes that were forked: workers of PyTorch's DataLoader, for one. They have the memory of their parent, and none
//! of its threads, so that work for the threads that all of rayon shares would never end.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use kvpack::{Error, Result};
use rayon::ThreadPool;

/// The process that imported the module, whose threads are those of rayon.
static IMPORTED: OnceLock<u32> = OnceLock::new();

/// The threads of a forked process.
static OWN: AtomicPtr<(u32, ThreadPool)> = AtomicPtr::new(std::ptr::null_mut());

/// Notes that this process imports the module.
pub fn imported() {
    IMPORTED.get_or_init(std::process::id);
}

/// Whether the process that imported the module is another.
pub fn is_forked() -> bool {
    IMPORTED.get().is_some_and(|&process| process != std::process::id())
}

/// Works with threads of this process.
pub fn with_threads<R: Send>(work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    if is_forked() { own_threads()?.install(work) } else { work() }
}

/// The threads of this forked process. They live as long as it does.
fn own_threads() -> Result<&'static ThreadPool> {
    let process = std::process::id();
    // SAFETY: what it points to is never freed.
    if let Some((of, threads)) = unsafe { OWN.load(Ordering::Acquire).as_ref() }
        && *of == process
    {
        return Ok(threads);
    }
    let failed = |error| Error::Unsupported {
        what: format!("threads of a forked process ({error})"),
        hint: "use the cache in the process that made it".into(),
    };
    let threads = rayon::ThreadPoolBuilder::new().build().map_err(failed)?;
    let threads: &'static mut (u32, ThreadPool) = Box::leak(Box::new((process, threads)));
    OWN.store(threads, Ordering::Release);
    Ok(&threads.1)
}
