//! Prompts of which a part stays, spread over ranks.

use super::context_parallel::ContextParallel;
use super::purpose::Purpose;
use super::shared_prompt::SharedPrompt;
use super::transport::{TensorOf, Transport};
use crate::backend::Backend;
use crate::cache::DenseLayer;
use crate::counts::saturated;
use crate::plan::RankShare;
use crate::policy::{LayerSelection, Policy, Selection, Spans};
use crate::{Error, Result};

impl<T: Transport> ContextParallel<T>
where
    T::Backend: Backend + Clone,
{
    /// A prompt for a policy to observe, layer by layer with
    /// [`observe_layer`](ContextParallel::observe_layer): [`ModelCache::observe`](crate::cache::ModelCache::observe).
    ///
    /// # Errors
    /// As [`ModelCache::observe`](crate::cache::ModelCache::observe).
    pub fn observe(&self, policy: Policy, spans: Spans) -> Result<SharedPrompt<T::Backend>> {
        let share = self.cache.share().copied().unwrap_or(RankShare::ALL);
        Ok(SharedPrompt::new(self.cache.observe(policy, spans)?, share))
    }

    /// Stores the part of a prompt that its policy keeps, at the end of a sequence, in every layer:
    /// [`ModelCache::compress`](crate::cache::ModelCache::compress). All ranks have the same statistics. Rank 0
    /// decides, so that all keep the same. Of the tokens that a KV head keeps, a rank stores those whose place among
    /// them is its own by the [`Placement`](super::Placement). Where evicted tokens are merged into kept ones, every
    /// rank merges all, and stores its part. Waits for the others.
    ///
    /// # Errors
    /// As [`ModelCache::compress`](crate::cache::ModelCache::compress), on this rank or another; [`Error::Transport`].
    /// No rank has changed, unless the error is one of the transport.
    pub async fn compress(&mut self, sequence: usize, prompt: &SharedPrompt<T::Backend>) -> Result<Selection> {
        let selected = prompt.select().await;
        self.agree(Purpose::Choice, selected.as_ref().map(|_| ()).map_err(Clone::clone)).await?;
        let selection = self.selection_of_first(&selected?).await?;
        let before = self.cache.length(sequence)?;
        let kept = self.cache.keep_observed(sequence, &prompt.observed, &selection).await;
        self.agree_to_keep((sequence, before), Purpose::Compressed, kept).await?;
        Ok(selection)
    }

    /// Stores the tokens of a prompt that the caller chose, at the end of a sequence, in every layer:
    /// [`ModelCache::keep`](crate::cache::ModelCache::keep). All ranks pass the same prompt and choice, and each stores
    /// its part of it. Waits for the others.
    ///
    /// # Errors
    /// As [`ModelCache::keep`](crate::cache::ModelCache::keep), on this rank or another; [`Error::Transport`]. Where
    /// one rank failed, the sequence is as it was on all.
    pub async fn keep(
        &mut self,
        sequence: usize,
        prompt: Vec<DenseLayer<TensorOf<T>>>,
        selection: &Selection,
    ) -> Result<()> {
        let before = self.cache.length(sequence)?;
        let kept = self.cache.keep_chosen(sequence, prompt, selection).await;
        self.agree_to_keep((sequence, before), Purpose::Kept, kept).await
    }

    /// Takes back what this rank kept, if another could not.
    async fn agree_to_keep(
        &mut self,
        (sequence, before): (usize, usize),
        purpose: Purpose,
        kept: Result<()>,
    ) -> Result<()> {
        let has_changed = kept.is_ok();
        let agreed = self.agree(purpose, kept).await;
        if agreed.is_err() && has_changed {
            // A rank that kept nothing takes nothing back: the sequence has been through the same on both.
            let generation = self.cache.generation(sequence)?;
            if before == 0 {
                self.cache.clear(sequence)?;
            } else {
                self.cache.truncate(sequence, before)?;
            }
            self.cache.set_generation(sequence, generation);
        }
        agreed
    }

    /// The choice of rank 0, which that of this rank may differ from where its scores were rounded otherwise.
    async fn selection_of_first(&mut self, mine: &Selection) -> Result<Selection> {
        let counts: Vec<u64> = mine.layers().iter().map(|layer| layer.count() as u64).collect();
        let counts = self.numbers_of_first(Purpose::Choice, &counts).await?;
        // Before anything is sized by them.
        if let Some((layer, count)) = mine.layers().iter().zip(&counts).find(|(of, count)| **count > of.tokens() as u64)
        {
            let reason = format!("rank 0 keeps {count} of a prompt of {} tokens; pass the same prompt", layer.tokens());
            return Err(Error::Selection { reason });
        }
        let of_layers = mine.layers().iter().zip(&counts);
        let numbers = of_layers.clone().map(|(layer, &count)| layer.kv_heads() as u64 * count);
        let mut positions: Vec<u64> = mine.layers().iter().flat_map(LayerSelection::indices).map(u64::from).collect();
        positions.resize(numbers.fold(0, u64::saturating_add) as usize, 0);
        let positions = self.numbers_of_first(Purpose::Choice, &positions).await?;
        let mut from = positions.iter().map(|&position| saturated(position as usize));
        let of = |(layer, &count): (&LayerSelection, &u64)| {
            let kept = (0..layer.kv_heads()).map(|_| from.by_ref().take(count as usize).collect()).collect();
            LayerSelection::new(layer.tokens(), kept)
        };
        Selection::new(of_layers.map(of).collect::<Result<_>>()?)
    }
}
