//! The shader files, compiled into the library.

use super::device::ShaderSources;

/// The files of `shaders/`, for every variant.
pub(super) static SHADERS: ShaderSources = ShaderSources {
    library: "kvpack",
    files: FILES,
    tables: &["items", "page_table", "prepared", "sinks", "state_rows", STEP_TABLE],
    unclamped_table: Some(STEP_TABLE),
};

/// The table of the kernels that append, pack and copy in a step. A caller may write it, and its pages and slots are not
/// clamped yet. Two kernels in one dispatch share it.
const STEP_TABLE: &str = "table";

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// Path below `shaders/` and text of every file.
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../shaders/", $name)))),*];
    };
}

files![
    "attend/attend.wgsl",
    "attend/attend_matrix.wgsl",
    "attend/attend_run.wgsl",
    "attend/attend_run_apart.wgsl",
    "attend/block_max.wgsl",
    "attend/byte_weights.wgsl",
    "attend/codes.wgsl",
    "attend/extremes.wgsl",
    "attend/input.wgsl",
    "attend/input_rows.wgsl",
    "attend/item_of.wgsl",
    "attend/key_bytes.wgsl",
    "attend/key_codes.wgsl",
    "attend/key_field.wgsl",
    "attend/key_ranges.wgsl",
    "attend/key_totals.wgsl",
    "attend/logits.wgsl",
    "attend/lse.wgsl",
    "attend/merge.wgsl",
    "attend/merge_parts.wgsl",
    "attend/merge_states.wgsl",
    "attend/numbering.wgsl",
    "attend/output.wgsl",
    "attend/output_rotation.wgsl",
    "attend/output_rows.wgsl",
    "attend/prepare_query.wgsl",
    "attend/prepare_run_query.wgsl",
    "attend/prepared_query.wgsl",
    "attend/products.wgsl",
    "attend/query.wgsl",
    "attend/query_bytes.wgsl",
    "attend/query_ranges.wgsl",
    "attend/query_rotation.wgsl",
    "attend/query_row.wgsl",
    "attend/rotated_rows.wgsl",
    "attend/run_arrivals.wgsl",
    "attend/run_ends.wgsl",
    "attend/run_factors.wgsl",
    "attend/run_key_codes.wgsl",
    "attend/run_keys.wgsl",
    "attend/run_outputs.wgsl",
    "attend/run_queries.wgsl",
    "attend/run_states.wgsl",
    "attend/run_tiles.wgsl",
    "attend/run_value_codes.wgsl",
    "attend/run_values.wgsl",
    "attend/scores.wgsl",
    "attend/sinks.wgsl",
    "attend/sketch_fields.wgsl",
    "attend/softmax_loop.wgsl",
    "attend/state_buffers.wgsl",
    "attend/states.wgsl",
    "attend/step_scores.wgsl",
    "attend/team_totals.wgsl",
    "attend/three_bytes.wgsl",
    "attend/uncentre_lse.wgsl",
    "attend/value_bytes.wgsl",
    "attend/value_codes.wgsl",
    "attend/value_field.wgsl",
    "attend/value_ranges.wgsl",
    "attend/values.wgsl",
    "attend/weighted_values.wgsl",
    "attend/work_item.wgsl",
    "attend/workgroup_max.wgsl",
    "common/ordered.wgsl",
    "common/rotation.wgsl",
    "measure/compute_guard.wgsl",
    "measure/read_bandwidth.wgsl",
    "pack/append.wgsl",
    "pack/call.wgsl",
    "pack/centre_keys.wgsl",
    "pack/code_range.wgsl",
    "pack/copy_page.wgsl",
    "pack/dequantize.wgsl",
    "pack/field.wgsl",
    "pack/find_non_finite.wgsl",
    "pack/finite.wgsl",
    "pack/flat.wgsl",
    "pack/hadamard.wgsl",
    "pack/half.wgsl",
    "pack/key_mean.wgsl",
    "pack/level_fields.wgsl",
    "pack/mean.wgsl",
    "pack/norm.wgsl",
    "pack/norms.wgsl",
    "pack/norms_tile.wgsl",
    "pack/places.wgsl",
    "pack/quantize.wgsl",
    "pack/ranges.wgsl",
    "pack/ranges_span.wgsl",
    "pack/ranges_tile.wgsl",
    "pack/ranges_window.wgsl",
    "pack/renormalize.wgsl",
    "pack/row.wgsl",
    "pack/row_ranges.wgsl",
    "pack/rows.wgsl",
    "pack/source.wgsl",
    "pack/step_table.wgsl",
    "pack/tile.wgsl",
    "pack/tokens.wgsl",
    "pack/uncentre_keys.wgsl",
    "pack/words.wgsl",
    "select/attention_column_stats.wgsl",
    "select/attention_row_stats.wgsl",
    "select/calls.wgsl",
    "select/chunk_similarity.wgsl",
    "select/counting.wgsl",
    "select/evicted.wgsl",
    "select/gather.wgsl",
    "select/matrix_counting.wgsl",
    "select/merge_tokens.wgsl",
    "select/nearest_kept.wgsl",
    "select/normalize_kept.wgsl",
    "select/prepare_stats_queries.wgsl",
    "select/queries.wgsl",
    "select/rows.wgsl",
    "select/stats_matrix.wgsl",
    "select/sum_partials.wgsl",
    "select/token_scores.wgsl",
    "select/top_k.wgsl",
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    fn paths_below(folder: &Path, found: &mut BTreeSet<String>, prefix: &str) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let path = format!("{prefix}{}", entry.file_name().to_str().unwrap());
            match entry.file_type().unwrap().is_dir() {
                true => paths_below(&entry.path(), found, &format!("{path}/")),
                false => drop(found.insert(path)),
            }
        }
    }

    #[test]
    fn every_file_is_listed() {
        let mut found = BTreeSet::new();
        paths_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders"), &mut found, "");
        let listed: BTreeSet<String> = FILES.iter().map(|(path, _)| (*path).to_owned()).collect();
        assert_eq!(listed, found, "the list in src/wgpu/sources.rs and the files in shaders/");
    }
}
