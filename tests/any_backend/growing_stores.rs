//! Stores that grow by little, again and again: from some number of shards on by larger ones. On any backend.

use kvpack::backend::Backend;
use kvpack::cache::{Budget, Growth, ModelCache, StoreRoom};
use kvpack::plan::{ElementType, QueryRun};
use pollster::block_on;

use crate::compressed::growing::append;
use crate::compressed::{Prompt, held};
use crate::model_steps::{LAYERS, shape};
use crate::swapped_bytes;

/// Shards of every store of the first layers that are alike.
pub fn shards<B: Backend>(cache: &mut ModelCache<B>) -> Vec<usize> {
    cache.begin_attend(&[QueryRun::decode(0)]).unwrap();
    let open = cache.open_steps().unwrap();
    let shards = open[0].table.layout().stores().iter().map(|store| store.shard_pages.len()).collect();
    drop(open);
    cache.abandon();
    shards
}

/// Attention of the newest token of a sequence, in every layer.
fn attention<B: Backend>(cache: &mut ModelCache<B>, sequence: usize) -> Vec<f32> {
    let queries = (0..shape().query_heads() * shape().head_dim()).map(|at| (at % 7) as f32 / 7.0).collect::<Vec<_>>();
    let queries = block_on(cache.backend().upload(queries.as_slice().into())).unwrap();
    cache.begin_attend(&[QueryRun::decode(sequence)]).unwrap();
    let of = |layer| {
        let rows = block_on(cache.attend(layer, &queries, ElementType::F32)).unwrap();
        block_on(cache.backend().download(&rows)).unwrap()
    };
    let rows = (0..LAYERS).flat_map(of).collect();
    cache.abandon();
    rows
}

/// A cache that grows by what it lacks holds what a reserved one holds, in no more shards than steps read at once.
///
/// # Panics
/// When it does not.
pub fn check<B: Backend + Clone>(backend: &B) {
    for text in ["f16", "saw-int4", "kivi:2+window=0", "calibquant:2+window=0"] {
        let mut reserved = swapped_bytes::cache(backend, text);
        let stores = reserved.recipe(0).unwrap().stores().len();
        block_on(reserved.reserve(&vec![StoreRoom { pages: 32, spans: 32 }; stores])).unwrap();
        let exact = Budget::unlimited().growing(Growth::Exact);
        let mut grown = swapped_bytes::cache(backend, text).with_budget(exact);
        for at in 0..26 {
            let tokens = Prompt::new(shape(), LAYERS, 100, at);
            for cache in [&mut reserved, &mut grown] {
                append(cache, at as usize % 2, &tokens);
            }
            if at % 5 == 0 {
                let both = |cache: &ModelCache<B>| [0, 1].map(|sequence| held(cache, LAYERS - 1, sequence));
                assert!(both(&grown) == both(&reserved), "{text}: other tokens after chunk {at}");
            }
        }
        let most = backend.shards_at_once();
        assert!(shards(&mut grown).iter().all(|&of| of <= most), "{text}: {:?}", shards(&mut grown));
        let pages = grown.memory().stores().iter().map(|store| store.pages).max().unwrap();
        assert!(pages > most, "{text}: {pages} pages grew by no larger shard");
        for sequence in [0, 1] {
            let (grown, reserved) = (attention(&mut grown, sequence), attention(&mut reserved, sequence));
            let apart = grown.iter().zip(&reserved).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-4, "{text}: {apart} apart");
        }
    }
}
