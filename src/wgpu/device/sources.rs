//! The shader files, compiled into the library.

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// Path below `shaders/` and text of every file.
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../../shaders/", $name)))),*];
    };
}

/// The text of `shaders/{path}`.
pub(super) fn file(path: &str) -> Option<&'static str> {
    FILES.iter().find(|(name, _)| *name == path).map(|(_, text)| *text)
}

/// This path below `shaders/`, if there is such a file.
pub(super) fn path(path: &str) -> Option<&'static str> {
    FILES.iter().map(|(name, _)| *name).find(|name| *name == path)
}

/// The file of a kernel: `{folder}/{kernel}.wgsl` in one of the folders.
pub(super) fn kernel_file(kernel: &str) -> Option<&'static str> {
    let is_kernel = |path: &str| {
        let name = path.split_once('/').and_then(|(_, file)| file.strip_suffix(".wgsl"));
        name == Some(kernel)
    };
    FILES.iter().map(|(path, _)| *path).find(|path| is_kernel(path))
}

files![
    "attend/add_product.wgsl",
    "attend/attend.wgsl",
    "attend/attend_matrix.wgsl",
    "attend/block_max/atomic.wgsl",
    "attend/block_max/slot.wgsl",
    "attend/block_max/subgroup.wgsl",
    "attend/byte_weights/groups.wgsl",
    "attend/byte_weights/shared.wgsl",
    "attend/byte_weights/slot.wgsl",
    "attend/extremes/reset.wgsl",
    "attend/extremes/slot.wgsl",
    "attend/input/bf16.wgsl",
    "attend/input/f16.wgsl",
    "attend/input/f32.wgsl",
    "attend/input/slot.wgsl",
    "attend/input_rows/slot.wgsl",
    "attend/input_rows/strided.wgsl",
    "attend/join_states.wgsl",
    "attend/key_bytes/levels.wgsl",
    "attend/key_bytes/slot.wgsl",
    "attend/key_bytes/three.wgsl",
    "attend/key_bytes/top.wgsl",
    "attend/key_codes/planes.wgsl",
    "attend/key_codes/slot.wgsl",
    "attend/key_codes/three.wgsl",
    "attend/key_field/channel_tokens.wgsl",
    "attend/key_field/f16.wgsl",
    "attend/key_field/slot.wgsl",
    "attend/key_field/token_channels.wgsl",
    "attend/key_ranges/folded.wgsl",
    "attend/key_ranges/slot.wgsl",
    "attend/key_ranges/token.wgsl",
    "attend/key_totals/memory.wgsl",
    "attend/key_totals/slot.wgsl",
    "attend/key_totals/subgroup.wgsl",
    "attend/level_bytes.wgsl",
    "attend/lse/f32.wgsl",
    "attend/lse/slot.wgsl",
    "attend/merge/last.wgsl",
    "attend/merge/later.wgsl",
    "attend/merge/slot.wgsl",
    "attend/merge_pair.wgsl",
    "attend/merge_states.wgsl",
    "attend/numbering/local.wgsl",
    "attend/numbering/slot.wgsl",
    "attend/numbering/subgroup.wgsl",
    "attend/output/bf16.wgsl",
    "attend/output/f16.wgsl",
    "attend/output/f32.wgsl",
    "attend/output/slot.wgsl",
    "attend/output_rotation/hadamard.wgsl",
    "attend/output_rotation/slot.wgsl",
    "attend/output_rows/slot.wgsl",
    "attend/output_rows/strided.wgsl",
    "attend/prepare_query.wgsl",
    "attend/query/own.wgsl",
    "attend/query/own_f32.wgsl",
    "attend/query/prepared.wgsl",
    "attend/query/prepared_f32.wgsl",
    "attend/query/slot.wgsl",
    "attend/query_fields.wgsl",
    "attend/query_in_row.wgsl",
    "attend/query_ranges/slot.wgsl",
    "attend/query_ranges/span.wgsl",
    "attend/query_rotation/hadamard.wgsl",
    "attend/query_rotation/sketch.wgsl",
    "attend/query_rotation/slot.wgsl",
    "attend/query_row/f32.wgsl",
    "attend/query_row/int.wgsl",
    "attend/query_row/slot.wgsl",
    "attend/scores.wgsl",
    "attend/scores/dot.wgsl",
    "attend/scores/fma.wgsl",
    "attend/scores/groups.wgsl",
    "attend/scores/sketch.wgsl",
    "attend/scores/slot.wgsl",
    "attend/scores/stored.wgsl",
    "attend/sketch_fields/planes.wgsl",
    "attend/sketch_fields/slot.wgsl",
    "attend/sketch_fields/three.wgsl",
    "attend/softmax_loop.wgsl",
    "attend/states.wgsl",
    "attend/team_totals/memory.wgsl",
    "attend/team_totals/slot.wgsl",
    "attend/team_totals/subgroup.wgsl",
    "attend/three_bytes/levels.wgsl",
    "attend/three_bytes/slot.wgsl",
    "attend/three_bytes/top.wgsl",
    "attend/uncentre_lse.wgsl",
    "attend/value_bytes/levels.wgsl",
    "attend/value_bytes/slot.wgsl",
    "attend/value_bytes/three.wgsl",
    "attend/value_bytes/top.wgsl",
    "attend/value_codes/planes.wgsl",
    "attend/value_codes/slot.wgsl",
    "attend/value_codes/three.wgsl",
    "attend/value_dots.wgsl",
    "attend/value_field/channel_tokens.wgsl",
    "attend/value_field/f16.wgsl",
    "attend/value_field/slot.wgsl",
    "attend/value_field/token_channels.wgsl",
    "attend/value_ranges/folded.wgsl",
    "attend/value_ranges/groups.wgsl",
    "attend/value_ranges/slot.wgsl",
    "attend/value_ranges/tiles.wgsl",
    "attend/value_ranges/token.wgsl",
    "attend/values/byte.wgsl",
    "attend/values/dot.wgsl",
    "attend/values/fma.wgsl",
    "attend/values/slot.wgsl",
    "attend/weighted_values.wgsl",
    "attend/weights_of_step.wgsl",
    "attend/work_item.wgsl",
    "attend/workgroup_max/slot.wgsl",
    "attend/workgroup_max/subgroup.wgsl",
    "common/ordered.wgsl",
    "common/rotate_row.wgsl",
    "common/sketch_row.wgsl",
    "measure/compute_guard.wgsl",
    "measure/read_bandwidth.wgsl",
    "pack/append.wgsl",
    "pack/call.wgsl",
    "pack/centre_keys.wgsl",
    "pack/code_range.wgsl",
    "pack/copy_page.wgsl",
    "pack/dequantize.wgsl",
    "pack/f16_tile.wgsl",
    "pack/field/codebook.wgsl",
    "pack/field/codes.wgsl",
    "pack/field/f16.wgsl",
    "pack/field/sketch.wgsl",
    "pack/field/slot.wgsl",
    "pack/find_non_finite.wgsl",
    "pack/finite/centred.wgsl",
    "pack/finite/flagged.wgsl",
    "pack/finite/slot.wgsl",
    "pack/finite/unchecked.wgsl",
    "pack/flag_element.wgsl",
    "pack/flat.wgsl",
    "pack/grouping.wgsl",
    "pack/hadamard.wgsl",
    "pack/half.wgsl",
    "pack/key_mean.wgsl",
    "pack/level_fields/levels.wgsl",
    "pack/level_fields/slot.wgsl",
    "pack/levels.wgsl",
    "pack/mean/of_call.wgsl",
    "pack/mean/of_step.wgsl",
    "pack/mean/slot.wgsl",
    "pack/norm.wgsl",
    "pack/norms/of_tile.wgsl",
    "pack/norms/slot.wgsl",
    "pack/norms_tile.wgsl",
    "pack/places/centred_tokens.wgsl",
    "pack/places/copies.wgsl",
    "pack/places/listed.wgsl",
    "pack/places/rotated_windows.wgsl",
    "pack/places/slot.wgsl",
    "pack/places/tokens.wgsl",
    "pack/places/window_rows.wgsl",
    "pack/places/windows.wgsl",
    "pack/quantize.wgsl",
    "pack/ranges/of_span.wgsl",
    "pack/ranges/of_tile.wgsl",
    "pack/ranges/slot.wgsl",
    "pack/ranges_span.wgsl",
    "pack/ranges_tile.wgsl",
    "pack/ranges_window.wgsl",
    "pack/renormalize.wgsl",
    "pack/row/plain.wgsl",
    "pack/row/rotated.wgsl",
    "pack/row/slot.wgsl",
    "pack/row_norm_bits.wgsl",
    "pack/row_ranges/affine.wgsl",
    "pack/row_ranges/norm.wgsl",
    "pack/row_ranges/renormalized.wgsl",
    "pack/row_ranges/sketch.wgsl",
    "pack/row_ranges/slot.wgsl",
    "pack/rows/bf16.wgsl",
    "pack/rows/f16.wgsl",
    "pack/rows/f32.wgsl",
    "pack/rows/in_place.wgsl",
    "pack/rows/key_tile.wgsl",
    "pack/rows/slot.wgsl",
    "pack/rows/value_tile.wgsl",
    "pack/source/other.wgsl",
    "pack/source/same.wgsl",
    "pack/source/slot.wgsl",
    "pack/step_table.wgsl",
    "pack/tile.wgsl",
    "pack/tokens/gather.wgsl",
    "pack/tokens/run.wgsl",
    "pack/tokens/slot.wgsl",
    "pack/tokens/windows.wgsl",
    "pack/uncentre_keys.wgsl",
    "pack/words/of_key.wgsl",
    "pack/words/of_value.wgsl",
    "pack/words/slot.wgsl",
    "select/attention_column_stats.wgsl",
    "select/attention_row_stats.wgsl",
    "select/chunk_similarity.wgsl",
    "select/counting/rows.wgsl",
    "select/counting/slot.wgsl",
    "select/evicted.wgsl",
    "select/gather.wgsl",
    "select/merge_call.wgsl",
    "select/merge_tokens.wgsl",
    "select/move_rows.wgsl",
    "select/nearest_kept.wgsl",
    "select/normalize_kept.wgsl",
    "select/queries/bf16.wgsl",
    "select/queries/f16.wgsl",
    "select/queries/f32.wgsl",
    "select/queries/slot.wgsl",
    "select/reorder_chunks.wgsl",
    "select/resident_rows.wgsl",
    "select/stats_call.wgsl",
    "select/sum_counts.wgsl",
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
        assert_eq!(listed, found, "the list in src/wgpu/device/sources.rs and the files in shaders/");
    }
}
