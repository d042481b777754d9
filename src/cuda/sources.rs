//! The CUDA files, compiled into the library.

use super::device::sources::KernelSources;

/// The files of `cuda/`, for every program.
pub(super) static SOURCES: KernelSources = KernelSources { library: "kvpack", files: FILES };

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// Path below `cuda/` and text of every file.
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../cuda/", $name)))),*];
    };
}

files![
    "append.cu",
    "attend.cu",
    "attend_drafts.cu",
    "attend_run.cu",
    "attend_run_pipelined.cu",
    "centre_keys.cu",
    "code_rows.cu",
    "common/append_row.cuh",
    "common/attend_call.cuh",
    "common/calibration.cuh",
    "common/code_range.cuh",
    "common/codebook.cuh",
    "common/elements.cuh",
    "common/exchange.cuh",
    "common/halves.cuh",
    "common/ordered.cuh",
    "common/key_bits.cuh",
    "common/level_bytes.cuh",
    "common/logits.cuh",
    "common/merge_parts.cuh",
    "common/pairs.cuh",
    "common/ptx.cuh",
    "common/put_row.cuh",
    "common/reduce.cuh",
    "common/ring.cuh",
    "common/rotation.cuh",
    "common/rows.cuh",
    "common/run_outputs.cuh",
    "common/run_queries.cuh",
    "common/run_rows.cuh",
    "common/run_softmax.cuh",
    "common/run_works.cuh",
    "common/scores.cuh",
    "common/scores_grouped.cuh",
    "common/sketch.cuh",
    "common/step_call.cuh",
    "common/storing.cuh",
    "common/three_bits.cuh",
    "common/tile.cuh",
    "common/tile_halves.cuh",
    "common/tile_ring.cuh",
    "common/unit_halves.cuh",
    "common/values.cuh",
    "common/values_grouped.cuh",
    "common/warpgroup.cuh",
    "common/weights.cuh",
    "compute_guard.cu",
    "copy_page.cu",
    "dequantize.cu",
    "exchange_elements.cu",
    "exchange_states.cu",
    "find_non_finite.cu",
    "hadamard.cu",
    "key_mean.cu",
    "merge_pair.cu",
    "merge_parts.cu",
    "merge_run.cu",
    "merge_states.cu",
    "pack_windows.cu",
    "prepare_query.cu",
    "quantize.cu",
    "ranges_span.cu",
    "ranges_tile.cu",
    "read_bandwidth.cu",
    "reduce_parts.cu",
    "select/attention_column_stats.cu",
    "select/attention_row_stats.cu",
    "select/chunk_similarity.cu",
    "select/evicted.cu",
    "select/gather.cu",
    "select/key_tile.cuh",
    "select/merge_call.cuh",
    "select/merge_members.cu",
    "select/merge_tokens.cu",
    "select/nearest_kept.cu",
    "select/stats_call.cuh",
    "select/sum_partials.cu",
    "select/token_scores.cu",
    "select/top_k.cu",
    "step_tables.cu",
    "uncentre_keys.cu",
    "uncentre_lse.cu",
    "unpack_tiles.cu",
];

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{FILES, SOURCES};

    #[test]
    fn files_are_what_nvrtc_reads() {
        assert_eq!(SOURCES.check(), Ok(()));
    }

    /// The files of a folder and of those in it.
    fn files(folder: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
    }

    #[test]
    fn every_file_is_compiled_in() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let mut found: Vec<String> =
            files(&root).iter().map(|path| path.strip_prefix(&root).unwrap().display().to_string()).collect();
        let mut listed: Vec<String> = FILES.iter().map(|(name, _)| (*name).to_owned()).collect();
        found.sort();
        listed.sort();
        assert_eq!(listed, found);
    }
}
