//! Ranks: placements, transports and caches that share sequences.

use std::time::Duration;

use kvpack::backend::{Attention, AttentionStates, StateParts, TensorRows};
use kvpack::cache::{DenseLayer, MeasuredQueries, Recipe, TokenRun};
use kvpack::cpu::{Cpu, CpuTensor};
use kvpack::plan::{ElementType, QueryLayout, QueryRun, RowLayout, TokenRange};
use kvpack::policy::{LayerSelection, Policy, Selection, Spans};
use kvpack::ranks::{
    ContextParallel, ExchangeTime, HeadParallel, Placement, ReadTime, Reduction, StateExchange, StepTime,
    ThreadTransport, Transport,
};
use kvpack::{AttentionShape, SegmentFormat};
use pollster::block_on;

use crate::policy_calls::policies;
use crate::{Call, calls, done, doubles, few_triples, pairs, shape, sizes};

fn transport() -> ThreadTransport {
    ThreadTransport::connect(vec![Cpu::new()], Duration::from_secs(10)).unwrap().remove(0)
}

/// A rank that shares one layer of two sequences with nobody, and an open step of a decoded token.
fn rank() -> ContextParallel<ThreadTransport> {
    let placement = Placement::new(1).unwrap();
    block_on(ContextParallel::new(transport(), &[(shape(), Recipe::f16())], 2, placement)).unwrap()
}

fn open() -> ContextParallel<ThreadTransport> {
    let mut rank = rank();
    block_on(rank.reserve_for_append(&[TokenRun::decode(0)])).unwrap();
    rank.begin_append(&[TokenRun::decode(0)]).unwrap();
    block_on(rank.store(0, RowLayout::token_major(1, &shape()), &row(), &row())).unwrap();
    rank
}

fn row() -> CpuTensor {
    CpuTensor::F32(vec![0.5; 128])
}

fn query() -> CpuTensor {
    CpuTensor::F32(vec![0.5; 256])
}

fn states() -> AttentionStates<CpuTensor> {
    AttentionStates { outputs: query(), lse: CpuTensor::F32(vec![0.0; 4]) }
}

fn step_time() -> StepTime {
    StepTime {
        shape: shape(),
        format: SegmentFormat::F16,
        read: ReadTime::of((1, 1.0), (2, 2.0)).unwrap(),
        exchange: ExchangeTime::of((1, 1.0), (2, 2.0)).unwrap(),
    }
}

/// Shares of placements of many ranks and long turns.
fn shares(call: impl Fn(kvpack::ranks::RankShare)) {
    pairs(|ranks, pages| {
        if let Ok(placement) = Placement::new(ranks).and_then(|placement| placement.with_turn(pages)) {
            call(placement.share(ranks - 1).unwrap());
        }
    });
}

pub fn calls() -> Vec<Call> {
    let mut all = placements();
    all.extend(transports());
    all.extend(ranks());
    all
}

fn placements() -> Vec<Call> {
    calls! {
        "plan::Placement::new" => sizes(|a| done(Placement::new(a)));
        "plan::Placement::with_turn" => sizes(|a| done(Placement::new(3).unwrap().with_turn(a)));
        "plan::Placement::rank_of" => shares(|share| sizes(|a| done(share.placement().rank_of(a))));
        "plan::Placement::share" => sizes(|a| done(Placement::new(3).unwrap().share(a)));
        "plan::RankShare::holds" => shares(|share| sizes(|a| done(share.holds(a))));
        "plan::RankShare::tokens" => shares(|share| sizes(|a| assert!(share.tokens(a) <= a)));
        "plan::RankShare::first_piece" => shares(|share| pairs(|a, b| done(share.first_piece(a..b))));
        "plan::RankShare::pieces" => shares(|share| pairs(|a, b| done(share.pieces(a..b).take(9).count())));
        "plan::RankShare::positions" => shares(|share| pairs(|a, b| if a < b && b - a < 1 << 16 {
            done(share.positions(a..b).take(9).count());
        }));
        "ranks::HeadParallel::new" => pairs(|a, b| done(HeadParallel::new(shape(), a, b)));
        "ranks::HeadParallel::first_row" => few_triples(|tokens, token_stride, head_stride| {
            done(HeadParallel::new(shape(), 1, 2).unwrap().first_row(&RowLayout { tokens, token_stride, head_stride }));
        });
        "ranks::HeadParallel::queries" => pairs(|first, stride| {
            done(HeadParallel::new(shape(), 1, 2).unwrap().queries(QueryLayout { first, stride }));
        });
        "ranks::ReadTime::of" => pairs(|a, b| doubles(|x| doubles(|y| done(ReadTime::of((a as u64, x), (b as u64, y))))));
        "ranks::ReadTime::seconds" => sizes(|a| done(step_time().read.seconds(a as u64)));
        "ranks::ExchangeTime::of" => pairs(|a, b| doubles(|x| done(ExchangeTime::of((a as u64, x), (b as u64, 1.0)))));
        "ranks::ExchangeTime::with_further_ranks" => doubles(|x| done(step_time().exchange.with_further_ranks(x)));
        "ranks::ExchangeTime::seconds" => pairs(|a, b| done(step_time().exchange.seconds(a as u64, b)));
        "ranks::StepTime::plan" => pairs(|a, b| done(step_time().plan(a, b).map(|plan| (plan.pays(), plan.efficiency()))));
        "ranks::StepTime::best" => pairs(|a, b| done(step_time().best(a, b)));
        "ranks::StepTime::bytes" => sizes(|a| done(step_time().bytes(a)));
    }
}

fn transports() -> Vec<Call> {
    calls! {
        "ranks::Transport::all_gather" => sizes(|a| done(transport().all_gather(&query(), a, &mut query())));
        "ranks::Transport::broadcast" => pairs(|a, b| done(transport().broadcast(&mut query(), a, b)));
        "ranks::Transport::all_reduce" => sizes(|a| for reduction in [Reduction::Sum, Reduction::Max] {
            done(transport().all_reduce(&mut query(), a, reduction));
        });
        "ranks::Transport::room_for_states" => sizes(|a| {
            done(block_on(transport().room_for_states(&shape(), a)).is_ok());
            done(block_on(transport().room_for_states(&AttentionShape::new(1, 1, 64).unwrap(), a)).is_ok());
        });
        "ranks::Transport::merge_states" => sizes(|rows| {
            let (states, mut gathered) = (states(), states());
            let exchange = StateExchange { shape: shape(), rows, states: &states, gathered: &mut gathered };
            done(transport().merge_states(exchange, &mut query(), None));
        });
        "backend::Attention::merge_parts" => pairs(|parts, rows| {
            let states = states();
            let parts = StateParts { states: &states, parts, rows };
            done(Cpu::new().merge_parts(&shape(), parts, &mut query(), Some(&mut CpuTensor::F32(vec![0.0; 4]))));
        });
    }
}

fn ranks() -> Vec<Call> {
    calls! {
        "ranks::ContextParallel::new" => sizes(|a| {
            let placement = Placement::new(1).unwrap();
            let layers = [(shape(), Recipe::f16())];
            done(block_on(ContextParallel::new(transport(), &layers, a, placement)).is_ok());
        });
        "ranks::ContextParallel::reserve_for_append" => pairs(|a, b| {
            done(block_on(rank().reserve_for_append(&[TokenRun::chunk(a, b)])));
        });
        "ranks::ContextParallel::begin_append" => pairs(|a, b| done(rank().begin_append(&[TokenRun::prompt(a, b)])));
        "ranks::ContextParallel::begin_append_seeing" => pairs(|a, b| {
            done(rank().begin_append_seeing(&[TokenRun::chunk(a, b)], &[QueryRun::causal(a, b)]));
        });
        "ranks::ContextParallel::begin_attend" => pairs(|a, b| {
            done(rank().begin_attend(&[QueryRun::causal(a, b)]));
            done(rank().begin_attend(&[QueryRun { end: Some(a), ..QueryRun::causal(0, b) }]));
        });
        "ranks::ContextParallel::store" => sizes(|a| few_triples(|tokens, token_stride, head_stride| {
            if a < 2 || tokens < 2 {
                done(block_on(open().store(a, RowLayout { tokens, token_stride, head_stride }, &row(), &row())));
            }
        }));
        "ranks::ContextParallel::attend" => sizes(|a| done(block_on(open().attend(a, &query(), ElementType::F16)).is_ok()));
        "ranks::ContextParallel::attend_into" => sizes(|a| {
            done(block_on(open().attend_into(a, &query(), &mut query())));
        });
        "ranks::ContextParallel::attend_states" => sizes(|a| done(block_on(open().attend_states(a, &query())).is_ok()));
        "ranks::ContextParallel::reserve_rows" => sizes(|a| done(block_on(rank().reserve_rows(a))));
        "ranks::ContextParallel::fork" => pairs(|a, b| done(rank().fork(a, b)));
        "ranks::ContextParallel::truncate" => pairs(|a, b| done(rank().truncate(a, b)));
        "ranks::ContextParallel::forget" => pairs(|a, b| if let Ok(range) = TokenRange::new(0, b) {
            done(rank().forget(a, range));
        });
        "ranks::ContextParallel::clear" => sizes(|a| done(rank().clear(a)));
        "ranks::ContextParallel::pack_windows" => sizes(|a| done(block_on(rank().pack_windows(a))));
        "ranks::ContextParallel::set_centres" => pairs(|a, b| done(block_on(rank().set_centres(a, &mut [row()], b))));
        "ranks::ContextParallel::keep" => sizes(|a| {
            let dense = DenseLayer { rows: RowLayout::token_major(1, &shape()), keys: row(), values: row() };
            let all = Selection::new(vec![LayerSelection::all(1, 2).unwrap()]).unwrap();
            done(block_on(rank().keep(a, vec![dense], &all)));
        });
        "ranks::ContextParallel::observe" => policies().into_iter().for_each(|policy| {
            done(rank().observe(policy, Spans::new(3, &[]).unwrap()).is_ok());
        });
        "ranks::ContextParallel::compress" => sizes(|a| {
            let mut rank = rank();
            let prompt = rank.observe(Policy::streaming(1, 1), Spans::new(1, &[]).unwrap()).unwrap();
            done(block_on(rank.compress(a, &prompt)).is_ok());
        });
        "ranks::ContextParallel::appended" => sizes(|a| done(block_on(rank().appended(a))));
        "ranks::ContextParallel::compression_due" => pairs(|a, b| done(block_on(rank().compression_due(a, b))));
        "ranks::ContextParallel::compress_again" => sizes(|a| {
            let spans = Spans::new(1, &[]).unwrap();
            done(block_on(rank().compress_again(a, &Policy::streaming(1, 1), &spans, &[])).is_ok());
        });
        "ranks::SharedPrompt::decide_by" => policies().into_iter().for_each(|policy| {
            let mut prompt = rank().observe(Policy::h2o(0.5).unwrap(), Spans::new(3, &[]).unwrap()).unwrap();
            done(prompt.decide_by(policy));
        });
        "ranks::ContextParallel::observe_layer" => sizes(|a| few_triples(|tokens, token_stride, head_stride| {
            let mut rank = rank();
            let mut prompt = rank.observe(Policy::h2o(0.5).unwrap(), Spans::new(1, &[]).unwrap()).unwrap();
            let layout = RowLayout { tokens, token_stride, head_stride };
            let dense = |rows| DenseLayer { rows, keys: row(), values: row() };
            let (queries, one) = (query(), RowLayout::token_major(1, &shape()));
            let of = |layout| MeasuredQueries { queries: TensorRows { tensor: &queries, layout }, known_lse: None };
            done(block_on(rank.observe_layer(&mut prompt, a, dense(layout), Some(of(one)))));
            done(block_on(rank.observe_layer(&mut prompt, a, dense(one), Some(of(layout)))));
        }));
    }
}
