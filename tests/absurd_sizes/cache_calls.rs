//! Caches and recipes.

use kvpack::backend::TensorRows;
use kvpack::cache::{
    Appended, ChunkStores, DenseLayer, KvCache, MeasuredQueries, ModelCache, ModelRecipe, ObservedParts, PartQueries,
    PrefixCache, PromptSpan, Recipe, StoreId, StoreRoom, TokenRun, write_checksum,
};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, QueryRun, RowLayout, Split, TokenRange, Visible};
use kvpack::policy::{LayerSelection, Policy, Selection, Spans};
use kvpack::{Bits, SegmentFormat};
use pollster::block_on;

use crate::format_calls::each_format;
use crate::policy_calls::policies;
use crate::{Call, calls, done, few_triples, pairs, shape, sizes, triples};

/// Rows of 3 tokens.
fn rows() -> CpuTensor {
    CpuTensor::F32(vec![0.5; 3 * 2 * 64])
}

fn layout() -> RowLayout {
    RowLayout::token_major(3, &shape())
}

fn layouts(call: impl Fn(RowLayout)) {
    few_triples(|tokens, token_stride, head_stride| call(RowLayout { tokens, token_stride, head_stride }));
}

fn query() -> CpuTensor {
    CpuTensor::F32(vec![0.5; 256])
}

/// A cache of two sequences that holds 3 tokens of the first.
pub fn cache() -> KvCache<Cpu> {
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4()).with_centre();
    let mut cache = KvCache::new(Cpu::new(), shape(), 2, recipe).unwrap();
    block_on(cache.extend(0, layout(), &rows(), &rows())).unwrap();
    cache
}

/// The same of two layers.
pub fn model() -> ModelCache<Cpu> {
    let layers = vec![(shape(), Recipe::calibquant(Bits::Two).with_window(128)); 2];
    let mut cache = ModelCache::new(&Cpu::new(), &layers, 2).unwrap();
    let span = [PromptSpan::packed(TokenRange::new(0, 3).unwrap())];
    block_on(cache.reserve_for_prefill(&span)).unwrap();
    cache.begin_prefill(0, 3, &span).unwrap();
    for layer in 0..2 {
        block_on(cache.store_prompt(layer, layout(), &rows(), &rows(), &span)).unwrap();
    }
    cache.commit().unwrap();
    cache
}

fn observed(cache: &ModelCache<Cpu>) -> kvpack::cache::ObservedPrompt<Cpu> {
    cache.observe(Policy::h2o(0.5).unwrap(), Spans::new(3, &[]).unwrap()).unwrap()
}

/// A cache with an open step that appends a prompt of 3 tokens of which nothing is packed, and the prompt.
fn unpacked() -> (ModelCache<Cpu>, ObservedParts<Cpu>) {
    let mut cache = model();
    let spans = Spans::new(3, &[]).unwrap();
    let prompt = block_on(cache.observe_parts(1, Policy::h2o(0.5).unwrap(), spans)).unwrap();
    let runs = [TokenRun::unpacked(1, 3)];
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    (cache, prompt)
}

pub fn calls() -> Vec<Call> {
    let mut all = recipes();
    all.extend(one_layer());
    all.extend(models());
    all.extend(steps());
    all
}

fn recipes() -> Vec<Call> {
    calls! {
        "cache::ChunkStores::new" => pairs(|a, b| sizes(|c| if let Ok(context) = TokenRange::new(a, b) {
            done(ChunkStores::new(context, c, vec![StoreId(1); 3]));
        }));
        "cache::ChunkStores::upload" => pairs(|heads, tokens| {
            let chunks = ChunkStores::new(TokenRange::new(0, 100).unwrap(), 32, vec![StoreId(u8::MAX); 3]).unwrap();
            done(block_on(chunks.upload(&Cpu::new(), heads, tokens)).is_ok());
        });
        "cache::Mixture::chunks_of" => pairs(|a, b| sizes(|c| {
            let recipe: ModelRecipe = "cocktail+search=none".parse().unwrap();
            let (Some(mixture), Ok(context)) = (recipe.mixture(), TokenRange::new(a, b)) else { return };
            done(mixture.chunks_of(context, c, &[0.1, 0.9, 0.5]));
        }));
        "cache::Recipe::with_window" => sizes(|a| done(Recipe::calibquant(Bits::Two).with_window(a)));
        "cache::Recipe::with_sink" => sizes(|a| decoded(Recipe::pack_all(SegmentFormat::saw_int4()).with_sink(a)));
        "cache::Recipe::pack_all" => each_format(|&key| decoded(Recipe::pack_all(SegmentFormat { key, value: key })));
        "cache::Recipe::with_store" => each_format(|&key| {
            let (format, mut recipe) = (SegmentFormat { key, value: key }, Recipe::f16());
            while let Ok((larger, store)) = recipe.clone().with_store(format) {
                recipe = larger.with_appended(Appended::AtOnce(store));
            }
            decoded(recipe);
        });
        "cache::Recipe::with_appended" => sizes(|newer| for store in [0, 1, 2, u8::MAX] {
            let to = StoreId(store);
            decoded(Recipe::calibquant(Bits::Two).with_appended(Appended::Tiles { to, newer }));
            decoded(Recipe::calibquant(Bits::Two).with_appended(Appended::AtOnce(to)));
        });
        "cache::ModelRecipe::layer" => sizes(|a| {
            done("kivi:2+layers=0:f16".parse::<ModelRecipe>().unwrap().layer(a, &shape()));
        });
        "cache::TokenRun::decode" => sizes(|a| {
            let mut cache = model();
            done(block_on(cache.reserve_for_append(&[TokenRun::decode(a)])));
            done(cache.begin_append(&[TokenRun::decode(a)]));
        });
    }
}

/// Runs of queries of every kind, also past the tokens that there are.
fn runs(call: impl Fn(&[QueryRun])) {
    pairs(|a, b| {
        for visible in [Visible::All, Visible::Causal, Visible::Window { left: b }] {
            call(&[QueryRun::new(a, b, visible.clone())]);
            call(&[QueryRun { end: Some(a), ..QueryRun::new(0, 1, visible) }, QueryRun::decode(b)]);
        }
    });
}

/// Runs of new tokens, also twice of one sequence.
fn appends(call: impl Fn(&[TokenRun])) {
    pairs(|a, b| {
        call(&[TokenRun::chunk(a, b)]);
        call(&[TokenRun::prompt(a, b)]);
        call(&[TokenRun::prompt(0, a), TokenRun::prompt(1, b)]);
        call(&[TokenRun::chunk(0, a), TokenRun::chunk(1, b)]);
        call(&[TokenRun::chunk(0, a), TokenRun::decode(0)]);
    });
}

/// Makes a cache by a recipe, and decodes a token.
fn decoded(recipe: Recipe) {
    if let Ok(mut cache) = KvCache::new(Cpu::new(), shape(), 1, recipe) {
        let row = CpuTensor::F32(vec![0.5; 128]);
        done(block_on(cache.append(RowLayout::token_major(1, &shape()), &row, &row)));
    }
}

fn one_layer() -> Vec<Call> {
    calls! {
        "cache::KvCache::new" => sizes(|a| done(KvCache::new(Cpu::new(), shape(), a, Recipe::f16()).is_ok()));
        "cache::KvCache::set_split" => triples(|target_items, tile_step, max_tiles| {
            let mut cache = cache();
            cache.set_split(Split { target_items, tile_step, max_tiles });
            block_on(cache.attend_to(&[0], &query(), ElementType::F32)).unwrap();
        });
        "cache::KvCache::tokens" => sizes(|a| done(cache().tokens(a)));
        "cache::KvCache::length" => sizes(|a| done(cache().length(a)));
        "cache::KvCache::positions" => sizes(|a| done(block_on(cache().positions(a))));
        "cache::KvCache::reserve" => sizes(|a| for store in [0, 1, 2, u8::MAX] {
            done(block_on(cache().reserve(StoreId(store), a)));
        });
        "cache::KvCache::prefill" => layouts(|rows_of| sizes(|a| if a < 2 || rows_of.tokens < 2 {
            done(block_on(cache().prefill(a, rows_of, &rows(), &rows(), &[])));
        }));
        "cache::KvCache::append" => layouts(|rows_of| done(block_on(cache().append(rows_of, &rows(), &rows()))));
        "cache::KvCache::append_to" => sizes(|a| {
            done(block_on(cache().append_to(&[0, a], layout(), &rows(), &rows())));
            done(block_on(cache().append_to(&[a], layout(), &rows(), &rows())));
        });
        "cache::KvCache::extend" => layouts(|rows_of| {
            done(block_on(cache().extend(0, rows_of, &rows(), &rows())));
            done(block_on(cache().extend(rows_of.tokens, layout(), &rows(), &rows())));
        });
        "cache::KvCache::pack_windows" => sizes(|a| done(block_on(cache().pack_windows(a))));
        "cache::KvCache::set_centre" => sizes(|a| done(block_on(cache().set_centre(a, &rows()))));
        "cache::KvCache::plan" => runs(|runs| done(cache().plan(runs)));
        "cache::KvCache::attend_runs" => runs(|runs| {
            done(block_on(cache().attend_runs(runs, &query(), ElementType::F32)).is_ok());
        });
        "cache::KvCache::attend_into" => runs(|runs| done(block_on(cache().attend_into(runs, &query(), &mut query()))));
        "cache::KvCache::attend_states" => runs(|runs| done(block_on(cache().attend_states(runs, &query())).is_ok()));
        "cache::KvCache::clear" => sizes(|a| done(cache().clear(a)));
        "cache::KvCache::fork" => pairs(|a, b| done(cache().fork(a, b)));
        "cache::KvCache::truncate" => pairs(|a, b| done(cache().truncate(a, b)));
        "cache::KvCache::forget" => triples(|a, b, c| if let Ok(range) = TokenRange::new(b, c) {
            done(block_on(async { cache().forget(a, range) }));
        });
        "cache::KvCache::append_attend_into" => layouts(|rows_of| {
            let mut output = CpuTensor::F32(vec![0.0; 256]);
            done(block_on(cache().append_attend_into(rows_of, &rows(), &rows(), &query(), &mut output)));
        });
        "cache::KvCache::prompt_attend_into" => layouts(|rows_of| {
            let mut output = CpuTensor::F32(vec![0.0; 256]);
            for sequence in [0, rows_of.tokens] {
                let part = (&rows(), &rows(), &query());
                done(block_on(cache().prompt_attend_into(sequence, rows_of, part.0, part.1, part.2, &mut output)));
            }
        });
        "cache::KvCache::attend_causal" => sizes(|a| done(block_on(cache().attend_causal(a, &query(), ElementType::F32)).is_ok()));
        "cache::KvCache::dequantize" => sizes(|a| done(cache().dequantize(a).is_ok()));
        "cache::KvCache::swap_out" => sizes(|a| done(block_on(cache().swap_out(a)).is_ok()));
        "cache::KvCache::swap_in" => sizes(|a| {
            let mut cache = cache();
            let swapped = block_on(cache.swap_out(0)).unwrap();
            done(block_on(cache.swap_in(a, &swapped)));
            done(cache.plan(&[QueryRun::causal(0, a)]).is_ok());
            forged(a, &block_on(cache.swapped_to_bytes(&swapped)).unwrap(), |bytes| {
                done(block_on(cache.swapped_from_bytes(bytes)).is_ok());
            });
        });
    }
}

/// A size in place of every number before the contents of the layers.
fn forged(size: usize, bytes: &[u8], call: impl Fn(&[u8])) {
    for at in 20..bytes.len().min(250) - 8 {
        let mut forged = bytes.to_vec();
        forged[at..at + 8].copy_from_slice(&(size as u64).to_le_bytes());
        write_checksum(&mut forged);
        call(&forged);
    }
}

/// A model's cache with 203 tokens of the first sequence.
fn long() -> ModelCache<Cpu> {
    let (mut cache, runs) = (model(), [TokenRun::chunk(0, 200)]);
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    let rows = CpuTensor::F32(vec![0.5; 200 * 2 * 64]);
    for layer in 0..2 {
        block_on(cache.store(layer, RowLayout::token_major(200, &shape()), &rows, &rows)).unwrap();
    }
    cache.commit().unwrap();
    cache
}

fn models() -> Vec<Call> {
    calls! {
        "cache::ModelCache::new" => sizes(|a| done(ModelCache::new(&Cpu::new(), &[(shape(), Recipe::f16())], a).is_ok()));
        "cache::ModelCache::observe" => policies().into_iter().for_each(|policy| {
            done(model().observe(policy, Spans::new(3, &[]).unwrap()).is_ok());
        });
        "cache::ObservedPrompt::decide_by" => policies().into_iter().for_each(|policy| {
            done(observed(&model()).decide_by(policy));
        });
        "cache::ModelCache::reserve" => pairs(|pages, spans| {
            done(block_on(model().reserve(&[StoreRoom { pages, spans }])));
            done(block_on(model().reserve(&[StoreRoom::default(), StoreRoom { pages, spans }])));
        });
        "cache::ModelCache::compress" => sizes(|a| {
            let mut cache = model();
            let prompt = observed(&cache);
            done(block_on(cache.compress(a, &prompt)).is_ok());
        });
        "cache::ModelCache::positions" => pairs(|a, b| done(block_on(model().positions(a, b))));
        "cache::ModelCache::shape" => sizes(|a| done(model().shape(a).is_ok()));
        "cache::ModelCache::recipe" => sizes(|a| done(model().recipe(a).is_ok()));
        "cache::ModelCache::tokens" => pairs(|a, b| done(model().tokens(a, b)));
        "cache::ModelCache::length" => sizes(|a| done(model().length(a)));
        "cache::ModelCache::memory_of" => sizes(|a| done(model().memory_of(a).is_ok()));
        "cache::ModelCache::set_centres" => sizes(|a| done(block_on(model().set_centres(a, &[&rows(), &rows()]))));
        "cache::ModelCache::pack_windows" => sizes(|a| done(block_on(model().pack_windows(a))));
        "cache::ModelCache::clear" => sizes(|a| done(model().clear(a)));
        "cache::ModelCache::fork" => pairs(|a, b| done(model().fork(a, b)));
        "cache::ModelCache::check_truncate" => pairs(|a, b| done(model().check_truncate(a, b)));
        "cache::ModelCache::truncate" => pairs(|a, b| done(model().truncate(a, b)));
        "cache::ModelCache::forget" => triples(|a, b, c| if let Ok(range) = TokenRange::new(b, c) {
            done(block_on(async { model().forget(a, range) }));
        });
        "cache::ModelCache::dequantize" => pairs(|a, b| done(model().dequantize(a, b).is_ok()));
        "cache::ModelCache::swap_out" => sizes(|a| done(block_on(model().swap_out(a)).is_ok()));
        "cache::ModelCache::begin_swap_out" => sizes(|a| {
            let mut cache = model();
            if let Ok(leaving) = cache.begin_swap_out(a) {
                done(block_on(cache.finish_swap_out(leaving)).is_ok());
            }
        });
        "cache::ModelCache::swap_in" => sizes(|a| {
            let mut cache = model();
            let swapped = block_on(cache.swap_out(0)).unwrap();
            done(block_on(cache.swap_in(a, &swapped)));
            forged(a, &block_on(cache.swapped_to_bytes(&swapped)).unwrap(), |bytes| {
                done(block_on(cache.swapped_from_bytes(bytes)).is_ok());
            });
        });
        "cache::PrefixCache::new" => pairs(|a, b| done(PrefixCache::new(a..b).keep(&mut long(), &[1; 200], 0)));
        "cache::PrefixCache::keep" => sizes(|a| done(PrefixCache::new(1..2).keep(&mut long(), &[1; 200], a)));
        "cache::PrefixCache::enter" => sizes(|a| {
            let (mut of, mut prefixes) = (long(), PrefixCache::new(1..2));
            done(prefixes.keep(&mut of, &[1; 200], 0));
            done(prefixes.enter(&mut of, &[1; 200], a));
        });
        "cache::ObservedPrompt::observe" => sizes(|layer| {
            let mut prompt = observed(&model());
            let dense = DenseLayer { rows: layout(), keys: rows(), values: rows() };
            done(prompt.observe(layer, dense, None));
        });
        "cache::TokenRun::unpacked" => pairs(|a, b| done(model().begin_append(&[TokenRun::unpacked(a, b)])));
        "cache::ModelCache::observe_parts" => sizes(|a| {
            let (policy, spans) = (Policy::h2o(0.5).unwrap(), Spans::new(3, &[]).unwrap());
            done(block_on(model().observe_parts(a, policy, spans)).is_ok());
        });
        "cache::ObservedParts::observe" => pairs(|a, b| {
            let tensor = CpuTensor::F32(vec![0.5; 3 * 256]);
            let (cache, mut prompt) = unpacked();
            let queries = TensorRows { tensor: &tensor, layout: RowLayout { tokens: b, token_stride: 256, head_stride: 64 } };
            done(prompt.observe(&cache, a, PartQueries { queries, log_sum_exps: None }));
            done(prompt.observe(&cache, 0, PartQueries { queries, log_sum_exps: Some(&tensor) }));
        });
        "cache::ObservedParts::move_to" => sizes(|a| {
            let (mut cache, mut prompt) = unpacked();
            prompt.move_to(a);
            cache.abandon();
            done(cache.compress_parts(&mut prompt));
        });
        "cache::ModelCache::pack_parts" => sizes(|a| done(unpacked().0.pack_parts(a, &[])));
        "cache::ModelCache::keep" => sizes(|a| {
            let kept = LayerSelection::new(3, vec![vec![0, 1], vec![0, 2]]).unwrap();
            let kept = Selection::new(vec![kept; 2]).unwrap();
            let dense = |tokens| DenseLayer { rows: RowLayout { tokens, ..layout() }, keys: rows(), values: rows() };
            done(block_on(model().keep(a, vec![dense(3), dense(3)], &kept)));
            done(block_on(model().keep(0, vec![dense(a), dense(a)], &kept)));
        });
        "cache::ModelCache::appended" => sizes(|a| done(model().appended(a)));
        "cache::ModelCache::compression_due" => pairs(|a, b| done(model().compression_due(a, b)));
        "cache::ModelCache::compress_again" => sizes(|a| {
            let (policy, spans) = (Policy::h2o(0.5).unwrap(), Spans::new(3, &[]).unwrap());
            let tensor = CpuTensor::F32(vec![0.5; 3 * 256]);
            let queries = TensorRows { tensor: &tensor, layout: RowLayout { tokens: a, token_stride: 256, head_stride: 64 } };
            let measured = [MeasuredQueries { queries, known_lse: None }; 2];
            done(block_on(model().compress_again(0, &policy, &spans, &measured)));
            done(block_on(model().compress_again(a, &policy, &spans, &measured)));
        });
    }
}

fn steps() -> Vec<Call> {
    calls! {
        "cache::ModelCache::begin_prefill" => pairs(|a, tokens| {
            done(model().begin_prefill(a, tokens, &[]));
            if let Ok(range) = TokenRange::new(0, tokens) {
                done(model().begin_prefill(a, tokens, &[PromptSpan::packed(range)]));
            }
        });
        "cache::ModelCache::begin_append" => appends(|runs| done(model().begin_append(runs)));
        "cache::ModelCache::begin_append_seeing" => runs(|queries| {
            let tokens: Vec<TokenRun> = queries.iter().map(|run| TokenRun::chunk(run.sequence, run.queries)).collect();
            done(model().begin_append_seeing(&tokens, queries));
        });
        "cache::ModelCache::begin_attend" => runs(|queries| done(model().begin_attend(queries)));
        "cache::ModelCache::reserve_for_append" => appends(|runs| {
            let mut cache = model();
            if block_on(cache.reserve_for_append(runs)).is_ok() {
                done(cache.begin_append(runs));
            }
        });
        "cache::ModelCache::plan" => sizes(|a| done(open().plan(a).is_ok()));
        "cache::ModelCache::stores" => sizes(|a| done(open().stores(a).is_ok()));
        "cache::ModelCache::store" => sizes(|a| layouts(|rows_of| if a < 2 || rows_of.tokens < 2 {
            done(block_on(open().store(a, rows_of, &rows(), &rows())));
        }));
        "cache::ModelCache::store_prompt" => sizes(|a| done(block_on(open().store_prompt(a, layout(), &rows(), &rows(), &[]))));
        "cache::ModelCache::attend" => sizes(|a| done(block_on(open().attend(a, &query(), ElementType::F32)).is_ok()));
        "cache::ModelCache::attend_into" => sizes(|a| {
            let mut output = CpuTensor::F32(vec![0.0; 256]);
            done(block_on(open().attend_into(a, &query(), &mut output)));
        });
        "cache::ModelCache::attend_states" => sizes(|a| done(block_on(open().attend_states(a, &query())).is_ok()));
        "cache::ModelCache::free_room" => sizes(|a| done(model().free_room(a).is_ok()));
        "cache::ModelCache::room_for_append" => pairs(|a, b| {
            done(model().room_for_append(a, &[TokenRun::chunk(0, b), TokenRun::decode(1)]).is_ok());
            done(model().room_for_append(0, &[TokenRun::chunk(a, b)]).is_ok());
        });
        "cache::TokenRun::prompt" => pairs(|a, b| done(model().begin_append(&[TokenRun::prompt(a, b)])));
        "cache::TokenRun::chunk" => pairs(|a, b| done(model().begin_append(&[TokenRun::chunk(a, b)])));
    }
}

/// A model with an open step of a decoded token.
pub fn open() -> ModelCache<Cpu> {
    let mut cache = model();
    let run = [TokenRun::decode(0)];
    block_on(cache.reserve_for_append(&run)).unwrap();
    cache.begin_append(&run).unwrap();
    cache
}
