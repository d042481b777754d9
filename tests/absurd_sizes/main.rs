//! Every public function that takes a number, with numbers that no program means: none panics, ends the process, takes
//! memory without a limit or an hour.
//!
//! The calls run in a process of their own whose allocator refuses more than [`limited_memory::MOST_BYTES`], so that a
//! vector whose length a caller decides, and that nobody checked, ends it. A list of the functions is read from the
//! sources: a new one without a call fails `every_public_function_is_called`.

mod attend_calls;
mod budget_calls;
mod cache_calls;
mod cpu_calls;
mod format_calls;
mod limited_memory;
mod narrowing;
mod plan_calls;
mod policy_calls;
mod public_functions;
mod rank_calls;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use kvpack::AttentionShape;

/// Sizes at the ends of what is allowed and far beyond: of heads, tiles, positions, 32 bits, memory and 64 bits.
pub const SIZES: [usize; 14] = [
    0,
    1,
    2,
    64,
    129,
    65_535,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 33,
    1 << 57,
    usize::MAX / 2 + 1,
    usize::MAX,
];

/// Numbers of 32 bits, likewise.
pub const WORDS: [u32; 7] = [0, 1, 2, 127, 1 << 16, 1 << 31, u32::MAX];

/// Numbers that are none, too large or too small.
pub const FLOATS: [f32; 12] =
    [0.0, -0.0, 0.5, 1.0, -1.0, 1e-40, 65504.0, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];

/// What one function may take for all its calls, on a slow and busy machine.
const MOST_TIME: Duration = Duration::from_secs(30);

/// Set in the process whose memory is limited: the first call that it makes.
const LIMITED: &str = "KVPACK_TEST_LIMITED_MEMORY";

/// A public function, and what calls it with all numbers.
pub type Call = (&'static str, Box<dyn Fn()>);

/// The calls of functions, by name.
#[macro_export]
macro_rules! calls {
    ($($name:literal => $call:expr;)*) => {
        vec![$(($name, Box::new(move || $call) as Box<dyn Fn()>)),*]
    };
}

/// Uses a result, so that no call is left out for having none.
pub fn done<T>(result: T) {
    drop(std::hint::black_box(result));
}

/// Calls with every size.
pub fn sizes(call: impl Fn(usize)) {
    SIZES.into_iter().for_each(call);
}

/// Calls with every pair of sizes.
pub fn pairs(call: impl Fn(usize, usize)) {
    sizes(|a| sizes(|b| call(a, b)));
}

/// Calls with every three sizes.
pub fn triples(call: impl Fn(usize, usize, usize)) {
    sizes(|a| pairs(|b, c| call(a, b, c)));
}

/// Calls with every three of the sizes that tell cases apart: none, one, a row, 32 bits and 64.
pub fn few_triples(call: impl Fn(usize, usize, usize)) {
    const FEW: [usize; 6] = [0, 1, 64, 1 << 32, usize::MAX / 2 + 1, usize::MAX];
    for a in FEW {
        FEW.into_iter().for_each(|b| FEW.into_iter().for_each(|c| call(a, b, c)));
    }
}

/// Calls with every number of 32 bits.
pub fn words(call: impl Fn(u32)) {
    WORDS.into_iter().for_each(call);
}

/// Calls with every float.
pub fn floats(call: impl Fn(f32)) {
    FLOATS.into_iter().for_each(call);
}

/// Calls with every float, and every one as f64.
pub fn doubles(call: impl Fn(f64)) {
    FLOATS.into_iter().map(f64::from).chain([f64::MAX, f64::MIN_POSITIVE, 1.0 - f64::EPSILON]).for_each(call);
}

/// The heads of all calls.
pub fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

fn all_calls() -> Vec<Call> {
    let rooms = [
        policy_calls::calls,
        format_calls::calls,
        plan_calls::calls,
        cpu_calls::calls,
        attend_calls::calls,
        cache_calls::calls,
        budget_calls::calls,
        rank_calls::calls,
    ];
    rooms.into_iter().flat_map(|calls| calls()).collect()
}

/// Functions without a call, and why.
const NOT_CALLED: &[(&str, &str)] = &[
    ("backend::Forward::", "it hands everything to another backend"),
    ("format::MsbWord::", "nobody else implements or calls it"),
    ("plan::QueryRun::decode_batch", "it makes the runs that are asked for, and returns no error"),
];

#[test]
fn every_public_function_is_called() {
    let found = public_functions::with_numbers();
    assert!(found.len() > 200, "the sources have only {} public functions that take numbers", found.len());
    let calls = all_calls();
    let called: BTreeSet<String> = calls.iter().map(|(name, _)| (*name).into()).collect();
    assert_eq!(called.len(), calls.len(), "a function is called twice");
    let is_exempt = |name: &String| NOT_CALLED.iter().any(|(prefix, _)| name.starts_with(prefix));
    let missing: Vec<&String> = found.iter().filter(|name| !called.contains(*name) && !is_exempt(name)).collect();
    let gone: Vec<&String> = called.iter().filter(|name| !found.contains(*name)).collect();
    assert!(missing.is_empty(), "public functions that take numbers and are not called with absurd ones: {missing:#?}");
    assert!(gone.is_empty(), "calls of functions that there are not: {gone:#?}");
}

#[test]
fn no_number_ends_the_process() {
    let calls = all_calls().len();
    let (mut next, mut faults) = (0, Vec::new());
    while next < calls {
        let (status, text) = run_limited(next);
        faults.extend(text.lines().filter(|line| line.starts_with("fault: ")).map(str::to_owned));
        let called = text.lines().filter(|line| line.starts_with("calling ")).count();
        next += called;
        if !status.success() && !text.contains("called all") {
            // The others are called all the same.
            let last = text.lines().rfind(|line| line.starts_with("calling ")).unwrap_or("nothing was called");
            faults.push(format!("fault: {status}, {last}"));
        }
        assert!(called > 0, "no function was called: {status}\n{text}");
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Runs the calls from number `first` on in a process of limited memory. Returns its exit status and its output.
fn run_limited(first: usize) -> (ExitStatus, String) {
    let mut limited = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "calls_in_limited_memory", "--ignored", "--nocapture"])
        .env(LIMITED, first.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (said, lines) = std::sync::mpsc::channel();
    let output = BufReader::new(limited.stdout.take().unwrap());
    let reader = std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| said.send(line)));
    let mut text = String::new();
    let status = loop {
        match lines.recv_timeout(MOST_TIME) {
            Ok(line) => text += &(line + "\n"),
            Err(RecvTimeoutError::Disconnected) => break limited.wait().unwrap(),
            Err(RecvTimeoutError::Timeout) => {
                limited.kill().unwrap();
                break limited.wait().unwrap();
            }
        }
    };
    drop(lines);
    let _ = reader.join().unwrap();
    (status, text)
}

/// Run by `no_number_ends_the_process`, in a process of its own.
#[test]
#[ignore = "it needs a process of its own"]
fn calls_in_limited_memory() {
    let Some(first) = std::env::var(LIMITED).ok().and_then(|first| first.parse().ok()) else { return };
    limited_memory::limit();
    for (name, call) in all_calls().into_iter().skip(first) {
        println!("calling {name}");
        if catch_unwind(AssertUnwindSafe(call)).is_err() {
            println!("fault: {name} panicked");
        }
    }
    println!("called all");
}
