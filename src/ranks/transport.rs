//! What ranks exchange: the interface that every transport implements.

use std::future::Future;

use crate::backend::{Attention, AttentionStates, Device, StateParts};
use crate::counts::{filled, in_32_bits};
use crate::format::AttentionShape;
use crate::plan::Elements;
use crate::{Error, Result};

/// The tensors of a transport.
pub type TensorOf<T> = <<T as Transport>::Backend as Device>::Tensor;

/// How an all-reduce joins the elements of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// The largest; NaN if one is NaN.
    Max,
}

/// The attention states of one rank, which are merged with those of the others.
#[derive(Debug)]
pub struct StateExchange<'a, T> {
    /// Shape of the layer.
    pub shape: AttentionShape,
    /// Rows of queries, the same on all ranks. The first rows of all tensors are used.
    pub rows: usize,
    /// The states of this rank over the tokens that it holds: outputs f32 `[rows, query_heads, head_dim]`, log-sum-exps
    /// f32 `[rows, query_heads]`, −∞ where it holds nothing that a query sees.
    pub states: &'a AttentionStates<T>,
    /// Room for the states of all ranks, from [`Transport::room_for_states`].
    pub gathered: &'a mut AttentionStates<T>,
}

/// One rank's end of what carries tensors between ranks. Each rank has a transport of its own.
///
/// # Who calls
/// All calls but [`rank`](Transport::rank), [`ranks`](Transport::ranks), [`backend`](Transport::backend) and
/// [`room_for_states`](Transport::room_for_states) are collective: every rank makes the same calls in the same order,
/// with the same numbers of elements, roots, reductions, shapes and rows. Ranks live on threads or in processes of
/// their own, since a call may wait for the others.
///
/// # Order
/// An operation is enqueued: it reads what was enqueued on the backend before it, and what is enqueued after it reads
/// its result. The call may return before the operation ran. The tensors that it names stay alive until then; a backend
/// whose tensors are freed in stream order needs nothing more. Where the backend is a CUDA stream, an operation
/// allocates nothing and waits for nothing on the host once it ran with as many elements before, so that a graph can
/// capture it. All ranks capture the same operations and replay them in the same order.
///
/// # Results
/// All ranks get the same bits from an all-gather, a broadcast, an all-reduce and a merge of states. The same input
/// gives the same bits in every run. States are merged in the order of the ranks.
///
/// # Calls that differ
/// A transport need not notice that ranks call different things. [`ThreadTransport`](super::ThreadTransport) compares
/// operation, number and type of elements, root and reduction, and returns [`Error::Transport`] on all ranks. The
/// transports of the CUDA backend, `Peer` and `Nccl`, compare nothing: a rank may wait until its deadline, or return
/// wrong elements without an error. No transport compares what states belong to.
/// [`ContextParallel`](super::ContextParallel) sends a number of its call with all else that it exchanges.
///
/// # Errors
/// An argument that does not fit (a tensor too short, a root that is no rank) is refused before anything is sent, with
/// [`Error::Elements`], [`Error::Buffer`] or [`Error::Plan`]. All ranks pass alike arguments, and so all refuse.
///
/// Everything else is [`Error::Transport`]: a rank that died or is late, and failures of the fabric. Every wait has a
/// deadline, on the host and in kernels. A failure may become known after its call returned; then a later call,
/// [`wait`](Transport::wait) at the latest, returns it. Until `wait` returns without an error, what the operations
/// wrote may be wrong. After the first such error the transport is lost: every call returns an error at once, on this
/// rank and within the deadline on the others, and the contents of the tensors that it wrote are not defined. Other
/// memory of the backend, such as the pages of a cache, is as it was. Ranks go on with new transports.
///
/// Dropping a transport tells the others, as far as it can, and never panics or waits longer than the deadline.
pub trait Transport {
    /// The backend whose tensors it carries.
    type Backend: Attention;

    /// The backend of this rank.
    fn backend(&self) -> &Self::Backend;

    /// This rank, below [`ranks`](Transport::ranks).
    fn rank(&self) -> usize;

    /// Number of ranks, at least 1.
    fn ranks(&self) -> usize;

    /// Gathers the first `elements` elements of every rank's `part`, in the order of the ranks, in the first
    /// `ranks · elements` of `all`. Both tensors have the same type of elements and share no memory.
    ///
    /// # Errors
    /// As [`Transport`] says.
    fn all_gather(&mut self, part: &TensorOf<Self>, elements: usize, all: &mut TensorOf<Self>) -> Result<()>;

    /// Copies the first `elements` elements of the tensor of rank `root` to those of all ranks.
    ///
    /// # Errors
    /// As [`Transport`] says.
    fn broadcast(&mut self, tensor: &mut TensorOf<Self>, elements: usize, root: usize) -> Result<()>;

    /// Replaces the first `elements` elements of an f32 tensor by the reduction of those of all ranks, element by
    /// element.
    ///
    /// # Errors
    /// As [`Transport`] says; [`Error::Buffer`] for a tensor that is not f32.
    fn all_reduce(&mut self, tensor: &mut TensorOf<Self>, elements: usize, reduction: Reduction) -> Result<()>;

    /// Waits until all operations of this rank are done, until the deadline at the latest, and returns the first
    /// failure.
    ///
    /// # Errors
    /// [`Error::Transport`].
    fn wait(&mut self) -> Result<()>;

    /// Room for the states of all ranks, for [`merge_states`](Transport::merge_states) of as many rows and of fewer:
    /// outputs `[ranks, rows, query_heads, head_dim]` and log-sum-exps `[ranks, rows, query_heads]`, f32. Called while
    /// no step runs: it may allocate and wait. A transport that merges states while it receives them needs none, and
    /// may return any tensors.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Limit`].
    fn room_for_states(
        &self,
        shape: &AttentionShape,
        rows: usize,
    ) -> impl Future<Output = Result<AttentionStates<TensorOf<Self>>>> {
        async move {
            let heads = self.ranks().saturating_mul(rows).saturating_mul(shape.query_heads());
            in_32_bits("elements of the states of all ranks", heads.saturating_mul(shape.head_dim()))?;
            let zeros = filled("attention states of all ranks", heads.saturating_mul(shape.head_dim()), 0.0f32)?;
            let outputs = self.backend().upload(Elements::F32(&zeros)).await?;
            let lse = self.backend().upload(Elements::F32(&zeros[..heads])).await?;
            Ok(AttentionStates { outputs, lse })
        }
    }

    /// Merges the states of all ranks. Every rank gets the result: outputs `[rows, query_heads, head_dim]` in the type
    /// of `output`, and where `lse` is given the log-sum-exps over all tokens, f32 `[rows, query_heads]`.
    ///
    /// The default gathers outputs and log-sum-exps, and merges with [`Attention::merge_parts`].
    ///
    /// # Errors
    /// As [`Transport`] says, and those of [`Attention::merge_parts`].
    fn merge_states(
        &mut self,
        exchange: StateExchange<'_, TensorOf<Self>>,
        output: &mut TensorOf<Self>,
        lse: Option<&mut TensorOf<Self>>,
    ) -> Result<()> {
        exchange.check(self.backend(), output, lse.as_deref())?;
        let StateExchange { shape, rows, states, gathered } = exchange;
        let heads = rows.saturating_mul(shape.query_heads());
        self.all_gather(&states.outputs, heads.saturating_mul(shape.head_dim()), &mut gathered.outputs)?;
        self.all_gather(&states.lse, heads, &mut gathered.lse)?;
        let parts = StateParts { states: gathered, parts: self.ranks(), rows };
        self.backend().merge_parts(&shape, parts, output, lse)
    }
}

impl<T> StateExchange<'_, T> {
    /// Checks that the states of this rank and the tensors for the result hold the rows. The room is checked by the
    /// transport that uses it.
    ///
    /// # Errors
    /// [`Error::NoTokens`] for no rows, [`Error::Elements`] for tensors that are too short.
    pub fn check<B: Device<Tensor = T> + ?Sized>(&self, backend: &B, output: &T, lse: Option<&T>) -> Result<()> {
        if self.rows == 0 {
            return Err(Error::NoTokens { what: "exchange of states", hint: "leave it out on all ranks" });
        }
        let (heads, head_dim) = (self.shape.query_heads(), self.shape.head_dim());
        for (what, tensor, channels) in [
            ("outputs of a rank", Some(&self.states.outputs), head_dim),
            ("log-sum-exps of a rank", Some(&self.states.lse), 1),
            ("outputs of all ranks", Some(output), head_dim),
            ("log-sum-exps of all ranks", lse, 1),
        ] {
            let expected = self.rows.saturating_mul(heads).saturating_mul(channels);
            let given = tensor.map_or(expected, |tensor| backend.elements(tensor));
            if given < expected {
                let shape = format!("{} rows × {heads} query heads × {channels}, or more rows", self.rows);
                return Err(Error::Elements { what, given, expected, shape });
            }
        }
        Ok(())
    }
}
