//! What a sequence that is compressed again keeps is chosen where it was measured, and is what the policy
//! chooses on the host.

use std::cell::RefCell;
use std::rc::Rc;

use kvpack::backend::{Forward, Forwarding, MeasuredAttention, QueriesAndKeys, TokenSelection as _};
use kvpack::cache::Recipe;
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::policy::{LayerStatistics, Policy, Pool, Pooling, ScoreRule, StatsRequest, Weighing};
use kvpack::{AttentionShape, Result, SegmentFormat};
use pollster::block_on;
use proptest::prelude::*;

use any_backend::compressed::growing::{append, as_selection, compress_again, joined, spans};
use any_backend::compressed::{Prompt, policies};

const LAYERS: usize = 3;

/// A CPU that writes down what it measured, and which tensors the host looked at.
#[derive(Clone, Default)]
struct Watched {
    cpu: Cpu,
    measured: Rc<RefCell<Vec<LayerStatistics>>>,
    downloads: Rc<RefCell<Vec<Vec<f32>>>>,
}

impl Forward for Watched {
    type Inner = Cpu;

    fn inner(&self) -> &Cpu {
        &self.cpu
    }

    async fn download(&self, tensor: &CpuTensor) -> Result<Vec<f32>> {
        self.downloads.borrow_mut().push(tensor.to_f32());
        Ok(tensor.to_f32())
    }

    fn measure_attention(
        &self,
        input: QueriesAndKeys<'_, CpuTensor>,
        request: StatsRequest,
        known_lse: Option<&CpuTensor>,
    ) -> Result<MeasuredAttention<CpuTensor, <Cpu as kvpack::backend::TokenSelection>::Words>> {
        let measured = self.cpu.measure_attention(input, request, known_lse)?;
        let counts = measured.counts.as_ref().map(|counts| block_on(self.cpu.download_words(counts)));
        let counts = counts.transpose()?.unwrap_or_default();
        self.measured.borrow_mut().push(LayerStatistics { column_sums: measured.column_sums.to_f32(), counts });
        Ok(measured)
    }
}

/// The presets, and policies that weigh and pool otherwise.
fn all_policies(ratio: f64) -> Vec<(&'static str, Policy)> {
    let h2o = Policy::h2o(ratio).unwrap();
    let mean = ScoreRule { weighing: Weighing::MeanOfVisible, ..h2o.scores };
    let largest = ScoreRule { pooling: Some(Pooling::new(Pool::Max, 5).unwrap()), ..h2o.scores };
    let others = [("mean", Policy { scores: mean, ..h2o.clone() }), ("largest", Policy { scores: largest, ..h2o })];
    policies(ratio).into_iter().chain(others).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_device_keeps_what_the_host_would(
        ratio in prop::sample::select(vec![0.0, 0.1, 0.3, 0.7, 1.0]),
        prompt in prop::option::of(60usize..200),
        rounds in prop::collection::vec((1usize..150, 1usize..64), 1..4),
        equal in any::<bool>(),
        seed in 0u64..1000,
    ) {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        let tokens = |count: usize, seed: u64| Prompt::new(shape, LAYERS, count, seed);
        for (name, policy) in all_policies(ratio) {
            let backend = Forwarding(Watched::default());
            let watched = &backend.0;
            let mut cache = tokens(1, 1).cache(&backend, &Recipe::pack_all(SegmentFormat::saw_int4()).with_window(16));
            if let Some(count) = prompt {
                block_on(cache.compress(0, &tokens(count, seed).observe(&cache, policy.clone()))).unwrap();
            }
            for (round, &(count, rows)) in rounds.iter().enumerate() {
                let mut appended = tokens(count, seed + 1 + round as u64);
                if equal {
                    // Every key weighs the same, and the earlier token stays.
                    appended.queries.iter_mut().for_each(|queries| queries.fill(0.0));
                }
                append(&mut cache, 0, &appended);
                let rows = rows.min(policy.rows_again(count));
                let held: Vec<_> = (0..LAYERS).map(|layer| joined(&cache, layer, 0)).collect();
                let length = cache.length(0).unwrap();
                watched.measured.take();
                watched.downloads.take();
                let selection = compress_again(&mut cache, 0, &policy, (&appended, rows)).unwrap();
                let (measured, downloads) = (watched.measured.take(), watched.downloads.take());
                prop_assert_eq!(measured.len(), if rows > 0 { LAYERS } else { 0 });
                let expected = policy.select_again(&spans(length), &as_selection(&held, length), rows, &measured);
                prop_assert_eq!(&Ok(selection), &expected, "{}, round {}", name, round);
                // Text lies at other places in every head, which only the host tells apart.
                let seen = measured.iter().filter(|of| downloads.contains(&of.column_sums)).count();
                prop_assert_eq!(seen, if name == "lookm" { LAYERS } else { 0 }, "{}", name);
            }
        }
    }
}
