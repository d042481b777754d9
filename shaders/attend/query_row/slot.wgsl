// Slot `query_row`: the storage of a prepared query.
//
// Every choice has
//   fn write_row(row: u32, field: u32, scaled: vec4<f32>, totals: vec4<f32>)
//     four channels of a row; `totals` are the largest magnitude, the bias and Σ q of the row
