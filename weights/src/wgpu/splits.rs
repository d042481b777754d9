//! How many workgroups share the outputs of a product by matrices.

use super::product::MATRIX_TILE;

/// Multiprocessors of the card on which the costs below were measured, an H200. wgpu does not say how many another
/// device has. There, too, more and shorter workgroups fill it more evenly.
const MULTIPROCESSORS: usize = 132;

/// The most workgroups that share a tile, and the fewest chunks of each.
const MOST_SPLITS: usize = 8;
const LEAST_CHUNKS: usize = 16;

/// What the second launch costs, in chunks of a tile.
const LAUNCH_CHUNKS: f64 = 5.0;

/// What it costs to write the sums of a tile and to read them again, in chunks of a tile.
const SUM_CHUNKS: f64 = 0.12;

/// The gain from which sharing pays.
const LEAST_GAIN: f64 = 1.05;

/// The number of workgroups that share each tile of `rows` rows of `outputs` outputs, each for its own part of `chunks`
/// chunks: 1, or a divisor of `chunks`.
pub(super) fn splits(rows: usize, outputs: usize, chunks: usize) -> usize {
    if !outputs.is_multiple_of(4) {
        return 1;
    }
    let tiles = rows.div_ceil(MATRIX_TILE) * outputs.div_ceil(MATRIX_TILE);
    let cost = |splits: usize| {
        let turns = (tiles * splits).div_ceil(MULTIPROCESSORS) * (chunks / splits);
        let sums = if splits == 1 { 0.0 } else { LAUNCH_CHUNKS + SUM_CHUNKS * (tiles * splits) as f64 };
        turns as f64 + sums
    };
    // Turns of two chunks take less time than twice as many of one.
    let whole = |splits: usize| chunks % 2 == 1 || (chunks / splits).is_multiple_of(2);
    let fits = |splits: &usize| chunks.is_multiple_of(*splits) && whole(*splits) && chunks / splits >= LEAST_CHUNKS;
    let shared = (2..=MOST_SPLITS).filter(fits).min_by(|a, b| cost(*a).total_cmp(&cost(*b)));
    shared.filter(|splits| cost(1) >= LEAST_GAIN * cost(*splits)).unwrap_or(1)
}

/// How a product of up to 16 rows is divided among workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowSplit {
    /// Slices of 16 outputs of a workgroup.
    pub slices: usize,
    /// Workgroups that share these outputs, each with its own turns.
    pub splits: usize,
}

/// Microseconds of a turn of a workgroup with 1, 2, 4 and 8 slices, on an H200 with a workgroup on every
/// multiprocessor, and of the second launch.
const TURN_COSTS: [(usize, f64); 4] = [(1, 1.64), (2, 1.9), (4, 2.66), (8, 3.9)];
const LAUNCH_COST: f64 = 4.0;

impl RowSplit {
    /// The division of least cost among those whose workgroups have whole turns, of which there are `turns`.
    pub(super) fn of(outputs: usize, turns: usize) -> Self {
        let most = if outputs.is_multiple_of(4) { MOST_SPLITS.min(turns) } else { 1 };
        let splits = (1..=most).filter(|splits| turns.is_multiple_of(*splits));
        let all = splits.flat_map(|splits| TURN_COSTS.map(|(slices, turn)| (Self { slices, splits }, turn)));
        let cost = |(Self { slices, splits }, turn): &(Self, f64)| {
            let waves = (outputs.div_ceil(16 * slices) * splits).div_ceil(MULTIPROCESSORS);
            let second = if *splits == 1 { 0.0 } else { LAUNCH_COST };
            (waves * turns / splits) as f64 * turn + second
        };
        let least = all.min_by(|a, b| cost(a).total_cmp(&cost(b)));
        least.map_or(Self { slices: 1, splits: 1 }, |(split, _)| split)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_shared_where_they_leave_multiprocessors_idle() {
        // 160 tiles, whose last 28 would take as long as the 132 before them.
        assert!(splits(512, 5120, 432) > 1);
        // 64 tiles.
        assert!(splits(64, 8192, 256) > 1);
        // 128 and 256 tiles.
        assert_eq!(splits(512, 4096, 128), 1);
        assert_eq!(splits(512, 8192, 256), 1);
        // Layers of the tests of products.
        assert_eq!([32, 64, 128, 256].map(|chunks| splits(20, 132, chunks)), [2, 4, 8, 8]);
        assert_eq!((splits(140, 36, 32), splits(40, 20, 64)), (2, 4));
    }

    #[test]
    fn parts_are_whole_and_not_too_short() {
        for rows in [17, 128, 129, 300, 2000] {
            for outputs in [4, 64, 1000, 4096, 5120, 130, 131] {
                for chunks in [1, 16, 31, 32, 97, 128, 432, 864] {
                    let splits = splits(rows, outputs, chunks);
                    assert!(chunks.is_multiple_of(splits));
                    assert!(splits == 1 || (chunks / splits >= LEAST_CHUNKS && outputs.is_multiple_of(4)));
                }
            }
        }
    }

    #[test]
    fn few_rows_fill_the_multiprocessors() {
        let of = |outputs: usize, inputs: usize| {
            let RowSplit { slices, splits } = RowSplit::of(outputs, inputs / 512);
            (slices, splits)
        };
        assert_eq!(of(4096, 4096), (8, 4));
        assert_eq!(of(8192, 8192), (8, 2));
        assert_eq!(of(14336, 4096), (8, 1));
        assert_eq!(of(5120, 13824), (8, 3));
        // Layers of the tests.
        assert_eq!((of(76, 1024), of(264, 512)), ((1, 1), (1, 1)));
        assert_eq!(of(76, 4096), (1, 8));
        for outputs in [1, 16, 130, 4096, 100_000] {
            for turns in 1..70 {
                let RowSplit { splits, .. } = RowSplit::of(outputs, turns);
                assert!(turns % splits == 0 && (splits == 1 || outputs % 4 == 0));
            }
        }
    }
}
