//! Errors that were still unknown when the call that caused them returned.
//!
//! wgpu's native backends know the errors of a call as soon as it returns. A browser runs calls in another process and
//! reports their errors later, to whoever waits. A call that cannot wait leaves its errors here, and the next call on
//! the same device that can wait returns them.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::task::{Context, Poll};

use futures::FutureExt;
use futures::future::LocalBoxFuture;
use futures::task::noop_waker_ref;

use crate::Result;

thread_local! {
    /// In a browser a device stays on its thread.
    static PENDING: RefCell<Deferred<wgpu::Device>> = const { RefCell::new(Deferred::new()) };
}

/// Returns the outcome of a call if it is known by now. Otherwise returns success, and [`settle`] returns the outcome
/// later.
pub(super) fn defer(device: &wgpu::Device, outcome: impl Future<Output = Result<()>> + 'static) -> Result<()> {
    PENDING.with_borrow_mut(|left| left.defer(device, outcome))
}

/// Waits for the outcomes that earlier calls on `device` left, and returns the first error. Later errors mostly follow
/// from the first, and are dropped with it.
pub(super) async fn settle(device: &wgpu::Device) -> Result<()> {
    // Polled in place, so that nothing is lost when this future is dropped.
    poll_fn(|context| PENDING.with_borrow_mut(|left| left.poll_settled(device, context))).await
}

/// The outcomes that calls on devices left, in the order of the calls.
struct Deferred<Device>(Vec<Pending<Device>>);

/// The outcome that a call left.
struct Pending<Device> {
    device: Device,
    outcome: LocalBoxFuture<'static, Result<()>>,
    /// The outcome, once there is one.
    known: Option<Result<()>>,
}

impl<Device: Clone + PartialEq> Deferred<Device> {
    const fn new() -> Self {
        Self(Vec::new())
    }

    fn defer(&mut self, device: &Device, outcome: impl Future<Output = Result<()>> + 'static) -> Result<()> {
        let mut left = Pending { device: device.clone(), outcome: outcome.boxed_local(), known: None };
        let mut context = Context::from_waker(noop_waker_ref());
        if left.is_settled(&mut context) {
            return left.known.unwrap_or(Ok(()));
        }
        // Successes are dropped, so that the list does not grow when nobody waits.
        self.0.retain_mut(|left| !left.is_settled(&mut context) || left.known != Some(Ok(())));
        self.0.push(left);
        Ok(())
    }

    fn poll_settled(&mut self, device: &Device, context: &mut Context<'_>) -> Poll<Result<()>> {
        let mut pending = false;
        for left in self.0.iter_mut().filter(|left| left.device == *device) {
            pending |= !left.is_settled(context);
        }
        if pending {
            return Poll::Pending;
        }
        let known: Vec<_> =
            self.0.extract_if(.., |left| left.device == *device).filter_map(|left| left.known).collect();
        Poll::Ready(known.into_iter().find(Result::is_err).unwrap_or(Ok(())))
    }
}

impl<Device> Pending<Device> {
    /// Whether the outcome is known. If not, the caller is woken once it is.
    fn is_settled(&mut self, context: &mut Context<'_>) -> bool {
        if self.known.is_none()
            && let Poll::Ready(outcome) = self.outcome.poll_unpin(context)
        {
            self.known = Some(outcome);
        }
        self.known.is_some()
    }
}

#[cfg(test)]
mod tests {
    use futures::channel::oneshot;

    use super::*;
    use crate::Error;

    fn error(message: &str) -> Error {
        Error::Gpu { message: message.into() }
    }

    /// Leaves an outcome that the sender will deliver.
    fn leave(deferred: &mut Deferred<u32>, device: u32) -> oneshot::Sender<Result<()>> {
        let (sender, receiver) = oneshot::channel();
        assert_eq!(deferred.defer(&device, async { receiver.await.unwrap() }), Ok(()));
        sender
    }

    fn settle(deferred: &mut Deferred<u32>, device: u32) -> Poll<Result<()>> {
        deferred.poll_settled(&device, &mut Context::from_waker(noop_waker_ref()))
    }

    #[test]
    fn what_is_known_is_returned_at_once() {
        let mut deferred = Deferred::new();
        assert_eq!(deferred.defer(&1, async { Err(error("known")) }), Err(error("known")));
        assert_eq!(deferred.defer(&1, async { Ok(()) }), Ok(()));
        assert_eq!(settle(&mut deferred, 1), Poll::Ready(Ok(())));
    }

    #[test]
    fn the_next_call_that_waits_returns_the_first_error_once() {
        let mut deferred = Deferred::new();
        let [well, first, second, elsewhere] = [1, 1, 1, 2].map(|device| leave(&mut deferred, device));
        assert_eq!(settle(&mut deferred, 1), Poll::Pending);
        second.send(Err(error("second"))).unwrap();
        assert_eq!(settle(&mut deferred, 1), Poll::Pending, "two are not known");
        first.send(Err(error("first"))).unwrap();
        well.send(Ok(())).unwrap();
        assert_eq!(settle(&mut deferred, 1), Poll::Ready(Err(error("first"))));
        assert_eq!(settle(&mut deferred, 1), Poll::Ready(Ok(())));
        elsewhere.send(Err(error("elsewhere"))).unwrap();
        assert_eq!(settle(&mut deferred, 2), Poll::Ready(Err(error("elsewhere"))));
    }

    #[test]
    fn successes_are_forgotten_and_errors_kept() {
        let mut deferred = Deferred::new();
        for _ in 0..5 {
            leave(&mut deferred, 1).send(Ok(())).unwrap();
        }
        leave(&mut deferred, 1).send(Err(error("kept"))).unwrap();
        let last = leave(&mut deferred, 1);
        assert_eq!(deferred.0.len(), 2);
        last.send(Ok(())).unwrap();
        assert_eq!(settle(&mut deferred, 1), Poll::Ready(Err(error("kept"))));
        assert!(deferred.0.is_empty());
    }
}
