//! Timing on the CPU: wall clock, with rayon's threads.

use std::hint::black_box;
use std::sync::OnceLock;
use std::time::Instant;

use kvpack::Result;
use kvpack::backend::AttendOptions;
use kvpack::backend::Attention;
use kvpack::conformance::{BatchLengths, DecodeData, Workload};
use kvpack::cpu::{Cpu, States, plain_attention};
use kvpack::plan::Elements;
use kvpack_report::StepTimes;
use rayon::prelude::*;

use super::append::TimedStores;
use super::timed::{Sizes, Timed, WALL_CLOCK, median};

/// Bytes to go round, so that a step finds nothing in the caches of the processor.
const FOOTPRINT: u64 = 256 << 20;

/// Words of the memory that the bandwidth is measured on: 256 MiB.
const BANDWIDTH_WORDS: usize = 32 << 20;

impl TimedStores for Cpu {}

impl Timed for Cpu {
    fn guard_tolerance(&self) -> Option<f64> {
        None
    }

    fn sizes(&self) -> Sizes {
        Sizes { largest_shape: 128 << 20, footprint: FOOTPRINT, seconds: 0.5 }
    }

    async fn time_steps(
        &self,
        workload: &Workload<Self>,
        data: &DecodeData<Self>,
        options: AttendOptions,
        seconds: f64,
    ) -> Result<StepTimes> {
        let stores = workload.stores();
        let mut steps = Vec::new();
        let mut elapsed = 0.0;
        while steps.len() < 5 || steps.len() < workload.plans.len() || elapsed < seconds {
            let plan = &workload.plans[steps.len() % workload.plans.len()];
            let start = Instant::now();
            let output = self.attend(plan, &stores, data.queries(), options).await?;
            steps.push(start.elapsed().as_secs_f64());
            elapsed += start.elapsed().as_secs_f64();
            black_box(output);
        }
        Ok(StepTimes::new(WALL_CLOCK, Vec::new(), steps))
    }

    async fn read_bandwidth(&self) -> Result<f64> {
        static MEMORY: OnceLock<Vec<u64>> = OnceLock::new();
        let memory = MEMORY.get_or_init(|| (0..BANDWIDTH_WORDS as u64).into_par_iter().collect());
        let part = memory.len().div_ceil(4 * rayon::current_num_threads());
        let pass = || {
            let start = Instant::now();
            let sum: u64 =
                memory.par_chunks(part).map(|words| words.iter().fold(0, |a: u64, w| a.wrapping_add(*w))).sum();
            black_box(sum);
            size_of_val(memory.as_slice()) as f64 / start.elapsed().as_secs_f64()
        };
        Ok((0..4).map(|_| pass()).fold(0.0, f64::max))
    }

    async fn guard_rate(&self) -> Result<f64> {
        let chain =
            |seed: u64| (0..2_000_000u64).fold(seed, |x, i| black_box(x).wrapping_mul(0x5851_f42d_4c95_7f2d) ^ i);
        let start = Instant::now();
        black_box((0..rayon::current_num_threads() as u64).into_par_iter().map(chain).reduce(|| 0, |a, b| a ^ b));
        Ok(1.0 / start.elapsed().as_secs_f64())
    }

    fn plain_step(&self, data: &DecodeData<Self>) -> Result<Option<f64>> {
        if data.decode.lengths != BatchLengths::Even {
            return Ok(None);
        }
        let first = PlainRows::new(data);
        let copies = (FOOTPRINT as usize).div_ceil(first.bytes()).max(data.decode.sequences);
        let rows = vec![first; copies];
        let mut seconds = Vec::new();
        let begin = Instant::now();
        for sequences in rows.chunks_exact(data.decode.sequences).cycle() {
            let start = Instant::now();
            for sequence in sequences {
                black_box(sequence.attend(data)?);
            }
            seconds.push(start.elapsed().as_secs_f64());
            if seconds.len() >= 5 && begin.elapsed().as_secs_f64() > 0.5 {
                break;
            }
        }
        Ok(Some(median(seconds)))
    }
}

/// Keys and values of one sequence as f32, `[kv_heads, tokens, head_dim]`.
#[derive(Clone)]
struct PlainRows {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl PlainRows {
    fn new(data: &DecodeData<Cpu>) -> Self {
        let host = data.host();
        let (shape, tokens) = (&data.decode.shape, data.decode.tokens);
        let head_major = |elements: Elements<'_>| {
            let starts =
                (0..shape.kv_heads()).flat_map(|head| (0..tokens).map(move |token| host.rows.row(token, head)));
            starts.flat_map(|start| (start..start + shape.head_dim()).map(|i| elements.get(i))).collect()
        };
        Self { keys: head_major(host.keys.elements()), values: head_major(host.values.elements()) }
    }

    fn bytes(&self) -> usize {
        size_of_val(self.keys.as_slice()) + size_of_val(self.values.as_slice())
    }

    fn attend(&self, data: &DecodeData<Cpu>) -> Result<States> {
        plain_attention(&data.decode.shape, &self.keys, &self.values, data.decode.tokens, &data.host().queries)
    }
}
