// Slot `logits`: what becomes of a tile's scores before the softmax. By default they are its logits.
//
// needs: WorkItem
// gives: finish_scores

fn finish_scores(item: WorkItem, tile: u32, lane: u32) {}
