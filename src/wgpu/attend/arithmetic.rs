//! The arithmetic with which a segment is attended to.

use super::attend::Fused;
use super::recipe::{AttendRecipe, Scores, Sums};
use super::specialisation::{ItemScoring, Specialisation};
use crate::backend::{Arithmetic, AttendArithmetic, QueryBytes};
use crate::format::{AttentionShape, SegmentFormat};
use crate::plan::ElementType;
use crate::wgpu::device::Capabilities;

/// The arithmetic of a segment that is not calibrated and has more tiles than one workgroup merges.
pub(in crate::wgpu) fn arithmetic(
    shape: &AttentionShape,
    format: &SegmentFormat,
    query: QueryBytes,
    capabilities: &Capabilities,
) -> AttendArithmetic {
    let special = Specialisation {
        shape,
        format,
        query,
        capabilities,
        may_use_matrices: true,
        scoring: ItemScoring::plain(shape),
        queries: 1,
    };
    let queries = special.prepares_own_query().then_some(ElementType::F32);
    match special.attend(Fused { queries, output: None }) {
        AttendRecipe::Matrix { .. } | AttendRecipe::Run { .. } => {
            AttendArithmetic { keys: Arithmetic::HalfMatrices, values: Arithmetic::HalfMatrices }
        }
        AttendRecipe::Attend { scores, values, .. } => {
            AttendArithmetic { keys: of_keys(&scores), values: of_values(&values.sums) }
        }
        // The two halves of a calibrated segment, which never come from `attend`.
        AttendRecipe::Scores { .. } | AttendRecipe::WeightedValues { .. } => AttendArithmetic::FLOATS,
    }
}

const fn of_keys(scores: &Scores) -> Arithmetic {
    match scores {
        Scores::Fma { .. } => Arithmetic::Floats,
        Scores::Dot { .. } | Scores::Groups { .. } | Scores::Sketch { .. } => Arithmetic::Integers,
    }
}

const fn of_values(sums: &Sums) -> Arithmetic {
    match sums {
        Sums::Fma { .. } => Arithmetic::Floats,
        Sums::Dot { .. } | Sums::Byte { .. } => Arithmetic::Integers,
    }
}
