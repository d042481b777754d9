//! Recipes, rooms and prompts of a cache: small examples, and what is refused.

use kvpack::backend::Device;
use kvpack::cache::{Appended, Budget, Growth, MOST_SEQUENCES, ModelCache, PromptSpan, StoreId, StoreRoom, TokenRun};
use kvpack::cpu::{Cpu, CpuIndices, CpuTensor};
use kvpack::plan::{ElementType, LayerAttention, RowLayout, Rows, TokenRange};
use kvpack::{AttentionShape, Bits, Error, KvCache, Recipe, SegmentFormat};
use pollster::block_on;

use any_backend::random_rows::Random;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, 64).unwrap()
}

/// Keys or values of `tokens` tokens.
fn rows(tokens: usize) -> CpuTensor {
    CpuTensor::F32(vec![0.25; tokens * shape().kv_heads() * shape().head_dim()])
}

#[test]
fn a_recipe_has_a_number_of_stores() {
    let mut recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    let mut stores = recipe.stores().len();
    let refused = loop {
        match recipe.clone().with_store(SegmentFormat::F16) {
            Ok((more, id)) => {
                assert_eq!((more.stores().len(), id.index()), (stores + 1, stores));
                (recipe, stores) = (more, stores + 1);
            }
            Err(error) => break error,
        }
    };
    let Error::Limit { needed, allowed, .. } = refused else { panic!("{refused}") };
    assert_eq!((needed, allowed), (stores as u64 + 1, stores as u64));
    assert!(KvCache::new(Cpu::new(), shape(), 1, recipe).is_ok());
}

/// The rule for appended tokens that a recipe has makes the same recipe of it; one that names no packed store is refused.
#[test]
fn appended_tokens_go_to_a_packed_store() {
    for recipe in
        [Recipe::calibquant(Bits::Two).with_window(128), Recipe::pack_all(SegmentFormat::saw_int4()), Recipe::f16()]
    {
        assert_eq!(recipe.clone().with_appended(recipe.appended()), recipe);
    }
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4());
    for to in [StoreId::F16, StoreId(7)] {
        for appended in [Appended::AtOnce(to), Appended::Tiles { to, newer: 0 }] {
            let cache = KvCache::new(Cpu::new(), shape(), 1, recipe.clone().with_appended(appended));
            assert!(matches!(cache.err(), Some(Error::Plan { .. })), "{appended:?}");
        }
    }
}

/// A sink is room in f16 for tokens that are packed at once; without one they need none.
#[test]
fn only_a_sink_needs_room_in_f16() {
    for (sink, pages) in [(0, 0), (40, 1)] {
        let recipe = Recipe::pack_all(SegmentFormat::saw_int4()).with_sink(sink);
        let mut cache = KvCache::new(Cpu::new(), shape(), 1, recipe).unwrap();
        block_on(cache.extend(0, RowLayout::token_major(300, &shape()), &rows(300), &rows(300))).unwrap();
        let of = cache.pages_of(0).unwrap();
        assert_eq!(of[0].own, pages, "a sink of {sink}");
        assert_eq!(of[1].own, 3, "a sink of {sink}");
    }
}

/// What nothing lies in is freed, and its bytes are told.
#[test]
fn trimming_tells_what_it_frees() {
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::f16()).unwrap();
    block_on(cache.reserve(StoreId::F16, 1000)).unwrap();
    let allocated = cache.memory().allocated_bytes();
    assert!(allocated > 0);
    assert_eq!((cache.trim(), cache.memory().allocated_bytes()), (allocated, 0));
    // A shard that something lies in stays.
    block_on(cache.extend(0, RowLayout::token_major(3, &shape()), &rows(3), &rows(3))).unwrap();
    let first = cache.memory().allocated_bytes();
    block_on(cache.reserve(StoreId::F16, 3000)).unwrap();
    let more = cache.memory().allocated_bytes() - first;
    assert!(more > 0);
    assert_eq!((cache.trim(), cache.memory().allocated_bytes()), (more, first));
}

/// Spans follow each other, and what a gather names lies in the prompt.
#[test]
fn spans_of_a_prompt_lie_in_it() {
    let prefill = |spans: &[PromptSpan<'_, CpuIndices>]| {
        let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::pack_all(SegmentFormat::saw_int4())).unwrap();
        block_on(cache.prefill(0, RowLayout::token_major(30, &shape()), &rows(30), &rows(30), spans))
    };
    let run = |start, end| PromptSpan::packed(TokenRange::new(start, end).unwrap());
    assert_eq!(prefill(&[run(0, 10), run(10, 30)]).map(drop), Ok(()));
    for spans in [[run(0, 10), run(20, 30)], [run(0, 20), run(10, 30)], [run(0, 10), run(10, 31)]] {
        let refused = prefill(&spans);
        assert!(matches!(refused, Err(Error::PromptSpans { .. })), "{refused:?}");
    }
    let gathered = |below| block_on(Cpu::new().upload_indices(&[0, 1, 0, 1], shape().kv_heads(), below)).unwrap();
    for (below, fits) in [(30, true), (31, false)] {
        let indices = gathered(below);
        let stored = prefill(&[PromptSpan { tokens: Rows::Gather(&indices), ..run(0, 1) }]);
        let refused = matches!(stored, Err(Error::PromptSpans { .. }));
        assert_eq!((stored.is_ok(), refused), (fits, !fits), "{below}: {stored:?}");
    }
    let twice = block_on(Cpu::new().upload_indices(&[0; 4], shape().kv_heads(), 1)).unwrap();
    let refused = prefill(&[PromptSpan { tokens: Rows::Gather(&twice), ..run(0, 1) }]);
    assert!(matches!(refused, Err(Error::PromptSpans { .. })), "two tokens of one position: {refused:?}");
}

/// A query would see some tokens of a gathered span, and which is not known: no step could follow.
#[test]
fn layers_with_windows_gather_nothing() {
    let window = LayerAttention::default().with_window(40);
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4()).with_attention(window);
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, recipe).unwrap();
    let indices = block_on(Cpu::new().upload_indices(&[0, 1, 0, 1], shape().kv_heads(), 30)).unwrap();
    let spans = [PromptSpan::gather(&indices, StoreId::PACKED)];
    let layout = RowLayout::token_major(30, &shape());
    let refused = block_on(cache.prefill(0, layout, &rows(30), &rows(30), &spans));
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    assert_eq!((cache.length(0).unwrap(), cache.memory().in_use_bytes()), (0, 0));
}

/// The queries of other sequences are served, and its own gets nothing.
#[test]
fn an_empty_sequence_is_attended_to_under_a_window() {
    let recipe = Recipe::f16().with_attention(LayerAttention::default().with_window(127));
    let mut cache = KvCache::new(Cpu::new(), shape(), 2, recipe).unwrap();
    block_on(cache.extend(0, RowLayout::token_major(3, &shape()), &rows(3), &rows(3))).unwrap();
    let row = shape().query_heads() * shape().head_dim();
    let output = block_on(cache.attend(&CpuTensor::F32(vec![0.5; 2 * row]), ElementType::F32)).unwrap().to_f32();
    assert_eq!((&output[..row], &output[row..]), (&vec![0.25; row][..], &vec![0.0; row][..]));
}

/// The pages of a cache, counted by its memory.
#[test]
fn memory_is_counted_in_bits() {
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::f16()).unwrap();
    assert_eq!(cache.memory().bits_per_element(), 0.0);
    let tokens = 256;
    block_on(cache.extend(0, RowLayout::token_major(tokens, &shape()), &rows(tokens), &rows(tokens))).unwrap();
    assert_eq!(cache.memory().bits_per_element(), 16.0);
    assert_eq!(cache.memory().in_use_bytes(), (tokens * 2 * 64 * 2 * 2) as u64);
    let memory = cache.memory();
    assert_eq!((memory.f16().bits_per_element(), memory.f16().elements), (16.0, (tokens * 2 * 64 * 2) as u64));

    // Half a page, and its centre: one f32 for every channel of each KV head in both stores.
    let recipe = || Recipe::pack_all(SegmentFormat::saw_int4()).with_centre();
    let mut cache = KvCache::new(Cpu::new(), shape(), 3, recipe()).unwrap();
    assert_eq!((cache.memory().packed()[0].bits_per_element(), cache.memory().in_use_bytes()), (0.0, 0));
    for (sequence, centres) in [(0, 1), (1, 2)] {
        block_on(cache.extend(sequence, RowLayout::token_major(64, &shape()), &rows(64), &rows(64))).unwrap();
        let page = SegmentFormat::saw_int4().page_bytes(&shape()) as u64;
        let centre = SegmentFormat::centre_bytes(&shape()) as u64;
        let memory = cache.memory();
        assert_eq!(memory.f16().in_use_bytes, centres * centre);
        assert_eq!(memory.packed()[0].in_use_bytes, centres * (page + centre));
        let elements = (centres * 64 * 2 * 64 * 2) as f64;
        assert_eq!(memory.packed()[0].bits_per_element(), (centres * (page + centre) * 8) as f64 / elements);
    }
}

/// A cache has as many sequences as it was made for.
#[test]
fn sequences_of_a_cache_are_counted() {
    assert!(KvCache::new(Cpu::new(), shape(), 0, Recipe::f16()).is_err());
    for (sequences, fits) in [(1, true), (3, true), (MOST_SEQUENCES, true), (MOST_SEQUENCES + 1, false)] {
        let cache = KvCache::new(Cpu::new(), shape(), sequences, Recipe::f16());
        assert_eq!(cache.as_ref().map(KvCache::sequences).ok(), fits.then_some(sequences));
    }
    for sequences in [1, 3] {
        let cache = ModelCache::new(&Cpu::new(), &[(shape(), Recipe::f16())], sequences).unwrap();
        assert_eq!(cache.sequences(), sequences);
    }
}

/// Pages and range slots that a prompt lacks are told before anything changes, by the store that lacks them.
#[test]
fn what_a_prompt_lacks_is_told() {
    let run = |start, end| PromptSpan::packed(TokenRange::new(start, end).unwrap());
    let spans = [run(0, 10), run(10, 30), run(30, 40)];
    let recipe = || Recipe::calibquant(Bits::Two);
    let packed = recipe().packed().format.to_string();
    let mut cache = ModelCache::new(&Cpu::new(), &[(shape(), recipe())], 1)
        .unwrap()
        .with_budget(Budget::unlimited().growing(Growth::None));
    block_on(cache.reserve(&[StoreRoom::default(), StoreRoom { pages: 5, spans: 2 }])).unwrap();
    assert_eq!((cache.fits_prefill(&spans[..1]), cache.fits_prefill(&spans)), (Ok(true), Ok(false)));
    let refused = cache.begin_prefill(0, 40, &spans);
    let Err(Error::NoRoom { what, store, needed, free }) = refused else { panic!("{refused:?}") };
    assert_eq!((what, store, needed, free), ("range slots", packed.clone(), 3, 2));
    assert_eq!(cache.memory().in_use_bytes(), 0);

    // What lacks bytes is the first store that is to grow, by pages or by slots alone.
    let held = cache.memory().allocated_bytes();
    let mut cache = cache.with_budget(Budget::of_bytes(held));
    let short = |refused: Result<(), Error>| match refused {
        Err(Error::NoRoom { what: "bytes of the budget", store, .. }) => store,
        other => panic!("{other:?}"),
    };
    let f16 = SegmentFormat::F16.to_string();
    let room = |pages, spans| StoreRoom { pages, spans };
    assert_eq!(short(block_on(cache.reserve(&[room(0, 0), room(9, 0)]))), packed);
    assert_eq!(short(block_on(cache.reserve(&[room(0, 0), room(0, 9)]))), packed);
    assert_eq!(short(block_on(cache.reserve(&[room(1, 0), room(9, 9)]))), f16);
}

/// Range slots double, so that spans one by one do not copy all before them.
#[test]
fn range_slots_double() {
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::calibquant(Bits::Two)).unwrap();
    let slot = cache.recipe().packed().format.range_slot_bytes(&shape()) as u64;
    let page = cache.recipe().packed().format.page_bytes(&shape()) as u64;
    let span = [PromptSpan::packed(TokenRange::new(0, 1).unwrap())];
    for (spans, slots) in [(8, 8), (9, 16), (16, 16), (17, 32)] {
        while cache.pages_of(0).unwrap()[1].own < spans {
            block_on(cache.prefill(0, RowLayout::token_major(1, &shape()), &rows(1), &rows(1), &span)).unwrap();
        }
        let of = cache.memory().packed()[0];
        assert_eq!(of.allocated_bytes - of.pages as u64 * page, slots * slot, "{spans} spans");
    }
}

/// A gathered prompt takes the first pages, so that shards behind it can be given back.
#[test]
fn gathered_tokens_take_the_first_pages() {
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::pack_all(SegmentFormat::saw_int4())).unwrap();
    (0..2)
        .for_each(|_| block_on(cache.reserve(StoreId::PACKED, cache.memory().packed()[0].pages * 128 + 256)).unwrap());
    let gathered = block_on(Cpu::new().upload_indices(&[0, 1, 0, 1], shape().kv_heads(), 30)).unwrap();
    let spans = [PromptSpan::gather(&gathered, StoreId::PACKED)];
    block_on(cache.prefill(0, RowLayout::token_major(30, &shape()), &rows(30), &rows(30), &spans)).unwrap();
    let pages = cache.memory().packed()[0].pages;
    assert!(cache.trim() > 0 && cache.memory().packed()[0].pages < pages);
}

/// Windows of a recipe that packs nothing are none, and a rule names the store that it is given.
#[test]
fn rules_of_appended_tokens_name_their_store() {
    assert_eq!(Recipe::f16().with_window(5), Recipe::f16());
    let (recipe, other) = Recipe::calibquant(Bits::Two).with_window(128).with_store(SegmentFormat::saw_int4()).unwrap();
    assert_eq!(recipe.stores()[other.index()].format, SegmentFormat::saw_int4());
    let recipe = recipe.with_appended(Appended::Tiles { to: other, newer: 7 });
    assert_eq!(recipe.appended(), Appended::Tiles { to: other, newer: 7 });
}

/// A model's attention into the caller's tensor is what it returns, and so is that of a prompt that is stored with it.
#[test]
fn attention_goes_into_the_tensor_of_the_caller() {
    let mut random = Random::new(4);
    let mut of = |rows: usize| CpuTensor::F32((0..rows * 64).map(|_| random.normal()).collect());
    let (keys, values, queries) = (of(2 * 9), of(2 * 9), of(4 * 9));
    let layout = RowLayout::token_major(9, &shape());
    let mut cache = ModelCache::new(&Cpu::new(), &[(shape(), Recipe::f16())], 1).unwrap();
    let runs = [TokenRun::chunk(0, 9)];
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    block_on(cache.store(0, layout, &keys, &values)).unwrap();
    let expected = block_on(cache.attend(0, &queries, ElementType::F32)).unwrap().to_f32();
    let mut output = CpuTensor::F32(vec![7.0; expected.len()]);
    block_on(cache.attend_into(0, &queries, &mut output)).unwrap();
    assert_eq!(output.to_f32(), expected);

    let mut cache = KvCache::new(Cpu::new(), shape(), 1, Recipe::f16()).unwrap();
    let mut output = CpuTensor::F32(vec![7.0; expected.len()]);
    block_on(cache.prompt_attend_into(0, layout, &keys, &values, &queries, &mut output)).unwrap();
    assert_eq!((output.to_f32(), cache.tokens(0)), (expected, Ok(9)));
}

/// A centre is set before there are tokens.
#[test]
fn only_an_empty_sequence_gets_a_centre() {
    let recipe = Recipe::pack_all(SegmentFormat::saw_int4()).with_centre();
    let mut cache = KvCache::new(Cpu::new(), shape(), 1, recipe).unwrap();
    block_on(cache.set_centre(0, &rows(1))).unwrap();
    assert!(matches!(block_on(cache.set_centre(0, &rows(1))), Err(Error::Plan { what: "centre", .. })));
    cache.clear(0).unwrap();
    block_on(cache.extend(0, RowLayout::token_major(3, &shape()), &rows(3), &rows(3))).unwrap();
    assert!(matches!(block_on(cache.set_centre(0, &rows(1))), Err(Error::Plan { what: "centre", .. })));
}

/// Steps put tokens into f16 within a sink, and copy pages of it that sequences share; without one they need no entries.
#[test]
fn steps_put_tokens_of_a_sink_into_f16() {
    for (sink, tokens) in [(0, 1), (40, 3)] {
        let recipe = Recipe::pack_all(SegmentFormat::saw_int4()).with_sink(sink);
        let mut cache = ModelCache::new(&Cpu::new(), &[(shape(), recipe)], 3).unwrap();
        let append = |cache: &mut ModelCache<Cpu>, run: TokenRun| {
            block_on(cache.reserve_for_append(&[run])).unwrap();
            cache.begin_append(&[run]).unwrap();
            let capacity = cache.open_steps().unwrap()[0].table.layout().stores()[0].tokens;
            let layout = RowLayout::token_major(run.tokens(), &shape());
            block_on(cache.store(0, layout, &rows(run.tokens()), &rows(run.tokens()))).unwrap();
            cache.commit().unwrap();
            capacity
        };
        assert_eq!(append(&mut cache, TokenRun::decode(0)), tokens, "a sink of {sink}");
        cache.fork(0, 1).unwrap();
        append(&mut cache, TokenRun::decode(1));
        assert_eq!((cache.tokens(0, 0), cache.tokens(0, 1)), (Ok(1), Ok(2)));
    }
}
