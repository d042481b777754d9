//! Calls that must fail and change nothing.

use kvpack::Error;
use kvpack::backend::Backend;
use kvpack::cache::{KvCache, PromptSpan, StoreId};
use kvpack::format::KeyOrValue;
use kvpack::plan::{ElementType, Elements, RowLayout, TokenRange};
use pollster::block_on;

use super::model::Model;
use super::{SEQUENCES, rows};
use crate::random_rows::Random;

/// A call that must fail.
#[derive(Clone, Copy, Debug)]
pub enum Refused {
    PrefillNonFinite,
    PrefillGap,
    PrefillSequence,
    PrefillShort,
    PrefillStore,
    GatherBeyond,
    AppendShort,
    AppendTwice,
    AppendSequence,
    AttendShort,
}

impl Refused {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::PrefillNonFinite,
        Self::PrefillGap,
        Self::PrefillSequence,
        Self::PrefillShort,
        Self::PrefillStore,
        Self::GatherBeyond,
        Self::AppendShort,
        Self::AppendTwice,
        Self::AppendSequence,
        Self::AttendShort,
    ];
}

pub fn refused<B: Backend>(cache: &mut KvCache<B>, model: &mut Model, call: Refused, at: usize, random: &mut Random) {
    let shape = model.shape;
    let row = model.row_elements();
    let (tokens, head_dim) = (130, shape.head_dim());
    let layout = RowLayout::token_major(tokens, &shape);
    let whole = [PromptSpan::packed(TokenRange::new(0, tokens).unwrap())];
    let (whole_rows, good) = rows(cache.backend(), random, tokens * row, false);
    let mut rows_with_hole = whole_rows.clone();
    let at = at % rows_with_hole.len();
    rows_with_hole[at] = [f32::NAN, f32::INFINITY, -70000.0][at % 3];
    let upload = |cache: &KvCache<B>, rows: &[f32]| block_on(cache.backend().upload(Elements::F32(rows))).unwrap();
    let bad = upload(cache, &rows_with_hole);
    let single = upload(cache, &vec![0.5; SEQUENCES * row]);
    match call {
        Refused::PrefillNonFinite => {
            let error = block_on(cache.prefill(0, layout, &good, &bad, &whole)).unwrap_err();
            let place = (at / row, at / head_dim % shape.kv_heads(), at % head_dim);
            assert!(
                matches!(error, Error::NotFinite { tensor: KeyOrValue::Value, token, kv_head, channel, .. }
                    if (token, kv_head, channel) == place),
                "{error}"
            );
        }
        Refused::PrefillGap => {
            let range = |start, end| PromptSpan::f16(TokenRange::new(start, end).unwrap());
            for spans in [vec![], vec![range(0, 129)], vec![range(0, 50), range(51, 130)], vec![range(0, 131)]] {
                let error = block_on(cache.prefill(1, layout, &good, &good, &spans)).unwrap_err();
                assert!(matches!(error, Error::PromptSpans { .. }), "{error}");
            }
        }
        Refused::PrefillStore => {
            let stores = cache.recipe().stores().len();
            let beyond = [PromptSpan::run(TokenRange::new(0, tokens).unwrap(), StoreId(stores as u8))];
            let stored = block_on(cache.prefill(SEQUENCES - 1, layout, &good, &good, &beyond));
            if stores == 1 {
                // There is nowhere else to go: f16 takes it, and is taken back.
                let length = cache.length(SEQUENCES - 1).unwrap();
                stored.unwrap();
                model.centred(SEQUENCES - 1, &whole_rows);
                cache.truncate(SEQUENCES - 1, length - tokens).unwrap();
            } else {
                assert!(matches!(stored, Err(Error::Plan { .. })), "{stored:?}");
            }
        }
        Refused::GatherBeyond => {
            let last = tokens as u32;
            let named = vec![last; shape.kv_heads()];
            let indices = block_on(cache.backend().upload_indices(&named, shape.kv_heads(), last + 1)).unwrap();
            let spans = [PromptSpan::gather(&indices, StoreId::F16)];
            let error = block_on(cache.prefill(0, layout, &good, &good, &spans)).unwrap_err();
            assert!(matches!(error, Error::PromptSpans { .. }), "{error}");
        }
        Refused::PrefillSequence => {
            let error = block_on(cache.prefill(SEQUENCES, layout, &good, &good, &whole)).unwrap_err();
            assert!(matches!(error, Error::Sequence { .. }), "{error}");
        }
        Refused::PrefillShort => {
            let error = block_on(cache.prefill(0, layout, &good, &single, &whole)).unwrap_err();
            assert!(matches!(error, Error::Elements { what: "values", .. }), "{error}");
            let none = RowLayout::token_major(0, &shape);
            let error = block_on(cache.prefill(0, none, &good, &good, &whole)).unwrap_err();
            assert!(matches!(error, Error::NoTokens { .. }), "{error}");
        }
        Refused::AppendShort => {
            let every = RowLayout::token_major(SEQUENCES, &shape);
            let short = upload(cache, &vec![0.5; SEQUENCES * row - 1]);
            let error = block_on(cache.append(every, &single, &short)).unwrap_err();
            assert!(matches!(error, Error::Elements { what: "values", .. }), "{error}");
        }
        Refused::AppendTwice => {
            let layout = RowLayout::token_major(2, &shape);
            let error = block_on(cache.append_to(&[1, 1], layout, &single, &single)).unwrap_err();
            assert!(matches!(error, Error::Plan { .. }), "{error}");
            let error = block_on(cache.append(layout, &single, &single)).unwrap_err();
            assert!(matches!(error, Error::Plan { .. }), "{error}");
        }
        Refused::AppendSequence => {
            let layout = RowLayout::token_major(2, &shape);
            let error = block_on(cache.append_to(&[0, SEQUENCES], layout, &single, &single)).unwrap_err();
            assert!(matches!(error, Error::Sequence { .. }), "{error}");
            assert!(matches!(cache.clear(SEQUENCES), Err(Error::Sequence { .. })));
        }
        Refused::AttendShort => {
            let held: Vec<usize> = (0..SEQUENCES).filter(|&s| model.sequences[s].tokens() > 0).collect();
            let short = upload(cache, &vec![0.5; SEQUENCES * shape.query_heads() * head_dim + 1]);
            let error = block_on(cache.attend_to(&held, &short, ElementType::F32)).err().unwrap();
            assert!(matches!(error, Error::Elements { .. } | Error::NoTokens { .. }), "{error}");
        }
    }
}
