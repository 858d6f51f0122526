//! Writing JSON: what the readers of columns and of CSV hand to the one parser of rows.

use crate::row_error::RowError;

const LOW: u64 = 0x0101_0101_0101_0101;
const HIGH: u64 = 0x8080_8080_8080_8080;

/// A JSON string with its quotes.
pub(super) fn string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    escaped(text.as_bytes(), out);
    out.push(b'"');
}

/// What stands between the quotes. Bytes that are not UTF-8 pass, for the parser to refuse with their place.
pub(super) fn escaped(bytes: &[u8], out: &mut Vec<u8>) {
    out.reserve(bytes.len() + 2);
    let (mut done, mut at) = (0, 0);
    while at < bytes.len() {
        // Eight at a time while none of them is a quote, a backslash or below 0x20. Exact up to the first hit.
        if let Some(eight) = bytes[at..].first_chunk::<8>() {
            let word = u64::from_le_bytes(*eight);
            let zero = |w: u64| w.wrapping_sub(LOW) & !w & HIGH;
            let hits = zero(word ^ (LOW * b'"' as u64))
                | zero(word ^ (LOW * b'\\' as u64))
                | (word.wrapping_sub(LOW * 0x20) & !word & HIGH);
            if hits == 0 {
                at += 8;
                continue;
            }
            at += (hits.trailing_zeros() / 8) as usize;
        }
        let byte = bytes[at];
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            at += 1;
            continue;
        }
        out.extend_from_slice(&bytes[done..at]);
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            _ => {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                out.extend_from_slice(b"\\u00");
                out.push(HEX[usize::from(byte >> 4)]);
                out.push(HEX[usize::from(byte & 15)]);
            }
        }
        at += 1;
        done = at;
    }
    out.extend_from_slice(&bytes[done..]);
}

/// A row that a reader itself refuses travels among the others as bytes that no JSON begins with.
const REFUSED: u8 = 0;

/// The bytes of a refused row.
pub(super) fn refuse(error: &RowError, out: &mut Vec<u8>) {
    out.push(REFUSED);
    for part in [&error.field, &error.problem, &error.wanted] {
        out.extend_from_slice(part.replace('\0', "\u{fffd}").as_bytes());
        out.push(REFUSED);
    }
}

/// Why a reader refused this row, if it did.
pub fn refusal(row: &[u8]) -> Option<RowError> {
    let text = std::str::from_utf8(row.strip_prefix(&[REFUSED])?).ok()?;
    let mut parts = text.split('\0');
    let (field, problem, wanted) = (parts.next()?, parts.next()?, parts.next()?);
    Some(RowError::bad(field, problem, wanted).remedy(crate::example::SKIP_HINT))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_string_is_what_serde_json_reads_back(text in "(?s:.{0,40})", more in "[\\x00-\\x7f]{0,40}") {
            let text = text + &more;
            let mut out = Vec::new();
            string(&text, &mut out);
            prop_assert_eq!(serde_json::from_slice::<String>(&out).ok(), Some(text));
        }

        #[test]
        fn a_refused_row_says_why(field in ".*", problem in ".*") {
            let error = RowError::bad(field.replace('\0', ""), problem.replace('\0', ""), "a number")
                .remedy(crate::example::SKIP_HINT);
            let mut out = Vec::new();
            refuse(&error, &mut out);
            prop_assert_eq!(refusal(&out), Some(error));
            prop_assert_eq!(refusal(b"{}"), None);
        }
    }
}
