//! The kernel variants of attention statistics.

use super::AttentionStatsPlan;
use crate::format::HEAD_DIMS;
use crate::plan::ElementType;
use crate::policy::HeadAggregation;
use crate::wgpu::device::Variant;
use crate::wgpu::pack::rows_file;
use crate::wgpu::select::stats_matrix::MatrixCut;
use crate::wgpu::select::{aggregation_constant, queries_file};
use crate::wgpu::sources::SHADERS;

impl AttentionStatsPlan {
    pub(super) fn row_variant(&self, cut: Option<&MatrixCut>, queries: ElementType, keys: ElementType) -> Variant {
        match cut {
            Some(cut) => cut.row_variant(queries),
            None => row_variant(self.shape.head_dim(), queries, keys),
        }
    }

    pub(super) fn column_variant(&self, cut: Option<&MatrixCut>, queries: ElementType, keys: ElementType) -> Variant {
        let (aggregation, counts) = (self.request.columns.aggregation, self.log_threshold.is_some());
        match cut {
            Some(cut) if counts => cut.counting_column_variant(queries, aggregation),
            Some(cut) => cut.column_variant(queries, aggregation),
            None => {
                let variant = column_variant(self.shape.head_dim(), aggregation, queries, keys);
                let variant = if counts { counting(variant) } else { variant };
                if self.adding.is_some() { adding(variant) } else { variant }
            }
        }
    }
}

fn row_variant(head_dim: usize, queries: ElementType, keys: ElementType) -> Variant {
    typed(Variant::new(&SHADERS, "attention_row_stats"), head_dim, queries, keys)
}

fn column_variant(head_dim: usize, aggregation: HeadAggregation, queries: ElementType, keys: ElementType) -> Variant {
    let variant = typed(Variant::new(&SHADERS, "attention_column_stats"), head_dim, queries, keys);
    variant.constant("AGGREGATION", aggregation_constant(aggregation))
}

/// The same that also counts the keys at or above the threshold of each row.
fn counting(variant: Variant) -> Variant {
    variant.import("counting", "select/counting.wgsl#rows")
}

/// The same that adds to what is there.
fn adding(variant: Variant) -> Variant {
    variant.constant("ADDS", 1)
}

fn typed(variant: Variant, head_dim: usize, queries: ElementType, keys: ElementType) -> Variant {
    variant.constant("HEAD_DIM", head_dim).import("rows", rows_file(keys)).import("queries", queries_file(queries))
}

/// Every variant that a plan uses.
pub(in crate::wgpu::select) fn variants() -> Vec<Variant> {
    let mut found = vec![Variant::new(&SHADERS, "sum_partials"), Variant::new(&SHADERS, "sum_counts")];
    for (i, head_dim) in HEAD_DIMS.into_iter().enumerate() {
        for (j, keys) in ElementType::ALL.into_iter().enumerate() {
            let queries = ElementType::ALL[(i + j) % 3];
            found.push(row_variant(head_dim, queries, keys));
            for (k, aggregation) in HeadAggregation::ALL.into_iter().enumerate() {
                let variant = column_variant(head_dim, aggregation, queries, keys);
                let variant = if (i + j + k) % 2 == 0 { counting(variant) } else { variant };
                if keys == ElementType::F32 {
                    found.push(adding(variant.clone()));
                }
                found.push(variant);
            }
        }
    }
    found
}
