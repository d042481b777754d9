//! `kvpack check --matrix`: which formats a backend serves, and by which arithmetic.

use anyhow::Result;
use kvpack::conformance::{self, Support};
use kvpack::{AttentionShape, Backend};

use crate::outcome::Outcome;
use crate::print::{self, say};

/// Query heads per KV head of the columns of the matrix.
const GROUPS: [usize; 3] = [1, 4, 8];

/// Prints the matrix.
pub fn print_matrix<B: Backend>(backend: &B) -> Result<Outcome> {
    say!("{}: keys and values of head dimension 128 are multiplied as", backend.name())?;
    let of_groups = GROUPS.map(|group| {
        let shape = AttentionShape::new(group, 1, 128)?;
        conformance::support(backend, &shape)
    });
    let of_groups = of_groups.into_iter().collect::<kvpack::Result<Vec<Vec<Support>>>>()?;
    let columns = GROUPS.map(|group| format!("{group} query head{} per KV head", if group == 1 { "" } else { "s" }));
    let headers: Vec<&str> =
        ["format", "single tokens"].into_iter().chain(columns.iter().map(String::as_str)).collect();
    let mut table = print::results(&headers, headers.len());
    for (index, row) in of_groups[0].iter().enumerate() {
        let tokens = if row.single_tokens { "packed" } else { "in f16 first" };
        let mut cells = vec![row.format.to_string(), tokens.into()];
        cells.extend(of_groups.iter().map(|rows| cell(&rows[index])));
        table.add_row(cells);
    }
    say!("{table}")?;
    say!(
        "Two kinds of arithmetic: keys, then values. Tensors of f32, f16 and bf16 are taken. An 8-bit query (q8) is an option \
         of the call. Contexts are long, and scores not calibrated."
    )?;
    Ok(Outcome::Passed)
}

/// The arithmetic with a 16-bit query, and with one of 8 bits where that is another.
fn cell(row: &Support) -> String {
    match &row.arithmetic {
        [Ok(of_16), Ok(of_8)] if of_16 == of_8 => of_16.to_string(),
        [Ok(of_16), Ok(of_8)] => format!("{of_16}; q8: {of_8}"),
        [Err(reason), _] | [_, Err(reason)] => format!("not served: {reason}"),
    }
}
