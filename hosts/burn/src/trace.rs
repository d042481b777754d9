//! What a step asks of wgpu, counted in the trace that wgpu writes of its calls.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ThreadId};

use log::{LevelFilter, Log, Metadata, Record};

/// Calls of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    pub submissions: usize,
    /// Waits for the device, and memory that is mapped for the host.
    pub waits: usize,
}

/// Calls on the thread of the program, where kvpack runs, and on those of cubecl.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    pub of_kvpack: Calls,
    pub of_cubecl: Calls,
}

/// Submissions and waits of kvpack, then of cubecl.
static COUNTS: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

struct Counter {
    program: ThreadId,
}

impl Log for Counter {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("wgpu_core")
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let text = record.args().to_string();
        let kind = match () {
            () if text.starts_with("Queue::submit returned") => 0,
            () if text.starts_with("Device::poll Wait") || text.starts_with("Buffer::map_async") => 1,
            () => return,
        };
        let side = usize::from(thread::current().id() != self.program);
        COUNTS[2 * side + kind].fetch_add(1, Ordering::Relaxed);
    }

    fn flush(&self) {}
}

/// Makes the thread that calls it the program's.
pub fn start() {
    // There is no other logger in this program.
    let _ = log::set_logger(Box::leak(Box::new(Counter { program: thread::current().id() })));
}

/// Runs a step and counts its calls.
pub fn counted<T>(step: impl FnOnce() -> T) -> (T, Counted) {
    COUNTS.iter().for_each(|count| count.store(0, Ordering::Relaxed));
    log::set_max_level(LevelFilter::Trace);
    let done = step();
    log::set_max_level(LevelFilter::Off);
    let [submissions, waits, by_cubecl, cubecl_waits] = COUNTS.each_ref().map(|count| count.load(Ordering::Relaxed));
    let of_cubecl = Calls { submissions: by_cubecl, waits: cubecl_waits };
    (done, Counted { of_kvpack: Calls { submissions, waits }, of_cubecl })
}
