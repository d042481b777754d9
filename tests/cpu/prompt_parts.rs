//! Parts of prompts on the CPU.

use kvpack::cache::{Appended, ModelCache, Recipe, TokenRun};
use kvpack::cpu::Cpu;
use kvpack::{Bits, SegmentFormat};

use any_backend::{model_steps, prompt_parts};

/// Queries see their part in f16, the step packs it, and an abandoned step leaves nothing.
#[test]
fn parts_are_seen_in_f16_and_packed_by_their_step() {
    prompt_parts::RECIPES.into_iter().for_each(|recipe| prompt_parts::check(&Cpu::new(), recipe, 1e-6));
}

/// Where appended tokens stay in f16, each part becomes a span: with ranges of its own, or of its tiles.
#[test]
fn parts_become_spans_where_appended_tokens_stay() {
    for recipe in prompt_parts::KEEPING {
        assert_eq!(model_steps::recipe(recipe).appended(), Appended::Keep, "{recipe}");
        prompt_parts::check(&Cpu::new(), recipe, 1e-6);
    }
    let of = [Recipe::calibquant(Bits::Two), Recipe::pack_all(SegmentFormat::saw_int4()).with_appended(Appended::Keep)];
    for recipe in of {
        let packed = recipe.packed().format.to_string();
        prompt_parts::check_recipe(&Cpu::new(), (&packed, &recipe), 1e-6);
    }
}

/// A part takes a range slot for what becomes a span, and none where all of it is of the sink.
#[test]
fn parts_of_a_sink_need_no_slot() {
    let of = model_steps::recipe("cocktail+sink=150");
    let cache = ModelCache::new(&Cpu::new(), &[(model_steps::shape(), of)], 1).unwrap();
    for (tokens, spans) in [(150, 0), (151, 1)] {
        let needed = cache.room_for_append(0, &[TokenRun::prompt(0, tokens)]).unwrap();
        assert_eq!(needed.iter().map(|room| room.spans).collect::<Vec<_>>(), [0, spans, 0], "{tokens} tokens");
    }
}
