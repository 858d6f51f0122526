//! Where a piece falls into parts that merges never join.
//!
//! Two characters that no token holds side by side, whole or in part, are never in one token: every token that merging
//! makes on its way is one that merges reach. So what stands before them and what stands behind them can be looked up or
//! merged alone. Most neighbours in Chinese and Japanese text are such, and the parts are then words of the vocabulary.

use super::unicode::decode;

/// The bits of a hashed set.
const BITS: u32 = 20;

/// Pairs of neighbours that some token holds. Says "joined" too often, never too seldom.
pub struct Borders {
    /// Pairs of characters, of a character and a first byte, of a last byte and a character; hashed.
    pairs: Vec<u64>,
    /// By last byte and first byte: both characters are held in part.
    bytes: Vec<[u64; 4]>,
}

/// Marks a byte in place of a character.
const BYTE: u32 = 1 << 24;

impl Borders {
    /// Of the texts of all tokens that merges reach; none where tokens join too much for this to help.
    pub fn new<'a>(texts: impl Iterator<Item = &'a [u8]>) -> Option<Borders> {
        let mut borders = Borders { pairs: vec![0; 1 << (BITS - 6)], bytes: vec![[0; 4]; 64] };
        for text in texts.filter(|text| !text.is_ascii()) {
            for at in (1..text.len()).filter(|at| !is_inner(text[*at])) {
                let start = (0..at).rev().find(|start| !is_inner(text[*start]));
                let left = start.and_then(|start| character(&text[start..at]).filter(|(_, rest)| *rest == 0));
                // Without a first byte the left character is held in part.
                let left = match (left, start) {
                    (Some((code, _)), _) => code,
                    (None, None) => BYTE | u32::from(text[at - 1]),
                    (None, Some(_)) => continue,
                };
                borders.add(left, &text[at..]);
            }
        }
        let held: u32 = borders.pairs.iter().map(|word| word.count_ones()).sum();
        (held < 1 << (BITS - 2)).then_some(borders)
    }

    fn add(&mut self, left: u32, rest: &[u8]) {
        let first = rest[0];
        match character(rest) {
            Some((code, _)) => self.set(left, code),
            None if left >= BYTE => {
                self.bytes[left as usize & 63][usize::from(first >> 6)] |= 1 << (first & 63);
            }
            // All characters that begin so.
            None if (0xe0..0xf0).contains(&first) && rest.len() == 2 && is_inner(rest[1]) => {
                let code = u32::from(first & 15) << 12 | u32::from(rest[1] & 63) << 6;
                (code..code + 64).for_each(|code| self.set(left, code));
            }
            None => self.set(left, BYTE | u32::from(first)),
        }
    }

    #[inline(always)]
    fn place(left: u32, right: u32) -> (usize, u32) {
        let key = u64::from(left) << 32 | u64::from(right);
        let bit = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - BITS)) as usize;
        (bit >> 6, bit as u32 & 63)
    }

    fn set(&mut self, left: u32, right: u32) {
        let (word, bit) = Borders::place(left, right);
        self.pairs[word] |= 1 << bit;
    }

    #[inline(always)]
    fn has(&self, left: u32, right: u32) -> u64 {
        let (word, bit) = Borders::place(left, right);
        self.pairs[word] >> bit & 1
    }

    /// Gives the ends of the parts of a piece of whole characters, the last of which is its own.
    #[inline(always)]
    pub fn cut(&self, piece: &[u8], mut each: impl FnMut(usize)) {
        let (mut left, mut at) = decode(piece, 0);
        while at < piece.len() {
            let (right, length) = decode(piece, at);
            if (left | right) >= 0x80 {
                let (last, first) = (piece[at - 1], piece[at]);
                let joined = self.has(left, right)
                    | self.has(left, BYTE | u32::from(first))
                    | self.has(BYTE | u32::from(last), right)
                    | self.bytes[usize::from(last & 63)][usize::from(first >> 6)] >> (first & 63) & 1;
                if joined == 0 {
                    each(at);
                }
            }
            (left, at) = (right, at + length);
        }
        each(at);
    }
}

fn is_inner(byte: u8) -> bool {
    (0x80..0xc0).contains(&byte)
}

/// The character that bytes start with, and how many are left; none where it is not whole.
fn character(bytes: &[u8]) -> Option<(u32, usize)> {
    let length = match bytes[0] {
        0..0x80 => 1,
        0xc2..0xe0 => 2,
        0xe0..0xf0 => 3,
        0xf0..0xf5 => 4,
        _ => return None,
    };
    let whole = bytes.get(..length)?;
    whole[1..].iter().all(|byte| is_inner(*byte)).then(|| (decode(whole, 0).0, bytes.len() - length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(borders: &Borders, text: &str) -> Vec<usize> {
        let mut ends = Vec::new();
        borders.cut(text.as_bytes(), |end| ends.push(end));
        ends
    }

    #[test]
    fn characters_are_joined_by_a_token_that_holds_them_whole_or_in_part() {
        let (a, b, c) = ("\u{4e2d}", "\u{6587}", "\u{5b57}");
        let whole = format!("{a}{b}");
        let begun = [b.as_bytes(), &c.as_bytes()[..2]].concat();
        let left_over = [&c.as_bytes()[1..], a.as_bytes()].concat();
        let both = [&b.as_bytes()[2..], &b.as_bytes()[..1]].concat();
        let text = format!("{a}{b}{c}{a}");
        for (tokens, wanted) in [
            (vec![], vec![3, 6, 9, 12]),
            (vec![whole.as_bytes()], vec![6, 9, 12]),
            (vec![begun.as_slice()], vec![3, 9, 12]),
            (vec![left_over.as_slice()], vec![3, 6, 12]),
            (vec![whole.as_bytes(), &begun, &left_over], vec![12]),
        ] {
            let borders = Borders::new(tokens.into_iter()).expect("few tokens");
            assert_eq!(parts(&borders, &text), wanted);
        }
        let borders = Borders::new([both.as_slice()].into_iter()).expect("few tokens");
        assert_eq!(parts(&borders, &format!("{b}{b}{a}")), [6, 9]);
        // ASCII is not looked at.
        assert_eq!(parts(&borders, "ab\u{e9}"), [2, 4]);
    }
}
