//! NFC and NFKC, only where a text needs it, with the places that each byte comes from.
//!
//! The tables are those of the crate that `tokenizers` 0.23 normalises with (Unicode 9), in either version of the
//! split tables.

use std::sync::OnceLock;

use tokenizers::tokenizer::NormalizedString;
use tokenizers::tokenizer::normalizer::Range;
use unicode_normalization_alignments::char::canonical_combining_class;
use unicode_normalization_alignments::{IsNormalized, is_nfc_quick, is_nfkc_quick};

use super::model::Form;
use super::unicode::decode;

/// The largest code point that normalisation may touch lies below.
const TOP: usize = 0x3_0000;

/// Code points that neither change nor join what stands before them: text may be cut there.
struct Firm(Vec<u64>);

impl Firm {
    fn of(form: Form) -> &'static Firm {
        static TABLES: [OnceLock<Firm>; 2] = [const { OnceLock::new() }; 2];
        TABLES[usize::from(form == Form::Nfkc)].get_or_init(|| {
            let mut bits = vec![0u64; TOP / 64];
            for code in 0..TOP {
                let Some(character) = char::from_u32(code as u32) else { continue };
                let quick = match form {
                    Form::Nfkc => is_nfkc_quick(std::iter::once(character)),
                    _ => is_nfc_quick(std::iter::once(character)),
                };
                let firm = quick == IsNormalized::Yes && canonical_combining_class(character) == 0;
                bits[code / 64] |= u64::from(firm) << (code % 64);
            }
            Firm(bits)
        })
    }

    #[inline(always)]
    fn has(&self, code: u32) -> bool {
        let code = code as usize;
        code >= TOP || self.0[code / 64] >> (code % 64) & 1 == 1
    }
}

/// A normalised text and, for each of its bytes, the range of the original that it comes from.
#[derive(Default)]
pub struct Normal {
    /// The text.
    pub text: String,
    /// For each byte.
    pub from: Vec<(u32, u32)>,
}

/// Brings a text to a form; none where it is in that form. Linear.
pub fn normalise(text: &str, form: Form) -> Option<Normal> {
    if form == Form::None || text.is_ascii() {
        return None;
    }
    let (firm, bytes) = (Firm::of(form), text.as_bytes());
    let mut made: Option<Normal> = None;
    let (mut at, mut copied, mut start) = (0, 0, 0);
    while at < bytes.len() {
        if bytes[at] < 0x80 {
            start = at;
            at += 1;
            continue;
        }
        let (code, length) = decode(bytes, at);
        if firm.has(code) {
            start = at;
            at += length;
            continue;
        }
        // From the last firm character to the next one.
        let mut end = at + length;
        while end < bytes.len() {
            let (code, length) = decode(bytes, end);
            if firm.has(code) {
                break;
            }
            end += length;
        }
        let part = &text[start..end];
        if !is_quick(part, form) {
            let mut normal = NormalizedString::from(part);
            match form {
                Form::Nfkc => normal.nfkc(),
                _ => normal.nfc(),
            };
            if normal.get() != part {
                let made = made.get_or_insert_default();
                keep(made, text, copied, start);
                for (index, _) in normal.get().char_indices() {
                    let range = normal.convert_offsets(Range::Normalized(index..index + 1)).unwrap_or(0..0);
                    let length = normal.get()[index..].chars().next().map_or(0, char::len_utf8);
                    let range = ((start + range.start) as u32, (start + range.end) as u32);
                    made.from.extend(std::iter::repeat_n(range, length));
                }
                made.text.push_str(normal.get());
                copied = end;
            }
        }
        start = end;
        at = end;
    }
    let mut made = made?;
    keep(&mut made, text, copied, text.len());
    Some(made)
}

fn is_quick(part: &str, form: Form) -> bool {
    let quick = match form {
        Form::Nfkc => is_nfkc_quick(part.chars()),
        _ => is_nfc_quick(part.chars()),
    };
    quick == IsNormalized::Yes
}

fn keep(made: &mut Normal, text: &str, start: usize, end: usize) {
    made.text.push_str(&text[start..end]);
    for (at, character) in text[start..end].char_indices() {
        let range = ((start + at) as u32, (start + at + character.len_utf8()) as u32);
        made.from.extend(std::iter::repeat_n(range, character.len_utf8()));
    }
}
