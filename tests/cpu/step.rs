//! What a step writes on the CPU: what `copy_page`, `append` and `pack_windows` write one after the other.

use kvpack::backend::{FlaggedToken, NewCentre, WriteInput};
use kvpack::cpu::{Cpu, CpuStore, CpuTensor, NonFiniteFlags, append, key_mean, pack_windows, write_step};
use kvpack::format::KeyOrValue;
use kvpack::plan::{ElementType, LayerWrites, RowLayout, WriteTable};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat};

use any_backend::step_writes::{Case, formats, pages};

/// The same, call by call, from rows in which zeros stand for what cannot be stored.
fn call_by_call(case: &Case) -> ([CpuStore; 2], Vec<FlaggedToken>) {
    let [mut open, mut packed] = case.stores(&Cpu::new());
    let mut flagged = [usize::MAX; 2];
    for step in &case.steps {
        for (index, writes) in step.writes.stores.iter().enumerate() {
            let store = if index == 0 { &mut open } else { &mut packed };
            writes.copies.iter().for_each(|copy| store.copy_page(copy.from, copy.to).unwrap());
            for mean in &writes.centres {
                let largest = case.layout.largest_centred();
                let centre = NewCentre { rows: case.rows, tokens: mean.tokens, slot: mean.slot, largest };
                key_mean(store, step.keys.elements(), centre).unwrap();
            }
            if writes.tokens.is_empty() {
                continue;
            }
            let mut clean = |which: KeyOrValue, tensor: &CpuTensor| {
                let largest = case.layout.largest_element(index, which);
                // False for NaN.
                let storable = |x: f32| x.abs() <= largest;
                let mut x = tensor.to_f32();
                for token in 0..case.rows.tokens {
                    for head in 0..case.shape.kv_heads() {
                        let row = &mut x[case.rows.row(token, head)..][..case.shape.head_dim()];
                        for x in row.iter_mut().filter(|x| !storable(**x)) {
                            *x = 0.0;
                            if writes.tokens.iter().any(|write| write.token == token) {
                                let first = &mut flagged[usize::from(which == KeyOrValue::Value)];
                                *first = token.min(*first);
                            }
                        }
                    }
                }
                x
            };
            let (keys, values) = (clean(KeyOrValue::Key, &step.keys), clean(KeyOrValue::Value, &step.values));
            append(store, keys.as_slice().into(), values.as_slice().into(), case.rows, &writes.tokens).unwrap();
        }
        pack_windows(&open, &mut packed, &step.writes.windows[0]).unwrap();
    }
    let of = |(tensor, token): (KeyOrValue, usize)| FlaggedToken { layer: 2, tensor, token };
    let found = [KeyOrValue::Key, KeyOrValue::Value].into_iter().zip(flagged).filter(|found| found.1 != usize::MAX);
    ([open, packed], found.map(of).collect())
}

fn assert_alike(one: &CpuStore, other: &CpuStore, case: &Case) {
    assert!(case.centres(&Cpu::new(), one) == case.centres(&Cpu::new(), other), "centres of {}", case.format);
    for which in [KeyOrValue::Key, KeyOrValue::Value] {
        for (slot, page) in pages().enumerate() {
            for head in 0..case.shape.kv_heads() {
                let words = |store: &CpuStore| {
                    let (codes, ranges) = store.tile_words(which, page, head).unwrap();
                    [codes, ranges].concat()
                };
                assert!(words(one) == words(other), "{which} of {page:?} as {}", case.format);
            }
            assert_eq!(one.span_ranges(which, slot), other.span_ranges(which, slot));
        }
    }
}

#[test]
fn a_step_writes_what_its_calls_write() {
    let (mut flagged, mut centred) = (0, 0);
    let formats = || formats(64).into_iter().enumerate();
    let shape = AttentionShape::new(2, 2, 64).unwrap();
    let plain = formats().map(|(i, format)| Case::new(shape, format, ElementType::ALL[i % 3], i as u64));
    let of_centred = formats().filter(|(_, format)| format.key.takes_centre());
    let of_centred = of_centred.map(|(i, format)| Case::centred(shape, format, ElementType::ALL[i % 3], 40 + i as u64));
    for case in plain.chain(of_centred) {
        let format = case.format;
        let (stores, found) = case.written(&Cpu::new());
        let (expected, expected_found) = call_by_call(&case);
        stores.iter().zip(&expected).for_each(|(one, other)| assert_alike(one, other, &case));
        assert_eq!(found, expected_found, "{format}");
        flagged += found.len();
        centred += case.centres(&Cpu::new(), &stores[1]).iter().filter(|of| of.bytes().iter().any(|&x| x > 0)).count();
    }
    assert!(flagged > 5 && centred > 20, "{flagged} {centred}");
}

/// A step that does not fit its stores or tensors changes nothing.
#[test]
fn steps_that_do_not_fit_are_refused() {
    let shape = AttentionShape::new(2, 2, 64).unwrap();
    let case = Case::new(shape, SegmentFormat::per_channel(Bits::Four), ElementType::F32, 5);
    let step = case.steps.iter().find(|step| !step.writes.stores[0].tokens.is_empty()).unwrap();
    let mut table = WriteTable::new(&case.layout);
    table.set(&step.writes).unwrap();
    let [mut open, mut packed] = case.stores(&Cpu::new());
    let [before, _] = case.stores(&Cpu::new());
    let flags = NonFiniteFlags::new(3).unwrap();
    let (keys, values) = (&step.keys.elements(), &step.values.elements());
    let input = WriteInput { keys, values, rows: case.rows, flags: &flags, layer: 2 };

    let refused = |result: kvpack::Result<()>| assert!(matches!(result, Err(Error::Plan { .. })), "{result:?}");
    refused(write_step(&mut [&mut open], Some(input), &table));
    refused(write_step(&mut [&mut packed, &mut open], Some(input), &table));
    refused(write_step(&mut [&mut open, &mut packed], None, &table));
    refused(write_step(&mut [&mut open, &mut packed], Some(WriteInput { layer: 3, ..input }), &table));
    let few = RowLayout { tokens: table.tokens_needed() - 1, ..case.rows };
    refused(write_step(&mut [&mut open, &mut packed], Some(WriteInput { rows: few, ..input }), &table));
    let many = RowLayout { tokens: 1000, ..case.rows };
    let short = write_step(&mut [&mut open, &mut packed], Some(WriteInput { rows: many, ..input }), &table);
    assert!(matches!(short, Err(Error::Elements { .. })), "{short:?}");
    let mut small = CpuStore::new(shape, SegmentFormat::F16).unwrap();
    small.add_shard(6).unwrap();
    refused(write_step(&mut [&mut small, &mut packed], Some(input), &table));
    assert_alike(&open, &before, &case);

    // What is not needed may be left out.
    table.set(&LayerWrites::of(&case.layout)).unwrap();
    write_step(&mut [&mut open, &mut packed], None, &table).unwrap();
}
