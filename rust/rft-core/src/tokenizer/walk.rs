//! Split patterns on 64 bytes at a time.
//!
//! Whether a piece starts at a character follows from the classes of its neighbours, but for a few carries: runs are
//! extended by adding their first bit, so a run of any length costs one addition. [`Cutter::piece`] says the same one
//! piece at a time and is the definition; what the masks do not cover (white space beyond ASCII, marks out of place and
//! the like) is left to it for the block in question, which is exact because a pattern has no memory at the start of a
//! piece.

use super::cut::{Cutter, Scheme, contraction, is_han};
#[cfg(target_arch = "aarch64")]
use super::masks::Neon;
#[cfg(target_arch = "x86_64")]
use super::masks::{Avx2, Avx512};
use super::masks::{Masks, Portable, Raw, Simd};
use super::unicode::{class, decode};

/// Pieces that one call gives at most, and room for those of the block it stops in.
pub const WINDOW: usize = 1024;
const SLACK: usize = 192;

type High = [u64; 11];

/// A stretch of text that is being cut.
pub struct Walk {
    /// Where the current block starts; past the end when all is done.
    at: usize,
    end: usize,
    /// The last border given, or the start.
    last: usize,
    /// Whether no block was read yet.
    fresh: bool,
    /// Masks of the current block. Beyond the end of the text all is space.
    now: Raw,
    /// Bytes of characters beyond ASCII, by class; [`HAN`] and [`WEIRD`] beside. Of the current block, of the next one,
    /// and those of its first character that lie in the one behind. All zero where a block is ASCII.
    high: High,
    next_high: High,
    spill: High,
    carry: Carry,
}

/// The ends of pieces, in order.
pub struct Ends {
    list: Vec<u32>,
    count: usize,
}

impl Default for Ends {
    fn default() -> Ends {
        Ends { list: vec![0; WINDOW + SLACK], count: 0 }
    }
}

impl Ends {
    /// Those given by the last call.
    pub fn get(&self) -> &[u32] {
        &self.list[..self.count]
    }

    #[inline(always)]
    fn push(&mut self, end: usize) {
        self.list[self.count] = end as u32;
        self.count += 1;
    }
}

const HAN: usize = 9;
const WEIRD: usize = 10;

/// What a block tells the next one; bit 0 stands for its last byte.
#[derive(Clone, Copy, Default)]
struct Carry {
    letter: u64,
    other: u64,
    blank: u64,
    inner_space: u64,
    white: u64,
    newline: u64,
    swallowed: u64,
    apostrophe: u64,
    /// The character before is a sign at which a piece starts.
    lone: u64,
    number: u64,
    groups: [u64; 3],
    /// Starts to add and to take away.
    extra: u64,
    clear: u64,
    lower: u64,
    caseless: u64,
    ascii: u64,
    line: u64,
    /// Where the last contraction ended; 0 for none.
    contracted: usize,
}

impl Walk {
    /// Of the text from `start` to `end`, which must be borders of characters, `start` before `end`.
    pub fn new(start: usize, end: usize) -> Walk {
        let none = High::default();
        let (now, carry) = (Raw::default(), Carry::default());
        Walk { at: start, end, last: start, fresh: true, now, high: none, next_high: none, spill: none, carry }
    }

    /// Gives the next ends; the last one of all is the end of the text. False where none are left.
    pub fn next(&mut self, cutter: &Cutter, simd: Simd, text: &[u8], ends: &mut Ends) -> bool {
        ends.count = 0;
        if self.last >= self.end {
            return false;
        }
        match simd {
            Simd::Portable => self.by_scheme::<Portable>(cutter, text, ends),
            // SAFETY: [`Simd::all`] gives it only where the processor has these.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => unsafe { self.avx2(cutter, text, ends) },
            // SAFETY: the same.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => unsafe { self.avx512(cutter, text, ends) },
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => self.by_scheme::<Neon>(cutter, text, ends),
        }
        true
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn avx2(&mut self, cutter: &Cutter, text: &[u8], ends: &mut Ends) {
        self.by_scheme::<Avx2>(cutter, text, ends);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn avx512(&mut self, cutter: &Cutter, text: &[u8], ends: &mut Ends) {
        self.by_scheme::<Avx512>(cutter, text, ends);
    }

    #[inline(always)]
    fn by_scheme<M: Masks>(&mut self, cutter: &Cutter, text: &[u8], ends: &mut Ends) {
        match cutter.scheme {
            Scheme::Words { .. } => self.run::<M, WORDS>(cutter, text, ends),
            Scheme::Gpt2 { .. } => self.run::<M, GPT2>(cutter, text, ends),
            Scheme::Cased { .. } => self.run::<M, CASED>(cutter, text, ends),
            Scheme::DeepSeek => self.run::<M, DEEPSEEK>(cutter, text, ends),
            Scheme::Spaces { .. } => self.run::<M, SPACES>(cutter, text, ends),
            Scheme::Whole => {
                ends.push(self.end);
                self.last = self.end;
            }
        }
    }

    #[inline(always)]
    fn run<M: Masks, const KIND: u8>(&mut self, cutter: &Cutter, text: &[u8], ends: &mut Ends) {
        let options = Options::of(cutter.scheme);
        let end = self.end;
        if std::mem::take(&mut self.fresh) {
            self.now = self.begin::<M, KIND>(cutter, &options, text);
        }
        // Out of memory and into registers.
        let (mut now, mut carry) = (self.now, self.carry);
        while ends.count < WINDOW {
            if self.at >= end {
                if self.last < end {
                    ends.push(end);
                    self.last = end;
                }
                break;
            }
            let next = self.read::<M>(text, self.at + 64);
            if KIND != SPACES && next.high != 0 {
                self.classify::<KIND>(cutter, &options, text, self.at + 64, &next);
            }
            let starts = if now.high == 0 {
                self.starts::<KIND, true>(&options, text, &now, &next, &mut carry)
            } else if self.high[WEIRD] == 0 {
                self.starts::<KIND, false>(&options, text, &now, &next, &mut carry)
            } else {
                None
            };
            let Some(mut starts) = starts else {
                // Piece by piece from the last border until the block is behind.
                let until = (self.at + 64).min(end);
                while self.last < until {
                    self.last = cutter.piece(text, self.last, end);
                    ends.push(self.last);
                }
                self.at = self.last;
                carry = Carry::default();
                if self.at < end {
                    now = self.begin::<M, KIND>(cutter, &options, text);
                }
                continue;
            };
            if end - self.at < 64 {
                starts &= (1 << (end - self.at)) - 1;
            }
            if self.at == self.last {
                starts &= !1;
            }
            if KIND == SPACES && options.glue {
                let mut all = starts;
                while all != 0 {
                    let bit = all.trailing_zeros() as usize;
                    all &= all - 1;
                    if cutter.glues(text, self.at + bit) {
                        starts &= !(1 << bit);
                    }
                }
            }
            if let Some(room) = ends.list[ends.count..].first_chunk_mut::<80>() {
                // SAFETY: `M` is what the caller's features are for.
                unsafe { M::list(starts, self.at as u32, room) };
            }
            ends.count += starts.count_ones() as usize;
            if starts != 0 {
                self.last = self.at + 63 - starts.leading_zeros() as usize;
            }
            self.at += 64;
            if now.high | next.high != 0 {
                self.high = self.next_high;
                self.next_high = High::default();
            }
            now = next;
        }
        (self.now, self.carry) = (now, carry);
    }

    /// Reads the block at which the walk stands as its first.
    #[inline(always)]
    fn begin<M: Masks, const KIND: u8>(&mut self, cutter: &Cutter, options: &Options, text: &[u8]) -> Raw {
        (self.next_high, self.spill) = (High::default(), High::default());
        let raw = self.read::<M>(text, self.at);
        if KIND != SPACES && raw.high != 0 {
            self.classify::<KIND>(cutter, options, text, self.at, &raw);
        }
        self.high = std::mem::take(&mut self.next_high);
        raw
    }

    /// The masks of the block at a position.
    #[inline(always)]
    fn read<M: Masks>(&self, text: &[u8], at: usize) -> Raw {
        // SAFETY: `M` is what the caller's features are for.
        let of = |bytes: &[u8; 64]| unsafe { M::of(bytes) };
        match text[..self.end].get(at..).and_then(|rest| rest.first_chunk::<64>()) {
            Some(chunk) => of(chunk),
            None => {
                let mut chunk = [b' '; 64];
                if at < self.end {
                    chunk[..self.end - at].copy_from_slice(&text[at..self.end]);
                }
                of(&chunk)
            }
        }
    }

    /// Sets the classes of the characters beyond ASCII of the next block, which is at a position; those of a character
    /// that began before it are in `spill`.
    #[inline(always)]
    fn classify<const KIND: u8>(&mut self, cutter: &Cutter, options: &Options, text: &[u8], at: usize, raw: &Raw) {
        self.next_high = std::mem::take(&mut self.spill);
        let mut leads = raw.high & !raw.inner;
        while leads != 0 {
            let bit = leads.trailing_zeros();
            leads &= leads - 1;
            let (code, length) = decode(text, at + bit as usize);
            let kind = cutter.class(code);
            let slot = options.slot::<KIND>(code, kind);
            let bits = ((1u64 << length) - 1) << bit;
            self.next_high[slot] |= bits;
            if bit as usize + length > 64 {
                self.spill[slot] |= (1 << (bit as usize + length - 64)) - 1;
            }
        }
    }

    /// The starts of pieces in the current block, which may be known to be ASCII; none where it must be cut piece by
    /// piece.
    #[inline(always)]
    fn starts<const KIND: u8, const ASCII: bool>(
        &self,
        options: &Options,
        text: &[u8],
        now: &Raw,
        next: &Raw,
        carry: &mut Carry,
    ) -> Option<u64> {
        let (mut raw, c) = (*now, *carry);
        if ASCII {
            (raw.high, raw.inner) = (0, 0);
        }
        let of = |class: u8| if ASCII { 0 } else { self.high[usize::from(class)] };
        let mut d = Carry { contracted: c.contracted, ..Carry::default() };
        if KIND == SPACES {
            let before = raw.blank << 1 | c.blank;
            d.blank = raw.blank >> 63;
            let mut starts = raw.blank & !before;
            if options.newlines {
                let line = raw.feed;
                let before = line << 1 | c.line;
                d.line = line >> 63;
                starts |= line & !before | !line & before;
            }
            *carry = d;
            return Some(starts);
        }
        let ascii_other = !(raw.letter | raw.digit | raw.space | raw.high);
        let cased = of(class::UPPER) | of(class::LOWER);
        let caseless = of(class::CASELESS);
        let mark = of(class::MARK);
        let signs = of(class::PUNCTUATION) | of(class::SYMBOL);
        let number = raw.digit | of(class::NUMBER);
        let white = raw.space;
        let han = if KIND == DEEPSEEK { of(HAN as u8) } else { 0 };
        let letter = raw.letter | cased | caseless | if options.marks { mark } else { 0 };
        let other = ascii_other | signs | of(class::OTHER) | if options.marks { 0 } else { mark };
        // White space that the next block starts with may be beyond ASCII.
        if white >> 63 & self.next_high[WEIRD] & 1 == 1 {
            return None;
        }
        let next_white = next.space & 1;
        let next_number = next.digit & 1 | self.next_high[usize::from(class::NUMBER)] & 1;
        let after_white = white >> 1 | next_white << 63;
        let before_letter = letter << 1 | c.letter;
        let before_other = other << 1 | c.other;
        let before_blank = raw.blank << 1 | c.blank;
        d.letter = letter >> 63;
        d.other = other >> 63;
        d.blank = raw.blank >> 63;
        let other_start = other & !before_other;
        let free = other_start & !before_blank;
        let letter_start = letter & !before_letter;
        d.apostrophe = (raw.apostrophe & free) >> 63;

        if KIND == GPT2 {
            let before_number = number << 1 | c.number;
            d.number = number >> 63;
            let mut starts = free | letter_start & !before_blank;
            if options.digits == 1 {
                starts |= number & !raw.inner;
            } else {
                starts |= number & !before_number & !before_blank;
            }
            let before_white = white << 1 | c.white;
            d.white = white >> 63;
            let after_number = if options.digits == 1 { number >> 1 | next_number << 63 } else { 0 };
            starts |= white & !before_white | white & !after_white & !after_number;
            let mut found = ((raw.apostrophe & free) << 1 | c.apostrophe) & letter;
            starts |= c.extra;
            while found != 0 {
                let bit = found.trailing_zeros() as usize;
                found &= found - 1;
                let length = contraction(&text[self.at + bit - 1..self.end], false);
                if length > 0 {
                    starts &= !(1 << bit);
                    let stop = bit + length - 1;
                    self.start_at(stop, letter, next, options, &mut starts, &mut d);
                }
            }
            *carry = d;
            return Some(starts);
        }

        // White space: newlines behind signs belong to them; the rest of a run ends with its last newline; of what
        // follows that the last character stands alone or leads a word.
        let (sum, _) = raw.newline.overflowing_add(raw.newline & (before_other | c.swallowed));
        let swallowed = raw.newline & !sum;
        d.swallowed = swallowed >> 63;
        let run = white & !swallowed;
        let run_start = run & !(run << 1 | c.white);
        d.white = run >> 63;
        let inner = run & !raw.newline;
        let before_inner = inner << 1 | c.inner_space;
        d.inner_space = inner >> 63;
        let lines = raw.newline & run;
        let mut behind_line = inner & (lines << 1 | c.newline);
        d.newline = lines >> 63;
        // But for those that another newline ends, be it in the next block.
        let mut bad = lines & before_inner;
        while bad != 0 {
            let bit = bad.trailing_zeros();
            bad &= bad - 1;
            let gap = !inner & ((1u64 << bit) - 1);
            let start = 64 - gap.leading_zeros();
            behind_line &= !(1u64.checked_shl(start).unwrap_or(0));
        }
        let stops = !(next.space & !next.newline);
        let stop = stops & stops.wrapping_neg();
        if inner >> 63 == 1 && (stop == 0 || stop & (next.newline | next.high) != 0) {
            let start = 64 - (!inner).leading_zeros();
            if behind_line >> start.min(63) & 1 == 1 && start < 64 {
                let rest = &text[(self.at + 64).min(self.end)..self.end];
                match rest.iter().find(|byte| !matches!(byte, b' ' | 9 | 11 | 12)) {
                    Some(10 | 13) => behind_line &= !(1 << start),
                    Some(0x80..) => return None,
                    _ => {}
                }
            }
        }
        let mut last_white = inner & !after_white;

        // Numbers in groups.
        let number_start = if options.digits == 1 {
            number & !raw.inner
        } else if number == 0 && c.groups == [0; 3] {
            0
        } else {
            let mut starts = 0;
            let mut first = number & !(number << 1 | c.number) | c.groups[2] & number;
            let (mut one, mut two) = (c.groups[0], c.groups[1]);
            loop {
                starts |= first;
                let second = (first << 1 | one) & number;
                let third = (second << 1 | two) & number;
                d.groups[0] |= first >> 63;
                d.groups[1] |= second >> 63;
                d.groups[2] |= third >> 63;
                first = third << 1 & number;
                (one, two) = (0, 0);
                if first == 0 {
                    break;
                }
            }
            starts
        };
        d.number = number >> 63;

        if KIND == DEEPSEEK {
            if raw.control != 0 {
                return None;
            }
            // Numbers and Han runs end the text for the pattern that cuts white space.
            let stop = number | han;
            let next_stop = next_number | self.next_high[HAN] & 1;
            last_white &= !(stop >> 1 | next_stop << 63);
            let before_han = han << 1 | c.lone;
            d.lone = han >> 63;
            let lead = ((free & !raw.high) << 1 | c.ascii) & raw.letter;
            d.ascii = (free & !raw.high) >> 63;
            // ASCII letters behind a sign end where others begin.
            let (sum, over) = raw.letter.overflowing_add(lead | c.extra & raw.letter);
            let other_letter = sum & !raw.letter & letter | c.extra & !raw.letter & letter;
            d.extra = u64::from(over);
            let starts = free
                | letter_start & !before_inner & !lead
                | other_letter
                | number_start
                | han & !before_han
                | run_start
                | behind_line
                | last_white;
            *carry = d;
            return Some(starts);
        }

        // A sign at which a piece starts leads the word behind it, however many bytes it has.
        let (sum, over) = (free << 1 | c.lone).overflowing_add(raw.inner);
        let behind_lone = sum & !raw.inner;
        d.lone = u64::from(over) | free >> 63;
        let led = before_inner | behind_lone & letter;
        let mut starts = free | letter_start & !led | number_start | run_start | behind_line | last_white;
        starts = starts & !c.clear | c.extra;

        if KIND == WORDS {
            let mut found = ((raw.apostrophe & free) << 1 | c.apostrophe) & letter;
            while found != 0 {
                let bit = found.trailing_zeros() as usize;
                found &= found - 1;
                let length = contraction(&text[self.at + bit - 1..self.end], true);
                if length > 0 {
                    self.start_at(bit + length - 1, letter, next, options, &mut starts, &mut d);
                }
            }
            *carry = d;
            return Some(starts);
        }

        // Cased: an upper-case letter behind a lower-case one starts a piece.
        let upper = raw.upper | of(class::UPPER);
        let lower = raw.letter & !raw.upper | of(class::LOWER);
        let either = caseless | mark;
        let before_either = either << 1 | c.caseless;
        d.caseless = either >> 63;
        let slash = raw.slash & (swallowed << 1 | c.swallowed);
        let lost_mark = mark & !raw.inner & !before_letter;
        if upper & before_either | slash | lost_mark != 0 {
            return None;
        }
        let behind_lower = lower << 1 | c.lower;
        d.lower = lower >> 63;
        starts |= upper & behind_lower & !raw.inner & before_letter & !c.clear;
        if options.contractions {
            let mut found = raw.apostrophe & free & before_letter;
            while found != 0 {
                let bit = found.trailing_zeros() as usize;
                found &= found - 1;
                let place = self.at + bit;
                let length = contraction(&text[place..self.end], true);
                if length > 0 && place != d.contracted {
                    let gone = ((1u128 << length) - 1) << bit;
                    starts &= !(gone as u64);
                    d.clear |= (gone >> 64) as u64;
                    self.start_at(bit + length, letter, next, options, &mut starts, &mut d);
                    d.contracted = place + length;
                }
            }
        }
        *carry = d;
        Some(starts)
    }

    /// Notes a start at a bit of this block or the next one, if a letter stands there.
    #[inline(always)]
    fn start_at(&self, bit: usize, letter: u64, next: &Raw, options: &Options, starts: &mut u64, d: &mut Carry) {
        if self.at + bit >= self.end {
            return;
        }
        if bit < 64 {
            *starts |= letter & 1 << bit;
        } else {
            d.extra |= self.next_letters(next, options) & 1 << (bit - 64);
        }
    }

    fn next_letters(&self, next: &Raw, options: &Options) -> u64 {
        let high = &self.next_high;
        let marks = if options.marks { high[class::MARK as usize] } else { 0 };
        let cased = high[class::UPPER as usize] | high[class::LOWER as usize];
        next.letter | cased | high[class::CASELESS as usize] | marks
    }
}

const WORDS: u8 = 0;
const GPT2: u8 = 1;
const CASED: u8 = 2;
const DEEPSEEK: u8 = 3;
const SPACES: u8 = 4;

/// What the scheme says, as plain numbers.
struct Options {
    marks: bool,
    /// 0 for any number.
    digits: usize,
    contractions: bool,
    newlines: bool,
    glue: bool,
}

impl Options {
    fn of(scheme: Scheme) -> Options {
        let none = Options { marks: false, digits: 0, contractions: false, newlines: false, glue: false };
        match scheme {
            Scheme::Gpt2 { digits } => Options { digits: usize::from(digits), ..none },
            Scheme::Words { marks, digits } => Options { marks, digits, ..none },
            Scheme::Cased { contractions, digits } => Options { marks: true, digits, contractions, ..none },
            Scheme::DeepSeek => Options { marks: true, digits: 3, ..none },
            Scheme::Spaces { newlines } => Options { newlines, glue: true, ..none },
            Scheme::Whole => none,
        }
    }

    /// The mask that a character beyond ASCII belongs to.
    #[inline(always)]
    fn slot<const KIND: u8>(&self, code: u32, kind: u8) -> usize {
        if kind == class::SPACE || kind == class::NUMBER && self.digits > 1 {
            return WEIRD;
        }
        if KIND == DEEPSEEK {
            let letter = (class::UPPER..=class::CASELESS).contains(&kind);
            if is_han(code) {
                return if letter { HAN } else { WEIRD };
            }
            if kind == class::OTHER {
                return WEIRD;
            }
        }
        usize::from(kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::unicode::{Classes, Version};

    const PARTS: &[&str] = &[
        "a",
        "word",
        "Word",
        "WORD",
        "helloWorld",
        "ABCdef",
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        " \n",
        "\n ",
        "\n  \n    ",
        "1",
        "22",
        "4444444",
        "'",
        "'s",
        "'S",
        "'ll",
        "'Re",
        "'\u{17f}",
        "''",
        "!",
        "((",
        "/",
        "//",
        "!\n/",
        "-",
        "\u{e9}",
        "\u{c9}",
        "\u{4e2d}\u{6587}",
        "\u{3042}",
        "\u{30fb}",
        "\u{3000}",
        "\u{a0}",
        "\u{301}",
        "\u{2764}\u{fe0f}",
        "\u{1f600}",
        "\u{201c}",
        "\u{bd}",
        "\u{664}\u{665}",
        "\u{1d573}",
        "\u{1c5}",
        "\u{2b0}",
        "\u{0}",
        "\u{7f}",
        "\u{200b}",
        "\u{939}\u{93f}",
        "> </",
        "><",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "                                   ",
        "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n",
        "......................................................................",
        "\u{4e2d}\u{6587}\u{4e2d}\u{6587}\u{4e2d}\u{6587}\u{4e2d}\u{6587}\u{4e2d}\u{6587}\u{4e2d}\u{6587}\u{4e2d}\u{6587}\u{4e2d}\u{6587}",
    ];

    fn schemes() -> Vec<Scheme> {
        let mut schemes = vec![Scheme::DeepSeek, Scheme::Whole];
        for flag in [false, true] {
            schemes.push(Scheme::Gpt2 { digits: flag });
            schemes.push(Scheme::Spaces { newlines: flag });
            for digits in [1, 3] {
                schemes.push(Scheme::Words { marks: flag, digits });
                schemes.push(Scheme::Cased { contractions: flag, digits });
            }
        }
        schemes
    }

    #[test]
    fn blocks_cut_where_pieces_do() {
        let rounds = std::env::var("RFT_FUZZ_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(if cfg!(miri) {
            2
        } else {
            300
        });
        let mut seed = 77u64;
        let mut below = |most: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % most
        };
        let mut glue = [false; 256];
        glue[usize::from(b'>')] = true;
        let cutters: Vec<Cutter> =
            schemes().into_iter().map(|scheme| Cutter::new(scheme, Classes::of(Version::V16), glue)).collect();
        for _ in 0..rounds {
            // Few kinds of parts a text, so that runs and repeats come up.
            let kinds: Vec<&str> = (0..1 + below(12)).map(|_| PARTS[below(PARTS.len())]).collect();
            let text: String = (0..below(120)).map(|_| kinds[below(kinds.len())]).collect();
            let borders: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            let start = if borders.is_empty() { 0 } else { borders[below(borders.len())] };
            let end = text.len();
            for cutter in &cutters {
                let (mut wanted, mut at) = (Vec::new(), start);
                while at < end {
                    at = cutter.piece(text.as_bytes(), at, end);
                    wanted.push(at as u32);
                }
                for simd in Simd::all() {
                    let (mut given, mut ends) = (Vec::new(), Ends::default());
                    let mut walk = Walk::new(start, end);
                    while walk.next(cutter, simd, text.as_bytes(), &mut ends) {
                        given.extend_from_slice(ends.get());
                    }
                    assert_eq!(given, wanted, "{:?} {simd:?} {:?}", cutter.scheme, &text[start..]);
                }
            }
        }
    }
}
