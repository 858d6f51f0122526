//! Classes of code points, in two versions of Unicode.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// What split patterns tell apart. Values are those of tables/generate.py.
pub mod class {
    /// Controls, formats, unassigned.
    pub const OTHER: u8 = 0;
    /// `Lu`, `Lt`.
    pub const UPPER: u8 = 1;
    /// `Ll`.
    pub const LOWER: u8 = 2;
    /// `Lm`, `Lo`: letters that patterns take for either case.
    pub const CASELESS: u8 = 3;
    /// `M`.
    pub const MARK: u8 = 4;
    /// `N`.
    pub const NUMBER: u8 = 5;
    /// `White_Space`.
    pub const SPACE: u8 = 6;
    /// `P`.
    pub const PUNCTUATION: u8 = 7;
    /// `S`.
    pub const SYMBOL: u8 = 8;
}

/// A version of the Unicode tables. The `tokenizers` crate has 16 up to 0.23 and 17 from 1.0 on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "u32", into = "u32")]
pub enum Version {
    /// Unicode 16.
    #[default]
    V16,
    /// Unicode 17.
    V17,
}

impl Version {
    /// As it is written in prepared sets.
    pub fn name(self) -> &'static str {
        match self {
            Version::V16 => "16.0.0",
            Version::V17 => "17.0.0",
        }
    }
}

impl TryFrom<u32> for Version {
    type Error = String;
    fn try_from(number: u32) -> Result<Version, String> {
        match number {
            16 => Ok(Version::V16),
            17 => Ok(Version::V17),
            other => Err(format!("there are Unicode tables 16 and 17, and not {other}")),
        }
    }
}

impl From<Version> for u32 {
    fn from(version: Version) -> u32 {
        match version {
            Version::V16 => 16,
            Version::V17 => 17,
        }
    }
}

/// The class of every code point.
pub struct Classes(Box<[u8]>);

impl Classes {
    /// The table of a version, built on first use (1.1 MB).
    pub fn of(version: Version) -> &'static Classes {
        static TABLES: [OnceLock<Classes>; 2] = [const { OnceLock::new() }; 2];
        let (slot, runs): (_, &[u8]) = match version {
            Version::V16 => (&TABLES[0], include_bytes!("../../tables/unicode16.bin")),
            Version::V17 => (&TABLES[1], include_bytes!("../../tables/unicode17.bin")),
        };
        slot.get_or_init(|| Classes::read(runs))
    }

    /// The same for a pattern behind `Digits`, which asks Rust's own tables, and so does the library: what is numeric
    /// there is a number here.
    pub fn behind_digits(version: Version) -> &'static Classes {
        static TABLES: [OnceLock<Classes>; 2] = [const { OnceLock::new() }; 2];
        TABLES[usize::from(version == Version::V17)].get_or_init(|| {
            let mut table = Classes::of(version).0.clone();
            for (code, class) in (0u32..).zip(&mut table) {
                if char::from_u32(code).is_some_and(char::is_numeric) {
                    *class = class::NUMBER;
                }
            }
            Classes(table)
        })
    }

    fn read(runs: &[u8]) -> Classes {
        let runs: Vec<(usize, u8)> = runs
            .as_chunks::<4>()
            .0
            .iter()
            .map(|run| u32::from_le_bytes(*run))
            .map(|run| ((run >> 8) as usize, run as u8))
            .collect();
        let mut table = vec![0; 0x11_0000].into_boxed_slice();
        for (index, (start, class)) in runs.iter().enumerate() {
            let end = runs.get(index + 1).map_or(table.len(), |(next, _)| *next);
            table[*start..end].fill(*class);
        }
        Classes(table)
    }

    /// The class of a code point.
    #[inline(always)]
    pub fn get(&self, code: u32) -> u8 {
        self.0.get(code as usize).copied().unwrap_or(class::OTHER)
    }
}

/// The character at a byte position of UTF-8, and its length.
///
/// # Panics
/// Where `at` is not the start of a whole character.
#[inline(always)]
pub fn decode(text: &[u8], at: usize) -> (u32, usize) {
    let first = u32::from(text[at]);
    let next = |index: usize| u32::from(text[at + index]) & 63;
    match first {
        0..0x80 => (first, 1),
        0x80..0xe0 => ((first & 31) << 6 | next(1), 2),
        0xe0..0xf0 => ((first & 15) << 12 | next(1) << 6 | next(2), 3),
        _ => ((first & 7) << 18 | next(1) << 12 | next(2) << 6 | next(3), 4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_hold_known_characters_of_either_version() {
        for version in [Version::V16, Version::V17] {
            let classes = Classes::of(version);
            let wanted = [
                ('A', class::UPPER),
                ('z', class::LOWER),
                ('漢', class::CASELESS),
                ('\u{301}', class::MARK),
                ('½', class::NUMBER),
                ('\u{85}', class::SPACE),
                ('\u{3000}', class::SPACE),
                ('_', class::PUNCTUATION),
                ('+', class::SYMBOL),
                ('\u{200b}', class::OTHER),
            ];
            for (character, class) in wanted {
                assert_eq!(classes.get(character as u32), class, "{character:?}");
            }
        }
        // Tolong Siki letters came with Unicode 17.
        assert_eq!(Classes::of(Version::V16).get(0x11db0), class::OTHER);
        assert_eq!(Classes::of(Version::V17).get(0x11db0), class::CASELESS);
    }
}
