//! Sequences that ranks compress again after they have grown.

use super::context_parallel::ContextParallel;
use super::purpose::Purpose;
use super::statistics::{KeysOfRank, SharedSize, SharedStatistics, from_halves, to_halves};
use super::transport::{TensorOf, Transport};
use crate::backend::{Backend, Device, KeptAndEvicted, TensorRows, TokenSelection};
use crate::cache::{DenseLayer, MeasuredQueries, Replaced};
use crate::counts::{filled, saturated};
use crate::format::AttentionShape;
use crate::plan::{Elements, RankShare, RowLayout};
use crate::policy::{ColumnRequest, LayerSelection, LayerStatistics, Policy, QueryPositions, Selection, Spans};
use crate::{Error, Result};

/// The positions that a layer holds of a sequence.
struct HeldLayer {
    /// On all ranks together.
    all: LayerSelection,
    /// On every rank.
    of_ranks: Vec<LayerSelection>,
}

impl<T: Transport> ContextParallel<T>
where
    T::Backend: Backend + Clone,
{
    /// Number of tokens appended to a sequence since it was last compressed, on all ranks:
    /// [`ModelCache::appended`](crate::cache::ModelCache::appended). What a rank finds in its own cache may be more.
    /// Waits for the others.
    ///
    /// # Errors
    /// [`Error::Sequence`] when there is no such sequence, [`Error::Transport`].
    pub async fn appended(&mut self, sequence: usize) -> Result<usize> {
        self.appended_on_all(Purpose::Appended, sequence).await
    }

    async fn appended_on_all(&mut self, purpose: Purpose, sequence: usize) -> Result<usize> {
        let mine = self.cache.appended(sequence)?;
        let of_ranks = self.gather_numbers(purpose, &[mine as u64]).await?;
        Ok(of_ranks.iter().flatten().copied().min().map_or(mine, |least| mine.min(least as usize)))
    }

    /// Whether a sequence should be compressed again:
    /// [`ModelCache::compression_due`](crate::cache::ModelCache::compression_due). Waits for the others.
    ///
    /// # Errors
    /// As [`ContextParallel::appended`].
    pub async fn compression_due(&mut self, sequence: usize, every: usize) -> Result<bool> {
        Ok(self.appended_on_all(Purpose::CompressionDue, sequence).await? >= every.max(1))
    }

    /// Compresses a sequence again, to the policy's budget for its present length:
    /// [`ModelCache::compress_again`](crate::cache::ModelCache::compress_again). Every rank passes all queries, and
    /// measures the keys that it holds. All ranks choose from the same statistics. Kept tokens are then spread over the
    /// ranks again by their place among the kept ones of their head. For that the ranks exchange the rows of kept
    /// tokens layer by layer in f32, or those of all held tokens if the policy merges. Waits for the others.
    ///
    /// # Errors
    /// As [`ModelCache::compress_again`](crate::cache::ModelCache::compress_again), on this rank or another
    /// ([`Error::Plan`] names it); [`Error::Transport`]. No rank has changed, unless the error is one of the transport:
    /// then [`rejoin`](ContextParallel::rejoin) says whether the sequence was lost.
    pub async fn compress_again(
        &mut self,
        sequence: usize,
        policy: &Policy,
        spans: &Spans,
        queries: &[MeasuredQueries<'_, TensorOf<T>>],
    ) -> Result<Selection> {
        let appended = self.appended_on_all(Purpose::Held, sequence).await?;
        let rows = self.cache.check_queries(appended, policy, queries)?;
        let held = self.held_by_ranks(sequence).await?;
        let mut statistics = Vec::new();
        if rows > 0 {
            for (layer, (held, queries)) in held.iter().zip(queries).enumerate() {
                statistics.push(self.measure_held((layer, sequence), policy, (held, rows), *queries).await?);
            }
        }
        let all = Selection::new(held.iter().map(|held| held.all.clone()).collect())?;
        let places = policy.places_again(spans, &all, rows, &statistics)?;
        let share = self.cache.share().copied().unwrap_or(RankShare::ALL);
        let (mut kept, mut parts) = (Vec::with_capacity(held.len()), Vec::with_capacity(held.len()));
        for (held, places) in held.iter().zip(&places) {
            let of_layer = held.all.at(places)?;
            let own: Vec<u32> = share.positions(0..of_layer.count()).map(saturated).collect();
            parts.push(of_layer.of_places(&own)?);
            kept.push(of_layer);
        }
        let opened = self.cache.open_replaced(sequence, &parts).await;
        let agreed = self.agree(Purpose::KeptRoom, opened.as_ref().map(|_| ()).map_err(Clone::clone)).await;
        let replaced = match (opened, agreed) {
            (Ok(replaced), Ok(())) => replaced,
            (Ok(replaced), Err(error)) => {
                self.cache.close_replaced(replaced, false);
                return Err(error);
            }
            (Err(error), _) => return Err(error),
        };
        let written = self.replace_layers((sequence, &replaced), policy, &held, &places).await;
        self.cache.close_replaced(replaced, written.is_ok());
        written?;
        Selection::new(kept)
    }

    /// What every rank holds of a sequence, layer by layer.
    async fn held_by_ranks(&mut self, sequence: usize) -> Result<Vec<HeldLayer>> {
        let mine = self.cache.held(sequence).await;
        self.agree(Purpose::Held, mine.as_ref().map(|_| ()).map_err(Clone::clone)).await?;
        let mine = mine?;
        let counts: Vec<u64> = mine.layers().iter().map(|layer| layer.count() as u64).collect();
        let of_ranks = self.gather_numbers(Purpose::Held, &counts).await?;
        let mut held = Vec::with_capacity(counts.len());
        for (number, layer) in mine.layers().iter().enumerate() {
            let counts: Vec<usize> = of_ranks.iter().map(|counts| counts[number] as usize).collect();
            let length = layer.tokens();
            if let Some(rank) = counts.iter().position(|&count| count > length) {
                let reason = format!("rank {rank} holds {} tokens of a sequence of {length}", counts[rank]);
                return Err(Error::Selection { reason });
            }
            let (heads, most) = (layer.kv_heads(), counts.iter().copied().max().unwrap_or(0));
            let elements = heads.saturating_mul(most).saturating_mul(2);
            let mut positions = filled(Purpose::Held.what(), elements, 0.0f32)?;
            let places = positions.as_chunks_mut::<2>().0.iter_mut();
            places.zip(layer.indices()).for_each(|(to, position)| *to = to_halves(position));
            let all = self.gather_floats(Purpose::Held, Ok(positions), elements).await?;
            let of_rank = |(all, &count): (&Vec<f32>, &usize)| {
                let all: Vec<u32> = all.as_chunks::<2>().0.iter().map(from_halves).collect();
                let of_heads = (0..heads).map(|head| all[head * count..][..count].to_vec());
                LayerSelection::new(length, of_heads.collect())
            };
            let of_ranks = all.iter().zip(&counts).map(of_rank).collect::<Result<Vec<_>>>()?;
            let of_head = |head| {
                let mut all: Vec<u32> = of_ranks.iter().flat_map(|of| of.kept(head)).copied().collect();
                all.sort_unstable();
                all
            };
            let all = LayerSelection::new(length, (0..heads).map(of_head).collect())?;
            held.push(HeldLayer { all, of_ranks });
        }
        Ok(held)
    }

    /// The attention that the held keys of a layer receive from the newest query rows.
    async fn measure_held(
        &mut self,
        (layer, sequence): (usize, usize),
        policy: &Policy,
        (held, rows): (&HeldLayer, usize),
        queries: MeasuredQueries<'_, TensorOf<T>>,
    ) -> Result<LayerStatistics> {
        let shape = *self.cache.shape(layer)?;
        let scale = self.cache.recipe(layer)?.attention().scale(&shape);
        let columns = ColumnRequest { aggregation: policy.scores.aggregation, threshold: policy.threshold() };
        let size = SharedSize::new(&shape, rows, &columns, queries.known_lse.is_some());
        let (all, length) = (held.all.count(), held.all.tokens());
        let share = self.cache.share().copied().unwrap_or(RankShare::ALL);
        let mine = held.of_ranks[self.rank()].count();
        // The newest tokens are all held. Of those that follow a row, this rank sees none.
        let later = |end: usize| {
            let from = length - (all - end).min(length);
            share.tokens(length) - share.tokens(from)
        };
        let rows_seen = QueryPositions::last(rows, all)?;
        let seeing = rows_seen.in_part(mine, |end| mine.saturating_sub(later(end)))?;
        let dense = self.cache.held_rows((layer, sequence), None).await;
        let part = dense.as_ref().map_err(Clone::clone).map(|dense| KeysOfRank {
            shape,
            scale,
            rows,
            seeing,
            queries,
            keys: match dense {
                Some(dense) => TensorRows { tensor: &dense.keys, layout: dense.rows },
                None => queries.queries,
            },
            columns,
        });
        let keys: Vec<usize> = held.of_ranks.iter().map(LayerSelection::count).collect();
        let SharedStatistics { column_sums, counts } = self.measure_shared(part, size, &keys).await?;
        let mut sums = filled("column sums", size.column_rows.saturating_mul(all), 0.0f32)?;
        for (of_rank, positions) in column_sums.iter().zip(&held.of_ranks) {
            let rows = sums.chunks_mut(all.max(1)).zip(of_rank.chunks(positions.count().max(1)));
            for (row, (sums, of_rank)) in rows.enumerate() {
                let head = row * shape.kv_heads() / size.column_rows;
                for (position, &sum) in positions.kept(head).iter().zip(of_rank) {
                    sums[place_of(&held.all, head, *position)?] = sum;
                }
            }
        }
        Ok(LayerStatistics { column_sums: sums, counts: counts.unwrap_or_default() })
    }

    /// Writes what every layer keeps, and agrees on it.
    async fn replace_layers(
        &mut self,
        (sequence, replaced): (usize, &Replaced<T::Backend>),
        policy: &Policy,
        held: &[HeldLayer],
        places: &[LayerSelection],
    ) -> Result<()> {
        let mut written = Ok(());
        for (layer, (held, places)) in held.iter().zip(places).enumerate() {
            if places.count() == 0 {
                continue;
            }
            let shape = *self.cache.shape(layer)?;
            let merging = policy.merging.filter(|_| places.count() < held.all.count());
            let wanted = if merging.is_some() { held.all.clone() } else { held.all.at(places)? };
            let mine = match &written {
                Ok(()) => self.rows_of_rank((layer, sequence), replaced, held, &wanted).await,
                Err(error) => Err(Error::clone(error)),
            };
            let elements = rows_elements(&shape, wanted.count()).saturating_mul(2);
            let all = self.sum_floats(Purpose::KeptRows, mine, elements).await?;
            written = self.write_part(&shape, (layer, replaced), (places, policy), &all).await;
        }
        self.agree(Purpose::KeptAgain, written).await
    }

    /// The wanted rows of a layer, keys and then values, `[kv_heads, wanted, head_dim]`: those that this rank holds,
    /// and zeros for the others.
    async fn rows_of_rank(
        &self,
        (layer, sequence): (usize, usize),
        replaced: &Replaced<T::Backend>,
        held: &HeldLayer,
        wanted: &LayerSelection,
    ) -> Result<Vec<f32>> {
        let shape = *self.cache.shape(layer)?;
        let (head_dim, count) = (shape.head_dim(), wanted.count());
        let of_all = rows_elements(&shape, count);
        let mut rows = filled("rows of kept tokens", of_all.saturating_mul(2), 0.0f32)?;
        let Some(dense) = self.cache.held_rows((layer, sequence), Some(replaced)).await? else { return Ok(rows) };
        let mine = &held.of_ranks[self.rank()];
        for (to, tensor) in rows.chunks_mut(of_all).zip([&dense.keys, &dense.values]) {
            let from = self.transport.backend().download(tensor).await?;
            for head in 0..shape.kv_heads() {
                for (at, position) in mine.kept(head).iter().enumerate() {
                    let Ok(place) = wanted.kept(head).binary_search(position) else { continue };
                    let row = &from[dense.rows.row(at, head)..][..head_dim];
                    to[(head * count + place) * head_dim..][..head_dim].copy_from_slice(row);
                }
            }
        }
        Ok(rows)
    }

    /// Writes the part of a layer's kept rows that this rank stores, merged where the policy merges.
    async fn write_part(
        &mut self,
        shape: &AttentionShape,
        (layer, replaced): (usize, &Replaced<T::Backend>),
        (places, policy): (&LayerSelection, &Policy),
        all: &[f32],
    ) -> Result<()> {
        let share = self.cache.share().copied().unwrap_or(RankShare::ALL);
        let own: Vec<u32> = share.positions(0..places.count()).map(saturated).collect();
        if own.is_empty() {
            return Ok(());
        }
        let backend = self.transport.backend().clone();
        let (keys, values) = all.split_at(all.len() / 2);
        let mut keys = backend.upload(Elements::F32(keys)).await?;
        let mut values = backend.upload(Elements::F32(values)).await?;
        let heads = shape.kv_heads();
        if let Some(merging) = policy.merging.filter(|_| places.count() < places.tokens()) {
            let kept = backend.upload_indices(&places.indices(), heads, saturated(places.tokens())).await?;
            let evicted = backend.evicted(&kept)?;
            let rows = RowLayout::head_major(places.tokens(), shape);
            let input =
                KeptAndEvicted { shape: *shape, rows, keys: &keys, values: &values, kept: &kept, evicted: &evicted };
            let merged = backend.merge_tokens(input, merging)?;
            (keys, values) = (merged.keys, merged.values);
        }
        let layout = RowLayout::head_major(places.count(), shape);
        let own_rows = backend.upload_indices(&own.repeat(heads), heads, saturated(places.count())).await?;
        let cut = |tensor| backend.gather(shape, TensorRows { tensor, layout }, &own_rows);
        let rows =
            DenseLayer { rows: RowLayout::head_major(own.len(), shape), keys: cut(&keys)?, values: cut(&values)? };
        self.cache.write_replaced(replaced, layer, &rows).await
    }
}

/// Elements of `tokens` rows of all KV heads.
const fn rows_elements(shape: &AttentionShape, tokens: usize) -> usize {
    shape.kv_heads().saturating_mul(tokens).saturating_mul(shape.head_dim())
}

/// The place of a held position among those of all ranks.
fn place_of(all: &LayerSelection, head: usize, position: u32) -> Result<usize> {
    all.kept(head).binary_search(&position).map_err(|_| Error::Selection {
        reason: format!("position {position} of KV head {head} is held by one rank and by none of all"),
    })
}
