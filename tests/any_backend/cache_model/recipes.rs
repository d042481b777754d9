//! The recipes that caches are tested with.

use kvpack::backend::QueryPrecision;
use kvpack::cache::{Appended, Recipe, StoreId};
use kvpack::format::{AffineFormat, CodebookFormat, Grouping, NormRule, Rotation, TensorFormat};
use kvpack::{Bits, Calibration, SegmentFormat};

/// Recipes that differ in where ranges live and in what happens to windows. Queries have 16 bits, whatever formats get
/// by default: the model is exact.
pub fn recipes() -> Vec<Recipe> {
    let affine = |bits, grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping));
    let kivi = SegmentFormat {
        key: affine(Bits::Two, Grouping::ChannelTokens(32)),
        value: affine(Bits::Two, Grouping::TokenChannels(16)),
    };
    let mixed =
        SegmentFormat { key: affine(Bits::Four, Grouping::Channel), value: affine(Bits::Eight, Grouping::Token) };
    let recipes = vec![
        Recipe::f16(),
        Recipe::calibquant(Bits::One),
        Recipe::calibquant(Bits::Two).with_calibration(Calibration::new(1.0, 2.0).unwrap()),
        Recipe::pack_all(SegmentFormat::per_channel(Bits::Four)),
        Recipe::pack_all(kivi),
        Recipe::pack_all(kivi).with_window(130).with_sink(100),
        Recipe::pack_all(SegmentFormat::per_channel(Bits::Two)).with_window(128).with_sink(1),
        Recipe::pack_all(mixed),
        Recipe::pack_all(SegmentFormat::saw_int4()),
        Recipe::pack_all(SegmentFormat::saw_int4()).with_sink(70),
        Recipe::pack_all(SegmentFormat::saw_int4()).with_window(0),
        Recipe::pack_all(SegmentFormat {
            key: TensorFormat::Codebook(CodebookFormat {
                bits: Bits::Four,
                rotation: Rotation::randomized(16, 2),
                sketch: None,
                norms: NormRule::Row,
            }),
            value: TensorFormat::Codebook(CodebookFormat {
                bits: Bits::One,
                rotation: Rotation::hadamard(8),
                sketch: None,
                norms: NormRule::Renormalized,
            }),
        }),
        // Rotations of order 16 serve every head dimension of the tests.
        Recipe::pack_all(SegmentFormat::turboquant_prod(Bits::Three, 80)),
        Recipe::pack_all(SegmentFormat::qjl(80)).with_window(0),
        Recipe::pack_all(SegmentFormat { key: affine(Bits::One, Grouping::Token), ..kivi }),
        Recipe::pack_all(SegmentFormat {
            key: TensorFormat::Affine(AffineFormat::new(Bits::Eight, Grouping::Token).symmetric()),
            value: affine(Bits::Eight, Grouping::Token),
        }),
        Recipe::pack_all(SegmentFormat::F16),
        // Three and four stores.
        with_stores(Recipe::f16(), &[SegmentFormat::saw_int4(), SegmentFormat::calibquant(Bits::Two)]),
        with_stores(Recipe::pack_all(SegmentFormat::saw_int4()).with_sink(30), &[mixed, kivi]),
        with_stores(Recipe::pack_all(kivi).with_window(100), &[SegmentFormat::calibquant(Bits::One), mixed]),
        // Tokens go to another store than the first packed one.
        with_stores(Recipe::calibquant(Bits::Four), &[SegmentFormat::saw_int4()])
            .with_appended(Appended::AtOnce(StoreId(2))),
        with_stores(Recipe::pack_all(SegmentFormat::saw_int4()), &[kivi])
            .with_appended(Appended::Tiles { to: StoreId(2), newer: 5 }),
    ];
    recipes.into_iter().chain(centred_recipes()).map(|recipe| recipe.with_query(QueryPrecision::Int16)).collect()
}

/// Recipes that store keys less a centre: every family of formats, tokens that are packed at once, behind a window or
/// never, and several stores.
fn centred_recipes() -> Vec<Recipe> {
    let groups = TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::TokenChannels(16)));
    let per_channel = TensorFormat::Affine(AffineFormat::new(Bits::Two, Grouping::ChannelTokens(32)));
    let recipes = [
        Recipe::f16(),
        Recipe::pack_all(SegmentFormat::saw_int4()).with_sink(30),
        Recipe::pack_all(SegmentFormat { key: groups, value: per_channel }).with_window(100),
        with_stores(Recipe::pack_all(SegmentFormat::turboquant_prod(Bits::Three, 80)), &[SegmentFormat::saw_int4()]),
        Recipe::pack_all(SegmentFormat::qjl(80)).with_window(0),
    ];
    recipes.into_iter().map(Recipe::with_centre).collect()
}

/// A recipe with more stores.
fn with_stores(recipe: Recipe, formats: &[SegmentFormat]) -> Recipe {
    formats.iter().fold(recipe, |recipe, format| recipe.with_store(*format).unwrap().0)
}
