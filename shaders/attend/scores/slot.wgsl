// Slot `scores`: scores of the keys of a tile for the query heads of a workgroup.
//
// Every choice has
//   fn load_query(item: WorkItem, y: u32, invocation: u32)
//     called first, by all invocations: keeps the queries; a barrier follows
//   fn score_tile(item: WorkItem, tile: u32, lane: u32)
//     leaves the scores of the lane's tokens of a tile of the item in `token_scores`, in units of log2; tokens beyond the item's
//     too, which are overwritten
//
// gives: key_pages, begin_keys, prepare_keys, prepare_keys_late

// Number of pages of the bound keys. No limit if none are bound.
fn key_pages() -> u32 {
    return 0xffffffffu;
}

// Called after that barrier. Prepares the keys of the first step.
fn begin_keys(tiles: u32, team: u32, lane: u32) {}

// Called before the second barrier of a step. Prepares those of the next step, whose first tile is `first`.
fn prepare_keys(first: u32, tiles: u32, team: u32, lane: u32) {}

// Called once the values of a step are added, when no barrier follows. Also prepares those of the next step.
fn prepare_keys_late(first: u32, tiles: u32, team: u32, lane: u32) {}
