//! Steps of a [`KvCache`]: tokens are stored, and their queries attend, in one call.

use super::kv_cache::LAYER;
use super::step::NewTokens;
use super::{KvCache, TokenRun};
use crate::Result;
use crate::backend::Backend;
use crate::plan::{QueryRun, RowLayout};

impl<B: Backend> KvCache<B> {
    /// A decode step of all sequences: appends one token to each and attends with its query, into the caller's tensor.
    ///
    /// `rows` is the layout of keys and values. Queries and output are `[sequences, query_heads, head_dim]`.
    ///
    /// ```
    /// use kvpack::cache::Recipe;
    /// use kvpack::cpu::{Cpu, CpuTensor};
    /// use kvpack::plan::RowLayout;
    /// use kvpack::{AttentionShape, KvCache};
    /// # fn main() -> kvpack::Result<()> {
    /// let shape = AttentionShape::new(2, 1, 64)?;
    /// let mut cache = KvCache::new(Cpu::new(), shape, 1, Recipe::f16())?;
    /// let of = |elements| CpuTensor::F32(vec![0.5; elements]);
    /// let (keys, values, queries, mut output) = (of(64), of(64), of(2 * 64), of(2 * 64));
    /// let rows = RowLayout::token_major(1, &shape);
    /// pollster::block_on(cache.append_attend_into(rows, &keys, &values, &queries, &mut output))?;
    /// assert_eq!(output.to_f32(), [0.5; 2 * 64]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`KvCache::append`] and [`KvCache::attend_into`]. On an error the cache is unchanged.
    pub async fn append_attend_into(
        &mut self,
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
        queries: &B::Tensor,
        output: &mut B::Tensor,
    ) -> Result<()> {
        let appended: Vec<TokenRun> = (0..self.sequences()).map(TokenRun::decode).collect();
        let asked: Vec<QueryRun> = (0..self.sequences()).map(QueryRun::decode).collect();
        self.step(&appended, &asked, NewTokens { rows, keys, values }, (queries, output)).await
    }

    /// A part of a prompt, or all of it: appends the tokens of `rows` to one sequence and attends with all their
    /// queries into the caller's tensor. Each query sees the part up to its own token in f16, and what was stored
    /// before as it is stored. The part is packed within the call: see [`TokenRun::prompt`]. Elements that are not
    /// finite are stored as zeros, and [reported later](KvCache::non_finite).
    ///
    /// Queries and output are `[tokens, query_heads, head_dim]`.
    ///
    /// ```
    /// use kvpack::cache::Recipe;
    /// use kvpack::cpu::{Cpu, CpuTensor};
    /// use kvpack::plan::RowLayout;
    /// use kvpack::{AttentionShape, Bits, KvCache};
    /// # fn main() -> kvpack::Result<()> {
    /// let shape = AttentionShape::new(2, 1, 64)?;
    /// let mut cache = KvCache::new(Cpu::new(), shape, 1, Recipe::calibquant(Bits::Two))?;
    /// let of = |elements| CpuTensor::F32(vec![0.5; elements]);
    /// let (keys, values, queries, mut output) = (of(300 * 64), of(300 * 64), of(300 * 2 * 64), of(300 * 2 * 64));
    /// let rows = RowLayout::token_major(300, &shape);
    /// pollster::block_on(cache.prompt_attend_into(0, rows, &keys, &values, &queries, &mut output))?;
    /// assert_eq!(output.to_f32(), [0.5; 300 * 2 * 64]);
    /// assert_eq!(cache.memory().packed()[0].tokens, 300);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`KvCache::extend`] and [`KvCache::attend_into`]. On an error the cache is unchanged.
    pub async fn prompt_attend_into(
        &mut self,
        sequence: usize,
        rows: RowLayout,
        keys: &B::Tensor,
        values: &B::Tensor,
        queries: &B::Tensor,
        output: &mut B::Tensor,
    ) -> Result<()> {
        let (part, asked) = (TokenRun::prompt(sequence, rows.tokens), QueryRun::causal(sequence, rows.tokens));
        self.step(&[part], &[asked], NewTokens { rows, keys, values }, (queries, output)).await
    }

    /// Stores runs of tokens and attends with runs of queries. On an error the cache is as it was.
    async fn step(
        &mut self,
        runs: &[TokenRun],
        asked: &[QueryRun],
        new: NewTokens<'_, B::Tensor>,
        (queries, output): (&B::Tensor, &mut B::Tensor),
    ) -> Result<()> {
        let change = self.store_runs(runs, new).await?;
        let attended = match self.plan(asked) {
            Ok(plan) => self.group.attend_into(LAYER, &plan, queries, output).await,
            Err(error) => Err(error),
        };
        self.group.close(change, attended)
    }
}
