//! Attention of a [`ModelCache`]: what the queries of a step see, and what its calls return.

use super::layers::LayerGroup;
use super::model_cache::{Opened, tokens_of};
use super::{ModelCache, TokenRun};
use crate::backend::{AttentionStates, Backend};
use crate::plan::{AttendPlan, ElementType, QueryRun};
use crate::{Error, Result};

impl<B: Backend> ModelCache<B> {
    /// [`ModelCache::begin_append`] for queries that see something else than the tokens up to their own: an image whose
    /// tokens see each other ([`Visible::spans`](crate::plan::Visible::spans)), a draft tree, a prefix that sees all of
    /// itself. There is one run of queries for every run of tokens: as many, of the same sequence.
    ///
    /// # Errors
    /// As [`ModelCache::begin_append`]; [`Error::Plan`] when the runs of queries are not those of the tokens;
    /// [`Error::Unsupported`] where a layer cannot mask so. Nothing has changed.
    pub fn begin_append_seeing(&mut self, runs: &[TokenRun], queries: &[QueryRun]) -> Result<()> {
        let same = |(run, of): (&TokenRun, &QueryRun)| run.sequence() == of.sequence && run.tokens() == of.queries;
        if runs.len() != queries.len() || !runs.iter().zip(queries).all(same) {
            let reason = "pass one run of queries for every run of tokens: as many, of the same sequence".into();
            return Err(Error::Plan { what: "queries of a step", reason });
        }
        self.open(Opened::Append, tokens_of(runs), queries, |group| group.open_append(runs, tokens_of(runs)))
    }

    /// Opens a step that attends to what the cache holds, and stores nothing: cross attention, a second pass over a
    /// prompt, queries of another model. It attends as a step that appends does, by [`ModelCache::attend`] and its like
    /// or by `encode_attend` and `launch_attend` of `ModelStep`. [`ModelCache::commit`] and [`ModelCache::abandon`]
    /// both end it.
    ///
    /// ```
    /// use kvpack::cache::{ModelCache, Recipe, TokenRun};
    /// use kvpack::cpu::{Cpu, CpuTensor};
    /// use kvpack::plan::{ElementType, QueryRun, RowLayout, Visible};
    /// use kvpack::AttentionShape;
    ///
    /// # futures::executor::block_on(async {
    /// // What an encoder made of a sound, once.
    /// let shape = AttentionShape::new(2, 2, 64)?;
    /// let mut encoded = ModelCache::new(&Cpu::new(), &[(shape, Recipe::f16())], 1)?;
    /// let rows = CpuTensor::F32(vec![0.5; 300 * 2 * 64]);
    /// encoded.reserve_for_append(&[TokenRun::chunk(0, 300)]).await?;
    /// encoded.begin_append(&[TokenRun::chunk(0, 300)])?;
    /// encoded.store(0, RowLayout::token_major(300, &shape), &rows, &rows).await?;
    /// encoded.commit()?;
    ///
    /// // Every step of the decoder: 3 queries that see all of it.
    /// encoded.begin_attend(&[QueryRun::new(0, 3, Visible::All)])?;
    /// let queries = CpuTensor::F32(vec![0.1; 3 * 2 * 64]);
    /// let output = encoded.attend(0, &queries, ElementType::F32).await?;
    /// assert_eq!(output.to_f32(), [0.5; 3 * 2 * 64]);
    /// encoded.commit()?;
    /// # Ok::<(), kvpack::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Plan`] when a step is open; those of
    /// [`AttendPlan::new`].
    pub fn begin_attend(&mut self, queries: &[QueryRun]) -> Result<()> {
        self.open(Opened::Attend, 0, queries, LayerGroup::open_attend)?;
        if let Some(step) = &self.step {
            (0..self.layers.len()).for_each(|layer| step.stored.mark(layer));
        }
        Ok(())
    }

    /// Attends with the open step's queries in one layer: `[tokens, query_heads, head_dim]` for appended tokens, one
    /// row for a prompt. The output has the same layout.
    ///
    /// # Errors
    /// [`Error::Plan`] when no step is open, there is no such layer or it has not stored its tokens,
    /// [`Error::Elements`] when the queries have another shape, [`Error::OutOfMemory`] or [`Error::DeviceLost`] from
    /// the device.
    pub async fn attend(&self, layer: usize, queries: &B::Tensor, output: ElementType) -> Result<B::Tensor> {
        let (group, index, plan) = self.stored_plan(layer)?;
        plan.check_elements("queries", group.backend.elements(queries))?;
        group.backend.attend(plan, &group.stores(index), queries, group.attend_options(output)).await
    }

    /// [`ModelCache::attend`] into the caller's tensor, which has the layout of the queries. Its element type is used.
    ///
    /// # Errors
    /// As [`ModelCache::attend`]; [`Error::Elements`] when the output has another length than the queries.
    pub async fn attend_into(&self, layer: usize, queries: &B::Tensor, output: &mut B::Tensor) -> Result<()> {
        let (group, index, plan) = self.stored_plan(layer)?;
        group.attend_into(index, plan, queries, output).await
    }

    /// [`ModelCache::attend`] that returns attention states, to be merged with attention over other tokens: see
    /// [`KvCache::attend_states`](super::KvCache::attend_states).
    ///
    /// # Errors
    /// As [`ModelCache::attend`].
    pub async fn attend_states(&self, layer: usize, queries: &B::Tensor) -> Result<AttentionStates<B::Tensor>> {
        let (group, index, plan) = self.stored_plan(layer)?;
        plan.check_elements("queries", group.backend.elements(queries))?;
        group.attend_states(index, plan, queries).await
    }

    /// A layer that has stored the tokens of the open step: its group, its place there, and the plan of its attention.
    fn stored_plan(&self, layer: usize) -> Result<(&LayerGroup<B>, usize, &AttendPlan)> {
        let (group, index) = self.group(layer)?;
        let plan = self.plan(layer)?;
        if !self.step.as_ref().is_some_and(|step| step.stored.has(layer)) {
            let reason = format!("layer {layer} has not stored the tokens of the open step");
            return Err(Error::Plan { what: "attention of a step", reason });
        }
        Ok((group, index, plan))
    }
}
