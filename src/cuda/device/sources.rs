//! The CUDA files, compiled into the library.

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// The text of `cuda/{name}`.
        fn file(name: &str) -> Option<&'static str> {
            match name {
                $($name => Some(include_str!(concat!("../../../cuda/", $name))),)*
                _ => None,
            }
        }

        /// Names of all files.
        #[cfg(test)]
        pub(super) const NAMES: &[&str] = &[$($name),*];
    };
}

files![
    "append.cu",
    "attend.cu",
    "attend_run.cu",
    "centre_keys.cu",
    "code_rows.cu",
    "common/attend_call.cuh",
    "common/calibration.cuh",
    "common/code_range.cuh",
    "common/codebook.cuh",
    "common/elements.cuh",
    "common/ordered.cuh",
    "common/level_bytes.cuh",
    "common/logits.cuh",
    "common/pairs.cuh",
    "common/ptx.cuh",
    "common/put_row.cuh",
    "common/reduce.cuh",
    "common/ring.cuh",
    "common/rotation.cuh",
    "common/rows.cuh",
    "common/run_queries.cuh",
    "common/scores.cuh",
    "common/scores_grouped.cuh",
    "common/sketch.cuh",
    "common/step_call.cuh",
    "common/three_bits.cuh",
    "common/tile.cuh",
    "common/tile_halves.cuh",
    "common/tile_ring.cuh",
    "common/values.cuh",
    "common/values_grouped.cuh",
    "common/warpgroup.cuh",
    "common/weights.cuh",
    "compute_guard.cu",
    "copy_page.cu",
    "dequantize.cu",
    "find_non_finite.cu",
    "hadamard.cu",
    "key_mean.cu",
    "merge_pair.cu",
    "merge_run.cu",
    "merge_states.cu",
    "pack_windows.cu",
    "page_addresses.cu",
    "prepare_query.cu",
    "quantize.cu",
    "ranges_span.cu",
    "ranges_tile.cu",
    "read_bandwidth.cu",
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
    "uncentre_keys.cu",
    "uncentre_lse.cu",
];

/// Joins several files into one text: each `#include "…"` is replaced once by the file that it names.
///
/// NVRTC could take the files as headers. A single text serves as the key of a cache and gives error messages one line
/// numbering.
pub(super) fn assemble(files: &[&'static str]) -> String {
    let mut text = String::new();
    let mut included = Vec::new();
    files.iter().for_each(|name| include(name, &mut included, &mut text));
    text
}

fn include(name: &str, included: &mut Vec<String>, text: &mut String) {
    if included.iter().any(|seen| seen == name) {
        return;
    }
    included.push(name.into());
    for line in file(name).unwrap_or_default().lines() {
        match included_name(line) {
            Some(name) => include(name, included, text),
            None if line == "#pragma once" => {}
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
}

fn included_name(line: &str) -> Option<&str> {
    line.strip_prefix("#include \"")?.strip_suffix('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every file that is named exists, is not empty, and includes only files that exist.
    #[test]
    fn includes_name_files() {
        for name in NAMES {
            let text = file(name).unwrap();
            assert!(text.starts_with("//"), "{name} begins with what it is");
            assert!(text.lines().filter_map(included_name).all(|included| file(included).is_some()), "{name}");
        }
    }

    #[test]
    fn each_file_comes_once() {
        let text = assemble(&["quantize.cu", "dequantize.cu"]);
        assert_eq!(text.matches("struct RowsCall {").count(), 1);
        assert!(!text.contains("#include") && !text.contains("#pragma once"));
    }

    /// NVRTC provides no system headers.
    #[test]
    fn no_system_headers() {
        assert!(NAMES.iter().all(|name| !file(name).unwrap().contains("#include <")));
    }
}
