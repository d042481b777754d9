//! The time of a step on several ranks, computed, and the table of it in `docs/ranks.md`.

use std::fmt::Write;

use kvpack::ranks::{ExchangeTime, ReadTime, StepTime};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat};

/// The page with the table, and the lines around it.
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/ranks.md");
const BEGIN: &str = "<!-- computed by tests/cpu/ranks/step_time.rs -->\n\n";
const END: &str = "\n<!-- computed until here -->";

/// Rows `g4-b1-4k` and `g4-b1-128k` of docs/performance.md: CUDA on an H200, µs.
const MEASURED: [(&str, f64, f64); 4] =
    [("f16", 9.3, 123.7), ("4 bits", 5.6, 36.4), ("2 bits", 5.1, 21.5), ("1 bit", 5.3, 16.5)];

fn shape() -> AttentionShape {
    AttentionShape::new(32, 8, 128).unwrap()
}

fn format(name: &str) -> SegmentFormat {
    match name {
        "f16" => SegmentFormat::F16,
        "4 bits" => SegmentFormat::per_channel(Bits::Four),
        "2 bits" => SegmentFormat::per_channel(Bits::Two),
        _ => SegmentFormat::per_channel(Bits::One),
    }
}

/// Exchange and merge between two H200 joined by NVLink (docs/several-gpus.md), and what each of two more adds beside its bytes.
fn nccl() -> ExchangeTime {
    let measured = ExchangeTime::of((16_512, 8.5e-6), (1_056_768, 19.1e-6)).unwrap();
    measured.with_further_ranks(1.3e-6).unwrap()
}

fn peer_memory() -> ExchangeTime {
    let measured = ExchangeTime::of((16_512, 3.0e-6), (264_192, 4.4e-6)).unwrap();
    measured.with_further_ranks(0.3e-6).unwrap()
}

fn step((name, short, long): (&str, f64, f64), exchange: ExchangeTime) -> StepTime {
    let (shape, format) = (shape(), format(name));
    let none = StepTime { shape, format, read: ReadTime::of((0, 1.0), (1, 2.0)).unwrap(), exchange };
    let at = |tokens: usize, time: f64| (none.bytes(tokens), time * 1e-6);
    StepTime { read: ReadTime::of(at(4096, short), at(131_072, long)).unwrap(), ..none }
}

const LENGTHS: [(&str, usize); 6] =
    [("64k", 1 << 16), ("128k", 1 << 17), ("512k", 1 << 19), ("1 M", 1 << 20), ("4 M", 1 << 22), ("10 M", 10 << 20)];

fn table() -> String {
    const RANKS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
    let mut text = String::from("| tokens | format | GB of 32 layers | over |");
    RANKS.iter().for_each(|ranks| write!(text, " {ranks} |").unwrap());
    text += "\n| --- | --- | ---: | --- |";
    RANKS.iter().for_each(|_| text += " ---: |");
    for (name, tokens) in LENGTHS {
        for measured in MEASURED {
            for (over, exchange, most) in [("NCCL", nccl(), 64), ("peers", peer_memory(), 8)] {
                let step = step(measured, exchange);
                let gigabytes = 32.0 * step.bytes(tokens) as f64 / 1e9;
                write!(text, "\n| {name} | {} | {gigabytes:.1} | {over} |", measured.0).unwrap();
                for ranks in RANKS {
                    let plan = step.plan(tokens, ranks).unwrap();
                    let (time, percent) = (plan.split * 1e6, plan.efficiency() * 100.0);
                    match ranks {
                        1 => write!(text, " {time:.0} |").unwrap(),
                        _ if ranks > most => text += " |",
                        _ if plan.pays() => write!(text, " {time:.0} ({percent:.0}) |").unwrap(),
                        _ => write!(text, " {time:.0} (-) |").unwrap(),
                    }
                }
            }
        }
    }
    text + "\n"
}

/// The table in the documents is what the model says. `KVPACK_UPDATE=1` writes it.
#[test]
fn the_table_in_the_documents_is_computed() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("a table in docs/ranks.md");
    let (found, after) = rest.split_once(END).expect("the end of the table");
    let table = table();
    if found == table {
        return;
    }
    if std::env::var_os("KVPACK_UPDATE").is_some() {
        std::fs::write(PAGE, [before, BEGIN, &table, END, after].concat()).unwrap();
        return;
    }
    panic!(
        "docs/ranks.md has another table; KVPACK_UPDATE=1 cargo test -p kvpack-tests --test cpu ranks::step_time writes it"
    );
}

/// The model says what was measured at the lengths that it was made of, and between.
#[test]
fn the_model_goes_through_its_measurements() {
    for measured in MEASURED {
        let step = step(measured, nccl());
        for (tokens, time) in [(4096, measured.1), (131_072, measured.2)] {
            let one = step.plan(tokens, 1).unwrap();
            assert!((one.one * 1e6 - time).abs() < 1e-9 && one.one == one.split && one.exchange == 0.0);
            assert!(!one.pays() && (one.efficiency() - 1.0).abs() < 1e-12);
        }
    }
    let f16 = step(MEASURED[0], nccl());
    let million = f16.plan(1 << 20, 2).unwrap();
    assert!((million.exchange * 1e6 - 8.5).abs() < 1e-9, "two ranks exchange 16,512 bytes each");
    assert!(million.pays() && million.efficiency() > 0.9 && million.efficiency() < 1.0, "{million}");
    // At 4 bits splitting pays from 64k over peer memory, and later over NCCL; a short sequence stays where it is.
    let four = |exchange| move |tokens| step(MEASURED[1], exchange).plan(tokens, 2).unwrap().pays();
    assert!(four(peer_memory())(1 << 17) && !four(peer_memory())(1 << 14) && !four(nccl())(1 << 14));
    assert_eq!(step(MEASURED[1], nccl()).best(4096, 8).unwrap().ranks, 1);
    let best = f16.best(10 << 20, 64).unwrap();
    assert!(best.ranks > 16, "{best}");
    let all = (1..=64).map(|ranks| f16.plan(10 << 20, ranks).unwrap().split);
    assert!(all.into_iter().all(|time| time >= best.split));
    assert!(best.to_string().contains("splitting pays"), "{best}");
}

#[test]
fn what_is_no_measurement_is_refused() {
    for (small, large) in [
        ((1, 1.0), (1, 2.0)),
        ((2, 1.0), (1, 2.0)),
        ((1, 2.0), (2, 2.0)),
        ((1, f64::NAN), (2, 1.0)),
        ((1, 1.0), (2, f64::INFINITY)),
        ((1, 0.0), (2, 1.0)),
    ] {
        assert!(matches!(ReadTime::of(small, large), Err(Error::Plan { .. })), "{small:?} {large:?}");
        assert!(matches!(ExchangeTime::of(small, large), Err(Error::Plan { .. })), "{small:?} {large:?}");
    }
    for further in [-1e-9, f64::NAN, f64::INFINITY] {
        assert!(matches!(nccl().with_further_ranks(further), Err(Error::Plan { .. })), "{further}");
    }
    assert!(matches!(step(MEASURED[0], nccl()).plan(1, 0), Err(Error::Limit { .. })));
    assert!(matches!(step(MEASURED[0], nccl()).best(1, 0), Err(Error::Limit { .. })));
}
