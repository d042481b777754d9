//! Changed inputs through the readers, on stable Rust: how many, how many of them were taken, and what was found.
//!
//!     fuzz-readers TARGET INPUTS SEED
//!
//! Every input follows from the seed and its number, so that a run that ends early can be repeated. An input that panics
//! or takes longer than [`MOST_TIME`] is written to `target/fuzz`.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvpack_fuzz::{TARGETS, Target, mutate};

/// What one input may take.
const MOST_TIME: Duration = Duration::from_secs(10);

/// Bytes up to which all seeds are alike.
const SMALL: usize = 20_000;

/// Inputs between two lines that say how far a run has come.
const REPORT: u64 = 500_000;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, inputs, seed] = &arguments[..] else {
        eprintln!("usage: fuzz-readers TARGET INPUTS SEED; the targets are {:?}", TARGETS.map(|(name, _)| name));
        return ExitCode::from(2);
    };
    let target = TARGETS.into_iter().find(|(known, _)| known == name).map(|(_, target)| target);
    let (Some(target), Ok(inputs), Ok(seed)) = (target, inputs.parse(), seed.parse()) else {
        eprintln!("'{name}' is no target, or '{inputs}' or '{seed}' no number");
        return ExitCode::from(2);
    };
    let seeds: Vec<Vec<u8>> = mutate::seeds(name).iter().map(|file| fs::read(file).unwrap_or_default()).collect();
    if seeds.is_empty() {
        eprintln!("there are no seeds of {name} in fuzz/corpus");
        return ExitCode::from(2);
    }
    let mut end = 0.0;
    let shares = seeds.iter().map(|seed| {
        end += share(seed);
        end
    });
    let shares: Vec<f64> = shares.collect();
    set_hook(Box::new(|_| ()));
    let start = Instant::now();
    let (next, taken, found) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let run =
        Run { name, target, seeds: &seeds, shares: &shares, seed, inputs, next: &next, taken: &taken, found: &found };
    thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        (0..threads).for_each(|_| {
            scope.spawn(|| run.take_inputs());
        });
    });
    let (taken, found) = (taken.into_inner(), found.into_inner());
    let seconds = start.elapsed().as_secs_f64();
    let of_seeds = format!("{} seeds, seed {seed}", seeds.len());
    println!("{name}: {inputs} inputs from {of_seeds}, {seconds:.0} s, {taken} taken, {found} found");
    if found == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// How often a seed is changed in comparison with others. A large one takes as much time as many small ones, and most of
/// it is the same data behind another header.
fn share(seed: &[u8]) -> f64 {
    1.0 / (seed.len().max(SMALL) as f64)
}

/// What all threads share.
struct Run<'a> {
    name: &'a str,
    target: Target,
    seeds: &'a [Vec<u8>],
    /// Where the share of each seed ends.
    shares: &'a [f64],
    seed: u64,
    inputs: u64,
    next: &'a AtomicU64,
    taken: &'a AtomicU64,
    found: &'a AtomicU64,
}

impl Run<'_> {
    fn take_inputs(&self) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.inputs {
                return;
            }
            if number > 0 && number.is_multiple_of(REPORT) {
                eprintln!("{}: {number} inputs", self.name);
            }
            let input = self.input(number);
            let start = Instant::now();
            let taken = catch_unwind(AssertUnwindSafe(|| (self.target)(&input)));
            let panicked = taken.is_err();
            self.taken.fetch_add(u64::from(taken.unwrap_or(false)), Ordering::Relaxed);
            if panicked || start.elapsed() > MOST_TIME {
                self.keep(number, &input, if panicked { "panic" } else { "slow" });
            }
        }
    }

    fn input(&self, number: u64) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number));
        let pick = |random: &mut fastrand::Rng| {
            let at = random.f64() * self.shares.last().unwrap_or(&0.0);
            &self.seeds[self.shares.partition_point(|&end| end <= at).min(self.seeds.len() - 1)]
        };
        let mut input = pick(&mut random).clone();
        if random.u8(..8) == 0 {
            input = mutate::splice(&input, pick(&mut random), &mut random);
        }
        mutate::change(&mut input, &mut random);
        input
    }

    fn keep(&self, number: u64, input: &[u8], what: &str) {
        self.found.fetch_add(1, Ordering::Relaxed);
        let folder = "target/fuzz";
        let file = format!("{folder}/{}-{what}-{}-{number}", self.name, self.seed);
        if let Err(error) = fs::create_dir_all(folder).and_then(|()| fs::write(&file, input)) {
            eprintln!("{file}: {error}");
        }
        eprintln!("{what}: {file}");
    }
}
