//! Calls whose futures are dropped before their end, as those of requests that are cancelled.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use kvpack::Result;
use kvpack::backend::{Backend, Device, Forward, NonFinite, Packing, SpanBytes, SpanPlace, Storage};
use kvpack::cache::KvCache;
use kvpack::format::{AttentionShape, KeyOrValue};
use kvpack::plan::RowLayout;
use pollster::block_on;

use crate::random_rows::Random;

/// Polls a future as often as it is told, and drops it if it has not ended by then.
pub fn polled<T>(future: impl Future<Output = T>, polls: usize) -> Option<T> {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    (0..polls).find_map(|_| match future.as_mut().poll(&mut context) {
        Poll::Ready(outcome) => Some(outcome),
        Poll::Pending => None,
    })
}

/// A backend that lets its caller wait once before everything that the cache waits for, as in a browser.
#[derive(Clone)]
pub struct Waiting<B>(pub B);

/// Is woken at once.
async fn wait() {
    let mut waited = false;
    poll_fn(|context| {
        if std::mem::replace(&mut waited, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl<B: Backend> Forward for Waiting<B> {
    type Inner = B;

    fn inner(&self) -> &B {
        &self.0
    }

    async fn add_shard(&self, store: &mut <B as Storage>::Store, pages: u32) -> Result<()> {
        wait().await;
        self.0.add_shard(store, pages).await
    }

    async fn larger_shard(&self, store: &<B as Storage>::Store, pages: u32) -> Result<<B as Storage>::Shard> {
        wait().await;
        self.0.larger_shard(store, pages).await
    }

    async fn reserve_ranges(&self, store: &mut <B as Storage>::Store, slots: usize) -> Result<()> {
        wait().await;
        self.0.reserve_ranges(store, slots).await
    }

    async fn reserve_centres(&self, store: &mut <B as Storage>::Store, slots: usize) -> Result<()> {
        wait().await;
        self.0.reserve_centres(store, slots).await
    }

    async fn read_spans(&self, places: &[(&<B as Storage>::Store, SpanPlace<'_>)]) -> Result<Vec<SpanBytes>> {
        wait().await;
        self.0.read_spans(places).await
    }

    async fn first_non_finite(
        &self,
        which: KeyOrValue,
        tensor: &<B as Device>::Tensor,
        rows: &RowLayout,
        shape: &AttentionShape,
        largest: f32,
    ) -> Result<Option<NonFinite>> {
        wait().await;
        Packing::first_non_finite(&self.0, which, tensor, rows, shape, largest).await
    }
}

/// Runs a call to its end. Half of the calls begin once before, are polled a few times and are dropped: they must leave
/// no trace.
pub fn insist<B: Backend, T>(
    cache: &mut KvCache<B>,
    random: &mut Random,
    call: impl AsyncFn(&mut KvCache<B>) -> T,
) -> T {
    if random.below(2) == 0 {
        let polls = random.below(6);
        if let Some(outcome) = polled(call(cache), polls) {
            return outcome;
        }
    }
    block_on(call(cache))
}
