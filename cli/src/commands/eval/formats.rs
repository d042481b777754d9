//! The formats that are evaluated.

use anyhow::{Result, bail};
use kvpack::format::{AffineFormat, AttentionShape, Bits, Grouping, Rotation, SegmentFormat, TensorFormat};
use kvpack_report::recipes;

/// A format under the name by which it is known.
pub struct NamedFormat {
    /// Short name.
    pub name: String,
    /// The format.
    pub format: SegmentFormat,
    /// Whether keys are stored minus the mean of the first of them.
    pub centred: bool,
    /// The recipe that packs so, where one does.
    pub recipe: Option<String>,
}

impl NamedFormat {
    /// A format under its name, with its recipe.
    fn new(name: String, format: SegmentFormat, centred: bool, shape: &AttentionShape) -> Self {
        let recipe = recipes::of_format(&format, shape);
        let recipe = recipe.map(|recipe| if centred { format!("{recipe}+centre") } else { recipe });
        Self { name, format, centred, recipe }
    }

    /// True if it has that recipe, or a name that contains the text.
    fn is_meant_by(&self, text: &str) -> bool {
        self.recipe.as_deref() == Some(text) || self.name.contains(text)
    }

    /// True if calibrating the scores can make sense: keys or values are packed.
    pub fn is_packed(&self) -> bool {
        self.format != SegmentFormat::F16
    }
}

/// f16 and the formats that `text` means, by their recipe or by a part of their name; all formats where there is none.
///
/// # Errors
/// When no name contains it; the message lists the names.
pub fn matching(shape: &AttentionShape, text: Option<&str>) -> Result<Vec<NamedFormat>> {
    let Some(text) = text else { return Ok(all(shape)) };
    let text = text.replace("+center", "+centre");
    // A recipe is itself, and not every format whose name happens to contain it.
    let is_recipe = all(shape).iter().any(|named| named.recipe.as_ref() == Some(&text));
    let meant = |named: &NamedFormat| match is_recipe {
        true => named.recipe.as_ref() == Some(&text),
        false => named.is_meant_by(&text),
    };
    let (fitting, others): (Vec<_>, Vec<_>) =
        all(shape).into_iter().partition(|named| !named.is_packed() || meant(named));
    if fitting.len() == 1 && !meant(&fitting[0]) {
        let names: Vec<String> = others.into_iter().map(|named| named.name).collect();
        bail!(
            "--format '{text}' is no recipe{} and part of no format's name; the formats are f16; {}",
            recipes::reason(&text),
            names.join("; ")
        );
    }
    Ok(fitting)
}

/// f16, then one range per channel (CalibQuant), per token, per token of rotated rows (SAW-INT4), and per group (KIVI),
/// each from wide to narrow.
fn all(shape: &AttentionShape) -> Vec<NamedFormat> {
    let named = |name: String, format| NamedFormat::new(name, format, false, shape);
    let mut formats = vec![named("f16".into(), SegmentFormat::F16)];
    for bits in Bits::ALL.into_iter().rev() {
        formats.push(named(format!("{bits}-bit per channel"), SegmentFormat::per_channel(bits)));
    }
    formats.push(named("1-bit per channel, shrunk".into(), SegmentFormat::calibquant(Bits::One)));
    for bits in [Bits::Eight, Bits::Four, Bits::Three, Bits::Two] {
        let token = TensorFormat::Affine(AffineFormat::new(bits, Grouping::Token));
        formats.push(named(format!("{bits}-bit per token"), SegmentFormat { key: token, value: token }));
    }
    for (name, grouping) in [("per channel and tile", Grouping::ChannelTokens(128)), ("per token", Grouping::Token)] {
        let symmetric = TensorFormat::Affine(AffineFormat::new(Bits::Eight, grouping).symmetric());
        formats.push(named(format!("8-bit {name}, symmetric"), SegmentFormat { key: symmetric, value: symmetric }));
    }
    // SAW-INT4, and its rotation at other widths, orders and of values too.
    formats.push(named("4-bit per token, keys rotated by 16".into(), SegmentFormat::saw_int4()));
    let largest = Rotation::largest_order(shape.head_dim());
    for bits in [Bits::Eight, Bits::Four, Bits::Three, Bits::Two] {
        let token = AffineFormat::new(bits, Grouping::Token).rotated(Rotation::hadamard(largest));
        let token = TensorFormat::Affine(token);
        let name = format!("{bits}-bit per token, rotated by {largest}");
        formats.push(named(name, SegmentFormat { key: token, value: token }));
    }
    for bits in [Bits::Four, Bits::Three, Bits::Two, Bits::One] {
        let format = SegmentFormat::turboquant(bits, shape.head_dim());
        formats.push(named(format!("{bits}-bit codebook (TurboQuant)"), format));
    }
    for bits in [Bits::Four, Bits::Three, Bits::Two, Bits::One] {
        let format = SegmentFormat::turboquant_renormalized(bits, shape.head_dim());
        formats.push(named(format!("{bits}-bit codebook, renormalised"), format));
    }
    for bits in [Bits::Four, Bits::Three, Bits::Two] {
        let format = SegmentFormat::turboquant_prod(bits, shape.head_dim());
        formats.push(named(format!("{bits}-bit codebook, keys with sketch (TurboQuant-prod)"), format));
    }
    formats.push(named("K 1-bit sketch (QJL), V 4-bit per token".into(), SegmentFormat::qjl(shape.head_dim())));
    // 32 channels to a group, as KIVI has them, or 16 where 32 do not divide the head.
    let channels = if shape.head_dim().is_multiple_of(32) { 32 } else { 16 };
    for bits in [Bits::Four, Bits::Two] {
        let format = SegmentFormat {
            key: TensorFormat::Affine(AffineFormat::new(bits, Grouping::ChannelTokens(32))),
            value: TensorFormat::Affine(AffineFormat::new(bits, Grouping::TokenChannels(channels))),
        };
        formats.push(named(format!("{bits}-bit in groups of 32"), format));
    }
    with_centred(formats, shape)
}

/// Formats that are evaluated with a centre too: one of every family that takes one, at the widths where it is used.
const CENTRED: [&str; 7] = [
    "8-bit per token",
    "4-bit per token",
    "4-bit per token, keys rotated by 16",
    "4-bit codebook, renormalised",
    "3-bit codebook, renormalised",
    "2-bit codebook, renormalised",
    "K 1-bit sketch (QJL), V 4-bit per token",
];

/// The formats, each of [`CENTRED`] followed by itself with a centre.
fn with_centred(formats: Vec<NamedFormat>, shape: &AttentionShape) -> Vec<NamedFormat> {
    let both = |plain: NamedFormat| {
        let name = format!("{}, centred", plain.name);
        let centred = CENTRED.contains(&plain.name.as_str());
        let centred = centred.then(|| NamedFormat::new(name, plain.format, true, shape));
        std::iter::once(plain).chain(centred)
    };
    formats.into_iter().flat_map(both).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_are_formats() {
        let shape = AttentionShape::new(9, 3, 64).unwrap();
        for recipe in ["kivi:4", "saw-int4", "calibquant:1", "int4+centre", "turboquant:3"] {
            let formats = matching(&shape, Some(recipe)).unwrap();
            assert_eq!(formats.len(), 2, "{recipe}");
            assert_eq!(formats[1].recipe.as_deref(), Some(recipe));
        }
        assert!(matching(&shape, Some("4-bit")).unwrap().len() > 5);
        let error = matching(&shape, Some("saw-in4")).err().unwrap().to_string();
        assert!(error.contains("did you mean saw-int4?"), "{error}");
    }

    #[test]
    fn centred_formats_are_those_that_gain() {
        let formats = all(&AttentionShape::new(12, 2, 128).unwrap());
        let centred: Vec<&NamedFormat> = formats.iter().filter(|named| named.centred).collect();
        assert_eq!(centred.len(), CENTRED.len());
        assert!(centred.iter().all(|named| named.format.key.takes_centre() && named.name.ends_with(", centred")));
    }
}
