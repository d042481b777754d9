//! Formats and recipes by how their codes get their ranges: what is drawn as one line.

/// How codes get their ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// Not packed.
    F16,
    /// One range per channel and span: CalibQuant.
    PerChannel,
    /// One range per token.
    PerToken,
    /// One range per token of rotated rows: SAW-INT4.
    Rotated,
    /// Levels of a Lloyd-Max codebook for rotated rows: TurboQuant.
    Codebook,
    /// The same with norms that make what is stored as long as the row.
    Renormalised,
    /// Keys with a sign sketch: TurboQuant for inner products, QJL.
    Sketch,
    /// Ranges of groups of tokens or channels: KIVI.
    Groups,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::F16,
        Self::PerChannel,
        Self::PerToken,
        Self::Rotated,
        Self::Codebook,
        Self::Renormalised,
        Self::Sketch,
        Self::Groups,
    ];

    /// The family in words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::PerChannel => "per channel",
            Self::PerToken => "per token",
            Self::Rotated => "rotated",
            Self::Codebook => "codebook",
            Self::Renormalised => "codebook, renormalised",
            Self::Sketch => "keys with a sketch",
            Self::Groups => "groups",
        }
    }
}

/// A format or recipe, taken apart by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Its family.
    pub family: Family,
    /// Bits of a code; the larger where keys and values differ.
    pub width: u32,
    /// True for what stands for its family at its width, and false for what is a variation of that: symmetric ranges,
    /// shrunk ones, recipes with options.
    pub plain: bool,
}

impl Named {
    /// A format under the name that `kvpack eval` or `kvpack bench` gives it.
    pub fn format(name: &str) -> Option<Self> {
        if name == "f16" {
            return Some(Self { family: Family::F16, width: 16, plain: true });
        }
        let has = |part: &str| name.contains(part);
        let family = match () {
            // Parts of sequences: `3/8 4-bit per channel`.
            () if has("/") => return None,
            () if has("sketch") => Family::Sketch,
            () if has("renormalised") => Family::Renormalised,
            () if has("codebook") => Family::Codebook,
            () if has("in groups of") || has("per channel and") || has("per token and") => Family::Groups,
            () if has("rotated") || has("Hadamard") => Family::Rotated,
            () if has("per channel") => Family::PerChannel,
            () if has("per token") => Family::PerToken,
            () => return None,
        };
        let widths = name.match_indices("-bit ").filter_map(|(at, _)| {
            let digits: Vec<&str> = name[..at].rsplit(|c: char| !c.is_ascii_digit()).take(1).collect();
            digits.first()?.parse::<u32>().ok()
        });
        let plain = !(has("symmetric")
            || has("shrunk")
            || has("keys rotated")
            || has("QJL")
            || has("and tile")
            || has("centred"));
        Some(Self { family, width: widths.max()?, plain })
    }

    /// A recipe in the grammar of `ModelRecipe`.
    pub fn recipe(text: &str) -> Option<Self> {
        let (method, options) = text.split_once('+').map_or((text, ""), |(method, options)| (method, options));
        let (name, width) = match method.split_once(':') {
            Some((name, width)) => (name, width.parse().ok()?),
            None => (method, 0),
        };
        let (family, width) = match name {
            "f16" => (Family::F16, 16),
            "calibquant" => (Family::PerChannel, width),
            "int8" | "int8-symmetric" => (Family::PerToken, 8),
            "int4" => (Family::PerToken, 4),
            "int8-symmetric-channel" => (Family::Groups, 8),
            "kivi" => (Family::Groups, width),
            "saw-int4" => (Family::Rotated, 4),
            "turboquant" => (Family::Codebook, width),
            "turboquant-renormalized" => (Family::Renormalised, width),
            "turboquant-prod" => (Family::Sketch, width),
            "qjl" => (Family::Sketch, 4),
            _ => return None,
        };
        let plain = options.is_empty() && !name.contains("symmetric") && name != "qjl";
        Some(Self { family, width, plain })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        for (name, family, width, plain) in [
            ("f16", Family::F16, 16, true),
            ("4-bit per channel", Family::PerChannel, 4, true),
            ("1-bit per channel, shrunk", Family::PerChannel, 1, false),
            ("8-bit per channel and tile, symmetric", Family::Groups, 8, false),
            ("K 1-bit per channel, ranges × 0.5, V 1-bit per channel, ranges × 0.3", Family::PerChannel, 1, true),
            ("8-bit per token, symmetric", Family::PerToken, 8, false),
            ("4-bit per token, keys rotated by 16", Family::Rotated, 4, false),
            ("K 4-bit per token, Hadamard 16, V 4-bit per token", Family::Rotated, 4, true),
            ("3-bit codebook (TurboQuant)", Family::Codebook, 3, true),
            ("4-bit per token, centred", Family::PerToken, 4, false),
            ("1-bit codebook, renormalised", Family::Renormalised, 1, true),
            ("K 3-bit codebook and 1-bit sketch, randomised Hadamard 64, V 4-bit codebook", Family::Sketch, 4, true),
            ("K 1-bit sketch (QJL), V 4-bit per token", Family::Sketch, 4, false),
            ("2-bit in groups of 32", Family::Groups, 2, true),
            ("K 4-bit per channel and 32 tokens, V 4-bit per token and 32 channels", Family::Groups, 4, true),
        ] {
            assert_eq!(Named::format(name), Some(Named { family, width, plain }), "{name}");
        }
        assert_eq!(Named::format("3/8 4-bit per channel"), None);
    }

    #[test]
    fn recipes_are_taken_apart() {
        for (text, family, width, plain) in [
            ("calibquant:2+sink=128", Family::PerChannel, 2, false),
            ("kivi:4", Family::Groups, 4, true),
            ("int8-symmetric", Family::PerToken, 8, false),
            ("qjl", Family::Sketch, 4, false),
        ] {
            assert_eq!(Named::recipe(text), Some(Named { family, width, plain }), "{text}");
        }
        assert_eq!(Named::recipe("kiwi:4"), None);
    }
}
