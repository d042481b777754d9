// Slot `run_factors`: the factors of the sums of every row of `attend_run`, before more is added, and at the end.
//
// Every choice has
//   const SCORES: u32
//     vectors of the scores of all rows
//   fn keep_factor(row: u32, factor: f32)
//   fn kept_factor(row: u32) -> f32

// -------- own --------

// In workgroup memory of their own. Nothing follows the last row of scores.
//
// needs: ROWS, ROW_SCORES, SCORE_ROW
// gives: SCORES, factors, keep_factor, kept_factor

const SCORES: u32 = ROWS * SCORE_ROW - (SCORE_ROW - ROW_SCORES);

var<workgroup> factors: array<f32, ROWS>;

fn keep_factor(row: u32, factor: f32) {
    factors[row] = factor;
}

fn kept_factor(row: u32) -> f32 {
    return factors[row];
}

// -------- padded --------

// In the padding of scores, so that there is room for more.
//
// needs: ROWS, ROW_SCORES, SCORE_ROW, scores
// gives: SCORES, keep_factor, kept_factor

const SCORES: u32 = ROWS * SCORE_ROW;

fn keep_factor(row: u32, factor: f32) {
    scores[row * SCORE_ROW + ROW_SCORES].x = factor;
}

fn kept_factor(row: u32) -> f32 {
    return scores[row * SCORE_ROW + ROW_SCORES].x;
}
