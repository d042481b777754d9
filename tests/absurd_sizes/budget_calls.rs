//! What schedulers ask of caches, and budgets.

use kvpack::cache::{Budget, Growth, PromptSpan, StoreRoom, TokenRun};
use kvpack::plan::TokenRange;
use pollster::block_on;

use crate::cache_calls::{cache, model, open};
use crate::{Call, calls, done, few_triples, pairs, sizes};

pub fn calls() -> Vec<Call> {
    calls! {
        "cache::KvCache::pages_of" => sizes(|a| done(cache().pages_of(a).is_ok()));
        "cache::ModelCache::pages_of" => pairs(|a, b| done(model().pages_of(a, b).is_ok()));
        "cache::ModelCache::fits" => pairs(|sequence, tokens| {
            done(model().fits(&[TokenRun::chunk(sequence, tokens)]));
            done(model().fits(&[TokenRun::prompt(sequence, tokens)]));
        });
        "cache::ModelCache::reserve_kind" => few_triples(|layer, pages, spans| {
            done(block_on(model().reserve_kind(layer, &[StoreRoom { pages, spans }])));
        });
        "cache::ModelCache::room_for_prefill" => sizes(|a| {
            done(model().room_for_prefill(a, &[PromptSpan::packed(TokenRange::new(0, 3).unwrap())]).is_ok());
        });
        "cache::ModelCache::room_for_swap_in" => sizes(|a| {
            let mut cache = model();
            let swapped = block_on(cache.swap_out(0)).unwrap();
            done(cache.room_for_swap_in(a, &swapped).is_ok());
        });
        "cache::Budget::of_bytes" => sizes(|a| {
            for growth in [Growth::None, Growth::Exact, Growth::Doubling] {
                let run = [TokenRun::chunk(0, 3)];
                let mut cache = model().with_budget(Budget::of_bytes(a as u64).growing(growth));
                done(block_on(cache.reserve_for_append(&run)));
                done(cache.begin_append(&run));
            }
        });
        "cache::ModelCache::step_kind" => sizes(|a| done(model().step_kind(a).is_ok()));
        "backend::StoredLayers::mark" => sizes(|a| open().open_steps().unwrap().iter().for_each(|step| step.stored.mark(a)));
        "backend::StoredLayers::has" => sizes(|a| {
            open().open_steps().unwrap().iter().for_each(|step| done(step.stored.has(a)));
        });
    }
}
